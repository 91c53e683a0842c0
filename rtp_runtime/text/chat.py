"""Chat messages to the text that a model was trained on, by the checkpoint's template.

A template is somebody else's program: it runs in jinja2's immutable sandbox, sees only plain data, and what it may
call is what transformers offers (`transformers.utils.chat_template_utils`), so that both render the same text.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from rtp_runtime.errors import ConfigError, RequestError

_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
    MemoryError,
)
"""What the expressions of a template can raise."""

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, where: str = "the chat template") -> None:
        """Compile `source`; `special_tokens` (bos_token, …) are variables in it.

        Raises ConfigError when it is not a template.
        """
        self._where = where
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{where} is not valid at line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation. `variables` are further switches of the template, such as enable_thinking.

        Raises RequestError for messages that the template refuses, ConfigError for a template that leaves its sandbox.
        """
        if not messages:
            raise RequestError("a chat needs at least one message, such as {'role': 'user', 'content': 'Hello'}.")
        data = {"documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render(
                messages=[_message(message) for message in messages],
                tools=plain(tools),
                add_generation_prompt=add_generation_prompt,
                **{key: plain(value) for key, value in data.items()},
            )
        except jinja2.exceptions.SecurityError as error:
            raise ConfigError(f"{self._where} tries what a template must not do, and was stopped: {error}") from error
        except _RENDER_ERRORS as error:
            raise RequestError(f"{self._where} refuses these messages: {error}") from error


def plain(value: Any) -> Any:
    """`value` rebuilt of JSON types: methods of richer objects could lead a template out of its sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, list):
        return list(map(plain, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):
        return plain(value.model_dump())
    return f"<{type(value).__name__}>"


def _message(message: Any) -> dict[str, Any]:
    """A message as templates expect it: no keys without a value, and reasoning under each name that is in use."""
    data = plain(message)
    if not isinstance(data, dict):
        raise RequestError(f"{message!r:.80} is not a message. Write {{'role': 'user', 'content': 'Hello'}}.")
    data = {key: value for key, value in data.items() if value is not None}
    reasoning = next((data[key] for key in _REASONING_KEYS if key in data), None)
    return data if reasoning is None else {"thinking": reasoning, **data, "reasoning_content": reasoning}


class _GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant wrote: of use in training, plain text here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict(…)` in a template, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace(…)` in a template, without names that reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]  # `namespace(self=…)` is allowed
        values = dict(*rest, **kwargs)
        for name in values:
            _require_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: names must not begin with _")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": _now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML that jinja2's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
