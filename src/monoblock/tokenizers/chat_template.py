"""Render chat templates: turn a conversation into the text a model was trained on. Templates are untrusted programs.

A template runs in Jinja's sandbox with short lists of allowed filters, methods and functions, and without attributes
that begin with an underscore. Jinja's sandbox does not limit resources, so we also limit the text a template writes,
the strings it joins, the lists it builds, and the time it takes.
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

MAX_TEMPLATE_LENGTH = 128 * 2**10  # characters
MAX_SIZE = 4 * 2**20  # characters and items in any value
MAX_SECONDS = 1.0
MAX_WIDTH = 64  # the largest indent or exponent

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
ALLOWED_GLOBALS = ("range", "dict", "namespace")


class _SandboxViolation(Exception):
    """The template did something that is not allowed."""


class _ConversationRejected(Exception):
    """The template called raise_exception."""


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, object]],
    special_tokens: Mapping[str, str] | None = None,
    *,
    add_generation_prompt: bool = True,
    **variables: object,
) -> str:
    """Return the text of a conversation, as the template renders it.

    `special_tokens` maps names such as "bos_token" to tokens; `variables` may set `tools` and `documents`.
    """
    if not isinstance(template, str) or len(template) > MAX_TEMPLATE_LENGTH:
        raise FileError(f"the chat template is not a string of at most {MAX_TEMPLATE_LENGTH:,} characters")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f'message {index} has no role; write {{"role": "user", "content": "…"}}')
    context = {"tools": None, "documents": None, **(special_tokens or {}), **variables}
    try:
        with _time_limit(MAX_SECONDS):
            program = _SandboxEnvironment().from_string(template)
            return program.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **context)
    except _ConversationRejected as problem:
        raise InputError(f"the chat template refuses this conversation: {_one_line(problem)}") from None
    except (_SandboxViolation, TemplateError) as problem:
        raise FileError(f"the chat template cannot be used: {_one_line(problem)}") from None
    except (RecursionError, MemoryError, OverflowError):
        raise FileError("the chat template cannot be used: it recurses too deep or needs too much memory") from None
    except Exception as problem:  # an untrusted program may raise anything
        raise FileError(f"the chat template cannot be used: {type(problem).__name__}: {_one_line(problem)}") from None


def find_chat_template(config: Mapping[str, Any]) -> str | None:
    """Return the chat template in the content of a tokenizer_config.json, or None if there is none.

    If there are several templates, return the one named "default".
    """
    template = config.get("chat_template")
    if isinstance(template, list):
        rows = [row for row in template if isinstance(row, Mapping) and row.get("name") == "default"]
        template = rows[0].get("template") if rows else None
    return template if isinstance(template, str) else None


def _one_line(problem: BaseException) -> str:
    return " ".join(str(problem).split())[:120]


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise if the `with` block takes more than `seconds` of processor time; a trace function checks every line."""
    deadline = time.thread_time() + seconds
    previous = sys.gettrace()

    def check_time(frame: FrameType, event: str, argument: Any) -> Any:
        if time.thread_time() > deadline:
            raise _SandboxViolation(f"it takes longer than {seconds:g} s")
        return check_time

    sys.settrace(check_time)
    try:
        yield
    finally:
        sys.settrace(previous)


# -- limits on size --------------------------------------------------------------------------------------------------


def _measure_size(value: Any) -> int:
    """Count the characters and items of a nested value; raise as soon as there are more than MAX_SIZE."""
    total, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            total += len(item)
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            total += len(item)
            stack.extend(item)
        elif isinstance(item, int):
            total += item.bit_length() // 8
        total += 1
        if total > MAX_SIZE:
            raise _SandboxViolation(f"it creates a value larger than {MAX_SIZE // 2**20} MB")
    return total


def _limit_sizes(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a filter so that it raises if its arguments or its result are too large."""

    def call(*args: Any, **options: Any) -> Any:
        internal = (Environment, Context, nodes.EvalContext)
        values = [value for value in [*args, *options.values()] if not isinstance(value, internal)]
        sizes = [_measure_size(value) for value in values]
        if any(isinstance(value, int) and abs(value) > MAX_WIDTH for value in values[1:]):
            raise _SandboxViolation(f"it passes a number larger than {MAX_WIDTH} to the filter {name}")
        if name in ("replace", "join") and _largest_product(sizes) > MAX_SIZE:
            raise _SandboxViolation(f"its filter {name} could create more than {MAX_SIZE // 2**20} MB")
        result = function(*args, **options)
        if isinstance(result, (str, list, tuple, dict)):
            _measure_size(result)
        return result

    call.__dict__.update(getattr(function, "__dict__", {}))  # Jinja stores there whether a filter takes its context
    return call


def _largest_product(sizes: list[int]) -> int:
    """Estimate the size of the result of `replace` or `join` from the sizes of its arguments.

    Small arguments count as 0; otherwise the estimate is an eighth of the product of the two largest sizes.
    """
    first, second = [*sorted(sizes, reverse=True), 1, 1][:2]
    return 0 if first < 64 * 2**10 else first * second // 8


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    _measure_size(value)
    allowed = {name: options[name] for name in ("separators", "sort_keys") if name in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **allowed)


def _raise_exception(message: str) -> None:
    raise _ConversationRejected(message)


def _strftime_now(date_format: str) -> str:
    if len(date_format) > MAX_WIDTH or re.search(r"\d", date_format):
        raise _SandboxViolation("it passes a format to strftime_now that is too long or contains a digit")
    return datetime.now().strftime(date_format)


# -- the sandbox -------------------------------------------------------------------------------------------------------


class _GenerationTag(Extension):
    """The tag {% generation %} … {% endgeneration %}, which marks the assistant's text and writes it unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _ConcatToAdd(NodeTransformer):
    """Rewrite a ~ b in a template as string(a) + string(b), because `call_binop` limits the size of sums."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        texts = [nodes.Filter(part, "string", [], [], None, None, lineno=node.lineno) for part in node.nodes]
        joined: nodes.Expr = texts[0]
        for text in texts[1:]:
            joined = nodes.Add(joined, text, lineno=node.lineno)
        return joined


class _MeasuringCodeGenerator(CodeGenerator):
    """A code generator without constant folding, so that constant text also counts as output."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        raise nodes.Impossible()


class _SandboxEnvironment(ImmutableSandboxedEnvironment):
    """A Jinja sandbox for rendering one template, which limits the size of its values and of its output."""

    code_generator_class = _MeasuringCodeGenerator
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        extensions = ["jinja2.ext.loopcontrols", _GenerationTag]
        super().__init__(trim_blocks=True, lstrip_blocks=True, finalize=self._count_output, extensions=extensions)
        self.output_size = 0
        filters: dict[str, Callable[..., Any]] = {**self.filters, "tojson": _tojson, "bool": bool}
        self.filters = {name: _limit_sizes(filters[name], name) for name in ALLOWED_FILTERS.split() if name in filters}
        self.globals = {name: self.globals[name] for name in ALLOWED_GLOBALS}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        return super()._generate(_ConcatToAdd().visit(source).set_environment(self), *args, **options)

    def _count_output(self, value: Any) -> Any:
        self.output_size += _measure_size(value)
        if self.output_size > MAX_SIZE:
            raise _SandboxViolation(f"it writes more than {MAX_SIZE // 2**20} MB")
        return value

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, names in ALLOWED_METHODS.items():
            if isinstance(obj, kind):
                return attr in names.split()
        return not attr.startswith("_") and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise _SandboxViolation(f"it accesses {attribute!r:.40} of a {type(obj).__name__}, which is not allowed")

    def wrap_str_format(self, value: Any) -> None:
        return None  # without a wrapper, str.format is a method like any other, and not an allowed one

    def call(self, context: Any, obj: Any, *args: Any, **options: Any) -> Any:
        if isinstance(obj, BuiltinMethodType) and isinstance(obj.__self__, (str, list, tuple, dict)):
            _measure_size(obj.__self__)
            numbers = [value for value in args if isinstance(value, int)]
            sizes = [_measure_size(obj.__self__), *(_measure_size(value) for value in args)]
            too_large = obj.__name__ in ("replace", "join") and _largest_product(sizes) > MAX_SIZE
            if too_large or any(number > MAX_SIZE for number in numbers):
                raise _SandboxViolation(f"its method {obj.__name__} could create more than {MAX_SIZE // 2**20} MB")
        return super().call(context, obj, *args, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _measure_size([left, right])
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                repeats = not isinstance(value, (int, float)) and isinstance(times, int)
                if repeats and _measure_size(value) * times > MAX_SIZE:
                    raise _SandboxViolation(f"it creates a value larger than {MAX_SIZE // 2**20} MB")
            _measure_size([left, right])
        elif operator == "**" and not (abs(left) <= MAX_SIZE and abs(right) <= MAX_WIDTH):
            raise _SandboxViolation("it raises a number to too large a power")
        elif operator == "%" and isinstance(left, str) and re.search(r"%[^a-zA-Z%]*(\d{3}|\*)", left):
            raise _SandboxViolation("it formats a value with too large a width")
        return super().call_binop(context, operator, left, right)
