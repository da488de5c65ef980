"""TLS for the planes: the settings, the contexts, and the two ways of shaking hands.

The wire inside is the same; nothing in a discovery record says that TLS is on, so both ends
must be set up alike. Peers close without a ``close_notify``, so an end of the stream without
one is an ordinary end here: every message has its length before it, and an answer says
itself when it is whole.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Final

import attrs
import trio

from dynamo_trio.errors import ConfigError, FileUnusable, RemoteProtocolError, UnexpectedTls
from dynamo_trio.pem import load_identity

if TYPE_CHECKING:
    from pathlib import Path

_PREFIX: Final = "DYN_TCP_TLS_"


@attrs.frozen(kw_only=True)
class TlsSettings:
    """TLS on both listeners and for both dialers. All files are PEM.

    A listener speaks TLS if it has ``cert`` and ``key``; a dialer if it has ``ca``, or is told
    to be ``insecure``.
    """

    #: ``DYN_TCP_TLS_CERT_PATH``, ``DYN_TCP_TLS_KEY_PATH``: a listener's identity.
    cert: Path | None = None
    key: Path | None = None
    #: ``DYN_TCP_TLS_CLIENT_CA_CERT_PATH``: who dials must have a certificate of this authority.
    client_ca: Path | None = None
    #: ``DYN_TCP_TLS_CA_CERT_PATH``: the authority of the listeners that are dialled.
    ca: Path | None = None
    #: ``DYN_TCP_TLS_INSECURE``: dial anybody.
    insecure: bool = False
    #: ``DYN_TCP_TLS_CLIENT_CERT_PATH``, ``DYN_TCP_TLS_CLIENT_KEY_PATH``: a dialer's identity.
    client_cert: Path | None = None
    client_key: Path | None = None
    #: ``DYN_TCP_TLS_SERVER_NAME``: the name in a listener's certificate, if not its address.
    server_name: str | None = None
    #: ``DYN_TCP_TLS_HANDSHAKE_TIMEOUT_SECS``.
    handshake_time: float = 3.0


def listener_context(tls: TlsSettings) -> ssl.SSLContext | None:
    """What a listener needs; None: it speaks plainly.

    Raises:
        ConfigError: one of two that belong together is missing.
        FileUnusable: a file cannot be read, or is not what it should be.
    """
    if not _pair(tls.cert, tls.key, ""):
        if tls.client_ca is not None:
            raise ConfigError(f"{_PREFIX}CLIENT_CA_CERT_PATH needs {_PREFIX}CERT_PATH as well")
        return None
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    _load_identity(context, tls.cert, tls.key, "")
    if tls.client_ca is not None:
        _load_authority(context, tls.client_ca, "CLIENT_CA_CERT_PATH")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def dialer_context(tls: TlsSettings) -> ssl.SSLContext | None:
    """What a dialer needs; None: it speaks plainly.

    Raises:
        ConfigError: it has an identity, but cannot tell whom to trust.
        FileUnusable: a file cannot be read, or is not what it should be.
    """
    has_identity = _pair(tls.client_cert, tls.client_key, "CLIENT_")
    if tls.ca is None and not tls.insecure:
        if has_identity:
            raise ConfigError(f"{_PREFIX}CLIENT_CERT_PATH needs {_PREFIX}CA_CERT_PATH as well")
        return None
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    if tls.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif tls.ca is not None:
        _load_authority(context, tls.ca, "CA_CERT_PATH")
    if has_identity:
        _load_identity(context, tls.client_cert, tls.client_key, "CLIENT_")
    return context


class HandshakeTimeout(ConnectionError):
    """The connection stands, but its other end does not answer as it should."""


async def shake_hands(stream: trio.abc.Stream, context: ssl.SSLContext, limit: float) -> TlsStream:
    """Be the listener on a connection that was accepted, for at most ``limit`` seconds.

    The caller keeps ``stream`` and closes it if this fails.

    Raises:
        OSError: no handshake, or not in time.
    """
    tls = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
    return await _handshake(tls, limit, "CA_CERT_PATH")


async def greet(
    stream: trio.abc.Stream, context: ssl.SSLContext, name: str, limit: float
) -> TlsStream:
    """Be the dialer on a connection that stands; ``name`` is whom the certificate must name.

    The caller keeps ``stream`` and closes it if this fails.

    Raises:
        OSError: no handshake, or not in time; the other end may be whoever it likes.
    """
    tls = trio.SSLStream(stream, context, server_hostname=name, https_compatible=True)
    return await _handshake(tls, limit, "CERT_PATH")


def explain(fault: RemoteProtocolError, *, dialled: bool = False) -> str:
    """What an operator should know of a peer's fault where nobody here speaks TLS.

    ``dialled``: it is this process that has connected.
    """
    if not isinstance(fault, UnexpectedTls):
        return str(fault)
    if dialled:
        return f"{fault}, and this process does not ({_PREFIX}CA_CERT_PATH is not set)"
    return f"{fault}, and this port does not ({_PREFIX}CERT_PATH is not set)"


TlsStream = trio.SSLStream[trio.abc.Stream]


#: How OpenSSL says that the other end's first bytes are no TLS.
_PLAIN: Final = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"}
#: How OpenSSL 3 says that it has left; Python has an exception for it since 3.11.4.
_BROKEN_OFF: Final = "UNEXPECTED_EOF_WHILE_READING"


async def _handshake(tls: TlsStream, limit: float, setting: str) -> TlsStream:
    """``setting``: what makes the other end speak TLS."""
    with trio.move_on_after(limit) as scope:
        try:
            await tls.do_handshake()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
            why = _why(exc.__cause__ or exc, setting)
            raise ConnectionError(f"the TLS handshake failed: {why}") from exc
    if scope.cancelled_caught:
        raise HandshakeTimeout(f"the TLS handshake failed: it took over {limit:g} s")
    return tls


def _why(error: BaseException, setting: str) -> str:
    hint = f"is {_PREFIX}{setting} set there?"
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    if isinstance(error, ssl.SSLEOFError | trio.EndOfChannel) or reason == _BROKEN_OFF:
        return f"the peer closed the connection; {hint}"
    if reason in _PLAIN:
        return f"the peer does not speak TLS; {hint}"
    return str(error)


#: Python before 3.11.4 sets it: a connection that breaks off looks like one that was ended well.
_LENIENT: Final[int] = getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)


def _context(protocol: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.options &= ~_LENIENT
    return context


def _pair(cert: Path | None, key: Path | None, whose: str) -> bool:
    if (cert is None) != (key is None):
        names = f"{_PREFIX}{whose}CERT_PATH", f"{_PREFIX}{whose}KEY_PATH"
        raise ConfigError(f"{names[0]} and {names[1]} must be set together")
    return cert is not None


def _load_identity(
    context: ssl.SSLContext, cert: Path | None, key: Path | None, whose: str
) -> None:
    assert cert is not None
    assert key is not None
    prefix = f"{_PREFIX}{whose}"
    names = {"cert_setting": f"{prefix}CERT_PATH", "key_setting": f"{prefix}KEY_PATH"}
    load_identity(context, cert, key, **names)


def _load_authority(context: ssl.SSLContext, path: Path, name: str) -> None:
    try:
        context.load_verify_locations(path)
    except (OSError, ValueError) as exc:
        raise FileUnusable(f"{_PREFIX}{name}={path}: must be PEM certificates: {exc}") from exc
