"""runtime.temporary_folder(): gone when its block is left, however it is left."""

from __future__ import annotations

import shutil
import threading
from typing import TYPE_CHECKING

import pytest
import trio

from dynamo_trio import open_runtime
from dynamo_trio import temporary as module

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dynamo_trio import DistributedRuntime


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folders are made."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def left(parent: Path) -> list[Path]:
    return list(parent.iterdir())


def fill(folder: Path) -> None:
    (folder / "adapter").mkdir()
    (folder / "adapter" / "weights").write_bytes(b"w")


async def test_it_is_removed_with_what_is_in_it(parent: Path) -> None:
    async with open_runtime() as runtime, runtime.temporary_folder("lora-") as folder:
        assert folder.parent == parent
        assert folder.name.startswith("lora-")
        fill(folder)
    assert left(parent) == []


async def test_an_error_in_the_block_changes_nothing(parent: Path) -> None:
    async with open_runtime() as runtime:
        with pytest.raises(RuntimeError, match="within"):
            await fail_within(runtime)
    assert left(parent) == []


async def fail_within(runtime: DistributedRuntime) -> None:
    async with runtime.temporary_folder() as folder:
        fill(folder)
        raise RuntimeError("within")


async def test_it_is_removed_when_cancelled(parent: Path) -> None:
    async with open_runtime() as runtime:
        with trio.CancelScope() as scope:
            async with runtime.temporary_folder() as folder:
                fill(folder)
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert left(parent) == []


async def test_many_are_removed_at_a_stop(parent: Path) -> None:
    async with open_runtime() as runtime, trio.open_nursery() as nursery:

        async def hold(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            async with runtime.temporary_folder() as folder:
                fill(folder)
                task_status.started()
                await runtime.lifecycle.wait_stopped()

        for _ in range(5):
            await nursery.start(hold)
        assert len(left(parent)) == 5
        runtime.shutdown()
    assert left(parent) == []


@pytest.fixture
def hanging_removal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    release = threading.Event()

    def hang(*args: object, **kwargs: object) -> None:
        release.wait()

    monkeypatch.setattr(shutil, "rmtree", hang)
    monkeypatch.setattr(module, "REMOVAL", 0.05)
    yield
    release.set()


@pytest.mark.usefixtures("hanging_removal")
async def test_a_removal_that_hangs_is_bounded_and_named(
    parent: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_runtime() as runtime:
        async with runtime.temporary_folder() as folder:
            runtime.shutdown()
            await runtime.lifecycle.wait_stopped()
        steps = {s.name: str(s.ending) for s in runtime.lifecycle.report().steps}
    assert steps[f"remove {folder}"] == "timed_out"
    assert f"temporary folder {folder}: not removed within 0.05 s" in caplog.text


async def test_what_cannot_be_removed_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
    async with open_runtime() as runtime, runtime.temporary_folder() as folder:
        pass
    assert f"temporary folder {folder}: not all of it can be removed" in caplog.text


async def test_a_folder_that_cannot_be_made(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(parent / "none"))
    async with open_runtime() as runtime:
        with pytest.raises(FileNotFoundError):
            async with runtime.temporary_folder():
                raise AssertionError("it must not run")
