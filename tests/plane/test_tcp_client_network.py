"""Where a client listens, and with whom it speaks TLS."""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from dynamo_trio.errors import CannotConnect, ConfigError
from dynamo_trio.plane.abc import AcceptedCall, RequestHead
from dynamo_trio.plane.tcp import TcpPlane, TcpSettings, TlsSettings, open_tcp_plane
from dynamo_trio.wire.dynamo.call_home_states import Accepted
from dynamo_trio.wire.dynamo.codec import MSGPACK
from tests.plane.fake_worker import (
    ENDING,
    LOOPBACK,
    Caller,
    Collector,
    item,
    open_bench,
    until,
)
from tests.plane.tls_files import Authority, mutual_tls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dynamo_trio.plane.abc import Outbox


# --- where it listens ------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "lo"])
async def test_a_host_is_an_address_or_an_interface(host: str) -> None:
    async with open_bench(TcpSettings(response_host=host)) as bench:
        asked = bench.ask()
        request = await bench.next_request()
        assert request.control.reply_to().address.host == "127.0.0.1"
        caller = await request.accept()
        await caller.say(item(1), *ENDING)
        assert await asked.sink.end() is None


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(
    not _has_ipv6(), reason="no IPv6; enable with: sysctl net.ipv6.conf.lo.disable_ipv6=0"
)
async def test_an_ipv6_address_is_told_without_brackets() -> None:
    async with open_bench(TcpSettings(response_host="::1")) as bench:
        asked = bench.ask()
        request = await bench.next_request()
        assert '"address":"::1:' in request.control.connection_info.info
        caller = await request.accept()
        await caller.say(item(1), *ENDING)
        assert await asked.sink.end() is None


async def test_requests_share_one_listener_which_begins_with_the_first() -> None:
    async with open_bench() as bench:
        asked = [bench.ask() for _ in range(3)]
        connection = await bench.next_connection()
        requests = [await connection.next_request() for _ in asked]
        assert len({request.control.reply_to().address for request in requests}) == 1


async def test_a_port_that_is_taken_fails_the_request_and_is_said_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = attrs.evolve(LOOPBACK, response_port=port)
        async with open_bench(settings) as bench:
            asked = bench.ask()
            assert "cannot listen" in str(await asked.failure())
            assert f"127.0.0.1:{port}" in caplog.text
            taken.close()
            again = bench.ask()  # it is tried again
            request = await bench.next_request()
            await request.connection.acknowledge()
            await again.open()


async def test_an_interface_that_is_none_fails_the_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_bench(TcpSettings(response_host="no-such-interface.invalid")) as bench:
        assert type(await bench.ask().failure()) is CannotConnect
        assert "DYN_TCP_RESPONSE_STREAM_HOST" in caplog.text


# --- TLS -------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Echo:
    """An endpoint that answers at once with what it was asked."""

    def accept(self, head: RequestHead, payload: bytes, outbox: Outbox) -> AcceptedCall:
        outbox.begin()
        outbox.put(payload)
        outbox.finish(None)
        return _Done()


class _Done(AcceptedCall):
    def cancel(self) -> None:
        """It has ended."""

    def stop(self) -> None:
        """It has ended."""


@asynccontextmanager
async def planes(worker: TlsSettings, client: TlsSettings) -> AsyncIterator[tuple[TcpPlane, str]]:
    """The client's plane, and the address of an :class:`Echo`."""
    host = TcpSettings(rpc_host="127.0.0.1", response_host="127.0.0.1", ack_time=2.0)
    async with (
        open_tcp_plane(attrs.evolve(host, tls=worker)) as serving,
        open_tcp_plane(attrs.evolve(host, tls=client)) as asking,
        serving.serve("1f/generate", Echo()) as address,
    ):
        yield asking, address


async def answer_of(plane: TcpPlane, address: str) -> list[object]:
    sink = Collector()
    async with plane.open_stream(address, RequestHead("1"), MSGPACK.encode("hello"), sink):
        assert await sink.end() is None
    return sink.items


async def test_both_ways_are_secret_and_both_ends_known(tmp_path: Path) -> None:
    tls = mutual_tls(tmp_path)
    async with planes(tls, tls) as (plane, address):
        assert await answer_of(plane, address) == ["hello"]


async def test_a_name_may_be_asked_for_in_place_of_the_address(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    listener = authority.identity("workers.example")
    tls = TlsSettings(
        cert=listener.cert, key=listener.key, ca=authority.file, server_name="workers.example"
    )
    async with planes(tls, tls) as (plane, address):
        assert await answer_of(plane, address) == ["hello"]
    async with planes(tls, attrs.evolve(tls, server_name=None)) as (plane, address):
        with pytest.raises(CannotConnect):
            await answer_of(plane, address)


async def test_insecure_asks_for_nothing(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    listener = authority.identity("who.example")
    tls = TlsSettings(cert=listener.cert, key=listener.key, insecure=True)
    async with planes(tls, tls) as (plane, address):
        assert await answer_of(plane, address) == ["hello"]


async def test_a_worker_of_another_authority_is_not_spoken_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "other").mkdir()
    ours, theirs = mutual_tls(tmp_path), mutual_tls(tmp_path / "other")
    async with planes(theirs, ours) as (plane, address):
        with pytest.raises(CannotConnect):
            await answer_of(plane, address)
        assert "the TLS handshake failed" in caplog.text


async def test_a_worker_that_speaks_plainly_is_not_spoken_to(tmp_path: Path) -> None:
    async with planes(TlsSettings(), mutual_tls(tmp_path)) as (plane, address):
        with pytest.raises(CannotConnect):
            await answer_of(plane, address)


async def test_a_call_home_without_tls_or_certificate_is_closed(tmp_path: Path) -> None:
    tls = mutual_tls(tmp_path)
    only_listening = attrs.evolve(tls, ca=None, client_cert=None, client_key=None)
    settings = attrs.evolve(LOOPBACK, tls=only_listening)
    async with open_bench(settings) as bench:
        asked = bench.ask()
        request = await bench.next_request()
        await request.connection.acknowledge()
        plain = await request.call_home(Accepted())
        assert await plain.wishes() == []
        dial_alone = tls.ca
        assert dial_alone is not None
        nobody = await _secured(await request.dial(), dial_alone)
        assert await nobody.wishes() == []
        assert not asked.sink.ended.is_set()


async def _secured(caller: Caller, ca: Path) -> Caller:
    """The caller's connection over TLS, without a certificate of its own."""
    import ssl

    context = ssl.create_default_context(cafile=str(ca))
    tls = trio.SSLStream(caller.stream, context, server_hostname="127.0.0.1")
    return Caller(tls)


async def test_settings_that_fit_nothing_are_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="DYN_TCP_TLS_KEY_PATH"):
        async with open_tcp_plane(TcpSettings(tls=TlsSettings(cert=tmp_path / "x"))):
            raise AssertionError("the plane must not open")


async def test_stop_and_kill_pass_through_tls(tmp_path: Path) -> None:
    calls: list[_Heard] = []

    class Endpoint:
        def accept(self, head: RequestHead, payload: bytes, outbox: Outbox) -> AcceptedCall:
            outbox.begin()
            calls.append(_Heard(outbox))
            return calls[-1]

    tls = mutual_tls(tmp_path)
    settings = TcpSettings(rpc_host="127.0.0.1", response_host="127.0.0.1", tls=tls)
    async with (
        open_tcp_plane(settings) as plane,
        plane.serve("1f/generate", Endpoint()) as address,
    ):
        sink = Collector()
        async with plane.open_stream(address, RequestHead("1"), b"\xc0", sink) as stream:
            sink.stream = stream
            for number in range(200):
                calls[0].outbox.put(MSGPACK.encode(number))
            await until(lambda: len(sink.items) == 200)
            stream.stop()
            await until(lambda: "stop" in calls[0].heard)
            calls[0].outbox.put(MSGPACK.encode("still taken"))
            await until(lambda: len(sink.items) == 201)
        await until(lambda: "cancel" in calls[0].heard)
        assert sink.ends == []


@attrs.define(eq=False)
class _Heard(AcceptedCall):
    outbox: Outbox
    heard: list[str] = attrs.field(factory=list)

    def cancel(self) -> None:
        self.heard.append("cancel")

    def stop(self) -> None:
        self.heard.append("stop")
