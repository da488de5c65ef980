"""``/v1/chat/completions`` and ``/v1/completions``: one request, from its body to its end.

The order is the same for both, streamed or not: read the body, parse it, find the model
(a refusal so far costs nothing; :mod:`~dynamo_trio.frontend.refusals` counts it), then admit.
From there on the admission encloses everything, the farewell included.
"""

from __future__ import annotations

import logging
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import attrs
import trio

from dynamo_trio.errors import Cancelled, DynamoException, Overloaded, RequestCut
from dynamo_trio.frontend.answers import Answer, StreamAnswer, UnaryAnswer
from dynamo_trio.frontend.metrics import error_type
from dynamo_trio.http.respond import read_body, send_json, stream_response, watch_disconnect
from dynamo_trio.http.sinks import open_sink
from dynamo_trio.lifecycle import CutReason, Outcome
from dynamo_trio.plane import ClientStream, RequestHead
from dynamo_trio.tokenizers.preprocess import INLINE_BYTES
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
    from contextlib import AbstractAsyncContextManager

    from dynamo_trio.discovery import Instance
    from dynamo_trio.frontend.catalog import ServedModel
    from dynamo_trio.frontend.metrics import RequestRecord
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
    body = await read_body(call.scope, call.receive, frontend.limits)
    request = await parse_body(kind, body)
    attempt = call.attempt
    attempt.model, attempt.request_type = request.model, "stream" if request.stream else "unary"
    model = frontend.find(request.model)
    label = f"{kind.label} {call.request_id}"
    with (
        frontend.lifecycle.http.admit(label) as admission,
        frontend.metrics.request(model.name, kind.label, attempt.request_type) as record,
    ):
        attempt.admitted = True
        generation = Generation(kind, frontend, call, request, model, admission, record)
        try:
            await generation.run(len(body))
        except DynamoException as exc:
            generation.error, record.error_type = exc, error_type(exc)
            admission.settle(Outcome.CANCELLED if isinstance(exc, Cancelled) else Outcome.FAILED)
            raise
        finally:
            generation.log()


async def parse_body(kind: Kind, body: bytes) -> GenerationRequest:
    """The request in ``body``; a long one is read in a thread."""
    if len(body) <= PARSE_INLINE_BYTES:
        return kind.parse(body)
    return await trio.to_thread.run_sync(kind.parse, body)


@attrs.define(eq=False)
class Generation:
    """One admitted request."""

    kind: Kind
    frontend: Frontend
    call: HttpCall
    request: GenerationRequest
    model: ServedModel
    admission: Admission
    record: RequestRecord
    #: Why it failed, if it did.
    error: DynamoException | None = None
    #: Who serves it, once that is chosen.
    instance: Instance | None = None
    id: str = attrs.field(init=False)
    created: int = attrs.field(factory=lambda: int(time.time()))

    def __attrs_post_init__(self) -> None:
        self.id = self.kind.id_prefix + secrets.token_hex(12)

    async def run(self, body_size: int) -> None:
        prepared = await self._prepare(body_size)
        self.record.prompt(len(prepared.token_ids))
        left = partial(self.admission.cut, CutReason.CLIENT_LEFT)
        async with watch_disconnect(self.call.scope, self.call.receive, left):
            if self.request.stream:
                await self._stream(prepared)
            else:
                await self._unary(prepared)

    def log(self) -> None:
        """One line for the operator, whatever became of the request."""
        by = "" if self.instance is None else f" by {self.instance.instance_id:x}"
        logger.log(
            logging.WARNING if self._workers_fault else logging.INFO,
            "%s of %s%s: %s, %d tokens in %.2f s",
            *(self.kind.label, self.model.name, by, self._ending()),
            *(self.record.token_count, self.record.age()),
        )

    @property
    def _workers_fault(self) -> bool:
        """Did the worker, or the way to it, fail the request? To be full is no failure."""
        error, failed = self.error, self.admission.outcome is Outcome.FAILED
        return (
            failed
            and error is not None
            and error.status >= 500
            and not isinstance(error, Overloaded)
        )

    def _ending(self) -> str:
        """What became of it in a word; for a failure, why."""
        match self.admission.outcome:
            case Outcome.FINISHED:
                return "complete"
            case None:  # its task is being cancelled, or by a mistake of ours
                return "broken off"
            case Outcome.FAILED if self.error is not None:
                return f"{self.error.reason} ({self.error.message[:200]})"
            case outcome:
                return outcome.value

    async def _prepare(self, body_size: int) -> PreprocessedRequest:
        """Render and tokenise; long prompts in a thread, since that takes milliseconds."""
        if body_size <= INLINE_BYTES:
            return self._preprocess()
        return await trio.to_thread.run_sync(self._preprocess)

    def _preprocess(self) -> PreprocessedRequest:
        if isinstance(self.request, ChatRequest):
            return self.model.preprocessor.chat(self.request)
        assert isinstance(self.request, CompletionRequest)
        return self.model.preprocessor.completion(self.request)

    def _open(
        self, prepared: PreprocessedRequest, answer: Answer
    ) -> AbstractAsyncContextManager[ClientStream]:
        client = self.model.client
        # Not the client's request id: nothing keeps clients from sending one twice.
        head = RequestHead(self.id)
        self.instance = self.frontend.route(client)
        return client.open_stream(self.instance, head, prepared, answer)

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
            partial(self._pump, prepared, answer),
            farewell=lambda: answer.farewell(self._cut_error()),
        )
        whole = sink.complete or sink.handed_over
        self._settle(answer, delivered=whole, told=whole or not sink.started)
        if not sink.started:
            raise answer.error or self._cut_error() or Cancelled("the client left")

    async def _pump(self, prepared: PreprocessedRequest, answer: StreamAnswer) -> None:
        async with self._open(prepared, answer) as stream:
            answer.attach(stream)
            await answer.begun.wait()
            if answer.error is not None and not answer.sink.started and not answer.sink.pending:
                return
            await answer.sink.start(200, [*EVENT_STREAM, *self.call.response_headers()])
            await answer.sink.serve()

    # --- unary --------------------------------------------------------------------------

    async def _unary(self, prepared: PreprocessedRequest) -> None:
        answer = UnaryAnswer(self.model.preprocessor.output(prepared), self.record)
        with self.admission.scope:
            async with self._open(prepared, answer) as stream:
                answer.attach(stream)
                await answer.over.wait()
        if not answer.complete:
            self._settle(answer, delivered=False)
            raise answer.error or self._cut_error() or Cancelled("the client left")
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
        )

    # --- the end ------------------------------------------------------------------------

    def _cut_error(self) -> DynamoException | None:
        """What a cut means to the client; None when it left, or was not cut."""
        reason = self.admission.reason
        if reason is None or reason is CutReason.CLIENT_LEFT:
            return None
        return RequestCut("The server is shutting down; this answer is incomplete.")

    def _settle(self, answer: Answer, *, delivered: bool, told: bool = True) -> None:
        """Exactly one outcome, for the metrics and for the shutdown report."""
        if delivered and answer.complete:
            self.admission.settle(Outcome.FINISHED)
        elif answer.error is not None:
            self.error, self.record.error_type = answer.error, error_type(answer.error)
            self.admission.settle(Outcome.FAILED)
        elif self._cut_error() is not None:
            self.record.error_type = "unavailable"
            # Cut means: ended early and told so. An answer without a head is told by its status.
            self.admission.settle(Outcome.CUT if told else Outcome.LOST)
        else:
            self.record.error_type = "cancelled"
            self.admission.settle(Outcome.CANCELLED)
