"""Interrupt a step of an engine at a chosen point, as Ctrl-C does at a random one."""

import inspect
import sys
from pathlib import Path

import monoblock

SOURCES = str(Path(monoblock.__file__).parent)


def interrupted_step(engine, call):
    """Take a step that a KeyboardInterrupt ends at its `call`-th call of a function of the package.

    A generator is no such function: it is also called when it is dropped, where Python ignores errors.

    Return the outputs, [] if it was interrupted, and the number of calls. Calls are not counted if `call` is None.
    """
    if call is None:
        return engine.step(), None
    count = 0

    def interrupt(frame, event, _):
        nonlocal count
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCES) and not code.co_flags & inspect.CO_GENERATOR:
            count += 1
            if count == call:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        return engine.step(), count
    except KeyboardInterrupt:
        return [], count
    finally:
        sys.setprofile(None)
