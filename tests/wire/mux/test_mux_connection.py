"""The two ends of a mux connection: order, credit, limits, and what a peer may not do."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

import pytest

from dynamo_trio.errors import (
    EngineShutdown,
    InvalidArgument,
    LocalProtocolError,
    MessageTooLarge,
    Overloaded,
    PayloadTooLarge,
    RemoteProtocolError,
    UnexpectedTls,
)
from dynamo_trio.wire.dynamo.codec import JSON, MSGPACK
from dynamo_trio.wire.dynamo.receiver import Closed
from dynamo_trio.wire.mux import events, frames
from dynamo_trio.wire.mux.client_connection import ClientConnection
from dynamo_trio.wire.mux.frames import GoAwayCode, encode
from dynamo_trio.wire.mux.limits import (
    BYTES_PER_CREDIT,
    MAGIC,
    MAX_CREDIT,
    MAX_PIECE,
    MAX_TOKEN,
    MuxLimits,
)
from dynamo_trio.wire.mux.worker_connection import WorkerConnection
from tests.wire.mux.mux_pair import (
    Pair,
    all_bytes,
    frames_in,
    greeting,
    only,
    take_events,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.wire.mux.connection import MuxConnection

LONG = b"0123456789abcdef" * (MAX_PIECE // 4)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def names(data: bytes) -> list[str]:
    return [frame.type.name for frame in frames_in(data)]


# --- the beginning -----------------------------------------------------------------------


def test_hello_both_ways() -> None:
    pair = Pair(worker=MuxLimits(max_streams=3, max_message=500))
    assert only(pair.told_client, events.Established) == events.Established(
        1, "dynamo_trio", 3, 500
    )
    assert only(pair.told_worker, events.Established).max_streams == 4096
    assert pair.client.established
    assert pair.worker.established


def test_each_end_says_which_process_it_is() -> None:
    worker, client = WorkerConnection(process="w" * 100), ClientConnection(process="c1")
    worker.receive_data(all_bytes(client))
    assert only(take_events(worker), events.Established).process == "c1"
    client.receive_data(all_bytes(worker))
    assert only(take_events(client), events.Established).process == "w" * 64  # the longest


def test_a_peer_need_not_say_which_process_it_is() -> None:
    """As one of an earlier revision, whose HELLO ends before it."""
    worker = WorkerConnection()
    worker.receive_data(MAGIC + bytes.fromhex("0000001101949101cd1000ce02000000a464656d6f"))
    assert only(take_events(worker), events.Established).process == ""


def test_no_version_in_common() -> None:
    worker, client = WorkerConnection(), ClientConnection()
    worker.receive_data(MAGIC + encode(frames.Hello([8, 9], 1, 1, "x")))
    with pytest.raises(RemoteProtocolError, match=r"the client speaks \[8, 9\]"):
        worker.next_event()
    assert worker.incompatible
    client.receive_data(all_bytes(worker))
    assert not client.incompatible
    gone = only(take_events(client), events.GoneAway)
    assert gone.code == GoAwayCode.VERSION
    assert "no version in common" in gone.text


def test_a_later_client_is_spoken_to_in_our_version() -> None:
    worker = WorkerConnection()
    worker.receive_data(MAGIC + encode(frames.Hello([1, 2, 3], 1, 1, "x")))
    assert only(take_events(worker), events.Established).version == 1
    assert frames_in(all_bytes(worker)) == [frames.Hello([1], 4096, 33554432, "dynamo_trio")]


def test_a_worker_that_chooses_what_was_not_offered() -> None:
    client = ClientConnection()
    client.receive_data(MAGIC + encode(frames.Hello([2], 1, 1, "x")))
    with pytest.raises(RemoteProtocolError, match=r"chose the versions \[2\]"):
        client.next_event()


@pytest.mark.parametrize("end", [ClientConnection, WorkerConnection])
@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", RemoteProtocolError, "speaks HTTP"),
        (b"dx", RemoteProtocolError, "does not speak mux"),
        (b"\x16\x03\x01\x02\x00", UnexpectedTls, "TLS"),
        (MAGIC + encode(frames.Ping(1)), RemoteProtocolError, "PING before HELLO"),
        (MAGIC + b"\0\0\0\0\0", RemoteProtocolError, "without a type"),
        (MAGIC + b"\0\1\0\1\1", MessageTooLarge, "a frame of 65537 bytes"),
    ],
)
def test_a_wrong_beginning(
    end: type[MuxConnection], data: bytes, error: type[Exception], text: str
) -> None:
    connection = end()
    connection.receive_data(data)
    with pytest.raises(error, match=text):
        connection.next_event()
    told = names(all_bytes(connection))
    assert told == (["GOAWAY"] if data.startswith(MAGIC) else [])


def test_nothing_is_opened_before_the_hello() -> None:
    client = ClientConnection()
    with pytest.raises(LocalProtocolError, match="not established"):
        client.open("p", "r", b"", codec=MSGPACK, credit=1)


def test_the_end_of_the_stream(pair: Pair) -> None:
    pair.client.receive_data(b"")
    assert only(take_events(pair.client), Closed) == Closed(inside=False)
    pair.worker.receive_data(b"\0\0")
    assert pair.worker.next_event() is None
    assert pair.worker.receiving
    pair.worker.receive_data(b"")
    assert only(take_events(pair.worker), Closed) == Closed(inside=True)


# --- one stream --------------------------------------------------------------------------


def test_a_request_and_its_answer(pair: Pair) -> None:
    sid = pair.client.open(
        "1f/generate", "r-1", b"prompt", codec=JSON, credit=9, sent_at_ns=12, metadata={"a": "b"}
    )
    assert only(pair.worker_events()[1:], events.StreamOpened) == events.StreamOpened(
        sid, "1f/generate", "r-1", JSON, False, 12, {"a": "b"}, b"prompt"
    )
    pair.worker.accept(sid)
    pair.worker.send_tokens(sid, [5, 6])
    pair.worker.send_item(sid, b"last")
    pair.worker.finish(sid)
    assert pair.client_events()[1:] == [
        events.StreamAccepted(sid),
        events.TokensReceived({sid: [5, 6]}, []),
        events.ItemReceived(sid, b"last"),
        events.TokensReceived({}, [sid]),
    ]
    assert pair.client.streams == pair.worker.streams == 0
    assert pair.client.late_frames == pair.worker.late_frames == 0


def test_a_refusal(pair: Pair) -> None:
    sid = pair.client.open("p", "r", b"", codec=MSGPACK, credit=1)
    pair.run()
    pair.worker.fail(sid, EngineShutdown("later", planned=True))
    pair.told_client.clear()
    finished = only(pair.client_events(), events.StreamFinished)
    assert isinstance(finished.error, EngineShutdown)
    assert finished.error.planned
    assert not finished.begun
    assert pair.client.streams == pair.worker.streams == 0


def test_an_error_comes_behind_what_was_sent(pair: Pair) -> None:
    sid = pair.open()
    pair.worker.send_tokens(sid, [1])
    pair.worker.send_item(sid, b"i")
    pair.worker.send_tokens(sid, [2])
    pair.worker.fail(sid, ValueError("oh"), begun=False)
    told = pair.client_events()
    assert told[:3] == [
        events.TokensReceived({sid: [1]}, []),
        events.ItemReceived(sid, b"i"),
        events.TokensReceived({sid: [2]}, []),
    ]
    finished = only(told[3:], events.StreamFinished)
    assert finished.error.message == "ValueError: oh"
    assert not finished.begun


def test_an_error_does_not_wait_for_credit(pair: Pair) -> None:
    """But for it, what is finished well does, and nothing of either is lost or doubled."""
    sid, other = pair.open(credit=2), pair.open(credit=2)
    for each in (sid, other):
        pair.worker.send_tokens(each, [1, 2, 3])
        pair.worker.send_item(each, b"i")
    pair.worker.finish(other)
    pair.worker.fail(sid, EngineShutdown("over", planned=True))
    tokens, finished = pair.client_events()
    assert tokens == events.TokensReceived({sid: [1, 2], other: [1, 2]}, [])
    assert isinstance(finished, events.StreamFinished)
    assert isinstance(finished.error, EngineShutdown)
    assert finished.sid == sid
    assert pair.client.streams == pair.worker.streams == 1
    pair.client.grant(other, 3)
    assert pair.client_events() == [
        events.TokensReceived({other: [3]}, []),
        events.ItemReceived(other, b"i"),
        events.TokensReceived({}, [other]),
    ]
    assert pair.client.streams == pair.worker.streams == 0


def test_an_error_waits_for_the_long_item_before_it(pair: Pair) -> None:
    """It has its credit, and has perhaps half left."""
    sid = pair.open(credit=1)
    pair.worker.send_item(sid, bytes(3 * MAX_PIECE))
    pair.client.receive_data(pair.worker.data_to_send(1000))
    pair.worker.send_item(sid, b"without credit")
    pair.worker.fail(sid, ValueError("oh"))
    item, finished = pair.client_events()
    assert item == events.ItemReceived(sid, bytes(3 * MAX_PIECE))
    assert isinstance(finished, events.StreamFinished)


def test_one_step_of_an_engine_is_one_frame(pair: Pair) -> None:
    sids = [pair.open() for _ in range(128)]
    for sid in sids:
        pair.worker.send_tokens(sid, [sid + 1000])
    pair.worker.finish(sids[3])
    pair.worker.send_item(sids[5], b"usage")
    pair.worker.finish(sids[5])
    data = all_bytes(pair.worker)
    assert names(data) == ["TOKENS", "ITEM", "DONE"]
    pair.client.receive_data(data)
    first, *others = take_events(pair.client)
    assert first == events.TokensReceived({sid: [sid + 1000] for sid in sids}, [sids[3]])
    assert others == [events.ItemReceived(sids[5], b"usage"), events.TokensReceived({}, [sids[5]])]


def test_items_stream_in(pair: Pair) -> None:
    sid = pair.open(streams_in=True, window=2)
    assert pair.client.has_credit(sid)
    for payload in (b"1", b"2", b"3"):
        pair.client.send_item(sid, payload)
    assert not pair.client.has_credit(sid)
    pair.client.finish_input(sid)
    assert pair.worker_events() == [events.ItemReceived(sid, b"1"), events.ItemReceived(sid, b"2")]
    pair.worker.grant(sid, 2)
    assert pair.worker_events() == [events.ItemReceived(sid, b"3"), events.InputFinished(sid)]
    pair.worker.grant(sid, 5)  # may cross the end of the input
    pair.worker.finish(sid)
    assert pair.client_events() == [events.TokensReceived({}, [sid])]


def test_a_grant_before_the_accept_is_in_it(pair: Pair) -> None:
    sid = pair.client.open("p", "r", b"", codec=MSGPACK, credit=1, streams_in=True)
    pair.run()
    pair.worker.grant(sid, 3)
    pair.worker.accept(sid, 4)
    assert frames_in(all_bytes(pair.worker)) == [frames.Opened(sid, 7)]


def test_input_that_ends_before_the_answer_begins(pair: Pair) -> None:
    sid = pair.client.open("p", "r", b"", codec=MSGPACK, credit=1, streams_in=True)
    pair.client.finish_input(sid)
    assert names(all_bytes(pair.client)) == ["OPEN", "DONE"]


def test_stop_is_a_wish(pair: Pair) -> None:
    sid = pair.open()
    pair.client.stop(sid)
    pair.client.stop(sid)
    assert pair.worker_events() == [events.StreamStopped(sid)]
    pair.worker.send_tokens(sid, [1])
    pair.worker.finish(sid)
    assert pair.client_events() == [events.TokensReceived({sid: [1]}, [sid])]


def test_cancel_ends_a_stream_for_both(pair: Pair) -> None:
    sid = pair.open()
    pair.worker.send_tokens(sid, [1])
    pair.worker.send_item(sid, b"2")
    pair.client.cancel(sid)
    assert pair.worker_events() == [events.StreamCancelled(sid)]
    assert pair.client_events() == []
    assert pair.client.late_frames > 0
    assert not pair.worker.is_open(sid)
    assert (pair.client.streams, pair.worker.streams) == (0, 1)
    pair.worker.send_tokens(sid, [3])
    pair.worker.send_item(sid, b"4")
    pair.worker.finish(sid)
    assert pair.worker.streams == 0
    assert not pair.worker.wants_to_send


def test_what_waits_for_a_cancelled_stream_never_leaves(pair: Pair) -> None:
    sid = pair.open(credit=4, streams_in=True, window=2)
    pair.worker.send_item(sid, b"1")
    pair.worker.send_item(sid, LONG)
    pair.worker.grant(sid, 5)
    pair.client.cancel(sid)
    pair.worker.receive_data(all_bytes(pair.client))
    assert take_events(pair.worker) == [events.StreamCancelled(sid)]
    assert all_bytes(pair.worker) == b""
    assert pair.worker.backlog == 0


def test_nothing_is_kept_of_a_message_whose_stream_ended_here(pair: Pair) -> None:
    sid = pair.open()
    pair.worker.send_item(sid, LONG * 8)
    pair.client.receive_data(pair.worker.data_to_send(1))
    assert take_events(pair.client) == []
    pair.client.cancel(sid)
    while data := pair.worker.data_to_send(1):
        pair.client.receive_data(data)
        assert take_events(pair.client) == []
        assert pair.client._assembly is None or pair.client._assembly.data == b""
    assert not pair.client.receiving
    assert pair.client.late_frames == 1


def test_a_cancel_behind_the_end_of_the_call(pair: Pair) -> None:
    sid = pair.open(credit=1)
    pair.worker.send_tokens(sid, [1, 2])
    pair.worker.finish(sid)  # the second token has no credit
    pair.client.cancel(sid)
    assert pair.worker_events() == [events.StreamCancelled(sid)]
    assert pair.worker.streams == 0
    assert not pair.worker.recall(sid, EngineShutdown("too late"))


def test_the_streams_whose_end_leaves_are_known(pair: Pair) -> None:
    well, badly, held = pair.open(), pair.open(), pair.open(credit=1)
    pair.worker.finish(well)
    pair.worker.fail(badly, EngineShutdown("gone"))
    pair.worker.send_tokens(held, [1, 2])
    pair.worker.finish(held)
    pair.client.receive_data(pair.worker.data_to_send())
    assert sorted(pair.worker.ends) == [well, badly]
    take_events(pair.client)
    assert pair.worker.data_to_send() == b""
    assert not pair.worker.ends
    pair.client.grant(held, 1)
    pair.worker.receive_data(all_bytes(pair.client))
    assert take_events(pair.worker) == []
    pair.client.receive_data(pair.worker.data_to_send())
    assert pair.worker.ends == [held]


def test_an_end_that_waits_for_credit_can_be_recalled(pair: Pair) -> None:
    held, free = pair.open(credit=1), pair.open()
    for sid in (held, free):
        pair.worker.send_tokens(sid, [1, 2])
    assert not pair.worker.recall(held, EngineShutdown("it has not ended"))
    for sid in (held, free):
        pair.worker.finish(sid)
    assert not pair.worker.recall(free, EngineShutdown("nothing waits for credit"))
    assert pair.worker.recall(held, EngineShutdown("moved", planned=True))
    assert not pair.worker.recall(held, EngineShutdown("once"))
    told = pair.client_events()
    assert [e.finished for e in told if isinstance(e, events.TokensReceived)] == [[free]]
    (end,) = [e for e in told if isinstance(e, events.StreamFinished)]
    assert end.sid == held
    assert isinstance(end.error, EngineShutdown)
    assert end.error.planned
    assert pair.worker.streams == 0


def test_an_answer_and_a_cancel_cross(pair: Pair) -> None:
    sid = pair.open()
    pair.worker.finish(sid)
    pair.client.cancel(sid)
    pair.client.grant(sid, 100)
    assert pair.worker_events() == pair.client_events() == []
    assert pair.worker.late_frames == pair.client.late_frames == 1
    assert pair.worker.streams == 0


# --- what has not left -------------------------------------------------------------------


def test_an_open_that_is_cancelled_in_time_never_leaves(pair: Pair) -> None:
    first, second = (pair.client.open("p", "r", b"", codec=MSGPACK, credit=1) for _ in range(2))
    assert not pair.client.has_left(first)
    pair.client.cancel(first)
    assert names(all_bytes(pair.client)) == ["OPEN"]
    assert pair.client.has_left(second)
    assert pair.client.streams == 1
    assert pair.client.backlog == 0


def test_an_open_that_has_half_left_is_dropped(pair: Pair) -> None:
    sid = pair.client.open("p", "r", LONG * 2, codec=MSGPACK, credit=1)
    half = pair.client.data_to_send(1)
    assert names(half) == ["PART"]
    assert pair.client.has_left(sid)
    pair.client.cancel(sid)
    rest = all_bytes(pair.client)
    assert names(rest) == ["DROP"]
    pair.worker.receive_data(half + rest)
    assert take_events(pair.worker) == []
    assert not pair.worker.receiving
    assert pair.client.backlog == 0
    later = pair.client.open("p", "r", b"", codec=MSGPACK, credit=1)
    assert only(pair.worker_events()[1:], events.StreamOpened).sid == later


def test_stop_and_credit_wait_for_the_open(pair: Pair) -> None:
    sid = pair.client.open("p", "r", b"", codec=MSGPACK, credit=2)
    pair.client.stop(sid)
    pair.client.grant(sid, 5)
    first, second = frames_in(all_bytes(pair.client))
    assert isinstance(first, frames.Open)
    assert first.credit == 7
    assert second == frames.Stop(sid)


# --- order -------------------------------------------------------------------------------


def test_control_goes_first_and_an_ack_behind_the_opens(pair: Pair) -> None:
    sid = pair.open()
    pair.worker.drain(3, ["1/generate"])
    assert pair.client_events() == [events.PathsDraining(3, ("1/generate",))]
    for payload in (b"", LONG, b""):
        pair.client.open("p", "r", payload, codec=MSGPACK, credit=1)
    pair.client.acknowledge(3, places=2)
    pair.client.open("q", "r", b"", codec=MSGPACK, credit=1)
    pair.client.go_away(text="bye")
    pair.client.ping()
    pair.client.cancel(sid)
    order = names(all_bytes(pair.client))
    assert [name for name in order if name != "PART"] == [
        *("OPEN", "OPEN", "OPEN", "ACK", "OPEN", "GOAWAY"),
    ]


def test_control_overtakes_data(pair: Pair) -> None:
    one, other = pair.open(), pair.open(streams_in=True, window=4)
    pair.client.send_item(other, b"i")
    pair.client.cancel(one)
    pair.client.ping()
    assert names(all_bytes(pair.client)) == ["CANCEL", "PING", "ITEM"]


def test_a_long_prompt_delays_nothing(pair: Pair) -> None:
    pair.client.open("p", "r", LONG * 20, codec=MSGPACK, credit=1)
    pair.client.open("p", "r", b"", codec=MSGPACK, credit=1)
    assert names(pair.client.data_to_send(2 * MAX_PIECE)) == ["PART", "OPEN", "PART"]
    pair.client.ping()
    assert names(pair.client.data_to_send(1)) == ["PING"]


def test_a_long_prompt_arrives_whole_after_a_short_one(pair: Pair) -> None:
    long = pair.client.open("p", "r", LONG * 20, codec=MSGPACK, credit=1)
    short = pair.client.open("p", "r", b"", codec=MSGPACK, credit=1)
    opened = [e for e in pair.worker_events() if isinstance(e, events.StreamOpened)]
    assert [e.sid for e in opened] == [short, long]
    assert opened[1].payload == LONG * 20


def test_long_items_take_turns_and_short_ones_do_not_wait(pair: Pair) -> None:
    one, two, three = (pair.open() for _ in range(3))
    pair.worker.send_item(one, LONG + b"1")
    pair.worker.send_tokens(one, [1])
    pair.worker.send_item(two, LONG + b"2")
    pair.worker.finish(two)
    pair.worker.send_item(three, b"3")
    pair.worker.send_tokens(three, [3])
    told = pair.client_events()
    assert told[:2] == [events.ItemReceived(three, b"3"), events.TokensReceived({three: [3]}, [])]
    assert sorted(told[2:], key=repr) == sorted(
        [
            events.ItemReceived(one, LONG + b"1"),
            events.TokensReceived({one: [1]}, []),
            events.ItemReceived(two, LONG + b"2"),
            events.TokensReceived({}, [two]),
        ],
        key=repr,
    )


@pytest.mark.parametrize("ends_by", ["cancel", "error"])
def test_a_long_message_whose_stream_ends_is_dropped(pair: Pair, ends_by: str) -> None:
    sid = pair.open(streams_in=True, window=9)
    other = pair.open()
    sender: MuxConnection = pair.worker if ends_by == "cancel" else pair.client
    receiver: MuxConnection = pair.client if ends_by == "cancel" else pair.worker
    sender.send_item(sid, LONG * 3)
    while names(data := sender.data_to_send(1)) != ["PART"]:
        pass
    receiver.receive_data(data)
    assert (receiver.next_event(), receiver.receiving) == (None, True)
    if ends_by == "cancel":
        pair.client.cancel(sid)
    else:
        pair.worker.fail(sid, ValueError("oh"))
    sender.receive_data(all_bytes(receiver))
    take_events(sender)
    rest = all_bytes(sender)
    assert names(rest) == ["DROP"]
    receiver.receive_data(rest)
    assert take_events(receiver) == []
    assert not receiver.receiving
    assert sender.backlog == 0
    pair.worker.send_item(other, LONG)
    assert pair.client_events()[-1] == events.ItemReceived(other, LONG)


def calls_during(work: Callable[[], object]) -> int:
    """How many functions written in Python were entered."""
    count = 0

    def look(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()  # a collection calls what others have asked it to, Hypothesis among them
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_nothing_is_called_for_a_token(pair: Pair) -> None:
    sids = [pair.open(credit=1000) for _ in range(128)]

    def step(some: list[int]) -> tuple[int, int]:
        for sid in some:
            pair.worker.send_tokens(sid, [7, 8])
        data = b""

        def leave() -> None:
            nonlocal data
            data = pair.worker.data_to_send()

        leaving = calls_during(leave)
        pair.client.receive_data(data)
        return leaving, calls_during(pair.client.next_event)

    assert step(sids) == step(sids[:1])
    assert calls_during(lambda: pair.worker.send_tokens(sids[0], [*range(100)])) == 2


def test_a_cancel_before_the_accept(pair: Pair) -> None:
    sids = [pair.client.open("p", "r", b"", codec=MSGPACK, credit=1) for _ in range(2)]
    pair.run()
    for sid in sids:
        pair.client.cancel(sid)
    pair.run()
    pair.worker.accept(sids[0])
    pair.worker.finish(sids[0])
    pair.worker.fail(sids[1], ValueError("oh"))
    assert not pair.worker.wants_to_send
    assert pair.worker.streams == 0


def test_a_worker_whose_client_has_gone_says_nothing(pair: Pair) -> None:
    sid = pair.open()
    pair.client.go_away()
    assert pair.worker_events() == [events.GoneAway("closing", "")]
    pair.worker.send_tokens(sid, [1])
    pair.worker.finish(sid)
    pair.worker.drain(1, ["p"])
    pair.worker.serve_again(["p"])
    pair.worker.ping()
    assert not pair.worker.wants_to_send
    assert pair.worker.streams == 0


# --- credit ------------------------------------------------------------------------------


def test_what_has_no_credit_is_held_in_order(pair: Pair) -> None:
    sid = pair.open(credit=4)
    pair.worker.send_tokens(sid, [1, 2, 3])
    assert pair.worker.has_credit(sid)
    pair.worker.send_tokens(sid, [4, 5])
    assert not pair.worker.has_credit(sid)
    pair.worker.send_tokens(sid, [6])
    pair.worker.send_item(sid, b"i")
    pair.worker.send_tokens(sid, [7])
    pair.worker.finish(sid)
    assert pair.client_events() == [events.TokensReceived({sid: [1, 2, 3, 4]}, [])]
    pair.client.grant(sid, 1)
    assert not pair.client.wants_to_send  # half a window is two
    pair.client.grant(sid, 2)
    assert pair.client_events() == [
        events.TokensReceived({sid: [5, 6]}, []),
        events.ItemReceived(sid, b"i"),
    ]
    pair.client.grant(sid, 2)
    assert pair.client_events() == [events.TokensReceived({sid: [7]}, [sid])]
    assert pair.worker.streams == 0


def test_a_slow_reader_holds_back_only_itself(pair: Pair) -> None:
    slow, fast = pair.open(credit=1), pair.open(credit=100)
    for token in range(20):
        pair.worker.send_tokens(slow, [token])
        pair.worker.send_tokens(fast, [token])
    assert pair.client_events() == [events.TokensReceived({slow: [0], fast: [*range(20)]}, [])]


def test_who_may_send_again_is_told_once(pair: Pair) -> None:
    sid = pair.open(credit=2)
    pair.worker.send_tokens(sid, [1, 2])
    pair.run()
    pair.client.grant(sid, 1)
    assert pair.worker_events() == [events.CreditReceived([sid])]
    pair.client.grant(sid, 1)
    assert pair.worker_events() == []
    assert pair.worker.has_credit(sid)


def test_a_long_item_costs_more_and_is_given_back_when_it_is_consumed(pair: Pair) -> None:
    sid = pair.open(credit=4)
    pair.worker.send_item(sid, b"short")
    pair.worker.send_item(sid, b"x" * (BYTES_PER_CREDIT * 9))
    pair.worker.send_item(sid, b"held")
    assert len(pair.client_events()) == 2
    pair.client.grant(sid, 1)  # the short one
    assert pair.client_events() == []
    pair.client.grant(sid, 1)  # the long one, and what it cost
    assert pair.client_events() == [events.ItemReceived(sid, b"held")]
    pair.client.grant(sid, 1)
    pair.client.grant(sid, 1)
    pair.run()
    assert pair.worker.has_credit(sid)


def test_grants_above_what_came_are_more_credit(pair: Pair) -> None:
    sid = pair.open(credit=1)
    pair.client.grant(sid, 5)
    pair.run()
    pair.worker.send_item(sid, b"x" * (BYTES_PER_CREDIT * 3))
    pair.worker.send_tokens(sid, [1, 2, 3, 4, 5])
    received = [e for e in pair.client_events() if isinstance(e, events.TokensReceived)]
    assert [t for e in received for t in e.tokens[sid]] == [1, 2, 3, 4, 5]


def test_credit_never_grows_above_its_limit(pair: Pair) -> None:
    sid = pair.open(credit=MAX_CREDIT)
    pair.client.grant(sid, MAX_CREDIT)
    pair.run()
    assert pair.worker.has_credit(sid)


def test_streams_that_run_side_by_side_share_the_frames_of_their_credit(pair: Pair) -> None:
    sids = [pair.open(credit=64) for _ in range(8)]
    frames = 0
    for step in range(320):  # each stream is granted as many as it has got, but all at other steps
        for sid in sids:
            pair.worker.send_tokens(sid, [step])
        pair.client_events()
        for index, sid in enumerate(sids):
            if step % 16 == 2 * index:
                pair.client.grant(sid, 16)
        if data := all_bytes(pair.client):
            pair.worker.receive_data(data)
            frames += names(data).count("CREDIT")
    assert frames <= 320 // 16 + 1  # not one of each stream in 32 steps, which were 80
    assert pair.worker.has_credit(sids[0])


def test_a_reader_of_single_items_grants_nothing_in_vain_beside_a_fast_one(pair: Pair) -> None:
    fast, *slow = (pair.open(credit=64) for _ in range(5))
    for sid in slow:
        pair.worker.send_tokens(sid, [*range(30)])
    for _ in range(30):
        pair.worker.send_tokens(fast, [*range(32)])
        pair.run()
        for sid in slow:
            pair.client.grant(sid, 1)
        pair.client.grant(fast, 32)
        pair.run()
    assert pair.worker.trifles == 0


def test_grants_of_a_batch_share_a_frame(pair: Pair) -> None:
    sids = [pair.open(credit=2) for _ in range(3)]
    for sid in sids * 2:
        pair.client.grant(sid, 1)
    assert frames_in(all_bytes(pair.client)) == [
        frames.Credit([n for sid in sids for n in (sid, 2)])
    ]


# --- pings, drains, last words -----------------------------------------------------------


def test_a_pong_answers_all_pings_before_it(pair: Pair) -> None:
    numbers = [pair.client.ping(), pair.client.ping()]
    assert pair.worker_events()[1:] == []
    assert pair.client_events()[1:] == [events.Ponged(numbers[-1])]


def test_a_drain_and_its_acknowledgement(pair: Pair) -> None:
    pair.told_client.clear()
    pair.told_worker.clear()
    pair.worker.drain(1, ["a"])
    pair.worker.drain(5, ["a", "b"])
    assert pair.client_events() == [
        events.PathsDraining(1, ("a",)),
        events.PathsDraining(5, ("a", "b")),
    ]
    pair.client.acknowledge(5, places=3)
    assert pair.worker_events() == [events.DrainAcknowledged(5, 3)]
    pair.worker.serve_again(["b"])
    assert pair.client_events() == [events.PathsServing(("b",))]
    with pytest.raises(LocalProtocolError, match="no notice 6"):
        pair.client.acknowledge(6)
    with pytest.raises(LocalProtocolError, match="notice 5 after 5"):
        pair.worker.drain(5, ["c"])


def test_an_ack_stands_for_those_before_it(pair: Pair) -> None:
    for notice in range(1000):
        pair.worker.drain(notice, ["p"])
    for event in pair.client_events():
        if isinstance(event, events.PathsDraining):
            pair.client.acknowledge(event.notice)
    assert frames_in(all_bytes(pair.client)) == [frames.Ack(999, 0)]


def test_last_words_of_a_worker(pair: Pair) -> None:
    sid, held = pair.open(), pair.open(credit=1)
    pair.worker.send_tokens(held, [1, 2, 3])
    pair.worker.fail(sid, EngineShutdown("bye"))
    pair.worker.go_away(text="closing")
    pair.worker.send_tokens(held, [4])
    told = pair.client_events()
    assert told[0] == events.TokensReceived({held: [1]}, [])
    assert isinstance(told[1], events.StreamFinished)
    assert told[2:] == [events.GoneAway("closing", "closing")]
    assert pair.client.streams == 0
    assert not pair.worker.wants_to_send
    pair.client.grant(held, 5)
    pair.client.cancel(held)
    pair.client.go_away()
    assert not pair.client.wants_to_send
    with pytest.raises(LocalProtocolError, match="or over"):
        pair.client.open("p", "r", b"", codec=MSGPACK, credit=1)


def test_nothing_is_heard_behind_last_words(pair: Pair) -> None:
    pair.client.receive_data(
        encode(frames.GoAway("closing", "")) + encode(frames.Tokens([99, 1], [])) + b""
    )
    assert len(take_events(pair.client)) == 1
    pair.client.receive_data(b"")
    assert take_events(pair.client) == [Closed(inside=False)]


# --- limits ------------------------------------------------------------------------------


def test_the_client_keeps_to_the_workers_limits() -> None:
    pair = Pair(worker=MuxLimits(max_streams=1, max_message=10))
    with pytest.raises(PayloadTooLarge, match="11 bytes"):
        pair.client.open("p", "r", b"x" * 11, codec=MSGPACK, credit=1)
    pair.open()
    with pytest.raises(Overloaded, match="1 streams"):
        pair.client.open("p", "r", b"", codec=MSGPACK, credit=1)


@pytest.mark.parametrize(
    ("path", "request_id", "metadata"),
    [
        ("p" * 1025, "r", {}),
        ("p", "r" * 1025, {}),
        ("p", "\ud800", {}),
        ("p", "r", {"k": "v" * 20_000}),
        ("p", "r", {str(n): "" for n in range(257)}),
    ],
    ids=["path", "request id", "surrogate", "long metadata", "many metadata"],
)
def test_a_head_that_is_too_large(
    pair: Pair, path: str, request_id: str, metadata: dict[str, str]
) -> None:
    with pytest.raises(InvalidArgument):
        pair.client.open(path, request_id, b"", codec=MSGPACK, credit=1, metadata=metadata)
    assert pair.client.streams == 0


def test_the_largest_head_fits(pair: Pair) -> None:
    pair.client.open("€" * 1024, "€" * 1024, b"x" * MAX_PIECE, codec=MSGPACK, credit=1,
                     metadata={"k": "v" * 16383})  # fmt: skip
    assert isinstance(pair.worker_events()[-1], events.StreamOpened)


def test_too_many_streams_are_refused_until_calls_have_ended() -> None:
    pair = Pair(worker=MuxLimits(max_streams=2))
    sids = [pair.open(), pair.open()]
    pair.client.cancel(sids[0])  # its call goes on
    third = pair.client.open("p", "r", b"", codec=MSGPACK, credit=1)
    finished = only(pair.client_events(), events.StreamFinished)
    assert finished.sid == third
    assert isinstance(finished.error, Overloaded)
    assert pair.worker_events() == [events.StreamCancelled(sids[0])]
    pair.worker.finish(sids[0])
    pair.client.open("p", "r", b"", codec=MSGPACK, credit=1)
    assert isinstance(only(pair.worker_events(), events.StreamOpened), events.StreamOpened)


def test_a_flood_of_opens_makes_the_connection_congested() -> None:
    worker = WorkerConnection(MuxLimits(max_streams=1, max_control=10_000))
    worker.receive_data(greeting(WorkerConnection))
    sid = 0
    while not worker.congested:
        sid += 1
        worker.receive_data(encode(frames.Open(sid, "p", "r", "json", False, 1, None, {}, b"")))
        worker.receive_data(encode(frames.Cancel(sid)) + encode(frames.Ping(sid)))
        take_events(worker)
    assert sid < 300
    assert worker.streams == 1
    worker.data_to_send()
    assert not worker.congested


def test_an_unknown_codec_is_refused(pair: Pair) -> None:
    pair.worker.receive_data(encode(frames.Open(1, "p", "r", "xml", False, 1, None, {}, b"")))
    assert take_events(pair.worker) == []
    (error,) = frames_in(all_bytes(pair.worker))
    assert isinstance(error, frames.Error)
    assert error.kinds[0] == "InvalidArgument"


def test_a_message_above_the_limit() -> None:
    pair = Pair(worker=MuxLimits(max_message=3 * MAX_PIECE))
    piece = encode(frames.Part(1, b"x" * MAX_PIECE))
    pair.worker.receive_data(piece * 3)
    assert pair.worker.next_event() is None
    pair.worker.receive_data(encode(frames.Part(1, b"y")))
    with pytest.raises(MessageTooLarge):
        pair.worker.next_event()


def test_an_item_above_the_peers_limit_is_our_mistake() -> None:
    pair = Pair(client=MuxLimits(max_message=10))
    sid = pair.open()
    with pytest.raises(LocalProtocolError, match="11 bytes"):
        pair.worker.send_item(sid, b"x" * 11)


# --- mistakes of a peer ------------------------------------------------------------------

TO_CLIENT: dict[str, tuple[frames.Frame, str]] = {
    "a client's frame": (frames.Cancel(1), "a worker sent CANCEL"),
    "hello again": (frames.Hello([1], 1, 1, ""), "HELLO twice"),
    "never opened": (frames.Item(9, b""), "ITEM for stream 9, which was never opened"),
    "tokens, never opened": (frames.Tokens([9, 1], []), "TOKENS for stream 9"),
    "tokens of stream 0": (frames.Tokens([0, 1], []), "TOKENS for stream 0"),
    "done, never opened": (frames.Done([9]), "DONE for stream 9"),
    "part, never opened": (frames.Part(9, b"x"), "PART for stream 9"),
    "accepted twice": (frames.Opened(1, 0), "OPENED of a worker for stream 1 in state ANSWERING"),
    "tokens before accepting": (frames.Tokens([2, 1], []), "TOKENS .* stream 2 in state ASKED"),
    "item before accepting": (frames.Item(2, b""), "ITEM .* stream 2 in state ASKED"),
    "done before accepting": (frames.Done([2]), "DONE .* stream 2 in state ASKED"),
    "before the open left": (frames.Opened(3, 0), "OPENED of a worker for stream 3 in state IDLE"),
    "odd tokens": (frames.Tokens([1], []), "odd count"),
    "too many tokens": (frames.Tokens([1, 7] * 5, []), "tokens without credit on stream 1"),
    "odd grants": (frames.Credit([1]), "odd count"),
    "grant of nothing": (frames.Credit([1, 0]), "a grant of 0 credit"),
    "drop of nothing": (frames.Drop(1), "DROP for stream 1, which has no PART"),
    "pong": (frames.Pong(1), "PONG 1, which answers no PING"),
}
TO_WORKER: dict[str, tuple[frames.Frame, str]] = {
    "a worker's frame": (frames.Opened(1, 1), "a client sent OPENED"),
    "never opened": (frames.Cancel(9), "CANCEL for stream 9"),
    "numbers that do not rise": (
        frames.Open(2, "p", "r", "json", False, 1, None, {}, b""),
        "OPEN 2 after 2",
    ),
    "item without stream": (frames.Item(1, b""), "ITEM of a client for stream 1 in state ANSWERI"),
    "done twice": (frames.Done([1]), "DONE of a client for stream 1 in state ANSWERING"),
    "too much credit": (frames.Credit([1, MAX_CREDIT]), "a grant of 2147483647 credit"),
    "ack": (frames.Ack(0, 0), "ACK of notice 0, which was not sent"),
    "metadata": (
        frames.Open(3, "p", "r", "json", False, 1, None, {"k": "v" * 20000}, b""),
        "metadata of 20001 bytes",
    ),
}


def faulty(pair: Pair, end: MuxConnection, frame: frames.Frame, text: str) -> None:
    """The end refuses this frame, and everything from then on."""
    end.receive_data(encode(frame))
    with pytest.raises(RemoteProtocolError, match=text):
        take_events(end)
    end.receive_data(encode(frames.Ping(1)))
    with pytest.raises(RemoteProtocolError, match=text):
        end.next_event()
    with pytest.raises(LocalProtocolError, match="the connection has failed"):
        end.ping()
    with pytest.raises(LocalProtocolError, match="the connection has failed"):
        end.grant(1, 1)
    (last,) = frames_in(all_bytes(end))
    assert isinstance(last, frames.GoAway)
    assert last.code == GoAwayCode.PROTOCOL
    assert end.streams == 0
    assert not end.wants_to_send


@pytest.mark.parametrize("case", TO_CLIENT)
def test_a_worker_that_breaks_a_rule(pair: Pair, case: str) -> None:
    pair.open(credit=4)
    pair.client.open("p", "r", b"", codec=MSGPACK, credit=4)
    pair.run()
    pair.client.open("p", "not sent", b"", codec=MSGPACK, credit=4)
    faulty(pair, pair.client, *TO_CLIENT[case])


@pytest.mark.parametrize("case", TO_WORKER)
def test_a_client_that_breaks_a_rule(pair: Pair, case: str) -> None:
    pair.open()
    pair.client.open("p", "r", b"", codec=MSGPACK, credit=4, streams_in=True)
    pair.run()
    faulty(pair, pair.worker, *TO_WORKER[case])


def test_items_that_stream_in_without_credit(pair: Pair) -> None:
    sid = pair.open(streams_in=True, window=1)
    pair.worker.receive_data(encode(frames.Item(sid, b"")))
    assert take_events(pair.worker) == [events.ItemReceived(sid, b"")]
    faulty(pair, pair.worker, frames.Item(sid, b""), "an item without credit")


@pytest.mark.parametrize(
    "frame",
    [
        frames.Tokens([1, 1], []),
        frames.Done([1]),
        frames.Error(1, [], "", True),
        frames.Part(2, b"x"),
    ],
    ids=lambda frame: frame.type.name,
)
def test_what_may_not_come_within_a_message(pair: Pair, frame: frames.Frame) -> None:
    assert (pair.open(), pair.open()) == (1, 2)
    pair.client.receive_data(encode(frames.Part(1, b"x")) + encode(frames.Credit([1, 1])))
    assert take_events(pair.client) == []
    faulty(pair, pair.client, frame, "within the message of stream 1")


def test_a_draining_notice_that_does_not_rise(pair: Pair) -> None:
    pair.worker.drain(4, ["a"])
    pair.run()
    faulty(pair, pair.client, frames.Draining(4, ["b"]), "DRAINING 4 after 4")


def test_an_ack_that_goes_back(pair: Pair) -> None:
    pair.worker.drain(4, ["a"])
    pair.worker.drain(5, ["a"])
    pair.run()
    pair.client.acknowledge(5)
    pair.run()
    faulty(pair, pair.worker, frames.Ack(4, 0), "ACK of notice 4")


# --- mistakes of the owner ---------------------------------------------------------------


def test_mistakes_of_the_owner_leave_the_connection_whole(pair: Pair) -> None:
    worker, client = pair.worker, pair.client
    sid = client.open("p", "r", b"", codec=MSGPACK, credit=4)
    pair.run()
    calls: list[Callable[[], object]] = [
        lambda: worker.send_tokens(sid, [1]),
        lambda: worker.send_item(sid, b""),
        lambda: worker.finish(sid),
        lambda: client.send_item(sid, b""),
        lambda: worker.send_tokens(sid + 1, [1]),
        lambda: client.cancel(sid + 1),
        lambda: worker.drain(-1, ["p"]),
    ]
    for call in calls:
        with pytest.raises(LocalProtocolError):
            call()
    worker.accept(sid)
    for tokens in ([-1], [1, MAX_TOKEN + 1]):
        with pytest.raises(LocalProtocolError, match="no token"):
            worker.send_tokens(sid, tokens)
    with pytest.raises(LocalProtocolError, match="OPENED"):
        worker.accept(sid)
    worker.send_tokens(sid, [])
    worker.send_tokens(sid, [1, 2, 3, 4, 5])
    worker.finish(sid)
    worker.finish(sid)
    for call in (lambda: worker.send_tokens(sid, [6]), lambda: worker.send_item(sid, b"6")):
        with pytest.raises(LocalProtocolError, match=r"end of stream|behind its end"):
            call()
    pair.run()
    client.grant(sid, 5)
    pair.run()
    assert pair.told_client[-1] == events.TokensReceived({sid: [5]}, [sid])
    worker.send_tokens(sid, [7])
    client.grant(sid, 1)
    assert not worker.wants_to_send
    assert not client.wants_to_send
