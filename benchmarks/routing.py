"""What a choice costs in each router mode, at 1 000 workers.

``python -m benchmarks.routing`` makes a router of each mode with ``--workers`` workers and
``--running`` requests under way, and then sends ``--requests`` through it, each in place of the
oldest one that runs. Told are microseconds of CPU time, medians over ``--rounds`` rounds: of
``choose`` alone, of a choice while four workers are left out, and of all that the router does
for one request (choose, begin, first token, end). The KV modes route prompts of ``--blocks``
blocks, of which each worker has its own; in ``kv, all know`` every worker has the first four
of each prompt besides, as if all prompts had one beginning.

The lines below are the index by itself: what an event of one stored block costs, a lookup of a
prompt that one worker has, the same of one that all have, and dropping a worker.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.routing import (
    ApproximateIndex,
    Ask,
    CostSettings,
    Direct,
    KvRouting,
    LeastLoaded,
    PowerOfTwo,
    PrefixIndex,
    Random,
    RoundRobin,
    SessionAffinity,
    Sticky,
    Target,
)
from dynamo_trio.wire.dynamo.kv_events import Block, Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dynamo_trio.routing import Router

BLOCK = 16
#: Blocks with which all prompts begin where all workers know them.
COMMON = 4


@attrs.frozen
class Plan:
    """What is measured."""

    workers: int = 1_000
    requests: int = 1_000
    running: int = 4_000
    rounds: int = 3
    blocks: int = 64


def prompt(worker: int, plan: Plan, *, common: bool) -> list[int]:
    """The blocks of the prompts that are cached at one worker."""
    own = [worker * 10_000 + place + 1_000_000 for place in range(plan.blocks)]
    return [*range(COMMON), *own[COMMON:]] if common else own


def stored(blocks: Sequence[int]) -> Stored:
    """That a worker has them."""
    hashes = [hash(tuple(blocks[: end + 1])) % 2**63 for end in range(len(blocks))]
    return Stored(None, blocks=tuple(map(Block, hashes, blocks)))


def kv(plan: Plan, rng: random.Random, *, common: bool = False, warm: float = 0.0) -> KvRouting:
    """A KV router that knows a prompt of each worker."""
    index = PrefixIndex()
    for worker in range(plan.workers):
        index.apply(Target(worker, 0), stored(prompt(worker, plan, common=common)))
    return KvRouting(BLOCK, index, rng, CostSettings(router_temperature=warm))


def modes(plan: Plan, rng: random.Random) -> dict[str, Callable[[], Router]]:
    """Every mode, each made when it is its turn."""
    return {
        "round-robin": RoundRobin,
        "random": partial(Random, rng),
        "power-of-two": partial(PowerOfTwo, rng),
        "least-loaded": LeastLoaded,
        "direct": Direct,
        "round-robin, sessions": lambda: Sticky(RoundRobin(), SessionAffinity(60.0)),
        "kv": partial(kv, plan, rng),
        "kv, all know": partial(kv, plan, rng, common=True),
        "kv, temperature": partial(kv, plan, rng, warm=0.5),
        "kv, no events": lambda: KvRouting(BLOCK, ApproximateIndex(), rng),
    }


def asks(plan: Plan, rng: random.Random, *, common: bool) -> list[Ask]:
    """Requests for prompts of the workers, in no order."""
    made = []
    for number in range(plan.requests):
        worker = rng.randrange(plan.workers)
        blocks = prompt(worker, plan, common=common)
        made.append(
            Ask(
                tokens=len(blocks) * BLOCK + 5,
                blocks=blocks,
                worker_id=worker,
                session=str(number % 997),
                now=number * 1e-4,
            )
        )
    return made


def per_item(work: Callable[[], object], items: int) -> float:
    """Microseconds of CPU time for each."""
    begin = time.process_time_ns()
    work()
    return (time.process_time_ns() - begin) / 1000 / items


def choose_all(router: Router, questions: Iterable[Ask]) -> None:
    """Choose, and no more."""
    for ask in questions:
        router.choose(ask)


def run_through(router: Router, questions: Iterable[Ask], running: deque[str], name: str) -> None:
    """Route each request, and end the oldest one."""
    for number, ask in enumerate(questions):
        request_id = f"{name} {number}"
        router.begin(request_id, router.choose(ask), ask)
        router.prefilled(request_id)
        running.append(request_id)
        router.end(running.popleft())


def measure(plan: Plan, make: Callable[[], Router], *, common: bool) -> tuple[float, float, float]:
    """Choice, choice without four workers, whole request."""
    rng = random.Random(1)
    router = make()
    for worker in range(plan.workers):
        router.add(worker)
    questions = asks(plan, rng, common=common)
    without = [attrs.evolve(ask, without=_others(ask, plan)) for ask in questions]
    running: deque[str] = deque()
    for number in range(plan.running):
        ask = questions[number % len(questions)]
        running.append(f"before {number}")
        router.begin(running[-1], router.choose(ask), ask)
        router.prefilled(running[-1])
    rounds = []
    for round_ in range(plan.rounds):
        whole = partial(run_through, router, questions, running, str(round_))
        rounds.append(
            (
                per_item(partial(choose_all, router, questions), plan.requests),
                per_item(partial(choose_all, router, without), plan.requests),
                per_item(whole, plan.requests),
            )
        )
    choice, left_out, request = (statistics.median(column) for column in zip(*rounds, strict=True))
    return choice, left_out, request


def _others(ask: Ask, plan: Plan) -> tuple[int, ...]:
    """Four workers, none of which is the one that ``ask`` names."""
    assert ask.worker_id is not None
    return tuple((ask.worker_id + step) % plan.workers for step in (1, 2, 3, 4))


def measure_index(plan: Plan) -> dict[str, float]:
    """Microseconds of what the index does by itself."""
    own, index = (
        [prompt(worker, plan, common=True) for worker in range(plan.workers)],
        PrefixIndex(),
    )
    events = [stored(blocks) for blocks in own]

    def store() -> None:
        for worker, event in enumerate(events):
            index.apply(Target(worker, 0), event)

    def look_up(questions: list[list[int]]) -> None:
        for blocks in questions:
            index.match(blocks)

    def drop() -> None:
        for worker in range(plan.workers):
            index.drop(Target(worker, 0))

    rare = [blocks[COMMON:] for blocks in own]
    alone = PrefixIndex()
    for worker, blocks in enumerate(rare):
        alone.apply(Target(worker, 0), stored(blocks))
    return {
        "an event, each block": per_item(store, plan.workers * plan.blocks),
        "a lookup, all have the first blocks": per_item(partial(look_up, own), plan.workers),
        "a lookup, one has it": per_item(
            lambda: [alone.match(blocks) for blocks in rare], plan.workers
        ),
        "dropping a worker": per_item(drop, plan.workers),
    }


def run(plan: Plan, say: Callable[[str], object] = print) -> None:
    """Measure, and say each line as it is known."""
    say(f"CPU us, {plan.workers} workers      choice  without 4  whole request")
    for name, make in modes(plan, random.Random(0)).items():
        choice, without, request = measure(plan, make, common=name == "kv, all know")
        say(f"{name:24} {choice:9.2f} {without:10.2f} {request:14.2f}")
    for name, cost in measure_index(plan).items():
        say(f"{name:36} {cost:9.2f}")


def read_plan(arguments: Sequence[str] | None = None) -> Plan:
    """The plan that the command line asks for."""
    parser = argparse.ArgumentParser(description="What a choice costs in each router mode.")
    for field in attrs.fields(Plan):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    return Plan(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    run(read_plan())
