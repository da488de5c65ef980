"""The question for what a worker's KV cache holds, and its answers.

A worker answers it at its endpoint ``worker_kv_query_source_{publisher id in hex}``: one
request, one item, without Dynamo's ``Annotated`` envelope. The KV router takes no live event
of a worker before it has an answer, and asks again for what it missed.

``start_event_id`` None asks for everything (:class:`TreeDump`). Otherwise the answer is
:class:`Events` from that id to the newest, whatever ``end_event_id`` says, or a dump if the
worker does not remember that far back. Answers are a map of one entry, named like the class
here (Rust's spelling of a variant).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from dynamo_trio.errors import RemoteProtocolError
from dynamo_trio.wire.dynamo.codec import per_codec
from dynamo_trio.wire.dynamo.keys import format_id
from dynamo_trio.wire.dynamo.kv_events import WORKER, RouterEvent

if TYPE_CHECKING:
    from dynamo_trio.wire.dynamo.codec import Codec

_RECOVERY = "recovery"
_ALL = "all"


def query_endpoint(publisher_id: int) -> str:
    """The name of the endpoint at which the publisher of these events is asked.

    Raises:
        LocalProtocolError: the id does not fit into 64 bits.
    """
    return f"worker_kv_query_source_{format_id(publisher_id)}"


# --- the question ------------------------------------------------------------------------


class _OtherKind(msgspec.Struct, frozen=True):
    """A question to Dynamo's state agents; nothing of it is read."""


class KvQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A question. Ids are those of the events, both ends included."""

    worker_id: int
    dp_rank: int
    start_event_id: int | None = None
    end_event_id: int | None = None
    #: Whether the asker knows :class:`TreeDumpFailed`.
    supports_tree_dump_failed: bool = False
    kind: str | _OtherKind = _RECOVERY

    @property
    def is_recovery(self) -> bool:
        """Whether it asks for the cache; other questions are not answered here."""
        return self.kind == _RECOVERY


def decode_query(codec: Codec, body: bytes) -> KvQuery:
    """Read the body of a request.

    Raises:
        RemoteProtocolError: it is no question.
    """
    return _read_query[codec.name](body)


_read_query = per_codec(lambda codec: codec.decoder(KvQuery, "KV query"))


# --- the answers -------------------------------------------------------------------------


class _Domain(msgspec.Struct, frozen=True):
    domain: str


class TreeDump(msgspec.Struct, frozen=True, kw_only=True):
    """All that the cache held after ``last_event_id``. The ids of ``events`` mean nothing."""

    events: tuple[RouterEvent, ...]
    last_event_id: int
    reset_scope: str | _Domain = _ALL

    @property
    def is_whole(self) -> bool:
        """Whether it replaces what was known of the worker's own cache."""
        return self.reset_scope in (_ALL, _Domain(WORKER))


class Events(msgspec.Struct, frozen=True, kw_only=True):
    """The changes from the one asked for to ``last_event_id``. None before a clear need be."""

    events: tuple[RouterEvent, ...]
    last_event_id: int


class TreeDumpFailed(msgspec.Struct, frozen=True, kw_only=True):
    """There is a cache, and no dump of it could be made."""

    last_event_id: int
    message: str


class TooNew(msgspec.Struct, frozen=True, kw_only=True):
    """The worker has not seen that many changes."""

    requested_start: int | None
    requested_end: int | None
    newest_available: int


class InvalidRange(msgspec.Struct, frozen=True, kw_only=True):
    """The end was before the start."""

    start_id: int
    end_id: int


class Error(msgspec.Struct, frozen=True):
    """The question could not be answered."""

    message: str


Answer = TreeDump | Events | TreeDumpFailed | TooNew | InvalidRange | Error


class _Variants(msgspec.Struct, frozen=True, rename="pascal"):
    tree_dump: TreeDump | UnsetType = UNSET
    events: Events | UnsetType = UNSET
    tree_dump_failed: TreeDumpFailed | UnsetType = UNSET
    too_new: TooNew | UnsetType = UNSET
    invalid_range: InvalidRange | UnsetType = UNSET
    error: str | UnsetType = UNSET


def encode_answer(codec: Codec, answer: Answer) -> bytes:
    """The answer as an item.

    Raises:
        LocalProtocolError: a number has more than 64 bits.
    """
    return codec.encode(spell_answer(answer))


def spell_answer(answer: Answer) -> dict[str, object]:
    """The answer as a value that any codec encodes."""
    content = answer.message if isinstance(answer, Error) else answer
    return {type(answer).__name__: content}


def decode_answer(codec: Codec, item: bytes) -> Answer:
    """Read an item.

    Raises:
        RemoteProtocolError: it is no answer, or one to a question that is not asked here.
    """
    return _the_one(_read_answer[codec.name](item))


def _the_one(variants: _Variants) -> Answer:
    found = [value for value in msgspec.structs.astuple(variants) if value is not UNSET]
    if len(found) != 1:
        raise RemoteProtocolError(f"{len(found)} known answers to a KV query where 1 belongs")
    answer: Answer | str = found[0]
    return Error(answer) if isinstance(answer, str) else answer


_read_answer = per_codec(lambda codec: codec.decoder(_Variants, "answer to a KV query"))
