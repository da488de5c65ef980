"""Two ends of a mux connection, connected by hand, and frames of every kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from hypothesis import strategies as st

from dynamo_trio.wire.dynamo.codec import MSGPACK
from dynamo_trio.wire.mux import frames
from dynamo_trio.wire.mux.client_connection import ClientConnection
from dynamo_trio.wire.mux.frames import encode
from dynamo_trio.wire.mux.limits import (
    MAGIC,
    MAX_CREDIT,
    MAX_NUMBER,
    MAX_PIECE,
    MAX_SID,
    MAX_TOKEN,
    MuxLimits,
)
from dynamo_trio.wire.mux.worker_connection import WorkerConnection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_trio.wire.mux.connection import MuxConnection
    from dynamo_trio.wire.mux.events import MuxEvent
    from dynamo_trio.wire.mux.frames import Frame

E = TypeVar("E")


def take_events(end: MuxConnection) -> list[MuxEvent]:
    """All events that are there."""
    taken = []
    while (event := end.next_event()) is not None:
        taken.append(event)
    return taken


def all_bytes(end: MuxConnection) -> bytes:
    """All that can leave."""
    data = bytearray()
    while end.wants_to_send:
        data += end.data_to_send()
    return bytes(data)


def frames_in(data: bytes) -> list[Frame]:
    """The frames that some bytes hold."""
    data = data.removeprefix(MAGIC)
    found = []
    while data:
        size, kind = frames.HEAD.unpack_from(data)
        frame = frames.decode(kind, data[frames.HEAD.size : 4 + size])
        assert frame is not None
        found.append(frame)
        data = data[4 + size :]
    return found


class Pair:
    """A client and a worker; what each was told."""

    def __init__(
        self,
        client: MuxLimits | None = None,
        worker: MuxLimits | None = None,
        *,
        greeted: bool = True,
    ) -> None:
        self.client = ClientConnection(client)
        self.worker = WorkerConnection(worker)
        self.told_client: list[MuxEvent] = []
        self.told_worker: list[MuxEvent] = []
        if greeted:
            self.run()

    def run(self) -> None:
        """Carry everything back and forth until both are silent."""
        while self.client.wants_to_send or self.worker.wants_to_send:
            if data := all_bytes(self.client):
                self.worker.receive_data(data)
            self.told_worker += take_events(self.worker)
            if data := all_bytes(self.worker):
                self.client.receive_data(data)
            self.told_client += take_events(self.client)

    def client_events(self) -> list[MuxEvent]:
        """Run, and take what the client was told since the last time."""
        self.run()
        told, self.told_client = self.told_client, []
        return told

    def worker_events(self) -> list[MuxEvent]:
        """Run, and take what the worker was told since the last time."""
        self.run()
        told, self.told_worker = self.told_worker, []
        return told

    def open(
        self, payload: bytes = b"p", *, credit: int = 64, streams_in: bool = False, window: int = 0
    ) -> int:
        """A stream that is accepted; ``window`` for what streams in."""
        sid = self.client.open(
            "1/generate", "r", payload, codec=MSGPACK, credit=credit, streams_in=streams_in
        )
        self.run()
        self.worker.accept(sid, window)
        self.run()
        self.told_client, self.told_worker = [], []
        return sid


def only(events: Sequence[MuxEvent], kind: type[E]) -> E:
    """The one event, which is of this kind."""
    (event,) = events
    assert isinstance(event, kind)
    return event


def greeting(end: type[MuxConnection]) -> bytes:
    """What the peer of such an end says first."""
    return MAGIC + encode(frames.Hello([1], 10, 10**6, "x"))


# --- strategies --------------------------------------------------------------------------

_sids = st.one_of(st.integers(1, 5), st.integers(1, MAX_SID))
_numbers = st.one_of(st.integers(0, 5), st.integers(0, MAX_NUMBER))
_amounts = st.one_of(st.integers(0, 5), st.integers(0, MAX_CREDIT))
_words = st.one_of(st.integers(0, 5), st.integers(0, MAX_TOKEN))
_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_pieces = st.one_of(st.binary(max_size=20), st.just(b"p" * MAX_PIECE))
_paths = st.lists(_texts, min_size=1, max_size=3)

FRAMES_OF: dict[type[Frame], st.SearchStrategy[Frame]] = {
    frames.Hello: st.builds(
        frames.Hello, st.lists(st.integers(0, 9), max_size=3), _numbers, _numbers, _texts, _texts
    ),
    frames.Open: st.builds(
        frames.Open, _sids, _texts, _texts, st.sampled_from(["msgpack", "json", "x"]),
        st.booleans(), _amounts, st.none() | _numbers, st.dictionaries(_texts, _texts, max_size=3),
        _pieces,
    ),
    frames.Opened: st.builds(frames.Opened, _sids, _amounts),
    frames.Part: st.builds(frames.Part, _sids, st.binary(min_size=1, max_size=20)),
    frames.Drop: st.builds(frames.Drop, _sids),
    frames.Item: st.builds(frames.Item, _sids, _pieces),
    frames.Tokens: st.builds(
        frames.Tokens,
        st.lists(_words, max_size=8) | st.lists(_words, max_size=4).map(lambda words: words * 2),
        st.lists(_sids, max_size=3),
    ),
    frames.Done: st.builds(frames.Done, st.lists(_sids, min_size=1, max_size=3)),
    frames.Error: st.builds(
        frames.Error, _sids, st.lists(_texts, max_size=3), _texts, st.booleans(), st.booleans(),
        st.none() | _texts,
    ),
    frames.Cancel: st.builds(frames.Cancel, _sids),
    frames.Stop: st.builds(frames.Stop, _sids),
    frames.Credit: st.builds(frames.Credit, st.lists(_amounts, max_size=4)),
    frames.Ping: st.builds(frames.Ping, _numbers),
    frames.Pong: st.builds(frames.Pong, _numbers),
    frames.Draining: st.builds(frames.Draining, _numbers, _paths),
    frames.Ack: st.builds(frames.Ack, _numbers, _numbers),
    frames.Serving: st.builds(frames.Serving, _paths),
    frames.GoAway: st.builds(frames.GoAway, _texts, _texts),
}  # fmt: skip
ANY_FRAME = st.one_of(*FRAMES_OF.values())
