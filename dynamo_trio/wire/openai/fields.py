"""Rules for the fields of an OpenAI request body.

Theory of operation
-------------------
A body is decoded to plain JSON values once; then every field is judged by one
*rule*, a function ``(value, name) -> value`` that returns the value in its typed
form or raises :class:`~dynamo_trio.errors.InvalidArgument`. A message always names
the field, the rule, and what was found (shortened: it goes back to the client and
into logs, and must not be as long as the input).

Null stands for "absent" in all of OpenAI's API, so :class:`Fields` treats both
alike and no rule ever sees ``None``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import msgspec

from dynamo_trio.errors import InvalidArgument, PayloadTooLarge

T = TypeVar("T")
#: One decoded JSON value. The only place where an untyped value is let in.
Json = Any
Rule = Callable[[Json, str], T]

MAX_SHOWN = 60

#: JSON values in one body. The decoder holds the GIL and makes an object of every value,
#: so their number, and not the size of the body, is what stops everyone else. A prompt of
#: a million token ids still fits.
MAX_VALUES = 2**20
#: So small that counting one piece does not hold the GIL for long either.
_PIECE = 2**18
_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b",[{"))


def shown(value: Json) -> str:
    """``value`` as JSON for an error message, at most :data:`MAX_SHOWN` characters."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and abs(value) > 10**MAX_SHOWN:
        return "a number far too large"  # and one that not every encoder would take
    text = json.dumps(value[: MAX_SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def refuse(name: str, rule: str, value: Json) -> InvalidArgument:
    """The error for a field that breaks its rule."""
    return InvalidArgument(f"'{name}' must be {rule}, not {shown(value)}.", param=name)


def unsupported(name: str, detail: str = "") -> InvalidArgument:
    """The error for a known field whose effect this server does not have yet."""
    return InvalidArgument(f"'{name}' is not supported here yet{detail}.", param=name)


class NotJson(InvalidArgument):
    """What should be JSON is not."""


def decode_object(body: bytes, most: int | None = None) -> dict[str, Json]:
    """The JSON object in ``body``.

    Raises:
        PayloadTooLarge: more than ``most`` values, or :data:`MAX_VALUES`.
        NotJson: not UTF-8, or not JSON.
        InvalidArgument: nested too deeply, a number that is too large, half of a surrogate pair, or
            not an object.
    """
    _bound_values(body, most or MAX_VALUES)
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise InvalidArgument("The body is nested too deeply.") from None
    except msgspec.ValidationError as exc:  # a number that no float can hold
        raise InvalidArgument(f"The body cannot be read: {exc}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        if _has_lone_surrogate(body):
            why = "The body holds half of a surrogate pair (\\ud800 to \\udfff), which is no text."
            raise InvalidArgument(why) from None
        raise NotJson(f"The body is not valid JSON: {exc}.") from None
    if not isinstance(value, dict):
        raise InvalidArgument(f"The body must be a JSON object, not {shown(value)}.")
    return value


def _has_lone_surrogate(body: bytes) -> bool:
    """Is it JSON by the letter of its grammar, with what no text can hold?"""
    if len(body) > MAX_VALUES or b"\\ud" not in body.lower():
        return False  # the standard library takes much longer to read what is long
    try:
        text = json.dumps(json.loads(body), ensure_ascii=False)
    except (ValueError, RecursionError):
        return False
    return _SURROGATE.search(text) is not None


def _bound_values(body: bytes, most: int) -> None:
    """Refuse a body with so many values that decoding it would stop the process.

    Every value but the outermost follows a comma, an opening bracket or brace, or the
    colon of a key that does. So these three, outside of strings, bound the values.
    """
    if len(body) <= most:
        return  # each takes a byte
    count, in_string, carry = 0, 0, b""
    for start in range(0, len(body), _PIECE):
        # Escaped backslashes go first; then a backslash before a quote does escape it.
        plain = (carry + body[start : start + _PIECE]).replace(b"\\\\", b"")
        carry = plain[-1:] if plain.endswith(b"\\") else b""
        parts = plain[: len(plain) - len(carry)].replace(b'\\"', b"").split(b'"')
        count += sum(len(part.translate(None, _NOT_STRUCTURE)) for part in parts[in_string::2])
        in_string ^= (len(parts) - 1) & 1
        if count > most:
            raise PayloadTooLarge(f"The body must have at most {most} JSON values.")


class Fields:
    """The fields of one JSON object, each read at most once and by one rule."""

    def __init__(self, values: Mapping[str, Json], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def name(self, key: str) -> str:
        """The field's full name, as the client would write the path."""
        return f"{self._prefix}{key}"

    def lack(self, keys: frozenset[str]) -> bool:
        """Is none of these there?"""
        return keys.isdisjoint(self._values)

    def optional(self, key: str, rule: Rule[T]) -> T | None:
        """The field's value, or None when it is absent or null."""
        value = self._values.get(key)
        return None if value is None else rule(value, self._prefix + key)

    def required(self, key: str, rule: Rule[T]) -> T:
        """The field's value; absent or null is an error."""
        value = self._values.get(key)
        if value is None:
            name = self.name(key)
            raise InvalidArgument(f"'{name}' is required.", param=name)
        return rule(value, self._prefix + key)

    def flag(self, key: str) -> bool:
        """A boolean that is false when absent."""
        value = self._values.get(key)
        return False if value is None else boolean(value, self._prefix + key)

    def check(self, rules: Mapping[str, Rule[object]]) -> None:
        """Judge fields whose value is not used, only allowed or not."""
        if rules.keys().isdisjoint(self._values):
            return  # as nearly always
        for key, rule in rules.items():
            self.optional(key, rule)

    def forbid_unknown(self, *known: Collection[str]) -> None:
        """Refuse every key that is in none of ``known`` (OpenAI refuses them too)."""
        names = known[0] if len(known) == 1 else set().union(*known)
        for key, value in self._values.items():
            if key not in names and value is not None:
                name = self.name(shown(key)[1:-1])
                raise InvalidArgument(f"Unrecognized request argument: {name}", param=name)


# --- rules -------------------------------------------------------------------------


def boolean(value: Json, name: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise refuse(name, "true or false", value)
    return value


def text(value: Json, name: str) -> str:
    """A string, empty or not, without NUL.

    A lone surrogate cannot get here: the JSON decoder refuses it.
    """
    if not isinstance(value, str):
        raise refuse(name, "a string", value)
    if "\0" in value:
        raise InvalidArgument(f"'{name}' must not contain the character U+0000.", param=name)
    return value


def name_text(value: Json, name: str) -> str:
    """A string of at least one character."""
    if not text(value, name):
        raise InvalidArgument(f"'{name}' must not be empty.", param=name)
    return str(value)


def integer(low: int, high: int) -> Rule[int]:
    """A whole number from ``low`` to ``high``, both included."""

    def rule(value: Json, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise refuse(name, f"a whole number from {low} to {high}", value)
        return value

    return rule


def number(low: float, high: float, *, above: bool = False) -> Rule[float]:
    """A number from ``low`` to ``high``; ``above`` leaves ``low`` itself out."""
    rule_text = (
        f"a number {'above' if above else 'from'} {low:g} {'up ' if above else ''}to {high:g}"
    )

    def rule(value: Json, name: str) -> float:
        # JSON has no NaN and no infinity, and true is not 1 here.
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise refuse(name, rule_text, value)
        if not low <= value <= high or (above and value == low):
            raise refuse(name, rule_text, value)
        return float(value)

    return rule


def array(value: Json, name: str) -> list[Json]:
    """A JSON array."""
    if not isinstance(value, list):
        raise refuse(name, "a list", value)
    return value


def mapping(value: Json, name: str) -> dict[str, Json]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise refuse(name, "an object", value)
    return value


def anything(value: Json, name: str) -> None:
    """Accepted and dropped: the field cannot change the answer."""


def only(*allowed: Json) -> Rule[None]:
    """Values that ask for what happens anyway; any other needs what is not there yet.

    Types are compared too: ``true`` is not ``1``, but ``1.0`` is.
    """

    def rule(value: Json, name: str) -> None:
        for one in allowed:
            if value == one and isinstance(value, bool) == isinstance(one, bool):
                return
        raise unsupported(name, f" (value {shown(value)})")

    return rule
