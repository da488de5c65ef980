"""``/busy_threshold``, in the shape that Dynamo's frontend gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from trio.testing import MockClock

    Opener = Callable[..., AbstractAsyncContextManager[Any]]

PATH = "/busy_threshold"
BLOCKS = "active_decode_blocks_threshold"
TOKENS = "active_prefill_tokens_threshold"
FRAC = "active_prefill_tokens_threshold_frac"
NOTHING = {BLOCKS: None, TOKENS: None, FRAC: None}


async def test_thresholds_are_set_one_by_one(open_site: Opener, autojump_clock: MockClock) -> None:
    async with open_site() as site:
        assert (await site.client.ask("GET", PATH)).json() == {"thresholds": []}
        shown = await site.client.ask("POST", PATH, {"model": "sim"})
        assert (shown.status, shown.json()) == (200, {"model": "sim", **NOTHING})
        first = await site.client.ask("POST", PATH, {"model": "sim", BLOCKS: 0.8})
        assert (first.status, first.json()) == (200, {"model": "sim", **NOTHING, BLOCKS: 0.8})
        more = {"model": "sim", TOKENS: 100, FRAC: 1.5, BLOCKS: None}  # null leaves it
        both = await site.client.ask("POST", PATH, more)
        assert both.json() == {"model": "sim", BLOCKS: 0.8, TOKENS: 100, FRAC: 1.5}
        assert (await site.client.ask("GET", PATH)).json() == {"thresholds": [both.json()]}
        assert site.frontend.busy.get("sim").active_prefill_tokens_threshold == 100
        assert (await site.client.ask("POST", PATH, {"model": "sim"})).json() == both.json()


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"", 400, None),
        (b"[]", 400, None),
        ({}, 400, "model"),
        ({"model": 1}, 400, "model"),
        ({"model": "sim", "bogus": 1}, 400, "bogus"),
        ({"model": "sim", BLOCKS: 1.1}, 400, BLOCKS),
        ({"model": "sim", BLOCKS: -0.1}, 400, BLOCKS),
        ({"model": "sim", BLOCKS: "0.5"}, 400, BLOCKS),
        ({"model": "sim", TOKENS: -1}, 400, TOKENS),
        ({"model": "sim", TOKENS: 1.5}, 400, TOKENS),
        ({"model": "sim", FRAC: -1}, 400, FRAC),
        ({"model": "nobody", FRAC: 0.5}, 404, "model"),
        (b" " * 100_000, 413, None),
    ],
)
async def test_a_bad_one_is_refused_by_name(
    open_site: Opener, autojump_clock: MockClock, body: object, status: int, param: str | None
) -> None:
    async with open_site() as site:
        answer = await site.client.ask("POST", PATH, body)
        assert (answer.status, answer.json()["error"]["param"]) == (status, param)
        assert (await site.client.ask("GET", PATH)).json() == {"thresholds": []}


async def test_an_unknown_model_has_none(open_site: Opener, autojump_clock: MockClock) -> None:
    async with open_site() as site:
        shown = await site.client.ask("POST", PATH, {"model": "nobody"})
        assert (shown.status, shown.json()) == (200, {"model": "nobody", **NOTHING})
        assert (await site.client.ask("GET", PATH)).json() == {"thresholds": []}
