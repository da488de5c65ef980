"""The two ports of the tcp plane under TLS, and name servers that hang."""

from __future__ import annotations

import logging
import random
import socket
import ssl
import threading
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from dynamo_trio.plane.abc import RequestHead
from dynamo_trio.plane.net.dialling import LOOKUPS, dial
from dynamo_trio.plane.tcp import TcpSettings, open_tcp_plane
from dynamo_trio.wire.dynamo.addresses import HostPort, TcpTarget
from dynamo_trio.wire.dynamo.codec import MSGPACK
from tests.hostile.garbage import CLIENT_HELLO, for_any_port, say
from tests.plane.fake_worker import Collector, until
from tests.plane.tcp_peer import PATH, FakeEndpoint
from tests.plane.tls_files import mutual_tls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dynamo_trio.plane.tcp import TcpPlane


@attrs.define(eq=False)
class Bench:
    """A worker and a client over TLS, and one stream between them that is never disturbed."""

    endpoint: FakeEndpoint
    sink: Collector
    ports: dict[str, int]
    said: int = 0

    async def go_on(self) -> None:
        """One more item of the healthy stream."""
        self.endpoint.calls[0].outbox.put(MSGPACK.encode(self.said))
        self.said += 1
        await until(lambda: self.sink.items == list(range(self.said)))


@asynccontextmanager
async def open_bench(folder: Path, handshake_time: float = 60.0) -> AsyncIterator[Bench]:
    tls = attrs.evolve(mutual_tls(folder), handshake_time=handshake_time)
    settings = TcpSettings(rpc_host="127.0.0.1", response_host="127.0.0.1", tls=tls)
    endpoint, sink = FakeEndpoint(), Collector()
    async with (
        open_tcp_plane(settings) as worker,
        open_tcp_plane(settings) as client,
        worker.serve(PATH, endpoint) as address,
        client.open_stream(address, RequestHead("healthy"), MSGPACK.encode(1), sink) as stream,
    ):
        sink.stream = stream
        endpoint.calls[0].outbox.begin()
        ports = {"requests": TcpTarget.parse(address).address.port, "home": home_port(client)}
        yield Bench(endpoint, sink, ports)
        endpoint.calls[0].outbox.finish(None)
        assert await sink.end() is None


def home_port(client: TcpPlane) -> int:
    address = client.client._server._address
    assert address is not None
    return address.port


@pytest.mark.parametrize("name", ["requests", "home"])
async def test_garbage_in_place_of_a_handshake(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(1)
    caplog.set_level(logging.INFO, "dynamo_trio")
    async with open_bench(tmp_path) as bench:
        for data in [*for_any_port(rng), CLIENT_HELLO, CLIENT_HELLO[:20], b""]:
            ending = rng.choice(("fin", "reset"))
            talk = partial(say, bench.ports[name], data, ending=ending)
            await trio.to_thread.run_sync(talk)
            await bench.go_on()
    assert all(record.exc_info is None for record in caplog.records)
    assert all(record.levelno <= logging.WARNING for record in caplog.records)
    assert "the TLS handshake failed" in caplog.text
    assert max(len(record.getMessage()) for record in caplog.records) < 500


@pytest.mark.parametrize("name", ["requests", "home"])
async def test_half_a_handshake_is_given_its_time(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_bench(tmp_path, handshake_time=4.0) as bench:
        with socket.create_connection(("127.0.0.1", bench.ports[name])) as sock:
            sock.sendall(CLIENT_HELLO[:50])
            await until(lambda: "the TLS handshake failed: it took over 4 s" in caplog.text)
            await bench.go_on()


async def test_a_stranger_without_a_certificate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    def knock(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
            with suppress(OSError), context.wrap_socket(sock) as tls:
                tls.sendall(b"\0" * 1000)
                while tls.recv(1000):
                    pass

    async with open_bench(tmp_path) as bench:
        for port in bench.ports.values():
            await trio.to_thread.run_sync(knock, port)
            await bench.go_on()
    assert len(caplog.messages) == 2
    assert all(record.exc_info is None for record in caplog.records)


async def test_name_servers_that_hang_hold_no_other_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither those of file access, nor anything else that needs no look-up."""
    release, asked = threading.Event(), list[str]()

    def hang(host: str, *_: object, **__: object) -> Any:
        asked.append(host)
        release.wait(60)
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    settings = TcpSettings(connect_time=0.5)
    failures: list[str] = []

    async def call(number: int) -> None:
        try:
            await dial(HostPort(f"host-{number}.invalid", 1), None, settings)
        except OSError as exc:
            failures.append(str(exc))

    try:
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                for number in range(200):
                    nursery.start_soon(call, number)
                await until(lambda: len(asked) == LOOKUPS)
                assert await trio.to_thread.run_sync(lambda: 7) == 7
        assert failures == ["not connected within 0.5 s"] * 200
        assert len(asked) == LOOKUPS
    finally:
        release.set()


async def test_a_name_with_several_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that answers is taken; one that refuses, or hangs, costs a part of the time."""
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    port = listener.socket.getsockname()[1]
    places = [("127.0.0.1", 1), ("127.0.0.1", port)]

    def look_up(*_: object, **__: object) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place) for place in places]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    async with listener:
        stream = await dial(HostPort("two.invalid", port), None, TcpSettings())
        await stream.aclose()
        places.reverse()
        places.append(("127.0.0.1", 1))
        stream = await dial(HostPort("two.invalid", port), None, TcpSettings())
        await stream.aclose()
    with pytest.raises(OSError, match=r"127\.0\.0\.1"):
        await dial(HostPort("two.invalid", port), None, TcpSettings())
