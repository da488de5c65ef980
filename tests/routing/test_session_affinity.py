"""Sessions stay where they are, within bounds."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.routing import (
    Ask,
    LeastLoaded,
    Random,
    RoundRobin,
    SessionAffinity,
    Sticky,
    Target,
)


def sticky(*workers: int, ttl: float = 10.0) -> Sticky:
    made = Sticky(RoundRobin(), SessionAffinity(ttl))
    for worker_id in workers:
        made.add(worker_id)
    return made


def ask(
    router: Sticky, session: str | None, now: float = 0.0, without: tuple[int, ...] = ()
) -> int:
    asked = Ask(session=session, now=now, without=without)
    target = router.choose(asked)
    router.begin(f"{session} {now}", target, asked)
    router.end(f"{session} {now}")
    return target.worker_id


def test_a_session_stays_at_its_worker_while_others_take_turns() -> None:
    router = sticky(0, 1, 2)
    assert ask(router, "a") == 0
    assert [ask(router, None), ask(router, "b"), ask(router, "a"), ask(router, "b")] == [1, 2, 0, 2]


def test_a_session_that_was_idle_too_long_is_bound_anew() -> None:
    router = sticky(0, 1)
    assert [ask(router, "a", 0.0), ask(router, "a", 9.0), ask(router, "a", 18.9)] == [0, 0, 0]
    assert ask(router, "a", 28.9) == 1


def test_a_session_moves_when_its_worker_has_gone_or_may_not_be_asked() -> None:
    router = sticky(0, 1, 2)
    assert ask(router, "a") == 0
    moved = ask(router, "a", without=(0,))
    assert moved != 0
    assert ask(router, "a") == moved
    router.remove(moved)
    after = ask(router, "a")
    assert after != moved
    router.add(moved)
    assert ask(router, "a") == after


def test_a_choice_alone_binds_nothing() -> None:
    router = sticky(0, 1)
    assert router.choose(Ask(session="a")).worker_id == 0
    assert router.choose(Ask(session="a")).worker_id == 1
    assert len(router.affinity) == 0


def test_what_a_request_does_is_told_to_the_mode() -> None:
    mode = LeastLoaded()
    router = Sticky(mode, SessionAffinity(10.0))
    router.add(0)
    router.add(1)
    router.begin("one", Target(0), Ask())
    router.prefilled("one")
    router.grew("one", 3)
    assert [router.choose(Ask()).worker_id for _ in range(2)] == [1, 1]
    router.end("one")
    assert (len(router), 0 in router, 7 in router) == (2, True, False)


def test_a_session_that_is_over_is_forgotten() -> None:
    affinity = SessionAffinity(10.0)
    affinity.bind("a", Target(1), 0.0)
    affinity.forget("a")
    affinity.forget("a")
    assert (affinity.find("a", 0.0), len(affinity)) == (None, 0)


@given(
    st.lists(st.tuples(st.integers(0, 8), st.floats(0.0, 3.0), st.booleans()), max_size=80),
)
def test_the_map_is_bounded_and_forgets_who_was_idle_longest(
    steps: list[tuple[int, float, bool]],
) -> None:
    affinity, now = SessionAffinity(5.0, max_sessions=3), 0.0
    rng = Random(random.Random(0))
    rng.add(1)
    model: dict[str, tuple[Target, float]] = {}
    for number, pause, binds in steps:
        now += pause
        session = str(number)
        model = {key: bound for key, bound in model.items() if bound[1] + 5.0 > now}
        if binds:
            affinity.bind(session, Target(number), now)
            model.pop(session, None)
            model[session] = Target(number), now
            if len(model) > 3:
                del model[next(iter(model))]
        else:
            known = model.get(session)
            assert affinity.find(session, now) == (known and known[0])
        assert len(affinity) <= 3
    assert affinity.find("x", now + 5.0) is None
    assert len(affinity) == 0
