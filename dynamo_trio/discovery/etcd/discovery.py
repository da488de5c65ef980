"""All records in etcd."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from dynamo_trio.context import plain_cleanup
from dynamo_trio.discovery.etcd.store import open_etcd_store
from dynamo_trio.discovery.spelling import BUCKETS
from dynamo_trio.discovery.stored import open_stored_discovery

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dynamo_trio.context import Cleanup
    from dynamo_trio.discovery.abc import Discovery
    from dynamo_trio.discovery.etcd.settings import EtcdSettings


@asynccontextmanager
async def open_etcd_discovery(
    settings: EtcdSettings, *, close_scope: Cleanup = plain_cleanup
) -> AsyncIterator[Discovery]:
    """Discovery in etcd. At the end the lease is revoked, and all registrations with it.

    ``close_scope``: as :func:`~dynamo_trio.discovery.etcd.open_etcd_store`.

    Raises:
        FileUnusable: a certificate or key cannot be used.
        StoreRefused: etcd will not have us: no or a wrong password, no permission.
        StoreUnavailable: it did not answer within ``settings.start_time``.
    """
    buckets = tuple(BUCKETS.values())
    async with open_etcd_store(settings, buckets=buckets, close_scope=close_scope) as store:
        async with open_stored_discovery(store) as discovery:
            yield discovery
