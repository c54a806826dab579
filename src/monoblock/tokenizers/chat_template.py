"""Render chat templates: turn a conversation into the text a model was trained on.

Templates are untrusted programs, so a separate process renders them (template_program.py), with limits on its time and
memory. It gets a copy of the messages as JSON. The process is started for the first conversation and kept for the next
ones; a template that breaks a limit ends it, and the next conversation starts another.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from monoblock.errors import FileError, InputError
from monoblock.untrusted_files import MB, short_repr

PROGRAM = Path(__file__).with_name("template_program.py")
LENGTH_BYTES = 4
MAX_TEMPLATE_LENGTH = 128 * 2**10  # characters
MAX_REQUEST_BYTES = 16 * MB
MAX_RESULT_BYTES = 64 * MB
MAX_CPU_SECONDS = 1  # of the program, which ends itself
MAX_SECONDS = 60.0  # until its result must be there, however busy the machine is


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, object]],
    special_tokens: Mapping[str, str] | None = None,
    *,
    add_generation_prompt: bool = True,
    **variables: object,
) -> str:
    """Return the text of a conversation, as the template renders it.

    `special_tokens` maps names such as "bos_token" to tokens; `variables` may set `tools` and `documents`. Messages and
    variables consist of what JSON has: dicts, lists, strings, numbers, booleans and None.
    """
    if not isinstance(template, str) or len(template) > MAX_TEMPLATE_LENGTH:
        raise FileError(f"the chat template is not a string of at most {MAX_TEMPLATE_LENGTH:,} characters")
    example = '{"role": "user", "content": "…"}'
    if isinstance(messages, str | Mapping) or not messages:
        raise InputError(f"a conversation is a list of at least one message; write [{example}]")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"message {index} has no role; write {example}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise InputError(f"message {index} has no content; write {example}")
    context = {"tools": None, "documents": None, **(special_tokens or {}), **variables}
    context |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
    result = _PROCESS.render(_to_json({"template": template, "variables": context}))
    if "rejected" in result:
        raise InputError(f"the chat template refuses this conversation: {result['rejected']}")
    if not isinstance(result.get("text"), str):
        raise FileError(f"the chat template cannot be used: {result.get('error')}")
    return str(result["text"])


def _to_json(request: Mapping[str, object]) -> bytes:
    def convert(value: object) -> object:
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError(f"{short_repr(value)} is not a dict, a list, a string, a number, True, False or None")

    try:
        raw = json.dumps(request, default=convert).encode()
    except (TypeError, ValueError, RecursionError) as problem:
        raise InputError(f"the messages cannot be rendered: {problem}") from None
    if len(raw) > MAX_REQUEST_BYTES:
        raise InputError(f"the messages have more than {MAX_REQUEST_BYTES // MB} MB; give fewer or shorter messages")
    return raw


class _TemplateProcess:
    """The process of template_program.py, used by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the id of the process that started it, since a fork must not share the pipes

    def renew_lock(self) -> None:
        """Replace the lock, which another thread may have held when this process was forked."""
        self._lock = threading.Lock()

    def render(self, request: bytes) -> dict[str, Any]:
        with self._lock:
            process = self._start()
            timer = threading.Timer(MAX_SECONDS, process.kill)
            timer.start()
            try:
                result = _exchange(process, request)
            except BaseException:  # such as Ctrl-C: a later result must not answer another request
                self.close()
                raise
            finally:
                timer.cancel()
                timer.join()
            if result is None:
                self.close()
                if process.returncode in (-signal.SIGPROF, -signal.SIGKILL):
                    return {"error": f"it takes longer than {MAX_CPU_SECONDS} s"}
                return {"error": f"the program that renders it ended with exit code {process.returncode}"}
            return result

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._owner != os.getpid():
            self._process, self._owner = None, os.getpid()
        if self._process is None or self._process.poll() is not None:
            self.close()
            keep = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "TZ")
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", str(PROGRAM)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={name: os.environ[name] for name in keep if name in os.environ},
                    start_new_session=True,  # Ctrl-C reaches this process only, which then ends the other
                )
            except OSError as problem:
                raise FileError(f"the program that renders chat templates does not start: {problem}") from None
        return self._process


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> dict[str, Any] | None:
    """Send a request to the program and return its result; None if it has ended, or writes no valid result."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(len(request).to_bytes(LENGTH_BYTES, "big") + request)
        process.stdin.flush()
        length = int.from_bytes(process.stdout.read(LENGTH_BYTES), "big")
        result = json.loads(process.stdout.read(length)) if length <= MAX_RESULT_BYTES else None
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) else None


_PROCESS = _TemplateProcess()
atexit.register(_PROCESS.close)
os.register_at_fork(after_in_child=_PROCESS.renew_lock)
