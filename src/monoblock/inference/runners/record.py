"""Record a function that runs on a GPU as a CUDA graph; without a GPU, a replay calls the function again."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Replay = Callable[[], None]
_recording = threading.Lock()  # one recording at a time


def record(run: Callable[[], None], device: torch.device, pool: Any = None) -> Replay:
    """Record a function and return what replays it; it is called twice before, so that kernels are compiled and chosen.

    Recordings with the same `pool` of memory share what they need only while they run: the tensors of one may be
    overwritten by the others.
    """
    if device.type != "cuda":
        return run
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    try:
        mode = "thread_local"  # other threads go on decoding
        with _recording, _without_collections(), torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
            run()
    except BaseException:
        torch.cuda.set_stream(stream)  # torch stays on the stream of a recording that failed
        raise
    return graph.replay


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no garbage inside a `with` block: a graph that is freed during a recording breaks it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
