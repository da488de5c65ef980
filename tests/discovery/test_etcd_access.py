"""An etcd that asks who one is: passwords, tokens that expire, TLS with certificates."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trustme

from dynamo_trio.discovery.etcd import EtcdSettings, EtcdStore, open_etcd_discovery, open_etcd_store
from dynamo_trio.discovery.store import StoreKey, StorePut
from dynamo_trio.errors import StoreRefused, StoreUnavailable
from tests.discovery.etcd_server import EtcdServer, open_etcd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

BUCKET = "v1/instances"
AT = StoreKey(BUCKET, "ns/backend/generate/1")
SOON = 10.0


async def assert_works(store: EtcdStore, value: bytes = b"1") -> None:
    with trio.fail_after(SOON):
        async with store.watch(BUCKET) as watch:
            await store.put(AT, value)
            if watch.snapshot.get(AT.key) != value:
                assert await watch.next_change() == StorePut(AT.key, value)


# --- passwords ---------------------------------------------------------------------------


async def ask_for_passwords(server: EtcdServer) -> None:
    """Only root may do anything from now on, and dynamo with its own keys."""
    for name in ("root", "dynamo"):
        await server.call("/v3/auth/user/add", {"name": name, "password": f"of {name}"})
        await server.call("/v3/auth/role/add", {"name": name})
        await server.call("/v3/auth/user/grant", {"user": name, "role": name})
    keys = {"permType": "READWRITE", "key": "djEv", "range_end": "djEw"}  # v1/ to v10
    await server.call("/v3/auth/role/grant", {"name": "dynamo", "perm": keys})
    await server.call("/v3/auth/enable", {})


async def root_token(server: EtcdServer) -> str:
    user = {"name": "root", "password": "of root"}
    token: str = (await server.call("/v3/auth/authenticate", user))["token"]
    return token


def settings_for(server: EtcdServer, password: str = "of dynamo") -> EtcdSettings:
    return EtcdSettings(endpoints=(server.url,), ttl=2.0, username="dynamo", password=password)


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[EtcdServer]:
    async with open_etcd(tmp_path / "etcd", ("--bcrypt-cost=4",)) as server:
        await ask_for_passwords(server)
        yield server


async def test_a_user_with_a_password_is_let_in(guarded: EtcdServer) -> None:
    async with open_etcd_store(settings_for(guarded)) as store:
        await assert_works(store)
        await trio.sleep(3.0)  # the lease is refreshed and looked at
        assert AT in store._keeper.owned
        await assert_works(store, b"2")


async def test_a_wrong_password_ends_the_start(guarded: EtcdServer) -> None:
    with pytest.raises(StoreRefused, match=r"user 'dynamo'.*authentication failed"):
        async with open_etcd_store(settings_for(guarded, "wrong")):
            pass
    with pytest.raises(StoreRefused, match=r"user 'dynamo': .*invalid user ID or password$"):
        async with open_etcd_discovery(settings_for(guarded, "wrong")):
            pass


async def test_no_password_and_no_permission_end_the_start(guarded: EtcdServer) -> None:
    settings = attrs.evolve(settings_for(guarded), username=None, password=None)
    with pytest.raises(StoreRefused, match=r"user name is empty; .*ETCD_AUTH_USERNAME"):
        async with open_etcd_discovery(settings):
            pass
    token = await root_token(guarded)
    await guarded.call("/v3/auth/user/add", {"name": "low", "password": "x"}, token)
    settings = attrs.evolve(settings_for(guarded), username="low", password="x")
    with pytest.raises(StoreRefused, match=r"permission denied; user 'low'.*v1/"):
        async with open_etcd_discovery(settings):
            pass
    async with open_etcd_discovery(settings_for(guarded)) as discovery:
        assert discovery.assign_instance_id() > 0


async def test_no_password_is_refused_at_the_first_thing_that_needs_one(
    guarded: EtcdServer,
) -> None:
    settings = attrs.evolve(settings_for(guarded), username=None, password=None)
    async with open_etcd_store(settings) as store:
        with pytest.raises(StoreUnavailable, match="user name is empty"):
            await store.put(AT, b"1")
        with pytest.raises(StoreUnavailable, match="user name is empty"):
            async with store.watch(BUCKET):
                pass


async def test_what_a_user_may_not_do_is_said(guarded: EtcdServer) -> None:
    async with open_etcd_store(settings_for(guarded)) as store:
        with pytest.raises(StoreRefused, match="permission denied"):
            await store.put(StoreKey("elsewhere", "x"), b"1")
        await assert_works(store)


async def test_a_restart_forgets_all_tokens_and_nobody_notices(guarded: EtcdServer) -> None:
    async with open_etcd_store(settings_for(guarded)) as store:
        await assert_works(store)
        await guarded.kill()
        await guarded.start()
        await assert_works(store, b"2")


async def test_users_may_change_while_we_are_there(guarded: EtcdServer) -> None:
    async with open_etcd_store(settings_for(guarded)) as store:
        await assert_works(store)
        token = await root_token(guarded)
        await guarded.call("/v3/auth/user/add", {"name": "new", "password": "x"}, token)
        await assert_works(store, b"2")


async def test_a_changed_password_costs_no_registration(
    guarded: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_etcd_store(settings_for(guarded)) as store:
        await assert_works(store)
        token = await root_token(guarded)
        change = {"name": "dynamo", "password": "other"}
        await guarded.call("/v3/auth/user/changepw", change, token)
        await trio.sleep(4.5)  # two TTLs
        assert await guarded.ttl(store.instance_id) > 0
        assert "authentication failed" in caplog.text
        async with store.watch(BUCKET) as watch:
            assert AT.key in watch.snapshot


async def test_tokens_that_expire_are_fetched_again(tmp_path: Path) -> None:
    keys = trustme.CA().issue_cert("jwt")
    keys.private_key_pem.write_to_path(tmp_path / "key.pem")
    keys.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    public = make_public_key(tmp_path / "cert.pem", tmp_path / "public.pem")
    kind = f"jwt,pub-key={public},priv-key={tmp_path / 'key.pem'},sign-method=ES256,ttl=1s"
    flags = ("--bcrypt-cost=4", f"--auth-token={kind}")
    async with open_etcd(tmp_path / "etcd", flags) as server:
        await ask_for_passwords(server)
        async with open_etcd_store(settings_for(server)) as store:
            await assert_works(store)
            first = store._gateway._token
            await trio.sleep(2.5)
            await assert_works(store, b"2")
            assert AT in store._keeper.owned
            assert store._gateway._token != first
            async with store.watch("v1/mdc") as watch:
                assert not watch.snapshot


def make_public_key(cert: Path, public: Path) -> Path:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from cryptography.x509 import load_pem_x509_certificate

    key = load_pem_x509_certificate(cert.read_bytes()).public_key()
    public.write_bytes(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return public


# --- TLS ---------------------------------------------------------------------------------


@attrs.frozen
class Certificates:
    """A CA, and what it gave to a server and to a client; as files."""

    ca: Path
    server: tuple[Path, Path]
    client: tuple[Path, Path]
    context: ssl.SSLContext  # for a stranger with the client's certificate


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder, ca = tmp_path_factory.mktemp("certificates"), trustme.CA()
    ca.cert_pem.write_to_path(folder / "ca.pem")
    for name in ("127.0.0.1", "client"):
        issued = ca.issue_cert(name)
        issued.private_key_pem.write_to_path(folder / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
    server = (folder / "127.0.0.1.pem", folder / "127.0.0.1.key")
    client = (folder / "client.pem", folder / "client.key")
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.load_cert_chain(*client)
    return Certificates(folder / "ca.pem", server, client, context)


@pytest.fixture
async def encrypted(tmp_path: Path, certificates: Certificates) -> AsyncIterator[EtcdServer]:
    cert, key = certificates.server
    flags = (
        *(f"--cert-file={cert}", f"--key-file={key}"),
        *("--client-cert-auth", f"--trusted-ca-file={certificates.ca}"),
    )
    async with open_etcd(tmp_path / "etcd", flags, "https", certificates.context) as server:
        yield server


async def test_both_sides_show_their_certificates(
    encrypted: EtcdServer, certificates: Certificates
) -> None:
    cert, key = certificates.client
    settings = EtcdSettings(endpoints=(encrypted.url,), ca=certificates.ca, cert=cert, key=key)
    async with open_etcd_store(settings) as store:
        await assert_works(store)
        assert (await encrypted.keys()).keys() == {f"{BUCKET}/{AT.key}"}


async def test_without_a_certificate_nobody_is_let_in(
    encrypted: EtcdServer, certificates: Certificates
) -> None:
    settings = EtcdSettings(endpoints=(encrypted.url,), ca=certificates.ca, start_time=0.2)
    with pytest.raises(StoreUnavailable, match=f"{encrypted.url}: "):
        async with open_etcd_store(settings):
            pass


async def test_a_server_that_nobody_vouches_for_is_not_trusted(encrypted: EtcdServer) -> None:
    settings = EtcdSettings(endpoints=(encrypted.url,), start_time=0.2)
    with pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        async with open_etcd_store(settings):
            pass


async def test_plain_http_to_a_tls_port_is_told(encrypted: EtcdServer) -> None:
    plain = encrypted.url.replace("https", "http")
    with pytest.raises(StoreUnavailable, match=r"HTTPS|ReadError|reset|disconnected"):
        async with open_etcd_store(EtcdSettings(endpoints=(plain,), start_time=0.2)):
            pass
