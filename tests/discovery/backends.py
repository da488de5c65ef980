"""Every discovery backend, opened for a test; and records that all of them can carry."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from dynamo_trio.discovery import (
    Discovery,
    EndpointId,
    EventChannel,
    EventSource,
    FileSettings,
    Instance,
    MemoryDiscovery,
    ModelCard,
    open_file_discovery,
)
from dynamo_trio.discovery.etcd import EtcdSettings, open_etcd_discovery
from dynamo_trio.wire.dynamo.card import CardJson, CheckedFile, ModelInfo, TokenizerInfo
from tests.discovery.etcd_server import open_etcd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

GENERATE = EndpointId("dynamo", "backend", "generate")

#: The store, and another process's view of it. A folder of the test's own is given.
Pair = tuple[Discovery, Discovery]


@asynccontextmanager
async def open_memory(_: Path) -> AsyncIterator[Pair]:
    discovery = MemoryDiscovery()
    yield discovery, discovery


@asynccontextmanager
async def open_files(folder: Path) -> AsyncIterator[Pair]:
    settings = FileSettings(folder / "store")
    async with open_file_discovery(settings) as one, open_file_discovery(settings) as other:
        yield one, other


@asynccontextmanager
async def open_etcd_pair(folder: Path) -> AsyncIterator[Pair]:
    async with open_etcd(folder / "etcd") as server:
        settings = EtcdSettings(endpoints=(server.url,))
        async with open_etcd_discovery(settings) as one, open_etcd_discovery(settings) as other:
            yield one, other


#: A new backend is added here, and the contract's tests run over it. One that needs what is
#: not installed skips when it is opened.
BACKENDS: dict[str, Callable[[Path], AbstractAsyncContextManager[Pair]]] = {
    "mem": open_memory,
    "file": open_files,
    "etcd": open_etcd_pair,
}


def instance(number: int, port: int = 9000, endpoint: EndpointId = GENERATE) -> Instance:
    address = f"127.0.0.1:{port}/{number:x}/{endpoint.name}"
    return Instance(endpoint, number, {"tcp": address})


def card(number: int, name: str = "smol") -> ModelCard:
    """A card as another process reads it: all its fields come from its JSON."""
    file = CheckedFile(path="/models/x.json", checksum="blake3:" + "0" * 64, size=1)
    content = CardJson(
        display_name=name,
        slug=name,
        model_info=ModelInfo(hf_config_json=file),
        tokenizer=TokenizerInfo(hf_tokenizer_json=file),
        context_length=4096,
        kv_cache_block_size=16,
        migration_limit=3,
        model_type="Chat | Completions",
        model_input="Tokens",
    )
    return ModelCard(
        name,
        GENERATE,
        number,
        context_length=4096,
        kv_cache_block_size=16,
        migration_limit=3,
        card_json=content,
    )


def channel(number: int, port: int = 5555) -> EventChannel:
    return EventChannel(GENERATE, "kv-events", number, f"tcp://127.0.0.1:{port}")


def source(number: int, port: int = 9000) -> EventSource:
    endpoint = EndpointId("dynamo", "backend", f"worker_kv_query_source_{number:x}")
    recovery = instance(77, port, endpoint)
    return EventSource(GENERATE, "kv-events", number, 77, dp_rank=2, recovery=recovery)
