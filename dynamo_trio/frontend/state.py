"""What the routes of a frontend share: its state, and the HTTP call that is being served."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.client import Client
from dynamo_trio.console.logs import request_id
from dynamo_trio.errors import NoWorker, Overloaded
from dynamo_trio.frontend import admission
from dynamo_trio.frontend.busy import ALL_BUSY, BusyWorkers
from dynamo_trio.frontend.calls import OpenCalls
from dynamo_trio.frontend.catalog import Catalog, ServedModel
from dynamo_trio.frontend.cors import Cors
from dynamo_trio.frontend.metrics import FrontendMetrics
from dynamo_trio.frontend.paths import Paths
from dynamo_trio.frontend.refusals import Attempt, Refusals
from dynamo_trio.frontend.stalls import Stalls
from dynamo_trio.frontend.trace import begin_span
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.websocket import FrameRoom
from dynamo_trio.lifecycle import CutReason, Lifecycle, Phase
from dynamo_trio.metrics.shutdown import FrontShutdownMetrics
from dynamo_trio.wire.ids import new_uuid
from dynamo_trio.wire.openai.realtime.room import Room

if TYPE_CHECKING:
    import ssl
    from collections.abc import Collection
    from contextlib import AbstractContextManager

    from dynamo_trio.discovery import Instance
    from dynamo_trio.frontend.health import Stage
    from dynamo_trio.frontend.keys import ApiKeys
    from dynamo_trio.frontend.placement import Route
    from dynamo_trio.http.asgi import Headers, Receive, Scope, Send
    from dynamo_trio.tracing import Span

#: A client's own request id is taken over if it is harmless in a header and in a log line.
_REQUEST_ID = re.compile(rb"[\w.:@/+=-]{1,128}")


def clients_request_id(scope: Scope) -> str | None:
    """The request id that the client sent, if it sent one that can be taken over."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return None


@attrs.frozen(eq=False)
class HttpCall:
    """One HTTP request as a route sees it."""

    scope: Scope = attrs.field(repr=False)  # its headers may hold a key
    receive: Receive
    send: Send
    request_id: str
    attempt: Attempt
    span: Span

    @classmethod
    def of(cls, scope: Scope, receive: Receive, send: Send, *, endpoint: str = "") -> HttpCall:
        """The call with its id: the client's (``x-request-id``), or a new one."""
        attempt = Attempt(f"{scope['method']} {scope['path'][:200]}", endpoint)
        known_as = clients_request_id(scope) or new_uuid()
        span = begin_span(scope, known_as, endpoint)
        return cls(scope, receive, send, known_as, attempt, span)

    def enter(self) -> None:
        """The current task serves this call: every log line of it, and of its tasks, says so."""
        request_id.set(self.request_id)
        self.span.enter()

    def response_headers(self) -> Headers:
        """What every answer carries."""
        return [(b"x-request-id", self.request_id.encode())]


@attrs.define(eq=False)
class Frontend:
    """An OpenAI-compatible frontend over the models of a catalogue, without its HTTP side."""

    lifecycle: Lifecycle
    catalog: Catalog = attrs.field(factory=Catalog)
    metrics: FrontendMetrics = attrs.field(factory=FrontendMetrics)
    limits: HttpLimits = attrs.field(factory=HttpLimits)
    #: Of its HTTP port; None: it speaks plainly.
    tls: ssl.SSLContext | None = None
    overload_status: int = 529  # DYN_HTTP_OVERLOAD_STATUS_CODE
    #: Chooses the instance of a request (``DYN_ROUTER_MODE``).
    route: Route = Client.pick
    paths: Paths = attrs.field(factory=Paths)
    #: Whoever has one of these may ask; None: everybody may.
    keys: ApiKeys | None = None
    #: Web pages of which origins may ask.
    cors: Cors = attrs.field(factory=Cors)
    #: Set by the program once it wants traffic.
    ready: bool = False
    #: Every call that is open, admitted or not.
    calls: OpenCalls = attrs.field(factory=OpenCalls)
    #: Requests that may run at once.
    slots: admission.Slots = attrs.field(factory=admission.Slots)
    #: Which workers are left out because they have too much to do (``/busy_threshold``).
    busy: BusyWorkers = attrs.field(factory=BusyWorkers)
    #: Ends what a worker leaves without a word.
    stalls: Stalls = attrs.field(factory=Stalls)
    #: For what realtime sessions keep for another worker.
    kept: Room = attrs.field(factory=Room)
    #: For the conversations of text sessions.
    conversations: Room = attrs.field(factory=Room)
    #: For what clients of sessions have sent, and no session has taken yet.
    frames: FrameRoom = attrs.field(factory=FrameRoom)
    refusals: Refusals = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        # The catalogue may be replaced: it is asked for anew each time.
        self.refusals = Refusals(self.metrics, lambda model: self.catalog.knows(model))
        self.metrics.registry.register(FrontShutdownMetrics(self.lifecycle, self.metrics.prefix))
        self.metrics.show(lambda: self.catalog, self._count_left)

    def _count_left(self) -> int:
        """Requests that run on although their client has left."""
        running = self.lifecycle.http.admissions()
        return sum(admission.reason is CutReason.CLIENT_LEFT for admission in running)

    @property
    def draining(self) -> bool:
        """Are new requests refused?"""
        return not self.lifecycle.http.is_open

    @property
    def stage(self) -> Stage:
        """For ``/health``."""
        if self.lifecycle.phase >= Phase.STOPPING:
            return "stopping"
        if self.draining:
            return "draining"
        return "ready" if self.ready else "starting"

    def find(self, model: str) -> ServedModel:
        """The model of that name.

        Raises:
            ModelNotFound: it was never here.
            NoWorker: nobody serves it now, or this process is still starting.
        """
        if not self.ready:
            raise NoWorker("The server is starting; no model is loaded yet.")
        return self.catalog.find(model)

    def admit(
        self,
        model: ServedModel,
        *,
        endpoint: str,
        request_type: str,
        request_id: str,
        deadline: float = math.inf,
    ) -> AbstractContextManager[admission.Admitted]:
        """Count one request in: :func:`~dynamo_trio.frontend.admission.admit`."""
        return admission.admit(
            self,
            model,
            endpoint=endpoint,
            request_type=request_type,
            request_id=request_id,
            deadline=deadline,
        )

    def choose(self, model: ServedModel, without: Collection[int] = ()) -> Instance:
        """Whom to ask next, but none with an id in ``without``: those have failed before.

        Raises:
            NoWorker: nobody takes requests.
            Overloaded: everybody who does is busy.
        """
        busy = self.busy.busy(model)
        if not busy:
            return self.route(model.client, without)
        try:
            return self.route(model.client, busy.union(without))
        except NoWorker:
            self.route(model.client, without)  # says so, if not for the busy ones alone
            raise Overloaded(ALL_BUSY) from None
