"""How many tokens of prompts an engine still has to compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from dynamo_trio.engines import InlineHost, Request, open_engine
from dynamo_trio.engines.sim import SimCore, SimSettings
from dynamo_trio.kv.loads import load_of

if TYPE_CHECKING:
    from trio.testing import MockClock


async def test_prompts_count_until_their_first_token_or_their_end(
    autojump_clock: MockClock,
) -> None:
    settings = SimSettings(max_running=1, prefill_ms=1000.0, itl_ms=1000.0, virtual=True)
    async with open_engine(SimCore(settings), host=InlineHost()) as engine:
        assert engine.prompt_tokens == 0
        first = Request(request_id="first", token_ids=(7,) * 20, max_tokens=4)
        second = Request(request_id="second", token_ids=(7,) * 30, max_tokens=4)
        third = Request(request_id="third", token_ids=(7,) * 50, max_tokens=4)
        async with engine.open(first) as deltas, engine.open(second) as others:
            assert engine.prompt_tokens == 50
            await deltas.__anext__()
            assert engine.prompt_tokens == 30, "it waits, and its prompt is not computed"
            assert load_of(engine, 7).active_prefill_tokens == 30
            async with engine.open(third):
                assert engine.prompt_tokens == 80
            assert engine.prompt_tokens == 30, "who leaves needs nothing"
            async for _ in deltas:
                pass
            await others.__anext__()
            assert engine.prompt_tokens == 0
            assert load_of(engine, 7).active_decode_blocks
        await trio.sleep(10)
        assert load_of(engine, 7).active_decode_blocks == 0
        async with engine.open(second):
            assert engine.prompt_tokens == 30
    assert engine.prompt_tokens == 0
