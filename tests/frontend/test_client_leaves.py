"""Clients that leave, over real sockets: the worker's handler ends in that moment, and once.

The handlers here wait for ever and look at nothing, so only a wake-up can end them.
"""

from __future__ import annotations

import json
import random
import socket
import struct
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import h2.connection
import pytest
import trio

from dynamo_trio.discovery import EndpointId, ModelCard
from dynamo_trio.frontend.catalog import open_catalog
from dynamo_trio.frontend.serve import serve_frontend
from dynamo_trio.frontend.state import Frontend
from dynamo_trio.lifecycle import Lifecycle, Outcome, Timetable
from dynamo_trio.plane import MemoryPlane, RequestPlane
from dynamo_trio.plane.mux import MuxSettings, open_mux_plane
from dynamo_trio.plane.tcp import TcpSettings, open_tcp_plane
from dynamo_trio.runtime import DistributedRuntime, open_runtime
from dynamo_trio.tokenizers import ByteTokenizer, Preprocessor
from dynamo_trio.wire.llm import LLMEngineOutput, PreprocessedRequest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from dynamo_trio.context import Context

PATIENCE = 60.0
CHAT = "/v1/chat/completions"
GENERATE = EndpointId.parse("dynamo.backend.generate")
PLANES = ("memory", "tcp", "mux")
planes = pytest.mark.parametrize("plane", PLANES)


@attrs.define(eq=False)
class Hand:
    """A handler: so many tokens, and then nothing more. Its cleanup takes a moment."""

    tokens: int = 0
    #: For the random leavers: seconds between two tokens, and no end.
    pace: float | None = None
    begun: int = 0
    cleaned: int = 0
    asleep: int = 0
    changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    async def generate(
        self, request: PreprocessedRequest, context: Context
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        self.begun += 1
        try:
            for _ in range(self.tokens):
                yield LLMEngineOutput(token_ids=[ord("x")])
                if self.pace is not None:
                    await trio.sleep(self.pace)
            self.asleep += 1
            self.changed.unpark_all()
            await trio.sleep_forever()
        finally:
            with context.cleanup(5.0):
                await trio.sleep(0.01)
                self.cleaned += 1
            self.changed.unpark_all()

    async def wait(self, condition: Callable[[Hand], bool]) -> None:
        with trio.fail_after(PATIENCE):
            while not condition(self):
                await self.changed.park()


@attrs.define(eq=False)
class Site:
    port: int
    hand: Hand
    frontend: Frontend
    runtime: DistributedRuntime

    async def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port))
        sock.setblocking(False)
        return sock

    async def wait_idle(self) -> None:
        """Until nobody is inside any more; who left before it was accepted never is."""
        with trio.fail_after(PATIENCE):
            await self._wait_accepted()
            quiet = 0
            while quiet < 10:
                await trio.sleep(0.01)
                quiet = 0 if self._is_busy() else quiet + 1

    async def _wait_accepted(self) -> None:
        with await self.connect() as sock:
            await send(sock, b"GET /live HTTP/1.1\r\nhost: t\r\n\r\n")
            await read_some(sock)

    def _is_busy(self) -> bool:
        gates = (self.frontend.lifecycle.http, self.runtime.lifecycle.work)
        inside = any(gate.count for gate in gates) or self.hand.begun != self.hand.cleaned
        return inside or self.total("dynamo_frontend_active_requests") > 0

    def total(self, name: str, **labels: str) -> float:
        families = self.frontend.metrics.registry.collect()
        samples = [sample for family in families for sample in family.samples]
        return sum(
            s.value for s in samples if s.name == name and labels.items() <= s.labels.items()
        )


@asynccontextmanager
async def _plane(name: str) -> AsyncIterator[RequestPlane]:
    async with AsyncExitStack() as stack:
        if name == "tcp":
            settings = TcpSettings(rpc_host="127.0.0.1", response_host="127.0.0.1")
            yield await stack.enter_async_context(open_tcp_plane(settings))
        elif name == "mux":
            opening = open_mux_plane(MuxSettings(host="127.0.0.1"))
            yield await stack.enter_async_context(opening)
        else:
            yield MemoryPlane()


@asynccontextmanager
async def open_site(plane_name: str, hand: Hand) -> AsyncIterator[Site]:
    """A frontend on a port, a plane, and a worker behind it, each with its own lifecycle."""

    async def load(card: ModelCard) -> Preprocessor:
        return Preprocessor(ByteTokenizer(), context_length=512, model=card.name)

    lifecycle = Lifecycle(Timetable(grace=0.0, http_drain=5.0))
    frontend = Frontend(lifecycle)
    async with _plane(plane_name) as plane, open_runtime(planes=plane) as runtime:
        card = ModelCard("m", GENERATE, runtime.instance_id, context_length=512)
        serving = runtime.endpoint(str(GENERATE)).serving(
            hand.generate, request_type=PreprocessedRequest, card=card
        )
        async with (
            serving,
            trio.open_nursery() as services,
            open_catalog(runtime.discovery, runtime.planes, load) as frontend.catalog,
        ):
            services.start_soon(lifecycle.run)
            _, port = await serve_frontend(frontend, services, "127.0.0.1", 0)
            await frontend.catalog.wait_for("m")
            frontend.ready = True
            yield Site(port, hand, frontend, runtime)
            lifecycle.request_stop("the test is over")
            await lifecycle.wait_stopped()
            services.cancel_scope.cancel()


def body(*, stream: bool) -> bytes:
    messages = [{"role": "user", "content": "hi"}]
    asked = {"model": "m", "messages": messages, "max_tokens": 400, "stream": stream}
    return json.dumps(asked).encode()


def http1(*, stream: bool, behind: bytes = b"") -> bytes:
    payload = body(stream=stream)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: t\r\ncontent-length: {len(payload)}\r\n\r\n"
    return head.encode() + payload + behind


async def send(sock: socket.socket, data: bytes) -> None:
    while data:
        await trio.lowlevel.wait_writable(sock)
        data = data[sock.send(data) :]


async def read_some(sock: socket.socket) -> bytes:
    with trio.fail_after(PATIENCE):
        await trio.lowlevel.wait_readable(sock)
        return sock.recv(65536)


def fin(sock: socket.socket) -> None:
    sock.close()


def rst(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def half(sock: socket.socket) -> None:
    """It has said all, and would still read: for us it has left."""
    sock.shutdown(socket.SHUT_WR)


def check(site: Site, plane: str) -> None:
    """It was counted once, as cancelled, on both sides."""
    hand = site.hand
    assert (hand.begun, hand.cleaned) == (1, 1)
    assert site.frontend.lifecycle.http.tally == {Outcome.CANCELLED: 1}
    assert site.runtime.lifecycle.work.tally == {Outcome.CANCELLED: 1}
    ended = "dynamo_frontend_requests_total"
    assert site.total(ended) == site.total(ended, error_type="cancelled") == 1
    assert site.total("dynamo_frontend_requests_started_total") == 1
    assert site.total("dynamo_frontend_model_cancellation_total") == 1
    assert site.total("dynamo_frontend_active_requests") == 0


@planes
@pytest.mark.parametrize("tokens", [0, 3], ids=["before-the-first", "after-some"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
@pytest.mark.parametrize("leave", [fin, rst], ids=["fin", "rst"])
async def test_the_handler_of_a_client_that_leaves_ends(
    plane: str, tokens: int, stream: bool, leave: Callable[[socket.socket], None]
) -> None:
    hand = Hand(tokens)
    async with open_site(plane, hand) as site:
        sock = await site.connect()
        await send(sock, http1(stream=stream))
        await hand.wait(lambda h: h.asleep == 1)
        if stream and tokens:
            assert b" 200 " in await read_some(sock)
        leave(sock)
        await hand.wait(lambda h: h.cleaned == 1)
        await site.wait_idle()
        check(site, plane)


@planes
async def test_what_a_client_has_sent_behind_its_request_hides_nothing(plane: str) -> None:
    hand = Hand()
    async with open_site(plane, hand) as site:
        sock = await site.connect()
        await send(sock, http1(stream=True, behind=b"G"))
        await hand.wait(lambda h: h.asleep == 1)
        fin(sock)
        await hand.wait(lambda h: h.cleaned == 1)
        await site.wait_idle()
        check(site, plane)


@planes
async def test_a_client_that_closes_its_half_has_left(plane: str) -> None:
    hand = Hand()
    async with open_site(plane, hand) as site:
        with await site.connect() as sock:
            await send(sock, http1(stream=True))
            await hand.wait(lambda h: h.asleep == 1)
            half(sock)
            await hand.wait(lambda h: h.cleaned == 1)
            await site.wait_idle()
        check(site, plane)


@planes
@pytest.mark.parametrize("tokens", [0, 3], ids=["before-the-first", "after-some"])
async def test_a_reset_stream_of_http2_ends_its_handler_and_no_other(
    plane: str, tokens: int
) -> None:
    hand = Hand(tokens)
    async with open_site(plane, hand) as site:
        with await site.connect() as sock:
            parser = h2.connection.H2Connection()
            parser.initiate_connection()
            payload = body(stream=True)
            numbers = []
            for _ in range(2):
                number = parser.get_next_available_stream_id()
                numbers.append(number)
                head = [(":method", "POST"), (":path", CHAT), (":scheme", "http")]
                parser.send_headers(number, [*head, (":authority", "t")])
                parser.send_data(number, payload, end_stream=True)
            await send(sock, parser.data_to_send())
            await hand.wait(lambda h: h.asleep == 2)
            parser.reset_stream(numbers[0])
            await send(sock, parser.data_to_send())
            await hand.wait(lambda h: h.cleaned == 1)
            assert hand.cleaned == 1
            assert site.frontend.lifecycle.http.count == 1
        await hand.wait(lambda h: h.cleaned == 2)
        await site.wait_idle()
        assert site.frontend.lifecycle.http.tally == {Outcome.CANCELLED: 2}


# --- many, at random -----------------------------------------------------------------------------


async def leave_at_random(site: Site, dice: random.Random) -> None:
    """One client: leaves at any moment from its connection to behind some tokens."""
    sock = await site.connect()
    how, stream = dice.choice([fin, rst]), dice.random() < 0.5
    request = http1(stream=stream, behind=b"GET" if dice.random() < 0.1 else b"")
    part = len(request) if dice.random() < 0.9 else dice.randrange(len(request))
    await send(sock, request[:part])
    if part == len(request) and dice.random() < 0.8:
        if stream and dice.random() < 0.8:
            for _ in range(dice.randrange(1, 6)):
                await read_some(sock)
        else:
            await trio.sleep(dice.random() * 0.1)
    how(sock)


async def disconnect_at_random(plane: str, count: int, seed: int) -> None:
    dice = random.Random(seed)
    hand = Hand(tokens=20, pace=0.002)
    async with open_site(plane, hand) as site:
        limiter = trio.CapacityLimiter(20)

        async def one() -> None:
            async with limiter:
                await leave_at_random(site, random.Random(dice.random()))

        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(one)
        await site.wait_idle()
        work, http = site.runtime.lifecycle.work.tally, site.frontend.lifecycle.http.tally
        assert set(work) <= {Outcome.CANCELLED}, work
        assert set(http) <= {Outcome.CANCELLED}, http
        assert http.total() >= work.total() == hand.begun > 0
        assert not site.frontend.slots.running
        ended = site.total("dynamo_frontend_requests_total")
        assert site.total("dynamo_frontend_requests_started_total") == ended
        assert site.total("dynamo_frontend_requests_total", status="success") == 0
        assert site.total("dynamo_frontend_model_cancellation_total") >= http.total()


@planes
async def test_hundreds_that_leave_at_random_moments_leave_nothing_behind(plane: str) -> None:
    await disconnect_at_random(plane, 150, 7)


@pytest.mark.soak
@planes
@pytest.mark.parametrize("seed", range(4))
async def test_ten_thousand_that_leave_at_random_moments(plane: str, seed: int) -> None:
    await disconnect_at_random(plane, 900, seed)
