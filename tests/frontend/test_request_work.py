"""What a request costs a frontend besides its tokens, counted: see ``test_token_work.py``."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import dynamo_trio

if TYPE_CHECKING:
    from types import FrameType

    from trio.testing import MockClock

    from tests.frontend.conftest import Opener

#: Functions of ours that may run for one streamed answer of one token, those of the worker, which
#: is in this process too, left out. Raise it only with a measurement of what it costs.
FUNCTIONS = 412
#: What runs for a request in a frontend alone.
OURS = ("client.py", "frontend", "http", "tokenizers", "wire/openai", "wire/trace.py")
REQUESTS = 20

ASKED = {
    "model": "sim",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 1,
}


class counted_functions:
    """Counts the functions of a frontend that are called, or gone on with, in the block."""

    def __enter__(self) -> Counter[str]:
        package = Path(dynamo_trio.__file__).parent
        self._roots = tuple(str(package / part) for part in OURS)
        self._count: Counter[str] = Counter()
        self._before = sys.getprofile()
        sys.setprofile(self._note)
        return self._count

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(self._before)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self._roots):
            self._count[frame.f_code.co_qualname] += 1


async def test_a_request_is_a_few_hundred_functions(
    autojump_clock: MockClock, open_site: Opener
) -> None:
    async with open_site(itl_ms=1.0) as site:
        for _ in range(3):  # what the first ones load, the others have ready
            await site.client.ask("POST", "/v1/chat/completions", ASKED)
        with counted_functions() as count:
            for _ in range(REQUESTS):
                answer = await site.client.ask("POST", "/v1/chat/completions", ASKED)
        assert answer.status == 200
        assert answer.events()[-1] == "[DONE]"
    each = {name: calls / REQUESTS for name, calls in count.most_common()}
    assert sum(each.values()) <= FUNCTIONS, each


async def test_no_generator_is_made_for_the_blocks_of_a_request(
    autojump_clock: MockClock, open_site: Opener
) -> None:
    async with open_site(itl_ms=1.0) as site:
        await site.client.ask("POST", "/v1/chat/completions", ASKED)
        with counted_functions() as count:
            await site.client.ask("POST", "/v1/chat/completions", ASKED)
    for block in ("admit", "OpenCalls.inside", "Client.open_stream", "Slots.hold"):
        assert count[block] <= 1, f"{block} is entered and left as a generator"
