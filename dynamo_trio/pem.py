"""Certificates and keys from files; what is wrong with one is told with its setting."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from dynamo_trio.errors import FileUnusable

if TYPE_CHECKING:
    from pathlib import Path


def load_identity(
    context: ssl.SSLContext, cert: Path, key: Path, *, cert_setting: str, key_setting: str
) -> None:
    """Let ``context`` show a certificate. Never asks for a password.

    Raises:
        FileUnusable: one of the files is missing or not what it should be; it names which.
    """
    try:  # or OpenSSL's error would not say which of the two files it means
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cert)
    except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
        raise FileUnusable(f"{cert_setting}={cert}: must be a PEM certificate: {exc}") from exc
    try:
        # A key that is locked would make OpenSSL ask on the terminal.
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as exc:
        whose = f"{cert_setting}={cert}"
        raise FileUnusable(f"{key_setting}={key}: must be the PEM key of {whose}: {exc}") from exc


def _no_password() -> str:
    raise ValueError("the key is locked with a password")
