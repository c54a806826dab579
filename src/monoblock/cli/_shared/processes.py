"""Run a verb in several processes that share a model; shared by the verbs that load a model larger than one device."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

import click

from monoblock.errors import ConfigError

if TYPE_CHECKING:
    from monoblock.parallel.world import World

nproc_option = click.option(
    "--nproc",
    type=click.IntRange(min=1),
    default=1,
    help="Number of processes on this machine that share the weights of the model, each a part.  [default: 1]",
)


@contextmanager
def join_processes(ctx: click.Context, nproc: int, device: str | None) -> Iterator[World | None]:
    """Run the `with` block in every process that shares the model; yield None if there is only this one.

    Without torchrun, --nproc starts the command again in that many processes, and exits with their code. Only the main
    process prints, and an error is printed once.
    """
    if "LOCAL_RANK" not in os.environ:
        if nproc > 1:
            from monoblock.parallel.launch import launch

            ctx.exit(launch(_words(ctx), nproc, device or "auto"))
        yield None
        return
    if nproc not in (1, int(os.environ["WORLD_SIZE"])):
        raise ConfigError(f"torchrun has started {os.environ['WORLD_SIZE']} processes; leave out --nproc {nproc}")
    from monoblock.parallel import inference
    from monoblock.parallel.world import defer_worker_errors

    with defer_worker_errors(os.environ):
        world = inference.join_processes(device or "auto")
        with ExitStack() as stack:
            if not world.is_main:
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(redirect_stdout(nowhere))
                stack.enter_context(redirect_stderr(nowhere))
            yield world
        world.shut_down()


def _words(ctx: click.Context) -> list[str]:
    """Return the arguments that monoblock was started with."""
    known = ctx.obj or {}
    return ["--debug"] * bool(known.get("debug")) + list(known.get("words", sys.argv[1:]))
