"""What a mux connection tells its owner. ``sid`` is the number of a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from attrs import field, frozen

from dynamo_trio.wire.dynamo.receiver import Closed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_trio.errors import DynamoException
    from dynamo_trio.wire.dynamo.codec import Codec

# --- at either end -----------------------------------------------------------------------


@frozen
class Established:
    """The peer's HELLO came and a version is agreed. Comes once, before every other event.

    ``max_streams``, ``max_message``: what the peer takes. ``software`` is for the log.
    ``process`` tells the peer's process from others; empty if it does not say.
    """

    version: int
    software: str
    max_streams: int
    max_message: int
    process: str = ""


@frozen
class ItemReceived:
    """One item of a stream, whole, encoded in the codec of its request."""

    sid: int
    payload: bytes = field(repr=False)


@frozen
class CreditReceived:
    """These streams, which had no credit, may send again. What was held has been queued."""

    sids: Sequence[int]


@frozen
class Ponged:
    """The peer answered our PING of this number (and thereby all before it)."""

    number: int


@frozen
class GoneAway:
    """The peer's last words: it sends nothing more, and every stream is over.

    ``code`` is one of :class:`~dynamo_trio.wire.mux.frames.GoAwayCode`, or of a later version.
    """

    code: str
    text: str


@frozen
class Breath:
    """Nothing: there was much that is no event, and there may be more. Let others run."""


# --- at the client -----------------------------------------------------------------------


@frozen
class StreamAccepted:
    """The worker took the request on. Comes before every item of the stream."""

    sid: int


@frozen
class TokensReceived:
    """What one frame held of tokens, by stream, each in order; then the streams it ended well.

    Both are the owner's to keep, and either may be empty: this is how every good end comes. A
    stream of ``finished`` may be in ``tokens`` or not.
    """

    tokens: Mapping[int, list[int]]
    finished: Sequence[int]


@frozen
class StreamFinished:
    """The worker ended the stream by an error, or refused it if StreamAccepted did not come.

    ``begun``: had the handler begun? If not, nothing of the request was done. A planned
    hand-over is ``error.planned``. (A good end is in :class:`TokensReceived`.)
    """

    sid: int
    error: DynamoException
    begun: bool = True


@frozen
class PathsDraining:
    """Nothing new may go to these paths. To be acknowledged with the notice's number."""

    notice: int
    paths: Sequence[str]


@frozen
class PathsServing:
    """These paths take requests again."""

    paths: Sequence[str]


# --- at the worker -----------------------------------------------------------------------


@frozen
class StreamOpened:
    """A request. To be answered by ``accept`` or ``fail``, and ended by ``finish`` or ``fail``."""

    sid: int
    path: str
    request_id: str
    codec: Codec
    streams_in: bool
    sent_at_ns: int | None
    metadata: Mapping[str, str]
    payload: bytes = field(repr=False)


@frozen
class InputFinished:
    """No more items stream in."""

    sid: int


@frozen
class StreamStopped:
    """The client wants no more, but takes what still comes. May come more than once."""

    sid: int


@frozen
class StreamCancelled:
    """The client left before it had the end. Nothing more can be sent; the stream counts until the
    call is ended by ``finish`` or ``fail``, if it was not ended before."""

    sid: int


@frozen
class DrainAcknowledged:
    """The client sends nothing new to what was named up to this notice.

    ``places``: how many of the streams of this connection it can place on other workers.
    """

    notice: int
    places: int


MuxEvent: TypeAlias = (
    Established
    | ItemReceived
    | CreditReceived
    | Ponged
    | Breath
    | GoneAway
    | StreamAccepted
    | TokensReceived
    | StreamFinished
    | PathsDraining
    | PathsServing
    | StreamOpened
    | InputFinished
    | StreamStopped
    | StreamCancelled
    | DrainAcknowledged
    | Closed
)
