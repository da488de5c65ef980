"""What the routes of a frontend share: its state, and the HTTP call that is being served."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.client import Client
from dynamo_trio.errors import NoWorker
from dynamo_trio.frontend.catalog import Catalog, ServedModel
from dynamo_trio.frontend.metrics import FrontendMetrics
from dynamo_trio.frontend.refusals import Attempt, Refusals
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.lifecycle import Lifecycle, Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.discovery import Instance
    from dynamo_trio.frontend.health import Stage
    from dynamo_trio.http.asgi import Headers, Receive, Scope, Send

#: A client's own request id is taken over if it is harmless in a header and in a log line.
_REQUEST_ID = re.compile(rb"[\w.:@/+=-]{1,128}")


@attrs.frozen(eq=False)
class HttpCall:
    """One HTTP request as a route sees it."""

    scope: Scope
    receive: Receive
    send: Send
    request_id: str
    attempt: Attempt

    @classmethod
    def of(cls, scope: Scope, receive: Receive, send: Send, *, endpoint: str = "") -> HttpCall:
        """The call with its id: the client's (``x-request-id``), or a new one."""
        attempt = Attempt(f"{scope['method']} {scope['path'][:200]}", endpoint)
        for name, value in scope["headers"]:
            if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
                return cls(scope, receive, send, str(value, "ascii"), attempt)
        return cls(scope, receive, send, str(uuid.uuid4()), attempt)

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
    overload_status: int = 529  # DYN_HTTP_OVERLOAD_STATUS_CODE
    #: Chooses the instance of a request (``DYN_ROUTER_MODE``); raises NoWorker.
    route: Callable[[Client], Instance] = Client.pick
    #: Set by the program once it wants traffic.
    ready: bool = False
    refusals: Refusals = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        # The catalogue may be replaced: it is asked for anew each time.
        self.refusals = Refusals(self.metrics, lambda model: self.catalog.knows(model))

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
