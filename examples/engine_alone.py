"""An engine without the rest: eight requests share the steps of one simulated core in a thread.

Replace the ``CoreSpec`` by ``CoreSpec(kind="llama", model_path=...)`` for a real model.
"""

from __future__ import annotations

import trio

from dynamo_trio.engines import CoreSpec, Engine, Request, make_core, open_engine


async def generate(engine: Engine, name: str) -> None:
    request = Request(request_id=name, token_ids=(1, 2, 3), max_tokens=5, ignore_eos=True)
    tokens: list[int] = []
    async with engine.open(request) as deltas:
        async for delta in deltas:
            tokens.extend(delta.token_ids)
    print(name, tokens)


async def main() -> None:
    core = make_core(CoreSpec(kind="sim", itl_ms=5.0))
    async with open_engine(core) as engine, trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(generate, engine, f"request {number}")
    print("steps:", engine.step_count)


if __name__ == "__main__":
    trio.run(main)
