"""Records as they stand in a store: Dynamo's buckets, keys and JSON."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Raw

from dynamo_trio.discovery.records import EventChannel, EventSource, Instance, ModelCard
from dynamo_trio.discovery.store import StoreKey
from dynamo_trio.errors import InvalidArgument, RemoteProtocolError
from dynamo_trio.wire.dynamo.codec import JSON
from dynamo_trio.wire.dynamo.keys import (
    EVENT_CHANNELS,
    EVENT_SOURCES,
    INSTANCES,
    MODELS,
    InstanceKey,
    is_of_wider_scope,
)
from dynamo_trio.wire.dynamo.records import (
    EndpointFields,
    EndpointName,
    EndpointRecord,
    EventChannelRecord,
    EventConfig,
    EventSourceMetadata,
    EventSourceRecord,
    EventTransport,
    EventWorker,
    ModelRecord,
    Scope,
    decode_endpoint,
    decode_event_channel,
    decode_event_source,
    decode_model,
    encode_record,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dynamo_trio.discovery.abc import R
    from dynamo_trio.discovery.records import Record
    from dynamo_trio.wire.dynamo.records import WireRecord

logger = logging.getLogger("dynamo_trio.discovery")

#: The planes whose addresses mean something to other processes.
_TCP, _MUX = "tcp", "mux"
#: The one way to carry events that is offered here.
_ZMQ = "Zmq"

#: The bucket of each kind.
BUCKETS: Mapping[type[Record], str] = {
    Instance: INSTANCES,
    ModelCard: MODELS,
    EventChannel: EVENT_CHANNELS,
    EventSource: EVENT_SOURCES,
}


def bucket_of(kind: type[Record]) -> str:
    """The bucket in which records of this kind stand."""
    return BUCKETS[kind]


def store_key(record: Record) -> StoreKey:
    """Where the record stands."""
    return StoreKey(bucket_of(type(record)), record.key)


def spell(record: Record) -> bytes:
    """The record as other processes read it.

    Raises:
        InvalidArgument: it says nothing to them, or its names make no key.
    """
    if not all(record.endpoint.path.split("/")) or record.endpoint.path.count("/") != 2:
        raise InvalidArgument(f"{record.endpoint} cannot be published: no name may hold a '/'")
    return encode_record(_SPELLERS[type(record)](record))


def _instance(record: Instance) -> EndpointRecord:
    transports = record.transports
    if not transports.keys() & {_TCP, _MUX}:
        raise InvalidArgument(
            f"{record.endpoint} cannot be published: of its addresses "
            f"{sorted(transports)} none can be reached from another process"
        )
    return EndpointRecord(
        component=record.endpoint.component,
        endpoint=record.endpoint.name,
        namespace=record.endpoint.namespace,
        instance_id=record.instance_id,
        # The real peers take no more than one entry here, and no other plane than their own;
        # an instance without an entry is one that they cannot reach.
        transport={_TCP: transports[_TCP]} if _TCP in transports else {},
        request_plane_codec=record.codec.name,
        dynamo_trio_mux=Raw(JSON.encode(transports[_MUX])) if _MUX in transports else UNSET,
    )


def _card(record: ModelCard) -> ModelRecord:
    if record.card_json is None:
        raise InvalidArgument(
            f"the model {record.name!r} cannot be published: its card has no files for others"
        )
    return ModelRecord(
        namespace=record.endpoint.namespace,
        component=record.endpoint.component,
        endpoint=record.endpoint.name,
        instance_id=record.instance_id,
        card_json=record.card_json,
    )


def _channel(record: EventChannel) -> EventChannelRecord:
    return EventChannelRecord(
        scope=Scope.of(record.endpoint),
        topic=record.topic,
        instance_id=record.publisher_id,
        transport=EventTransport(kind=_ZMQ, config=EventConfig(endpoint=record.address)),
    )


def _source(record: EventSource) -> EventSourceRecord:
    metadata = EventSourceMetadata(
        kv_state_endpoint=EndpointName.of(record.endpoint),
        worker=EventWorker(worker_id=record.worker_id, dp_rank=record.dp_rank),
        publisher_id=record.publisher_id,
        recovery_target=UNSET if record.recovery is None else _target(record.recovery),
    )
    return EventSourceRecord(
        scope=Scope.of(record.endpoint),
        topic=record.topic,
        publisher_id=record.publisher_id,
        metadata=metadata,
    )


def _target(record: Instance) -> EndpointFields:
    """The instance as it stands inside another record: without its type."""
    return EndpointFields(**msgspec.structs.asdict(_instance(record)))


_SPELLERS: Mapping[type[Record], Callable[[Any], WireRecord]] = {
    Instance: _instance,
    ModelCard: _card,
    EventChannel: _channel,
    EventSource: _source,
}


def read(kind: type[R], key: str, value: bytes) -> R | None:
    """The record under ``key``; None if it is of a kind that is not offered here.

    Raises:
        RemoteProtocolError: it cannot be read, or stands under a key that is not its own.
    """
    if not _is_offered(kind, key):
        return None
    record: R | None = _READERS[kind](value)
    if record is not None and record.key != key:
        raise RemoteProtocolError(f"under {key[:256]!r} stands the record of {record.key[:256]!r}")
    return record


def _is_offered(kind: type[Record], key: str) -> bool:
    if kind in (EventChannel, EventSource):
        return not is_of_wider_scope(key)
    return InstanceKey.parse(key).adapter is None


def _read_instance(value: bytes) -> Instance:
    return _to_instance(decode_endpoint(value))


def _to_instance(record: EndpointFields) -> Instance:
    record.tcp  # noqa: B018 - an address that cannot be read makes the record unreadable
    transports = {name: at for name, at in record.transport.items() if name != _MUX}
    if (target := _mux_of(record)) is not None:
        transports[_MUX] = target
    return Instance(record.endpoint_id, record.instance_id, transports, record.codec)


def _mux_of(record: EndpointFields) -> str | None:
    """The instance's address on the mux plane; the key is ours, so a record may do without."""
    try:
        return None if record.mux is None else str(record.mux)
    except RemoteProtocolError as exc:
        _tell_unreadable(str(record.key), str(exc))
        return None


@lru_cache(maxsize=1024)
def _tell_unreadable(key: str, reason: str) -> None:
    """Once for each record: several watches read it, again and again."""
    logger.warning("the instance %s is not asked over mux: %s", key[:256], reason)


def _read_card(value: bytes) -> ModelCard:
    record = decode_model(value)
    card = record.card_json
    length = card.context_length
    return ModelCard(
        name=card.display_name,
        endpoint=record.endpoint_id,
        instance_id=record.instance_id,
        context_length=0 if length is UNSET or length is None else length,
        kv_cache_block_size=card.kv_cache_block_size,
        model_type=card.model_types,
        migration_limit=card.migration_limit,
        card_json=card,
    )


def _read_channel(value: bytes) -> EventChannel | None:
    record = decode_event_channel(value)
    address = record.transport.config.endpoint
    if record.transport.kind != _ZMQ:
        return None
    if address is UNSET:
        raise RemoteProtocolError("an event channel that does not say where it is")
    key = record.key
    return EventChannel(key.endpoint, key.topic, key.publisher_id, address)


def _read_source(value: bytes) -> EventSource | None:
    record = decode_event_source(value)
    metadata = record.metadata or EventSourceMetadata()
    if metadata.worker is UNSET:
        return None
    target = metadata.recovery_target
    return EventSource(
        endpoint=record.key.endpoint,
        topic=record.topic,
        publisher_id=record.publisher_id,
        worker_id=metadata.worker.worker_id,
        dp_rank=metadata.worker.dp_rank,
        recovery=None if target is UNSET else _to_instance(target),
    )


_READERS: Mapping[type[Record], Callable[[bytes], Any]] = {
    Instance: _read_instance,
    ModelCard: _read_card,
    EventChannel: _read_channel,
    EventSource: _read_source,
}
