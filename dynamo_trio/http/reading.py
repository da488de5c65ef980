"""What clients send on HTTP/1, as h11 reads it, and a little as RFC 9112 has it beyond that.

* Empty lines before a request are skipped (2.2): old clients send one behind a body.
* A target may be a whole URL (3.2.2): its authority stands for the Host, and the rest is the path.
* HTTP/1.2 would be read as HTTP/1.1; another major version is none that is spoken here (505).
* The limit of a head holds to the byte. h11 alone looks at it while the head is incomplete, so
  what comes in one piece would pass at any length.

What is wrong with a request is kept (:attr:`Reader.complaint`), so that its client can be told.
And what is sent to a client gets the words behind its status, which hypercorn leaves out.

What is plain goes past h11 (:mod:`dynamo_trio.http.plain`): a request whose head came whole, and
the frame of an answer in chunks. h11's state is carried along, so that it can go on at any point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import h11
from h11._readers import READERS, ContentLengthReader
from h11._writers import WRITERS, ChunkedWriter

from dynamo_trio.http.phrases import PHRASES
from dynamo_trio.http.plain import read_plain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dynamo_trio.http.plain import PlainHead

#: How a target that is a whole URL begins.
URL_SCHEMES = (b"http://", b"https://")
#: What h11 reads and writes with in states without a body.
_IDLE_READER: Any = READERS[h11.CLIENT, h11.IDLE]
_DONE_READER: Any = READERS[h11.CLIENT, h11.DONE]
_IDLE_WRITER: Any = WRITERS[h11.SERVER, h11.IDLE]
_HEAD_WRITER: Any = WRITERS[h11.SERVER, h11.SEND_RESPONSE]
#: What begins with a status line.
HEADS = (h11.Response, h11.InformationalResponse)


class Reader(h11.Connection):
    """The server's end of one connection.

    Raises:
        h11.RemoteProtocolError: from ``next_event``, with the status to answer with.
    """

    def __init__(self, head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=head_bytes)
        self._head_bytes = head_bytes
        #: Of the request that is no good.
        self.complaint: h11.RemoteProtocolError | None = None
        #: The answer to the request has no body, whatever it is.
        self.asked_for_head = False

    def next_event(self) -> Any:
        try:
            if self.their_state is not h11.IDLE:
                return super().next_event()
            return self._next_head()
        except h11.RemoteProtocolError as exc:
            self.complaint = exc
            raise

    # --- past h11 -------------------------------------------------------------------------

    def take_plain(self, data: bytes) -> tuple[PlainHead, bytes | None] | None:
        """A plain request that begins with ``data``; None: nothing was done, h11 is to read it.

        With it comes its body, if all of it is there, and nothing behind it. If not, what there is
        of it is left to :meth:`next_event`.
        """
        states = self._cstate.states
        idle = states[h11.CLIENT] is h11.IDLE and states[h11.SERVER] is h11.IDLE
        if not idle or not self._cstate.keep_alive or self._receive_buffer:
            return None
        head = read_plain(data, self._head_bytes)
        if head is None:
            return None
        self.asked_for_head = False
        self._request_method, self.their_http_version = head.method, b"1.1"
        states[h11.SERVER], self._writer = h11.SEND_RESPONSE, _HEAD_WRITER
        if len(data) == head.size + head.length:
            states[h11.CLIENT], self._reader = h11.DONE, _DONE_READER
            return head, data[head.size :]
        states[h11.CLIENT] = h11.SEND_BODY
        self._reader = ContentLengthReader(head.length)
        if len(data) > head.size:
            self.receive_data(data[head.size :])
        return head, None

    def begin_chunked(self) -> bool:
        """Go on as if the head of an answer had been made, with its body in chunks.

        False: nothing was done; this answer is nothing plain.
        """
        state = self._cstate
        plain = (
            state.states[h11.SERVER] is h11.SEND_RESPONSE
            and state.keep_alive
            and not state.pending_switch_proposals
            and self.their_http_version == b"1.1"
            and self._request_method not in (b"HEAD", b"CONNECT")
        )
        if plain:
            state.states[h11.SERVER] = h11.SEND_BODY
            self._writer = ChunkedWriter()
            self.client_is_waiting_for_100_continue = False
        return plain

    def end_chunked(self) -> bool:
        """Go on as if the end of that body had been made. False: nothing was done."""
        state = self._cstate
        plain = state.states[h11.SERVER] is h11.SEND_BODY and state.keep_alive
        if plain:
            state.states[h11.SERVER] = h11.DONE
            self._writer = None  # as for every state in which nothing is to be sent
        return plain

    def start_next_cycle(self) -> None:
        state = self._cstate
        both = state.states[h11.CLIENT] is h11.DONE and state.states[h11.SERVER] is h11.DONE
        if not both or not state.keep_alive or state.pending_switch_proposals:
            super().start_next_cycle()
            return
        state.states = {h11.CLIENT: h11.IDLE, h11.SERVER: h11.IDLE}
        self._reader, self._writer = _IDLE_READER, _IDLE_WRITER
        self._request_method = None

    # --- through h11 ----------------------------------------------------------------------

    def send(self, event: h11.Event) -> Any:
        if isinstance(event, HEADS) and not event.reason:
            # It is frozen, but to be written in a moment; a new one would check its headers anew.
            object.__setattr__(event, "reason", PHRASES[event.status_code])
        return super().send(event)

    def _next_head(self) -> Any:
        self.asked_for_head = False
        self._skip_empty_lines()
        before = len(self._receive_buffer)
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        self.asked_for_head = event.method == b"HEAD"
        if before - len(self._receive_buffer) > self._head_bytes:
            raise h11.RemoteProtocolError("too long", error_status_hint=431)
        if event.http_version not in (b"1.1", b"1.0") or event.target.startswith(URL_SCHEMES):
            return as_usual(event)
        return event

    def _skip_empty_lines(self) -> None:
        said = bytes(self._receive_buffer)
        if said[:1] in (b"\r", b"\n"):
            self._receive_buffer.maybe_extract_at_most(len(said) - len(said.lstrip(b"\r\n")))


def as_usual(request: h11.Request) -> h11.Request:
    """The request, as most clients would put it.

    Raises:
        h11.RemoteProtocolError: it is of a version of HTTP that is not spoken here.
    """
    if request.method == b"PRI":  # how HTTP/2 begins
        return request
    if not request.http_version.startswith(b"1."):
        raise h11.RemoteProtocolError("this is no HTTP/1", error_status_hint=505)
    headers: Iterable[tuple[bytes, bytes]] = request.headers
    target = request.target
    if target.startswith(URL_SCHEMES):
        host, target = _parts(target)
        headers = [(b"host", host), *((name, value) for name, value in headers if name != b"host")]
    version = request.http_version if request.http_version == b"1.0" else b"1.1"
    return h11.Request(
        method=request.method, target=target, headers=list(headers), http_version=version
    )


def _parts(url: bytes) -> tuple[bytes, bytes]:
    """The authority, without anybody's password, and what is asked for there."""
    rest = url.partition(b"://")[2]
    end = next((at for at, byte in enumerate(rest) if byte in b"/?"), len(rest))
    path = rest[end:]
    return rest[:end].rpartition(b"@")[2], path if path.startswith(b"/") else b"/" + path
