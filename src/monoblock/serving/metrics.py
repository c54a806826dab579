"""Prometheus metrics of a server (`/metrics`)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from monoblock.serving.served_model import ServedModel

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    def __init__(self, models: Iterable[ServedModel]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "monoblock_requests", "Answers by route and status", ["route", "status"], registry=self.registry
        )
        options: dict[str, Any] = {"buckets": SECONDS, "registry": self.registry}
        self.first_token = Histogram("monoblock_time_to_first_token_seconds", "From the request to text", **options)
        self.next_token = Histogram("monoblock_time_per_token_seconds", "Between tokens of a sequence", **options)
        self.registry.register(_Engines(list(models)))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class TokenClock:
    """The times of the tokens of one request."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics, self.last, self.is_first = metrics, time.perf_counter(), True

    def tick(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        now = time.perf_counter()
        if self.is_first:
            self.metrics.first_token.observe(now - self.last)
        else:
            self.metrics.next_token.observe((now - self.last) / num_tokens)
        self.last, self.is_first = now, False


class _Engines:
    """The state of the engines, read when somebody asks."""

    def __init__(self, models: list[ServedModel]) -> None:
        self.models = models

    def collect(self) -> Iterable[Metric]:
        gauges = {
            "queue": ("Requests that wait", lambda e: len(e.scheduler.waiting)),
            "batch": ("Requests that run", lambda e: len(e.running)),
            "pages_in_use": ("Pages of keys and values in use", lambda e: e.pages.num_in_use),
            "pages": ("Pages of keys and values", lambda e: e.pages.count - 1),
        }
        counters = {
            "steps": ("Steps of the engine", lambda loop: loop.statistics.steps),
            "step_seconds": ("Seconds in steps", lambda loop: loop.statistics.step_seconds),
            "generated_tokens": ("Generated tokens", lambda loop: loop.statistics.tokens),
            "cancelled": ("Requests whose client has gone", lambda loop: loop.statistics.cancelled),
            "prefix_tokens": ("Tokens of prompts found in pages", lambda loop: loop.engine.scheduler.num_prefix_tokens),
            "preemptions": ("Requests that had to wait again", lambda loop: loop.engine.scheduler.num_preemptions),
        }
        served = [model for model in self.models if model.decodes]
        for name, (text, read) in gauges.items():
            family = GaugeMetricFamily(f"monoblock_{name}", text, labels=["model"])
            for model in served:
                family.add_metric([model.name], read(model.loop.engine))
            yield family
        for name, (text, read) in counters.items():
            counter = CounterMetricFamily(f"monoblock_{name}", text, labels=["model"])
            for model in served:
                counter.add_metric([model.name], read(model.loop))
            yield counter
