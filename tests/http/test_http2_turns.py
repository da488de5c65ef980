"""On an HTTP/2 connection nobody's answer waits for ever behind others that keep coming."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import attrs
import hypothesis
import hypothesis.strategies as st
import pytest
import trio
from priority import priority

from dynamo_trio.http.tls import server_context
from dynamo_trio.http.turns import Turns
from tests.http.harness import PATIENCE, running
from tests.http.routes import LIMITS, App, finish_stream
from tests.http.test_http2 import Http2Client, http2
from tests.plane.tls_files import Authority

if TYPE_CHECKING:
    from pathlib import Path

#: Short answers at once, each asked for as soon as another one has come; and in all.
AT_ONCE, MOST = 20, 2000


async def ask_again_and_again(client: Http2Client, until: int) -> int:
    """Keep short requests going until a stream ends; how many of them were answered."""
    for _ in range(AT_ONCE):
        await client.begin("GET", "/")
    answered = 0
    while until not in client.ended and answered < MOST:
        client.take(client.parser.receive_data(await client.stream.receive_some()))
        ended = len(client.ended - {until})
        for _ in range(ended - answered):
            await client.begin("GET", "/")
        answered = ended
    return answered


async def test_a_stream_has_its_turn_among_short_answers_that_keep_coming(tmp_path: Path) -> None:
    # Over TLS, where each send lets others have a turn, so that there is always a new one.
    authority = Authority(tmp_path)
    identity = authority.identity("localhost")
    trusting = ssl.create_default_context(cafile=authority.file)
    trusting.set_alpn_protocols(["h2"])
    app, tls = App(), server_context(identity.cert, identity.key)
    async with running(app, LIMITS, tls=tls) as server, await server.connect() as plain:
        stream = trio.SSLStream(plain, trusting, server_hostname="localhost")
        client = await http2(stream)  # type: ignore[arg-type]  # a stream like any other
        streamed = await client.begin("GET", "/stream")
        await server.wait_until(lambda: app.gate.count == 1)

        async def finish_in_the_middle() -> None:
            await server.wait_until(lambda: len(client.ended) > AT_ONCE)
            await finish_stream(server, b"x" * 40_000)

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(finish_in_the_middle)
                answered = await ask_again_and_again(client, streamed)
        assert answered < MOST
        assert client.bodies[streamed] == b"x" * 40_000


@attrs.define
class Line:
    """What :class:`Turns` is to do, in a list."""

    known: set[int] = attrs.field(factory=set)
    line: list[int] = attrs.field(factory=list)

    def error(self, step: str, number: int) -> type[priority.PriorityError] | None:
        if step == "__next__":
            return None if self.line else priority.DeadlockError
        if step == "insert_stream":
            return priority.DuplicateStreamError if number in self.known else None
        return None if number in self.known else priority.MissingStreamError

    def do(self, step: str, number: int) -> int | None:
        if step == "__next__":
            self.line.append(self.line.pop(0))
            return self.line[-1]
        (self.known.discard if step == "remove_stream" else self.known.add)(number)
        if step in ("block", "remove_stream"):
            self.line = [other for other in self.line if other != number]
        elif number not in self.line:
            self.line.append(number)
        return None


STEPS = st.sampled_from(["insert_stream", "remove_stream", "block", "unblock", "__next__"])


@hypothesis.given(st.lists(st.tuples(STEPS, st.integers(1, 6)), max_size=60))
def test_they_stand_in_line(steps: list[tuple[str, int]]) -> None:
    turns, line = Turns(), Line()
    for step, number in steps:
        arguments = () if step == "__next__" else (number,)
        if error := line.error(step, number):
            with pytest.raises(error):
                getattr(turns, step)(*arguments)
        else:
            assert getattr(turns, step)(*arguments) == line.do(step, number)


def test_wishes_change_nothing_and_are_not_kept() -> None:
    turns = Turns()
    for number in (1, 3):
        turns.insert_stream(number)
    turns.reprioritize(3, depends_on=1, weight=256, exclusive=True)
    turns.reprioritize(99, depends_on=97, weight=1)  # of a stream that is not there
    assert [next(turns) for _ in range(4)] == [1, 3, 1, 3]
    with pytest.raises(priority.MissingStreamError):
        turns.unblock(99)
