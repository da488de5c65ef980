"""Where a worker listens, what it tells others, and what accepting survives."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing

from dynamo_trio.errors import ConfigError, PortInUse
from dynamo_trio.plane.net import dialling, hosts
from dynamo_trio.plane.net.accepting import accept_connections
from dynamo_trio.plane.net.dialling import dial
from dynamo_trio.plane.net.hosts import interface_address, listening_host, routable_address
from dynamo_trio.plane.tcp import TcpSettings, open_tcp_plane
from dynamo_trio.plane.tcp.server_side import TcpServerSide
from dynamo_trio.wire.dynamo.ack import ACCEPTED
from dynamo_trio.wire.dynamo.addresses import HostPort, TcpTarget
from dynamo_trio.wire.dynamo.call_home_states import Handshake
from dynamo_trio.wire.dynamo.receiver import Closed
from tests.plane.tcp_peer import PATH, FakeEndpoint, open_bench, open_peer

if TYPE_CHECKING:
    from pathlib import Path


async def test_all_endpoints_share_one_port_and_nothing_listens_before_the_first() -> None:
    settings = TcpSettings(rpc_host="127.0.0.1")
    async with open_tcp_plane(settings) as plane:
        async with plane.serve("1/a", FakeEndpoint()) as a, plane.serve("1/b", FakeEndpoint()) as b:
            assert TcpTarget.parse(a).address == TcpTarget.parse(b).address
        async with plane.serve("1/a", FakeEndpoint()) as again:
            assert again == a


async def test_the_port_closes_with_the_plane() -> None:
    async with open_bench() as bench:
        address = TcpTarget.parse(bench.address).address
    with pytest.raises(OSError, match="refused"):
        await dial(address, None, TcpSettings())


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with open_tcp_plane(TcpSettings(rpc_host="127.0.0.1", rpc_port=port)) as plane:
            with pytest.raises(PortInUse, match=rf"{port} \(DYN_TCP_RPC_PORT\)"):
                async with plane.serve(PATH, FakeEndpoint()):
                    raise AssertionError("the port is taken")


@pytest.mark.parametrize("host", ["192.0.2.77", "no.such.host.invalid", "a" * 300, ""])
async def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    async with open_tcp_plane(TcpSettings(rpc_host=host)) as plane:
        with pytest.raises(ConfigError, match="DYN_TCP_RPC_HOST"):
            async with plane.serve(PATH, FakeEndpoint()):
                raise AssertionError("there is no such address here")


def test_an_unset_host_is_the_routable_address() -> None:
    address = routable_address()
    assert listening_host(None, "X") == (address, address)
    assert socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)


def test_an_unspecified_host_is_bound_and_not_told() -> None:
    assert listening_host("0.0.0.0", "X") == ("0.0.0.0", routable_address())
    assert listening_host("::", "X") == ("::", routable_address())


def test_an_interface_stands_for_its_address() -> None:
    assert listening_host("lo", "X") == ("127.0.0.1", "127.0.0.1")
    assert listening_host("127.0.0.2", "X") == ("127.0.0.2", "127.0.0.2")
    with pytest.raises(ConfigError, match="X=nothere0"):
        interface_address("nothere0", "X")


def test_an_interface_may_have_only_an_ipv6_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listing = tmp_path / "if_inet6"
    listing.write_text(
        "fe80000000000000000000000000cafe 02 40 20 80    six0\n"
        "20010db8000000000000000000000007 02 40 00 80    six0\n"
    )
    monkeypatch.setattr(hosts, "_IF_INET6", listing)
    assert interface_address("six0", "X") == "2001:db8::7"


def test_a_machine_without_routes_listens_on_the_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts, "_ELSEWHERE", ())
    assert routable_address() == "127.0.0.1"


async def test_dialling_a_name() -> None:
    listener = (await trio.open_tcp_listeners(0, host="localhost"))[0]
    async with listener, trio.open_nursery() as nursery:
        accepted: list[trio.SocketStream] = []

        async def accept() -> None:
            accepted.append(await listener.accept())

        nursery.start_soon(accept)
        port = listener.socket.getsockname()[1]
        async with await dial(HostPort("localhost", port), None, TcpSettings()):
            pass
    await accepted[0].aclose()


async def test_a_call_home_over_ipv6() -> None:
    try:
        listener = (await trio.open_tcp_listeners(0, host="::1"))[0]
    except OSError:
        pytest.skip("no IPv6 loopback; enable with: sysctl net.ipv6.conf.lo.disable_ipv6=0")
    async with open_bench() as bench, listener:
        await bench.peer.listener.aclose()
        bench.peer.listener = listener
        assert await bench.peer.ask(bench.peer.frame()) == ACCEPTED
        home = await bench.peer.next_home()
        assert await home.next_event() == Handshake("subject-0")


async def test_dialling_has_a_limit(autojump_clock: trio.testing.MockClock) -> None:
    async def never(*_: object) -> trio.SocketStream:
        await trio.sleep_forever()
        raise AssertionError

    settings = TcpSettings(connect_time=5.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dialling, "_connect", never)
        with pytest.raises(ConnectionError, match="within 5 s"):
            await dial(HostPort("10.0.0.1", 1), None, settings)
    assert trio.current_time() == pytest.approx(5.0)


@attrs.define(eq=False)
class FullListener:
    """Has no room the first ``refusals`` times, and one connection then."""

    stream: trio.SocketStream
    code: int = errno.EMFILE
    refusals: int = 150
    tried: int = 0

    async def accept(self) -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        self.tried += 1
        if self.tried <= self.refusals:
            raise OSError(self.code, "no room")
        if self.tried > self.refusals + 1:
            await trio.sleep_forever()
        return self.stream

    async def __aenter__(self) -> FullListener:
        return self

    async def __aexit__(self, *_: object) -> None:
        await trio.lowlevel.checkpoint()


async def connected_pair() -> tuple[trio.SocketStream, trio.SocketStream]:
    a, b = trio.socket.socketpair(socket.AF_UNIX)
    return trio.SocketStream(a), trio.SocketStream(b)


async def test_having_no_room_is_waited_out(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = await connected_pair()
    served: list[trio.SocketStream] = []

    async def serve(stream: trio.SocketStream, _: object) -> None:
        served.append(stream)
        nursery.cancel_scope.cancel("seen")
        await trio.lowlevel.checkpoint()

    listener = FullListener(ours)
    async with trio.open_nursery() as nursery:
        await accept_connections(listener, serve, nursery)  # type: ignore[arg-type]  # a fake
    assert served == [ours]
    assert trio.current_time() == pytest.approx(15.0)
    assert caplog.text.count("cannot accept connections") == 2  # not once for each time
    await theirs.aclose()


async def test_any_other_error_of_accepting_is_not_hidden() -> None:
    ours, theirs = await connected_pair()
    listener = FullListener(ours, code=errno.EBADF)
    async with trio.open_nursery() as nursery:
        with pytest.raises(OSError, match="no room"):
            await accept_connections(listener, serve_nobody, nursery)  # type: ignore[arg-type]  # a fake
    await ours.aclose()
    await theirs.aclose()


async def serve_nobody(stream: trio.SocketStream, _: object) -> None:
    raise AssertionError("nobody came")


async def test_a_mistake_in_one_connection_ends_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stumble(*_: object) -> None:
        raise RuntimeError("a mistake")

    async with open_bench() as bench:
        assert await bench.peer.ask(bench.peer.frame()) == ACCEPTED
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TcpServerSide, "answer", stumble)
            async with open_peer(bench.address) as other:
                assert await other.ask(other.frame()) == Closed()
        assert await bench.peer.ask(bench.peer.frame()) == ACCEPTED
    assert "a mistake of ours" in caplog.text
