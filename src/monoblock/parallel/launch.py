"""Start a monoblock command in several processes on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import torch

from monoblock.errors import ConfigError, MonoblockError
from monoblock.parallel.world import uses_cuda


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
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={processes}", "-m", "--", "monoblock"]
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
