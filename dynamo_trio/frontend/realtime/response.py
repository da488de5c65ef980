"""One response of a text session: an ordinary request, told in the events of the Realtime API.

It is admitted, placed, retried and counted like a request of any other endpoint. Its client
hears ``response.created`` when it is admitted, the item when its first text is there (so what
failed before that may be asked of another worker), and in every case ``response.done``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import (
    Cancelled,
    DynamoException,
    NoWorker,
    Overloaded,
    RequestCut,
    forget_frames,
)
from dynamo_trio.frontend.generate import ended_by
from dynamo_trio.frontend.metrics import error_type
from dynamo_trio.frontend.realtime.answer import TextAnswer
from dynamo_trio.frontend.refusals import Attempt
from dynamo_trio.frontend.trace import note_refusal, response_span
from dynamo_trio.lifecycle import CutReason, Outcome
from dynamo_trio.plane import RequestHead
from dynamo_trio.tokenizers.preprocess import INLINE_BYTES
from dynamo_trio.wire.openai.realtime.conversation import Item, messages_of
from dynamo_trio.wire.openai.realtime.response import done_status, response_json, usage_json
from dynamo_trio.wire.openai.request import ChatRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.frontend.admission import Admitted
    from dynamo_trio.frontend.placement import Placement
    from dynamo_trio.frontend.realtime.session import Session
    from dynamo_trio.tracing import Span
    from dynamo_trio.wire.llm import PreprocessedRequest
    from dynamo_trio.wire.openai.fields import Json
    from dynamo_trio.wire.openai.realtime.conversation import Conversation
    from dynamo_trio.wire.openai.realtime.settings import ResponseOptions

logger = logging.getLogger("dynamo_trio.frontend")

#: Dynamo's metric label "endpoint".
ENDPOINT = "realtime"


@attrs.define(eq=False)
class Response:
    """``run`` is called once, in a task of its own."""

    _session: Session
    _model_name: str
    _conversation: Conversation
    _options: ResponseOptions
    #: Of the client's ``response.create``.
    _event_id: str | None
    #: Called, once, when it is over.
    _on_over: Callable[[], object]
    id: str = attrs.field(init=False)
    _item_id: str = attrs.field(init=False)
    #: Once it is admitted.
    _admitted: Admitted | None = attrs.field(init=False, default=None)
    _answer: TextAnswer | None = attrs.field(init=False, default=None)
    _placement: Placement | None = attrs.field(init=False, default=None)
    #: Cut before it was admitted.
    _forestalled: CutReason | None = attrs.field(init=False, default=None)
    #: What ended it, if not its admission did.
    _error: DynamoException | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.id = self._session.events.new_id("resp")
        self._item_id = self._session.events.new_id("item")

    def cut(self, reason: CutReason) -> None:
        """End it. ``CLIENT_LEFT``: nobody wants it any more. Idempotent."""
        if self._admitted is None:
            self._forestalled = self._forestalled or reason
        else:
            self._admitted.admission.cut(reason)

    async def run(self) -> None:
        """Ask for the answer, and tell how it ends."""
        session, attempt = self._session, Attempt(f"response {self.id}", ENDPOINT)
        attempt.model, attempt.request_type = self._model_name, "stream"
        try:
            with response_span(self.id, self._model_name) as span:
                await self._admit_in(span, attempt)
        finally:
            session.outbox.on_low_water = None
            self._on_over()

    async def _admit_in(self, span: Span, attempt: Attempt) -> None:
        try:
            await self._admit(span, attempt)
        except DynamoException as exc:  # nothing was begun
            self._session.frontend.refusals.note(attempt, exc)
            note_refusal(span, attempt, error_type(exc))
            span.fail(exc.reason)
            self._session.error(exc, self._event_id)
            forget_frames(exc)

    async def _admit(self, span: Span, attempt: Attempt) -> None:
        frontend = self._session.frontend
        model = frontend.find(self._model_name)  # it may have been loaded anew since
        admitting = frontend.admit(
            model, endpoint=ENDPOINT, request_type="stream", request_id=self.id
        )
        with admitting as self._admitted:
            attempt.admitted = True
            if self._forestalled is not None:
                self.cut(self._forestalled)
            self._tell("response.created", "in_progress")
            try:
                with self._admitted.admission.scope:
                    await self._ask(self._admitted)
            except DynamoException as exc:
                self._error = exc
            self._finish(self._admitted, span)
            forget_frames(self._error)

    async def _ask(self, admitted: Admitted) -> None:
        prepared = await self._prepare(admitted)
        admitted.record.prompt(len(prepared.token_ids))
        output = admitted.model.preprocessor.output(prepared)
        kept = self._options.in_conversation
        may_grow = self._conversation.reserve_text if kept else _always
        outbox = self._session.outbox
        answer = TextAnswer(output, admitted.record, outbox, self._begin_item, may_grow)
        self._answer, self._placement = answer, admitted.place(RequestHead(self.id))
        await self._placement.serve(prepared, answer, lambda: answer.over.wait())

    async def _prepare(self, admitted: Admitted) -> PreprocessedRequest:
        settings, items = self._options.settings, self._options.input
        if items is None:
            items = tuple(self._conversation.items())
        request = ChatRequest(
            model=self._model_name,
            stream=True,
            max_tokens=settings.max_output_tokens,
            temperature=settings.temperature,
            messages=messages_of(settings.instructions, items),
        )
        preprocessor = admitted.model.preprocessor
        size = sum(len(message.content) for message in request.messages)
        if size <= INLINE_BYTES and (prepared := preprocessor.chat_at_once(request)) is not None:
            return prepared
        return await trio.to_thread.run_sync(preprocessor.chat, request, abandon_on_cancel=True)

    # --- what its client is told ---------------------------------------------------------

    def _begin_item(self) -> Callable[[str], str]:
        send, item = self._session.send, self._item("in_progress")
        where = {"response_id": self.id, "output_index": 0}
        send("response.output_item.added", **where, item=item.to_json())
        if self._options.in_conversation:
            previous = self._conversation.put(item)
            send("conversation.item.added", previous_item_id=previous, item=item.to_json())
        part = {**where, "item_id": item.id, "content_index": 0}
        send("response.content_part.added", **part, part={"type": "text", "text": ""})
        return self._session.events.text_delta(**part)

    def _end_item(self, item: Item, text: str) -> None:
        send, where = self._session.send, {"response_id": self.id, "output_index": 0}
        part = {**where, "item_id": item.id, "content_index": 0}
        send("response.output_text.done", **part, text=text)
        send("response.content_part.done", **part, part={"type": "text", "text": text})
        if self._options.in_conversation and self._conversation.has(item.id):
            previous = self._conversation.replace(item)
            send("conversation.item.done", previous_item_id=previous, item=item.to_json())
        send("response.output_item.done", **where, item=item.to_json())

    def _item(self, status: Json, *texts: str) -> Item:
        return Item(self._item_id, "assistant", texts, status)

    def _tell(self, event: str, status: str, **fields: Json) -> None:
        response = response_json(self.id, status, self._options, self._conversation.id, **fields)
        self._session.send(event, response=response)

    # --- the end ------------------------------------------------------------------------

    def _finish(self, admitted: Admitted, span: Span) -> None:
        """Exactly one outcome, for the client, the metrics, the trace and the shutdown report."""
        answer = self._answer
        whole = answer is not None and answer.complete
        if not whole:
            self._settle_broken(admitted)
        finish = answer.output.finish_reason if answer is not None and whole else None
        status, details = done_status(finish, self._error)
        output: list[Json] = []
        if answer is not None and not answer.untouched:
            item = self._item("completed" if status == "completed" else "incomplete", answer.text)
            self._end_item(item, answer.text)
            output.append(item.to_json())
        usage = usage_json(answer.output.usage) if answer is not None else None
        self._tell("response.done", status, details=details, output=output, usage=usage)
        admitted.admission.settle(Outcome.FINISHED)  # unless it is settled
        span.note(**{"response.status": status})
        self._log(admitted, status)

    def _settle_broken(self, admitted: Admitted) -> None:
        reason, record = admitted.admission.reason, admitted.record
        if self._error is None and self._answer is not None and not self._answer.untouched:
            self._error = self._answer.error
        if self._error is not None:
            record.error_type = error_type(self._error)
            admitted.admission.settle(ended_by(self._error))
        elif reason is None or reason is CutReason.CLIENT_LEFT:
            self._error, record.error_type = Cancelled("cancelled by its client"), "cancelled"
            admitted.admission.settle(Outcome.CANCELLED)
        else:
            self._error = RequestCut("The server is shutting down; this answer is incomplete.")
            record.error_type = "unavailable"
            admitted.admission.settle(Outcome.CUT)

    def _log(self, admitted: Admitted, status: str) -> None:
        error = self._error
        why = "" if error is None else f" ({error.reason}: {error.message[:200]})"
        fault = error is not None and error.status >= 500
        logger.log(
            logging.WARNING if fault and not isinstance(error, _NO_FAULT) else logging.INFO,
            "realtime response of %s%s: %s%s, %d tokens in %.2f s",
            *(self._model_name, self._placement or "", status, why),
            *(admitted.record.token_count, admitted.record.age()),
        )


def _always(length: int) -> bool:
    """What is in no conversation is bounded by the model's context alone."""
    return True


#: Errors for which no worker is to blame.
_NO_FAULT = (Overloaded, NoWorker, RequestCut)
