"""Work on the machines of a Ray cluster: batches of requests, and parts of text to encode.

Its workers run what the processes of one machine run. Ray starts a worker that has ended again, and asks it again for
what it owed; a result arrives here once, and this process alone writes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

from monoblock.data.prepare import Encode, PartEncoder
from monoblock.errors import ConfigError, InputError, MonoblockError
from monoblock.tokenizers.tokenizer import Tokenizer

RETRIES = 3  # of a request or a part whose worker has ended
RESTARTS = {"max_restarts": -1, "max_task_retries": RETRIES}


@contextmanager
def connect(address: str | None) -> Iterator[Cluster | None]:
    """Connect to a cluster in a block; the errors of its workers are raised as if they were those of this process."""
    if address is None:
        yield None
        return
    if find_spec("ray") is None:
        raise ConfigError("--ray needs ray; write pip install 'monoblock[ray]'")
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    logging.getLogger("ray").setLevel(logging.ERROR)
    options = {"include_dashboard": False} if address == "local" else {}
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal():  # else Ray would wait for minutes
            socket.create_connection((host, int(port)), 5).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options)
    except (OSError, RuntimeError, ValueError) as problem:
        raise InputError(f"there is no Ray cluster at {address} ({problem!s:.120}); write --ray local") from None
    try:
        yield Cluster(ray)
    except RayTaskError as problem:
        raise problem.cause from None
    except RayActorError:
        raise MonoblockError(
            f"workers of the cluster have ended {RETRIES + 1} times at the same work, perhaps for lack of memory; "
            "run the same command again, and it goes on"
        ) from None
    finally:
        ray.shutdown()


class Cluster:
    """The cluster that this process is connected to; `ray` is the module."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self.num_cores = int(ray.cluster_resources()["CPU"])

    @contextmanager
    def encoders(self, tokenizer_folder: Path, validation: float, jobs: int) -> Iterator[Encode]:
        """Encode parts in processes of the cluster."""
        if jobs > self.num_cores:
            raise ConfigError(f"--jobs {jobs} is more than the {self.num_cores} cores of this cluster; write fewer")
        encoder = self.ray.remote(_Encoder).options(**RESTARTS, num_cpus=1)
        workers = cycle([encoder.remote(Path.cwd(), tokenizer_folder, validation) for _ in range(jobs)])
        yield lambda part: next(workers).__call__.remote(part).future()

    def share(self, workers: int | None, *, use_gpus: bool) -> tuple[int, dict[str, float]]:
        """Return the number of workers with a model, and what each takes of the cluster.

        By default there is one for each GPU or, without GPUs, for each machine.
        """
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        gpus = int(sum(node.get("GPU", 0) for node in nodes)) if use_gpus else 0
        count = workers or gpus or len(nodes)
        cores = int(min(node.get("CPU", 0) for node in nodes)) // -(-count // len(nodes))
        if count > gpus > 0 or (not gpus and not cores):
            raise ConfigError(f"--workers {count} is more than this cluster has {'GPUs' if gpus else 'cores'}")
        return count, {"num_gpus": 1} if gpus else {"num_cpus": cores}


class RemoteReplicas:
    """Processes of the cluster, each with the models that `load` returns, which answer requests (see `Answerer`)."""

    def __init__(self, cluster: Cluster, load: Callable[[], Sequence[Any]], count: int, resources: Any) -> None:
        from monoblock.serving.replica import Replica

        self.ray = cluster.ray
        replica = self.ray.remote(Replica).options(**RESTARTS, **resources, max_concurrency=1000)
        here = partial(_load_at, Path.cwd(), load)
        key = secrets.token_urlsafe()
        self.num_open = {replica.remote(here, [key]): 0 for _ in range(count)}

    async def start(self) -> int:
        async def start(replica: Any) -> int:
            return await replica.start.remote()

        return sum(await asyncio.gather(*map(start, self.num_open)))

    async def stop(self) -> None:
        for replica in self.num_open:
            self.ray.kill(replica)

    async def ask(self, url: str, body: dict[str, Any]) -> tuple[int, Any]:
        replica: Any = min(self.num_open, key=self.num_open.__getitem__)
        self.num_open[replica] += 1
        try:
            return await replica.ask.remote(url, body)
        except self.ray.exceptions.RayActorError:  # one request that fails does not end the batch
            return 500, None
        finally:
            self.num_open[replica] -= 1


def _load_at(folder: Path, load: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    os.chdir(folder)  # of the command, in which its paths begin
    return load()


class _Encoder(PartEncoder):
    def __init__(self, folder: Path, tokenizer_folder: Path, validation: float) -> None:
        os.chdir(folder)
        super().__init__(Tokenizer.from_pretrained(tokenizer_folder), validation)
