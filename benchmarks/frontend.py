"""What a streamed token costs in the frontend, and what it costs in NVIDIA's.

``python -m benchmarks.frontend`` starts a worker with the simulated engine and a frontend of ours,
joined by the mux plane, with everything switched on that a service has: API keys, limits,
thresholds, metrics, a trace context in each request. ``--oracle PYTHON``, the interpreter of an
environment with ``ai-dynamo`` 1.5.1, starts NVIDIA's frontend and mocker beside them, under the
same load. One round runs each load on each side in turn, so what else the machine does meets both
alike. Told are medians over the rounds, with their range.

CPU time is that of the frontend's whole process from the first request to the end of the last
answer; so it holds the cost of requests too, spread over their tokens. Compare the columns of one
run: neither machines nor hours are alike.

``--slow-streams N`` also holds so many streams at once on an engine that steps every 200 ms, and
tells errors, and the memory that each of them takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from benchmarks import sse_load
from benchmarks.processes import NotRunning, Process, allow_many_files, environ_of, running
from benchmarks.sse_load import Load, Result
from benchmarks.vocabulary import make_ordinary_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MODEL: Final = "bench"
KEY: Final = "benchmark"
#: What the load sends with each request; NVIDIA's frontend does not look at the key.
HEADERS: Final = {
    "authorization": f"Bearer {KEY}",
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
}
#: Of each answer while many streams are held.
SLOW_TOKENS: Final = 25


@attrs.frozen
class Plan:
    """What is measured."""

    streams: Sequence[int]
    tokens: int
    #: Requests of each connection in each round.
    requests: int
    rounds: int
    step_ms: float
    #: Held at once on a slow engine; 0: not looked at.
    slow_streams: int
    #: The interpreter that has NVIDIA's Dynamo; None: ours alone.
    oracle: str | None = None
    #: Of NVIDIA's mocker: ``--speedup-ratio``.
    speedup: float = 1.0
    #: Seconds between two steps of the engine while many streams are held.
    slow_step: float = 0.2


@attrs.frozen(eq=False)
class Side:
    """A frontend with its worker."""

    name: str
    frontend: Process
    port: int

    def load(self, tokens: int) -> Load:
        return Load(self.port, MODEL, tokens, HEADERS)


@attrs.define(eq=False)
class Figures:
    """The rounds of one side under one load."""

    us_per_token: list[float] = attrs.field(factory=list)
    step_ms: list[float] = attrs.field(factory=list)
    ttft_ms: list[float] = attrs.field(factory=list)
    events_per_read: list[float] = attrs.field(factory=list)
    memory: int = 0
    errors: list[str] = attrs.field(factory=list)

    def add(self, cpu: float, memory: int, result: Result) -> None:
        """One round's; ``cpu`` in seconds, ``memory`` in bytes."""
        self.errors += result.errors
        self.memory = max(self.memory, memory)
        if result.tokens:
            self.us_per_token.append(cpu * 1e6 / result.tokens)
            self.step_ms.append(result.step_ms)
            self.ttft_ms.append(1000 * statistics.median(result.first))
            self.events_per_read.append(result.events / result.reads)

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        series = ("us_per_token", "step_ms", "ttft_ms", "events_per_read")
        return {
            **{name: _told(getattr(self, name)) for name in series},
            "memory_mib": round(self.memory / 2**20, 1),
            "errors": len(self.errors),
            "error_examples": sorted(set(self.errors))[:3],
        }


def _told(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    spread = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 2) for name, value in spread.items()}


# --- the sides ------------------------------------------------------------------------------


def open_ours(stack: ExitStack, folder: Path, step_ms: float) -> Side:
    """Start our worker and frontend."""
    environ = environ_of(folder / f"ours-{step_ms:g}") | {"DYN_TRIO_MUX": "only"}
    worker = stack.enter_context(
        running("dynamo_trio.worker", *_worker_flags(folder, step_ms), environ=environ, talks=False)
    )
    worker.wait_for("is ready after")
    switched_on = {
        "DYN_TRIO_API_KEYS_FILE": str(_keys(folder)),
        "DYN_TRIO_MAX_CONCURRENT_REQUESTS": "100000",
        "DYN_TRIO_MAX_CONCURRENT_REQUESTS_PER_MODEL": "100000",
        "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD": "0.99",
        "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD": "10000000",
    }
    flags = ("--http-host", "127.0.0.1", "--http-port", "0")
    frontend = stack.enter_context(
        running("dynamo_trio.frontend", *flags, environ=environ | switched_on, talks=False)
    )
    port = int(frontend.wait_for("listening on").rstrip().rstrip("/").rpartition(":")[2])
    return _ready(Side("ours", frontend, port))


def _worker_flags(folder: Path, step_ms: float) -> list[str]:
    return [
        *("--engine", "sim", "--model-path", str(folder / "model"), "--model-name", MODEL),
        *("--itl-ms", f"{step_ms:g}", "--max-running", "4096", "--kv-blocks", "1000000"),
    ]


def _keys(folder: Path) -> Path:
    path = folder / "keys"
    path.write_text(f"{KEY}\n")
    return path


def open_theirs(stack: ExitStack, folder: Path, python: str, speedup: float) -> Side:
    """Start NVIDIA's mocker and frontend."""
    environ = {
        **environ_of(folder / "theirs"),
        **{"DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq", "DYN_LOG": "warn"},
        "DYN_TCP_RESPONSE_STREAM_HOST": "lo",  # it wants the name of an interface
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder),
    }
    model = ("--model-path", str(folder / "model"), "--model-name", MODEL)
    pace = ("--speedup-ratio", f"{speedup:g}", "--max-num-seqs", "4096")
    worker = {**environ, "DYN_SYSTEM_HOST": "127.0.0.1", "DYN_SYSTEM_PORT": "0"}
    stack.enter_context(
        running("dynamo.mocker", *model, *pace, environ=worker, talks=False, python=python)
    )
    port = _free_port()
    flags = ("--http-host", "127.0.0.1", "--http-port", str(port), "--router-mode", "round-robin")
    frontend = stack.enter_context(
        running("dynamo.frontend", *flags, environ=environ, talks=False, python=python)
    )
    return _ready(Side("dynamo", frontend, port))


def _free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _ready(side: Side) -> Side:
    """Wait until it answers: it has to find the model, and its connection to the worker, first."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if not sse_load.run(side.load(2), 1, 1).errors:
                return side
        except OSError:
            pass  # it does not listen yet
        time.sleep(0.2)
    raise NotRunning(f"the side {side.name!r} does not answer")


# --- measuring ------------------------------------------------------------------------------


def measure(plan: Plan, sides: Sequence[Side], say: Callable[[str], None]) -> dict[str, Any]:
    """All rounds; the first, which also warms up, is not counted."""
    figures = {(side.name, n): Figures() for n in plan.streams for side in sides}
    for number in range(plan.rounds + 1):
        say(f"round {number} of {plan.rounds}")
        for streams in plan.streams:
            for side in sides:
                before = side.frontend.cpu_seconds()
                result = sse_load.run(side.load(plan.tokens), streams, plan.requests)
                used = side.frontend.cpu_seconds() - before
                if number:
                    figures[side.name, streams].add(used, side.frontend.memory(), result)
    return {
        f"{streams} streams": {side.name: figures[side.name, streams].told() for side in sides}
        for streams in plan.streams
    }


def hold_slow_streams(plan: Plan, side: Side) -> dict[str, Any]:
    """Many streams at once on a slow engine; the first ones, which warm up, are not counted."""
    sse_load.run(side.load(SLOW_TOKENS), min(50, plan.slow_streams), 1)
    before, grown = side.frontend.memory(), 0

    def look() -> None:
        nonlocal grown
        grown = max(grown, side.frontend.memory() - before)

    result = sse_load.run(side.load(SLOW_TOKENS), plan.slow_streams, 1, every_read=look)
    return {
        "streams": plan.slow_streams,
        "errors": len(result.errors),
        "error_examples": sorted(set(result.errors))[:3],
        "kib_per_stream": round(grown / 1024 / plan.slow_streams, 1),
        "step_ms": round(result.step_ms, 1),
    }


# --- telling --------------------------------------------------------------------------------


def ratios(load: dict[str, Any]) -> float | None:
    """Ours over NVIDIA's, of the medians of one run."""
    ours, theirs = load["ours"]["us_per_token"], load.get("dynamo", {}).get("us_per_token")
    return round(ours["median"] / theirs["median"], 2) if ours and theirs else None


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    names = ("side", "us/token", "min", "max", "step ms", "ttft ms", "MiB", "errors")
    lines = [f"{'load':<14}" + "".join(f"{name:>10}" for name in names)]
    for title, load in result["loads"].items():
        for side, told in load.items():
            lines.append(f"{title:<14}{side:>10}" + _cells(told))
        if (ratio := ratios(load)) is not None:
            lines.append(f"{title:<14}{'ratio':>10}{ratio:>10.2f}")
    if slow := result["slow"]:
        lines.append(
            f"{slow['streams']} slow streams: {slow['errors']} errors,"
            f" {slow['kib_per_stream']} KiB for each, steps of {slow['step_ms']} ms"
        )
    return "\n".join(lines)


def _cells(told: dict[str, Any]) -> str:
    cost = told["us_per_token"] or {"median": 0.0, "min": 0.0, "max": 0.0}
    medians = [(told[name] or {"median": 0.0})["median"] for name in ("step_ms", "ttft_ms")]
    numbers = [cost["median"], cost["min"], cost["max"], *medians, told["memory_mib"]]
    return "".join(f"{number:>10.1f}" for number in numbers) + f"{told['errors']:>10}"


# --- the program ----------------------------------------------------------------------------


def run(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Start everything, measure, and end everything."""
    allow_many_files()
    loads: dict[str, Any] = {}
    slow = None
    if plan.rounds:
        with opened(plan, plan.step_ms, alone=False) as sides:
            loads = measure(plan, sides, say)
    if plan.slow_streams:
        with opened(plan, plan.slow_step * 1000, alone=True) as [ours]:
            say(f"{plan.slow_streams} slow streams")
            slow = hold_slow_streams(plan, ours)
    return {"plan": attrs.asdict(plan), "loads": loads, "slow": slow}


@contextmanager
def opened(plan: Plan, step_ms: float, *, alone: bool) -> Iterator[list[Side]]:
    """The processes of both sides, or of ours."""
    with tempfile.TemporaryDirectory(prefix="frontend-") as name, ExitStack() as stack:
        folder = Path(name)
        make_ordinary_model(folder / "model")
        sides = []
        if plan.oracle is not None and not alone:
            sides.append(open_theirs(stack, folder, plan.oracle, plan.speedup))
        sides.append(open_ours(stack, folder, step_ms))
        yield sides


def read_plan(arguments: Sequence[str] | None = None) -> tuple[Plan, Path | None]:
    """The command line; also where the JSON goes, if anywhere."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frontend",
        description="What a streamed token costs in the frontend.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--streams", nargs="+", type=int, default=[32, 128], metavar="N", help="at once")
    add("--tokens", type=int, default=128, metavar="N", help="of each answer")
    add("--requests", type=int, default=4, metavar="N", help="of each connection in a round")
    add("--rounds", type=int, default=5, metavar="N", help="after one that is not counted; 0: none")
    add("--step-ms", type=float, default=10.0, metavar="MS", help="of our engine's step")
    add("--slow-streams", type=int, default=1000, metavar="N", help="held at once; 0: none")
    add("--oracle", metavar="PYTHON", help="an interpreter that has ai-dynamo 1.5.1")
    add("--speedup", type=float, default=1.0, metavar="X", help="of NVIDIA's mocker")
    add("--json", type=Path, default=argparse.SUPPRESS, metavar="FILE", help="write all there too")
    given = parser.parse_args(arguments)
    plan = Plan(
        *(given.streams, given.tokens, given.requests, given.rounds, given.step_ms),
        *(given.slow_streams, given.oracle, given.speedup),
    )
    return plan, getattr(given, "json", None)


def main() -> None:
    """Measure and print."""
    plan, file = read_plan()
    began = time.monotonic()
    result = run(plan, lambda words: print(f"{time.monotonic() - began:6.1f} s  {words}"))
    print(table(result))
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
