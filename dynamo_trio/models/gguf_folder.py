"""A Hugging Face folder for a model that is a GGUF file, so that it can have a card.

Frontends turn text into tokens with ``tokenizer.json``, and a GGUF file has no such thing:
only the tokens, the merges, and the *name* of how a text is cut before merging, whose rules
are written in llama.cpp. Those of the common byte-level families are written here too. What
comes out is compared with llama.cpp's own tokeniser on texts that tell the families apart,
and refused if it differs in one token: a wrong tokeniser would make nonsense of every answer.
"""

from __future__ import annotations

import json
import mmap
from typing import TYPE_CHECKING

from dynamo_trio.errors import FileUnusable, LoadError
from dynamo_trio.models.card_files import (
    CHAT_TEMPLATE,
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    CardFile,
    digest_of,
)
from dynamo_trio.models.card_store import CardStore
from dynamo_trio.tokenizers import load_tokenizer
from dynamo_trio.wire.gguf_values import Value, read_values

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dynamo_trio.tokenizers import Tokenizer

_GGML = "tokenizer.ggml."
#: llama.cpp's kinds of tokens that are looked for in every text.
_CONTROL, _USER_DEFINED = 3, 4

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2 = {**_BYTES, "use_regex": True}
_DIGIT = {"type": "Digits", "individual_digits": True}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _cut(pattern: str) -> dict[str, object]:
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    return _sequence({**split, "pattern": {"Regex": pattern}}, _BYTES)


def _sequence(*steps: Mapping[str, object]) -> dict[str, object]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
#: llama.cpp's ``tokenizer.ggml.pre`` -> how a text is cut, in the words of tokenizer.json.
_CUTS: dict[str, Mapping[str, object]] = {
    "gpt-2": _GPT2,
    "smollm": _sequence(_DIGIT, _GPT2),
    "qwen2": _cut(_WORDS % ""),
    **dict.fromkeys(_LLAMA3, _cut(_WORDS % "{1,3}")),
}

#: Texts on which tokenisers of different families differ.
_PROBES = (
    "The quick brown fox doesn't jump over 1234567 lazy dogs, it's 3.14 o'CLOCK!",
    "  two  spaces\n\n\n\tand\r\n lines \n  \t x",
    "Grüße 😀👨\u200d👩\u200d👧 好的 مرحبا हिन्दी ١٢٣ x² \u2028\ufeffe\u0301",
    "def f(x):\n    return {'a': [1, 2]}  # <|im_start|>user\nhi<|im_end|>\n<|endoftext|><s>",
    "",
)


def gguf_folder(gguf: Path, cache_dir: Path, tokenizer: Tokenizer) -> Path:
    """The folder that stands for a GGUF file in a card. Blocks for a second.

    Args:
        cache_dir: the folder is kept below it.
        tokenizer: the file's own, by llama.cpp.

    Raises:
        FileUnusable: the file cannot be read, or the cache folder cannot be used.
        LoadError: the vocabulary is of a kind that cannot be written down as tokenizer.json.
    """
    store = CardStore(cache_dir)
    files = []
    for name, content in _contents(gguf, tokenizer).items():
        file = CardFile(name, "", digest_of(content), len(content))
        if not store.holds(file):
            store.put(file.digest, content)
        files.append(file)
    folder = store.link(files)
    _compare(load_tokenizer(folder), tokenizer, gguf)
    return folder


def _contents(gguf: Path, tokenizer: Tokenizer) -> dict[str, bytes]:
    values = _read(gguf)
    try:
        documents = {
            CONFIG: _config(values, tokenizer),
            TOKENIZER: _tokenizer(values, tokenizer),
            TOKENIZER_CONFIG: _tokenizer_config(tokenizer),
            GENERATION_CONFIG: _ends(tokenizer) | {"eos_token_id": list(tokenizer.eos_token_ids)},
        }
    except (TypeError, ValueError, KeyError) as exc:
        raise LoadError(
            f"{gguf}: its vocabulary cannot be written as tokenizer.json: {exc}"
        ) from exc
    contents = {name: json.dumps(value).encode() for name, value in documents.items()}
    if tokenizer.chat_template is not None:
        contents[CHAT_TEMPLATE] = tokenizer.chat_template.encode("utf-8", "replace")
    return contents


def _read(gguf: Path) -> dict[str, Value]:
    try:
        with gguf.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            with memoryview(data) as view:
                return read_values(view, lambda key: not key.endswith(".scores"))
    except OSError as exc:
        raise FileUnusable(f"{gguf}: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise LoadError(f"{gguf}: {exc}") from exc


def _tokenizer(values: Mapping[str, Value], tokenizer: Tokenizer) -> dict[str, object]:
    kind, pre = values.get(f"{_GGML}model"), values.get(f"{_GGML}pre", "gpt-2")
    if kind != "gpt2" or pre not in _CUTS:
        known = ", ".join(_CUTS)
        raise ValueError(f"it is {kind!r} with {pre!r}; known are 'gpt2' with {known}")
    tokens, kinds = _list(values, "tokens"), _list(values, "token_type")
    vocabulary = {str(text): number for number, text in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError("a token is in it twice")
    is_llama3 = pre in _LLAMA3
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(number, str(text), kind)
            for number, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": _CUTS[str(pre)],
        "post_processor": _begin(tokenizer)
        if values.get(f"{_GGML}add_bos_token", is_llama3)
        else None,
        "decoder": _GPT2,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": is_llama3,
            "vocab": vocabulary,
            "merges": [_merge(str(text)) for text in _list(values, "merges")],
        },
    }


def _list(values: Mapping[str, Value], name: str) -> list[int | float | bool | str]:
    value = values.get(f"{_GGML}{name}")
    if not isinstance(value, list):
        raise ValueError(f"it has no {_GGML}{name}")
    return value


def _merge(text: str) -> list[str]:
    pair = text.split(" ")
    if len(pair) != 2:
        raise ValueError(f"{text[:100]!r} is no merge")
    return pair


def _added(number: int, text: str, kind: object) -> dict[str, object]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **plain, "special": kind == _CONTROL}


def _begin(tokenizer: Tokenizer) -> dict[str, object]:
    """The model wants its first token in front of a text."""
    first = {"SpecialToken": {"id": tokenizer.bos_token, "type_id": 0}}
    one, two = ({"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB"))
    ids = {"id": tokenizer.bos_token, "ids": [tokenizer.bos_token_id]}
    return {
        "type": "TemplateProcessing",
        "single": [first, one],
        "pair": [first, one, two],
        "special_tokens": {tokenizer.bos_token: {**ids, "tokens": [tokenizer.bos_token]}},
    }


def _ends(tokenizer: Tokenizer) -> dict[str, object]:
    return {} if tokenizer.bos_token_id is None else {"bos_token_id": tokenizer.bos_token_id}


def _config(values: Mapping[str, Value], tokenizer: Tokenizer) -> dict[str, object]:
    """Only what is asked of it: no engine ever loads weights by this file."""
    architecture = str(values.get("general.architecture", "llama"))
    numbers = {
        "max_position_embeddings": "context_length",
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
    }
    found = {name: values.get(f"{architecture}.{key}") for name, key in numbers.items()}
    return {
        "architectures": [f"{architecture.capitalize()}ForCausalLM"],  # Dynamo wants one
        "model_type": architecture,
        "vocab_size": tokenizer.vocab_size,
        **{name: value for name, value in found.items() if isinstance(value, int)},
        **_ends(tokenizer),
        "eos_token_id": list(tokenizer.eos_token_ids),
    }


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, object]:
    texts = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: text for name, text in texts.items() if text},
    }


def _compare(made: Tokenizer, own: Tokenizer, gguf: Path) -> None:
    for probe in _PROBES:
        for special in (False, True):
            if made.encode(probe, add_special=special) != own.encode(probe, add_special=special):
                raise LoadError(
                    f"{gguf}: its tokeniser cannot be published: as tokenizer.json it gives other"
                    f" tokens for {probe[:40]!r}; name the model's Hugging Face folder instead"
                )
    if made.eos_token_ids != own.eos_token_ids:
        raise LoadError(f"{gguf}: its tokens that end an answer cannot be published")
