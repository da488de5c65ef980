"""Discovery through etcd (``DYN_DISCOVERY_BACKEND=etcd``), as Dynamo 1.5.1 keeps it.

Keys are ``bucket/key``, values the same JSON as everywhere; a process has one lease, whose
id is its instance id, and all its keys hang on it. etcd is spoken to through its v3 JSON
gateway, which every etcd since 3.4 serves on its client port unless it is turned off.

Theory of operation
-------------------
:mod:`~.gateway` asks, :mod:`~.lease` keeps the lease, :mod:`~.follower` reads a bucket into
a :mod:`~.view` for all readers in this process, :mod:`~.contact` knows of outages, and
:mod:`~.store` puts them together. None of them ends because etcd is away.
"""

from dynamo_trio.discovery.etcd.discovery import open_etcd_discovery as open_etcd_discovery
from dynamo_trio.discovery.etcd.settings import EtcdSettings as EtcdSettings
from dynamo_trio.discovery.etcd.settings import parse_endpoints as parse_endpoints
from dynamo_trio.discovery.etcd.store import EtcdStore as EtcdStore
from dynamo_trio.discovery.etcd.store import open_etcd_store as open_etcd_store
