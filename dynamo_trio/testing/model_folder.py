"""A small model folder as Hugging Face lays it out, made on the spot: no download, no weights.

Dynamo's frontend and mocker accept it, and so do :func:`dynamo_trio.tokenizers.load_tokenizer`
and the simulated engine. It needs the ``hf`` extra (package ``tokenizers``).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import tokenizers

#: Ids 0, 1 and 2, in this order.
UNKNOWN, BEGIN, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

#: ChatML in plain Jinja: what Dynamo's frontend (minijinja) and ours both render.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_TEXT = """
the of and to in is you that it he was for on are as with his they at be this have from or one had
by word but not what all were we when your can said there use an each which she do how their if
will up other about out many then them these so some her would make like him into time has look
two more write go see number no way could people my than first water been call who oil its now
find long down day did get come made may part over new sound take only little work know place year
live me back give most very after thing our just name good sentence man think say great where help
through much before line right too mean old any same tell boy follow came want show also around
form three small set put end does another well large must big even such because turn here why ask
went men read need land different home us move try kind hand picture again change off play spell
air away animal house point page
"""
#: What the vocabulary knows as whole words, so that simulated answers can be read.
WORDS = tuple(_TEXT.split())


def make_model_folder(path: Path, *, context_length: int = 8192, name: str = "tiny") -> Path:
    """Make (or fill) the folder ``path`` and return it. Blocks for some milliseconds.

    The same arguments give the same bytes. Every text can be encoded: what is none of the
    known words is split, down to single bytes.

    Args:
        context_length: tokens, prompt and answer together (``max_position_embeddings``).
        name: written into ``config.json``, so that folders differ in their checksums.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer()
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    (path / "tokenizer.json").write_text(tokenizer.to_str(pretty=False))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_json(path / "config.json", _config(name, context_length, size))
    _write_json(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    _write_json(path / "tokenizer_config.json", _tokenizer_config(context_length))
    return path


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """GPT-2's kind of vocabulary: three special tokens, 256 bytes, and :data:`WORDS`."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [text for word in WORDS for text in (word, f"\u0120{word}")]  # U+0120 is the space
    texts = dict.fromkeys([UNKNOWN, BEGIN, END, *alphabet, *words])
    vocabulary = {text: number for number, text in enumerate(texts)}
    # Without merges, and ignoring them: a known word is one token, any other is its bytes.
    model = tokenizers.models.BPE(vocabulary, [], ignore_merges=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([UNKNOWN, BEGIN, END])
    return tokenizer


def _config(name: str, context_length: int, vocab_size: int) -> dict[str, object]:
    return {
        "_name_or_path": name,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 64,
        "head_dim": 16,
        "intermediate_size": 128,
        "max_position_embeddings": context_length,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": vocab_size,
    }


def _tokenizer_config(context_length: int) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "unk_token": UNKNOWN,
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
