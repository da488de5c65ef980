"""From the items of a worker's stream to the bytes of an answer.

Theory of operation
-------------------
An answer is the :class:`~dynamo_trio.plane.ItemSink` of one request: the plane calls
:meth:`Answer.feed`, or :meth:`Answer.feed_tokens`, for each step of the engine, and everything
up to the socket happens in that call, with no await. The request's own task waits on ``begun``
(there is a piece for the client, so the head can be sent) and on the body sink; it wakes for
start, end, cut and back-pressure only.

Nothing reaches the client before the first piece of text or the end: an error that comes first
still gets its own HTTP status, or is not told at all, because another worker is asked
(:mod:`~dynamo_trio.frontend.placement`). Credit goes back to the worker as its items are taken, and
is withheld while the client is slower than the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.errors import (
    DynamoException,
    RemoteProtocolError,
    StreamIncomplete,
    UnreadableItem,
)
from dynamo_trio.http.sinks import BodySink, SinkOutcome, Wake
from dynamo_trio.plane import INITIAL_CREDIT
from dynamo_trio.wire.dynamo.codec import MSGPACK
from dynamo_trio.wire.llm import output_reader
from dynamo_trio.wire.openai import sse
from dynamo_trio.wire.openai.response import error_event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_trio.frontend.metrics import RequestRecord
    from dynamo_trio.plane import ClientStream, Rest
    from dynamo_trio.tokenizers import OutputProcessor
    from dynamo_trio.wire.dynamo.codec import Codec
    from dynamo_trio.wire.llm import LLMEngineOutput
    from dynamo_trio.wire.openai.response import AnswerStream

#: Tokens after which their credit is given back: a part of those with which a stream begins, so
#: that no engine ever waits for it, and seldom, for each time costs as much as some tokens.
GRANT_AT = INITIAL_CREDIT // 4


@attrs.define(eq=False)
class Answer(ABC):
    """What streamed and unary answers share: decoding, counting, the end, and credit."""

    output: OutputProcessor
    record: RequestRecord
    #: Why the stream failed, if it did.
    error: DynamoException | None = attrs.field(default=None, kw_only=True)
    #: Invariant: set once, when everything that the request asked for has come.
    complete: bool = attrs.field(default=False, kw_only=True)
    _decode: Callable[[bytes], LLMEngineOutput] = attrs.field(
        default=output_reader(MSGPACK), kw_only=True
    )
    _stream: ClientStream | None = attrs.field(default=None, kw_only=True)
    _owed: int = attrs.field(default=0, kw_only=True)
    _granted: int = attrs.field(default=0, kw_only=True)

    @property
    @abstractmethod
    def untouched(self) -> bool:
        """Has the client seen nothing of it, nor is it about to?"""

    @property
    def progress(self) -> int:
        """Grows with everything that the worker sends."""
        return self._owed + self._granted

    @property
    def waits_for_client(self) -> bool:
        """Is the client so slow that the worker may have to wait?"""
        return not self._writable

    def restart(self, output: OutputProcessor) -> None:
        """Forget what came: it begins anew, from another worker. Only while it is untouched."""
        self.output = output
        self.error, self._stream, self._owed = None, None, 0
        self.record.restart()

    def expect(self, codec: Codec) -> None:
        """The items will be in this codec."""
        self._decode = output_reader(codec)

    def attach(self, stream: ClientStream) -> None:
        """The stream is open: pay back the credit of what came while it was being opened."""
        self._stream = stream
        self.record.taken_on()
        self.grant()

    def feed(self, payloads: Sequence[bytes]) -> None:
        """Take the items of one engine step."""
        if self.error is not None:
            return
        self._owed += len(payloads)
        pieces: list[str] = []
        error: DynamoException | None = None
        try:
            pieces.extend(self._take(payload) for payload in payloads)
        except DynamoException as exc:
            error = exc  # told after the text that came before it
        self._text("".join(pieces))
        if error is not None:
            self._fail(error)
            return
        self._note_end()
        self.grant()

    def feed_tokens(self, token_ids: Sequence[int]) -> Rest | None:
        """Take tokens that came without anything else: the way of nearly all, so kept short."""
        if self.error is not None:
            return None
        self._owed += len(token_ids)
        self.record.tokens(len(token_ids))
        self._text(self.output.push_ids(token_ids))
        if self.output.finish_reason is not None:
            self._note_end()
        if self._owed >= GRANT_AT:
            self.grant()
        return None

    def finish(self, error: DynamoException | None) -> None:
        """The worker's stream is over."""
        if not self.complete and error is None and self.error is None:
            self._text(self.output.flush())
            self._note_end()
        if not self.complete:
            self._fail(error or StreamIncomplete("the answer broke off"))
        self._over()

    def grant(self) -> None:
        """Let the worker go on, unless the client is too slow. Also called at low water."""
        if self._stream is not None and self._owed and self._writable:
            owed, self._owed = self._owed, 0
            self._granted += owed
            self._stream.grant(owed)

    def _take(self, payload: bytes) -> str:
        try:
            item = self._decode(payload)
        except RemoteProtocolError as exc:
            raise UnreadableItem(exc.message) from None
        self.record.tokens(len(item.token_ids))
        return self.output.push(item)

    def _note_end(self) -> None:
        if self.output.finish_reason is None or self.complete:
            return
        self.complete = True
        self.record.error_type = ""
        self.record.cached_tokens = self.output.cached_tokens or 0
        self._end()
        if self.output.ended_early:  # the worker does not know that it is over
            self._over()

    def _fail(self, error: DynamoException) -> None:
        if self.error is None and not self.complete:
            self.error = error
            self._failed(error)

    @property
    def _writable(self) -> bool:
        return True

    @abstractmethod
    def _text(self, text: str) -> None:
        """A piece of the answer, perhaps empty."""

    @abstractmethod
    def _end(self) -> None:
        """Everything has come. The worker's stream may still have to be closed by it."""

    @abstractmethod
    def _over(self) -> None:
        """Nothing more is to be waited for."""

    @abstractmethod
    def _failed(self, error: DynamoException) -> None:
        """The stream failed before everything had come."""


@attrs.define(eq=False)
class StreamAnswer(Answer):
    """An answer as server-sent events."""

    sink: BodySink
    chunks: AnswerStream
    #: Set by the first piece that the client gets, and by a failure before it.
    begun: Wake = attrs.field(factory=Wake)
    _untouched: bool = True

    def __attrs_post_init__(self) -> None:
        self.sink.on_low_water = self.grant

    @property
    def untouched(self) -> bool:
        return self._untouched

    def restart(self, output: OutputProcessor) -> None:
        super().restart(output)
        self.begun = Wake()

    @property
    def _writable(self) -> bool:
        return self.sink.writable

    def feed_tokens(self, token_ids: Sequence[int]) -> Rest | None:
        """As :meth:`Answer.feed_tokens`; one token in the middle of an answer goes straight on."""
        alone = len(token_ids) == 1 and not self._untouched and self.error is None
        text = self.output.ready(token_ids[0]) if alone else None
        if text is None:
            return super().feed_tokens(token_ids)
        self.record.tokens(1)
        chunks = self.chunks
        rest = self.sink.offer(chunks.head, text, chunks.tail)
        self._owed += 1
        if self._owed >= GRANT_AT:
            self.grant()
        return rest

    def farewell(self, error: DynamoException | None) -> bytes | None:
        """The last words of a stream that was cut; none if it is whole, or nobody reads."""
        if self.complete:
            self.sink.finish(SinkOutcome.STOP)
        return None if self.complete or error is None else error_event(error)

    def _text(self, text: str) -> None:
        if text:
            self.sink.feed(self._begin() + self.chunks.content(text))

    def _begin(self) -> bytes:
        if not self._untouched:
            return b""
        self._untouched = False
        self.begun.set()
        return self.chunks.start()

    def _end(self) -> None:
        reason = self.output.finish_reason
        assert reason is not None
        end = self._begin() + self.chunks.finish(reason) + self.chunks.usage(self.output.usage)
        self.sink.feed_last(end + sse.DONE)

    def _over(self) -> None:
        if self.complete:
            self.sink.finish(SinkOutcome.STOP)

    def _failed(self, error: DynamoException) -> None:
        # Before the first byte an error is better told by the HTTP status, or not at all.
        self.begun.set()
        if not self._untouched:
            self.sink.feed(error_event(error))
            self.sink.finish(SinkOutcome.ERROR)


@attrs.define(eq=False)
class UnaryAnswer(Answer):
    """An answer that is sent as a whole."""

    over: Wake = attrs.field(factory=Wake)
    _pieces: list[str] = attrs.field(factory=list)

    @property
    def untouched(self) -> bool:
        return not self.complete

    def restart(self, output: OutputProcessor) -> None:
        super().restart(output)
        self.over = Wake()
        self._pieces.clear()

    @property
    def text(self) -> str:
        """All of the answer so far."""
        return "".join(self._pieces)

    def _text(self, text: str) -> None:
        self._pieces.append(text)

    def _end(self) -> None:
        pass

    def _over(self) -> None:
        self.over.set()

    def _failed(self, error: DynamoException) -> None:
        self.over.set()
