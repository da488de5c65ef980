"""The tree of tasks: who is in it, where each waits, and what may end it."""

from __future__ import annotations

import threading

import pytest
import trio
import trio.testing

from dynamo_trio.process import tasks
from dynamo_trio.process.tasks import Loop, task_tree


async def wait_shielded() -> None:
    with trio.move_on_after(50, shield=True):
        await trio.sleep_forever()


async def parent(children: int, nurseries: list[trio.Nursery]) -> None:
    async with trio.open_nursery() as nursery:
        nurseries.append(nursery)
        for _ in range(children):
            nursery.start_soon(wait_shielded)


def tree(loop: Loop | None = None) -> list[str]:
    """The lines of the tasks, without those of the threads."""
    text, _, _ = task_tree(loop).partition(" threads")
    return text.splitlines()[:-1]


def depth(line: str) -> int:
    return len(line) - len(line.lstrip())


@pytest.fixture
def name() -> str:
    return f"{__name__}.wait_shielded: "


async def test_it_tells_who_waits_where_for_how_long(name: str, autojump_clock: object) -> None:
    nurseries: list[trio.Nursery] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parent, 1, nurseries)
        await trio.testing.wait_all_tasks_blocked()
        lines = tree()
        nurseries[0].cancel_scope.cancel("enough")
        await trio.sleep(20)
        after = tree()
    (upper,) = (line for line in lines if ".parent: " in line)
    (line,) = (line for line in lines if name in line)
    assert upper.endswith("in parent > waits for its tasks")
    assert line.endswith("in wait_shielded > sleep_forever [ends in 50.0 s shielded]")
    assert "test_tasks.py:" in line
    assert depth(line) == depth(upper) + 4
    assert any(line.endswith("nursery [cancelled: enough]") for line in after)
    assert any("[ends in 30.0 s shielded]" in line for line in after)


async def test_who_asks_runs_now() -> None:
    (line,) = (line for line in tree() if "runs now" in line)
    assert line.endswith("in tree")


async def test_tasks_that_look_alike_are_counted(name: str) -> None:
    nurseries: list[trio.Nursery] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parent, 1000, nurseries)
        await trio.testing.wait_all_tasks_blocked()
        lines = tree()
        nursery.cancel_scope.cancel()
        # Shielded, so cancelled one by one.
        for task in tuple(nurseries[0].child_tasks):
            task._cancel_status._scope.cancel()
    assert len([line for line in lines if name in line]) == tasks.ALIKE
    assert f"and {tasks.OF_ONE_KIND - tasks.ALIKE} more of these" in {
        line.strip() for line in lines
    }
    kind, more = name.removesuffix(": "), 1000 - tasks.OF_ONE_KIND
    assert f"and {more} more of {kind}, not looked at" in {line.strip() for line in lines}
    assert int(lines[0].split()[0]) > 1000


@pytest.mark.parametrize(("many", "few"), [(0, tasks.ALIKE), (10_000, tasks.OF_ONE_KIND)])
async def test_of_many_tasks_some_are_looked_at_and_loners_always(
    monkeypatch: pytest.MonkeyPatch, name: str, many: int, few: int
) -> None:
    monkeypatch.setattr(tasks, "MANY", many)
    async with trio.open_nursery() as nursery:
        for group in range(10):
            nursery.start_soon(parent, 40, [], name=f"group-{group}")
        nursery.start_soon(trio.sleep_forever, name="hermit")
        for number in range(100):
            nursery.start_soon(trio.sleep_forever, name=f"generate {number}")
        await trio.testing.wait_all_tasks_blocked()
        lines = tree()
        told = await tasks.tell_tasks()
        for task in tuple(nursery.child_tasks):
            for inner in task.child_nurseries:
                for one in tuple(inner.child_tasks):
                    one._cancel_status._scope.cancel()
        nursery.cancel_scope.cancel()
    count, looked = (int(lines[0].split()[i]) for i in (0, 2))
    assert count > 10 * 41 + 101
    assert looked < 100 + 11 * few + 10 * few
    assert any(line.strip().startswith("hermit: ") for line in lines)
    assert {line.strip() for line in lines if "not looked at" in line} >= {
        f"and {100 - few} more of generate, not looked at",
        f"and {40 - few} more of {name.removesuffix(': ')}, not looked at",
    }
    assert told.splitlines()[0] == lines[0]
    assert {line for line in lines if "hermit" in line} <= set(told.splitlines())


async def test_others_run_while_the_tasks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "STEP", 10)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async def hold() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(trio.sleep_forever)

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(hold)
        nursery.start_soon(turn)
        await trio.sleep(0.01)
        before = turns
        text = await tasks.tell_tasks()
        nursery.cancel_scope.cancel()
    assert text.count(".hold: ") == 20
    assert turns - before >= 5


async def test_another_thread_may_ask(name: str) -> None:
    loop, answers = Loop.current(), []

    def ask() -> None:
        answers.append(tree())
        answers.append(tree(loop))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_shielded)
        await trio.testing.wait_all_tasks_blocked()
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        for task in tuple(nursery.child_tasks):
            task._cancel_status._scope.cancel()
    assert answers[0] == ["there is no event loop yet"]
    assert any(name in line for line in answers[1])
    assert any("runs now: threading.py:" in line for line in answers[1])  # where this one waits


async def test_every_thread_is_told_of() -> None:
    over = threading.Event()
    threads = [threading.Thread(target=over.wait, name=n, daemon=n == "d") for n in ("d", "stray")]
    for thread in threads:
        thread.start()
    text = task_tree()
    over.set()
    lines = [line.strip() for line in text.splitlines()]
    assert "stray (not a daemon)" in lines
    assert "d" in lines
    assert any(line.endswith("in Event.wait") for line in lines)


async def test_a_question_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_tasks", lambda *args: 1 / 0)
    assert task_tree() == "cannot tell the tasks: ZeroDivisionError('division by zero')"


def test_a_loop_that_is_over_has_no_tasks() -> None:
    async def main() -> Loop:
        return Loop.current()

    loop = trio.run(main)
    assert "<init>: has ended" in tree(loop)[1]
