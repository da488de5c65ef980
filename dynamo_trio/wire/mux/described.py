"""The protocol's tables and its state diagram, made from the code for the documentation.

Theory of operation
-------------------
Tables are Markdown. The diagram is SVG: boxes stand where :data:`_PLACES` puts them, and every
arrow and word comes from the transition table (none of them has a character that XML would have to
escape; a test parses the drawing). A state without a place is an error, so the
drawing cannot fall behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import inspect

from dynamo_trio.wire.mux import limits
from dynamo_trio.wire.mux.client_connection import ClientConnection
from dynamo_trio.wire.mux.frames import FRAMES, OPTIONAL, GoAwayCode
from dynamo_trio.wire.mux.stream_states import MOVES, Move, StreamState
from dynamo_trio.wire.mux.worker_connection import WorkerConnection

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dynamo_trio.wire.mux.frames import Frame


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in cells) + " |" for cells in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("``", "`")


# --- frames ------------------------------------------------------------------------------


def frames() -> str:
    """Every frame: number, name, who sends it, the elements of its array, and its meaning."""
    rows = (
        (str(int(number)), f"`{kind.type.name}`", _senders(kind), _elements(kind),
         kind.__doc__ or "")
        for number, kind in sorted(FRAMES.items())
    )  # fmt: skip
    return _table(("type", "name", "from", "elements", "meaning"), rows)


def _senders(kind: type[Frame]) -> str:
    takers = {"client": WorkerConnection(), "worker": ClientConnection()}
    senders = [sender for sender, taker in takers.items() if taker.takes(kind)]
    return "both" if len(senders) == 2 else senders[0]


def _elements(kind: type[Frame]) -> str:
    form = inspect.type_info(kind)
    assert isinstance(form, inspect.StructType)
    return ", ".join(f"{field.name}: {_form(field)}" for field in form.fields)


def _form(field: inspect.Field) -> str:
    optional = "" if field.required else "?"
    return _type_name(field.type) + optional


def _type_name(kind: inspect.Type) -> str:
    match kind:
        case inspect.ListType(item_type=item):
            return f"[{_type_name(item)}]"
        case inspect.DictType():
            return "{str: str}"
        case inspect.UnionType(types=types):
            return " or ".join(_type_name(one) for one in types)
        case inspect.NoneType():
            return "nil"
        case _:
            return type(kind).__name__.removesuffix("Type").lower()


def go_away_codes() -> str:
    """The codes of a GOAWAY."""
    return ", ".join(f"`{code.value}`" for code in GoAwayCode)


# --- limits ------------------------------------------------------------------------------

_MEANINGS = {
    "MAX_FRAME": "bytes of a frame's type and body",
    "MAX_PIECE": "bytes of a payload in one frame; above it the payload goes ahead in PARTs",
    "MAX_PATH": "characters of a path",
    "MAX_REQUEST_ID": "characters of a request id",
    "MAX_METADATA": "bytes of the keys and values of one request's metadata",
    "MAX_METADATA_ITEMS": "entries of one request's metadata",
    "MAX_PATHS": "paths that one DRAINING or SERVING names",
    "MAX_TEXT": "characters of the text of a GOAWAY",
    "MAX_SOFTWARE": "characters of the name of a peer's software",
    "MAX_PROCESS": "characters of what tells a peer's process from others",
    "MAX_SID": "the last stream of a connection",
    "MAX_TOKEN": "the highest token id",
    "MAX_CREDIT": "credit that a stream may have",
    "BYTES_PER_CREDIT": "bytes of an item for each of which it costs one more credit",
    "MAX_NUMBER": "pings, notices, places, nanoseconds, and what HELLO says of limits",
}


def fixed_limits() -> str:
    """Limits that belong to the version of the protocol."""
    rows = ((f"{getattr(limits, name)}", meaning) for name, meaning in _MEANINGS.items())
    return _table(("limit", "of"), [*rows, (str(OPTIONAL), "the first frame type to be ignored")])


def agreed_limits() -> str:
    """Limits that HELLO tells, with what is told by default."""
    form = limits.MuxLimits()
    return _table(
        ("element of HELLO", "default", "meaning"),
        [
            ("max_streams", str(form.max_streams), "requests at once that a worker takes over"
             " this connection; a client's number means nothing"),
            ("max_message", str(form.max_message), "bytes of the largest payload that is taken"),
        ],
    )  # fmt: skip


# --- states ------------------------------------------------------------------------------


def states() -> str:
    """The states of a stream."""
    return _table(("state", "meaning"), ((f"`{s.name}`", s.value) for s in StreamState))


def moves() -> str:
    """The transition table."""
    return _table(
        ("state", "sender", "frame", "next", "remark"),
        (
            (f"`{m.source.name}`", m.sender.value, f"`{m.frame.name}`", f"`{m.target.name}`",
             m.remark)
            for m in MOVES
        ),
    )  # fmt: skip


_WIDTH, _HEIGHT = 260, 96
#: The left upper corner of each box.
_PLACES = {
    StreamState.IDLE: (270, 10),
    StreamState.OFFERED: (10, 190),
    StreamState.ASKED: (530, 190),
    StreamState.TALKING: (10, 390),
    StreamState.ANSWERING: (530, 390),
    StreamState.ENDED: (270, 590),
}
_LINE = 14
_STYLE = (
    "text{font:12px sans-serif;fill:currentColor}.name{font-weight:bold}"
    "rect{fill:none;stroke:currentColor;rx:6}"
    "line{stroke:currentColor;marker-end:url(#mux-arrow)}"
)


def diagram() -> str:
    """The transition table as a drawing, without blank lines so that Markdown takes it whole."""
    parts = [
        '<svg class="mux-states" role="img" aria-label="States of a stream"'
        ' viewBox="0 0 800 700" xmlns="http://www.w3.org/2000/svg">',
        f"<style>{_STYLE}</style>",
        '<defs><marker id="mux-arrow" markerWidth="9" markerHeight="8" refX="8" refY="4"'
        ' orient="auto"><path d="M0,0 L9,4 L0,8 z" fill="currentColor"/></marker></defs>',
        *(line for state in StreamState for line in _box(state)),
        *(line for pair in _arrows() for line in _arrow(*pair)),
        "</svg>",
    ]
    return "\n".join(parts)


def _words(found: Iterable[Move]) -> Iterator[str]:
    """``client: CANCEL, STOP`` for each sender."""
    by_sender: dict[str, list[str]] = {}
    for move in found:
        by_sender.setdefault(move.sender.value, []).append(move.frame.name)
    return (f"{sender}: {', '.join(dict.fromkeys(names))}" for sender, names in by_sender.items())


def _box(state: StreamState) -> Iterator[str]:
    x, y = _PLACES[state]
    yield f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}"/>'
    stays = [f"stays: {w}" for w in _words(m for m in MOVES if m.source is m.target is state)]
    for at, line in enumerate([state.name, *_wrapped(state.value), *stays]):
        kind = ' class="name"' if at == 0 else ""
        yield f'<text x="{x + 8}" y="{y + 18 + at * _LINE}"{kind}>{line}</text>'


def _wrapped(text: str, width: int = 36) -> Iterator[str]:
    line = ""
    for word in text.split():
        if len(line) + len(word) >= width:
            yield line
            line = ""
        line = f"{line} {word}".strip()
    yield line


def _arrows() -> Iterator[tuple[StreamState, StreamState]]:
    pairs = ((m.source, m.target) for m in MOVES if m.source is not m.target)
    return iter(dict.fromkeys(pairs))


def _arrow(source: StreamState, target: StreamState) -> Iterator[str]:
    (x1, y1), (x2, y2) = _ends(source, target)
    yield f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'
    words = list(_words(m for m in MOVES if (m.source, m.target) == (source, target)))
    # Near the beginning, where arrows to one box are still apart. Words stand to the left of what
    # runs to the left, but those of long arrows inside, where no box is.
    far = _is_far(source, target)
    part = 6 if far else 3
    x, y = x1 + (x2 - x1) // part, y1 + (y2 - y1) // part - _LINE * len(words) * (y1 == y2)
    left = x1 > x2 if far or source is StreamState.IDLE else x1 < x2 and y1 < y2
    x, anchor = (x - 12, "end") if left else (x + 12, "start")
    for at, line in enumerate(words):
        place = f'x="{x}" y="{y + 6 + at * _LINE}" text-anchor="{anchor}"'
        yield f"<text {place}>{line}</text>"


def _ends(source: StreamState, target: StreamState) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where an arrow leaves one box and where it meets the other."""
    (sx, sy), (tx, ty) = _PLACES[source], _PLACES[target]
    if sy == ty:
        right = tx > sx
        y = sy + _HEIGHT // 2
        return (sx + _WIDTH * right, y), (tx + _WIDTH * (not right), y)
    side = (tx > sx) - (tx < sx)
    # A far box is left at the corner and met near its middle: no arrow lies on another.
    start, end = (
        (_WIDTH // 2, _WIDTH // 12) if _is_far(source, target) else (_WIDTH // 4, _WIDTH // 4)
    )
    return (
        (sx + _WIDTH // 2 + side * _WIDTH // start, sy + _HEIGHT),
        (tx + _WIDTH // 2 - side * _WIDTH // end, ty),
    )


def _is_far(source: StreamState, target: StreamState) -> bool:
    """Is there a row of boxes between?"""
    return _PLACES[target][1] - _PLACES[source][1] > 3 * _HEIGHT
