"""Frames of the mux protocol: their bytes, their limits, and what garbage is."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio import errors
from dynamo_trio.errors import LocalProtocolError, RemoteProtocolError
from dynamo_trio.wire.mux import frames
from dynamo_trio.wire.mux.frames import (
    FRAMES,
    HEAD,
    OPTIONAL,
    FrameType,
    decode,
    encode,
    encode_credit,
    encode_tokens,
)
from dynamo_trio.wire.mux.limits import MAX_FRAME, MAX_PIECE, MAX_SID, MAX_TOKEN
from dynamo_trio.wire.mux.told_errors import tell, told
from tests.wire.mux.mux_pair import ANY_FRAME, FRAMES_OF, frames_in

#: One frame of each kind as bytes. They are the protocol: a change here is a new version.
VECTORS: dict[FrameType, tuple[frames.Frame, str]] = {
    FrameType.HELLO: (
        frames.Hello([1], 4096, 33554432, "dynamo_trio", "0a1b"),
        "0000001d 01 95 9101 cd1000 ce02000000 ab64796e616d6f5f7472696f a430613162",
    ),
    FrameType.OPEN: (
        frames.Open(7, "1/g", "r", "msgpack", False, 64, None, {"k": "v"}, b"\x80"),
        "0000001c 02 99 07 a3312f67 a172 a76d73677061636b c2 40 c0 81a16ba176 c40180",
    ),
    FrameType.OPENED: (frames.Opened(7, 0), "00000004 03 92 07 00"),
    FrameType.PART: (frames.Part(7, b"ab"), "00000007 04 92 07 c4026162"),
    FrameType.DROP: (frames.Drop(7), "00000003 05 91 07"),
    FrameType.ITEM: (frames.Item(7, b"ab"), "00000007 06 92 07 c4026162"),
    FrameType.TOKENS: (frames.Tokens([7, 300, 8, 1], [8]), "0000000b 07 92 94 07cd012c0801 9108"),
    FrameType.DONE: (frames.Done([7, 8]), "00000005 08 91 920708"),
    FrameType.ERROR: (
        frames.Error(7, ["Overloaded"], "no", False),
        "00000015 09 96 07 91 aa4f7665726c6f61646564 a26e6f c2 c2 c0",
    ),
    FrameType.CANCEL: (frames.Cancel(7), "00000003 0a 91 07"),
    FrameType.STOP: (frames.Stop(7), "00000003 0b 91 07"),
    FrameType.CREDIT: (frames.Credit([7, 32]), "00000005 0c 91 920720"),
    FrameType.PING: (frames.Ping(1), "00000003 0d 91 01"),
    FrameType.PONG: (frames.Pong(1), "00000003 0e 91 01"),
    FrameType.DRAINING: (frames.Draining(1, ["1/g"]), "00000008 0f 92 01 91a3312f67"),
    FrameType.ACK: (frames.Ack(1, 0), "00000004 10 92 01 00"),
    FrameType.SERVING: (frames.Serving(["1/g"]), "00000007 11 91 91a3312f67"),
    FrameType.GOAWAY: (
        frames.GoAway("closing", ""),
        "0000000b 12 92 a7636c6f73696e67 a0",
    ),
}


def parts_of(data: bytes) -> tuple[int, bytes]:
    """Type and body of one whole frame."""
    size, kind = HEAD.unpack_from(data)
    assert len(data) == 4 + size
    return kind, data[HEAD.size :]


def test_every_type_has_a_form_a_vector_and_a_strategy() -> None:
    assert set(FRAMES) == set(VECTORS) == set(FrameType)
    assert set(FRAMES_OF) == set(FRAMES.values())


@pytest.mark.parametrize("kind", FrameType, ids=lambda kind: kind.name)
def test_the_bytes_are_these(kind: FrameType) -> None:
    frame, text = VECTORS[kind]
    data = bytes.fromhex(text)
    assert encode(frame) == data
    assert decode(*parts_of(data)) == frame


@given(ANY_FRAME)
def test_round_trip(frame: frames.Frame) -> None:
    data = encode(frame)
    assert decode(*parts_of(data)) == frame
    assert len(data) <= 4 + MAX_FRAME


@given(st.integers(0, 255), st.binary(max_size=200))
def test_any_body_is_a_frame_or_an_error(kind: int, body: bytes) -> None:
    try:
        frame = decode(kind, body)
    except RemoteProtocolError:
        return
    assert (frame is None) == (kind >= OPTIONAL)


def test_depth_is_an_error_too() -> None:
    nested = b"\x92\x07" + b"\x91" * 60_000
    with pytest.raises(RemoteProtocolError, match="DROP"):
        decode(FrameType.DROP, nested)


def test_what_a_later_version_adds_is_ignored() -> None:
    assert decode(OPTIONAL, b"whatever") is None
    body = msgspec.msgpack.encode([7, "something new", {"of": 1}])
    assert decode(FrameType.CANCEL, body) == frames.Cancel(7)
    with pytest.raises(RemoteProtocolError, match="unknown type 127"):
        decode(OPTIONAL - 1, b"whatever")


@pytest.mark.parametrize(
    "wrong",
    [
        (FrameType.CANCEL, [0]),
        (FrameType.CANCEL, [MAX_SID + 1]),
        (FrameType.CANCEL, [-1]),
        (FrameType.CANCEL, [True]),
        (FrameType.CANCEL, []),
        (FrameType.PART, [1, b""]),
        (FrameType.ITEM, [1, b"x" * (MAX_PIECE + 1)]),
        (FrameType.TOKENS, [[1, MAX_TOKEN + 1], []]),
        (FrameType.TOKENS, [[1, -1], []]),
        (FrameType.DONE, [[]]),
        (FrameType.OPENED, [1, 2**31]),
        (FrameType.DRAINING, [1, []]),
        (FrameType.DRAINING, [1, ["p"] * 33]),
        (FrameType.SERVING, [["p" * 1025]]),
    ],
    ids=str,
)
def test_values_outside_their_limits_are_refused(wrong: tuple[FrameType, object]) -> None:
    kind, value = wrong
    with pytest.raises(RemoteProtocolError, match=f"unreadable {kind.name} frame"):
        decode(kind, msgspec.msgpack.encode(value))


def test_a_text_that_cannot_be_spelled_is_our_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="SERVING frame cannot be spelled"):
        encode(frames.Serving(["\ud800"]))
    with pytest.raises(LocalProtocolError, match="DRAINING frame of"):
        encode(frames.Draining(1, ["€" * 1024] * 32))


def test_many_tokens_take_several_frames() -> None:
    tokens = [MAX_TOKEN] * 60_000
    found = frames_in(encode_tokens(tokens, [1, 2]))
    assert len(found) > 1
    assert [t for f in found if isinstance(f, frames.Tokens) for t in f.tokens] == tokens
    assert all(not f.finished and len(f.tokens) % 2 == 0
               for f in found if isinstance(f, frames.Tokens))  # fmt: skip
    assert found[-1] == frames.Done([1, 2])


def test_tokens_and_ends_share_a_frame() -> None:
    assert frames_in(encode_tokens([7, 1], [8])) == [frames.Tokens([7, 1], [8])]
    assert frames_in(encode_tokens([], [8])) == [frames.Done([8])]


def test_many_grants_take_several_frames() -> None:
    grants = [2**31 - 1] * 40_000
    found = frames_in(encode_credit(grants))
    assert [n for f in found if isinstance(f, frames.Credit) for n in f.grants] == grants


# --- errors ------------------------------------------------------------------------------

TRAVELLING = [
    errors.InvalidArgument("m", param="p"),
    errors.ContextLengthExceeded("m", param=None),
    errors.PayloadTooLarge("m"),
    errors.Cancelled("m"),
    errors.Draining("m"),
    errors.Overloaded("m"),
    errors.NoWorker("m"),
    errors.RequestCut("m"),
    errors.Disconnected("m"),
    errors.ConnectionTimeout("m"),
    errors.StreamIncomplete("m"),
    errors.EngineShutdown("m", planned=True),
    errors.EngineDead("m"),
    errors.CannotConnect("m"),
]


@pytest.mark.parametrize("error", TRAVELLING, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_what_it_was(error: errors.DynamoException) -> None:
    frame = tell(7, error, begun=True)
    read = decode(*parts_of(encode(frame)))
    assert isinstance(read, frames.Error)
    arrived = told(read)
    assert type(arrived) is type(error)
    assert vars(arrived) == vars(error)
    assert str(arrived) == "m"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("oh"), errors.Unknown, "ValueError: oh"),
        (errors.RemoteProtocolError("unreadable"), errors.InvalidArgument, "unreadable"),
        (errors.UnreadableItem("unreadable"), errors.InvalidArgument, "unreadable"),
        (errors.LocalProtocolError("oh"), errors.Unknown, "oh"),
        (errors.NotConnected("oh"), errors.CannotConnect, "oh"),
        (errors.DynamoException("oh"), errors.Unknown, "oh"),
    ],
    ids=lambda value: getattr(type(value), "__name__", str(value)),
)
def test_what_changes_on_the_way(
    error: Exception, kind: type[errors.DynamoException], text: str
) -> None:
    arrived = told(tell(1, error, begun=False))
    assert type(arrived) is kind
    assert str(arrived) == text


def test_a_class_of_a_later_version_becomes_the_nearest() -> None:
    frame = frames.Error(1, ["EngineOnFire", "EngineShutdown", "DynamoException"], "m", True, True)
    arrived = told(frame)
    assert type(arrived) is errors.EngineShutdown
    assert arrived.planned
    assert type(told(frames.Error(1, ["StartupError", "x"], "m", True))) is errors.Unknown


@given(st.text())
def test_any_text_of_an_error_fits_a_frame(text: str) -> None:
    error = errors.InvalidArgument(text * 3000, param=text * 3000)
    assert len(encode(tell(1, error, begun=True))) <= MAX_FRAME
