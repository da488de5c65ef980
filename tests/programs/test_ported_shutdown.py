"""Programs with ``install_signal_handlers``, as processes; and what stays behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.standalone.harness import Server, clean_environ

if TYPE_CHECKING:
    from tests.programs.conftest import Fleet

#: What follows decides whether signals, log and report are the process's or the program's.
PROGRAM = """
import logging, sys
from functools import partial
import trio
from dynamo_trio import dynamo_worker, install_signal_handlers

async def letters(request):
    for letter in request:
        yield letter

def say(text):
    sys.stderr.write(text + "\\n")  # one write: a log line may come from another thread

async def callback(name, event):
    say(f"{name}, event {event.is_set()}")

@dynamo_worker()
async def main(runtime):
    endpoint, event = runtime.endpoint("t.b.generate"), trio.Event()
    install_signal_handlers(
        None, runtime, [endpoint], event, 0.1, partial(callback, "drain", event),
        partial(callback, "pre", event), partial(callback, "cleanup", event),
    )
    async with runtime.temporary_folder("lora-") as folder, endpoint.serving(letters):
        (folder / "adapter").write_text("weights")
        say(f"made {folder}")
        await runtime.lifecycle.wait_stopped()
    say("left")

"""
#: The end of the program, and whether the process writes a report.
ENDS = {
    "trio.run": ("trio.run(main)", False),
    "run_process": ("from dynamo_trio.process import run_process; run_process(main)", True),
}


@pytest.mark.parametrize(("last", "reports"), ENDS.values(), ids=ENDS)
def test_a_program_with_handlers_of_its_own(
    fleet: Fleet, tmp_path: Path, last: str, reports: bool
) -> None:
    environ = fleet.environ | {"TMPDIR": str(tmp_path / "scratch")}
    (tmp_path / "scratch").mkdir()
    popen = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + last],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environ(**environ),
    )
    server = Server(popen)
    fleet.servers.append(server)
    folder = Path(server.wait_log("made ").rpartition(" ")[2].strip())
    assert (folder / "adapter").exists()
    assert len(fleet.records("instances")) == 1
    assert server.stop() == 0, server.log
    said = [line for line in server.lines if "event " in line and "{" not in line]
    assert said == ["drain, event False", "pre, event False", "cleanup, event True"]
    assert any("left" in line for line in server.lines)
    assert fleet.records("instances") == []
    assert list((tmp_path / "scratch").iterdir()) == []
    if reports:
        steps = {step["step"]: step["outcome"] for step in server.report["steps"]}
        names = ("drain_callback", "pre_shutdown_callback", "cleanup_callback")
        assert [steps[name] for name in names] == ["completed"] * 3
        assert steps[f"remove {folder}"] == "completed"


def test_a_worker_leaves_no_temporary_file(fleet: Fleet, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    worker = fleet.worker("--itl-ms", "1", TMPDIR=str(scratch))
    assert worker.stop() == 0, worker.log
    assert list(scratch.iterdir()) == []
    assert fleet.records("instances") == fleet.records("mdc") == []
