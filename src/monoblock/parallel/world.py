"""The processes that train together, and what they exchange besides gradients and weights.

The loss of a step is its sum over all targets divided by the number of targets in *all* processes, so that a run on two
processes equals the run on one, up to rounding. All processes take the same decisions, because every quantity that a
decision depends on is summed over all processes first. Only the main process, rank 0, samples and reports.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from monoblock.errors import ConfigError, MonoblockError
from monoblock.parallel.faults import is_lost_connection, translate_fault

PIPELINE, DATA, TENSOR = "pipeline", "data", "tensor"  # the dimensions of the mesh
DEFAULT_TIMEOUT = 1800.0  # seconds
FAILURE_GRACE_SECONDS = 5.0  # for torchrun to end a process after another one failed
SECONDS_BETWEEN_REPORTS = 5.0  # of a process that the others wait for
SECONDS_BETWEEN_RANKS = 0.5  # for torchrun to end the other processes of a machine


@dataclass(frozen=True)
class World:
    """The rank of this process and the number of processes; with one process, collective operations change nothing.

    The ranks form a mesh. Those along its dimension "data" read different parts of every batch; those along "tensor"
    hold different parts of every matrix and read the same batch. With pipeline parallelism, those along "pipeline" hold
    different blocks and read the same batch.
    """

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    timeout: float = DEFAULT_TIMEOUT  # seconds after which a process that waits for another one fails
    group: dist.ProcessGroup | None = None  # of the exchange among all processes; None is the default group

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """The part of every batch that this process reads."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(DATA)

    @property
    def data_size(self) -> int:
        """The number of parts into which a batch is split."""
        return 1 if self.mesh is None else self.mesh[DATA].size()

    @property
    def pipeline_rank(self) -> int:
        """The pipeline stage of this process."""
        return self.mesh.get_local_rank(PIPELINE) if self.mesh is not None and self.pipeline_size > 1 else 0

    @property
    def pipeline_size(self) -> int:
        """The number of pipeline stages."""
        has_stages = self.mesh is not None and PIPELINE in (self.mesh.mesh_dim_names or ())
        return self.mesh[PIPELINE].size() if self.mesh is not None and has_stages else 1

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        """The processes that share every matrix, or None if there is only one."""
        mesh = None if self.mesh is None else self.mesh[TENSOR]
        return None if mesh is None or mesh.size() == 1 else mesh

    def all_reduce_sum(self, *numbers: float) -> list[float]:
        """Sum each number over all processes."""
        if self.size == 1:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(sums, group=self.group)
        return sums.tolist()

    def sum_over_data(self, *numbers: float) -> list[float]:
        """Sum each number over the processes that read different parts of a batch."""
        return self.sum_tensor_over_data(torch.tensor(numbers, dtype=torch.float64)).tolist()

    def sum_tensor_over_data(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes that read different parts of a batch, without a gradient."""
        if self.mesh is None or self.data_size == 1:
            return tensor
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self.mesh.get_group(DATA))
        return total

    def sum_losses(self, *losses: float) -> list[float]:
        """Sum losses over the processes; those that share matrices have computed the same, and the others parts."""
        copies = 1 if self.tensor_mesh is None else self.tensor_mesh.size()
        return [loss / copies for loss in self.all_reduce_sum(*losses)]

    def broadcast(self, number: int) -> int:
        """Return, in every process, the value of `number` in the main process."""
        if self.size == 1:
            return number
        buffer = torch.tensor(number)
        dist.broadcast(buffer, src=0, group=self.group)
        return int(buffer)

    def broadcast_list(self, numbers: list[int]) -> list[int]:
        """Return, in every process, the numbers of the main process."""
        count = self.broadcast(len(numbers))
        return [self.broadcast(number) for number in (numbers if self.is_main else [0] * count)]

    def all_gather(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the CPU tensors of all processes in the order of ranks; all must have the same names and shapes."""
        if self.size == 1:
            return [dict(tensors)]
        gathered: list[dict[str, Tensor]] = [{} for _ in range(self.size)]
        for name, tensor in tensors.items():
            buffers = [torch.empty_like(tensor) for _ in range(self.size)]
            dist.all_gather(buffers, tensor, group=self.group)
            for tensors_of_rank, buffer in zip(gathered, buffers, strict=True):
                tensors_of_rank[name] = buffer
        return gathered

    @property
    def random_part(self) -> int:
        """The number of the random stream of this process.

        Each part of a batch and each pipeline stage has its own; processes that share matrices have the same, because
        they must drop the same elements of the hidden states, which all of them compute.
        """
        return self.data_rank + self.data_size * self.pipeline_rank

    def seed_process(self, seed: int) -> None:
        """Seed torch for the random stream of this process; rank 0 has that of a single-process run."""
        if self.random_part:
            torch.manual_seed((seed + 0x9E3779B97F4A7C15 * self.random_part) % 2**63)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the `with` block in the main process first, so that the other processes find the files that it wrote."""
        if not self.is_main:
            self._wait_for_others()
        with self.long_work():
            yield
        if self.is_main:
            self._wait_for_others()

    def _wait_for_others(self) -> None:
        with self.long_work():
            pass

    @contextmanager
    def long_work(self) -> Iterator[None]:
        """Run the `with` block, which may take one process much longer than another, then wait for all processes.

        The time-out does not limit the block: while a process works, a thread of it tells the others so. A process that
        has ended, or was stopped, is still noticed. The block must not communicate with other processes.
        """
        if self.size == 1:
            yield
            return
        done, failed, problems = threading.Event(), threading.Event(), list[Exception]()

        def report() -> None:
            try:
                while True:
                    done.wait(min(SECONDS_BETWEEN_REPORTS, self.timeout / 4))
                    if failed.is_set() or not self.all_reduce_sum(not done.is_set())[0]:
                        return
            except Exception as problem:
                problems.append(problem)

        thread = threading.Thread(target=report, name="long work", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            failed.set()
            raise
        finally:
            done.set()
        thread.join()
        if problems:
            raise problems[0]

    def barrier(self) -> None:
        """Wait until all processes reach this point."""
        self.all_reduce_sum(0)

    def shut_down(self) -> None:
        """Wait for all processes, then destroy the process group."""
        if self.mesh is not None:
            self.barrier()
            dist.destroy_process_group()


SINGLE_PROCESS = World()


def init_distributed(
    environment: Mapping[str, str],
    device: str = "auto",
    tensor: Callable[[int, int], int] = lambda size, local_size: 1,
    timeout: float = DEFAULT_TIMEOUT,
    pipeline: Callable[[int], int] = lambda size: 1,
) -> World:
    """Join the process group that torchrun has set up; without torchrun return SINGLE_PROCESS.

    tensor: a function that returns how many processes share every matrix, given the number of all processes and of
        those on this machine.
    timeout: seconds after which a process that waits for another one fails.
    pipeline: a function that returns the number of pipeline stages, given the number of all processes.
    """
    if "LOCAL_RANK" not in environment:
        return SINGLE_PROCESS
    size = int(environment["WORLD_SIZE"])
    shared, stages = tensor(size, int(environment.get("LOCAL_WORLD_SIZE", size))), pipeline(size)
    cuda = uses_cuda(device)
    if cuda:
        torch.cuda.set_device(int(environment["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout))
    kind, rank = "cuda" if cuda else "cpu", int(environment["RANK"])
    return arrange_processes(kind, rank, size, shared, stages, timeout)


def arrange_processes(
    device_type: str, rank: int, size: int, tensor: int = 1, pipeline: int = 1, timeout: float = DEFAULT_TIMEOUT
) -> World:
    """Arrange the processes of the default group in a mesh; those that share no matrix and no blocks share the data."""
    sizes = {PIPELINE: pipeline} if pipeline > 1 else {}
    sizes |= {DATA: size // (tensor * pipeline), TENSOR: tensor}
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in sizes:  # the groups of the mesh do not take over the time-out of the default group
        _set_pg_timeout(timedelta(seconds=timeout), mesh.get_group(name))
    return World(rank, size, mesh, timeout)


def uses_cuda(device: str) -> bool:
    if ":" in device:
        raise ConfigError(f"the device {device} is the same for all processes; leave out the index, as in 'cuda'")
    return torch.cuda.is_available() and device in ("auto", "cuda")


@contextmanager
def defer_worker_errors(environment: Mapping[str, str], log: TextIO | None = None) -> Iterator[None]:
    """Delay the errors of all processes but the main one, so that a failure is reported once.

    When a process fails, the others fail too, with the same error or because of the broken connection. A MonoblockError
    of the main process is raised at once. All other errors are raised a few seconds later, those of other processes
    after those of the main one; if another process failed first, torchrun has ended this one by then. An error of
    PyTorch because of missing memory, a time-out or a lost connection becomes a MonoblockError.

    environment: the environment variables, which torchrun has set.
    log: a file that gets the traceback at once.
    """
    try:
        yield
    except Exception as problem:
        if log is not None:
            log.write(traceback.format_exc())
        if int(environment.get("WORLD_SIZE", 1)) == 1:
            raise
        rank, local_rank = int(environment.get("RANK", 0)), int(environment.get("LOCAL_RANK", 0))
        error = translate_fault(problem, rank) or problem
        is_cause = isinstance(error, MonoblockError) and not is_lost_connection(problem)
        if rank or not is_cause:
            grace = FAILURE_GRACE_SECONDS * (1 if rank == 0 or is_cause else 2)
            time.sleep(grace + SECONDS_BETWEEN_RANKS * local_rank)
        if error is problem:
            raise
        raise error from problem
