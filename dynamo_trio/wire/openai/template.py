"""Chat templates: a conversation to the text that the model was trained on.

Theory of operation
-------------------
A template is a Jinja program that came with the model. It runs in Jinja's immutable
sandbox with the helpers that Hugging Face's ``apply_chat_template`` gives it, so the
same templates give the same text. It is not trusted: no attribute that begins with
an underscore, no change to its input, ``range`` bounded, repetition and width of
strings bounded, output bounded. What stays possible is to burn processor time in
nested loops; whoever loads a model trusts its template that far.

What goes wrong while rendering is the request's fault as far as anyone can tell
(templates use ``raise_exception`` to refuse a conversation), so it is an
:class:`~dynamo_trio.errors.InvalidArgument` whose text names no file of the server.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from dynamo_trio.errors import InvalidArgument, LoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_trio.wire.openai.request import Message

#: Characters. More than any prompt that a model could take.
MAX_OUTPUT = 64 * 2**20
#: Characters in a string made by ``*`` or ``%`` inside a template.
MAX_STRING = 1_000_000


class TemplateRefusal(jinja2.TemplateError):
    """The template itself called ``raise_exception``."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``: marks the assistant's part for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain class attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with a limit on operators that make a long string out of a short one."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "%" and isinstance(left, (str, bytes)):
            raise jinja2.exceptions.SecurityError("formatting with % is not allowed")
        if operator == "*" and _repeated(left, right) > MAX_STRING:
            raise jinja2.exceptions.SecurityError("a repetition is too long")
        if operator == "**" and not _small_power(left, right):
            raise jinja2.exceptions.SecurityError("a power is too large")
        return super().call_binop(context, operator, left, right)


def _repeated(left: Any, right: Any) -> int:
    """Length of ``left * right`` when one of them is a sequence; a digit count for integers."""
    for one, times in ((left, right), (right, left)):
        if isinstance(one, (str, bytes, list, tuple)) and isinstance(times, int):
            return len(one) * times
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length()
    return 0


def _small_power(base: Any, exponent: Any) -> bool:
    if isinstance(base, int) and isinstance(exponent, int):
        return base.bit_length() * abs(exponent) <= 4096
    return isinstance(base, (int, float)) and isinstance(exponent, (int, float))


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not Jinja's own filter, which escapes for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


class ChatTemplate:
    """A compiled template. Safe to use from several threads.

    ``strftime_now`` gives today's date to templates that ask for it; without it they
    are refused (this module reads no clock).

    Raises:
        LoadError: the template is no valid Jinja.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        strftime_now: Callable[[str], str] | None = None,
    ) -> None:
        # None, not absent, as Hugging Face passes them: templates test "is not none".
        self._variables: dict[str, object] = {"tools": None, "documents": None}
        self._variables |= {"bos_token": bos_token, "eos_token": eos_token}
        if strftime_now is not None:
            self._variables["strftime_now"] = strftime_now
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, OverflowError, ValueError) as exc:
            raise LoadError(f"The model's chat template cannot be used: {exc}") from exc

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt text, open for the assistant's turn.

        Raises:
            InvalidArgument: the template refuses this conversation.
        """
        turns = [_turn(message) for message in messages]
        try:
            return self._collect(messages=turns, add_generation_prompt=add_generation_prompt)
        except TemplateRefusal as exc:
            raise _refused(f": {exc}") from exc
        except InvalidArgument:
            raise
        except Exception as exc:
            # Anything at all: the template is a program, and not ours.
            raise _refused(f" ({type(exc).__name__}).") from exc

    def _collect(self, **variables: object) -> str:
        parts: list[str] = []
        size = 0
        for part in self._template.generate(**self._variables, **variables):
            size += len(part)
            if size > MAX_OUTPUT:
                raise _refused(" (its output is too long).")
            parts.append(part)
        return "".join(parts)


def _turn(message: Message) -> dict[str, str]:
    turn = {"role": message.role, "content": message.content}
    return turn if message.name is None else {**turn, "name": message.name}


def _refused(why: str) -> InvalidArgument:
    return InvalidArgument(
        f"The model's chat template refuses these messages{why}", param="messages"
    )
