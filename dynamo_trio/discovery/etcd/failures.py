"""What HTTP and the network do wrong, said in a few words."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import trio

from dynamo_trio.errors import StoreGarbled, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def told_apart() -> Iterator[None]:
    """What HTTP and the network do wrong, as one kind of error with a text that names it."""
    try:
        yield
    except trio.TooSlowError:
        raise StoreUnavailable("no whole answer in time") from None
    except httpx.RemoteProtocolError as exc:
        raise StoreGarbled(f"no HTTP as it should be: {exc}") from exc
    except httpx.ConnectTimeout as exc:
        raise StoreUnavailable("no connection in time") from exc
    except httpx.TimeoutException as exc:
        raise StoreUnavailable("no answer in time") from exc
    except httpx.ConnectError as exc:
        raise StoreUnavailable(f"cannot connect: {_root(exc)}") from exc
    except httpx.TransportError as exc:
        raise StoreUnavailable(f"{type(exc).__name__}: {_root(exc)}") from exc


def _root(exc: BaseException) -> str:
    """What the system says, or else the first text: errors of TLS stand at a chain's end."""
    chain = list(_chain(exc))
    for at in chain:
        if isinstance(at, ConnectionError) and at.errno:
            return os.strerror(at.errno)  # its own text repeats the address
    return next((str(at) for at in chain if str(at)), "no reason given")


def _chain(exc: BaseException) -> Iterator[BaseException]:
    """An error and its causes; of several at once the first."""
    at: BaseException | None = exc
    while at is not None:
        yield at
        if isinstance(at, BaseExceptionGroup):
            at = at.exceptions[0]
        else:
            at = at.__cause__ or at.__context__
