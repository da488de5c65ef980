"""The names of KV-cache blocks, as Dynamo's KV router computes them.

Theory of operation
-------------------
A prompt is cut into blocks of ``kv_cache_block_size`` tokens; what is left over at its end
has no name. Each block has two:

* the *tokens hash* names its tokens alone: XXH3 (64 bits, seed 1337) of their ids as u32
  little-endian;
* the *block hash* names the whole prefix that ends with it: XXH3 of the block hash before
  it and its own tokens hash, both as u64 little-endian. For the first block both are equal.

The router matches by tokens hashes, from the first block on; the block hash is any number
that the engine chooses, and this one is what the real mocker uses. A LoRA adapter or a cache
namespace would give another seed; neither is offered here.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from dynamo_trio.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SEED = 1337

_TOKEN_BYTES = 4
_PAIR = struct.Struct("<QQ")


def tokens_hash(tokens: Sequence[int]) -> int:
    """The tokens hash of one block.

    Raises:
        InvalidArgument: a token id is no unsigned 32-bit number.
    """
    return xxh3_64_intdigest(_spell(tokens), seed=SEED)


def tokens_hashes(tokens: Sequence[int], block_size: int) -> list[int]:
    """The tokens hashes of the full blocks of a prompt, each ``block_size`` tokens.

    Raises:
        InvalidArgument: a token id is no unsigned 32-bit number.
    """
    raw = _spell(tokens[: len(tokens) // block_size * block_size])
    step = block_size * _TOKEN_BYTES
    return [xxh3_64_intdigest(raw[at : at + step], seed=SEED) for at in range(0, len(raw), step)]


def chain_hash(parent: int | None, tokens_hash: int) -> int:
    """The block hash of a block behind the one named ``parent``; None: the first of a prompt."""
    if parent is None:
        return tokens_hash
    return xxh3_64_intdigest(_PAIR.pack(parent, tokens_hash), seed=SEED)


def chain_hashes(tokens_hashes: Iterable[int], parent: int | None = None) -> list[int]:
    """The block hashes of consecutive blocks behind the one named ``parent``."""
    chained = []
    for tokens_hash in tokens_hashes:
        parent = chain_hash(parent, tokens_hash)
        chained.append(parent)
    return chained


def _spell(tokens: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error:
        raise InvalidArgument("a token id is no unsigned 32-bit number") from None
