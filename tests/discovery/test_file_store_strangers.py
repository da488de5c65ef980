"""Own files of the file backend in the hands of strangers."""

from __future__ import annotations

import errno
import logging
import os
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import pytest
import trio

from dynamo_trio.discovery import files
from dynamo_trio.discovery.file import CHECK_EVERY
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
    full,
    inline,
    messages,
    path_of,
    store_in,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trio.testing import MockClock

T = TypeVar("T")


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
    assert messages(caplog, "v1/instances/")[1].endswith(
        "unless it is withdrawn, it is published again in 6 s"
    )
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
