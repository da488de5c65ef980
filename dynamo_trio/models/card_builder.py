"""From a model folder to the card by which other processes know the model.

The card carries no file, but for each its place and checksum. The place is a path (then the
folder must be seen by every frontend), or a URL of this worker's own status server.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING
from urllib.parse import quote

import attrs
from msgspec import UNSET, UnsetType, structs

from dynamo_trio.discovery import ModelCard
from dynamo_trio.errors import FileUnusable, LoadError
from dynamo_trio.models import card_files
from dynamo_trio.models.card_files import (
    CHAT_TEMPLATE,
    CONFIG,
    GENERATION_CONFIG,
    LIMITS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    digest_of,
    read_file,
)
from dynamo_trio.wire.dynamo.card import (
    CardJson,
    ChatTemplateFile,
    ChatTemplateInfo,
    CheckedFile,
    GenerationConfig,
    ModelInfo,
    PromptFormatter,
    RuntimeConfig,
    TokenizerInfo,
    format_model_types,
)

if TYPE_CHECKING:
    from pathlib import Path

    from dynamo_trio.wire.names import EndpointId

logger = logging.getLogger("dynamo_trio.models")

CHAT, COMPLETIONS = "chat", "completions"
#: Tokens in one block of the KV cache, unless the engine says otherwise (the mocker's number).
BLOCK_SIZE = 64

_REQUIRED = (CONFIG, TOKENIZER)
#: Keys of config.json without which Dynamo 1.5.1 cannot use a card (seen by leaving out each).
_DYNAMO_WANTS = ("architectures", "model_type")


@attrs.frozen
class _Source:
    """One file of the folder, read once: what is checked is what is used."""

    name: str
    content: bytes

    def json(self, folder: Path) -> dict[str, object]:
        try:
            value = json.loads(self.content)
        except (ValueError, RecursionError) as exc:
            raise LoadError(f"{folder / self.name}: not valid JSON: {exc}") from exc
        if not isinstance(value, dict):
            raise LoadError(f"{folder / self.name}: not a JSON object")
        return value

    def at(self, place: str) -> CheckedFile:
        checksum = f"blake3:{digest_of(self.content)}"
        return CheckedFile(path=place, checksum=checksum, size=len(self.content))


def make_card(
    folder: Path,
    *,
    name: str,
    endpoint: EndpointId,
    instance_id: int,
    context_length: int = 0,
    kv_cache_block_size: int = BLOCK_SIZE,
    migration_limit: int = 0,
    runtime_config: RuntimeConfig | None = None,
    base_url: str | None = None,
) -> ModelCard:
    """The card of the model in ``folder``. Blocks for some milliseconds: reads all its files.

    Chat is offered if the folder has a chat template and ``tokenizer_config.json``.

    Args:
        name: what clients call the model.
        context_length: tokens, prompt and answer together; 0: what the model was made for.
        kv_cache_block_size: tokens.
        runtime_config: what the engine tells; its ``context_length`` is filled in.
        base_url: of the status server that will serve the files, for instance
            ``http://10.0.0.7:9090``. None: the card has the folder's paths.

    Raises:
        FileUnusable: a file is missing, may not be read, or is no regular file.
        LoadError: a file is damaged or too large.
    """
    folder = folder.absolute()
    sources = _read_folder(folder)
    config = sources[CONFIG].json(folder)
    _warn_of_gaps(config, folder)
    architectural = _architectural(config)
    context = context_length or architectural or 0
    kinds = _kinds(sources, folder)
    card = ModelCard(
        name,
        endpoint,
        instance_id,
        model_path=folder,
        context_length=context,
        kv_cache_block_size=kv_cache_block_size,
        model_type=kinds,
        migration_limit=migration_limit,
    )
    slug = slug_of(card)
    base = str(folder) if base_url is None else f"{base_url}{route_of(endpoint, slug)}"
    files = {n: source.at(f"{base}/{n}") for n, source in sources.items()}
    runtime = structs.replace(runtime_config or RuntimeConfig(), context_length=context)
    return attrs.evolve(card, card_json=_card_json(card, slug, files, architectural, runtime))


def route_of(endpoint: EndpointId, slug: str) -> str:
    """The path of the status server below which the files of a card are."""
    parts = (endpoint.namespace, endpoint.component, endpoint.name, slug)
    return f"/v1/metadata/{'/'.join(quote(part, safe='') for part in parts)}/_base"


def served_files(card: ModelCard) -> dict[str, Path]:
    """What a status server gives out for a card: exactly its files, by their path in URLs."""
    if card.card_json is None or card.model_path is None:
        return {}
    base = route_of(card.endpoint, card.card_json.slug)
    files = card_files.files_of(card.card_json)
    return {f"{base}/{file.name}": card.model_path / file.name for file in files}


def _read_folder(folder: Path) -> dict[str, _Source]:
    if not folder.is_dir():
        what = "not a model folder" if folder.exists() else "no such folder"
        raise FileUnusable(f"{folder}: {what}; a card needs {' and '.join(_REQUIRED)}")
    found = {}
    for name, limit in LIMITS.items():
        try:
            found[name] = _Source(name, read_file(folder / name, limit))
        except FileUnusable as exc:
            if name in _REQUIRED or not card_files.is_missing(exc):
                raise
    return found


def _warn_of_gaps(config: dict[str, object], folder: Path) -> None:
    missing = [name for name in _DYNAMO_WANTS if name not in config]
    if missing:
        logger.warning(
            "%s has no %s: Dynamo's own frontend will not offer this model",
            *(folder / CONFIG, " and no ".join(missing)),
        )


def _architectural(config: dict[str, object]) -> int | None:
    """The context length that the model was made for, in tokens."""
    value = config.get("max_position_embeddings")
    return value if isinstance(value, int) and 0 < value < 2**32 else None


def _kinds(sources: dict[str, _Source], folder: Path) -> frozenset[str]:
    if TOKENIZER_CONFIG in sources:
        config = sources[TOKENIZER_CONFIG].json(folder)
        if CHAT_TEMPLATE in sources or config.get("chat_template"):
            return frozenset({CHAT, COMPLETIONS})
    logger.warning(
        "%s has no chat template, or no %s: only completions are offered", folder, TOKENIZER_CONFIG
    )
    return frozenset({COMPLETIONS})


def slug_of(card: ModelCard) -> str:
    """The slug that goes into the card; never empty."""
    # A name without one Latin letter or digit leaves nothing.
    return card.slug or f"model-{digest_of(card.name.encode('utf-8', 'replace'))[:12]}"


def _card_json(
    card: ModelCard,
    slug: str,
    files: dict[str, CheckedFile],
    architectural: int | None,
    runtime: RuntimeConfig,
) -> CardJson:
    return CardJson(
        display_name=card.name,
        slug=slug,
        model_info=ModelInfo(hf_config_json=files[CONFIG]),
        tokenizer=TokenizerInfo(hf_tokenizer_json=files[TOKENIZER]),
        prompt_formatter=_formatter(files.get(TOKENIZER_CONFIG)),
        chat_template_file=_template(files.get(CHAT_TEMPLATE)),
        gen_config=_generation(files.get(GENERATION_CONFIG)),
        architectural_max_context_length=UNSET if architectural is None else architectural,
        context_length=card.context_length,
        kv_cache_block_size=card.kv_cache_block_size,
        migration_limit=card.migration_limit,
        model_type=format_model_types(card.model_type),
        model_input="Tokens",
        worker_type="aggregated",
        needs=[],
        runtime_config=runtime,
    )


# A part of which the folder has no file is left out of the card.


def _formatter(file: CheckedFile | None) -> PromptFormatter | UnsetType:
    return UNSET if file is None else PromptFormatter(hf_tokenizer_config_json=file)


def _template(file: CheckedFile | None) -> ChatTemplateInfo | UnsetType:
    if file is None:
        return UNSET
    return ChatTemplateInfo(hf_chat_template=ChatTemplateFile(is_custom=False, file=file))


def _generation(file: CheckedFile | None) -> GenerationConfig | UnsetType:
    return UNSET if file is None else GenerationConfig(hf_generation_config_json=file)
