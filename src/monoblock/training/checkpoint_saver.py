"""Write checkpoints: during the step that saves, or in a thread while training continues.

In the background, the weights and optimizer states are copied to CPU memory during the step, and a thread writes the
copies with the same protocol as otherwise (training/checkpoint.py). The next save waits for the thread. With several
processes, the threads have a process group of their own, so that what they exchange does not mix with the training.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from monoblock.errors import FileError
from monoblock.parallel.strategy import Strategy
from monoblock.parallel.world import World
from monoblock.training import checkpoint, sharded_checkpoint
from monoblock.training.events import CheckpointEvent


class CheckpointSaver:
    """Save the checkpoints of a run, in the background if `in_background`; every process must call every method."""

    def __init__(self, folder: Path, strategy: Strategy, *, in_background: bool = False) -> None:
        self.folder, self.strategy, self.in_background = folder, strategy, in_background
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._step = 0  # which the thread writes
        self._error: BaseException | None = None  # of the thread
        self._thread_world: World | None = None

    def save(self, state: checkpoint.Checkpoint, **retention: Any) -> Iterator[CheckpointEvent]:
        """Write a checkpoint, or begin to; yield an event for each that is complete.

        retention: the arguments of `checkpoint.finish` that say which checkpoints are kept.
        """
        yield from self.wait()
        self._step = state.step
        write = self._prepare(state, retention)
        if self.in_background:
            self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            write()
            yield self._event()

    def poll(self) -> Iterator[CheckpointEvent]:
        """Yield an event if the thread has completed a checkpoint since the last call."""
        if self._thread is not None and not self._thread.is_alive() and self._error is None:
            yield from self.wait()

    def wait(self) -> Iterator[CheckpointEvent]:
        """Wait until the thread has written its checkpoint; raise its error."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        yield self._event()

    @property
    def has_failed(self) -> bool:
        """Whether the thread of this process could not write a checkpoint."""
        return self._error is not None

    def raise_error_if(self, failed: float) -> None:
        """Raise the error of the thread if `has_failed` is true in any process."""
        if not failed:
            return
        for _ in self.wait():
            pass
        raise FileError("another process could not write a checkpoint; earlier checkpoints are untouched")

    @contextmanager
    def finish_on_error(self) -> Iterator[None]:
        """Let the thread complete its checkpoint if the `with` block fails, unless it was interrupted by Ctrl-C."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            if self._thread is not None:
                self._thread.join()
            raise

    def _prepare(self, state: checkpoint.Checkpoint, retention: dict[str, Any]) -> Callable[[], object]:
        """Return a function that writes a checkpoint, and needs nothing that the next step changes."""
        copies = self._copies if self.in_background else None
        if self.strategy.is_sharded:
            staged = sharded_checkpoint.stage(state, self.strategy.world, copies.copy if copies else None)
            world = self._background_world() if copies else self.strategy.world
            write: Callable[[], object] = lambda: sharded_checkpoint.write(self.folder, staged, world, **retention)
        elif self.strategy.world.is_main:
            whole = copies.copy_checkpoint(state) if copies else state
            write = lambda: checkpoint.save(self.folder, whole, **retention)
        else:
            write = lambda: None
        if copies:
            copies.synchronize()
        return write

    def _background_world(self) -> World:
        if self._thread_world is None:
            timeout = timedelta(seconds=self.strategy.world.timeout)
            self._thread_world = dataclasses.replace(
                self.strategy.world, group=dist.new_group(backend="gloo", timeout=timeout)
            )
        return self._thread_world

    def _run(self, write: Callable[[], object]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error

    def _event(self) -> CheckpointEvent:
        return CheckpointEvent(self._step, self.folder / f"step-{self._step}")


class HostCopies:
    """Copies of tensors in CPU memory, which is allocated once; on a machine with a GPU it is pinned."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._is_asynchronous = False

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor; the copy is complete after `synchronize`, and valid until the next one of this name."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        self._is_asynchronous |= tensor.is_cuda
        return buffer.copy_(tensor.detach(), non_blocking=True)

    def copy_checkpoint(self, state: checkpoint.Checkpoint) -> checkpoint.Checkpoint:
        """Copy the tensors and the metadata of a checkpoint."""
        tensors = {
            group: {name: self.copy(f"{group}/{name}", tensor) for name, tensor in named.items()}
            for group, named in state.tensors.items()
        }
        return checkpoint.Checkpoint(state.step, tensors, copy.deepcopy(dict(state.metadata)))

    def synchronize(self) -> None:
        """Wait until all copies are complete."""
        if self._is_asynchronous:
            torch.cuda.synchronize()
