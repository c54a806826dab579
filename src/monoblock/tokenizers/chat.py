"""Chat templates: a conversation as the text a model was trained on. The template is a program from a stranger.

It runs in Jinja's sandbox, without attributes that begin with an underscore and with a short list of filters, methods
and functions; and since a sandbox keeps a program from getting out, not from growing, everything it makes is measured:
the text it writes, the strings it joins, the lists it builds, and the time it takes.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import BuiltinMethodType, FrameType
from typing import Any

from jinja2 import Environment, Undefined, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from monoblock.errors import FileError, InputError

LONGEST_TEMPLATE = 128 * 2**10  # characters
LARGEST = 4 * 2**20  # characters or items of anything a template makes
LONGEST_TIME = 1.0  # seconds
WIDEST = 64  # spaces of an indent, digits of a power

FILTERS = """abs bool capitalize count d default dictsort e escape first float indent int items join last length list
    lower map max min reject rejectattr replace reverse round safe select selectattr sort string sum title tojson trim
    unique upper wordcount"""
METHODS = {
    str: """capitalize count endswith find index isalnum isalpha isdigit islower isspace istitle isupper join lower
        lstrip removeprefix removesuffix replace rstrip split splitlines startswith strip swapcase title upper""",
    list: "count index",
    tuple: "count index",
    dict: "get items keys values",
}
GLOBALS = ("range", "dict", "namespace")


class _Stopped(Exception):
    """The template did something it may not."""


class _Raised(Exception):
    """The template itself refuses the conversation."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    specials: Mapping[str, str] | None = None,
    *,
    add_generation_prompt: bool = True,
    **more: Any,
) -> str:
    """The text of a conversation. `specials` is bos_token, eos_token …; `more` may hold tools and documents."""
    if not isinstance(template, str) or len(template) > LONGEST_TEMPLATE:
        raise FileError(f"the chat template is no text of at most {LONGEST_TEMPLATE:,} characters")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f'message {place} has no role; write {{"role": "user", "content": "…"}}')
    given = {"tools": None, "documents": None, **(specials or {}), **more}
    try:
        with _deadline(LONGEST_TIME):
            made = _Guarded().from_string(template)
            return made.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **given)
    except _Raised as problem:
        raise InputError(f"the chat template refuses this conversation: {_line(problem)}") from None
    except (_Stopped, TemplateError) as problem:
        raise FileError(f"the chat template cannot be used: {_line(problem)}") from None
    except (RecursionError, MemoryError, OverflowError):
        raise FileError("the chat template cannot be used: it has no end") from None
    except Exception as problem:  # whatever Python makes of a stranger's program
        raise FileError(f"the chat template cannot be used: {type(problem).__name__}: {_line(problem)}") from None


def template_of(named: Mapping[str, Any]) -> str | None:
    """The chat template in a tokenizer_config.json; of several with names, the default one."""
    said = named.get("chat_template")
    if isinstance(said, list):
        rows = [row for row in said if isinstance(row, Mapping) and row.get("name") == "default"]
        said = rows[0].get("template") if rows else None
    return said if isinstance(said, str) else None


def _line(problem: BaseException) -> str:
    return " ".join(str(problem).split())[:120]


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Stop Python code of this thread after that time: looked at on every line it runs."""
    end = time.monotonic() + seconds
    before = sys.gettrace()

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            raise _Stopped(f"it takes longer than {seconds:g} s")
        return watch

    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)


# -- what is measured --------------------------------------------------------------------------------------------------


def _size(value: Any) -> int:
    """Characters and items in a value, however it is nested; more than the limit is not counted to its end."""
    total, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, Mapping):
            total += len(one)
            waiting.extend(one.keys())
            waiting.extend(one.values())
        elif isinstance(one, (list, tuple, set, frozenset)):
            total += len(one)
            waiting.extend(one)
        elif isinstance(one, int):
            total += one.bit_length() // 8
        total += 1
        if total > LARGEST:
            raise _Stopped(f"it makes something larger than {LARGEST // 2**20} MB")
    return total


def _measured(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A filter or method that gets and gives nothing too large."""

    def call(*args: Any, **options: Any) -> Any:
        inner = (Environment, Context, nodes.EvalContext)
        values = [value for value in [*args, *options.values()] if not isinstance(value, inner)]
        sizes = [_size(value) for value in values]
        if any(isinstance(value, int) and abs(value) > WIDEST for value in values[1:]):
            raise _Stopped(f"{name} is given a number larger than {WIDEST}")
        if name in ("replace", "join") and _product(sizes) > LARGEST:
            raise _Stopped(f"{name} could make more than {LARGEST // 2**20} MB")
        found = function(*args, **options)
        if isinstance(found, (str, list, tuple, dict)):
            _size(found)
        return found

    call.__dict__.update(getattr(function, "__dict__", {}))  # how Jinja marks what wants its context
    return call


def _product(sizes: list[int]) -> int:
    """How large a replacement or a join can become: the two largest parts, each for each."""
    first, second = [*sorted(sizes, reverse=True), 1, 1][:2]
    return 0 if first < 64 * 2**10 else first * second // 8


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    _size(value)
    allowed = {name: options[name] for name in ("separators", "sort_keys") if name in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **allowed)


def _raise_exception(message: str) -> None:
    raise _Raised(message)


def _strftime_now(form: str) -> str:
    if len(form) > WIDEST or re.search(r"\d", form):
        raise _Stopped("strftime_now is given an odd format")
    return datetime.now().strftime(form)


# -- the sandbox -------------------------------------------------------------------------------------------------------


class _Generation(Extension):
    """{% generation %} … {% endgeneration %} marks what the assistant says, and writes it as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sums(NodeTransformer):
    """a ~ b becomes string(a) + string(b), because sums are measured."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        texts = [nodes.Filter(one, "string", [], [], None, None, lineno=node.lineno) for one in node.nodes]
        joined: nodes.Expr = texts[0]
        for text in texts[1:]:
            joined = nodes.Add(joined, text, lineno=node.lineno)
        return joined


class _Code(CodeGenerator):
    """Template text is measured when it is written, like all else."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        raise nodes.Impossible()


class _Guarded(ImmutableSandboxedEnvironment):
    """One rendering's environment: it counts what is written."""

    code_generator_class = _Code
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        loops = "jinja2.ext.loopcontrols"
        super().__init__(trim_blocks=True, lstrip_blocks=True, finalize=self._written, extensions=[loops, _Generation])
        self.written = 0
        own: dict[str, Callable[..., Any]] = {"tojson": _tojson, "bool": bool}
        known = {**self.filters, **own}
        self.filters = {name: _measured(known[name], name) for name in FILTERS.split() if name in known}
        self.globals = {name: self.globals[name] for name in GLOBALS}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        return super()._generate(_Sums().visit(source).set_environment(self), *args, **options)

    def _written(self, value: Any) -> Any:
        self.written += _size(value)
        if self.written > LARGEST:
            raise _Stopped(f"it writes more than {LARGEST // 2**20} MB")
        return value

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, names in METHODS.items():
            if isinstance(obj, kind):
                return attr in names.split()
        return not attr.startswith("_") and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise _Stopped(f"it reaches for {attribute!r:.40} of a {type(obj).__name__}")

    def wrap_str_format(self, value: Any) -> None:
        return None  # so that `format` is a method like others, and none of those allowed

    def call(self, context: Any, obj: Any, *args: Any, **options: Any) -> Any:
        if isinstance(obj, BuiltinMethodType) and isinstance(obj.__self__, (str, list, tuple, dict)):
            _size(obj.__self__)
            numbers = [value for value in args if isinstance(value, int)]
            own = [_size(obj.__self__), *(_size(value) for value in args)]
            grows = obj.__name__ in ("replace", "join") and _product(own) > LARGEST
            if grows or any(number > LARGEST for number in numbers):
                raise _Stopped(f"{obj.__name__} could make more than {LARGEST // 2**20} MB")
        return super().call(context, obj, *args, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _size([left, right])
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if not isinstance(many, (int, float)) and isinstance(times, int) and _size(many) * times > LARGEST:
                    raise _Stopped(f"it makes something larger than {LARGEST // 2**20} MB")
            _size([left, right])
        elif operator == "**" and not (abs(left) <= LARGEST and abs(right) <= WIDEST):
            raise _Stopped("it raises a number to a power too large")
        elif operator == "%" and isinstance(left, str) and re.search(r"%[^a-zA-Z%]*(\d{3}|\*)", left):
            raise _Stopped("it formats a number too wide")
        return super().call_binop(context, operator, left, right)
