"""``/v1/chat/completions`` and ``/v1/completions``: one request, from its body to its end.

The order is the same for both, streamed or not: read the body, parse it, find the model
(a refusal so far costs nothing; :mod:`~dynamo_trio.frontend.refusals` counts it), then admit.
From there on the admission encloses everything, the farewell included.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import attrs
import trio

from dynamo_trio.console.logs import log_often
from dynamo_trio.errors import (
    Cancelled,
    DeadlineExceeded,
    Disconnected,
    DynamoException,
    EngineShutdown,
    Overloaded,
    RequestCut,
    ResponseTimeout,
    Unanswered,
)
from dynamo_trio.frontend.answers import Answer, StreamAnswer, UnaryAnswer
from dynamo_trio.frontend.deadline import deadline_of
from dynamo_trio.frontend.metrics import error_type
from dynamo_trio.http.exchange import exchange_of
from dynamo_trio.http.respond import say_close, send_json, stream_response, watch_disconnect
from dynamo_trio.http.sinks import open_sink
from dynamo_trio.lifecycle import CutReason, Outcome
from dynamo_trio.plane import RequestHead
from dynamo_trio.tokenizers.preprocess import INLINE_BYTES
from dynamo_trio.wire.ids import new_uuid
from dynamo_trio.wire.openai import response as openai_response
from dynamo_trio.wire.openai.request import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_chat,
    parse_completion,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.frontend.admission import Admitted
    from dynamo_trio.frontend.catalog import ServedModel
    from dynamo_trio.frontend.metrics import RequestRecord
    from dynamo_trio.frontend.placement import Placement
    from dynamo_trio.frontend.state import Frontend, HttpCall
    from dynamo_trio.lifecycle import Admission
    from dynamo_trio.wire.llm import PreprocessedRequest
    from dynamo_trio.wire.openai.response import AnswerStream

logger = logging.getLogger("dynamo_trio.frontend")

#: Longer bodies are parsed in a thread: it takes milliseconds and more.
PARSE_INLINE_BYTES = 256 * 1024

EVENT_STREAM = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


@attrs.frozen
class Kind:
    """What differs between the two endpoints."""

    label: str  # Dynamo's metric label "endpoint"
    id_prefix: str
    parse: Callable[[bytes], GenerationRequest]
    stream: type[openai_response.ChatStream] | type[openai_response.CompletionStream]
    whole: Callable[..., bytes]

    CHAT: ClassVar[Kind]
    COMPLETION: ClassVar[Kind]


Kind.CHAT = Kind(
    "chat_completions",
    "chatcmpl-",
    parse_chat,
    openai_response.ChatStream,
    openai_response.chat_completion,
)
Kind.COMPLETION = Kind(
    "completions",
    "cmpl-",
    parse_completion,
    openai_response.CompletionStream,
    openai_response.text_completion,
)


async def generate(kind: Kind, frontend: Frontend, call: HttpCall) -> None:
    """Serve one request.

    Raises:
        DynamoException: nothing has been sent yet; the caller answers with its status.
    """
    deadline = deadline_of(call.scope)
    request, size = await _read(kind, frontend, call)
    attempt = call.attempt
    attempt.model, attempt.request_type = request.model, "stream" if request.stream else "unary"
    model = frontend.find(request.model).require_text()
    admitting = frontend.admit(
        model,
        endpoint=kind.label,
        request_type=attempt.request_type,
        request_id=call.request_id,
        deadline=deadline,
    )
    with admitting as admitted:
        attempt.admitted = True
        admission, record = admitted.admission, admitted.record
        generation = Generation(kind, call, request, admitted)
        try:
            await generation.run(size)
        except DynamoException as exc:
            record.error_type = error_type(exc)
            if admission.settle(ended_by(exc)):
                generation.error = exc
            raise
        finally:
            generation.log()


async def _read(kind: Kind, frontend: Frontend, call: HttpCall) -> tuple[GenerationRequest, int]:
    """The request, and how long its body was; that takes room until it was made sense of."""
    exchange = exchange_of(call.scope)
    free = None if exchange is None else exchange.connection.free_share
    with frontend.calls.bodies.hold(frontend.limits, free) as hold:
        body = await frontend.calls.read_body(call.scope, call.receive, frontend.limits, hold)
        return await parse_body(kind, body, frontend.calls.parsing), len(body)


def ended_by(error: DynamoException) -> Outcome:
    """What became of a request that an error ended.

    An engine, a worker or a connection that goes away in the middle cuts what it served: that
    is no mistake of a handler or of the request.
    """
    if isinstance(error, EngineShutdown | RequestCut | Disconnected | ResponseTimeout | Unanswered):
        return Outcome.CUT
    return Outcome.CANCELLED if isinstance(error, Cancelled) else Outcome.FAILED


async def parse_body(kind: Kind, body: bytes, limiter: trio.CapacityLimiter) -> GenerationRequest:
    """The request in ``body``; a long one is read in a thread, as ``limiter`` allows."""
    if len(body) <= PARSE_INLINE_BYTES:
        return kind.parse(body)
    parse = trio.to_thread.run_sync
    return await parse(kind.parse, body, abandon_on_cancel=True, limiter=limiter)


@attrs.define(eq=False)
class Generation:
    """One admitted request."""

    kind: Kind
    call: HttpCall
    request: GenerationRequest
    admitted: Admitted
    #: What ended it, if not its admission did.
    error: DynamoException | None = None
    #: Who serves it.
    placement: Placement = attrs.field(init=False)
    id: str = attrs.field(init=False)
    created: int = attrs.field(factory=lambda: int(time.time()))
    # What was admitted, looked at often.
    frontend: Frontend = attrs.field(init=False)
    model: ServedModel = attrs.field(init=False)
    admission: Admission = attrs.field(init=False)
    record: RequestRecord = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        admitted = self.admitted
        self.frontend, self.model = admitted.frontend, admitted.model
        self.admission, self.record = admitted.admission, admitted.record
        # Not the client's request id: nothing keeps clients from sending one twice. A UUID, for
        # Dynamo's workers log no other kind.
        number = new_uuid()
        self.id = self.kind.id_prefix + number
        # Nothing around it ends it earlier, but for the end of everything.
        self.placement = admitted.place(RequestHead(number), self.admission.scope.deadline)

    async def run(self, body_size: int) -> None:
        left = partial(self.admission.cut, CutReason.CLIENT_LEFT)
        async with watch_disconnect(self.call.scope, self.call.receive, left):
            prepared = await self._prepare(body_size)
            self.record.prompt(len(prepared.token_ids))
            if self.request.stream:
                await self._stream(prepared)
            else:
                await self._unary(prepared)

    def log(self) -> None:
        """One line for the operator, whatever became of the request."""
        log_often(
            logger,
            logging.WARNING if self._workers_fault else logging.INFO,
            "%s of %s%s: %s, %d tokens in %.2f s",
            *(self.kind.label, self.model.name, self.placement, self._ending()),
            *(self.record.token_count, self.record.age()),
        )

    @property
    def _workers_fault(self) -> bool:
        """Did the worker, or the way to it, fail the request? To be full is no failure."""
        error = self.error
        return (
            error is not None
            and error.status >= 500
            and not isinstance(error, Overloaded | DeadlineExceeded)
        )

    def _ending(self) -> str:
        """What became of it in a word; for a failure, why."""
        match self.admission.outcome:
            case Outcome.FINISHED:
                return "complete"
            case None:  # its task is being cancelled, or by a mistake of ours
                return "broken off"
            case Outcome.FAILED | Outcome.CUT if self.error is not None:
                return f"{self.error.reason} ({self.error.message[:200]})"
            case outcome:
                return outcome.value

    async def _prepare(self, body_size: int) -> PreprocessedRequest:
        """Render and tokenise, in a thread where that takes milliseconds and more.

        Raises:
            DynamoException: the prompt is not right, or the request was cut meanwhile.
        """
        if body_size <= INLINE_BYTES and (prepared := self._preprocess_at_once()) is not None:
            return prepared
        with trio.CancelScope(deadline=self.admission.scope.deadline) as limit:
            self.admission.on_cut.append(limit.cancel)
            if self.admission.reason is not None:
                limit.cancel()
            return await trio.to_thread.run_sync(self._preprocess, abandon_on_cancel=True)
        self.admission.cut(CutReason.DEADLINE)  # nothing else has ended it, or this changes nothing
        raise self._cut_error() or Cancelled("the client left")

    def _preprocess_at_once(self) -> PreprocessedRequest | None:
        """None: the model's template takes too long for that."""
        if isinstance(self.request, ChatRequest):
            return self.model.preprocessor.chat_at_once(self.request)
        return self._preprocess()

    def _preprocess(self) -> PreprocessedRequest:
        if isinstance(self.request, ChatRequest):
            return self.model.preprocessor.chat(self.request)
        assert isinstance(self.request, CompletionRequest)
        return self.model.preprocessor.completion(self.request)

    # --- streamed -----------------------------------------------------------------------

    async def _stream(self, prepared: PreprocessedRequest) -> None:
        sink = open_sink(self.call.scope, self.call.send, self.frontend.limits)
        chunks: AnswerStream = self.kind.stream(
            self.id,
            self.created,
            self.request.model,
            include_usage=self.request.include_usage,
        )
        output = self.model.preprocessor.output(prepared)
        answer = StreamAnswer(output, self.record, sink, chunks)
        await stream_response(
            sink,
            self.admission,
            partial(self.placement.serve, prepared, answer, partial(self._pump, answer)),
            farewell=lambda: answer.farewell(self._cut_error()),
        )
        whole = sink.complete or sink.handed_over
        self._settle(answer, delivered=whole, told=whole or not sink.started)
        if not sink.started:
            raise self.error or self._cut_error() or Cancelled("the client left")

    async def _pump(self, answer: StreamAnswer) -> None:
        await answer.begun.wait()
        if not answer.untouched:
            head = [*EVENT_STREAM, *self.call.response_headers()]
            if self.frontend.draining:
                say_close(self.call.scope, head)
            await answer.sink.start(200, head)
            await answer.sink.serve()

    # --- unary --------------------------------------------------------------------------

    async def _unary(self, prepared: PreprocessedRequest) -> None:
        answer = UnaryAnswer(self.model.preprocessor.output(prepared), self.record)
        with self.admission.scope:
            await self.placement.serve(prepared, answer, lambda: answer.over.wait())
        if not answer.complete:
            self._settle(answer, delivered=False)
            raise self._cut_error() or Cancelled("the client left")
        delivered = await self._send_whole(answer)
        self._settle(answer, delivered=delivered)

    async def _send_whole(self, answer: UnaryAnswer) -> bool:
        output = answer.output
        body = self.kind.whole(
            self.id,
            self.created,
            self.request.model,
            answer.text,
            output.finish_reason,
            output.usage,
        )
        headers = self.call.response_headers()
        return await send_json(
            self.call.scope,
            self.call.send,
            200,
            body,
            headers,
            close=self.frontend.draining,
            limits=self.frontend.limits,
            admission=self.admission,
        )

    # --- the end ------------------------------------------------------------------------

    def _cut_error(self) -> DynamoException | None:
        """What a cut means to the client; None when it left, or was not cut."""
        reason = self.admission.reason
        if reason is None or reason is CutReason.CLIENT_LEFT:
            return None
        if reason is CutReason.DEADLINE:
            return DeadlineExceeded("The time that the client gave this request is over.")
        return RequestCut("The server is shutting down; this answer is incomplete.")

    def _settle(self, answer: Answer, *, delivered: bool, told: bool = True) -> None:
        """Exactly one outcome, for the metrics and for the shutdown report."""
        if delivered and answer.complete:
            self.admission.settle(Outcome.FINISHED)
        elif answer.error is not None and not answer.untouched:  # else it was cut as it failed
            self.error, self.record.error_type = answer.error, error_type(answer.error)
            self.admission.settle(ended_by(answer.error))
        elif isinstance(error := self._cut_error(), DeadlineExceeded):
            self.error, self.record.error_type = error, error_type(error)
            self.admission.settle(Outcome.FAILED)
        elif error is not None:
            self.record.error_type = "unavailable"
            # Cut means: ended early and told so. An answer without a head is told by its status.
            self.admission.settle(Outcome.CUT if told else Outcome.LOST)
        else:
            self.record.error_type = "cancelled"
            self.admission.settle(Outcome.CANCELLED)
