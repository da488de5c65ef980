"""What a process publishes about itself: instances, model cards, and where its events are.

The fields are those of Dynamo 1.5.1's ``Endpoint``, ``Model``, ``EventChannel`` and
``EventSource`` records; how a backend spells them (keys, JSON, escaping) is that backend's
business.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.wire.dynamo.codec import MSGPACK, Codec
from dynamo_trio.wire.dynamo.keys import EventKey

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dynamo_trio.wire.dynamo.card import CardJson
    from dynamo_trio.wire.names import EndpointId

_NOT_SLUG = re.compile(r"[^a-z0-9_-]")


def random_instance_id() -> int:
    """An id for a process where the store does not give one: 64 random bits, never 0."""
    return secrets.randbits(64) or 1


@attrs.frozen
class Instance:
    """One process that serves one endpoint, and the planes on which it can be reached."""

    endpoint: EndpointId
    instance_id: int  # unsigned 64 bit; one per process life
    #: plane name -> address as that plane reads it, for instance ``{"mem": "…/generate"}``
    transports: Mapping[str, str]
    #: In which the instance wants its requests (``DYN_REQUEST_PLANE_CODEC``).
    codec: Codec = MSGPACK

    @property
    def key(self) -> str:
        """Unique among instances: endpoint path and instance id in lower-case hex."""
        return f"{self.endpoint.path}/{self.instance_id:x}"


@attrs.frozen
class ModelCard:
    """A model that an instance serves. The frontend builds its tokeniser from it."""

    name: str  # OpenAI's model id
    endpoint: EndpointId
    instance_id: int
    model_path: Path | None = None  # tokeniser and template; None: the built-in byte tokeniser
    context_length: int = 0  # tokens for prompt and answer together
    kv_cache_block_size: int = 0  # tokens
    model_type: frozenset[str] = frozenset({"chat", "completions"})
    migration_limit: int = 0
    #: What other processes read; None: the card is for this process alone.
    card_json: CardJson | None = None

    @property
    def key(self) -> str:
        """Unique among cards: the key of the instance that published it."""
        return f"{self.endpoint.path}/{self.instance_id:x}"

    @property
    def slug(self) -> str:
        """The name with only ``a-z 0-9 - _``, as Dynamo makes it; empty if that leaves nothing."""
        return _NOT_SLUG.sub("_", self.name.lower()).lstrip("_")


@attrs.frozen
class EventChannel:
    """Where the events of one publisher about one endpoint can be subscribed to, by topic."""

    endpoint: EndpointId
    topic: str
    publisher_id: int
    address: str  # of the ZeroMQ PUB socket, as ``tcp://HOST:PORT``

    @property
    def key(self) -> str:
        """Unique among channels: endpoint, topic and publisher."""
        return str(EventKey(self.endpoint, self.topic, self.publisher_id))


@attrs.frozen
class EventSource:
    """Whose KV cache a publisher's events are about, and where to ask for what was missed."""

    endpoint: EndpointId
    topic: str
    publisher_id: int
    worker_id: int  # instance id of the worker
    dp_rank: int = 0  # data-parallel rank within the worker
    #: Answers the query for what the cache holds; None: nobody does.
    recovery: Instance | None = None

    @property
    def key(self) -> str:
        """Unique among sources: endpoint, topic and publisher."""
        return str(EventKey(self.endpoint, self.topic, self.publisher_id))


Record = Instance | ModelCard | EventChannel | EventSource
