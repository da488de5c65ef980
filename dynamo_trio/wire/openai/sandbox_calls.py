"""What a chat template may call, and the price of it: filters, tests, methods and functions."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.filters
import jinja2.runtime
import jinja2.utils

from dynamo_trio.wire.openai.meter import CALL, ITEM, Bound, Meter, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from dynamo_trio.wire.openai.sandbox import Context, Sandbox

#: Spaces, or characters, of one step of indentation.
MAX_INDENT = 64
#: Characters of a text that becomes a number, and decimals of one that is rounded.
MAX_DIGITS = 1000
MAX_DECIMALS = 100
#: Units of an item for which Python is called, and where that is dear.
_CALLED, _DEAR = 50, 800

#: Not there: padding to a width, and what no model's template needs.
_NO_FILTERS = frozenset(
    {"batch", "center", "filesizeformat", "format", "pprint", "random", "slice", "urlize"}
    | {"wordwrap", "xmlattr"}
)
#: Take the same time for any value.
_AT_ONCE = frozenset({"abs", "attr", "count", "d", "default", "first", "last", "length"})
#: Go through a list once, without a look into its items.
_SHALLOW = frozenset({"items", "list", "map", "reject", "rejectattr", "reverse", "select",
                      "selectattr"})  # fmt: skip
#: Units for an item of what is compared and sorted.
_DEEP = {"dictsort": _CALLED, "groupby": _DEAR, "max": _CALLED, "min": _CALLED, "sort": _CALLED,
         "unique": _CALLED}  # fmt: skip
#: Units for a character.
_TEXTS = {"capitalize": 1, "lower": 1, "striptags": 4, "title": 8, "trim": 1, "truncate": 1,
          "upper": 1, "urlencode": 20, "wordcount": 6}  # fmt: skip

#: Methods of texts that look at as much as their argument is long.
_BRIEF = frozenset({"endswith", "startswith"})
#: Those that go through the text once.
_LINEAR = frozenset(
    {"capitalize", "casefold", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "islower"}
    | {"isnumeric", "isspace", "istitle", "isupper", "lower", "removeprefix", "removesuffix"}
    | {"splitlines", "swapcase", "title", "upper"}
)
_FORWARDS = frozenset({"count", "find", "index", "lstrip", "partition", "rstrip", "split", "strip"})
_BACKWARDS = frozenset({"rfind", "rindex", "rpartition", "rsplit"})
#: Methods of dictionaries, and those of lists, which look at all that is in one.
_OF_DICTS = frozenset({"get", "items", "keys", "values"})
_OF_LISTS = frozenset({"copy", "count", "index"})

#: What brings its own price, in its body or by what it is given.
_OURS = (jinja2.runtime.Macro, jinja2.runtime.BlockReference, jinja2.runtime.LoopContext,
         jinja2.utils.Joiner, jinja2.Undefined)  # fmt: skip
#: Objects whose methods may be called.
_OWNERS = (jinja2.runtime.LoopContext, jinja2.utils.Cycler)

#: A width or precision in ``str.format`` that is long, or that an argument gives.
_WIDTH = re.compile(r":[^{}]*(\d{4}|\{)")


# --- calls -----------------------------------------------------------------------------------


def take(
    sandbox: Sandbox,
    meter: Meter,
    called: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> str | None:
    """Charge for a call, or refuse it; what it gives, where it had to be done otherwise."""
    if isinstance(called, _OURS):
        return None
    if any(called is known for known in sandbox.globals.values()):
        _given(meter, args, kwargs)
        return None
    method = getattr(called, "__wrapped__", called)  # Jinja wraps str.format
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if isinstance(owner, str):
        return _text_method(meter, owner, name, args, kwargs)
    if isinstance(owner, dict) and name in _OF_DICTS:
        _given(meter, args, kwargs)
    elif isinstance(owner, (list, tuple, range)) and name in _OF_LISTS:
        meter.weigh(owner)
        meter.weigh(args)
    elif isinstance(owner, _OWNERS):
        meter.weigh(args)
    else:
        raise Bound(f"{name}() of {type(owner).__name__}" if name else "this call")
    return None


def _given(meter: Meter, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for one in (*args, *kwargs.values()):
        meter.length(one)


def _text_method(
    meter: Meter, owner: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str | None:
    needles = (*args, *kwargs.values())
    if name == "replace":
        return replace(meter, owner, *args, **kwargs)
    if name == "join":
        return joined(meter, owner, *args)
    if name in ("format", "format_map"):
        _check_format(meter, owner, args, kwargs)
    elif name in _BRIEF:
        meter.weigh(args)
    elif name in _LINEAR:
        meter.charge(len(owner))
    elif name in _FORWARDS or name in _BACKWARDS:
        meter.search(owner, needles, backwards=name in _BACKWARDS)
    else:
        raise Bound(f"{name}() of a text")
    return None


def _check_format(
    meter: Meter, form: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """``form.format(...)``, or ``form.format_map(...)``."""
    meter.weigh([form, args, dict(kwargs)])
    if _WIDTH.search(form):
        raise Bound("a width in a format")
    fields = form.count("{")
    meter.charge(fields * 100)
    meter.fit(fields * len(str((args, kwargs))), "a formatted text")


def prepare(meter: Meter, left: Any, right: Any, *, inside: bool) -> None:
    """Charge for ``left == right`` and the like; ``inside``: for ``left in right``."""
    if isinstance(right, str):
        if inside:
            meter.search(right, (left,))
        elif isinstance(left, str):
            meter.charge(min(len(left), len(right)))
    elif inside and isinstance(right, dict):
        meter.weigh(left)
    elif inside or not isinstance(left, str):
        meter.weigh(right)


# --- filters and tests -----------------------------------------------------------------------


def metered_filters(filters: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Jinja's filters, each with its price; some are our own."""
    ours: dict[str, Callable[..., Any]] = {
        "e": _escape, "escape": _escape, "forceescape": _escape, "float": _float,
        "indent": _indent, "int": _int, "join": _join, "replace": replace, "round": _round,
        "safe": text, "string": text, "sum": _sum, "tojson": _tojson,
    }  # fmt: skip
    found = {name: partial(_with_meter, one) for name, one in ours.items()}
    for name, one in filters.items():
        if name in _NO_FILTERS or name in ours:
            continue
        if name in _AT_ONCE:
            found[name] = partial(_priced, one, _at_once)
        elif name in _SHALLOW:
            found[name] = partial(_priced, one, Meter.length)
        elif name in _DEEP:
            found[name] = partial(_priced, one, partial(Meter.weigh, each=_DEEP[name]))
        elif name in _TEXTS:
            found[name] = partial(_priced, one, partial(_by_character, units=_TEXTS[name]))
    return {name: jinja2.pass_context(one) for name, one in found.items()}


def metered_tests(tests: Mapping[str, Any]) -> dict[str, Any]:
    """Jinja's tests: those that compare or go through a text have a price."""
    compare = {"==", "!=", "<", "<=", ">", ">=", "eq", "equalto", "ne", "lt", "lessthan", "le",
               "gt", "greaterthan", "ge", "in"}  # fmt: skip

    def compared(
        test: Callable[..., Any], inside: bool, context: Context, value: Any, *args: Any
    ) -> Any:
        context.meter.charge(CALL)
        for other in args[:1]:
            prepare(context.meter, value, other, inside=inside)
        return test(value, *args)

    found = dict(tests)
    for name, one in tests.items():
        if name in compare:
            found[name] = jinja2.pass_context(partial(compared, one, name == "in"))
        elif name in ("lower", "upper"):
            priced = partial(_priced, one, partial(_by_character, units=1))
            found[name] = jinja2.pass_context(priced)
    return found


def _with_meter(
    function: Callable[..., Any], context: Context, value: Any, *args: Any, **kwargs: Any
) -> Any:
    meter = context.meter
    meter.charge(CALL)
    for one in (*args, *kwargs.values()):
        if isinstance(one, str):
            meter.charge(len(one))
    return function(meter, value, *args, **kwargs)


def _priced(
    function: Callable[..., Any],
    price: Callable[[Meter, Any], Any],
    context: Context,
    value: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    meter = context.meter
    meter.charge(CALL)
    _given(meter, args, kwargs)
    value = _chosen(price(meter, value), value)
    made = function(*_first(function, context), value, *args, **kwargs)
    if hasattr(made, "__next__"):
        return _each(meter, made)
    if price is not _at_once:
        meter.length(made)
    return made


def _chosen(priced: str | None, value: Any) -> Any:
    """A price may put the text of a value in its place."""
    return value if priced is None else priced


def _first(function: Callable[..., Any], context: Context) -> tuple[object, ...]:
    """What Jinja would hand to this filter before the value."""
    wants = getattr(function, "jinja_pass_arg", None)
    if wants is None:
        return ()
    given = {"context": context, "eval_context": context.eval_ctx}
    return (given.get(wants.name, context.environment),)


def _each(meter: Meter, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        meter.charge(_CALLED)
        yield item


def _at_once(meter: Meter, value: Any) -> None:
    del meter, value


def _by_character(meter: Meter, value: Any, *, units: int) -> str:
    whole = text(meter, value)
    meter.charge(len(whole) * units)
    return whole


# --- our own filters -------------------------------------------------------------------------


def joined(meter: Meter, separator: str, items: Iterable[object]) -> str:
    parts: list[str] = []
    size = 0
    for item in items:
        parts.append(text(meter, item))
        size += len(parts[-1]) + len(separator)
        meter.charge(ITEM + len(parts[-1]) + len(separator))
        if size > meter.limit + len(separator):
            raise Bound(f"a text of more than {meter.limit} characters")
    return separator.join(parts)


def _join(
    meter: Meter, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = (_attribute(item, attribute) for item in value)
    return joined(meter, text(meter, d), value)


def _attribute(item: Any, name: str | int) -> Any:
    """``item.a.b``, of dictionaries and lists alone."""
    for part in name.split(".") if isinstance(name, str) else [name]:
        try:
            item = item[int(part) if isinstance(part, str) and part.isdigit() else part]
        except (LookupError, TypeError):
            return jinja2.Undefined(name=str(name))
    return item


def replace(meter: Meter, s: object, old: object, new: object, count: int | None = None) -> str:
    whole, before, after = text(meter, s), text(meter, old), text(meter, new)
    meter.search(whole, (before,))
    times = whole.count(before) if count is None or count < 0 else min(count, len(whole) + 1)
    meter.fit(len(whole) + times * len(after), "a text")
    return whole.replace(before, after, -1 if count is None else count)


def _indent(
    meter: Meter, s: object, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    whole = text(meter, s)
    step = _step(width) or ""
    meter.fit(len(whole) * 2 + (whole.count("\n") + 1) * (len(step) + ITEM), "an indented text")
    return jinja2.filters.do_indent(whole, step, first, blank)


def _step(width: int | str | None) -> str | None:
    if width is None:
        return None
    if (width if isinstance(width, int) else len(width)) > MAX_INDENT:
        raise Bound(f"an indentation of more than {MAX_INDENT} characters")
    return " " * width if isinstance(width, int) else width


def _sum(
    meter: Meter, iterable: Iterable[Any], attribute: str | int | None = None, start: float = 0
) -> Any:
    if not isinstance(start, (int, float)):
        raise Bound("a sum of what are no numbers")
    total: Any = start
    for item in iterable:
        meter.charge(_CALLED)
        value = item if attribute is None else item[attribute]
        if not isinstance(value, (int, float)):
            raise TypeError("only numbers can be summed up")
        total += value
    return total


def _escape(meter: Meter, value: object) -> str:
    whole = text(meter, value)
    meter.charge(len(whole))
    made = str(jinja2.filters.do_forceescape(whole))
    meter.fit(len(made), "an escaped text")
    return made


def _int(meter: Meter, value: Any, default: int = 0, base: int = 10) -> int:
    return jinja2.filters.do_int(_brief(meter, value), default, base)


def _float(meter: Meter, value: Any, default: float = 0.0) -> float:
    return jinja2.filters.do_float(_brief(meter, value), default)


def _brief(meter: Meter, value: Any) -> Any:
    if isinstance(value, (str, bytes)) and len(value) > MAX_DIGITS:
        raise Bound(f"a number of more than {MAX_DIGITS} characters")
    return value


def _round(meter: Meter, value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > MAX_DECIMALS:
        raise Bound(f"rounding to more than {MAX_DECIMALS} decimals")
    return jinja2.filters.do_round(value, precision, method)


def _tojson(
    meter: Meter,
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not Jinja's own filter, which escapes for HTML.
    meter.weigh([value, separators], each=_CALLED)
    made = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=_step(indent),
        separators=separators,
        sort_keys=sort_keys,
    )
    meter.fit(len(made), "a JSON text")
    return made
