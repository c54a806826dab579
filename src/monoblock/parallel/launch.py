"""Start a monoblock command in several processes on this machine."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from monoblock.errors import ConfigError, MonoblockError
from monoblock.parallel.faults import has_ended, log_path
from monoblock.parallel.world import uses_cuda


def launch(
    argv: Sequence[str],
    processes: int,
    device: str = "auto",
    folder: Path | None = None,
    *,
    max_restarts: int = 0,
    machines: int = 1,
    head: str = "",
) -> int:
    """Run a monoblock command in several processes on this machine with torchrun; return the exit code.

    folder: the run folder, in which every process writes a log, if the command trains.
    max_restarts: how often all processes are started again after one of them failed.
    machines: how many machines run this command with the same arguments.
    head: with several machines, the name of one of them and a free port of it, as in "node1:29500".
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    if uses_cuda(device) and processes > torch.cuda.device_count():
        raise ConfigError(
            f"--nproc {processes} is more than the {torch.cuda.device_count()} GPUs of this machine; lower --nproc"
        )
    # Without these variables, torchrun gives each process one thread, with a long warning, kills it during a save, and
    # lets processes that it starts again read the addresses of the former ones.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # each process reports its own error
    options = ["--standalone"]
    if machines > 1:
        options = [f"--nnodes={machines}", "--rdzv-backend=c10d", f"--rdzv-endpoint={head}", "--rdzv-id=monoblock"]
    if machines == 1 or head.partition(":")[0] in ("localhost", "127.0.0.1"):
        options += ["--local-addr=127.0.0.1"]
    options += [f"--nproc-per-node={processes}", f"--max-restarts={max_restarts}", "-m", "--", "monoblock"]
    start = time.time()
    try:
        torchrun.run(torchrun.parse_args([*options, *argv]))
    except ChildFailedError as problem:
        rank, failure = problem.get_first_failure()
        if failure.exitcode < 0:
            is_killed = -failure.exitcode == signal.SIGKILL
            reason = " (the system sends it when memory runs out)" if is_killed else ""
            line = f"process {rank} was ended by signal {-failure.exitcode}{reason}"
            if folder is not None:
                has_log = log_path(folder, rank).is_file()
                line += f"; see {log_path(folder, rank)}, and" if has_log else ";"
                line += " continue with --resume"
            raise MonoblockError(line) from None
        return failure.exitcode
    except SignalException as problem:
        return 128 + int(problem.sigval)
    except (RendezvousError, dist.DistError) as problem:
        ended = None if folder is None else has_ended(folder, os.getpid(), start)
        if ended:
            return 1  # a process of this machine has reported why
        if ended is not None:
            raise MonoblockError("the connection to another machine was lost; continue with --resume") from None
        reason = str(problem).strip().partition("\n")[0] or type(problem).__name__
        raise MonoblockError(f"the machines could not connect at --head {head}: {reason}") from None
    return 0
