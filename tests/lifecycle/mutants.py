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
        "farewells.py",
        "            admission.cut(reason())\n        await trio.lowlevel.checkpoint()\n",
        """            admission.cut(reason())
        await trio.lowlevel.checkpoint()
    gate._inside.clear()
    gate._awaited = 0
    leave = type(gate)._leave
    if leave.__name__ != "<lambda>":
        type(gate)._leave = lambda gate, one: one in gate._inside and leave(gate, one)
""",
    ),
    Mutant(
        "the grace period is slept to its end",
        "lifecycle.py",
        "await self._grace.wait_out(self.work, self.describe_left)",
        "await trio.sleep_forever()",
    ),
    Mutant(
        "the grace period ends although somebody is there",
        "grace.py",
        "        while work.count:\n",
        "        while work.count and self._peers():\n",
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
        "        self.work.shut()\n        self._hand_over.begin",
        "        self._hand_over.begin",
    ),
    Mutant(
        "the gate of the endpoints is shut while the front drains",
        "lifecycle.py",
        "        self.http.close()\n        await self._steps",
        "        self.http.close()\n        self.work.shut()\n        await self._steps",
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
        "farewells.py",
        """        with trio.CancelScope(deadline=now + seconds):
            await self.over()
""",
        """        await self.over()
""",
    ),
    Mutant(
        "nobody is aborted",
        "farewells.py",
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
        "steps.py",
        """        except* trio.Cancelled:
            raise  # from outside
""",
        """        except StoreUnavailable:
            raise
        except Exception as group:
            logger.error("%s failed; the stop goes on", name, exc_info=group)
        try:
            pass
""",
    ),
    Mutant(
        "a callback may leave the process",
        "steps.py",
        "        except* BaseException as group:\n",
        "        except* Exception as group:\n",
    ),
    Mutant(
        "callbacks run after a fatal error",
        "lifecycle.py",
        "hook, lambda: self._fatal)",
        "hook, lambda: False)",
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
        "a callback that cannot be cancelled is waited for",
        "beside.py",
        "        with trio.move_on_after(UNWIND, shield=True):\n",
        "        with trio.CancelScope(shield=True):\n",
    ),
    Mutant(
        "a callback that nobody waits for any more is not cancelled",
        "beside.py",
        '            limit.cancel("nobody waits for it any more")\n',
        "",
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
        "            await cut_all(self.http, lambda: CutReason.DRAIN_LIMIT)\n",
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
        "self._deadlines.shield(limit), job",
        "self._deadlines.shield(900), job",
    ),
    Mutant(
        "the unregistering takes the reserve",
        "lifecycle.py",
        "min(timetable.unregister, self._deadlines.spare(escalated=self._escalated))",
        "timetable.unregister",
    ),
    Mutant(
        "the unregistering has no time behind the budget",
        "deadlines.py",
        "            return max(0.0, self._hard - now) / 2\n",
        "            return 0.0\n",
    ),
    Mutant(
        "after an escalation the engine may use the time for farewells",
        "lifecycle.py",
        "            if self._escalated:  # what",
        "            if False:  # what",
    ),
    Mutant(
        "nobody speaks for who does not leave",
        "farewells.py",
        "            gate.abort_all()\n",
        "            pass\n",
    ),
    Mutant(
        "who is spoken for counts twice",
        "admission.py",
        """        else:
            self._count(admission)
""",
        "        self._count(admission)\n",
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
        "        self._interrupt()\n        self.work.shut()\n",
        "        self.work.shut()\n",
    ),
    Mutant(
        "places are not used up",
        "prospects.py",
        "        self.places -= 1\n",
        "",
    ),
    Mutant(
        "the hopeless are handed over at once, not paced",
        "handover.py",
        "await trio.sleep(interval)",
        "await trio.lowlevel.checkpoint()",
    ),
    Mutant(
        "many are handed over as slowly as few",
        "handover.py",
        "min(INTERVAL, self._left() * SHARE / len(queue))",
        "INTERVAL",
    ),
    Mutant(
        "who has no estimate counts as hopeless",
        "handover.py",
        "return 0.0 if needs is None",
        "return 1.0 if needs is None",
    ),
    Mutant(
        "the hopeless are judged without a look at what is left",
        "handover.py",
        "else needs - left",
        "else needs",
    ),
    Mutant(
        "what cannot be continued elsewhere is handed over early",
        "handover.py",
        " for one in admissions if one.prospects.movable]",
        " for one in admissions]",
    ),
    Mutant(
        "migrate gives peers more than they take",
        "handover.py",
        "                if admission.peer.may_take:\n",
        "                if True:\n",
    ),
    Mutant(
        "migrate gives nothing to a peer that cannot say what it takes",
        "prospects.py",
        "return self.places is None or self.places > 0",
        "return bool(self.places)",
    ),
    Mutant(
        "migrate cuts what cannot be continued elsewhere",
        "handover.py",
        "            if admission.prospects.movable:\n",
        "            if admission.reason is None:\n",
    ),
    Mutant(
        "a peer that cannot say gets nothing at the limit",
        "admission.py",
        "self.confirmed or self.peer.places is None",
        "self.confirmed",
    ),
    Mutant(
        "what cannot be continued elsewhere is handed over at the limit",
        "admission.py",
        "        if self.prospects.movable and not self.moved:\n",
        "        if not self.moved:\n",
    ),
    Mutant(
        "auto hands nothing over",
        "handover.py",
        "            self._begin_pacing(admissions, nursery)\n",
        "            pass\n",
    ),
    Mutant(
        "who waits for places holds up the drain",
        "lifecycle.py",
        '                    beside.cancel_scope.cancel("drained")\n',
        "",
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
