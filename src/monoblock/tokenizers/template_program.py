"""A separate program that renders chat templates, with limits on time and memory. Templates are untrusted programs.

chat_template.py starts this program in Python's isolated mode and keeps it running; it imports only jinja2 and the
standard library. It reads requests from standard input and writes results to standard output, each as its length in
four bytes and then JSON. A template runs in Jinja's sandbox with short lists of allowed filters, methods and functions.
Jinja's sandbox does not limit resources, so the operating system does: a template that takes too long ends the process,
and one that needs too much memory gets a MemoryError. An audit hook refuses to open files, programs and sockets.
"""

import json
import os
import resource
import signal
import sys
import time
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO

from jinja2 import Template, Undefined, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 1.0  # of processor time
MAX_MEMORY = 192 * 2**20  # bytes, on top of those of the program itself
MAX_OUTPUT = 4 * 2**20  # characters
MAX_MESSAGE_LENGTH = 120
MAX_CACHED_TEMPLATES = 8
LENGTH_BYTES = 4

ALLOWED_FILTERS = """abs bool capitalize count d default dictsort e escape first float indent int items join last
    length list lower map max min reject rejectattr replace reverse round safe select selectattr sort string sum
    title tojson trim unique upper wordcount"""
ALLOWED_METHODS = {
    str: """capitalize count endswith find index isalnum isalpha isdigit islower isspace istitle isupper join lower
        lstrip removeprefix removesuffix replace rstrip split splitlines startswith strip swapcase title upper""",
    list: "count index",
    tuple: "count index",
    dict: "get items keys values",
}
# Audit events of Python that rendering causes; every other event is refused.
ALLOWED_AUDIT_EVENTS = {
    "builtins.id", "code.__new__", "compile", "exec", "import", "object.__delattr__", "object.__getattr__",
    "object.__setattr__", "sys._getframe", "sys._getframemodulename",
}  # fmt: skip


class SandboxViolation(Exception):
    """The template did something that is not allowed."""


class ConversationRejected(Exception):
    """The template called raise_exception."""


def main() -> None:
    requests, results = sys.stdin.buffer, sys.stdout.buffer
    limit_process()
    while (raw := read_message(requests)) is not None:
        write_message(results, json.dumps(answer(raw)).encode())


def read_message(stream: BinaryIO) -> bytes | None:
    """Return the next message of the stream, or None at its end."""
    header = stream.read(LENGTH_BYTES)
    return stream.read(int.from_bytes(header, "big")) if len(header) == LENGTH_BYTES else None


def write_message(stream: BinaryIO, raw: bytes) -> None:
    stream.write(len(raw).to_bytes(LENGTH_BYTES, "big") + raw)
    stream.flush()


def limit_process() -> None:
    """Limit the memory of this process, and refuse to open files, programs and sockets from now on."""
    answer(b'{"template": "{{ strftime_now(\'%d\') }}{{ 1 // 0 }}", "variables": {}}')  # imports what errors need
    time.tzset()  # reads the file of the time zone
    with open("/proc/self/statm") if os.path.exists("/proc/self/statm") else open(os.devnull) as file:
        pages = int((file.read().split() or ["0"])[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # a template has nothing to say there

    def refuse(event: str, _: Any) -> None:
        if event not in ALLOWED_AUDIT_EVENTS:
            raise SandboxViolation(f"it does what is not allowed: {event}")

    sys.addaudithook(refuse)


def answer(raw: bytes) -> dict[str, str]:
    """Render the template of a request; return its text, or the reason why there is none."""
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)  # ends the process with the signal SIGPROF
    try:
        request = json.loads(raw)
        text = compile_template(request["template"]).render(request["variables"])
        if len(text) > MAX_OUTPUT:
            raise SandboxViolation(f"it writes more than {MAX_OUTPUT // 2**20} MB")
        return {"text": text}
    except ConversationRejected as problem:
        return {"rejected": one_line(problem)}
    except (SandboxViolation, TemplateError) as problem:
        return {"error": one_line(problem)}
    except RecursionError:
        return {"error": "it is nested too deep"}
    except MemoryError:
        return {"error": f"it needs more than {MAX_MEMORY // 2**20} MB of memory"}
    except Exception as problem:  # an untrusted program may raise anything
        return {"error": f"{type(problem).__name__}: {one_line(problem)}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@lru_cache(maxsize=MAX_CACHED_TEMPLATES)
def compile_template(source: str) -> Template:
    return Sandbox().from_string(source)


def one_line(problem: BaseException) -> str:
    return " ".join(str(problem)[: 4 * MAX_MESSAGE_LENGTH].split())[:MAX_MESSAGE_LENGTH]


# -- the sandbox -------------------------------------------------------------------------------------------------------


class GenerationTag(Extension):
    """The tag {% generation %} … {% endgeneration %}, which marks the assistant's text and writes it unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """A Jinja sandbox with short lists of filters, methods and functions."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag])
        filters: dict[str, Any] = {**self.filters, "tojson": tojson, "bool": bool}
        self.filters = {name: filters[name] for name in ALLOWED_FILTERS.split() if name in filters}
        self.globals = {name: self.globals[name] for name in ("range", "namespace")}
        self.globals |= {"dict": make_dict, "raise_exception": raise_exception, "strftime_now": strftime_now}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, names in ALLOWED_METHODS.items():
            if isinstance(obj, kind):
                return attr in names.split()
        return not attr.startswith("_") and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SandboxViolation(f"it accesses {attribute!r:.40} of a {type(obj).__name__}, which is not allowed")

    def wrap_str_format(self, value: Any) -> None:
        return None  # without a wrapper, str.format is a method like any other, and not an allowed one


def make_dict(*args: Any, **items: Any) -> dict[Any, Any]:
    """Return dict(…); the class itself has methods that would change the dicts of the conversation."""
    return dict(*args, **items)


def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    allowed = {name: options[name] for name in ("separators", "sort_keys") if name in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **allowed)


def raise_exception(message: str) -> None:
    raise ConversationRejected(message)


def strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)


if __name__ == "__main__":
    main()
