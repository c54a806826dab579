"""Data-parallel training: each process computes a part of every batch, and gradients are summed before the update.

The loss of a step is its sum over all targets divided by the number of targets in *all* processes, so that a run on two
processes equals the run on one, up to rounding. Every process has the same weights and takes the same decisions,
because every quantity that a decision depends on is summed over all processes first. Only the main process, rank 0,
evaluates, samples and writes files.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from monoblock.errors import ConfigError, MonoblockError

# The other processes wait while the main process evaluates; if one dies, torchrun ends the others.
COLLECTIVE_TIMEOUT = timedelta(days=1)
FAILURE_GRACE_SECONDS = 5.0  # for torchrun to end a process after another one failed


@dataclass(frozen=True)
class World:
    """The rank of this process and the number of processes; with one process, collective operations change nothing."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_reduce_sum(self, *numbers: float) -> list[float]:
        """Sum each number over all processes."""
        if self.size == 1:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(sums)
        return sums.tolist()

    def broadcast(self, number: int) -> int:
        """Return, in every process, the value of `number` in the main process."""
        if self.size == 1:
            return number
        buffer = torch.tensor(number)
        dist.broadcast(buffer, src=0)
        return int(buffer)

    def all_gather(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the CPU tensors of all processes in the order of ranks; all must have the same names and shapes."""
        if self.size == 1:
            return [dict(tensors)]
        gathered: list[dict[str, Tensor]] = [{} for _ in range(self.size)]
        for name, tensor in tensors.items():
            buffers = [torch.empty_like(tensor) for _ in range(self.size)]
            dist.all_gather(buffers, tensor)
            for tensors_of_rank, buffer in zip(gathered, buffers, strict=True):
                tensors_of_rank[name] = buffer
        return gathered

    def all_reduce_gradients(self, weights: Iterable[nn.Parameter]) -> None:
        """Sum gradients over all processes; a gradient that is None in every process stays None."""
        if self.size == 1:
            return
        trainable = [weight for weight in weights if weight.requires_grad]
        use_counts = self.all_reduce_sum(*(weight.grad is not None for weight in trainable))
        pending = []
        for weight, count in zip(trainable, use_counts, strict=True):
            if count and weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            if weight.grad is not None:
                pending.append(dist.all_reduce(weight.grad, async_op=True))
        for work in pending:
            work.wait()

    def seed_process(self, seed: int) -> None:
        """Seed torch differently in each process; rank 0 keeps the random numbers of a single-process run."""
        if self.rank:
            torch.manual_seed((seed + 0x9E3779B97F4A7C15 * self.rank) % 2**63)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the `with` block in the main process first, so that the other processes find the files that it wrote."""
        if not self.is_main:
            self.barrier()
        yield
        if self.is_main:
            self.barrier()

    def barrier(self) -> None:
        """Wait until all processes reach this point."""
        self.all_reduce_sum(0)

    def shut_down(self) -> None:
        """Wait for all processes, then destroy the process group."""
        if self.size > 1:
            self.barrier()
            dist.destroy_process_group()


SINGLE_PROCESS = World()


def init_distributed(environment: Mapping[str, str], device: str = "auto") -> World:
    """Join the process group that torchrun has set up; without torchrun return SINGLE_PROCESS."""
    size = int(environment.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in environment else 1
    if size == 1:
        return SINGLE_PROCESS
    cuda = uses_cuda(device)
    if cuda:
        torch.cuda.set_device(int(environment["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=COLLECTIVE_TIMEOUT)
    return World(int(environment["RANK"]), size)


def uses_cuda(device: str) -> bool:
    if ":" in device:
        raise ConfigError(
            f"train.device={device} is the same device for all processes; leave out the index, as in 'cuda'"
        )
    return torch.cuda.is_available() and device in ("auto", "cuda")


@contextmanager
def defer_worker_errors(world: World) -> Iterator[None]:
    """Delay the errors of all processes but the main one, so that a failure is reported once.

    When a process fails, the others fail too, with the same error or because of the broken connection. A MonoblockError
    of the main process is raised at once. All other errors are raised a few seconds later; if another process failed
    first, torchrun has ended this one by then.
    """
    try:
        yield
    except Exception as problem:
        if world.size > 1 and not (world.is_main and isinstance(problem, MonoblockError)):
            time.sleep(FAILURE_GRACE_SECONDS)
        raise


def launch(argv: Sequence[str], processes: int, device: str = "auto") -> int:
    """Run a monoblock command in several processes on this machine with torchrun; return the exit code."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if uses_cuda(device) and processes > torch.cuda.device_count():
        raise ConfigError(
            f"--nproc {processes} is more than the {torch.cuda.device_count()} GPUs of this machine; lower --nproc"
        )
    # Without these variables, torchrun gives each process one thread, with a long warning, and kills it during a save.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # each process reports its own error
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={processes}", "-m", "monoblock"]
    try:
        torchrun.run(torchrun.parse_args([*options, *argv]))
    except ChildFailedError as problem:
        code = problem.get_first_failure()[1].exitcode
        if code < 0:
            raise MonoblockError(f"a process of the run was ended by signal {-code}; continue with --resume") from None
        return code
    except SignalException as problem:
        return 128 + int(problem.sigval)
    return 0
