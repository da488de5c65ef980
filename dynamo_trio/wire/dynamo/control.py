"""The control header of a request: which request it is, and where its answer goes.

It is JSON whatever the codec of the body, and it is the header of the two-part message
that a request frame carries; the body is the data. The place to answer to is a JSON
*string* inside this JSON (``connection_info.info``).

Reading is done in steps, because a worker should answer even a request that it cannot
serve: once :meth:`ControlMessage.reply_to` has given an address, everything else that is
wrong can be told there, while a request that is only dropped leaves its client waiting.
"""

from __future__ import annotations

import msgspec
from attrs import frozen
from msgspec import UNSET, UnsetType

from dynamo_trio.errors import RemoteProtocolError
from dynamo_trio.wire.dynamo import two_part
from dynamo_trio.wire.dynamo.addresses import HostPort
from dynamo_trio.wire.dynamo.codec import JSON, Codec, codec_named

#: What travels here: one request, or a request that streams in; and always many items back.
SINGLE_IN, MANY_IN, MANY_OUT = "single_in", "many_in", "many_out"
TCP_SERVER = "tcp_server"
#: Why a worker calls: to answer, or to be sent the items of a request that streams in.
RESPONSE, REQUEST = "response", "request"


class ConnectionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A transport's name, and what that transport reads."""

    transport: str
    info: str


class _Info(msgspec.Struct, frozen=True, kw_only=True):
    """``ConnectionInfo.info`` of the transport ``tcp_server``."""

    address: str
    subject: str
    context: str
    stream_type: str


@frozen
class ReplyTo:
    """Where a worker calls back. ``subject`` tells the client which of its streams it is."""

    address: HostPort
    subject: str
    request_id: str

    def info(self, stream_type: str = RESPONSE) -> ConnectionInfo:
        """This as it stands in a control message."""
        info = _Info(
            address=str(self.address),
            subject=self.subject,
            context=self.request_id,
            stream_type=stream_type,
        )
        return ConnectionInfo(transport=TCP_SERVER, info=JSON.encode(info).decode())


class ControlMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The control header, as it was written. Optional parts are absent, never null."""

    id: str
    request_type: str
    response_type: str
    payload_codec: str = JSON.name
    connection_info: ConnectionInfo
    metadata: dict[str, str] | UnsetType = UNSET
    frontend_send_ts_ns: int | UnsetType = UNSET
    request_stream_connection_info: ConnectionInfo | UnsetType = UNSET

    @classmethod
    def for_request(
        cls, reply_to: ReplyTo, codec: Codec, items_from: ReplyTo | None = None
    ) -> ControlMessage:
        """The control header of a request whose body is in ``codec``.

        With ``items_from`` there is no body: the request streams in, from there.
        """
        return cls(
            id=reply_to.request_id,
            request_type=SINGLE_IN if items_from is None else MANY_IN,
            response_type=MANY_OUT,
            payload_codec=codec.name,
            connection_info=reply_to.info(),
            request_stream_connection_info=(
                UNSET if items_from is None else items_from.info(REQUEST)
            ),
        )

    def reply_to(self) -> ReplyTo:
        """Where the answer goes.

        Raises:
            RemoteProtocolError: it does not say so, or not over TCP.
        """
        return _place(self.connection_info, RESPONSE)

    def items_from(self) -> ReplyTo | None:
        """Where the items of a request that streams in come from; None: it does not.

        Raises:
            RemoteProtocolError: it should say, and does not, or not over TCP, or another id.
        """
        if self.request_type != MANY_IN:
            return None
        if self.request_stream_connection_info is UNSET:
            raise RemoteProtocolError("the peer does not say where its request streams in from")
        place = _place(self.request_stream_connection_info, REQUEST)
        if place.request_id != self.id:
            raise RemoteProtocolError("the peer sent a request with two different ids")
        return place

    def body_codec(self) -> Codec:
        """The codec of body and answer, when this is a request that can be served.

        Raises:
            RemoteProtocolError: unknown codec, another kind of stream, ids that differ, or as
                :meth:`items_from`.
        """
        if self.request_type not in (SINGLE_IN, MANY_IN):
            raise _wrong("request type", self.request_type, SINGLE_IN)
        if self.response_type != MANY_OUT:
            raise _wrong("response type", self.response_type, MANY_OUT)
        if self.reply_to().request_id != self.id:
            raise RemoteProtocolError("the peer sent a request with two different ids")
        self.items_from()
        return codec_named(self.payload_codec)


_read = JSON.decoder(ControlMessage, "control message")
_read_info = JSON.decoder(_Info, "connection info")


def _place(connection_info: ConnectionInfo, stream_type: str) -> ReplyTo:
    if connection_info.transport != TCP_SERVER:
        raise _wrong("transport", connection_info.transport, TCP_SERVER)
    info = _read_info(connection_info.info.encode("utf-8", "replace"))
    if info.stream_type != stream_type:
        raise _wrong("stream type", info.stream_type, stream_type)
    return ReplyTo(HostPort.parse(info.address), info.subject, info.context)


def _wrong(what: str, found: str, expected: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"the peer asked for {what} {found[:64]!r}, not {expected!r}")


def encode_payload(control: ControlMessage, body: bytes) -> bytes:
    """A request frame's payload.

    Raises:
        LocalProtocolError: it is larger than any peer takes.
    """
    return two_part.encode(JSON.encode(control), body)


def decode_payload(payload: bytes) -> tuple[ControlMessage, bytes]:
    """A request frame's payload: control message and encoded body.

    Raises:
        RemoteProtocolError: no two-part message, or its header is no control message.
    """
    message = two_part.decode(payload)
    return _read(message.header), message.data
