"""Stop a training run by Ctrl-C after the current step, so that it is saved and can be resumed."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_interrupt(rank: int = 0, processes: int = 1) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed, so that training can stop after the current step.

    A single process stops at once after a second Ctrl-C. With several processes, only the first signal counts, because
    each process may receive the signal of one Ctrl-C twice: from the terminal and from torchrun. Outside the main
    thread, where Python delivers no signals, the function always returns False.
    """
    interrupted = False
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted and processes == 1:
            raise KeyboardInterrupt
        if not interrupted and not rank:
            sys.stderr.write("stopping after this step, then saving; press Ctrl-C again to stop at once\n")
        interrupted = True

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
