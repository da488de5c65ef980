"""Any schedule of cuts: a request ends once, no token is lost or doubled, no limit is broken."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from dynamo_trio.errors import LocalProtocolError
from dynamo_trio.migration import (
    OTHERS,
    Done,
    End,
    GoOn,
    MigrationLimits,
    Move,
    MoveKind,
    MoveOutcome,
    Reason,
    Replay,
)
from tests.migration.ends import ALL, Kind
from tests.migration.simulated import EVERYTHING, Client, Scene, scene

if TYPE_CHECKING:
    from dynamo_trio.migration import Migration

TEXT = Client(scene()).run().texts[0]
SCENES = [
    scene(),
    scene(max_tokens=60, eos_every=3, min_tokens=12, apart=True),
    scene(max_tokens=60, eos_every=8, sends_eos=True, apart=True, batch=2),
    scene(stop=[TEXT[9:13]], logprobs=1),
    scene(n=3, seed=4, max_tokens=12, eos_every=9),
    scene(seed=9, batch=3),
]
UNDISTURBED = [Client(each).run() for each in SCENES]
PROMPT = len(SCENES[0].request.token_ids)

#: Most move, and many of these are planned.
KINDS = [*ALL, *[kind for kind in ALL if kind.moves] * 3, *[k for k in ALL if k.planned] * 25]
schedules = st.lists(
    st.tuples(st.integers(0, 14), st.sampled_from(KINDS)),
    max_size=9,
)
limits = st.builds(
    MigrationLimits,
    st.integers(0, 6),
    st.none() | st.integers(PROMPT - 2, PROMPT + 24),
)


def longest_at(scene: Scene, move: Move) -> int | None:
    """Tokens of prompt and answer when the move began, where there is one choice."""
    return len(scene.request.token_ids) + move.tokens_completed if scene.choices == 1 else None


@settings(max_examples=400, deadline=None)
@given(
    which=st.integers(0, len(SCENES) - 1),
    schedule=schedules,
    limits=limits,
    stream=st.booleans(),
    pool=st.integers(1, 12),
    declared=st.sampled_from([EVERYTHING, frozenset[Replay]()]),
)
def test_any_schedule_of_cuts(
    which: int,
    schedule: list[tuple[int, Kind]],
    limits: MigrationLimits,
    stream: bool,
    pool: int,
    declared: frozenset[Replay],
) -> None:
    scene, undisturbed = SCENES[which], UNDISTURBED[which]
    cuts = [kind.cut(after if kind.begun else 0) for after, kind in schedule]
    client = Client(scene, limits, declared, stream=stream, pool=pool).run(*cuts)
    event(client.end.why if isinstance(client.end, End) else f"done, {len(client.machine.moves)}")
    check_the_end(client)
    check_the_tokens(client, undisturbed)
    check_the_budget(client.machine, scene, limits)
    check_the_reason(client, schedule, limits)


def check_the_end(client: Client) -> None:
    """Exactly one, the last of all that was decided."""
    *before, last = client.decisions
    assert all(isinstance(decision, GoOn) for decision in before)
    assert isinstance(last, Done | End)
    with pytest.raises(LocalProtocolError):
        client.machine.ended(None)
    with pytest.raises(LocalProtocolError):
        client.machine.asks(-1)


def check_the_tokens(client: Client, undisturbed: Client) -> None:
    """None lost, none doubled: what has come is how the undisturbed answer begins."""
    for ours, theirs in zip(client.tokens, undisturbed.tokens, strict=True):
        assert ours == theirs[: len(ours)]
    if isinstance(client.end, Done):
        assert client.seen == undisturbed.seen
    for shown, whole in zip(client.texts, undisturbed.texts, strict=True):
        assert whole.startswith(shown)


def check_the_budget(machine: Migration, scene: Scene, limits: MigrationLimits) -> None:
    tried, moves = machine.tried, machine.moves
    assert len(tried) == len(set(tried))
    assert len(moves) - len(tried) in (-1, 0)  # 0: nobody was there for the last one
    assert all(move.outcome is not None for move in moves)
    unplanned = [move for move in moves if not move.planned]
    assert len(unplanned) <= max(limits.limit, OTHERS)
    for number, move in enumerate(unplanned):
        if move.kind is MoveKind.ONGOING_REQUEST:
            assert number < limits.limit
            longest = longest_at(scene, move)
            assert limits.max_seq_len is None or longest is None or longest <= limits.max_seq_len
    for move, following in itertools.pairwise(moves):
        if move.outcome is MoveOutcome.FAILURE:
            assert following.tokens_completed <= move.tokens_completed
        assert following.from_instance == move.to_instance


def check_the_reason(
    client: Client, schedule: list[tuple[int, Kind]], limits: MigrationLimits
) -> None:
    """It ends no sooner than it must."""
    end, machine = client.end, client.machine
    if not isinstance(end, End):
        return
    assert end.tokens_delivered == 0 or client.stream
    touched = any(client.texts) and client.stream
    spent = sum(not move.planned for move in machine.moves)
    _, kind = schedule[len(machine.tried) - 1] if schedule else (0, None)
    match end.why:
        case Reason.NOT_MIGRATABLE:
            assert kind is not None
            assert not kind.moves
        case Reason.EXHAUSTED:
            assert spent >= (limits.limit if touched else OTHERS)
        case Reason.MAX_SEQ_LEN:
            assert touched
            assert limits.max_seq_len is not None
            assert PROMPT + max(map(len, client.tokens)) > limits.max_seq_len
        case Reason.NO_WORKER:
            assert len(machine.tried) == client.pool
        case reason:
            assert reason is Reason.NOT_REPLAYABLE
            assert not client.declared
            assert touched
