"""How a llama.cpp request draws its tokens."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_trio.engines.cyllama import Api, Context, Sampler
    from dynamo_trio.engines.protocol import Request

#: This seed would mean "draw one" to llama.cpp; seeds are taken modulo it.
_RANDOM_SEED = 2**32 - 1

#: Below this temperature the division of the logits overflows a 32-bit float.
GREEDY = 1e-5


class Drawer:
    """The sampler chain of one request: temperature, then top-k, then top-p, then a draw.

    Tokens that would end the answer are taken out before the draw while it must not
    end: for the first ``min_tokens`` tokens, and always with ``ignore_eos``. Without a
    seed each request draws its own.
    """

    def __init__(self, api: Api, request: Request, vocab_size: int, eog: frozenset[int]) -> None:
        self._api = api
        self._request = request
        self._vocab_size = vocab_size
        seed = secrets.randbits(32) if request.seed is None else request.seed
        self._seed = seed % _RANDOM_SEED
        always = eog if request.ignore_eos else frozenset[int]()
        self._late = self._chain(always)
        # Invariant: None if min_tokens asks for nothing more, and once it is reached.
        self._early: Sampler | None = None
        if request.min_tokens > 0:
            self._early = self._chain(eog | request.stop_token_ids)

    def draw(self, context: Context, index: int, generated: int) -> int:
        """The next token, from the logits at ``index`` of the batch decoded last."""
        if self._early is not None and generated >= self._request.min_tokens:
            self._early.close()
            self._early = None
        return (self._early or self._late).sample(context, index)

    def close(self) -> None:
        """Free the chains."""
        self._late.close()
        if self._early is not None:
            self._early.close()

    def _chain(self, forbidden: frozenset[int]) -> Sampler:
        request = self._request
        chain = self._api.LlamaSampler(self._api.LlamaSamplerChainParams())
        if forbidden:
            bias = [(token_id, -math.inf) for token_id in sorted(forbidden)]
            chain.add_logit_bias(self._vocab_size, bias)
        if request.temperature < GREEDY:
            chain.add_greedy()
            return chain
        chain.add_temp(request.temperature)
        if request.top_k is not None and request.top_k > 0:
            chain.add_top_k(request.top_k)
        if request.top_p < 1:
            chain.add_top_p(request.top_p, 1)
        chain.add_dist(self._seed)
        return chain
