"""What a discovery backend must be able to do: keep bytes under keys, and tell of changes.

Theory of operation
-------------------
A *store* knows nothing of records. :func:`~dynamo_trio.discovery.stored.open_stored_discovery`
makes a :class:`~dynamo_trio.discovery.abc.Discovery` of any store: it spells the records,
decides when a key that was lost may be put back, and tries again what failed. So a store
attempts each thing once, within limits of its own, and says with
:class:`~dynamo_trio.errors.StoreUnavailable` that it did not work.

Three facts are the store's own business:

* *Life.* A key lives as long as its owner does: a lease, or a file that is touched. A store
  keeps every key that it owns alive, from the end of :meth:`Store.put` until
  :meth:`Store.delete`, and deletes what it still owns when it is closed.
* *Loss.* A key that it owns and that is gone all the same (a stranger deleted it, the store
  restarted empty, this process was frozen for too long) is reported by
  :meth:`Store.wait_lost`, once, and is not owned any more until it is put again.
* *Outage.* While the store is away nothing is reported lost and nothing removed: readers
  keep their last view. Once it is back, keys of the last view that are missing count as
  removed only after a full time-to-live, as their owners need a moment to put them back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractAsyncContextManager


@attrs.frozen
class StoreKey:
    """Where a value stands: bucket (``v1/instances``) and key below it, unescaped."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{self.bucket}/{self.key}"


@attrs.frozen
class StorePut:
    """A key appeared, or has a new value."""

    key: str
    value: bytes


@attrs.frozen
class StoreRemoved:
    """A key is gone."""

    key: str


StoreChange = StorePut | StoreRemoved


class StoreWatch(ABC):
    """The keys of one bucket and what becomes of them, whoever owns them."""

    @property
    @abstractmethod
    def snapshot(self) -> Mapping[str, bytes]:
        """All values by key, as they were when the watch was opened."""

    @abstractmethod
    async def next_change(self) -> StoreChange:
        """Wait for the next change since. Of one key the changes come in order.

        Several in quick succession may be told as the last of them. An outage is waited
        out: this never raises.
        """


class Store(ABC):
    """Bytes under keys that live no longer than the process that put them there."""

    @property
    @abstractmethod
    def instance_id(self) -> int:
        """This process's identity in the store; the same for the store's whole life."""

    @abstractmethod
    async def put(self, at: StoreKey, value: bytes) -> None:
        """Write a value, and own its key from now on. A key that is owned is overwritten.

        Raises:
            StoreUnavailable: it could not be written now. The key is not owned, unless it was
                already, but its new value may have arrived.
        """

    @abstractmethod
    async def delete(self, at: StoreKey) -> None:
        """Own the key no longer, and delete it. A key that is not there is not an error.

        Raises:
            StoreUnavailable: it could not be deleted now; call it again.
        """

    @abstractmethod
    def watch(self, bucket: str) -> AbstractAsyncContextManager[StoreWatch]:
        """Watch one bucket.

        Raises:
            StoreUnavailable: there is nothing to begin with; on entering only.
        """

    @abstractmethod
    async def wait_lost(self) -> frozenset[StoreKey]:
        """Wait until keys that are owned are gone; each loss is told once, to one caller."""
