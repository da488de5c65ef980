"""The records of the discovery store: what stands under a key, as JSON.

Field names, order and forms are those of Dynamo 1.5.1. Optional fields are absent, and
unknown keys are ignored, as the real peers do (a record may carry keys that only some
readers know). Ids are JSON integers that can use all of their 64 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from dynamo_trio.errors import RemoteProtocolError
from dynamo_trio.wire.dynamo.addresses import TcpTarget
from dynamo_trio.wire.dynamo.card import CardJson
from dynamo_trio.wire.dynamo.codec import JSON, codec_named
from dynamo_trio.wire.dynamo.keys import MAX_ID, EventKey, InstanceKey
from dynamo_trio.wire.names import EndpointId

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.wire.dynamo.codec import Codec

_TCP = "tcp"


def _check_id(value: int) -> None:
    if not 0 <= value <= MAX_ID:
        raise ValueError(f"{value} is no 64-bit id")


# --- instances ---------------------------------------------------------------------------


class EndpointFields(msgspec.Struct, frozen=True, kw_only=True):
    """One instance of one endpoint, and how to reach it."""

    component: str
    endpoint: str
    namespace: str
    instance_id: int
    transport: dict[str, str]
    device_type: str | UnsetType = UNSET
    request_plane_codec: str | UnsetType = UNSET
    #: A key of ours, which Dynamo's readers pass over: where the instance takes requests over
    #: the ``mux`` plane. Kept as it stands, so that nothing in it makes a record unreadable.
    dynamo_trio_mux: msgspec.Raw | UnsetType = UNSET

    def __post_init__(self) -> None:
        _check_id(self.instance_id)

    @property
    def endpoint_id(self) -> EndpointId:
        """Which endpoint this is an instance of."""
        return EndpointId(self.namespace, self.component, self.endpoint)

    @property
    def key(self) -> InstanceKey:
        """The key under which the record stands in ``v1/instances``."""
        return InstanceKey(self.endpoint_id, self.instance_id)

    @property
    def codec(self) -> Codec:
        """The codec in which it wants its requests. Not told means JSON.

        Raises:
            RemoteProtocolError: no codec that is known here.
        """
        name = self.request_plane_codec
        return codec_named(None if name is UNSET else name)

    @property
    def tcp(self) -> TcpTarget | None:
        """Where the instance takes requests over TCP; None if it does not.

        Raises:
            RemoteProtocolError: an address that cannot be read.
        """
        target = self.transport.get(_TCP)
        return None if target is None else TcpTarget.parse(target)

    @property
    def mux(self) -> TcpTarget | None:
        """Where the instance takes requests over the ``mux`` plane; None if it does not.

        Raises:
            RemoteProtocolError: an address that cannot be read.
        """
        raw = self.dynamo_trio_mux
        target = None if raw is UNSET else _read_mux(bytes(raw))
        return None if target is None else TcpTarget.parse(target)


class EndpointRecord(EndpointFields, frozen=True, kw_only=True, tag_field="type", tag="Endpoint"):
    """An instance as it stands in ``v1/instances``."""

    @classmethod
    def for_tcp(
        cls, endpoint: EndpointId, instance_id: int, target: TcpTarget, codec: Codec
    ) -> EndpointRecord:
        """The record of an instance that takes requests over TCP."""
        return cls(
            component=endpoint.component,
            endpoint=endpoint.name,
            namespace=endpoint.namespace,
            instance_id=instance_id,
            transport={_TCP: str(target)},
            request_plane_codec=codec.name,
        )


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="Model"):
    """A model card as it stands in ``v1/mdc``."""

    namespace: str
    component: str
    endpoint: str
    instance_id: int
    card_json: CardJson

    def __post_init__(self) -> None:
        _check_id(self.instance_id)

    @property
    def endpoint_id(self) -> EndpointId:
        """The endpoint that serves the model."""
        return EndpointId(self.namespace, self.component, self.endpoint)

    @property
    def key(self) -> InstanceKey:
        """The key under which the record stands, for a model that is no adapter."""
        return InstanceKey(self.endpoint_id, self.instance_id)


# --- events ------------------------------------------------------------------------------


class EndpointName(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint, as event records name one."""

    namespace: str
    component: str
    name: str

    @classmethod
    def of(cls, endpoint: EndpointId) -> EndpointName:
        """The endpoint in this form."""
        return cls(namespace=endpoint.namespace, component=endpoint.component, name=endpoint.name)

    @property
    def endpoint_id(self) -> EndpointId:
        """The same, as it is named everywhere else."""
        return EndpointId(self.namespace, self.component, self.name)


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """What events are about. Only the kind ``endpoint`` is read here."""

    kind: str
    endpoint: EndpointName | UnsetType = UNSET

    @classmethod
    def of(cls, endpoint: EndpointId) -> Scope:
        """The scope of one endpoint."""
        return cls(kind="endpoint", endpoint=EndpointName.of(endpoint))


class _Event(msgspec.Struct, frozen=True, kw_only=True):
    scope: Scope
    topic: str

    def _key(self, publisher_id: int) -> EventKey:
        if self.scope.endpoint is UNSET:
            raise RemoteProtocolError(f"events of scope {self.scope.kind[:64]!r} have no endpoint")
        return EventKey(self.scope.endpoint.endpoint_id, self.topic, publisher_id)


class EventConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where a ``Zmq`` publisher listens. Other transports have other fields, not read here."""

    endpoint: str | UnsetType = UNSET


class EventTransport(msgspec.Struct, frozen=True, kw_only=True):
    """How events are carried: ``Zmq`` from the publisher itself, or by other means."""

    kind: str
    config: EventConfig


class EventChannelRecord(_Event, frozen=True, kw_only=True, tag_field="type", tag="EventChannel"):
    """Where one publisher's events can be subscribed to (``v1/event_channels``)."""

    instance_id: int  # of the publisher, not of the process
    transport: EventTransport

    def __post_init__(self) -> None:
        _check_id(self.instance_id)

    @property
    def key(self) -> EventKey:
        """The key under which the record stands.

        Raises:
            RemoteProtocolError: its scope is no endpoint.
        """
        return self._key(self.instance_id)


class EventWorker(msgspec.Struct, frozen=True, kw_only=True):
    """The worker whose state the events tell."""

    worker_id: int
    dp_rank: int

    def __post_init__(self) -> None:
        _check_id(self.worker_id)


class EventSourceMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Whose events they are, and where to ask for what was missed."""

    kv_state_endpoint: EndpointName | UnsetType = UNSET
    worker: EventWorker | UnsetType = UNSET
    publisher_id: int | UnsetType = UNSET
    recovery_target: EndpointFields | UnsetType = UNSET


class EventSourceRecord(_Event, frozen=True, kw_only=True, tag_field="type", tag="EventSource"):
    """Who publishes events, and about what (``v1/event_sources``)."""

    publisher_id: int
    metadata: EventSourceMetadata | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        _check_id(self.publisher_id)

    @property
    def key(self) -> EventKey:
        """The key under which the record stands.

        Raises:
            RemoteProtocolError: its scope is no endpoint.
        """
        return self._key(self.publisher_id)


# --- reading and writing -----------------------------------------------------------------

WireRecord = EndpointRecord | ModelRecord | EventChannelRecord | EventSourceRecord


def encode_record(record: WireRecord) -> bytes:
    """A record as it stands in the store."""
    return JSON.encode(record)


def decode_endpoint(value: bytes) -> EndpointRecord:
    """Read a value from ``v1/instances``.

    Raises:
        RemoteProtocolError: it is no Endpoint record.
    """
    return _read_endpoint(value)


def decode_model(value: bytes) -> ModelRecord:
    """Read a value from ``v1/mdc``.

    Raises:
        RemoteProtocolError: it is no Model record, or its card lacks what a card must have.
    """
    return _read_model(value)


def decode_event_channel(value: bytes) -> EventChannelRecord:
    """Read a value from ``v1/event_channels``.

    Raises:
        RemoteProtocolError: it is no EventChannel record.
    """
    return _read_event_channel(value)


def decode_event_source(value: bytes) -> EventSourceRecord:
    """Read a value from ``v1/event_sources``.

    Raises:
        RemoteProtocolError: it is no EventSource record.
    """
    return _read_event_source(value)


_read_endpoint = JSON.decoder(EndpointRecord, "Endpoint record")
_read_mux: Callable[[bytes], str | None] = JSON.decoder(
    str | None,  # type: ignore[arg-type]  # no class, but msgspec knows what it means
    "dynamo_trio_mux",
)
_read_model = JSON.decoder(ModelRecord, "Model record")
_read_event_channel = JSON.decoder(EventChannelRecord, "EventChannel record")
_read_event_source = JSON.decoder(EventSourceRecord, "EventSource record")
