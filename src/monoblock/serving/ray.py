"""The server on the machines of a Ray cluster.

    serve run monoblock.serving.ray:app model=runs/demo-1 api_key_file=keys.txt replicas=2

A front checks keys and hands each request to a replica (relay.py), a process with the models.  Ray starts replicas that
die again, and as many as there is work for.
"""
# Annotations are no strings here: Ray reads that of `app`.

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from monoblock.runs.device import resolve_device
from monoblock.runs.load import load
from monoblock.serving.app import ReplicaLost
from monoblock.serving.engine_loop import QueueFull
from monoblock.serving.relay import build_relay
from monoblock.serving.replica import Message, Replica
from monoblock.serving.security import Gate, read_keys
from monoblock.serving.served_model import ServedModel, load_models

MAX_OPEN = 4096  # requests at a time
SAME_BEGINNING_SAME_REPLICA = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"


class Arguments(BaseModel):
    """The arguments of the application; those that `monoblock serve` has as options mean the same."""

    model_config = ConfigDict(extra="forbid")

    model: str | list[str]
    api_key_file: Path
    allow_host: str | list[str] = []
    device: str | None = None
    dtype: str | None = None
    exact: bool = False
    max_rows: int | None = None
    max_queue: int = 256
    replicas: int = 1
    max_replicas: int | None = None  # above `replicas`: as many as there is work for
    at_once: int = 64  # requests that a replica answers at a time; further ones go to others
    cpus: float = 1  # cores of a replica
    gpus: float = 0


def load_served(models: list[str], device: str | None, dtype: str | None, **options: Any) -> list[ServedModel]:
    name, kind = resolve_device(device, dtype)
    return load_models(models, partial(load, device=name, dtype=kind), **options)


class ModelReplica(Replica):
    """A process that answers; it is ready when its models are loaded."""

    async def __init__(self, *args: Any) -> None:  # type: ignore[misc]  # Ray waits for it
        super().__init__(*args)
        await self.start()

    def check_health(self) -> None:
        """Have Ray replace the process when an engine has ended."""
        if not all(model.loop.is_alive for model in self.models):
            raise RuntimeError("an engine has ended")


@serve.ingress()
class Front:
    """The application that clients reach."""

    def __init__(self, replicas: DeploymentHandle, keys: list[str], hosts: list[str]) -> None:
        self.replicas, self.keys, self.hosts = replicas, keys, hosts

    def __serve_build_asgi_app__(self) -> Gate:
        return Gate(build_relay(self.ask), self.keys, self.hosts)

    async def ask(self, scope: Message, body: bytes, beginning: str | None) -> AsyncGenerator[Message, None]:
        """Yield the answer of a replica to a request."""
        answer = self.replicas.options(stream=True, session_id=beginning or "").messages.remote(scope, body)
        try:
            async for message in answer:
                yield message
        except RayActorError:
            raise ReplicaLost("the process that answered has ended; send the request again") from None
        except BackPressureError:
            raise QueueFull("as many requests are waiting as this server takes; try again") from None
        except (asyncio.CancelledError, GeneratorExit):  # the client has gone
            answer.cancel()
            raise


def app(args: Arguments) -> serve.Application:
    """Build the application."""
    models, hosts = ([given] if isinstance(given, str) else given for given in (args.model, args.allow_host))
    keys = read_keys(args.api_key_file)
    options = args.model_dump(include={"device", "dtype", "exact", "max_rows", "max_queue"})
    number: dict[str, Any] = {"num_replicas": args.replicas}
    if args.max_replicas is not None:
        limits = {"min_replicas": args.replicas, "max_replicas": args.max_replicas}
        number = {"autoscaling_config": AutoscalingConfig(**limits, target_ongoing_requests=args.at_once / 2)}
    replicas = serve.deployment(
        **number,
        max_ongoing_requests=args.at_once,
        max_queued_requests=args.max_queue,
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
        request_router_config=RequestRouterConfig(request_router_class=SAME_BEGINNING_SAME_REPLICA),
    )(ModelReplica).bind(partial(load_served, models, **options), keys, hosts)
    front = serve.deployment(max_ongoing_requests=MAX_OPEN, ray_actor_options={"num_cpus": 0})
    return front(Front).bind(replicas, keys, hosts)
