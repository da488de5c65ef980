"""What is kept of a session for another worker, and when that is enough."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from dynamo_trio.frontend.realtime.kept import Frame, Kept
from dynamo_trio.wire.openai.realtime.room import Room

APPEND, COMMIT = "input_audio_buffer.append", "input_audio_buffer.commit"
CLEAR, CLEARED = "input_audio_buffer.clear", "input_audio_buffer.cleared"
COMMITTED = "input_audio_buffer.committed"
TRANSCRIPTION = "conversation.item.input_audio_transcription"
DELTA, COMPLETED = f"{TRANSCRIPTION}.delta", f"{TRANSCRIPTION}.completed"


@attrs.define(eq=False)
class Ledger:
    room: Room
    kept: Kept

    def sent(self, *types: str, size: int = 10, **fields: Any) -> None:
        for kind in types:
            self.kept.sent(Frame({"type": kind, **fields}, size))

    def heard(self, *types: str) -> list[bool]:
        return [self.kept.heard(kind) for kind in types]

    def movable(self) -> bool:
        return self.kept.movable

    def types(self) -> list[str]:
        return [frame.type for frame in self.kept.begin()]


@pytest.fixture
def ledger() -> Ledger:
    room = Room()
    return Ledger(room, Kept(room, most=100))


def begin(ledger: Ledger, type: str = "transcription") -> None:
    ledger.sent("session.update", session={"type": type, "n": 1})
    assert ledger.heard("session.updated") == [True]


def test_a_session_that_was_only_set_up_moves(ledger: Ledger) -> None:
    begin(ledger, "realtime")
    ledger.sent(APPEND, APPEND)
    assert ledger.movable()
    assert ledger.types() == ["session.update", APPEND, APPEND]
    assert ledger.heard("session.created", "session.updated") == [False, False]  # known
    ledger.sent("session.update", session={"type": "realtime", "n": 2})
    assert ledger.heard("session.updated") == [True]
    assert ledger.kept.settings == {"type": "realtime", "n": 2}


def test_an_update_that_was_not_answered_is_told_when_it_is(ledger: Ledger) -> None:
    ledger.sent("session.update", session={"type": "realtime"})
    assert ledger.types() == ["session.update"]
    assert ledger.heard("session.updated") == [True]


def test_a_conversation_stays_once_its_worker_has_said_something(ledger: Ledger) -> None:
    begin(ledger, "realtime")
    ledger.sent(APPEND, COMMIT)
    ledger.heard(COMMITTED, DELTA, COMPLETED, "response.done")
    assert not ledger.movable()


def test_turns_that_are_over_are_forgotten(ledger: Ledger) -> None:
    begin(ledger)
    ledger.sent(APPEND, COMMIT, APPEND)
    ledger.heard(COMMITTED)
    assert not ledger.movable()
    ledger.heard(DELTA, COMPLETED)
    assert ledger.movable()
    assert ledger.types() == ["session.update", APPEND]
    assert ledger.room.used == 20


def test_it_stays_while_one_of_several_turns_is_answered(ledger: Ledger) -> None:
    begin(ledger)
    ledger.sent(APPEND, COMMIT, APPEND, COMMIT)
    ledger.heard(COMMITTED, COMMITTED, DELTA, COMPLETED)
    assert not ledger.movable()
    ledger.heard(f"{TRANSCRIPTION}.failed")
    assert ledger.movable()
    assert ledger.types() == ["session.update"]


def test_what_was_cleared_is_forgotten(ledger: Ledger) -> None:
    begin(ledger)
    ledger.sent(APPEND, CLEAR, APPEND)
    assert ledger.heard(CLEARED) == [True]
    assert ledger.movable()
    assert ledger.types() == ["session.update", APPEND]


@pytest.mark.parametrize("kind", ["error", COMMITTED, COMPLETED, "an.event.of.its.own", ""])
def test_what_cannot_be_followed_keeps_it_where_it_is(ledger: Ledger, kind: str) -> None:
    begin(ledger)
    ledger.sent(APPEND)
    assert ledger.heard(kind) == [True]
    assert not ledger.movable()


def test_settings_are_sent_where_they_were(ledger: Ledger) -> None:
    begin(ledger)
    ledger.sent(APPEND)
    ledger.sent("session.update", session={"type": "transcription", "n": 2})
    ledger.sent(COMMIT, APPEND)
    assert ledger.types() == ["session.update", APPEND, "session.update", COMMIT, APPEND]
    ledger.heard("session.updated", "session.updated", DELTA, COMPLETED)
    assert ledger.types() == ["session.update", "session.update", APPEND]


def test_too_much_is_not_kept_until_the_turn_is_over(ledger: Ledger) -> None:
    begin(ledger)
    ledger.sent(APPEND, size=50)
    ledger.sent(APPEND, size=50)
    assert (ledger.movable(), ledger.room.used) == (False, 10)
    ledger.sent(APPEND, COMMIT, APPEND)
    assert not ledger.movable()
    ledger.heard(COMMITTED, COMPLETED)
    assert ledger.movable()
    assert ledger.types() == ["session.update", APPEND]


def test_what_is_lost_behind_the_end_of_a_turn_stays_lost(ledger: Ledger) -> None:
    begin(ledger)
    ledger.sent(APPEND, COMMIT)
    ledger.sent(APPEND, size=1000)
    ledger.heard(COMPLETED)
    assert not ledger.movable()
    ledger.sent(COMMIT)
    ledger.heard(COMPLETED)
    assert ledger.movable()


def test_settings_that_are_lost_are_lost_for_ever(ledger: Ledger) -> None:
    begin(ledger)
    ledger.sent("session.update", size=1000, session={"type": "transcription"})
    ledger.sent(COMMIT)
    ledger.heard("session.updated", COMPLETED)
    assert not ledger.movable()


def test_all_sessions_share_what_there_is_room_for() -> None:
    room = Room(most=100)
    one, other = Kept(room), Kept(room)
    one.sent(Frame({"type": APPEND}, 80))
    other.sent(Frame({"type": APPEND}, 30))
    assert (one.movable, other.movable, room.used) == (True, False, 80)
    one.close()
    assert (one.movable, room.used) == (False, 0)
    other.sent(Frame({"type": COMMIT}, 5))
    other.close()
    assert room.used == 0
