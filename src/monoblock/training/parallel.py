"""Several processes train as one: each reads its part of every batch, and gradients are added up before the update.

The loss of a step is the sum over all asked places divided by their number over *all* processes, so that a run on two
is the run on one, up to rounding.  Every process holds the same weights and takes the same decisions, because whatever
decides is added up first.  The one of rank 0 leads: it alone evaluates, samples and writes.
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

LONGEST = timedelta(days=1)  # others wait while the leader evaluates; when a process dies, torchrun ends the others
GRACE = 5.0  # seconds torchrun gets to end a process whose fellow has fallen


@dataclass(frozen=True)
class World:
    """A process among `size`; alone, every method gives back what it is given."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def total(self, *numbers: float) -> list[float]:
        """Each number added up over all processes."""
        if self.size == 1:
            return list(numbers)
        row = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(row)
        return row.tolist()

    def told(self, number: int) -> int:
        """The leader's number."""
        if self.size == 1:
            return number
        held = torch.tensor(number)
        dist.broadcast(held, src=0)
        return int(held)

    def gathered(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Everybody's tensors, by rank; they are of the same names and shapes and lie on the CPU."""
        out: list[dict[str, Tensor]] = [dict(tensors)] if self.size == 1 else [{} for _ in range(self.size)]
        for name, tensor in tensors.items() if self.size > 1 else ():
            parts = [torch.empty_like(tensor) for _ in range(self.size)]
            dist.all_gather(parts, tensor)
            for mine, part in zip(out, parts, strict=True):
                mine[name] = part
        return out

    def add_gradients(self, weights: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of all processes into each; a weight that none has used keeps none."""
        if self.size == 1:
            return
        trained = [weight for weight in weights if weight.requires_grad]
        used = self.total(*(weight.grad is not None for weight in trained))
        waiting = []
        for weight, count in zip(trained, used, strict=True):
            if count and weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            if weight.grad is not None:
                waiting.append(dist.all_reduce(weight.grad, async_op=True))
        for work in waiting:
            work.wait()

    def seed(self, seed: int) -> None:
        """Random numbers of its own for every process but the leader, whose are those of a run alone."""
        if self.rank:
            torch.manual_seed((seed + 0x9E3779B97F4A7C15 * self.rank) % 2**63)

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        """The leader does what is inside, then the others, who find what it wrote."""
        if not self.leads:
            self.wait()
        yield
        if self.leads:
            self.wait()

    def wait(self) -> None:
        """Until all have come here."""
        self.total(0)

    def leave(self) -> None:
        """After the last word: nobody ends before the others have done their work."""
        if self.size > 1:
            self.wait()
            dist.destroy_process_group()


ALONE = World()


def join(environment: Mapping[str, str], device: str = "auto") -> World:
    """The world torchrun has put this process into; without torchrun, one of its own."""
    size = int(environment.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in environment else 1
    if size == 1:
        return ALONE
    cuda = uses_cuda(device)
    if cuda:
        torch.cuda.set_device(int(environment["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=LONGEST)
    return World(int(environment["RANK"]), size)


def uses_cuda(device: str) -> bool:
    if ":" in device:
        raise ConfigError(f"train.device={device} is one device for all processes; leave the number out")
    return torch.cuda.is_available() and device in ("auto", "cuda")


@contextmanager
def among(world: World) -> Iterator[None]:
    """Errors of a process among others: the leader tells what all of them met, and who fell tells why.

    A process that fails takes the others with it, whose connections break, or who fail alike: torchrun ends them while
    they wait.  One that is still there afterwards has something of its own to say.
    """
    try:
        yield
    except Exception as problem:
        if world.size > 1 and not (world.leads and isinstance(problem, MonoblockError)):
            time.sleep(GRACE)
        raise


def launch(words: Sequence[str], processes: int, device: str = "auto") -> int:
    """A command of ours in so many processes of this machine, by torchrun; the exit code."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if uses_cuda(device) and processes > torch.cuda.device_count():
        raise ConfigError(f"--nproc {processes} is more than the {torch.cuda.device_count()} GPUs there are")
    # It would give each process one thread, and say so in ten lines; and would not wait for a save to end.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # a process says itself why it ends
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={processes}", "-m", "monoblock"]
    try:
        torchrun.run(torchrun.parse_args([*options, *words]))
    except ChildFailedError as problem:
        code = problem.get_first_failure()[1].exitcode
        if code < 0:
            raise MonoblockError(f"a process of the run was ended by signal {-code}; go on with --resume") from None
        return code
    except SignalException as problem:
        return 128 + int(problem.sigval)
    return 0
