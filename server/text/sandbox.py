"""The jinja environment of chat templates: what transformers offers them, behind a sandbox and a time limit.

Knows jinja; does not know messages or tokens. Importing it costs 0.1 s, so it is imported with the first chat.
"""

import json
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_RENDERED_CHARS = 16 << 20
_MAX_NUMBER_BITS = 1 << 16
# Names of filters that no template can write: the environment puts them around loops and concatenations.
_TIME_FILTER = "limited in time"
_SIZE_FILTER = "limited in size"

_deadline_s: ContextVar[float] = ContextVar("deadline of the render in this thread, in its own CPU time")


class RenderLimit(Exception):
    """The template used more time or made more text than a chat prompt can need."""


def compile_template(source: str) -> jinja2.Template:
    """Raises jinja2.TemplateSyntaxError."""
    return _ChatEnvironment().from_string(source)


def literal_text(template: jinja2.Template, source: str) -> str:
    """The text and string constants that a template writes by itself, NUL between any two."""
    tree = template.environment.parse(source)
    literals = {node.data for node in tree.find_all(nodes.TemplateData)}
    literals |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return "\0".join(sorted(literals))


def render_template(template: jinja2.Template, variables: dict[str, Any], limit_s: float) -> str:
    """Render, in at most `limit_s` of this thread's CPU time. Raises RenderLimit, and whatever the template raises."""
    token = _deadline_s.set(time.thread_time() + limit_s)
    try:
        return "".join(_limited_in_total(template.generate(**variables)))
    finally:
        _deadline_s.reset(token)


def _check_time() -> None:
    if time.thread_time() > _deadline_s.get():
        raise RenderLimit("it takes too long")


def _limited_in_time(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _check_time()
        yield item


def _limited_in_total(pieces: Iterable[str]) -> Iterator[str]:
    num_chars = 0
    for piece in _limited_in_time(pieces):
        num_chars += len(piece)
        _check_size(num_chars)
        yield piece


def _limited_in_size(value: Any) -> Any:
    _check_size(_size(value))
    return value


def _check_size(size: int) -> None:
    if size > MAX_RENDERED_CHARS:
        raise RenderLimit(f"it makes more than {MAX_RENDERED_CHARS} characters")


def _size(value: Any) -> int:
    """Characters of a string, items of a sequence; 0 for what has no length."""
    return len(value) if isinstance(value, (str, list, tuple)) else 0


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    """All that can run long passes a check of the deadline: loops, and calls, so recursion too. What operators make
    is limited in size. (A single filter of jinja's own is neither: its time is that of its input.)
    """

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        self.filters |= {"tojson": _to_json, _TIME_FILTER: _limited_in_time, _SIZE_FILTER: _limited_in_size}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.globals |= {"dict": _TemplateDict(), "namespace": _TemplateNamespace}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, _TIME_FILTER)
        for concatenation in tree.find_all(nodes.Concat):
            concatenation.nodes = [_filtered(part, _SIZE_FILTER) for part in concatenation.nodes]
        return tree

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check_time()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _check_size(_size(left) + _size(right))
        elif isinstance(left, int) and isinstance(right, int):
            _check_number(
                left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            )
        elif isinstance(left, int) or isinstance(right, int):
            count, sequence = (left, right) if isinstance(left, int) else (right, left)
            _check_size(_size(sequence) * count)
        return super().call_binop(context, operator, left, right)


def _filtered(value: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _check_number(num_bits: int) -> None:
    if num_bits > _MAX_NUMBER_BITS:
        raise RenderLimit(f"it makes a number of more than {_MAX_NUMBER_BITS} bits")


class _GenerationBlock(Extension):
    """{% generation %} marks the assistant's words for training; here its body is rendered and nothing else."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Macro) -> str:
        text: str = caller()
        return text


class _TemplateDict:
    """`dict` of templates: makes dictionaries, without a type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """`namespace` of templates: takes no underscored names, which are Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # "self" may be one of the names
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template cannot set {name!r} on a namespace")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
