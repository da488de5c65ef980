"""Every exception of dynamo_trio, named by who is at fault.

Theory of operation
-------------------
A class answers four questions, so that no caller has to look at a message:

* ``migratable``: may another worker take the request over?  (Dynamo 1.5.1's
  rule: only what the *worker's side* broke may move.)
* ``status``: the HTTP status that a frontend answers with, a hint in the manner
  of h11's ``error_status_hint``.
* ``reason``: the short machine-readable code that goes into the error envelope's
  ``code`` and into the header ``x-dynamo-reason``.
* ``retry``: may the same request be sent again to the same address with some hope?  Then
  the answer has ``Retry-After``; a 5xx that has not tells OpenAI's SDK not to retry.

The names of :class:`DynamoException` and its direct children are those of
``dynamo.llm.exceptions``, so that ``except`` clauses port unchanged.
Exceptions are translated exactly once, at the edge where they leave the process:
HTTP (``dynamo_trio.frontend``), the request plane, and the exit code
(``dynamo_trio.process``).
"""

from __future__ import annotations

from typing import ClassVar


class DynamoException(Exception):  # the name is Dynamo's
    """Base of all errors that concern one request or one endpoint."""

    migratable: ClassVar[bool] = False
    status: ClassVar[int] = 500
    reason: ClassVar[str] = "internal"
    retry: ClassVar[bool] = False
    #: OpenAI's ``error.type``.
    kind: ClassVar[str] = "internal_server_error"

    @property
    def message(self) -> str:
        """The text meant for the client; never a path or an address of the server."""
        return str(self) or (self.__doc__ or "").splitlines()[0]


def forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error that has been told, and of those that led to it.

    They hold the frames that the error came through, and so the whole request; some of these
    frames hold the error (Trio's way back from a thread does). Such a circle stays in memory until
    the garbage collector comes by.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


class Unknown(DynamoException):
    """A failure that the peer did not name."""


# --- the caller is at fault: trying elsewhere would fail the same way -------------


class InvalidArgument(DynamoException):
    """The request breaks a rule of the API. ``param`` names the field."""

    status = 400
    reason = "invalid_request"
    kind = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestRejected(InvalidArgument):
    """An engine cannot serve this request at all: too long, or a token that it does not know."""


class ContextLengthExceeded(RequestRejected):
    """Prompt and answer together are longer than the model's context."""

    reason = "context_length_exceeded"


class ModelNotFound(InvalidArgument):
    """No model of that name was ever served here."""

    status = 404
    reason = "model_not_found"


class RouteNotFound(InvalidArgument):
    """The server has no such path."""

    status = 404
    reason = "not_found"


class NotSupported(InvalidArgument):
    """A route of OpenAI's API, or of Dynamo's, that this server does not have yet."""

    status = 501
    reason = "not_implemented"


class InvalidApiKey(InvalidArgument):
    """The server wants an API key, and the request has none, or a wrong one."""

    status = 401
    reason = "invalid_api_key"


class OriginNotAllowed(InvalidArgument):
    """A web page of another origin, which is not allowed, asks for more than to read."""

    status = 403
    reason = "origin_not_allowed"


class MethodNotAllowed(InvalidArgument):
    """The path exists, but not with this HTTP method; ``methods`` are those that it takes."""

    status = 405
    reason = "method_not_allowed"

    def __init__(self, message: str, *, methods: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.methods = methods


class UpgradeRequired(InvalidArgument):
    """The path is one of WebSockets, and the request asks for none."""

    status = 426
    reason = "upgrade_required"


class PayloadTooLarge(InvalidArgument):
    """The request body is larger than the server takes."""

    status = 413
    reason = "payload_too_large"


class TooManyHeaders(InvalidArgument):
    """The request has more header fields than the server takes."""

    status = 431
    reason = "too_many_headers"


class HeadTooLarge(InvalidArgument):
    """Request line and headers together are longer than the server takes."""

    status = 431
    reason = "head_too_large"


class HttpVersionNotSupported(InvalidArgument):
    """The request is of a version of HTTP that the server does not speak."""

    status = 505
    reason = "http_version_not_supported"


class ClientTooSlow(InvalidArgument):
    """The request did not arrive in time."""

    retry = True

    status = 408
    reason = "request_timeout"


class Cancelled(DynamoException):
    """The caller left. Never an error of the worker, never migrated."""

    status = 499
    reason = "cancelled"


# --- this process, or the pool, cannot take it now --------------------------------


class Draining(DynamoException):
    """The process is stopping: nothing new is admitted. Nothing was begun, so try elsewhere."""

    retry = True
    migratable = True
    status = 503
    reason = "draining"
    kind = "service_unavailable"


class UploadsFull(DynamoException):
    """All that clients are sending at once is more than the server keeps in memory."""

    retry = True
    status = 503
    reason = "overloaded"
    kind = "service_unavailable"


class ConnectionsFull(DynamoException):
    """The server has as many connections as it takes; on this one it tells only how it is."""

    retry = True
    status = 503
    reason = "overloaded"
    kind = "service_unavailable"


class ConversationsFull(DynamoException):
    """The conversations of all realtime sessions are more than the server keeps in memory."""

    retry = True
    status = 503
    reason = "overloaded"
    kind = "service_unavailable"


class NoWorker(DynamoException):
    """The model is known, but no worker serves it at the moment."""

    retry = True
    status = 503
    reason = "no_worker"
    kind = "service_unavailable"


class Overloaded(DynamoException):
    """The worker is full. Another one may have room."""

    retry = True
    migratable = True
    status = 529  # DYN_HTTP_OVERLOAD_STATUS_CODE
    reason = "overloaded"
    kind = "overloaded"


class RequestCut(DynamoException):
    """The request was ended by a shutdown limit; what was sent so far is right but incomplete."""

    retry = True
    status = 503
    reason = "cut"
    kind = "service_unavailable"


class DeadlineExceeded(DynamoException):
    """The request has not ended in the time that its caller gave it."""

    status = 504
    reason = "deadline"
    kind = "timeout_error"


# --- the worker, or the way to it, broke ------------------------------------------


class CannotConnect(DynamoException):
    """The worker could not be reached, or refused before the stream was established."""

    retry = True
    migratable = True
    status = 503
    reason = "cannot_connect"
    kind = "service_unavailable"


class NotConnected(CannotConnect):
    """The plane has no connection to the worker, and nothing was sent; another plane may."""


class Disconnected(DynamoException):
    """The stream ended before generation completed."""

    retry = True
    migratable = True
    status = 500
    reason = "disconnected"


class Unanswered(DynamoException):
    """Every worker that was asked failed before the answer had begun; nothing of it was sent."""

    retry = True
    status = 503
    reason = "unanswered"
    kind = "service_unavailable"


class ConnectionTimeout(DynamoException):
    """The worker did not answer in time."""

    retry = True
    migratable = True
    status = 504
    reason = "timeout"


class ResponseTimeout(ConnectionTimeout):
    """The worker has fallen silent in the middle of a request."""

    reason = "response_timeout"


class StreamIncomplete(DynamoException):
    """The worker said the stream is over, but it lacks its end."""

    retry = True
    migratable = True
    reason = "stream_incomplete"


class NotReplayable(DynamoException):
    """The answer broke off, and it hangs on more than its tokens: no other engine can go on."""

    retry = True
    reason = "not_replayable"


class EngineShutdown(DynamoException):
    """The worker's engine is being shut down; ``planned`` marks a hand-over during a drain."""

    retry = True
    migratable = True
    status = 503
    reason = "engine_shutdown"
    kind = "service_unavailable"

    def __init__(self, message: str = "", *, planned: bool = False) -> None:
        super().__init__(message)
        self.planned = planned


class EngineClosed(EngineShutdown):
    """The engine was already closed when the request reached it."""

    reason = "engine_closed"


class EngineDead(EngineShutdown):
    """The engine failed for good: a step raised, or its process ended. The worker must exit."""

    reason = "engine_dead"


class EngineHung(EngineShutdown):
    """A step did not return within its deadline. The engine is poisoned and never closed."""

    reason = "engine_hung"


# --- what travels is wrong: whose fault it is decides whether another peer helps ----------


class ProtocolError(DynamoException):
    """A rule of the wire was broken; see the two subclasses for by whom."""

    reason = "protocol_error"


class LocalProtocolError(ProtocolError):
    """We were about to break a rule of the wire: a mistake in this program. Nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The peer sent what the wire does not allow. Its connection is of no more use.

    Another worker may keep to the rules, so a request that met this may go there.
    """

    retry = True
    migratable = True


class MessageTooLarge(RemoteProtocolError):
    """The peer announced a message above the limit. It would be as large elsewhere.

    ``size`` and ``limit`` are bytes of the whole message.
    """

    retry = False
    migratable = False
    status = 413
    reason = "message_too_large"

    def __init__(self, message: str = "", *, size: int = 0, limit: int = 0) -> None:
        super().__init__(message or f"message too large: {size} bytes (max: {limit} bytes)")
        self.size = size
        self.limit = limit


class UnexpectedTls(RemoteProtocolError):
    """The peer speaks TLS, and here nobody does."""


class UnreadableItem(RemoteProtocolError):
    """An item of a stream has not the form of one. As in Dynamo 1.5.1 the request stays here."""

    retry = False
    migratable = False
    reason = "unreadable_item"


# --- the operator or the machine: the process cannot start ------------------------


class StartupError(Exception):
    """The process cannot start. ``exit_code`` is 64 if the operator can mend it, else 1."""

    exit_code: ClassVar[int] = 1


class ConfigError(StartupError):
    """A flag or variable has a bad value. The message names variable, value and rule."""

    exit_code = 64


class FileUnusable(StartupError):
    """A file that was named is missing or cannot be read."""

    exit_code = 64


class PortInUse(StartupError):
    """A listening port is taken, or may not be bound."""

    exit_code = 64


class LoadError(StartupError):
    """The model could not be loaded: corrupt, or of a kind that the engine does not know."""


class CardUnusable(LoadError):
    """A model that another process offers cannot be used: a file is wrong, or cannot be had."""


class DiscoveryUnavailable(StartupError):
    """The discovery store could not be reached at the start, or refused this process."""


class FetchError(StartupError):
    """The default model could not be fetched or failed its checksum."""


# --- what the process leans on is away for a while ---------------------------------


class StoreUnavailable(Exception):
    """The discovery store did not answer, or refused. It may work again at the next attempt."""


class StoreRefused(StoreUnavailable):
    """The store answered, and the answer is an error. ``code`` is gRPC's."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


class StoreGarbled(StoreUnavailable):
    """What answered is no such store, or does not keep to its protocol or to our limits."""
