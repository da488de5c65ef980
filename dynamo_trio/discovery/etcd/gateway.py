"""Talks to etcd's v3 JSON gateway: endpoints in turn, a token if need be, bounded answers.

Theory of operation
-------------------
A call goes to the endpoint that worked last, then to the others. What an endpoint can
do wrong comes out as one of three: it cannot be reached or answers too late
(:class:`~dynamo_trio.errors.StoreUnavailable`), it answers something that is not etcd's
(:class:`~dynamo_trio.errors.StoreGarbled`), or etcd itself refuses
(:class:`~dynamo_trio.errors.StoreRefused`). Only a refusal that would be the same
everywhere ends the round at once.

Every wait has its limit in the settings; nothing is read past the limits in bytes. A token
is fetched before the first call and again when etcd no longer knows it (it expired, etcd
restarted, users were changed), then the call is made once more. If none is given any more (the
password was changed) the lease, for which none is needed, is kept alive all the same; and
etcd, to which a password is much work, is not asked again at once.
"""

from __future__ import annotations

import math
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Generic, TypeVar

import attrs
import httpx
import msgspec
import trio

from dynamo_trio.discovery.etcd import messages
from dynamo_trio.discovery.etcd.contact import logger
from dynamo_trio.discovery.etcd.failures import told_apart
from dynamo_trio.errors import StoreGarbled, StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from dynamo_trio.discovery.etcd.messages import Call
    from dynamo_trio.discovery.etcd.settings import EtcdSettings

A = TypeVar("A", bound=msgspec.Struct)
T = TypeVar("T")

# gRPC's codes.
INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED, FAILED_PRECONDITION = 3, 5, 7, 9
ALREADY_EXISTS, OUT_OF_RANGE, UNAUTHENTICATED = 6, 11, 16
#: Refusals that would be the same from every endpoint.
_FINAL = {
    *(INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED, FAILED_PRECONDITION),
    *(OUT_OF_RANGE, UNAUTHENTICATED),
}
#: A user that was refused is not shown again sooner, in seconds.
_REFUSED_FOR = 5.0
#: How etcd says, under varying codes, that the token is of no use (any more).
_STALE_TOKEN = ("invalid auth token", "user name is empty", "revision of auth store is old")
_NO_AUTH = "authentication is not enabled"

#: A watch may be silent for hours; the kernel finds out whether the peer is still there.
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
_HEADERS = {
    "Content-Type": "application/json",
    # What is compressed cannot be bounded before it is unpacked.
    "Accept-Encoding": "identity",
    # A member that has lost its cluster ends its watches instead of falling silent.
    "Grpc-Metadata-Hasleader": "true",
}


@asynccontextmanager
async def open_gateway(
    settings: EtcdSettings, transport: httpx.AsyncBaseTransport | None = None
) -> AsyncIterator[Gateway]:
    """A client for all endpoints of the settings.

    Raises:
        FileUnusable: a certificate or key cannot be used.
    """
    if transport is None:
        transport = httpx.AsyncHTTPTransport(
            verify=settings.tls_context(),
            trust_env=False,
            # Each watch holds a connection for as long as it lives.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=4),
            socket_options=_KEEP_ALIVE,
        )
    limits = httpx.Timeout(settings.answer_time, connect=settings.connect_time)
    async with httpx.AsyncClient(transport=transport, trust_env=False, timeout=limits) as client:
        yield Gateway(settings, client)


@attrs.define(eq=False)
class Gateway:
    """etcd as something that can be asked."""

    _settings: EtcdSettings
    _client: httpx.AsyncClient
    #: Index of the endpoint that worked last.
    _first: int = 0
    #: "" : none is needed; None: to be fetched.
    _token: str | None = None
    #: Why no token was given, and until when none is asked for.
    _refused: StoreRefused | None = None
    _refused_until: float = -math.inf

    async def ask(self, call: Call[A]) -> A:
        """Make a call and read its answer.

        Raises:
            StoreRefused: etcd says no.
            StoreUnavailable: no endpoint gave an answer, or none that can be read.
        """
        failures: dict[str, StoreUnavailable] = {}
        for index in self._order():
            try:
                answer = await self._ask_with_token(index, call)
            except StoreUnavailable as exc:
                self._next_or_raise(index, exc, failures)
            else:
                self._first = index
                return answer
        raise _all_failed(failures)

    @asynccontextmanager
    async def stream(self, call: Call[A]) -> AsyncIterator[Lines[A]]:
        """Make a call whose answer is a stream of lines, which is closed at the end.

        Raises:
            StoreRefused: etcd says no.
            StoreUnavailable: no endpoint began an answer.
        """
        response = await self._open_stream(call)
        chunks = response.aiter_raw()
        try:
            yield Lines(call.answer, self._settings.max_line, chunks)
        finally:
            await _abandon(chunks)
            await response.aclose()

    def _order(self) -> list[int]:
        count = len(self._settings.endpoints)
        return [(self._first + n) % count for n in range(count)]

    def _next_or_raise(
        self, index: int, exc: StoreUnavailable, failures: dict[str, StoreUnavailable]
    ) -> None:
        """Another endpoint may do better, unless etcd's word is the same everywhere."""
        if isinstance(exc, StoreRefused) and exc.code in _FINAL:
            raise exc
        endpoint = self._settings.endpoints[index]
        failures[endpoint] = exc
        if len(failures) < len(self._settings.endpoints):
            logger.info("etcd at %s is passed over: %s", endpoint, exc)

    async def _open_stream(self, call: Call[A]) -> httpx.Response:
        failures: dict[str, StoreUnavailable] = {}
        for index in self._order():
            try:
                token = await self._token_from(index)
                response = await self._begin_stream(index, call, token)
            except StoreUnavailable as exc:
                self._note_stale_token(exc)
                self._next_or_raise(index, exc, failures)
            else:
                self._first = index
                return response
        raise _all_failed(failures)

    # --- the token -----------------------------------------------------------------------

    async def _ask_with_token(self, index: int, call: Call[A]) -> A:
        token = await self._token_for(index, call)
        try:
            return await self._ask(index, call, token)
        except StoreRefused as exc:
            if not self._note_stale_token(exc):
                raise
        return await self._ask(index, call, await self._token_from(index))

    def _note_stale_token(self, exc: StoreUnavailable) -> bool:
        stale = any(words in str(exc) for words in _STALE_TOKEN)
        if stale and self._settings.username is not None:
            self._token = None
        return stale and self._settings.username is not None

    async def _token_for(self, index: int, call: Call[A]) -> str:
        try:
            return await self._token_from(index)
        except StoreRefused:
            if call.needs_user:
                raise
            return ""

    async def _token_from(self, index: int) -> str:
        if self._token is not None:
            return self._token
        if self._refused is not None and trio.current_time() < self._refused_until:
            raise StoreRefused(str(self._refused), code=self._refused.code)
        try:
            self._token = await self._authenticate(index)
        except StoreRefused as exc:
            if exc.code in _FINAL:
                self._refused, self._refused_until = exc, trio.current_time() + _REFUSED_FOR
            raise
        return self._token

    async def _authenticate(self, index: int) -> str:
        name, password = self._settings.username, self._settings.password
        if name is None or password is None:
            return ""
        call = messages.authenticate(name, password)
        try:
            token = (await self._ask(index, call, "")).token
            if not (token.isascii() and token.isprintable()):
                raise StoreGarbled("etcd gave a token that fits into no header")
            return token
        except StoreRefused as exc:
            if _NO_AUTH not in str(exc):
                text = f"ETCD_AUTH_USERNAME: user {name!r}: {exc}"
                raise StoreRefused(text, code=exc.code) from exc
        logger.warning("etcd has authentication off; ETCD_AUTH_USERNAME is not used")
        return ""

    # --- one endpoint --------------------------------------------------------------------

    async def _ask(self, index: int, call: Call[A], token: str) -> A:
        settings = self._settings
        limit = settings.snapshot_time if call.is_large else settings.answer_time
        with told_apart(), trio.fail_after(settings.connect_time + limit):
            response = await self._client.send(self._request(index, call, token), stream=True)
            try:
                raw = await _read(response, settings.max_answer)
            finally:
                await response.aclose()
        _check(response, raw)
        return _parse(raw, call.answer)

    async def _begin_stream(self, index: int, call: Call[A], token: str) -> httpx.Response:
        settings = self._settings
        request = self._request(index, call, token)
        # The first line has its limit (below), the others may take for ever.
        silent = httpx.Timeout(settings.answer_time, connect=settings.connect_time, read=None)
        request.extensions["timeout"] = silent.as_dict()
        with told_apart(), trio.fail_after(settings.connect_time + settings.answer_time):
            response = await self._client.send(request, stream=True)
            if response.status_code == httpx.codes.OK:
                return response
            try:
                raw = await _read(response, settings.max_answer)
            finally:
                await response.aclose()
        _check(response, raw)
        raise StoreGarbled(f"HTTP {response.status_code} in place of a stream")

    def _request(self, index: int, call: Call[A], token: str) -> httpx.Request:
        url = httpx.URL(self._settings.endpoints[index] + call.path)
        headers = {
            **_HEADERS,
            # httpx sets these itself only where it also makes the stream.
            "Host": url.netloc.decode("ascii"),
            "Content-Length": str(len(call.body)),
        }
        if token:
            headers["Authorization"] = token
        return httpx.Request("POST", url, headers=headers, stream=_Body(call.body))


@attrs.define(eq=False)
class _Body(httpx.AsyncByteStream):
    """A request's body. httpx's own is a generator, which a cancelled send leaves hanging."""

    _raw: bytes
    _is_taken: bool = False

    def __aiter__(self) -> _Body:
        self._is_taken = False  # sent once more
        return self

    async def __anext__(self) -> bytes:
        await trio.lowlevel.checkpoint()
        if self._is_taken:
            raise StopAsyncIteration
        self._is_taken = True
        return self._raw


@attrs.define(eq=False)
class Lines(Generic[T]):
    """The lines of an answer without end."""

    _type: type[T]
    _limit: int
    _chunks: AsyncIterator[bytes]
    _buffer: bytearray = attrs.field(factory=bytearray)

    async def next_line(self) -> T:
        """Wait for the next line. To be cancelled here ends the stream.

        Raises:
            StoreUnavailable: the stream broke off.
            StoreGarbled: the line has not the form of one, or is too long.
        """
        scanned = 0
        while (end := self._buffer.find(b"\n", scanned)) < 0:
            scanned = len(self._buffer)
            if scanned > self._limit:
                raise StoreGarbled(f"a line of more than {self._limit} bytes in a stream")
            self._buffer += await self._more()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return _parse(line, self._type)

    async def _more(self) -> bytes:
        with told_apart():
            chunk = await anext(self._chunks, None)
        if chunk is None:
            raise StoreUnavailable("the stream ended")
        return chunk


async def _read(response: httpx.Response, limit: int) -> bytes:
    encoding = response.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise StoreGarbled(f"an answer with content-encoding {encoding!r}")
    raw = bytearray()
    chunks = response.aiter_raw()
    async for chunk in chunks:
        raw += chunk
        if len(raw) > limit:
            await _abandon(chunks)
            raise StoreGarbled(f"an answer of more than {limit} bytes")
    return bytes(raw)


async def _abandon(chunks: AsyncIterator[bytes]) -> None:
    """Read no further, and leave none of httpx's nested generators hanging at a ``yield``."""
    with trio.CancelScope() as scope, suppress(httpx.TransportError):
        scope.cancel("no more is read")
        async for _ in chunks:
            pass


def _check(response: httpx.Response, raw: bytes) -> None:
    """Raise what an answer says that is none."""
    status = response.status_code
    if status == httpx.codes.OK:
        return
    try:
        failure = msgspec.json.decode(raw, type=messages.Failure, strict=False)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        start = raw[:100].decode("utf-8", "replace").strip()
        raise StoreGarbled(f"no etcd v3 JSON gateway here: HTTP {status} {start!r}") from None
    raise refusal(failure)


def refusal(failure: messages.Failure) -> StoreRefused:
    """The error that etcd states."""
    text = failure.message or failure.error or "an error without a text"
    return StoreRefused(text[:1000], code=failure.code or failure.grpc_code)


def _parse(raw: bytes, type_: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=type_, strict=False)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        start = raw[:100].decode("utf-8", "replace")
        raise StoreGarbled(f"no answer of etcd: {exc}: {start!r}") from None


def _all_failed(failures: Mapping[str, StoreUnavailable]) -> StoreUnavailable:
    text = "; ".join(f"{endpoint}: {exc}" for endpoint, exc in failures.items())
    garbled = all(isinstance(exc, StoreGarbled) for exc in failures.values())
    return StoreGarbled(text) if garbled else StoreUnavailable(text)
