"""A network of its own for the processes of these tests: a namespace that has only ``lo``.

Dynamo's event publishers and status servers listen on every address they find, whatever they
are told. In here that is the loopback of nobody else. Linux keeps the namespace per thread, so
the thread that runs the tests moves in; the processes and threads that it starts follow.
Without root the tests run on the machine's own loopback.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

_HERE = "/proc/thread-self/ns/net"
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_IFF_UP = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _enter(namespace: int) -> None:
    _check(_libc.setns(namespace, _CLONE_NEWNET))


def _bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh", b"lo", 0).ljust(40, b"\0")
        (flags,) = struct.unpack_from("h", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request), 16)
        request = struct.pack("16sh", b"lo", flags | _IFF_UP).ljust(40, b"\0")
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


def _make() -> int:
    """A new namespace with a loopback; this thread stays where it is."""
    outside = os.open(_HERE, os.O_RDONLY)
    try:
        _check(_libc.unshare(_CLONE_NEWNET))
        try:
            _bring_up_loopback()
            return os.open(_HERE, os.O_RDONLY)
        finally:
            _enter(outside)
    finally:
        os.close(outside)


async def in_thread(function: Callable[[], T]) -> T:
    """``function()`` in a thread, in the network in which the caller is.

    Trio keeps its threads for a while; one of them may have begun before its caller moved in.
    """
    here = os.open(_HERE, os.O_RDONLY)
    try:
        return await trio.to_thread.run_sync(_call_in, here, function)
    finally:
        os.close(here)


def _call_in(namespace: int, function: Callable[[], T]) -> T:
    outside = os.open(_HERE, os.O_RDONLY)
    try:
        if os.fstat(outside).st_ino == os.fstat(namespace).st_ino:
            return function()
        _enter(namespace)
        try:
            return function()
        finally:
            _enter(outside)
    finally:
        os.close(outside)


class Network:
    """The namespace, for as long as this object is open."""

    def __init__(self) -> None:
        try:
            self._namespace: int | None = _make()
        except PermissionError:
            self._namespace = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and what it starts, lives in there."""
        if self._namespace is None:
            yield
            return
        outside = os.open(_HERE, os.O_RDONLY)
        _enter(self._namespace)
        try:
            yield
        finally:
            _enter(outside)
            os.close(outside)

    def close(self) -> None:
        if self._namespace is not None:
            os.close(self._namespace)
