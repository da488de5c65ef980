"""Files of the file backend, and how what is seen of them is judged. No Trio, no clock."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from typing import TYPE_CHECKING

import pytest

from dynamo_trio.discovery import files
from dynamo_trio.discovery.file_view import LATE, BucketView, Expiry, Rounds
from dynamo_trio.discovery.files import Content, Look
from dynamo_trio.discovery.inotify import Inotify
from dynamo_trio.discovery.store import StorePut, StoreRemoved
from dynamo_trio.wire.dynamo.keys import file_name
from tests.wire.dynamo.wire_vectors import vector

if TYPE_CHECKING:
    from pathlib import Path

NOW = 1_700_000_000.0
TTL = 10.0


# --- writing -----------------------------------------------------------------------------


def test_a_file_is_written_with_its_directory_and_time(tmp_path: Path) -> None:
    path = tmp_path / "v1" / "instances" / "a"
    files.write(path, b"value", NOW)
    assert path.read_bytes() == b"value"
    assert path.stat().st_mtime == NOW
    assert stat.S_IMODE(path.stat().st_mode) & stat.S_IWUSR
    assert list(path.parent.iterdir()) == [path]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """Two values, each of one letter, written in turn while somebody reads."""
    path, size = tmp_path / "a", 200_000
    values = [letter * size for letter in (b"x", b"y")]
    files.write(path, values[0], NOW)
    done = threading.Event()

    def write() -> None:
        for turn in range(200):
            files.write(path, values[turn % 2], NOW)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(path.read_bytes())
    writer.join()
    assert seen <= set(values)
    assert seen


def test_a_write_that_fails_leaves_the_old_value_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    files.write(path, b"old", NOW)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "utime", fail)
    with pytest.raises(OSError, match="disk full"):
        files.write(path, b"new", NOW)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_not_there_can_be_removed_but_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "a"
    files.remove(path)
    assert not files.touch(path, NOW)
    assert files.status(path) is None


def test_of_what_was_in_a_folder_that_is_gone_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "no" / "such", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=r"No such file|Not a directory"):
            files.remove(path)
        assert not files.touch(path, NOW)
        assert files.status(path) is None


# --- looking -----------------------------------------------------------------------------


def values_in(directory: Path, before: dict[str, Content] | None = None) -> dict[str, bytes]:
    return {n: c.value for n, c in files.look(directory, before or {}).files.items()}


def test_only_whole_plain_files_are_seen(tmp_path: Path) -> None:
    files.write(tmp_path / "good", b"value", NOW)
    (tmp_path / ".tmp_0123456789abcdef").write_bytes(b"half")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "good")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as plug:
        plug.bind(str(tmp_path / "socket"))
    assert values_in(tmp_path) == {"good": b"value"}


def test_an_old_file_is_seen_all_the_same(tmp_path: Path) -> None:
    """Its age is the expiry's business: a live owner may be late."""
    files.write(tmp_path / "old", b"value", 1.0)
    assert values_in(tmp_path) == {"old": b"value"}


def test_what_did_not_change_is_not_read_again(tmp_path: Path) -> None:
    files.write(tmp_path / "a", b"value", NOW)
    (status,) = [s for _, s in files.statuses(tmp_path)]
    known = {"a": Content(b"as it was read", files.Stamp.of(status))}
    assert values_in(tmp_path, known) == {"a": b"as it was read"}
    files.write(tmp_path / "a", b"VALUE", NOW)
    assert values_in(tmp_path, known) == {"a": b"VALUE"}


def test_a_file_that_changed_just_now_is_read_again_whatever_its_stamp(tmp_path: Path) -> None:
    """In the same tick of the file system's clock a second change leaves the same stamp."""
    files.write(tmp_path / "a", b"value", NOW)
    assert files.look(tmp_path, {}).files["a"].stamp is None


def test_a_file_that_cannot_be_read_counts_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(tmp_path / "a", b"value", NOW)
    files.write(tmp_path / "b", b"value", NOW)

    def refuse(*_: object) -> int:
        raise PermissionError("not for you")

    monkeypatch.setattr(os, "open", refuse)
    assert values_in(tmp_path, {"a": Content(b"as it was", None)}) == {"a": b"as it was"}


def test_a_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "huge").write_bytes(b"x")
    os.truncate(tmp_path / "huge", 10 * files.MAX_VALUE)
    assert len(values_in(tmp_path)["huge"]) == files.MAX_VALUE + 1


# --- the view ----------------------------------------------------------------------------

A, B, C = (file_name(key) for key in ("x/a", "x/b", "x/c"))


def look(**contents: bytes) -> Look:
    names = {"a": A, "b": B, "c": C}
    return Look((1, 1), {names[n]: Content(value, None) for n, value in contents.items()})


def other_directory(seen: Look) -> Look:
    return Look((1, 2), seen.files)


@pytest.fixture
def view() -> BucketView:
    view = BucketView(TTL)
    view.update(look(a=b"1", b=b"1"), 0)
    return view


def test_names_are_unescaped_as_dynamo_escapes_them() -> None:
    cases = vector("30_file_key_escape")["cases"]
    seen = Look((1, 1), {case["file"]: Content(b"1", None) for case in cases})
    view = BucketView(TTL)
    assert view.update(seen, 0) == [StorePut(case["key"], b"1") for case in cases]
    assert set(view.values) == {case["key"] for case in cases}


@pytest.mark.parametrize("name", ["a-b", "a%2", "a%ZZ", "%FF", "a.json", "ä"])
def test_a_file_with_another_name_is_no_record(name: str) -> None:
    assert BucketView(TTL).update(Look((1, 1), {name: Content(b"1", None)}), 0) == []


def test_a_new_and_a_changed_file_are_told_once(view: BucketView) -> None:
    seen = look(a=b"2", b=b"1", c=b"1")
    assert view.update(seen, 1) == [StorePut("x/a", b"2"), StorePut("x/c", b"1")]
    assert view.update(seen, 2) == []


def test_a_missing_file_is_told_at_the_second_look(view: BucketView) -> None:
    assert view.update(look(a=b"1"), 1) == []
    assert view.doubtful
    assert view.update(look(a=b"1"), 1.05) == [StoreRemoved("x/b")]
    assert not view.doubtful
    assert view.update(look(a=b"1"), 2) == []


def test_a_file_that_is_back_at_the_second_look_was_never_gone(view: BucketView) -> None:
    view.update(look(a=b"1"), 1)
    assert view.update(look(a=b"1", b=b"2"), 1.05) == [StorePut("x/b", b"2")]


def test_a_directory_that_is_being_deleted_is_not_its_files_leaving(view: BucketView) -> None:
    """The last look before it was gone saw it empty."""
    assert view.update(look(), 1) == []
    view.away()
    assert set(view.values) == {"x/a", "x/b"}
    assert view.update(look(), 2) == []
    assert view.update(look(), 3) == []


def test_after_an_outage_what_is_missing_is_held_for_a_whole_ttl(view: BucketView) -> None:
    view.away()
    assert view.update(look(b=b"1", c=b"1"), 100) == [StorePut("x/c", b"1")]
    assert view.update(look(b=b"1", c=b"1"), 100 + TTL - 0.1) == []
    assert view.update(look(b=b"1", c=b"1"), 100 + TTL) == []
    assert view.update(look(b=b"1", c=b"1"), 100 + TTL + 0.1) == [StoreRemoved("x/a")]


def test_after_an_outage_what_came_back_may_leave_as_ever(view: BucketView) -> None:
    view.away()
    view.update(look(a=b"1"), 100)
    view.update(look(), 101)
    assert view.update(look(), 101.05) == [StoreRemoved("x/a")]


def test_another_directory_under_the_same_name_is_an_outage(view: BucketView) -> None:
    assert view.update(other_directory(look()), 100) == []
    assert view.update(other_directory(look()), 101) == []
    assert set(view.values) == {"x/a", "x/b"}


# --- expiry ------------------------------------------------------------------------------


def rounds(expiry: Expiry, *modified: dict[str, int]) -> list[set[str]]:
    """What is deleted in each round; given what time stamps it sees."""
    return [set(expiry.judge(times)) for times in modified]


def test_a_file_that_nobody_touches_is_deleted_in_the_fourth_round() -> None:
    """A round is a third of the time-to-live, so it was the same for as long as that."""
    dead = {A: 1}
    assert rounds(Expiry(), dead, dead, dead, dead) == [set(), set(), set(), {A}]


def test_a_file_that_is_touched_is_never_deleted() -> None:
    assert not set().union(*rounds(Expiry(), *({A: turn} for turn in range(100))))


def test_one_touch_in_a_time_to_live_is_enough() -> None:
    times = [{A: turn // 3} for turn in range(100)]
    assert not set().union(*rounds(Expiry(), *times))


@pytest.mark.parametrize("stamp", [0, -(10**18), 10**18, 4 * 10**18])
def test_what_a_time_stamp_says_does_not_matter(stamp: int) -> None:
    """It was made by another clock."""
    alive = [{A: stamp + turn} for turn in range(20)]
    assert not set().union(*rounds(Expiry(), *alive))
    dead = [{A: stamp}] * 4
    assert rounds(Expiry(), *dead)[-1] == {A}


def test_what_was_seen_before_a_freeze_does_not_count() -> None:
    expiry = Expiry()
    rounds(expiry, *[{A: 1, B: 1}] * 3)
    expiry.forget()
    # b was frozen like us, and touches its file a little later than we would.
    later = [{A: 1, B: 1}, {A: 1, B: 2}, {A: 1, B: 2}, {A: 1, B: 2}]
    assert rounds(expiry, *later) == [set(), set(), set(), {A}]


def test_a_file_with_another_name_is_not_deleted() -> None:
    assert not set().union(*rounds(Expiry(), *[{"READ-ME": 1}] * 9))


def test_a_late_round_is_noticed_on_either_clock() -> None:
    every = Rounds(1.0)
    assert not every.begin(0, NOW)
    assert not every.begin(1, NOW + 1)
    assert every.begin(1 + 1 + LATE + 0.1, NOW + 2)  # stopped
    assert not every.begin(4.1, NOW + 3)
    assert every.begin(5.1, NOW + 1000)  # the clock was set, or the machine suspended
    assert not every.begin(6.1, NOW)  # set back: all files look young


def test_only_what_still_has_its_time_is_deleted(tmp_path: Path) -> None:
    for name in ("dead", "touched"):
        files.write(tmp_path / name, b"value", NOW)
    times = {**files.times(tmp_path), "gone": 0}
    files.touch(tmp_path / "touched", NOW + 20)
    assert files.remove_unchanged(tmp_path, times, time.monotonic() - 1) == []
    assert files.remove_unchanged(tmp_path, times, time.monotonic() + 60) == ["dead"]
    assert [path.name for path in tmp_path.iterdir()] == ["touched"]


# --- inotify -----------------------------------------------------------------------------


def has_news(ears: Inotify) -> bool:
    try:
        os.read(ears.fd, 65536)
    except BlockingIOError:
        return False
    return True


def test_news_come_of_whole_files_but_not_of_touches(tmp_path: Path) -> None:
    ears = Inotify.open()
    ears.listen(tmp_path)
    path = tmp_path / "a"
    files.write(path, b"value", NOW)
    assert has_news(ears)
    files.touch(path, NOW + 1)
    path.read_bytes()
    assert not has_news(ears)
    os.link(path, tmp_path / "b")
    assert has_news(ears)
    files.remove(path)
    assert not ears.drain()
    assert not has_news(ears)
    ears.close()


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_news_come_of_the_end_of_the_directory(tmp_path: Path, how: str) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    ears = Inotify.open()
    ears.listen(directory)
    if how == "deleted":
        directory.rmdir()
    else:
        directory.rename(tmp_path / "e")
    assert ears.drain()
    ears.close()


def test_there_are_no_news_of_what_is_no_directory(tmp_path: Path) -> None:
    ears = Inotify.open()
    (tmp_path / "file").touch()
    for path in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(OSError, match="directory"):
            ears.listen(path)
    ears.close()
