"""The page about a graceful stop, as far as it is made from the code."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from dynamo_trio.config import Config, Group
from dynamo_trio.config.option import options_of
from dynamo_trio.config.programs import FRONTEND, STANDALONE, WORKER
from dynamo_trio.frontend import assembly as frontend
from dynamo_trio.lifecycle.phases import MOVES, Ending, Phase
from dynamo_trio.lifecycle.timetable import ESCALATED_ENGINE_CLOSE, Timetable
from dynamo_trio.program.limits import worker_timetable
from dynamo_trio.standalone import assembly as standalone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dynamo_trio.config import ProgramSpec


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines
    )


# --- the timetable ------------------------------------------------------------------------

#: A program, and how its limits follow from its settings.
ROLES: tuple[tuple[ProgramSpec, Callable[[Config], Timetable]], ...] = (
    (WORKER, worker_timetable),
    (FRONTEND, frontend.timetable),
    (STANDALONE, standalone.timetable),
)


def _by_default(spec: ProgramSpec, limits: Callable[[Config], Timetable]) -> Timetable:
    return limits(Config.from_args_and_env([], {}, groups=spec.groups, defaults=spec.defaults))


def _front(value: float | None, limits: Timetable) -> float | None:
    return None if limits.http_drain is None else value


#: What takes how long, in the order of a stop; None where a program has no such step.
LIMITS: dict[str, Callable[[Timetable], float | None]] = {
    "HTTP drain": lambda t: t.http_drain,
    "farewells of the HTTP front": lambda t: _front(t.farewell, t),
    "unregister": lambda t: t.unregister,
    "grace": lambda t: t.grace if t.http_drain is None else None,
    "each callback, where a program has some": lambda t: t.hook,
    "drain": lambda t: t.drain or None,
    "farewells, then the hard end of who is still there": lambda t: t.stop,
    "engine close": lambda t: t.engine_close or None,
    "a stop that a fatal error began, as a whole": lambda t: t.fatal,
    "after SIGINT in a stop, as a whole": lambda t: t.stop + ESCALATED_ENGINE_CLOSE,
    "watchdog, from the signal on": lambda t: t.watchdog_limit,
    "its second line": lambda t: t.watchdog_limit + t.second_line,
}


def timetable() -> str:
    """Each limit of each program by default, in seconds."""
    limits = [_by_default(*role) for role in ROLES]
    rows = (
        (name, *("" if (n := limit(of)) is None else f"{n:g}" for of in limits))
        for name, limit in LIMITS.items()
    )
    return table(("at most, in seconds", *(f"`{spec.module}`" for spec, _ in ROLES)), rows)


# --- the settings -------------------------------------------------------------------------

#: Groups that are about nothing else, and single settings of other groups.
GROUPS = (Group.STOP, Group.STOP_WORKER, Group.STOP_FRONTEND, Group.CANARY)
OTHERS = re.compile(
    "DYN_ENGINE_HEALTH|DYN_SYSTEM_|DYN_HTTP_SVC_(HEALTH|LIVE)|DRAIN|HEARTBEAT|LEASE_TTL"
    "|REQUEST_LIMIT"
)


def settings() -> str:
    """Every variable that has a say in a stop, or in what leads to one."""
    options = options_of(Config).values()
    chosen = [o for g in GROUPS for o in options if o.group is g and o.env]
    chosen += [o for o in options if o.group not in GROUPS and OTHERS.search(o.env or "")]
    rows = ((f"`{o.env}`", o.default_text, o.rule_text, o.help) for o in chosen)
    return table(("variable", "default", "must be", "meaning"), rows)


# --- the diagram --------------------------------------------------------------------------

WIDTH, BOX, HEIGHT, LINE, GAP = 720, 150, 40, 18, 14
_STYLE = (
    ".stop-states text{font:13px sans-serif;fill:currentColor}"
    ".stop-states .name{font-weight:bold;text-anchor:middle}"
    ".stop-states .ending{font-style:italic}"
    ".stop-states rect{fill:none;stroke:currentColor;rx:6}"
    ".stop-states line{stroke:currentColor;marker-end:url(#stop-arrow)}"
)


def diagram() -> str:
    """The phases and every move between them, as a drawing without blank lines."""
    drawn: list[str] = []
    y = 10
    for move in MOVES:
        drawn += _box(move.source, y)
        end = y + HEIGHT + 2 * GAP + LINE * len(move.when)
        drawn += _arrow(y + HEIGHT, end, move.when)
        y = end
    drawn += _box(MOVES[-1].target, y)
    return "\n".join(
        [
            '<svg class="stop-states" role="img" aria-label="Phases of a stop"'
            f' viewBox="0 0 {WIDTH} {y + HEIGHT + 10}" xmlns="http://www.w3.org/2000/svg">',
            f"<style>{_STYLE}</style>",
            '<defs><marker id="stop-arrow" markerWidth="9" markerHeight="8" refX="8" refY="4"'
            ' orient="auto"><path d="M0,0 L9,4 L0,8 z" fill="currentColor"/></marker></defs>',
            *drawn,
            "</svg>",
        ]
    )


def _box(phase: Phase, y: int) -> Iterator[str]:
    yield f'<rect x="10" y="{y}" width="{BOX}" height="{HEIGHT}"/>'
    yield f'<text class="name" x="{10 + BOX // 2}" y="{y + HEIGHT // 2 + 5}">{phase.name}</text>'


def _arrow(top: int, bottom: int, when: dict[Ending, str]) -> Iterator[str]:
    x = 10 + BOX // 2
    yield f'<line x1="{x}" y1="{top}" x2="{x}" y2="{bottom - 1}"/>'
    for number, (ending, cause) in enumerate(when.items(), start=1):
        y = top + GAP + LINE * number - 5
        yield f'<text class="ending" x="{x + 15}" y="{y}">{ending}</text>'
        yield f'<text x="{x + 105}" y="{y}">{escape(cause)}</text>'
