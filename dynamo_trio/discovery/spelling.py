"""Records as they stand in a store: Dynamo's buckets, keys and JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from dynamo_trio.discovery.records import Instance, ModelCard
from dynamo_trio.discovery.store import StoreKey
from dynamo_trio.errors import InvalidArgument, RemoteProtocolError
from dynamo_trio.wire.dynamo.keys import INSTANCES, MODELS, InstanceKey
from dynamo_trio.wire.dynamo.records import (
    EndpointRecord,
    ModelRecord,
    decode_endpoint,
    decode_model,
    encode_record,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dynamo_trio.discovery.abc import R
    from dynamo_trio.discovery.records import Record

#: The one plane whose addresses mean something to other processes.
_TCP = "tcp"


def bucket_of(kind: type[Record]) -> str:
    """The bucket in which records of this kind stand."""
    return INSTANCES if kind is Instance else MODELS


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
    return encode_record(_instance(record) if isinstance(record, Instance) else _card(record))


def _instance(record: Instance) -> EndpointRecord:
    if _TCP not in record.transports:
        raise InvalidArgument(
            f"{record.endpoint} cannot be published: of its addresses "
            f"{sorted(record.transports)} none can be reached from another process"
        )
    return EndpointRecord(
        component=record.endpoint.component,
        endpoint=record.endpoint.name,
        namespace=record.endpoint.namespace,
        instance_id=record.instance_id,
        # The real peers take exactly one entry here.
        transport={_TCP: record.transports[_TCP]},
        request_plane_codec=record.codec.name,
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


def read(kind: type[R], key: str, value: bytes) -> R | None:
    """The record under ``key``; None if it is of a kind that is not offered here.

    Raises:
        RemoteProtocolError: it cannot be read, or stands under a key that is not its own.
    """
    found = InstanceKey.parse(key)
    if found.adapter is not None:
        return None
    record: R = _READERS[kind](value)
    if record.key != key:
        raise RemoteProtocolError(f"under {key[:256]!r} stands the record of {record.key[:256]!r}")
    return record


def _read_instance(value: bytes) -> Instance:
    record = decode_endpoint(value)
    record.tcp  # noqa: B018 - an address that cannot be read makes the record unreadable
    return Instance(record.endpoint_id, record.instance_id, record.transport, record.codec)


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


_READERS: Mapping[type, Callable[[bytes], Any]] = {
    Instance: _read_instance,
    ModelCard: _read_card,
}
