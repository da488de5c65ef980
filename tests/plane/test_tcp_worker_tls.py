"""TLS on a worker's request port and on its calls home; and who is not let in."""

from __future__ import annotations

import ssl
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trustme
from cryptography.hazmat.primitives import serialization

from dynamo_trio.errors import ConfigError, DynamoException, FileUnusable
from dynamo_trio.plane import RequestHead
from dynamo_trio.plane.net.tls import dialer_context, listener_context
from dynamo_trio.plane.tcp import TcpSettings, TlsSettings, open_tcp_plane
from dynamo_trio.wire.dynamo.ack import ACCEPTED
from dynamo_trio.wire.dynamo.addresses import TcpTarget
from dynamo_trio.wire.dynamo.call_home_states import (
    Accepted,
    CompleteFinal,
    Handshake,
    Kill,
    Sentinel,
)
from dynamo_trio.wire.dynamo.codec import MSGPACK
from dynamo_trio.wire.dynamo.receiver import Closed
from tests.plane.fake_worker import Collector
from tests.plane.tcp_peer import PATH, FakeEndpoint, Home, Peer, open_bench

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dynamo_trio.plane.tcp import TcpPlane


@attrs.frozen
class Files:
    """An authority, and an identity that it vouches for, as PEM files."""

    ca: Path
    cert: Path
    key: Path

    @classmethod
    def make(cls, folder: Path, name: str) -> Files:
        authority = trustme.CA()
        identity = authority.issue_cert(name)
        files = cls(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
        authority.cert_pem.write_to_path(str(files.ca))
        identity.private_key_pem.write_to_path(str(files.key))
        for blob in identity.cert_chain_pems:
            blob.write_to_path(str(files.cert), append=True)
        return files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files.make(tmp_path_factory.mktemp("ours"), "127.0.0.1")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files.make(tmp_path_factory.mktemp("strangers"), "127.0.0.1")


def tls_of(files: Files) -> TlsSettings:
    return TlsSettings(cert=files.cert, key=files.key, ca=files.ca)


def mutual(files: Files) -> TlsSettings:
    return attrs.evolve(
        tls_of(files), client_ca=files.ca, client_cert=files.cert, client_key=files.key
    )


@asynccontextmanager
async def tls_peer(address: str, tls: TlsSettings) -> AsyncIterator[Peer]:
    """A client that speaks TLS on both its connections."""
    target = TcpTarget.parse(address)
    plain = await trio.open_tcp_stream(target.address.host, target.address.port)
    context = dialer_context(tls)
    assert context is not None
    stream = trio.SSLStream(plain, context, server_hostname=target.address.host)
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    try:
        yield Peer(target, stream, listener)
    finally:
        await trio.aclose_forcefully(stream)
        await listener.aclose()


async def tls_home(peer: Peer, tls: TlsSettings) -> Home:
    context = listener_context(tls)
    assert context is not None
    plain = await peer.listener.accept()
    return Home(trio.SSLStream(plain, context, server_side=True, https_compatible=True))


def settings_with(tls: TlsSettings) -> TcpSettings:
    return TcpSettings(rpc_host="127.0.0.1", tls=tls)


@pytest.mark.parametrize("flavour", [tls_of, mutual], ids=["tls", "mtls"])
async def test_a_whole_answer_over_tls(
    files: Files, flavour: Callable[[Files], TlsSettings]
) -> None:
    tls, endpoint = flavour(files), FakeEndpoint()
    async with (
        open_tcp_plane(settings_with(tls)) as plane,
        plane.serve(PATH, endpoint) as address,
        tls_peer(address, tls) as peer,
    ):
        assert await peer.ask(peer.frame()) == ACCEPTED
        home = await tls_home(peer, tls)
        outbox = endpoint.calls[0].outbox
        outbox.begin()
        items = [MSGPACK.encode(n) for n in range(1000)]
        for item in items:
            outbox.put(item)
        outbox.finish(None)
        events = await home.events(1004)
        assert isinstance(events[0], Handshake)
        assert events[1] == Accepted()
        assert events[-2:] == [CompleteFinal(), Sentinel()]
        await home.stream.aclose()
        await plane.server.say_farewell()
        assert endpoint.calls[0].cancels == 0


@pytest.mark.parametrize("leaving", ["kill", "close", "cut"])
async def test_a_client_that_leaves_over_tls(files: Files, leaving: str) -> None:
    tls, endpoint = tls_of(files), FakeEndpoint()
    async with (
        open_tcp_plane(settings_with(tls)) as plane,
        plane.serve(PATH, endpoint) as address,
        tls_peer(address, tls) as peer,
    ):
        assert await peer.ask(peer.frame()) == ACCEPTED
        home = await tls_home(peer, tls)
        await home.next_event()
        if leaving == "kill":
            await home.send(Kill())
        elif leaving == "close":
            await home.stream.aclose()
        else:  # no close_notify
            await trio.aclose_forcefully(home.stream)
        await endpoint.calls[0].told.wait()
        assert endpoint.calls[0].cancels == 1
        await trio.aclose_forcefully(home.stream)


async def test_a_client_that_never_reads_over_tls_is_held_back(files: Files) -> None:
    tls, endpoint = tls_of(files), FakeEndpoint()
    async with (
        open_tcp_plane(settings_with(tls)) as plane,
        plane.serve(PATH, endpoint) as address,
        tls_peer(address, tls) as peer,
    ):
        assert await peer.ask(peer.frame()) == ACCEPTED
        home = await tls_home(peer, tls)
        await home.next_event()
        outbox = endpoint.calls[0].outbox
        outbox.begin()
        with trio.move_on_after(20) as patience:
            while True:
                while outbox.has_credit:
                    outbox.put(bytes(16 * 1024))
                with trio.move_on_after(0.2) as pause:
                    await outbox.wait_credit()
                if pause.cancelled_caught:
                    break  # no credit comes any more
        assert not patience.cancelled_caught
        await trio.aclose_forcefully(home.stream)
        await endpoint.calls[0].told.wait()
        assert outbox.has_credit


async def test_a_plain_client_is_not_let_in(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    async with open_bench(settings_with(tls_of(files))) as bench:
        await bench.peer.send(bench.peer.frame())
        assert isinstance(await bench.peer.next_ack(), Closed)
        assert not bench.endpoint.calls
    assert "the TLS handshake failed" in caplog.text


async def test_a_client_that_does_not_shake_hands_is_closed(files: Files) -> None:
    tls = attrs.evolve(tls_of(files), handshake_time=0.05)
    async with open_bench(settings_with(tls)) as bench:
        assert await bench.peer.next_ack() == Closed()


@pytest.mark.parametrize("identity", ["none", "strangers"])
async def test_mtls_lets_in_only_who_is_known(
    files: Files, strangers: Files, identity: str, caplog: pytest.LogCaptureFixture
) -> None:
    tls, endpoint = mutual(files), FakeEndpoint()
    theirs = TlsSettings(ca=files.ca)
    if identity == "strangers":
        theirs = attrs.evolve(theirs, client_cert=strangers.cert, client_key=strangers.key)
    async with (
        open_tcp_plane(settings_with(tls)) as plane,
        plane.serve(PATH, endpoint) as address,
        tls_peer(address, theirs) as peer,
    ):
        await peer.send(peer.frame())
        with pytest.raises(trio.BrokenResourceError):  # with TLS 1.3 it shows at the first read
            await peer.stream.receive_some()
        assert not endpoint.calls
    assert "the TLS handshake failed" in caplog.text


@pytest.mark.parametrize("peer_is", ["plain", "a stranger"])
async def test_a_worker_does_not_call_home_to_just_anybody(
    files: Files, strangers: Files, peer_is: str
) -> None:
    tls, endpoint = tls_of(files), FakeEndpoint()
    async with (
        open_tcp_plane(settings_with(tls)) as plane,
        plane.serve(PATH, endpoint) as address,
        tls_peer(address, tls) as peer,
    ):
        assert await peer.ask(peer.frame()) == ACCEPTED
        if peer_is == "plain":
            home = await peer.listener.accept()
            await home.send_all(b"hello, worker")
            await endpoint.calls[0].told.wait()
            await home.aclose()
        else:
            stranger = await tls_home(peer, tls_of(strangers))
            assert await stranger.next_event() == Closed()
            await endpoint.calls[0].told.wait()
            await trio.aclose_forcefully(stranger.stream)
        assert endpoint.calls[0].cancels == 1


async def test_insecure_calls_anybody(files: Files, strangers: Files) -> None:
    tls = attrs.evolve(tls_of(files), ca=None, insecure=True)
    endpoint = FakeEndpoint()
    async with (
        open_tcp_plane(settings_with(tls)) as plane,
        plane.serve(PATH, endpoint) as address,
        tls_peer(address, tls) as peer,
    ):
        assert await peer.ask(peer.frame()) == ACCEPTED
        home = await tls_home(peer, tls_of(strangers))
        assert isinstance(await home.next_event(), Handshake)
        await trio.aclose_forcefully(home.stream)


async def test_server_name_is_what_the_certificate_must_say(tmp_path: Path) -> None:
    named = Files.make(tmp_path, "workers.example")
    tls = attrs.evolve(tls_of(named), server_name="workers.example")
    endpoint = FakeEndpoint()
    async with open_tcp_plane(settings_with(tls)) as plane, plane.serve(PATH, endpoint) as address:
        theirs = attrs.evolve(tls, insecure=True)
        async with tls_peer(address, theirs) as peer:
            assert await peer.ask(peer.frame()) == ACCEPTED
            home = await tls_home(peer, tls)
            assert isinstance(await home.next_event(), Handshake)
            await trio.aclose_forcefully(home.stream)


# --- settings that cannot be used ---------------------------------------------------------------


def test_without_tls_there_is_no_context() -> None:
    assert listener_context(TlsSettings()) is None
    assert dialer_context(TlsSettings()) is None
    assert dialer_context(TlsSettings(server_name="x")) is None


def test_insecure_trusts_anybody(files: Files) -> None:
    context = dialer_context(TlsSettings(insecure=True, ca=files.ca))
    assert context is not None
    assert context.verify_mode is ssl.CERT_NONE


HERE = Path(__file__)


@pytest.mark.parametrize(
    ("tls", "message"),
    [
        (TlsSettings(cert=HERE), "CERT_PATH and DYN_TCP_TLS_KEY_PATH must be set together"),
        (TlsSettings(key=HERE), "CERT_PATH and DYN_TCP_TLS_KEY_PATH must be set together"),
        (TlsSettings(client_ca=HERE), "CLIENT_CA_CERT_PATH needs DYN_TCP_TLS_CERT_PATH"),
        (TlsSettings(client_key=HERE), "DYN_TCP_TLS_CLIENT_KEY_PATH must be set together"),
        (
            TlsSettings(client_cert=HERE, client_key=HERE),
            "DYN_TCP_TLS_CLIENT_CERT_PATH needs DYN_TCP_TLS_CA_CERT_PATH",
        ),
    ],
)
async def test_halves_are_configuration_errors(tls: TlsSettings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        async with open_tcp_plane(settings_with(tls)):
            raise AssertionError("the settings cannot be used")


@pytest.mark.parametrize(
    ("tls", "name"),
    [
        (TlsSettings(cert=HERE, key=HERE), "DYN_TCP_TLS_CERT_PATH="),
        (TlsSettings(cert=HERE.with_name("none"), key=HERE), "DYN_TCP_TLS_CERT_PATH="),
        (TlsSettings(ca=HERE), "DYN_TCP_TLS_CA_CERT_PATH="),
        (TlsSettings(insecure=True, client_cert=HERE, client_key=HERE), "_CLIENT_CERT_PATH="),
    ],
)
async def test_unusable_files_are_named(tls: TlsSettings, name: str) -> None:
    with pytest.raises(FileUnusable, match=name):
        async with open_tcp_plane(settings_with(tls)):
            raise AssertionError("the settings cannot be used")


@pytest.mark.parametrize("wrong", ["missing", "a certificate", "of another"])
def test_of_a_certificate_and_its_key_the_wrong_one_is_named(
    files: Files, tmp_path: Path, wrong: str
) -> None:
    other = trustme.CA().issue_cert("other").private_key_pem
    other.write_to_path(tmp_path / "other.pem")
    bad = {
        "missing": tmp_path / "none",
        "a certificate": files.cert,
        "of another": tmp_path / "other.pem",
    }[wrong]
    with pytest.raises(FileUnusable, match=f"^DYN_TCP_TLS_KEY_PATH={bad}: must be the PEM key"):
        listener_context(TlsSettings(cert=files.cert, key=bad))
    no_certificate = files.key if wrong != "missing" else tmp_path / "none"
    with pytest.raises(FileUnusable, match=f"^DYN_TCP_TLS_CERT_PATH={no_certificate}: must be a"):
        listener_context(TlsSettings(cert=no_certificate, key=files.key))


def test_a_locked_key_asks_nobody(files: Files, tmp_path: Path) -> None:
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(FileUnusable, match="password"):
        listener_context(TlsSettings(cert=files.cert, key=locked))


# --- what the log says of it -------------------------------------------------------------------


async def told(caplog: pytest.LogCaptureFixture, text: str) -> str:
    """The first line with this text, once it is there."""
    with trio.fail_after(20):
        while True:
            for message in caplog.messages:
                if text in message:
                    return message
            await trio.sleep(0.01)


async def ask_in_vain(plane: TcpPlane, address: str) -> None:
    with pytest.raises(DynamoException):
        async with plane.open_stream(address, RequestHead("r"), MSGPACK.encode(1), Collector()):
            pass


async def test_a_plain_port_knows_a_client_that_speaks_tls(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with (
        open_tcp_plane(settings_with(TlsSettings())) as plane,
        open_tcp_plane(settings_with(TlsSettings(ca=files.ca))) as client,
        plane.serve(PATH, FakeEndpoint()) as address,
    ):
        await ask_in_vain(client, address)
        worker = await told(caplog, "a request connection from 127.0.0.1:")
        assert worker.endswith(
            " is closed: the peer speaks TLS, and this port does not"
            " (DYN_TCP_TLS_CERT_PATH is not set)"
        )
        ours = await told(caplog, "no connection to the worker at 127.0.0.1:")
        assert ours.endswith(
            "the TLS handshake failed: the peer closed the connection;"
            " is DYN_TCP_TLS_CERT_PATH set there?"
        )


async def test_a_tls_port_knows_a_client_that_speaks_plainly(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with (
        open_tcp_plane(settings_with(tls_of(files))) as plane,
        open_tcp_plane(settings_with(TlsSettings())) as client,
        plane.serve(PATH, FakeEndpoint()) as address,
    ):
        await ask_in_vain(client, address)
        worker = await told(caplog, "a request connection from 127.0.0.1:")
        assert worker.endswith(
            " is closed: the TLS handshake failed: the peer does not speak TLS;"
            " is DYN_TCP_TLS_CA_CERT_PATH set there?"
        )


async def test_a_plain_home_knows_a_worker_that_calls_in_tls(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with (
        open_tcp_plane(settings_with(TlsSettings(ca=files.ca))) as plane,
        open_tcp_plane(settings_with(TlsSettings())) as client,
        plane.serve(PATH, FakeEndpoint()) as address,
        client.open_stream(address, RequestHead("r"), MSGPACK.encode(1), Collector()),
    ):
        home = await told(caplog, "a call home from ")
        assert home.endswith("DYN_TCP_TLS_CERT_PATH is not set)")
        worker = await told(caplog, "request r: its client cannot be called at ")
        assert worker.endswith("is DYN_TCP_TLS_CERT_PATH set there?")
