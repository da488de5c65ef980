"""Which token a simulated core writes next: pure functions of the tokens before.

Theory of operation
-------------------
A request is continued on another worker by sending prompt and answer so far as the new
prompt. For the continuation to equal the undisturbed answer, nothing may enter the choice
but the tokens themselves, however they are divided between prompt and answer. They are
folded, one after the other, into a 64-bit *state*; mixing it gives the *draw*, from which a
vocabulary takes the next token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MASK = (1 << 64) - 1
#: The state before the first token.
EMPTY = 0x243F6A8885A308D3


def fold(state: int, token_ids: Iterable[int]) -> int:
    """The state after more tokens: one step of a linear congruential generator for each."""
    for token_id in token_ids:
        state = ((state ^ token_id) * 0x5851F42D4C957F2D + 0x14057B7EF767814F) & _MASK
    return state


def mix(state: int, salt: int = 0) -> int:
    """A well spread number of 64 bits (the finaliser of splitmix64)."""
    z = (state + salt * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class Vocabulary(Protocol):
    """Turns a draw into a token."""

    def pick(self, draw: int, previous: int) -> int:
        """The token for ``draw`` after ``previous``, the last token before it."""
        ...


@frozen
class AnyOf:
    """Any of the given token ids, all equally likely; a ``range`` will do."""

    token_ids: Sequence[int] = field()

    @token_ids.validator
    def _not_empty(self, _attribute: object, value: Sequence[int]) -> None:
        if not value:
            raise ValueError("a vocabulary needs at least one token")

    def pick(self, draw: int, previous: int) -> int:
        """See :class:`Vocabulary`."""
        return self.token_ids[draw % len(self.token_ids)]


_VOWELS = b"aeiou"
_CONSONANTS = b"bdfgklmnprstvz"
_SPACE = ord(" ")
# Sets: `300 in b"..."` raises, and a token id need not be a byte.
_IS_VOWEL = frozenset(_VOWELS)
_IS_CONSONANT = frozenset(_CONSONANTS)


@frozen
class Syllables:
    """Words that can be read, for a tokenizer whose token ids are bytes.

    A letter depends on the one before it, so words are syllables of consonant and vowel.
    """

    def pick(self, draw: int, previous: int) -> int:
        """See :class:`Vocabulary`."""
        draw, kind = draw >> 8, draw & 0xFF
        if previous in _IS_CONSONANT:
            return _VOWELS[draw % len(_VOWELS)]
        if previous in _IS_VOWEL and kind < 96:  # a word has 2.7 syllables on average
            return _SPACE
        return _CONSONANTS[draw % len(_CONSONANTS)]
