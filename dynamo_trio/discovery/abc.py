"""Discovery: how processes find each other.

Every backend (``mem``, ``file``, ``etcd``; ``kubernetes`` has its place beside them)
implements :class:`Discovery` and passes the same contract tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

import attrs

from dynamo_trio.discovery.records import Instance, ModelCard, Record

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractAsyncContextManager

R = TypeVar("R", Instance, ModelCard)


@attrs.frozen
class Put(Generic[R]):
    """A record appeared, or its content changed."""

    record: R


@attrs.frozen
class Removed(Generic[R]):
    """The record with this key is gone; ``record`` is its last known content."""

    record: R


Change = Put[R] | Removed[R]


class Watch(ABC, Generic[R]):
    """A consistent snapshot, followed by every change since, in order, none twice.

    Changes of one record in quick succession may be told as the last of them.
    """

    @property
    @abstractmethod
    def snapshot(self) -> Mapping[str, R]:
        """All records by key, as they were when the watch was opened."""

    @abstractmethod
    async def next_change(self) -> Change[R]:
        """Wait for the next change."""


class Discovery(ABC):
    """A store of records that others can watch.

    A registration belongs to the object that made it and ends with it at the
    latest. Losing the store costs no request: readers keep their last known view.
    """

    @abstractmethod
    def assign_instance_id(self) -> int:
        """The identity under which a runtime registers here: unsigned 64 bit, never 0.

        Where the store has a say in it (with etcd it is the lease) it is always the same.
        """

    @abstractmethod
    async def register(self, record: Record) -> None:
        """Publish a record; publishing the same key again replaces its content."""

    @abstractmethod
    async def unregister(self, record: Record) -> None:
        """Withdraw a record. Withdrawing what is not there is not an error."""

    @abstractmethod
    def watch(self, kind: type[R]) -> AbstractAsyncContextManager[Watch[R]]:
        """Watch all records of one kind, whoever published them."""
