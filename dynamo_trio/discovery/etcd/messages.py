"""What is asked of etcd's v3 JSON gateway, and what it answers. Pure data.

The gateway writes bytes as base64 and 64-bit numbers as strings, and leaves out what is
zero, empty or false; so every field here has that as its default.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Generic, TypeVar

import attrs
import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

A = TypeVar("A", bound=msgspec.Struct)


@attrs.frozen
class Call(Generic[A]):
    """One request: where it goes, what it says, and how its answer (or line of it) is read."""

    path: str
    body: bytes = attrs.field(repr=False)  # may hold a password
    answer: type[A]
    #: The answer may be as large as a bucket.
    is_large: bool = False
    #: etcd asks who one is.
    needs_user: bool = True


# --- answers -----------------------------------------------------------------------------


class Header(msgspec.Struct, frozen=True):
    revision: int = 0


class KeyValue(msgspec.Struct, frozen=True):
    key: bytes = b""
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0


class Lease(msgspec.Struct, frozen=True):
    """Of a grant, or a look at a lease: TTL is -1 for one that is not there."""

    id: int = msgspec.field(default=0, name="ID")
    ttl: int = msgspec.field(default=0, name="TTL")


class KeptAlive(msgspec.Struct, frozen=True):
    """A TTL of 0 says that there is no such lease."""

    result: Lease | None = None


class Range(msgspec.Struct, frozen=True):
    header: Header = Header()
    kvs: tuple[KeyValue, ...] = ()


class Written(msgspec.Struct, frozen=True):
    header: Header = Header()
    deleted: int = 0


class TxnBranch(msgspec.Struct, frozen=True):
    response_range: Range = Range()


class Created(msgspec.Struct, frozen=True):
    """Of the transaction that writes a key unless it is there; else it says what is there."""

    header: Header = Header()
    succeeded: bool = False
    responses: tuple[TxnBranch, ...] = ()

    @property
    def existing(self) -> KeyValue | None:
        return next((kv for branch in self.responses for kv in branch.response_range.kvs), None)


class Looked(msgspec.Struct, frozen=True):
    """Of the transaction that looks at some keys, without their values."""

    responses: tuple[TxnBranch, ...] = ()

    @property
    def found(self) -> dict[bytes, KeyValue]:
        return {kv.key: kv for branch in self.responses for kv in branch.response_range.kvs}


class Token(msgspec.Struct, frozen=True):
    token: str = ""


class Failure(msgspec.Struct, frozen=True):
    """An error, alone or in a stream. Versions of etcd differ in the names."""

    message: str = ""
    error: str = ""
    code: int = 0
    grpc_code: int = 0


class Event(msgspec.Struct, frozen=True):
    kv: KeyValue
    type: str = "PUT"


class WatchNews(msgspec.Struct, frozen=True):
    header: Header = Header()
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: tuple[Event, ...] = ()


class WatchLine(msgspec.Struct, frozen=True):
    result: WatchNews | None = None
    error: Failure | None = None


# --- requests ----------------------------------------------------------------------------


def _encode(body: object) -> bytes:
    return msgspec.json.encode(body)  # which writes bytes as base64


def grant(lease: int, ttl: float) -> Call[Lease]:
    """A lease; with 0 etcd chooses its id. etcd knows whole seconds only."""
    body = {"ID": str(lease), "TTL": str(math.ceil(ttl))}
    return Call("/v3/lease/grant", _encode(body), Lease)


def keep_alive(lease: int) -> Call[KeptAlive]:
    body = _encode({"ID": str(lease)})
    return Call("/v3/lease/keepalive", body, KeptAlive, needs_user=False)


def look_at(lease: int) -> Call[Lease]:
    """Is it there?"""
    return Call("/v3/lease/timetolive", _encode({"ID": str(lease)}), Lease)


def revoke(lease: int) -> Call[Written]:
    return Call("/v3/lease/revoke", _encode({"ID": str(lease)}), Written)


def _put(key: bytes, value: bytes, lease: int) -> dict[str, object]:
    return {"key": key, "value": value, "lease": str(lease)}


def put(key: bytes, value: bytes, lease: int) -> Call[Written]:
    return Call("/v3/kv/put", _encode(_put(key, value, lease)), Written)


def create(key: bytes, value: bytes, lease: int) -> Call[Created]:
    """Write the key only if it is not there."""
    body = {
        "compare": [{"key": key, "target": "VERSION", "version": "0"}],
        "success": [{"requestPut": _put(key, value, lease)}],
        "failure": [{"requestRange": {"key": key}}],
    }
    return Call("/v3/kv/txn", _encode(body), Created)


def look_at_keys(keys: Iterable[bytes]) -> Call[Looked]:
    """On which leases do they hang, and when were they last written? At most 128 keys."""
    looks = [{"requestRange": {"key": key, "keys_only": True}} for key in keys]
    return Call("/v3/kv/txn", _encode({"success": looks}), Looked)


def delete(key: bytes) -> Call[Written]:
    return Call("/v3/kv/deleterange", _encode({"key": key}), Written)


def _prefix(prefix: bytes) -> dict[str, object]:
    """All keys below a prefix, which ends with a slash."""
    return {"key": prefix, "range_end": prefix[:-1] + bytes([prefix[-1] + 1])}


def everything(prefix: bytes) -> Call[Range]:
    return Call("/v3/kv/range", _encode(_prefix(prefix)), Range, is_large=True)


def may_read(prefix: bytes) -> Call[Range]:
    """A question that costs nothing, and is refused if :func:`everything` would be."""
    return Call("/v3/kv/range", _encode({**_prefix(prefix), "count_only": True}), Range)


def watch(prefix: bytes, revision: int) -> Call[WatchLine]:
    """Changes from a revision on, large ones in several lines."""
    create_request = {**_prefix(prefix), "start_revision": str(revision), "fragment": True}
    return Call("/v3/watch", _encode({"create_request": create_request}), WatchLine)


def authenticate(name: str, password: str) -> Call[Token]:
    body = {"name": name, "password": password}
    return Call("/v3/auth/authenticate", _encode(body), Token)
