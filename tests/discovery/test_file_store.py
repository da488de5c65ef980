"""The file backend over time: on a fake clock, and with real processes."""

from __future__ import annotations

import logging
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from dynamo_trio.discovery import (
    FileSettings,
    Instance,
    ModelCard,
    Put,
    Removed,
    files,
    open_file_discovery,
)
from dynamo_trio.discovery.file import CHECK_EVERY, open_file_store
from dynamo_trio.discovery.inotify import Inotify
from dynamo_trio.discovery.spelling import spell, store_key
from dynamo_trio.discovery.stored import QUIET
from dynamo_trio.errors import FileUnusable, StoreUnavailable
from tests.discovery.backends import card, instance
from tests.discovery.file_backend import (
    KEY,
    NOW,
    TTL,
    age,
    discovery_in,
    path_of,
    store_in,
    strangers_file,
    wall,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock


# --- life --------------------------------------------------------------------------------


async def test_an_own_file_is_kept_alive_and_deleted_at_the_end(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with discovery_in(tmp_path) as discovery:
        await discovery.register(instance(1))
        path = path_of(tmp_path, instance(1))
        assert path.read_bytes() == spell(instance(1))
        ages = []
        for _ in range(100):
            await trio.sleep(0.77)
            ages.append(age(path))
        assert 3 < max(ages) <= TTL / 3 + 0.01
    assert not path.exists()


async def test_own_files_are_deleted_even_if_all_is_cancelled(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    with trio.move_on_after(5):
        async with discovery_in(tmp_path) as discovery:
            await discovery.register(instance(1))
            await trio.sleep_forever()
    assert not path_of(tmp_path, instance(1)).exists()


async def test_what_the_dead_left_is_deleted_and_told(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = strangers_file(tmp_path, instance(9), NOW)
    half = path.with_name(".tmp_0123456789abcdef")
    files.write(half, b"half", NOW)
    readme = path.with_name("READ-ME")
    files.write(readme, b"", NOW)
    async with discovery_in(tmp_path) as discovery:
        await discovery.register(instance(1))
        async with discovery.watch(Instance) as watch:
            assert set(watch.snapshot) == {instance(1).key, instance(9).key}
            assert await watch.next_change() == Removed(instance(9))
            assert TTL < trio.current_time() < TTL * 4 / 3 + 0.2
        assert path_of(tmp_path, instance(1)).exists()
    assert half.exists()
    assert readme.exists()


async def test_a_stranger_who_touches_his_file_lives(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = strangers_file(tmp_path, instance(9), NOW)
    async with store_in(tmp_path) as store, store.watch("v1/instances"):
        for _ in range(20):
            await trio.sleep(TTL / 3)
            assert files.touch(path, wall())
    assert path.exists()


async def test_a_process_that_was_frozen_touches_its_own_and_spares_others(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """All were frozen; the others resume a little later, but before they would be silent."""
    alive = strangers_file(tmp_path, instance(8), NOW)
    dead = strangers_file(tmp_path, instance(9), NOW)
    async with discovery_in(tmp_path) as discovery, discovery.watch(Instance) as watch:
        await discovery.register(instance(1))
        assert await watch.next_change() == Put(instance(1))
        await trio.sleep(4.5)
        autojump_clock.jump(100)
        await trio.sleep(0.01)
        assert age(path_of(tmp_path, instance(1))) < 0.1
        await trio.sleep(CHECK_EVERY)
        assert alive.exists()
        for _ in range(10):
            files.touch(alive, wall())
            await trio.sleep(TTL / 3)
        assert alive.exists()
        assert not dead.exists()
        assert await watch.next_change() == Removed(instance(9))


# --- loss --------------------------------------------------------------------------------


async def test_an_instance_whose_file_a_stranger_deleted_is_put_back_after_the_quiet_time(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with discovery_in(tmp_path) as discovery, discovery_in(tmp_path) as other:
        await discovery.register(instance(1))
        async with other.watch(Instance) as watch:
            await trio.sleep(20.5)
            path_of(tmp_path, instance(1)).unlink()
            assert await watch.next_change() == Removed(instance(1))
            removed = trio.current_time()
            assert await watch.next_change() == Put(instance(1))
            assert QUIET - 0.1 <= trio.current_time() - removed <= QUIET + CHECK_EVERY + 0.1
            assert trio.current_time() - 20.5 < TTL


async def test_a_card_whose_file_a_stranger_deleted_is_put_back_at_once(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with discovery_in(tmp_path) as discovery:
        await discovery.register(card(1))
        await trio.sleep(20.5)
        path_of(tmp_path, card(1)).unlink()
        await trio.sleep(CHECK_EVERY + 0.1)
        assert path_of(tmp_path, card(1)).exists()


async def test_a_lost_key_is_told_once(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with store_in(tmp_path) as store:
        await store.put(KEY, b"1")
        await store.put(store_key(instance(2)), b"2")
        path_of(tmp_path, instance(1)).unlink()
        assert await store.wait_lost() == {KEY}
        with trio.move_on_after(60) as nothing_more:
            await store.wait_lost()
        assert nothing_more.cancelled_caught


async def test_what_was_deleted_on_purpose_is_not_lost(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with store_in(tmp_path) as store:
        await store.put(KEY, b"1")
        await store.delete(KEY)
        with trio.move_on_after(60) as nothing:
            await store.wait_lost()
        assert nothing.cancelled_caught


async def test_a_directory_that_is_lost_comes_back_and_nobody_notices(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "store"
    async with discovery_in(root) as one, discovery_in(root) as two, discovery_in(root) as reader:
        for discovery, number in ((one, 1), (two, 2)):
            await discovery.register(card(number))
            await discovery.register(instance(number))
        async with reader.watch(Instance) as instances, reader.watch(ModelCard) as cards:
            await trio.sleep(20)
            shutil.rmtree(root)
            with trio.move_on_after(3 * TTL) as nothing:
                await instances.next_change()
            with trio.move_on_after(3 * TTL) as nothing_of_cards:
                await cards.next_change()
        assert nothing.cancelled_caught
        assert nothing_of_cards.cancelled_caught
        for number in (1, 2):
            assert path_of(root, card(number)).exists()
            assert path_of(root, instance(number)).exists()
    assert "the records last seen there stay in use" in caplog.text


async def test_after_an_outage_those_who_stay_away_are_told_gone(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    root = tmp_path / "store"
    gone = strangers_file(root, instance(9), NOW)
    async with discovery_in(root) as discovery, discovery.watch(Instance) as watch:
        await discovery.register(instance(1))
        assert await watch.next_change() == Put(instance(1))
        shutil.rmtree(root)
        assert await watch.next_change() == Removed(instance(9))
        # Back with the first file, after the check and the quiet time; then a whole ttl.
        assert QUIET + TTL <= trio.current_time() <= QUIET + TTL + 2 * CHECK_EVERY + 0.2
    assert not gone.exists()


async def test_a_directory_that_does_not_answer_loses_nothing(
    tmp_path: Path,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with store_in(tmp_path) as store:
        await store.put(KEY, b"1")

        def fail(*_: object, **__: object) -> bool:
            raise OSError("stale file handle")

        with monkeypatch.context() as broken:
            for name in ("touch", "status", "times", "look"):
                broken.setattr(files, name, fail)
            with trio.move_on_after(60) as nothing:
                await store.wait_lost()
        assert nothing.cancelled_caught
        await trio.sleep(TTL / 3 + 0.1)
        assert age(path_of(tmp_path, instance(1))) < TTL / 2
    assert "our records there grow old, and those of the dead stay: stale" in caplog.text
    assert caplog.text.count("stale file handle") < 20


# --- writing and reading -----------------------------------------------------------------


async def test_a_place_that_is_no_directory_is_unavailable(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    (tmp_path / "v1").touch()
    async with store_in(tmp_path) as store:
        with pytest.raises(StoreUnavailable):
            await store.put(KEY, b"1")
        with pytest.raises(StoreUnavailable):
            async with store.watch("v1/instances"):
                pytest.fail("there is nothing to watch")
        with pytest.raises(StoreUnavailable):
            await store.delete(KEY)
    with pytest.raises(FileUnusable, match=r"^DYN_FILE_KV=.*v1/below cannot be used"):
        async with open_file_discovery(FileSettings(tmp_path / "v1" / "below")):
            pytest.fail("there is nothing to open")


async def test_withdrawing_is_prompt_if_the_directory_is_gone(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    root = tmp_path / "store"
    async with discovery_in(root) as discovery:
        await discovery.register(instance(1))
        await discovery.register(card(1))
        await trio.sleep(0.5)
        shutil.rmtree(root)
        began = trio.current_time()
        await discovery.unregister(instance(1))
        await discovery.unregister(card(1))
        assert not discovery.has_withdrawn
    assert trio.current_time() == began
    assert not root.exists()


@pytest.mark.parametrize("in_its_place", [False, True], ids=["nothing", "a file"])
async def test_a_record_that_went_with_its_folder_is_withdrawn_when_that_is_back(
    tmp_path: Path, autojump_clock: MockClock, in_its_place: bool
) -> None:
    """Its readers, too, believe in it until then."""
    root, away = tmp_path / "store", tmp_path / "away"
    async with discovery_in(root) as discovery, discovery_in(root) as reader:
        await discovery.register(instance(1))
        async with reader.watch(Instance) as watch:
            root.rename(away)
            if in_its_place:
                root.touch()
            await discovery.unregister(instance(1))
            with pytest.raises(StoreUnavailable, match="may still stand in the discovery store"):
                await discovery.wait_withdrawn()
            with trio.move_on_after(60):
                await watch.next_change()
                pytest.fail("nobody can know that it has left")
            assert not discovery.has_withdrawn
            if in_its_place:
                root.unlink()
            away.rename(root)
            assert await watch.next_change() == Removed(instance(1))
            assert discovery.has_withdrawn


async def test_a_write_that_was_given_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system hangs; when it answers at last, nobody wants the file any more."""
    hangs, done, write = threading.Event(), trio.Event(), files.write
    token = trio.lowlevel.current_trio_token()

    def hang(path: Path, value: bytes, now: float) -> None:
        hangs.wait()
        write(path, value, now)

    remove = files.remove

    def notice(path: Path) -> None:
        remove(path)
        token.run_sync_soon(done.set)

    monkeypatch.setattr(files, "write", hang)
    monkeypatch.setattr(files, "remove", notice)
    async with open_file_store(FileSettings(tmp_path)) as store:
        with trio.move_on_after(0.05) as given_up:
            await store.put(KEY, b"1")
        assert given_up.cancelled_caught
        hangs.set()
        with trio.fail_after(10):
            await done.wait()
        assert not path_of(tmp_path, instance(1)).exists()


async def test_a_half_written_file_is_left_out_until_it_is_whole(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = path_of(tmp_path, instance(1))
    value = spell(instance(1))
    async with discovery_in(tmp_path) as discovery, discovery.watch(Instance) as watch:
        with path.open("wb") as file:
            for piece in (b"", value[:20], value[20:40]):
                file.write(piece)
                file.flush()
                with trio.move_on_after(2) as nothing:
                    await watch.next_change()
                assert nothing.cancelled_caught
            file.write(value[40:])
        assert await watch.next_change() == Put(instance(1))


async def test_a_file_that_is_emptied_holds_what_it_held(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = strangers_file(tmp_path, instance(1), wall())
    async with discovery_in(tmp_path) as discovery, discovery.watch(Instance) as watch:
        assert list(watch.snapshot.values()) == [instance(1)]
        path.write_bytes(b"")
        with trio.move_on_after(2) as nothing:
            await watch.next_change()
        assert nothing.cancelled_caught
        path.write_bytes(spell(instance(1, 9001)))
        assert await watch.next_change() == Put(instance(1, 9001))


async def test_a_watch_sees_a_new_file_a_replaced_one_and_its_end_in_order(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """As a real process makes them: a rename, a rename over it, and a deletion."""
    async with discovery_in(tmp_path) as discovery, discovery.watch(Instance) as watch:
        path = strangers_file(tmp_path, instance(1), wall())
        assert await watch.next_change() == Put(instance(1))
        files.write(path, spell(instance(1, 9001)), wall())
        assert await watch.next_change() == Put(instance(1, 9001))
        path.unlink()
        assert await watch.next_change() == Removed(instance(1, 9001))


async def test_without_inotify_a_watch_looks_often(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> Inotify:
        raise OSError("too many open files")

    monkeypatch.setattr(Inotify, "open", refuse)
    async with discovery_in(tmp_path) as discovery, discovery.watch(Instance) as watch:
        await trio.sleep(5)
        await discovery.register(instance(1))
        assert await watch.next_change() == Put(instance(1))
        assert trio.current_time() <= 5.11


async def test_with_inotify_a_watch_hears_at_once(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with discovery_in(tmp_path) as discovery, discovery.watch(Instance) as watch:
        await trio.sleep(5.5)
        await discovery.register(instance(1))
        assert await watch.next_change() == Put(instance(1))
        assert trio.current_time() <= 5.51


# --- real processes ----------------------------------------------------------------------

#: Registers one instance and stays until its standard input is closed.
PROGRAM = """
import sys
from pathlib import Path
import trio
from dynamo_trio.discovery import FileSettings
from dynamo_trio.discovery.file import open_file_store
from dynamo_trio.discovery.stored import open_stored_discovery
from tests.discovery.backends import instance

async def main():
    settings = FileSettings(Path(sys.argv[1]), ttl=float(sys.argv[2]))
    async with open_file_store(settings) as store:
        async with open_stored_discovery(store, quiet=1.0) as discovery:
            await discovery.register(instance(1))
            print("registered", flush=True)
            await trio.to_thread.run_sync(sys.stdin.read)

trio.run(main)
"""

#: In seconds; the shortest for which files are touched as often as they should be.
SHORT_TTL = 3.0
ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def another_process(root: Path) -> AsyncIterator[trio.Process]:
    command = [sys.executable, "-c", PROGRAM, str(root), str(SHORT_TTL)]
    async with trio.open_nursery() as nursery:
        run = partial(trio.run_process, stdin=subprocess.PIPE, cwd=ROOT, check=False)
        process: trio.Process = await nursery.start(run, command)
        try:
            yield process
        finally:
            process.kill()


async def test_two_processes_on_one_directory(tmp_path: Path) -> None:
    settings = FileSettings(tmp_path, ttl=SHORT_TTL)
    async with open_file_discovery(settings) as discovery, discovery.watch(Instance) as watch:
        await discovery.register(instance(2))
        assert await watch.next_change() == Put(instance(2))
        with trio.fail_after(60):
            async with another_process(tmp_path) as process:
                assert await watch.next_change() == Put(instance(1))
                # It stops as it should: its record goes at once, long before it is old.
                assert process.stdin is not None
                await process.stdin.aclose()
                assert await watch.next_change() == Removed(instance(1))
                assert await process.wait() == 0
            async with another_process(tmp_path) as process:
                assert await watch.next_change() == Put(instance(1))
                process.kill()
                assert await watch.next_change() == Removed(instance(1))
        assert path_of(tmp_path, instance(2)).exists()


async def test_a_process_that_was_frozen_too_long_registers_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dynamo_trio.discovery")
    settings = FileSettings(tmp_path, ttl=SHORT_TTL)
    async with open_file_discovery(settings) as discovery, discovery.watch(Instance) as watch:
        await discovery.register(instance(2))
        assert await watch.next_change() == Put(instance(2))
        with trio.fail_after(60):
            async with another_process(tmp_path) as process:
                assert await watch.next_change() == Put(instance(1))
                process.send_signal(signal.SIGSTOP)
                assert await watch.next_change() == Removed(instance(1))
                process.send_signal(signal.SIGCONT)
                assert await watch.next_change() == Put(instance(1))
        assert path_of(tmp_path, instance(2)).exists()
    assert "deleted what nobody keeps alive in v1/instances" in caplog.text
