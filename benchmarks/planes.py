"""What a token costs on each request plane, and what an open stream holds.

``python -m benchmarks.planes`` starts, for each plane, a worker with the simulated engine, a
client process that only counts (:mod:`benchmarks.plane_client`), and a frontend; all over
loopback, all with the same steps of the engine. One round runs each load on each plane in turn,
so what else the machine does meets all of them alike. Told are medians over the rounds, with
the range of one plane's rounds behind them in ``--json``.

CPU time is that of whole processes, from the moment in which the streams are opened to their
ends; so it holds the cost of requests too, spread over their tokens. The engine's steps are part
of the worker's. The HTTP client's own time is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio

from benchmarks.http_load import BadAnswer, Load
from benchmarks.processes import Process, allow_many_files, environ_of, running
from dynamo_trio.testing import make_model_folder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

MODEL = "bench"
PLANES = {"tcp": "off", "mux": "only"}  # plane -> the setting DYN_TRIO_MUX that leaves no other


@attrs.frozen
class Plan:
    """What is measured."""

    planes: Sequence[str]
    streams: Sequence[int]
    tokens: int
    rounds: int
    step_ms: float
    #: Streams that are open while memory is looked at; 0: it is not.
    open_streams: int
    #: Also through a frontend, over HTTP?
    http: bool
    #: Seconds between two tokens while memory is looked at: what is held counts, not what moves.
    idle_step: float = 1.0


@attrs.frozen(eq=False)
class Fleet:
    """The processes of one plane."""

    plane: str
    worker: Process
    client: Process
    frontend: Process | None
    port: int = 0

    def load(self, tokens: int) -> Load:
        return Load(self.port, MODEL, tokens)


@attrs.define(eq=False)
class Series:
    """The rounds of one figure."""

    values: list[float] = attrs.field(factory=list)

    def told(self) -> dict[str, float]:
        shortened = [round(value, 2) for value in self.values]
        return {
            "median": round(statistics.median(self.values), 2),
            "min": min(shortened),
            "max": max(shortened),
        }


#: (plane, load, streams, role) -> microseconds of CPU for each token.
Costs = dict[tuple[str, str, int, str], Series]
#: (plane, load, role) -> bytes for each open stream.
Memory = dict[tuple[str, str, str], float]


def open_fleet(stack: ExitStack, folder: Path, plane: str, step_ms: float, http: bool) -> Fleet:
    """Start one plane's processes, and wait until they know each other."""
    environ = environ_of(folder / f"{plane}-{step_ms:g}") | {"DYN_TRIO_MUX": PLANES[plane]}
    worker = stack.enter_context(
        running("dynamo_trio.worker", *_worker_flags(folder, step_ms), environ=environ, talks=False)
    )
    worker.wait_for("is ready after")
    client = stack.enter_context(running("benchmarks.plane_client", environ=environ, talks=True))
    client.line()
    if not http:
        return Fleet(plane, worker, client, None)
    flags = ("--http-host", "127.0.0.1", "--http-port", "0")
    frontend = stack.enter_context(
        running("dynamo_trio.frontend", *flags, environ=environ, talks=False)
    )
    fleet = Fleet(plane, worker, client, frontend, _port_of(frontend))
    trio.run(_wait_offered, fleet)
    return fleet


def _worker_flags(folder: Path, step_ms: float) -> list[str]:
    model = str(folder / "model")
    return [
        *("--engine", "sim", "--model-path", model, "--model-name", MODEL),
        *("--itl-ms", f"{step_ms:g}", "--max-running", "4096", "--kv-blocks", "1000000"),
    ]


def _port_of(frontend: Process) -> int:
    return int(frontend.wait_for("listening on").rstrip().rstrip("/").rpartition(":")[2])


async def _wait_offered(fleet: Fleet) -> None:
    """The frontend has to find the model, and its connection to the worker, first."""
    with trio.fail_after(60):
        while True:
            try:
                await fleet.load(2).run(1)
            except* BadAnswer:
                await trio.sleep(0.1)
            else:
                return


# --- CPU time -------------------------------------------------------------------------------


def measure_cpu(plan: Plan, fleets: Sequence[Fleet], say: Callable[[str], None]) -> Costs:
    """All rounds; the first, which also warms up, is not counted."""
    costs: Costs = {}
    for number in range(plan.rounds + 1):
        say(f"round {number} of {plan.rounds}")
        for streams in plan.streams:
            for fleet in fleets:
                for key, value in _one_round(plan, fleet, streams):
                    if number:
                        costs.setdefault(key, Series()).values.append(value)
    return costs


def _one_round(
    plan: Plan, fleet: Fleet, streams: int
) -> Iterator[tuple[tuple[str, str, int, str], float]]:
    def bare() -> None:
        answer = fleet.client.ask(do="run", streams=streams, tokens=plan.tokens)
        assert answer == {"tokens": streams * plan.tokens, "failed": 0}, answer

    def over_http() -> None:
        trio.run(fleet.load(plan.tokens).run, streams)

    loads = [("client", bare, {"client": fleet.client, "worker": fleet.worker})]
    if fleet.frontend is not None:
        loads.append(("http", over_http, {"frontend": fleet.frontend, "worker": fleet.worker}))
    for load, run, processes in loads:
        before = {role: process.cpu_seconds() for role, process in processes.items()}
        run()
        for role, process in processes.items():
            used = process.cpu_seconds() - before[role]
            yield (fleet.plane, load, streams, role), used * 1e6 / (streams * plan.tokens)


# --- memory ---------------------------------------------------------------------------------


def measure_memory(plan: Plan, fleets: Sequence[Fleet], say: Callable[[str], None]) -> Memory:
    """What the processes grow by while many streams are open, for each of them."""
    memory: Memory = {}
    for fleet in fleets:
        say(f"{plan.open_streams} open streams on {fleet.plane}")
        for load, held, processes in _holders(plan, fleet):
            trio.run(_grow, plan, held, processes, memory, (fleet.plane, load))
    return memory


def _holders(plan: Plan, fleet: Fleet) -> Iterator[tuple[str, Any, dict[str, Process]]]:
    @asynccontextmanager
    async def bare(streams: int) -> AsyncIterator[None]:
        answer = fleet.client.ask(do="hold", streams=streams, tokens=600)
        assert answer == {"open": streams, "failed": 0}, answer
        yield
        fleet.client.ask(do="release")

    yield "client", bare, {"client": fleet.client, "worker": fleet.worker}
    if fleet.frontend is not None:
        # The worker keeps the memory that the streams before these have had.
        yield "http", fleet.load(600).held, {"frontend": fleet.frontend}


async def _grow(
    plan: Plan,
    held: Any,
    processes: dict[str, Process],
    memory: Memory,
    key: tuple[str, str],
) -> None:
    async with held(min(50, plan.open_streams)):  # what the first ones cost is no stream's
        await trio.sleep(2 * plan.idle_step)
    await trio.sleep(2 * plan.idle_step)
    before = {role: process.memory() for role, process in processes.items()}
    async with held(plan.open_streams):
        await trio.sleep(2 * plan.idle_step)
        for role, process in processes.items():
            memory[(*key, role)] = (process.memory() - before[role]) / plan.open_streams


# --- telling --------------------------------------------------------------------------------


def told(plan: Plan, costs: Costs, memory: Memory) -> dict[str, Any]:
    """Everything as JSON has it."""
    return {
        "plan": attrs.asdict(plan),
        "cpu_us_per_token": [
            {"plane": plane, "load": load, "streams": streams, "process": role, **series.told()}
            for (plane, load, streams, role), series in sorted(costs.items())
        ],
        "bytes_per_open_stream": [
            {"plane": plane, "load": load, "process": role, "bytes": round(size)}
            for (plane, load, role), size in sorted(memory.items())
        ],
    }


def table(plan: Plan, result: dict[str, Any]) -> str:
    """The same as text, one line for each process under one load."""
    costs = {
        (e["load"], e["streams"], e["process"], e["plane"]): f"{e['median']:.1f}"
        for e in result["cpu_us_per_token"]
    }
    sizes = {
        (e["load"], plan.open_streams, e["process"], e["plane"]): f"{e['bytes'] / 1024:.1f}"
        for e in result["bytes_per_open_stream"]
    }
    blocks = (("CPU us per token", costs), ("KiB per open stream", sizes))
    return "\n\n".join("\n".join(_block(plan, title, cells)) for title, cells in blocks if cells)


def _block(plan: Plan, title: str, cells: dict[tuple[str, int, str, str], str]) -> Iterator[str]:
    yield f"{title:<30}" + "".join(f"{plane:>9}" for plane in plan.planes)
    for load, streams, role in sorted({key[:3] for key in cells}):
        name = f"{load:<8}{role:<10}{streams:>5} streams"
        values = (cells.get((load, streams, role, plane), "-") for plane in plan.planes)
        yield f"{name:<30}" + "".join(f"{value:>9}" for value in values)


# --- the program ----------------------------------------------------------------------------


def run(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Start everything, measure, and end everything."""
    allow_many_files()
    costs: Costs = {}
    memory: Memory = {}
    if plan.rounds:
        with open_fleets(plan, plan.step_ms) as fleets:
            costs = measure_cpu(plan, fleets, say)
            if plan.open_streams and plan.idle_step * 1000 == plan.step_ms:
                memory = measure_memory(plan, fleets, say)
    if plan.open_streams and not memory:
        with open_fleets(plan, plan.idle_step * 1000) as fleets:
            memory = measure_memory(plan, fleets, say)
    return told(plan, costs, memory)


@contextmanager
def open_fleets(plan: Plan, step_ms: float) -> Iterator[list[Fleet]]:
    """The processes of every plane, with steps of this length."""
    with tempfile.TemporaryDirectory(prefix="planes-") as name, ExitStack() as stack:
        folder = Path(name)
        make_model_folder(folder / "model")
        yield [open_fleet(stack, folder, plane, step_ms, plan.http) for plane in plan.planes]


def read_plan(arguments: Sequence[str] | None = None) -> tuple[Plan, Path | None]:
    """The command line; also where the JSON goes, if anywhere."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planes",
        description="What a token costs on each request plane, and what an open stream holds.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--planes", nargs="+", choices=PLANES, default=list(PLANES), help="which are compared")
    add("--streams", nargs="+", type=int, default=[32, 128], metavar="N", help="at once")
    add("--tokens", type=int, default=128, metavar="N", help="of each answer")
    add("--rounds", type=int, default=5, metavar="N", help="after one that is not counted; 0: none")
    add("--step-ms", type=float, default=10.0, metavar="MS", help="of an engine's step")
    add("--open-streams", type=int, default=1000, metavar="N", help="for memory; 0: not looked at")
    add("--no-http", action="store_true", help="leave the frontend out")
    add("--json", type=Path, default=argparse.SUPPRESS, metavar="FILE", help="write all there too")
    given = parser.parse_args(arguments)
    plan = Plan(
        *(given.planes, given.streams, given.tokens, given.rounds, given.step_ms),
        *(given.open_streams, not given.no_http),
    )
    return plan, getattr(given, "json", None)


def main() -> None:
    """Measure and print."""
    plan, file = read_plan()
    began = time.monotonic()
    result = run(plan, lambda words: print(f"{time.monotonic() - began:6.1f} s  {words}"))
    print(table(plan, result))
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
