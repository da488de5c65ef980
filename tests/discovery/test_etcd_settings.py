"""What can be wrong with the settings of etcd, and who is told so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dynamo_trio.discovery.etcd import EtcdSettings, parse_endpoints
from dynamo_trio.errors import ConfigError, FileUnusable

if TYPE_CHECKING:
    from pathlib import Path


def test_endpoints_may_leave_out_the_scheme() -> None:
    found = parse_endpoints(" etcd-0:2379 , https://[::1]:2379/,")
    assert found == ("http://etcd-0:2379", "https://[::1]:2379")


@pytest.mark.parametrize(
    "text", ["", " , ", "ftp://a", "http://", "http://a/path", "http://u:p@a", "http://a:x", "a?b"]
)
def test_what_is_no_endpoint_is_named_with_its_rule(text: str) -> None:
    with pytest.raises(ConfigError, match="ETCD_ENDPOINTS"):
        parse_endpoints(text)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"ttl": 0.0}, "ETCD_LEASE_TTL"),
        ({"ttl": float("nan")}, "ETCD_LEASE_TTL"),
        ({"username": "u"}, "ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD"),
        ({"password": "p"}, "ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD"),
        ({"cert": "c"}, "ETCD_AUTH_CLIENT_CERT and ETCD_AUTH_CLIENT_KEY"),
        ({"endpoints": ()}, "ETCD_ENDPOINTS"),
    ],
)
def test_what_does_not_go_together_is_named(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        EtcdSettings(**settings)


def test_the_password_is_never_shown() -> None:
    assert "secret" not in repr(EtcdSettings(username="u", password="secret"))


def test_no_lease_runs_out_in_an_outage_that_is_not_seen() -> None:
    """Peers refresh every half TTL; a pulse must fit in between, with room for its answer."""
    settings = EtcdSettings()
    assert settings.pulse <= settings.away_after / 2
    assert settings.away_after < settings.ttl / 2


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_certificates_that_cannot_be_used_are_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "x.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(FileUnusable, match=r"ETCD_AUTH_CA=.*x\.pem"):
        EtcdSettings(ca=path).tls_context()
    with pytest.raises(FileUnusable, match=r"ETCD_AUTH_CLIENT_CERT=.*x\.pem"):
        EtcdSettings(cert=path, key=path).tls_context()
