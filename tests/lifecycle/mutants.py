"""Break the lifecycle in many ways, and see that the model test finds each.

``python tests/lifecycle/mutants.py [NAME ...]`` copies the package, applies one mutant at a
time to the copy, and runs ``test_lifecycle_model.py`` against it. A mutant that survives is a
hole in the model test, and the exit code is 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[2]
MODEL = Path(__file__).with_name("test_lifecycle_model.py")


@attrs.frozen
class Mutant:
    """One mistake: in ``file``, ``old`` becomes ``new``."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "an Event that is replaced at each admission, in place of the parking lot",
        "admission.py",
        """        while self._awaited:
            await self._leavers.park()
""",
        """        while self._awaited:
            self._event = getattr(self, "_event", None) or trio.Event()
            await self._event.wait()
""",
    ),
    Mutant(
        "the admission ends with the cut, not with the farewell",
        "admission.py",
        "        return sum(admission.cut(reason) for admission in self.admissions())\n",
        """        cut = sum(admission.cut(reason) for admission in self.admissions())
        self._inside.clear()
        self._awaited = 0
        self._leave = lambda admission: None
        return cut
""",
    ),
    Mutant(
        "the grace period is slept to its end",
        "lifecycle.py",
        "await self._wait_out_grace()",
        "await trio.sleep_forever()",
    ),
    Mutant(
        "the grace period ends although somebody is there",
        "lifecycle.py",
        "        while self.work.count:\n",
        "        while self.work.count and self.grace_over:\n",
    ),
    Mutant(
        "phases that are passed are not recorded",
        "track.py",
        "            self.journal.skip(skipped.label)\n",
        "            pass\n",
    ),
    Mutant(
        "the gate is shut after the drain",
        "lifecycle.py",
        "        self.work.shut()\n        self._hand_over()\n",
        "        self._hand_over()\n",
    ),
    Mutant(
        "the gate of the endpoints is shut while the front drains",
        "lifecycle.py",
        "        self.http.close()\n        assert",
        "        self.http.close()\n        self.work.shut()\n        assert",
    ),
    Mutant(
        "deadlines may grow",
        "deadlines.py",
        "        self._hard = min(self._hard, hard)\n"
        "        self.budget.deadline = min(self.budget.deadline, hard - reserve)\n",
        "        self._hard = hard\n        self.budget.deadline = hard - reserve\n",
    ),
    Mutant(
        "the budget has no reserve",
        "deadlines.py",
        "hard - reserve)",
        "hard)",
    ),
    Mutant(
        "farewells are not bounded",
        "lifecycle.py",
        """        with trio.CancelScope(deadline=now + farewell):
            await self._wait_empty()
""",
        """        await self._wait_empty()
""",
    ),
    Mutant(
        "nobody is aborted",
        "lifecycle.py",
        "        for abort in self._abort:\n            abort()\n",
        "",
    ),
    Mutant(
        "an escalation cancels the current phase, not the budget",
        "lifecycle.py",
        "        self._deadlines.budget.cancel(cause)\n",
        "        self._record.track.scope.cancel(cause)\n",
    ),
    Mutant(
        "an escalation does not refuse",
        "lifecycle.py",
        "        self._refuse()\n        self._withdrawal.begin()\n        hard",
        "        self._withdrawal.begin()\n        hard",
    ),
    Mutant(
        "a callback's failure is caught by `except Exception`",
        "lifecycle.py",
        """        except* Exception as group:
            logger.error("%s failed; the stop goes on", name, exc_info=group)
""",
        """        except Exception as group:
            logger.error("%s failed; the stop goes on", name, exc_info=group)
            raise
""",
    ),
    Mutant(
        "callbacks run after a fatal error",
        "lifecycle.py",
        "        if self._fatal:\n            self._record.steps.skip(name)\n            return\n",
        "",
    ),
    Mutant(
        "a fatal error does not end the grace period",
        "lifecycle.py",
        '            self._patience.cancel("fatal error")\n',
        "",
    ),
    Mutant(
        "callbacks are not bounded",
        "lifecycle.py",
        "trio.CancelScope(relative_deadline=self.timetable.hook)",
        "trio.CancelScope()",
    ),
    Mutant(
        "the drain waits for requests that are not graceful",
        "lifecycle.py",
        "                await self.work.wait_idle()\n",
        "                await self.work.wait_empty()\n",
    ),
    Mutant(
        "the drain limit counts from the beginning of the stop",
        "lifecycle.py",
        "                scope.deadline = self._deadlines.capped(self.timetable.drain)\n",
        "                scope.deadline = self._record.began + self.timetable.drain\n",
    ),
    Mutant(
        "no drain limit",
        "lifecycle.py",
        "                scope.deadline = self._deadlines.capped(self.timetable.drain)\n",
        "",
    ),
    Mutant(
        "the front is not cut at its limit",
        "lifecycle.py",
        "            self.http.cut_all(CutReason.DRAIN_LIMIT)\n",
        "",
    ),
    Mutant(
        "an escalation cancels the unregistering",
        "lifecycle.py",
        "        self._deadlines.budget.cancel(cause)\n",
        "        self._deadlines.budget.cancel(cause)\n"
        "        for shield in self._deadlines._shields:\n            shield.cancel()\n",
    ),
    Mutant(
        "a fatal error does not unregister at once",
        "lifecycle.py",
        "        self._withdrawal.begin()\n        hard",
        "        hard",
    ),
    Mutant(
        "the unregistering is not bounded",
        "lifecycle.py",
        "self._deadlines.shield(self.timetable.unregister)",
        "self._deadlines.shield(900)",
    ),
    Mutant(
        "a shield does not shrink",
        "deadlines.py",
        "            shield.deadline = min(shield.deadline, hard)\n",
        "            pass\n",
    ),
    Mutant(
        "a phase ends as completed although its limit ended it",
        "journal.py",
        "        return Ending.TIMED_OUT if over else Ending.CANCELLED\n",
        "        return Ending.COMPLETED\n",
    ),
    Mutant(
        "the shutdown event is set only at the end",
        "lifecycle.py",
        "        self.interrupted.set()\n        self.work.shut()\n",
        "        self.work.shut()\n",
    ),
)


def check(mutant: Mutant, folder: Path) -> bool:
    """Is the mutant found? Works in ``folder``."""
    package = folder / "dynamo_trio"
    shutil.copytree(ROOT / "dynamo_trio", package, ignore=shutil.ignore_patterns("__pycache__"))
    path = package / "lifecycle" / mutant.file
    source = path.read_text()
    assert source.count(mutant.old) == 1, f"{mutant.name}: not found once in {mutant.file}"
    path.write_text(source.replace(mutant.old, mutant.new))
    return run_model(folder) != 0


def run_model(folder: Path) -> int:
    """Run the model test against the package in ``folder``; returns pytest's exit code."""
    command = [sys.executable, "-P", "-m", "pytest", "-qx", str(MODEL), "-p", "no:cacheprovider"]
    command += ["-o", f"pythonpath={folder}", "--hypothesis-seed=0", "--timeout=300"]
    environ = os.environ | {"MODEL_EXAMPLES": "1500", "MODEL_PACKAGE": str(folder)}
    return subprocess.run(command, env=environ, cwd=ROOT, capture_output=True).returncode


def check_healthy(folder: Path) -> None:
    """Nothing is proved by a test that fails anyway."""
    shutil.copytree(ROOT / "dynamo_trio", folder / "dynamo_trio")
    assert run_model(folder) == 0, "the model test fails without any mutant"


def survivors(mutants: tuple[Mutant, ...] = MUTANTS) -> list[str]:
    """The names of the mutants that the model test does not find."""
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        check_healthy(Path(folder))
    for mutant in mutants:
        with tempfile.TemporaryDirectory() as folder:
            found = check(mutant, Path(folder))
        print("found   " if found else "SURVIVES", mutant.name, flush=True)
        if not found:
            alive.append(mutant.name)
    return alive


def main(names: list[str]) -> int:
    chosen = tuple(m for m in MUTANTS if not names or any(n in m.name for n in names))
    return 1 if survivors(chosen) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
