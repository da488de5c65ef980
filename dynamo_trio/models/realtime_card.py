"""The card of a model that is spoken to over a WebSocket: its worker gets the events as they are.

NVIDIA's frontend serves it at ``/v1/realtime``. It reads no file of such a model, so the card
names none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from dynamo_trio.discovery import ModelCard
from dynamo_trio.models.card_builder import slug_of
from dynamo_trio.wire.dynamo.card import CardJson, RuntimeConfig, format_model_types

if TYPE_CHECKING:
    from dynamo_trio.discovery import EndpointId

REALTIME = frozenset({"realtime"})


def make_realtime_card(*, name: str, endpoint: EndpointId, instance_id: int) -> ModelCard:
    """The card for an endpoint that is served with
    :meth:`~dynamo_trio.runtime.Endpoint.serving_bidirectional`.

    Its handler gets the client's events of OpenAI's Realtime API, and yields the server's.
    """
    card = ModelCard(name, endpoint, instance_id, model_type=REALTIME)
    card_json = CardJson(
        display_name=name,
        slug=slug_of(card),
        model_info=None,
        tokenizer=None,
        context_length=0,
        kv_cache_block_size=0,
        migration_limit=0,
        model_type=format_model_types(REALTIME),
        model_input="Text",
        worker_type="aggregated",
        needs=[],
        runtime_config=RuntimeConfig(),
    )
    return attrs.evolve(card, card_json=card_json)
