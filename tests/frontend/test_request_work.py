"""What a request costs a frontend besides its tokens, counted: see ``test_token_work.py``."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import h11
import hypercorn

import dynamo_trio
from dynamo_trio.http.sinks import TERMINATOR
from tests.http.harness import client_of, running
from tests.http.routes import LIMITS, App, finish_stream

if TYPE_CHECKING:
    from types import FrameType

    from trio.testing import MockClock

    from tests.frontend.conftest import Opener

#: Functions of ours that may run for one streamed answer of one token, those of the worker, which
#: is in this process too, left out. Raise it only with a measurement of what it costs.
FUNCTIONS = 396
#: The same for what HTTP/1.1 alone takes for it, h11 and hypercorn included.
HTTP_FUNCTIONS = 165
#: What runs for a request in a frontend alone.
OURS = ("client.py", "frontend", "http", "tokenizers", "wire/openai", "wire/trace.py")
REQUESTS = 20
STREAM = b"POST /stream HTTP/1.1\r\nhost: t\r\ncontent-length: 2\r\n\r\n{}"

ASKED = {
    "model": "sim",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 1,
}


PACKAGE = Path(dynamo_trio.__file__).parent


class counted_functions:
    """Counts the functions that are called, or gone on with, in the block, by default those of a
    frontend."""

    def __init__(self, *roots: Path) -> None:
        self._roots = tuple(map(str, roots or [PACKAGE / part for part in OURS]))

    def __enter__(self) -> Counter[str]:
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


async def test_a_streamed_answer_on_a_kept_connection_is_few_functions_of_http() -> None:
    http = [Path(str(module.__file__)).parent for module in (h11, hypercorn)]
    app = App()
    async with running(app, LIMITS) as server, client_of(server) as client:
        for _ in range(REQUESTS):
            with counted_functions(PACKAGE / "http", *http) as count:
                await client.stream.send_all(STREAM)
                await finish_stream(server)
                said = b""
                while not said.endswith(TERMINATOR):
                    said += await client.stream.receive_some()
                await server.wait_until(lambda: not app.gate.count)
        assert (await client.ask("GET", "/")).status == 200
    assert sum(count.values()) <= HTTP_FUNCTIONS, count


async def test_no_generator_is_made_for_the_blocks_of_a_request(
    autojump_clock: MockClock, open_site: Opener
) -> None:
    async with open_site(itl_ms=1.0) as site:
        await site.client.ask("POST", "/v1/chat/completions", ASKED)
        with counted_functions() as count:
            await site.client.ask("POST", "/v1/chat/completions", ASKED)
    for block in ("admit", "OpenCalls.inside", "Client.open_stream", "Slots.hold"):
        assert count[block] <= 1, f"{block} is entered and left as a generator"
