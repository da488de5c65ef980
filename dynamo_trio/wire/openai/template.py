"""Chat templates: a conversation to the text that the model was trained on.

Theory of operation
-------------------
A template is a Jinja program that came with the model. It runs with the helpers that
Hugging Face's ``apply_chat_template`` gives it, so the same templates give the same text.
It is not trusted: it runs in a sandbox with bounds on its time and its memory
(:mod:`~dynamo_trio.wire.openai.sandbox`), and its output is bounded.

What goes wrong while rendering is the request's fault as far as anyone can tell
(templates use ``raise_exception`` to refuse a conversation), so it is an
:class:`~dynamo_trio.errors.InvalidArgument` whose text names no file of the server.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from dynamo_trio.errors import InvalidArgument, LoadError
from dynamo_trio.wire.openai.meter import Bound, Meter, TooDear
from dynamo_trio.wire.openai.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_trio.wire.openai.request import Message

#: Characters. More than any prompt that a model could take.
MAX_OUTPUT = 64 * 2**20
#: Characters of what a template says when it refuses a conversation, and of a date's form.
MAX_REFUSAL, MAX_FORM = 2000, 256
#: Characters that a message counts as, beside its content.
_MESSAGE = 100


class TemplateRefusal(jinja2.TemplateError):
    """The template itself called ``raise_exception``."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``: marks the assistant's part for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain class attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> None:
    known = isinstance(message, (str, int, float))
    raise TemplateRefusal(_in_a_line(message) if known else type(message).__name__)


def _in_a_line(said: object) -> str:
    """A template's words, in which it may quote its client's: none of them steers a terminal."""
    line = " ".join(str(said)[:MAX_REFUSAL].split())
    return line if line.isprintable() else "".join(c if c.isprintable() else "?" for c in line)


def _environment(strftime_now: Callable[[str], str] | None) -> Sandbox:
    environment = Sandbox(_Generation, jinja2.ext.loopcontrols)
    environment.globals["raise_exception"] = _raise_exception
    if strftime_now is not None:
        environment.globals["strftime_now"] = partial(_date, strftime_now)
    return environment


def _date(strftime_now: Callable[[str], str], form: str) -> str:
    if len(form) > MAX_FORM:
        raise Bound(f"a date's form of more than {MAX_FORM} characters")
    return strftime_now(form)


class ChatTemplate:
    """A compiled template. Safe to use from several threads.

    ``strftime_now`` gives today's date to templates that ask for it; without it they
    are refused (this module reads no clock). ``cpu_time`` tells the CPU time of the calling
    thread in seconds; without it only work is bounded.

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
        cpu_time: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._cpu_time = cpu_time
        # None, not absent, as Hugging Face passes them: templates test "is not none".
        self._variables: dict[str, object] = {"tools": None, "documents": None}
        self._variables |= {"bos_token": bos_token, "eos_token": eos_token}
        self._environment = _environment(strftime_now)
        try:
            self._template = self._environment.from_string(source)
            #: What is the same for every prompt.
            self._shared = {**self._template.globals, **self._variables}
        except (jinja2.TemplateError, RecursionError, OverflowError, ValueError) as exc:
            why = _in_a_line(exc)
            raise LoadError(f"The model's chat template cannot be used: {why}") from exc

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        inline: bool = False,
    ) -> str:
        """The prompt text, open for the assistant's turn.

        Raises:
            InvalidArgument: the template refuses this conversation.
            TooDear: it takes longer than a few milliseconds, and is to be done ``inline``.
        """
        turns = [_turn(message) for message in messages]
        size = sum(len(message.content) + _MESSAGE for message in messages)
        meter = Meter(size, self._cpu_time, inline=inline)
        try:
            return self._collect(meter, messages=turns, add_generation_prompt=add_generation_prompt)
        except TemplateRefusal as exc:
            raise _refused(f": {exc}") from exc
        except Bound as exc:
            raise _unbounded(exc.message or "") from exc
        except (InvalidArgument, TooDear):
            raise
        except Exception as exc:
            # Anything at all: the template is a program, and not ours.
            raise _refused(f" ({type(exc).__name__}).") from exc

    def _collect(self, meter: Meter, **variables: object) -> str:
        parts: list[str] = []
        size = 0
        values = {**self._shared, **variables}
        context = self._environment.context_of(self._template, meter, values)
        for part in self._template.root_render_func(context):
            size += len(part)
            if size > MAX_OUTPUT:
                raise _unbounded(f"a prompt of more than {MAX_OUTPUT} characters")
            parts.append(part)
        return "".join(parts)


def _turn(message: Message) -> dict[str, str]:
    turn = {"role": message.role, "content": message.content}
    return turn if message.name is None else {**turn, "name": message.name}


def _refused(why: str) -> InvalidArgument:
    return InvalidArgument(
        f"The model's chat template refuses these messages{why}", param="messages"
    )


def _unbounded(what: str) -> InvalidArgument:
    return InvalidArgument(f"The model's chat template may not do this: {what}.", param="messages")
