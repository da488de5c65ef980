"""What readers are told, and what they are spared."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.discovery.etcd.view import View
from dynamo_trio.discovery.store import StorePut, StoreRemoved

HOLD = 10.0


def view(**known: bytes) -> View:
    return View(HOLD, dict(known))


def test_a_value_is_told_once() -> None:
    seen = view()
    assert seen.put("a", b"1") == [StorePut("a", b"1")]
    assert seen.put("a", b"1") == []
    assert seen.put("a", b"2") == [StorePut("a", b"2")]


def test_in_quiet_times_what_goes_is_gone() -> None:
    seen = view(a=b"1")
    assert seen.remove("a", 0.0, in_doubt=False) == [StoreRemoved("a")]
    assert seen.remove("a", 0.0, in_doubt=False) == []


def test_in_doubt_it_stays_until_its_time() -> None:
    seen = view(a=b"1")
    assert seen.remove("a", 5.0, in_doubt=True) == []
    assert seen.expire(14.9) == []
    assert seen.known == {"a": b"1"}
    assert seen.expire(15.0) == [StoreRemoved("a")]
    assert seen.expire(99.0) == []


def test_what_is_put_back_was_never_gone() -> None:
    seen = view(a=b"1", b=b"1")
    seen.remove("a", 0.0, in_doubt=True)
    seen.remove("b", 0.0, in_doubt=True)
    assert seen.put("a", b"1") == []
    assert seen.put("b", b"2") == [StorePut("b", b"2")]
    assert seen.expire(99.0) == []


def test_a_store_that_flaps_does_not_keep_the_dead_alive() -> None:
    seen = view(a=b"1")
    for now in range(9):
        seen.compare({}, float(now), in_doubt=True)
    assert seen.expire(HOLD) == [StoreRemoved("a")]


def test_in_quiet_times_a_comparison_takes_away_what_is_not_there() -> None:
    seen = view(a=b"1", b=b"1")
    assert not seen.misses({"a": b"1", "b": b"2", "c": b"1"})
    assert seen.misses({"a": b"1"})
    assert seen.compare({"a": b"1"}, 0.0, in_doubt=False) == [StoreRemoved("b")]


def test_what_is_doubtful_keeps_its_time_in_quiet_times_too() -> None:
    seen = view(a=b"1")
    seen.remove("a", 0.0, in_doubt=True)
    assert seen.compare({}, 5.0, in_doubt=False) == []
    assert seen.remove("a", 5.0, in_doubt=False) == []
    assert seen.expire(9.9) == []
    assert seen.expire(HOLD) == [StoreRemoved("a")]


def test_a_comparison_tells_the_difference() -> None:
    seen = view(a=b"1", b=b"1", c=b"1")
    changes = seen.compare({"a": b"1", "b": b"2", "d": b"1"}, 0.0, in_doubt=True)
    assert changes == [StorePut("b", b"2"), StorePut("d", b"1")]
    assert seen.expire(HOLD) == [StoreRemoved("c")]


KEYS = st.sampled_from("abc")
VALUES = st.sampled_from([b"1", b"2"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, VALUES),
        st.tuples(st.just("remove"), KEYS, st.booleans()),
        st.tuples(st.just("compare"), st.dictionaries(KEYS, VALUES), st.booleans()),
        st.tuples(st.just("expire"), st.floats(0, 30), st.none()),
    )
)


@given(STEPS)
def test_who_follows_the_changes_has_the_view_and_in_the_end_the_store(steps: list[Any]) -> None:
    seen, store, followed = view(), dict[str, bytes](), dict[str, bytes]()
    now = 0.0
    for step, what, more in [*steps, ("expire", 1000.0, None)]:
        changes = []
        if step == "put":
            store[what] = more
            changes = seen.put(what, more)
        elif step == "remove":
            store.pop(what, None)
            changes = seen.remove(what, now, in_doubt=more)
        elif step == "compare":
            store = dict(what)
            changes = seen.compare(what, now, in_doubt=more)
        else:
            now += what
            changes = seen.expire(now)
        for change in changes:
            if isinstance(change, StorePut):
                assert followed.get(change.key) != change.value
                followed[change.key] = change.value
            else:
                del followed[change.key]
        assert followed == seen.known
        assert seen.doubtful.keys() <= seen.known.keys()
        assert {k: v for k, v in seen.known.items() if k not in seen.doubtful} == store
    assert seen.known == store
