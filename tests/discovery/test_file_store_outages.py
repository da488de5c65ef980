"""The file backend while its directory takes no writes, hangs, or is in a stranger's hands."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import attrs
import pytest
import trio

from dynamo_trio.discovery import Instance, Put, Removed, files
from dynamo_trio.discovery.file import CHECK_EVERY
from dynamo_trio.discovery.file_view import LATE
from dynamo_trio.discovery.own_file import OwnFile
from dynamo_trio.discovery.spelling import spell
from dynamo_trio.discovery.stored import QUIET
from dynamo_trio.errors import StoreUnavailable
from tests.discovery.backends import card, instance
from tests.discovery.file_backend import (
    KEY,
    NOW,
    TTL,
    age,
    discovery_in,
    inline,
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


@contextmanager
def full() -> Iterator[None]:
    """No space is left: nothing can be made, but what is there can be touched."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as broken:
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


def messages(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [message for message in caplog.messages if words in message]


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


# --- strangers ----------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(b"")


def overwrite(path: Path) -> None:
    path.write_bytes(b"{}")


def overwrite_at_the_same_length(path: Path) -> None:
    path.write_bytes(b"x" * path.stat().st_size)


def replace(path: Path) -> None:
    files.write(path, b"{}", path.stat().st_mtime)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("harm", [truncate, overwrite, overwrite_at_the_same_length, replace, link])
async def test_a_record_that_a_stranger_overwrote_is_put_back(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path], None],
    autojump_clock: MockClock,
) -> None:
    caplog.set_level(logging.INFO, "dynamo_trio.discovery")
    async with discovery_in(tmp_path) as discovery:
        await discovery.register(instance(1))
        await discovery.register(card(1))
        await trio.sleep(20.5)
        for record, quiet in ((instance(1), QUIET), (card(1), 0)):
            path = path_of(tmp_path, record)
            harm(path)
            await trio.sleep(CHECK_EVERY + quiet + 0.1)
            assert path.read_bytes() == spell(record)
            assert path.is_file()
            assert not path.is_symlink()
        await trio.sleep(3 * TTL)
        assert age(path) < TTL / 2
    assert len(messages(caplog, "is our record no more")) == 2
    assert messages(caplog, "v1/instances/")[1].endswith("it is published again in 6 s")
    assert messages(caplog, "v1/mdc/")[1].endswith("it is published again at once")
    assert len(messages(caplog, "is published again")) == 4


async def test_a_directory_in_the_place_of_a_record_is_told_until_it_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async with discovery_in(tmp_path) as discovery:
        await discovery.register(instance(1))
        await trio.sleep(20.5)
        path = path_of(tmp_path, instance(1))
        path.unlink()
        path.mkdir()
        await trio.sleep(QUIET + 20)
        told = messages(caplog, "a directory is in its place; remove it")
        assert 3 <= len(told) <= 5
        assert list(path.parent.iterdir()) == [path]  # no rest of what was tried
        path.rmdir()
        await trio.sleep(2.1)
        assert path.read_bytes() == spell(instance(1))


async def test_withdrawing_is_prompt_if_a_directory_is_in_the_place(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with discovery_in(tmp_path) as discovery:
        await discovery.register(instance(1))
        path = path_of(tmp_path, instance(1))
        path.unlink()
        path.mkdir()
        began = trio.current_time()
        await discovery.unregister(instance(1))
        assert trio.current_time() == began
    assert path.is_dir()


async def test_a_record_that_somebody_moved_and_put_back_or_touched_is_not_lost(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with store_in(tmp_path) as store:
        await store.put(KEY, b"1")
        path = path_of(tmp_path, instance(1))
        with trio.move_on_after(60) as nothing:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.wait_lost)
                await trio.sleep(1.5)
                os.utime(path, (1.0, 1.0))
                await trio.sleep(5)
                copy = path.with_name("copy")
                copy.write_bytes(path.read_bytes())
                copy.replace(path)
        assert nothing.cancelled_caught
        assert age(path) < TTL / 2


async def test_a_new_value_is_no_loss_of_the_old_one(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The round looks while the new value is there and nobody says so yet."""

    async def slow(call: Callable[[], T], /) -> T:
        result = await inline(call)
        if isinstance(call, partial) and getattr(call.func, "__func__", None) is OwnFile.write:
            await trio.sleep(2.5)
        return result

    async with store_in(tmp_path, slow) as store:
        for value in (b"1", b"2", b"3"):
            await store.put(KEY, value)
        with trio.move_on_after(60) as nothing:
            await store.wait_lost()
        assert nothing.cancelled_caught


def test_a_stranger_who_writes_while_we_touch_is_noticed_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, touch = OwnFile(tmp_path / "a", b"ours"), files.touch
    own.write(NOW)

    def touch_too_late(path: Path, now: float) -> bool:
        files.write(path, b"them", now)
        return touch(path, now)

    with monkeypatch.context() as patched:
        patched.setattr(files, "touch", touch_too_late)
        assert own.touch(NOW + 1) is None
    assert own.examine() == "somebody else wrote to it"


async def test_after_a_put_that_failed_the_old_value_is_kept_alive(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with store_in(tmp_path) as store:
        await store.put(KEY, b"1")
        with full(), pytest.raises(StoreUnavailable, match="No space left"):
            await store.put(KEY, b"2")
        await trio.sleep(3 * TTL)
        path = path_of(tmp_path, instance(1))
        assert path.read_bytes() == b"1"
        assert age(path) < TTL / 2
        path.unlink()
        assert await store.wait_lost() == {KEY}


async def test_one_record_in_trouble_does_not_keep_the_others_from_being_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    touch, sick = files.touch, path_of(tmp_path, instance(1))

    def touch_others(path: Path, now: float) -> bool:
        if path == sick:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return touch(path, now)

    monkeypatch.setattr(files, "touch", touch_others)
    async with discovery_in(tmp_path) as discovery:
        for record in (instance(1), instance(2), card(1)):
            await discovery.register(record)
        await trio.sleep(3 * TTL)
        assert age(sick) > 2 * TTL
        assert age(path_of(tmp_path, instance(2))) < TTL / 2
        assert age(path_of(tmp_path, card(1))) < TTL / 2


async def test_a_record_that_belongs_to_another_user_now_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with discovery_in(tmp_path) as discovery:
        await discovery.register(card(1))
        path = path_of(tmp_path, card(1))
        theirs, touch = path.stat().st_ino, files.touch

        def touch_ours(path: Path, now: float) -> bool:
            if path.stat().st_ino == theirs:
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
            return touch(path, now)

        monkeypatch.setattr(files, "touch", touch_ours)
        await trio.sleep(TTL)
        assert path.stat().st_ino != theirs
        assert age(path) < TTL / 2


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
