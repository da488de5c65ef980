"""Discovery: how processes find each other.

Every backend (``mem``, ``file``, ``etcd``; ``kubernetes`` has its place beside them)
implements :class:`Discovery` and passes the same contract tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import attrs
import trio

from dynamo_trio.discovery.records import (
    EventChannel,
    EventSource,
    Instance,
    ModelCard,
    Record,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractAsyncContextManager

R = TypeVar("R", Instance, ModelCard, EventChannel, EventSource)


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

    #: May records come from other processes, and be seen there?
    shared: ClassVar[bool] = True

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
        """Withdraw a record. Withdrawing what is not there is not an error.

        Nor is a store that is away: it is tried on, until it works or this object is closed.
        :meth:`wait_withdrawn` tells.
        """

    @property
    def has_withdrawn(self) -> bool:
        """Does nothing stand in the store any more that was unregistered, as far as is known?"""
        return True

    async def wait_withdrawn(self) -> None:
        """Wait until nothing stands in the store any more that was unregistered.

        Raises:
            StoreUnavailable: the last attempt failed, so something may still stand there.
        """
        await trio.lowlevel.checkpoint()

    @abstractmethod
    def watch(self, kind: type[R]) -> AbstractAsyncContextManager[Watch[R]]:
        """Watch all records of one kind, whoever published them."""
