"""What workers publish about their KV caches: ``kv-events`` and ``kv_metrics``.

A payload of ``kv-events`` is a list of :class:`RouterEvent`. Their ids count the changes of
one cache (one worker, one data-parallel rank), from 1 in steps of 1, so that who misses one
notices. A change is ``{"stored": ...}``, ``{"removed": ...}`` or the bare text ``"cleared"``
(Rust's spelling of a variant without content).

Hashes are numbers of 64 bits that mean something to the engine alone, but for the tokens
hash (see :mod:`~dynamo_trio.wire.dynamo.block_hash`). What is not known is skipped and never
built: fields that only some peers write, and the positions of images in a block.
"""

from __future__ import annotations

from typing import Final

import msgspec
from attrs import frozen
from msgspec import UNSET, UnsetType

from dynamo_trio.wire.dynamo.codec import MSGPACK

#: The tier that counts for routing; the others are host memory, disk and remote stores.
DEVICE = "device"
#: The owner of what an engine holds by itself.
WORKER = "worker"
_CLEARED: Final = "cleared"


class Block(msgspec.Struct, frozen=True):
    """A block in the cache. The real peers write a third field, of images; absent means none."""

    block_hash: int
    tokens_hash: int


class Stored(msgspec.Struct, frozen=True):
    """Consecutive blocks came into the cache, after the block ``parent_hash`` (None: first)."""

    parent_hash: int | None
    start_position: int | None = None  # of the first block in its prompt, where it is told
    blocks: tuple[Block, ...] = ()


class Removed(msgspec.Struct, frozen=True):
    """Blocks left the cache, deepest first."""

    block_hashes: tuple[int, ...]


@frozen
class Cleared:
    """The cache is empty."""


@frozen
class UnknownChange:
    """A change of a kind that is not known here."""


Change = Stored | Removed | Cleared | UnknownChange


class _Data(msgspec.Struct, frozen=True, omit_defaults=True):
    stored: Stored | UnsetType = UNSET
    removed: Removed | UnsetType = UNSET
    cleared: UnsetType | None = UNSET  # another spelling that Rust reads


class CacheEvent(msgspec.Struct, frozen=True):
    """One change of one cache. Made by :meth:`RouterEvent.of`."""

    event_id: int
    data: _Data | str
    dp_rank: int = 0


class RouterEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One change, with whose cache it is and in which tier."""

    worker_id: int
    storage_tier: str = DEVICE
    residency_domain: str | UnsetType = UNSET
    event: CacheEvent

    @classmethod
    def of(
        cls, worker_id: int, event_id: int, change: Stored | Removed | Cleared, dp_rank: int = 0
    ) -> RouterEvent:
        """An event about the worker's own cache on its device."""
        event = CacheEvent(event_id, _spell(change), dp_rank)
        return cls(worker_id=worker_id, residency_domain=WORKER, event=event)

    @property
    def event_id(self) -> int:
        """Its number in the worker's count."""
        return self.event.event_id

    @property
    def dp_rank(self) -> int:
        """Which of the worker's caches it is about."""
        return self.event.dp_rank

    @property
    def weight(self) -> int:
        """How much it counts where events are kept: itself, and each block."""
        data = self.event.data
        if isinstance(data, str):
            return 1
        stored = 0 if data.stored is UNSET else len(data.stored.blocks)
        return 1 + stored + (0 if data.removed is UNSET else len(data.removed.block_hashes))

    @property
    def change(self) -> Change:
        """What happened to the worker's own cache on its device.

        Other tiers' and shared caches' events only take their place in the count.
        """
        change = _read(self.event.data)
        ours = self.residency_domain is UNSET or self.residency_domain == WORKER
        # A clear is of all tiers, whichever is written there.
        if ours and (self.storage_tier == DEVICE or isinstance(change, Cleared)):
            return change
        return UnknownChange()


def _spell(change: Stored | Removed | Cleared) -> _Data | str:
    if isinstance(change, Stored):
        return _Data(stored=change)
    return _CLEARED if isinstance(change, Cleared) else _Data(removed=change)


def _read(data: _Data | str) -> Change:
    if isinstance(data, str):
        return Cleared() if data == _CLEARED else UnknownChange()
    if data.stored is not UNSET:
        return data.stored
    if data.removed is not UNSET:
        return data.removed
    return Cleared() if data.cleared is None else UnknownChange()


def encode_kv_events(events: list[RouterEvent]) -> bytes:
    """A payload of the topic ``kv-events``.

    Raises:
        LocalProtocolError: a hash is no 64-bit number.
    """
    return MSGPACK.encode(events)


def decode_kv_events(payload: bytes) -> list[RouterEvent]:
    """Read a payload of the topic ``kv-events``.

    Raises:
        RemoteProtocolError: it is none.
    """
    return _read_events(payload)


_read_events = MSGPACK.decoder(list[RouterEvent], "list of KV events")


class KvMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """A payload of the topic ``kv_metrics``: how full a worker is. What is None is not told."""

    worker_id: int
    dp_rank: int = 0
    active_decode_blocks: int | None = None
    active_prefill_tokens: int | None = None
    kv_used_blocks: int | None = None

    def __post_init__(self) -> None:
        counts = (self.active_decode_blocks, self.active_prefill_tokens, self.kv_used_blocks)
        if any(count is not None and count < 0 for count in counts):
            raise ValueError("a count below zero")


def encode_kv_metrics(metrics: KvMetrics) -> bytes:
    """A payload of the topic ``kv_metrics``.

    Raises:
        LocalProtocolError: a number has more than 64 bits.
    """
    return MSGPACK.encode(metrics)


def decode_kv_metrics(payload: bytes) -> KvMetrics:
    """Read a payload of the topic ``kv_metrics``.

    Raises:
        RemoteProtocolError: it is none.
    """
    return _read_metrics(payload)


_read_metrics = MSGPACK.decoder(KvMetrics, "report of KV metrics")
