"""A model card: what a frontend must know to serve a worker's model.

Fields, their order and their forms are those of Dynamo 1.5.1. Those without a default here
are those without which the real frontend rejects a card; of the others, absent and null
are kept apart, so a card that was read is written as it was. Unknown keys are ignored, as
the real frontend does.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import UNSET, UnsetType

from dynamo_trio.errors import RemoteProtocolError

_SLUG = re.compile(r"[a-z0-9_-]+")
_BLAKE3 = re.compile(r"blake3:([0-9a-f]{64})")
_SEPARATOR = " | "


class CheckedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file by place and content. ``path``: an absolute path or a URL (file, http(s), hf)."""

    path: str
    checksum: str  # "blake3:" and 64 hex digits, of the whole file
    size: int | UnsetType = UNSET  # bytes

    @property
    def digest(self) -> str:
        """The hex digits of the checksum.

        Raises:
            RemoteProtocolError: it is no BLAKE3 checksum.
        """
        match = _BLAKE3.fullmatch(self.checksum)
        if match is None:
            raise RemoteProtocolError(f"no blake3 checksum: {self.checksum[:128]!r}")
        return match[1]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where the model's configuration is."""

    hf_config_json: CheckedFile | UnsetType = UNSET


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where the tokeniser is."""

    hf_tokenizer_json: CheckedFile | UnsetType = UNSET


class PromptFormatter(msgspec.Struct, frozen=True, kw_only=True):
    """Where the tokeniser's configuration is, which often holds the chat template."""

    hf_tokenizer_config_json: CheckedFile | UnsetType = UNSET


class ChatTemplateFile(msgspec.Struct, frozen=True, kw_only=True):
    """A chat template in a file of its own. ``is_custom``: the operator named it."""

    is_custom: bool
    file: CheckedFile


class ChatTemplateInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where the chat template is, if the tokeniser's configuration has none."""

    hf_chat_template: ChatTemplateFile | UnsetType = UNSET


class GenerationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the model's defaults for generation are."""

    hf_generation_config_json: CheckedFile | UnsetType = UNSET


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker tells about its engine, for routing and limits. Lengths are tokens."""

    context_length: int | UnsetType | None = UNSET
    total_kv_blocks: int | UnsetType | None = UNSET
    max_num_seqs: int | UnsetType | None = UNSET
    max_num_batched_tokens: int | UnsetType | None = UNSET
    tool_call_parser: str | UnsetType | None = UNSET
    reasoning_parser: str | UnsetType | None = UNSET
    tool_call_arguments_format: str | UnsetType | None = UNSET
    structural_tag_mode: str | UnsetType | None = UNSET
    structural_tag_scope: str | UnsetType | None = UNSET
    structural_tag_schema: str | UnsetType | None = UNSET
    exclude_tools_when_tool_choice_none: bool | UnsetType | None = UNSET
    data_parallel_start_rank: int | UnsetType | None = UNSET
    data_parallel_size: int | UnsetType | None = UNSET
    enable_local_indexer: bool | UnsetType | None = UNSET
    kv_event_publishing_enabled: bool | UnsetType | None = UNSET
    runtime_data: dict[str, object] | UnsetType | None = UNSET
    enable_eagle: bool | UnsetType | None = UNSET


class CardJson(msgspec.Struct, frozen=True, kw_only=True):
    """The card itself."""

    display_name: str  # OpenAI's model id
    slug: str  # only a-z 0-9 - _
    source_path: str | UnsetType | None = UNSET
    model_info: ModelInfo | None  # null where the worker itself deals with text or audio
    tokenizer: TokenizerInfo | None
    prompt_formatter: PromptFormatter | UnsetType | None = UNSET
    chat_template_file: ChatTemplateInfo | UnsetType | None = UNSET
    gen_config: GenerationConfig | UnsetType | None = UNSET
    architectural_max_context_length: int | UnsetType | None = UNSET  # tokens
    context_length: int | UnsetType | None = UNSET  # tokens; 0: not told
    kv_cache_block_size: int  # tokens
    migration_limit: int
    model_type: str  # "Chat | Completions"
    model_input: str  # "Tokens" or "Text"
    worker_type: str | UnsetType | None = UNSET
    needs: list[object] | UnsetType | None = UNSET
    runtime_config: RuntimeConfig | UnsetType | None = UNSET
    media_decoder: dict[str, object] | UnsetType | None = UNSET
    media_fetcher: dict[str, object] | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        if not _SLUG.fullmatch(self.slug):
            raise ValueError("a slug has only a-z, 0-9, '-' and '_'")

    @property
    def model_types(self) -> frozenset[str]:
        """``model_type`` as a set of lower-case words: ``chat``, ``completions``."""
        return frozenset(word.strip().lower() for word in self.model_type.split("|"))


def format_model_types(kinds: frozenset[str]) -> str:
    """A card's ``model_type``, from lower-case words."""
    return _SEPARATOR.join(kind.capitalize() for kind in sorted(kinds))
