"""Stop a training run by Ctrl-C or SIGTERM after the current step, so that it is saved and can be resumed."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_MESSAGES = {
    signal.SIGINT: "stopping after this step, then saving; press Ctrl-C again to stop at once",
    signal.SIGTERM: "stopping after this step, then saving; send SIGTERM again to stop at once",
}


class StopRequest:
    """Whether the run was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_interrupt(rank: int = 0, processes: int = 1) -> Iterator[StopRequest]:
    """Yield a function that returns whether Ctrl-C or SIGTERM was received, so that training can stop after a step.

    A single process stops at once after a second signal. With several processes, only the first signal counts, because
    each process may receive one signal twice: from the terminal and from torchrun. A signal that the process ignores
    stays ignored. If a process loses the connection to the others after SIGTERM, torchrun has ended them because one of
    them failed, and reports that one; this process ends without a line of its own. Outside the main thread, where
    Python delivers no signals, the function always returns False.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if request.signal is not None and processes == 1:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        if request.signal is None and not rank:
            sys.stderr.write(f"{STOP_MESSAGES[signal.Signals(number)]}\n")
        request.signal = request.signal or number

    handled = [number for number in STOP_MESSAGES if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, handle) for number in handled}
    is_ended = False
    try:
        yield request
    except Exception as problem:
        from monoblock.parallel.faults import is_lost_connection  # imports torch

        is_ended = processes > 1 and request.signal == signal.SIGTERM and is_lost_connection(problem)
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if is_ended:
            signal.raise_signal(signal.SIGTERM)
