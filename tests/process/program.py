"""A small process for the tests of signals, exit codes and reports: ``program.py SCENARIO``.

It prints ``ready`` once it can be signalled. Its one request, where it has one, ends when
stdin does.
"""

from dynamo_trio.process import signals

signals.install()

import ctypes  # noqa: E402 - the handler comes before everything that takes time
import logging  # noqa: E402 - see above
import os  # noqa: E402 - see above
import signal  # noqa: E402 - see above
import subprocess  # noqa: E402 - see above
import sys  # noqa: E402 - see above
import threading  # noqa: E402 - see above
import time  # noqa: E402 - see above
from pathlib import Path  # noqa: E402 - see above

import trio.testing  # noqa: E402 - see above

from dynamo_trio.errors import ConfigError, PortInUse  # noqa: E402 - see above
from dynamo_trio.lifecycle import Gate, Lifecycle, Outcome, Timetable  # noqa: E402 - see above
from dynamo_trio.process import ProcessContext, run_process, watchdog  # noqa: E402 - see above

#: No grace, patience without end, and a watchdog that cannot interfere.
CALM = Timetable(grace=0, drain=900)
#: The watchdog fires half a second after the stop begins.
WATCHED = Timetable(grace=0, drain=900, killed_after=2.5)


#: Children that nobody waits for.
LEFT: list[subprocess.Popen[str] | subprocess.Popen[bytes]] = []


async def stdin_closed() -> None:
    async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
        while await stdin.receive_some(100):
            pass


async def request(gate: Gate) -> None:
    with gate.admit("generate 1") as admission:
        with admission.scope:
            await stdin_closed()
            admission.settle(Outcome.FINISHED)


async def stubborn(gate: Gate) -> None:
    with gate.admit("stubborn 1"), trio.CancelScope(shield=True):
        await trio.sleep_forever()


async def stuck_thread(gate: Gate) -> None:
    with gate.admit("thread 1"):
        await trio.to_thread.run_sync(time.sleep, 1000)


async def serve(context: ProcessContext, lifecycle: Lifecycle, *tasks: object) -> None:
    context.attach(lifecycle)
    lifecycle.on_unregister(trio.lowlevel.checkpoint)
    async with trio.open_nursery() as outer:
        outer.start_soon(lifecycle.run)
        async with trio.open_nursery() as work:
            lifecycle.on_abort(work.cancel_scope.cancel)
            for task in tasks:
                work.start_soon(task, lifecycle.work)  # type: ignore[arg-type]  # one of several
            await trio.testing.wait_all_tasks_blocked()
            print("ready", flush=True)
            await lifecycle.wait_stopped()
            work.cancel_scope.cancel("stopped")


async def idle(context: ProcessContext) -> None:
    await serve(context, Lifecycle(CALM))


async def busy(context: ProcessContext) -> None:
    await serve(context, Lifecycle(CALM), request)


async def never_leaves(context: ProcessContext) -> None:
    await serve(context, Lifecycle(CALM), stubborn)


async def loses(context: ProcessContext) -> None:
    timetable = Timetable(grace=0, drain=0.05)
    await serve(context, Lifecycle(timetable, exit_code_on_loss=3), request)


async def thread_hangs(context: ProcessContext) -> None:
    await serve(context, Lifecycle(WATCHED), stuck_thread)


async def loop_spins(context: ProcessContext, timetable: Timetable = WATCHED) -> None:
    async def spin(_gate: Gate) -> None:
        await lifecycle.wait_stop_requested()
        while True:
            pass

    lifecycle = Lifecycle(timetable)
    await serve(context, lifecycle, spin)


async def loop_spins_before(context: ProcessContext) -> None:
    context.attach(Lifecycle(WATCHED))
    print("ready", flush=True)
    while True:
        pass


async def loop_spins_unwatched(context: ProcessContext) -> None:
    await loop_spins(context, CALM)


async def holds_gil(context: ProcessContext) -> None:
    async def hold(_gate: Gate) -> None:
        await lifecycle.wait_stop_requested()
        ctypes.PyDLL(None).sleep(1000)

    lifecycle = Lifecycle(WATCHED)
    await serve(context, lifecycle, hold)


async def stuck_in_c(context: ProcessContext) -> None:
    """No signal interrupts it, and it holds no interpreter lock."""
    context.attach(Lifecycle(WATCHED))
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    print("ready", flush=True)
    lock(mutex)


async def hears(context: ProcessContext) -> None:
    """Counts SIGUSR2 on its output."""
    context.on_signal(signal.SIGUSR2, lambda: print("heard", flush=True))
    await serve(context, Lifecycle(CALM), request)


async def leaks_thread(context: ProcessContext) -> None:
    threading.Thread(target=time.sleep, args=(1000,), daemon=False, name="stray").start()
    await serve(context, Lifecycle(CALM))


def leave_children() -> None:
    """One with a child of its own that ignores what it can, and one that has ended already."""
    script = "trap '' TERM HUP INT; sleep 1000 & echo $!; wait"
    child = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    print("left", child.pid, child.stdout.readline().strip(), flush=True)
    LEFT.append(child)
    LEFT.append(subprocess.Popen(["true"]))


async def leaks_children(context: ProcessContext) -> None:
    leave_children()
    await serve(context, Lifecycle(CALM))


async def leaks_children_and_hangs(context: ProcessContext) -> None:
    leave_children()
    await serve(context, Lifecycle(WATCHED), stuck_thread)


async def leaks_children_and_is_stubborn(context: ProcessContext) -> None:
    leave_children()
    await serve(context, Lifecycle(CALM), stubborn)


async def leaks_children_and_crashes(context: ProcessContext) -> None:
    leave_children()
    await crashes(context)


async def service_crashes(context: ProcessContext) -> None:
    async def crash(_gate: Gate) -> None:
        async def service() -> None:
            raise OSError("the disk is gone")

        await lifecycle.supervise(service)

    lifecycle = Lifecycle(CALM)
    await serve(context, lifecycle, crash)


async def fails_while_stopping(context: ProcessContext) -> None:
    async def late(_gate: Gate) -> None:
        await lifecycle.wait_stop_requested()
        lifecycle.fail(OSError("too late"))

    lifecycle = Lifecycle(CALM)
    await serve(context, lifecycle, late)


async def fast_exit(context: ProcessContext) -> None:
    await serve(context, Lifecycle(Timetable(fast_exit=True)), stubborn)


async def returns(_context: ProcessContext) -> None:
    await trio.lowlevel.checkpoint()


async def returns_code(_context: ProcessContext) -> int:
    await trio.lowlevel.checkpoint()
    return 1


async def crashes(_context: ProcessContext) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        raise ValueError("a mistake in the tree's own code")


async def bad_config(_context: ProcessContext) -> None:
    raise ConfigError("DYN_HTTP_PORT=abc: must be a whole number")


async def port_in_use(_context: ProcessContext) -> None:
    async with trio.open_nursery():
        raise PortInUse("127.0.0.1:8000 is in use")


async def two_errors(_context: ProcessContext) -> None:
    raise BaseExceptionGroup("two", [PortInUse("8000 is in use"), ValueError("and a mistake")])


async def early(context: ProcessContext) -> None:
    if not context.stop_pending:
        print("loading the engine", flush=True)
    await serve(context, Lifecycle(CALM))


async def never_attaches(_context: ProcessContext) -> None:
    print("ready", flush=True)
    await trio.sleep_forever()


def wait_for_signal() -> None:
    """A long import, during which signals arrive; over when stdin is."""
    print("ready", flush=True)
    while not signals.stop_pending():
        time.sleep(0.01)
    print("pending", flush=True)
    sys.stdin.read()


def main() -> None:
    scenario = sys.argv[1]
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    if scenario == "early":
        wait_for_signal()
    if scenario == "never_attaches":
        watchdog.EARLY_LIMIT = float(os.environ.get("EARLY_LIMIT", "1000"))
    path = os.environ.get("REPORT")
    run_process(globals()[scenario], report_path=Path(path) if path else None)


if __name__ == "__main__":
    main()
