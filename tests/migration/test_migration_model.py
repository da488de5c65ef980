"""A cut after every token, by every kind of end: the client cannot tell.

The undisturbed run goes through the same client and the same OutputProcessor, and is compared in
all that a client can see: text, finish reason, usage, log probabilities.
"""

from __future__ import annotations

import itertools

import pytest

from dynamo_trio.migration import DECLARED, Done, End, GoOn, MigrationLimits, Reason
from tests.migration.ends import ALL, BEGUN, UNBEGUN, Kind
from tests.migration.simulated import EVERYTHING, LENGTH, Client, Cut, Scene, answer, scene

UNDISTURBED_TEXT = Client(scene()).run().texts[0]
#: Four characters in the middle, so that some cuts are inside them.
STOP = UNDISTURBED_TEXT[8:12]

SCENES = {
    "max_tokens": scene(),
    "finish apart": scene(apart=True),
    "several tokens in an item": scene(batch=3),
    "eos": scene(max_tokens=200, eos_every=20),
    "eos that is sent": scene(max_tokens=200, eos_every=20, sends_eos=True),
    "eos that is sent, apart": scene(max_tokens=200, eos_every=20, sends_eos=True, apart=True),
    "min_tokens before eos": scene(max_tokens=200, eos_every=4, min_tokens=15),
    "stop string": scene(stop=["no such thing", STOP]),
    "stop string before min_tokens": scene(stop=["da", "ha"], min_tokens=15),
    "beginning of a stop string at the end": scene(stop=[UNDISTURBED_TEXT[-4:-1] + "!"]),
    "seed": scene(seed=11),
    "log probabilities": scene(logprobs=2),
    "three choices": scene(n=3, seed=5, max_tokens=9),
    "choices of different lengths": scene(
        n=3, seed=5, max_tokens=30, eos_every=12, logprobs=1, apart=True
    ),
    "choices with a stop string": scene(n=2, seed=3, stop=["€f"], max_tokens=12),
}
#: One retry is enough for one cut.
ONCE = MigrationLimits(limit=1)


def items_of(scene: Scene) -> int:
    return len(list(answer(scene, Client(scene).machine.parts)))


@pytest.mark.parametrize("kind", BEGUN, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", SCENES)
def test_a_cut_after_every_token_by_every_kind_of_end(name: str, kind: Kind) -> None:
    undisturbed = Client(SCENES[name]).run()
    for after in range(items_of(SCENES[name]) + 1):
        client = Client(SCENES[name], ONCE).run(kind.cut(after))
        if kind.moves or isinstance(client.end, Done):
            assert isinstance(client.end, Done), (after, client.end)
            assert client.seen == undisturbed.seen, after
            assert client.tokens == undisturbed.tokens, after
        else:
            assert isinstance(client.end, End)
            assert client.end.why is Reason.NOT_MIGRATABLE
            assert len(client.machine.tried) == 1


@pytest.mark.parametrize("kind", UNBEGUN, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", SCENES)
def test_the_second_worker_fails_before_it_begins(name: str, kind: Kind) -> None:
    undisturbed = Client(SCENES[name]).run()
    cut = BEGUN[0]
    for after in range(items_of(SCENES[name]) + 1):
        twice = MigrationLimits(limit=2)
        client = Client(SCENES[name], twice).run(cut.cut(after), kind.cut(0))
        if kind.moves or isinstance(client.end, Done):
            assert isinstance(client.end, Done)
            assert client.seen == undisturbed.seen, after
        else:
            assert isinstance(client.end, End)
            assert client.end.cause is client.end.error
            assert len(client.machine.tried) == 2


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_the_first_worker_fails_before_it_begins(kind: Kind) -> None:
    client = Client(scene()).run(kind.cut(0))
    assert isinstance(client.end, Done if kind.moves else End)
    if kind.moves:
        assert client.seen == Client(scene()).run().seen


@pytest.mark.parametrize("name", SCENES)
def test_a_new_worker_for_every_token(name: str) -> None:
    undisturbed = Client(SCENES[name]).run()
    cuts = (BEGUN[0].cut(1) for _ in itertools.count())
    client = Client(SCENES[name], MigrationLimits(limit=1000)).run(*itertools.islice(cuts, 200))
    assert isinstance(client.end, Done)
    assert client.seen == undisturbed.seen
    assert len(client.machine.tried) >= min(LENGTH // 3, items_of(SCENES[name]))


#: How the scenes end that do not end by max_tokens alone.
ENDS = {
    "eos": ["stop"],
    "eos that is sent": ["stop"],
    "eos that is sent, apart": ["stop"],
    "min_tokens before eos": ["stop"],
    "stop string": ["stop"],
    "stop string before min_tokens": ["stop"],
    "three choices": ["length"] * 3,
    "choices of different lengths": ["stop"] * 3,
    "choices with a stop string": ["stop", "length"],
}


@pytest.mark.parametrize("name", SCENES)
def test_the_scenes_are_what_they_are_called(name: str) -> None:
    client = Client(SCENES[name]).run()
    assert [o.finish_reason for o in client.outputs] == ENDS.get(name, ["length"])
    assert any(not character.isascii() for character in "".join(client.texts))
    assert all(client.texts)
    least = SCENES[name].request.stop_conditions.min_tokens or 0
    assert all(output.completion_tokens > least for output in client.outputs)


def test_choices_of_different_lengths_are_that() -> None:
    client = Client(SCENES["choices of different lengths"]).run()
    assert len({output.completion_tokens for output in client.outputs}) == 3


def test_some_cuts_are_inside_a_character_and_inside_a_stop_string() -> None:
    """Otherwise the tests above would show less than they seem to."""
    held = [_held(scene(stop=[STOP]), after) for after in range(1, 16)]
    assert {"half a character", "a part of the stop string"} <= set(held)


def _held(scene: Scene, after: int) -> str:
    client = Client(scene, MigrationLimits(limit=0)).run(BEGUN[0].cut(after))
    if not isinstance(client.end, End):
        return "over"
    (output,) = client.outputs
    rest = output.flush()
    if "\N{REPLACEMENT CHARACTER}" in rest:
        return "half a character"
    return "a part of the stop string" if rest and STOP.startswith(rest) else "nothing"


@pytest.mark.parametrize("name", SCENES)
def test_who_has_it_all_asks_nobody_although_the_end_is_missing(name: str) -> None:
    count = items_of(SCENES[name])
    for after in (
        (count, count - 1) if name in ("finish apart", "eos that is sent, apart") else [count]
    ):
        client = Client(SCENES[name], ONCE).run(BEGUN[0].cut(after))
        assert client.decisions == [Done()]


def test_what_the_simulated_engine_declares_is_true() -> None:
    for name in ("seed", "stop string", "max_tokens"):
        undisturbed = Client(SCENES[name]).run()
        for after in range(items_of(SCENES[name]) + 1):
            client = Client(SCENES[name], ONCE, DECLARED["sim"]).run(BEGUN[0].cut(after))
            assert isinstance(client.end, Done)
            assert client.seen == undisturbed.seen


@pytest.mark.parametrize("after", range(LENGTH))
def test_a_whole_answer_that_nobody_has_seen_keeps_its_tokens(after: int) -> None:
    client = Client(scene(), stream=False).run(BEGUN[0].cut(after))
    assert client.seen == Client(scene()).run().seen
    moved = client.decisions[0]
    assert isinstance(moved, GoOn)
    assert moved.afresh == (after == 0)
    assert len(moved.parts[0].request.token_ids) == len(scene().request.token_ids) + after


@pytest.mark.parametrize("after", range(1, 9))
def test_a_whole_answer_that_cannot_be_replayed_begins_anew(after: int) -> None:
    many = SCENES["three choices"]
    client = Client(many, declared=frozenset(), stream=False).run(BEGUN[0].cut(after))
    assert client.seen == Client(many).run().seen
    moved = client.decisions[0]
    assert isinstance(moved, GoOn)
    assert moved.afresh
    assert moved.parts[0].request == many.request


@pytest.mark.parametrize("after", range(1, LENGTH))
def test_an_engine_that_writes_text_may_break_off_within_a_character(after: int) -> None:
    """So it is refused, unless the engine declares that it knows better."""
    declared = EVERYTHING - {"text"}
    client = Client(scene(text=True), ONCE, declared).run(Cut(after, BEGUN[0].make()))
    if any(client.texts):
        assert isinstance(client.end, End)
        assert client.end.why is Reason.NOT_REPLAYABLE
        assert UNDISTURBED_TEXT.startswith(client.texts[0])
    else:  # nothing but a part of a character had come
        assert client.texts == [UNDISTURBED_TEXT]


def test_what_workers_say_of_usage_is_told_as_of_one_request() -> None:
    for name in ("log probabilities", "three choices", "choices of different lengths"):
        undisturbed = Client(SCENES[name]).run()
        for after in range(items_of(SCENES[name])):
            client = Client(SCENES[name], ONCE).run(BEGUN[0].cut(after))
            told = [(a, b) for a, b in zip(client.told_usage, undisturbed.told_usage, strict=True)]
            assert all(ours in (theirs, None) for ours, theirs in told), after
