"""Instances and model cards in etcd."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from dynamo_trio.discovery.etcd.store import open_etcd_store
from dynamo_trio.discovery.records import Instance, ModelCard
from dynamo_trio.discovery.spelling import bucket_of
from dynamo_trio.discovery.stored import open_stored_discovery

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dynamo_trio.discovery.abc import Discovery
    from dynamo_trio.discovery.etcd.settings import EtcdSettings

BUCKETS = (bucket_of(Instance), bucket_of(ModelCard))


@asynccontextmanager
async def open_etcd_discovery(settings: EtcdSettings) -> AsyncIterator[Discovery]:
    """Discovery in etcd. At the end the lease is revoked, and all registrations with it.

    Raises:
        FileUnusable: a certificate or key cannot be used.
        StoreRefused: etcd will not have us: no or a wrong password, no permission.
        StoreUnavailable: it did not answer within ``settings.start_time``.
    """
    async with open_etcd_store(settings, buckets=BUCKETS) as store:
        async with open_stored_discovery(store) as discovery:
            yield discovery
