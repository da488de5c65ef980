"""What must be known to reach etcd, and the limits within which it must answer."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import attrs
import httpx

from dynamo_trio.errors import ConfigError, FileUnusable
from dynamo_trio.pem import load_identity

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MIB = 1024 * 1024

#: Dynamo's default of ``ETCD_ENDPOINTS``.
DEFAULT_ENDPOINT = "http://localhost:2379"


def parse_endpoints(text: str) -> tuple[str, ...]:
    """The addresses in a value of ``ETCD_ENDPOINTS``, which commas separate.

    Raises:
        ConfigError: one of them is no address, or there is none.
    """
    return _endpoints(part for part in text.split(",") if part.strip())


def _endpoints(texts: Iterable[str]) -> tuple[str, ...]:
    assert not isinstance(texts, str), "a tuple of addresses; see parse_endpoints"
    found = tuple(map(_endpoint, texts))
    if not found:
        raise ConfigError("ETCD_ENDPOINTS is empty: name at least one http:// or https:// address")
    return found


def _endpoint(text: str) -> str:
    """One address with its scheme; Dynamo takes ``host:port`` for plain HTTP."""
    text = text.strip()
    full = text if "://" in text else f"http://{text}"
    try:
        url = httpx.URL(full)
        usable = url.scheme in ("http", "https") and bool(url.host) and url.path in ("", "/")
    except (httpx.InvalidURL, ValueError):
        usable = False
    if not usable or url.query or url.userinfo:
        raise ConfigError(
            f"ETCD_ENDPOINTS names {text!r}: an address must be [http[s]://]HOST:PORT"
        )
    return full.rstrip("/")


@attrs.frozen(kw_only=True)
class EtcdSettings:
    """Seconds and bytes. What has the name of a variable behind it is set by that one.

    Raises:
        ConfigError: values that do not go together, or addresses that are none.
    """

    #: Tried in turn, beginning with the one that worked last (``ETCD_ENDPOINTS``).
    endpoints: tuple[str, ...] = attrs.field(default=(DEFAULT_ENDPOINT,), converter=_endpoints)
    #: How long registrations outlive a process that died (``ETCD_LEASE_TTL``). It is taken for
    #: that of all other processes too.
    ttl: float = attrs.field(default=10.0)
    username: str | None = None  # ETCD_AUTH_USERNAME
    password: str | None = attrs.field(default=None, repr=False)  # ETCD_AUTH_PASSWORD
    ca: Path | None = None  # ETCD_AUTH_CA; None: the system's own
    cert: Path | None = None  # ETCD_AUTH_CLIENT_CERT
    key: Path | None = None  # ETCD_AUTH_CLIENT_KEY
    #: To connect to one endpoint, the TLS handshake included.
    connect_time: float = 2.0
    #: From a request until the whole of its answer, or the first line of a stream.
    answer_time: float = 3.0
    #: The same for all records of one bucket at once.
    snapshot_time: float = 30.0
    #: From the start until the first lease; ``math.inf`` waits for ever, and logs that it does.
    start_time: float = 30.0
    #: For the revoke of the lease at the end. Without it the lease runs out by itself.
    close_time: float = 2.0
    #: On top of the TTL: how long owners may take after an outage to put back what was lost.
    #: Beside Dynamo's own frontends they must wait for 6 s of it.
    heal_time: float = 8.0
    #: The largest answer that is read.
    max_answer: int = 64 * MIB
    #: The largest line of a watch stream: one message with some changes.
    max_line: int = 16 * MIB

    def __attrs_post_init__(self) -> None:
        if not self.ttl > 0:
            raise ConfigError(f"ETCD_LEASE_TTL is {self.ttl}: it must be above 0")
        if (self.username is None) != (self.password is None):
            raise ConfigError("ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD go together")
        if (self.cert is None) != (self.key is None):
            raise ConfigError("ETCD_AUTH_CLIENT_CERT and ETCD_AUTH_CLIENT_KEY go together")

    @property
    def pulse(self) -> float:
        """Between two refreshes of the lease."""
        return self.ttl / 5

    @property
    def away_after(self) -> float:
        """Without an answer for so long the store counts as away.

        Less than half a TTL: peers refresh their leases every half, so no lease can run
        out in an outage that is shorter than this.
        """
        return self.ttl * 0.4

    @property
    def hold(self) -> float:
        """How long after an outage what is missing is still believed in."""
        return self.ttl + self.heal_time

    def tls_context(self) -> ssl.SSLContext:
        """For ``https`` endpoints; reads the files, which are small.

        Raises:
            FileUnusable: a certificate or key cannot be read, or is none.
        """
        context = _verifying(self.ca)
        if self.cert is not None and self.key is not None:
            load_identity(
                context,
                self.cert,
                self.key,
                cert_setting="ETCD_AUTH_CLIENT_CERT",
                key_setting="ETCD_AUTH_CLIENT_KEY",
            )
        return context


def _verifying(ca: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as exc:
        raise FileUnusable(f"ETCD_AUTH_CA={ca}: no certificate authority: {exc}") from exc
