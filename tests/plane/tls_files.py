"""Certificates made on the spot: an authority, a worker and a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trustme

from dynamo_trio.plane.tcp import TlsSettings

if TYPE_CHECKING:
    from pathlib import Path


@attrs.frozen
class Identity:
    cert: Path
    key: Path


@attrs.define(eq=False)
class Authority:
    """Signs identities; everything lies in ``folder``."""

    folder: Path
    _ca: trustme.CA = attrs.field(factory=trustme.CA)

    @property
    def file(self) -> Path:
        path = self.folder / "ca.pem"
        self._ca.cert_pem.write_to_path(str(path))
        return path

    def identity(self, *names: str) -> Identity:
        made = self._ca.issue_cert(*names)
        cert, key = self.folder / f"{names[0]}.pem", self.folder / f"{names[0]}.key"
        made.cert_chain_pems[0].write_to_path(str(cert))
        made.private_key_pem.write_to_path(str(key))
        return Identity(cert, key)


def mutual_tls(folder: Path) -> TlsSettings:
    """Every listener and every dialer proves who it is."""
    authority = Authority(folder)
    listener, dialer = authority.identity("127.0.0.1"), authority.identity("client.example")
    return TlsSettings(
        cert=listener.cert,
        key=listener.key,
        client_ca=authority.file,
        ca=authority.file,
        client_cert=dialer.cert,
        client_key=dialer.key,
    )
