"""What a worker tells others about its model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio
from msgspec import UNSET, structs

from dynamo_trio.errors import ConfigError
from dynamo_trio.models.card_builder import make_card
from dynamo_trio.models.gguf_folder import gguf_folder
from dynamo_trio.wire.dynamo.card import RuntimeConfig, format_model_types
from dynamo_trio.worker.assembly import Model, naming_setting

if TYPE_CHECKING:
    from pathlib import Path

    from dynamo_trio.config import Config
    from dynamo_trio.discovery import ModelCard
    from dynamo_trio.engines import CoreInfo


async def read_model(config: Config, path: Path | None) -> Model:
    """The worker's model at ``path``, read in a thread.

    A stop abandons the thread: a file system that hangs must not hold it.

    Raises:
        StartupError: it cannot be used.
    """
    if path is None:
        raise ConfigError(
            "--model-path (DYN_MODEL_PATH) is not set: a worker needs the model's Hugging Face"
            " folder, or its GGUF file: frontends get its tokeniser and chat template from there"
        )
    read = partial(Model.read, config, path)
    return _roomy(config, await trio.to_thread.run_sync(read, abandon_on_cancel=True))


def _roomy(config: Config, model: Model) -> Model:
    """With all the context that the model was made for, where that costs nothing."""
    told = model.tokenizer.context_length
    if config.engine != "sim" or "context_tokens" in config.sources or not told:
        return model
    return attrs.evolve(model, context_tokens=told)


async def read_card(
    config: Config, info: CoreInfo, model: Model, instance_id: int, base_url: str | None
) -> ModelCard:
    """The card of the worker's model, made in a thread.

    Raises:
        StartupError: the folder lacks what a card needs.
    """
    make = partial(_make_card, config, info, model, instance_id, base_url)
    return _offered(
        await trio.to_thread.run_sync(make, abandon_on_cancel=True), config.endpoint_types
    )


def _make_card(
    config: Config, info: CoreInfo, model: Model, instance_id: int, base_url: str | None
) -> ModelCard:
    folder = model.path
    assert folder is not None, "read_model has seen to it"
    with naming_setting(config):
        if folder.is_file():
            folder = gguf_folder(folder, config.cache_dir, model.tokenizer)
        return make_card(
            folder,
            name=model.name,
            endpoint=config.endpoint_name,
            instance_id=instance_id,
            context_length=info.context_tokens,
            kv_cache_block_size=info.kv_block_tokens,
            runtime_config=runtime_config(info, kv_events=config.kv_events),
            base_url=base_url,
        )


def runtime_config(info: CoreInfo, *, kv_events: bool = True) -> RuntimeConfig:
    """What a card tells of an engine. ``kv_events``: what is in its cache is told, if it knows."""
    tells = kv_events and info.kv_events
    return RuntimeConfig(
        total_kv_blocks=info.kv_blocks_total,
        max_num_seqs=info.max_running,
        max_num_batched_tokens=UNSET if info.step_tokens is None else info.step_tokens,
        data_parallel_start_rank=0,
        data_parallel_size=1,
        # Dynamo's KV router listens if either is true; the second one says whom it may ask.
        enable_local_indexer=tells,
        kv_event_publishing_enabled=tells,
    )


def _offered(card: ModelCard, wanted: tuple[str, ...]) -> ModelCard:
    """The card without what ``DYN_ENDPOINT_TYPES`` leaves out."""
    kinds = card.model_type & {*wanted}
    if not kinds:
        raise ConfigError(
            f"--endpoint-types (DYN_ENDPOINT_TYPES) is {','.join(wanted)}, but the model at"
            f" {card.model_path} offers {', '.join(sorted(card.model_type))} only"
        )
    assert card.card_json is not None
    card_json = structs.replace(card.card_json, model_type=format_model_types(kinds))
    return attrs.evolve(card, model_type=kinds, card_json=card_json)
