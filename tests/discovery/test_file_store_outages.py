"""The file backend while its directory takes no writes, or hangs, and with wrong clocks."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import attrs
import pytest
import trio

from dynamo_trio.discovery import Instance, Put, Removed, files
from dynamo_trio.discovery.file import CHECK_EVERY
from dynamo_trio.discovery.file_view import LATE
from tests.discovery.backends import instance
from tests.discovery.file_backend import (
    KEY,
    NOW,
    TTL,
    age,
    discovery_in,
    full,
    inline,
    messages,
    path_of,
    store_in,
    strangers_file,
    wall,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trio.testing import MockClock

T = TypeVar("T")


@contextmanager
def read_only() -> Iterator[None]:
    """As after ``mount -o remount,ro``, for everybody."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(Path, "unlink", refuse)
        broken.setattr(os, "utime", refuse)
        broken.setattr(files, "write", refuse)
        broken.setattr(files, "probe", refuse)
        yield


@attrs.define(eq=False)
class Stall:
    """Runs like :func:`inline`, but hangs while it is told to."""

    until: float = 0.0

    async def __call__(self, call: Callable[[], T], /) -> T:
        await trio.sleep_until(self.until)
        return await inline(call)


# --- nobody is judged ---------------------------------------------------------------------


@pytest.mark.parametrize("owner", [True, False], ids=["worker", "frontend"])
async def test_nobody_is_deleted_after_the_store_was_read_only(
    tmp_path: Path, owner: bool, autojump_clock: MockClock
) -> None:
    """Neither by who owns files nor by who owns none; the others touch as soon as they can."""
    alive = strangers_file(tmp_path, instance(8), NOW)
    dead = strangers_file(tmp_path, instance(9), NOW)
    async with discovery_in(tmp_path) as discovery, discovery.watch(Instance) as watch:
        if owner:
            await discovery.register(instance(1))
            assert await watch.next_change() == Put(instance(1))
        await trio.sleep(3.3)
        files.touch(alive, wall())
        await trio.sleep(9.9)  # late, but in time; for the next one it is too late
        with read_only():
            await trio.sleep(3 * TTL)
        for _ in range(8):
            await trio.sleep(TTL / 2)
            assert alive.exists()
            files.touch(alive, wall())
        assert not dead.exists()
        assert await watch.next_change() == Removed(instance(9))
        assert path_of(tmp_path, instance(1)).exists() is owner


async def test_own_files_are_touched_within_a_second_after_the_store_was_read_only(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with store_in(tmp_path) as store:
        await store.put(KEY, b"1")
        await trio.sleep(5.5)
        with read_only():
            await trio.sleep(2 * TTL)
            assert age(path_of(tmp_path, instance(1))) > TTL
        await trio.sleep(CHECK_EVERY + 0.01)
        assert age(path_of(tmp_path, instance(1))) < CHECK_EVERY + 0.1


async def test_on_a_full_disk_who_can_touch_still_judges_and_who_cannot_does_not(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    dead = strangers_file(tmp_path, instance(9), NOW)
    async with discovery_in(tmp_path) as frontend, frontend.watch(Instance):
        with full():
            await trio.sleep(5 * TTL)
        assert dead.exists()
        async with discovery_in(tmp_path) as worker:
            await worker.register(instance(1))
            with full():
                await trio.sleep(2 * TTL)
            assert not dead.exists()
            assert age(path_of(tmp_path, instance(1))) < TTL / 2


@pytest.mark.parametrize("owner", [True, False], ids=["worker", "frontend"])
@pytest.mark.parametrize("began", [0.5, 3.4, 6.6, 9.9])
async def test_nobody_is_deleted_after_the_store_hung(
    tmp_path: Path, owner: bool, began: float, autojump_clock: MockClock
) -> None:
    """It hung for the others too, and they touch later than we.

    ``began``: so long after the last touch of another.
    """
    alive = strangers_file(tmp_path, instance(8), NOW)
    stall = Stall()
    async with discovery_in(tmp_path, stall) as discovery, discovery.watch(Instance):
        if owner:
            await discovery.register(instance(1))
        await trio.sleep(6.65)  # just before a round
        files.touch(alive, wall())
        await trio.sleep(began)
        stall.until = trio.current_time() + 2 * TTL
        await trio.sleep(2 * TTL)
        for _ in range(9):
            await trio.sleep(TTL / 2)
            assert alive.exists()
            files.touch(alive, wall())


async def test_a_store_that_hangs_is_told_with_its_true_duration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.INFO, "dynamo_trio.discovery")
    stall = Stall()
    async with store_in(tmp_path, stall) as store:
        await store.put(KEY, b"1")
        await trio.sleep(5)
        stall.until = trio.current_time() + 16
        await trio.sleep(30)
    told = messages(caplog, "it does not answer")
    assert 3 <= len(told) <= 4
    assert "(for" not in told[0]
    (over,) = messages(caplog, f"can write to {tmp_path} again, after")
    assert 15 - LATE <= float(over.split()[-2]) <= 16.1


# --- what the log says --------------------------------------------------------------------


async def test_an_outage_is_told_when_it_begins_now_and_then_and_when_it_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.INFO, "dynamo_trio.discovery")
    async with store_in(tmp_path) as store:
        await store.put(KEY, b"1")
        for _ in range(2):
            await trio.sleep(20)
            with read_only():
                await trio.sleep(20)
        await trio.sleep(20)
    lasting = messages(caplog, f"cannot write to {tmp_path}; our records there grow old")
    assert all("Read-only file system" in message for message in lasting)
    assert [("(for" in message) for message in lasting] == [False, True, True, True] * 2
    over = messages(caplog, f"can write to {tmp_path} again, after")
    assert all(16 < float(message.split()[-2]) < 21.1 for message in over)
    assert len(caplog.messages) == len(lasting) + len(over) == 10


async def test_who_owns_nothing_tells_it_once_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async with store_in(tmp_path) as store, store.watch("v1/instances"):
        await trio.sleep(5)
        with read_only():
            await trio.sleep(150)
    assert len(messages(caplog, "cannot write to")) == 3


async def test_what_could_not_be_deleted_is_not_told(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
) -> None:
    caplog.set_level(logging.INFO, "dynamo_trio.discovery")
    dead = strangers_file(tmp_path, instance(9), NOW)
    monkeypatch.setattr(files, "remove_unchanged", lambda *_: [])
    async with store_in(tmp_path) as store, store.watch("v1/instances"):
        await trio.sleep(5 * TTL)
    assert dead.exists()
    assert not messages(caplog, "deleted")


# --- clocks -------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [-86400.0, -15.0, 15.0, 86400.0])
async def test_the_clocks_of_others_say_nothing_of_who_lives(
    tmp_path: Path, ahead: float, autojump_clock: MockClock
) -> None:
    """The dead are deleted, and the living are not, however wrong their clocks are."""
    alive = strangers_file(tmp_path, instance(8), NOW + ahead)
    dead = strangers_file(tmp_path, instance(9), NOW + ahead)
    async with store_in(tmp_path) as store, store.watch("v1/instances"):
        for _ in range(9):  # later than it should
            await trio.sleep(TTL / 2)
            files.touch(alive, wall() + ahead)
        assert alive.exists()
        assert not dead.exists()


# --- files that cannot be written ---------------------------------------------------------


def test_a_probe_leaves_nothing(tmp_path: Path) -> None:
    files.probe(tmp_path, [])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError, match="none"):
        files.probe(tmp_path / "none", [tmp_path / "neither"])
    files.probe(tmp_path / "none", [tmp_path / "neither", tmp_path])
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_may_not_be_written_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.require_writable([tmp_path, tmp_path / "none"])
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match=str(tmp_path)):
        files.require_writable([tmp_path])
    files.require_writable([tmp_path / "none"])


#: In a mount namespace of its own: a store that is read-only for a while.
PROGRAM = """
import errno, subprocess, sys
from pathlib import Path
from dynamo_trio.discovery import files

root = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root], check=True)
files.probe(root, [root])
files.require_writable([root])
subprocess.run(["mount", "-o", "remount,ro", root], check=True)
for refused in (lambda: files.probe(root, [root]), lambda: files.require_writable([root])):
    try:
        refused()
    except OSError as exc:
        assert exc.errno == errno.EROFS, exc
    else:
        raise AssertionError("not refused")
subprocess.run(["mount", "-o", "remount,rw", root], check=True)
files.probe(root, [root])
files.require_writable([root])
print("good")
"""


def can_mount() -> bool:
    command = ["unshare", "--mount", "true"]
    return sys.platform == "linux" and os.geteuid() == 0 and not subprocess.call(command)


@pytest.mark.skipif(not can_mount(), reason="only root may mount")
def test_a_real_read_only_mount_is_noticed_and_its_end_too(tmp_path: Path) -> None:
    command = ["unshare", "--mount", sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "good\n", done.stderr
