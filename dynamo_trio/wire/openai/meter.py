"""What one rendering of a chat template has cost, and where that ends.

Theory of operation
-------------------
Cost is counted in *units* of work, about 20 ns each at worst: a node of the template that may
run, a character that is looked at or copied; an item of a list is :data:`ITEM` of them. Whatever
may take long is charged before it is done, by the size of what goes in, and then for what came
out. So a rendering stops at the same place on every machine, however its work is made up, and
what it holds in memory has been charged, too. The CPU time of the thread is looked at now and
then, for a price that is wrong.

What comes from the request is the client's, not the template's: all bounds grow with it.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, KeysView, ValuesView
from typing import Final

import jinja2
import jinja2.exceptions
from jinja2.utils import Namespace

#: Units that a rendering may take, and as many more for each character of the request.
MAX_WORK, WORK_PER_CHARACTER = 20_000_000, 100
#: Characters, or items, of one value, and as many more for each character of the request.
MAX_VALUE, VALUE_PER_CHARACTER = 1_000_000, 4
#: Units of a rendering that may hold up the event loop: a few milliseconds at worst. Models'
#: templates take some thousands for a short conversation.
INLINE_WORK: Final = 150_000
#: Seconds of CPU time, whatever the units say.
MAX_SECONDS = 10.0
#: Units between two looks at the clock.
_LOOK_EVERY = 500_000
#: Units of an item of a list, and of a call.
ITEM, CALL = 15, 60
#: Units that are not charged yet while a value is weighed.
_PAY_EVERY = 10_000
#: A needle this much longer makes a search slower by one unit for each character of the text.
_NEEDLE = 16
#: What is gone through, whatever it is called for.
_SIZED = (list, tuple, range, KeysView, ValuesView, ItemsView)


class Bound(jinja2.exceptions.SecurityError):
    """The template may not do this, or not so much of it. The message says which rule it is."""


class TooDear(Exception):
    """The rendering takes longer than the event loop may stand still; a thread must do it."""


class Meter:
    """``size``: characters of the request. ``inline``: the event loop waits for the rendering.

    ``limit`` is the most characters, or items, of one value. ``cpu_time`` tells the seconds of
    CPU time that this thread has taken.
    """

    __slots__ = ("_cpu_time", "_inline", "_left", "_look_at", "_until", "limit")

    def __init__(self, size: int, cpu_time: Callable[[], float], *, inline: bool = False) -> None:
        self._cpu_time = cpu_time
        self._inline = inline
        self._left = INLINE_WORK if inline else MAX_WORK + size * WORK_PER_CHARACTER
        self.limit = MAX_VALUE + size * VALUE_PER_CHARACTER
        # The clock of a thread's time is not read before it is needed: most never come so far.
        self._until: float | None = None
        self._look_at = max(0, self._left - _LOOK_EVERY)

    def charge(self, units: int) -> None:
        """Take ``units`` of what is left.

        Raises:
            TooDear, Bound: there are not so many.
        """
        self._left -= units
        if self._left < self._look_at:
            self._look()

    def _look(self) -> None:
        if self._left < 0:
            if self._inline:
                raise TooDear
            raise Bound("so many steps, or copies of so much text")
        now = self._cpu_time()
        self._until = now + MAX_SECONDS if self._until is None else self._until
        if now > self._until:
            raise Bound(f"anything for more than {MAX_SECONDS:g} seconds")
        self._look_at = max(0, self._left - _LOOK_EVERY)

    def fit(self, length: int, what: str) -> None:
        """Refuse to make a value of this length."""
        if length > self.limit:
            raise Bound(f"{what} of more than {self.limit} characters or items")
        self._left -= length  # as charge does
        if self._left < self._look_at:
            self._look()

    def weigh(self, value: object, *, each: int = ITEM) -> None:
        """Charge for a value and all that is in it, shared parts anew; ``each``: for an item.

        Raises:
            TooDear, Bound: it is too long as a text, or takes too much.
        """
        left, spent, todo = self.limit, 0, [value]
        while todo:
            one = todo.pop()
            left -= 1
            spent += each
            if isinstance(one, (str, bytes)):
                left -= len(one)
                spent += len(one)
            elif isinstance(one, dict):
                self._more(todo, len(one) * 2, left)
                todo += [*one.keys(), *one.values()]
            elif isinstance(one, Namespace):
                raise Bound("a namespace is no value")
            elif isinstance(one, _SIZED):
                self._more(todo, len(one), left)
                todo += one
            if left < 0:
                raise Bound(f"a value of more than {self.limit} characters or items")
            if spent > _PAY_EVERY:
                self.charge(spent)
                spent = 0
        self.charge(spent)

    def _more(self, todo: list[object], count: int, left: int) -> None:
        if count + len(todo) > left:
            raise Bound(f"a value of more than {self.limit} characters or items")

    def length(self, value: object) -> None:
        """Charge for a value that is gone through or copied once, but not what is in it."""
        if isinstance(value, (str, bytes)):
            self.charge(len(value))
        elif hasattr(value, "__len__") and not isinstance(value, jinja2.Undefined):
            self.charge(len(value) * ITEM)

    def search(self, whole: str, needles: Iterable[object], *, backwards: bool = False) -> None:
        """Charge for a search. Python's search backwards takes the product of the lengths."""
        longest = max((len(one) for one in needles if isinstance(one, str)), default=0)
        self.charge(len(whole) * (longest if backwards else 1 + min(longest, 128) // _NEEDLE))


def text(meter: Meter, value: object) -> str:
    """``str(value)``, weighed."""
    if not isinstance(value, str):
        meter.weigh(value)
    return str(value)
