"""``dynamo.common.utils.graceful_shutdown``, for programs that are ported from it.

There is one sequence, the lifecycle's; nothing here stops anything by itself. What a program
gives becomes the lifecycle's callbacks and limits, and then the stop is requested, by
:func:`graceful_shutdown` at once, by the handlers of :func:`install_signal_handlers` when a
signal comes.
"""

from __future__ import annotations

import inspect
import logging
import math
import signal
import threading
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

import attrs
import trio

from dynamo_trio.lifecycle import Hooks
from dynamo_trio.process import signals
from dynamo_trio.process.signals import HANDLED, RULES, Stage, Verb
from dynamo_trio.program.limits import tell_timetable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from dynamo_trio.lifecycle import Hook, Lifecycle, Settable
    from dynamo_trio.runtime import DistributedRuntime, Endpoint

logger = logging.getLogger("dynamo_trio.lifecycle")

#: Ten years, in seconds: the longest that any limit may be.
LONGEST = 315_360_000.0

#: Those that :func:`graceful_shutdown` has been called for: a second call returns at once.
_asked: WeakSet[Lifecycle] = WeakSet()
#: Who receives signals by Trio's handlers, which must not be nested: one, or nobody.
_receivers: list[Lifecycle] = []


async def graceful_shutdown(
    runtime: DistributedRuntime,
    endpoints: Iterable[Endpoint],
    shutdown_event: Settable | None = None,
    grace_period_s: float | None = None,
    drain_callback: Hook | None = None,
    pre_shutdown_callback: Hook | None = None,
    cleanup_callback: Hook | None = None,
) -> None:
    """Stop the process gracefully; returns once the shutdown of the runtime has been initiated.

    By then the endpoints are withdrawn, the grace period is over, the callbacks have ended, and
    new requests are refused. The requests that are left are waited for by the lifecycle
    (``await runtime.lifecycle.wait_stopped()``). If the caller is cancelled the stop goes on.
    A second call returns at once, and so does one from a callback of the stop. In a stop that
    something else has begun, the callbacks whose turn is still to come are run, and
    ``grace_period_s`` is without effect.

    Args:
        runtime: all of its endpoints leave discovery, named in ``endpoints`` or not.
        endpoints: those of other runtimes in the process leave with them.
        shutdown_event: its ``set()`` is called between ``pre_shutdown_callback`` and
            ``cleanup_callback``, and in any case; perhaps more than once.
        grace_period_s: seconds; in place of ``DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS``.
        drain_callback: an async function without arguments, called after the grace period.
            Each callback has ``DYN_TRIO_SHUTDOWN_CALLBACK_TIMEOUT_SECS``; one that fails or
            takes longer is logged and passed. After a fatal error none is called.
        pre_shutdown_callback: called after ``drain_callback``.
        cleanup_callback: called when new requests are refused and old ones still run.

    Raises:
        TypeError, ValueError: an argument is not what it must be; nothing is stopped then.
    """
    hooks = _hooks(shutdown_event, drain_callback, pre_shutdown_callback, cleanup_callback)
    lifecycle, others = runtime.lifecycle, _others(runtime, endpoints)
    grace = _grace(grace_period_s)
    if lifecycle in _asked:
        logger.debug("graceful_shutdown() is under way already")
        await trio.lowlevel.checkpoint()
        return
    _asked.add(lifecycle)
    if lifecycle.stopping:
        await _join(lifecycle, hooks, others)
    else:
        _prepare(lifecycle, hooks, others, grace)
        lifecycle.request_stop("graceful_shutdown()")
    if lifecycle.is_calling:  # it would wait for itself
        await trio.lowlevel.checkpoint()
    else:
        await lifecycle.endpoints_closed.wait()


def install_signal_handlers(
    loop: object,
    runtime: DistributedRuntime,
    endpoints: Iterable[Endpoint],
    shutdown_event: Settable | None = None,
    grace_period_s: float | None = None,
    drain_callback: Hook | None = None,
    pre_shutdown_callback: Hook | None = None,
    cleanup_callback: Hook | None = None,
) -> None:
    """Let SIGTERM and SIGINT stop the process as :func:`graceful_shutdown` does.

    Handlers stand when this returns. Under :func:`~dynamo_trio.process.run.run_process`, or after
    :func:`signals.install() <dynamo_trio.process.signals.install>`, they stood before, and are
    only told what to do. Otherwise they are Trio's, stand until the runtime is left, and know one
    thing more than Dynamo's: SIGINT during a stop ends its patience, and one more raises
    ``KeyboardInterrupt`` in the runtime.

    Args:
        loop: there is none; it is there for old callers, and None will do.
        runtime: this and the others as for :func:`graceful_shutdown`.

    Raises:
        TypeError, ValueError: an argument is not what it must be.
        RuntimeError: called outside the main thread, or when the runtime is closed.
    """
    del loop
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("signals can be handled in the main thread only")
    hooks = _hooks(shutdown_event, drain_callback, pre_shutdown_callback, cleanup_callback)
    lifecycle = runtime.lifecycle
    _prepare(lifecycle, hooks, _others(runtime, endpoints), _grace(grace_period_s))
    tell_timetable(lifecycle)
    if signal.getsignal(signal.SIGTERM) == signals.desk.handle:
        if signals.desk.lifecycle is None:
            signals.desk.attach(lifecycle, trio.lowlevel.current_trio_token())
        hearing = signals.desk.lifecycle
    else:
        hearing = _receivers[-1] if _receivers else None
    if hearing is None:
        _receive_signals(lifecycle, runtime.nursery)
    elif hearing is not lifecycle:
        runtime.nursery.start_soon(_follow, hearing, lifecycle)


# --- what was given -----------------------------------------------------------------------


def _hooks(
    event: Settable | None, drain: Hook | None, pre_shutdown: Hook | None, cleanup: Hook | None
) -> Hooks:
    given: dict[str, object] = {
        "drain_callback": drain,
        "pre_shutdown_callback": pre_shutdown,
        "cleanup_callback": cleanup,
    }
    for name, hook in given.items():
        if hook is not None and not callable(hook):
            if inspect.iscoroutine(hook):
                hook.close()  # or Python complains that it was never awaited
            raise TypeError(f"{name}={hook!r}: must be an async function, not yet called")
    if event is not None and not callable(getattr(event, "set", None)):
        raise TypeError(f"shutdown_event={event!r}: must have set(), as trio.Event has")
    return Hooks(drain=drain, pre_shutdown=pre_shutdown, cleanup=cleanup, shutdown_event=event)


def _grace(seconds: float | None) -> float | None:
    if seconds is None or (math.isfinite(seconds) and 0 <= seconds <= LONGEST):
        return seconds
    raise ValueError(f"grace_period_s={seconds}: must be 0..{LONGEST:.0f} seconds")


def _others(runtime: DistributedRuntime, endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """The endpoints, once each, that do not leave with this runtime."""
    once = {id(endpoint): endpoint for endpoint in endpoints}.values()
    for endpoint in once:
        if not hasattr(endpoint, "unregister_endpoint_instance"):
            raise TypeError(f"endpoints holds {endpoint!r}, which is not an endpoint")
    return [endpoint for endpoint in once if endpoint.runtime is not runtime]


# --- and what becomes of it ---------------------------------------------------------------


def _prepare(
    lifecycle: Lifecycle, hooks: Hooks, others: list[Endpoint], grace: float | None
) -> None:
    """Let the next stop be as the program wants it."""
    lifecycle.hooks = _merged(lifecycle.hooks, hooks)
    limits = lifecycle.timetable
    lifecycle.timetable = attrs.evolve(
        limits,
        hooks=max(limits.hooks, lifecycle.hooks.callbacks),
        grace=limits.grace if grace is None else grace,
    )
    for warning in lifecycle.timetable.check():
        logger.warning("%s", warning)
    if others:
        lifecycle.on_unregister(partial(_unregister, others))


def _merged(before: Hooks, given: Hooks) -> Hooks:
    """What is given wins over what was there."""
    news = attrs.asdict(given, recurse=False, filter=lambda _, value: value is not None)
    return attrs.evolve(before, **news)


async def _join(lifecycle: Lifecycle, hooks: Hooks, others: list[Endpoint]) -> None:
    """Add to a stop that is under way what it has still time for."""
    if lifecycle.interrupted.is_set():
        if hooks.callbacks:
            logger.warning("graceful_shutdown() comes too late in the stop for its callbacks")
        hooks.tell()
    lifecycle.hooks = _merged(lifecycle.hooks, hooks)
    with trio.move_on_after(lifecycle.timetable.unregister):
        await _unregister(others)


async def _unregister(endpoints: list[Endpoint]) -> None:
    async with trio.open_nursery() as nursery:
        for endpoint in endpoints:
            nursery.start_soon(_unregister_one, endpoint)


async def _unregister_one(endpoint: Endpoint) -> None:
    try:
        await endpoint.unregister_endpoint_instance()
    except Exception as exc:  # it must not hold up the others
        logger.warning("%s could not be unregistered: %s", endpoint.id, exc)


# --- signals ------------------------------------------------------------------------------


def _receive_signals(lifecycle: Lifecycle, nursery: trio.Nursery) -> None:
    handlers = ExitStack()
    arrivals = handlers.enter_context(trio.open_signal_receiver(*HANDLED))
    _receivers.append(lifecycle)
    handlers.callback(_receivers.remove, lifecycle)
    try:
        nursery.start_soon(_obey, arrivals, lifecycle, handlers)
    except RuntimeError:  # the nursery is closed
        handlers.close()
        raise


async def _obey(arrivals: AsyncIterator[int], lifecycle: Lifecycle, handlers: ExitStack) -> None:
    stage = Stage.CALM
    with handlers:
        async for signum in arrivals:
            name = signal.Signals(signum).name
            # A stop that something else began counts like one that a signal began.
            begun = Stage.STOPPING if lifecycle.stopping and stage is Stage.CALM else stage
            verb, stage = RULES[begun, signal.Signals(signum)]
            if verb is Verb.LEAVE:
                raise KeyboardInterrupt
            _carry_out(verb, name, lifecycle)


def _carry_out(verb: Verb, name: str, lifecycle: Lifecycle) -> None:
    if verb is Verb.STOP:
        lifecycle.request_stop(name)
    elif verb is Verb.ESCALATE:
        lifecycle.escalate(name)
    else:
        logger.info("%s again: stopping already; %s", name, lifecycle.describe_left())


async def _follow(leader: Lifecycle, lifecycle: Lifecycle) -> None:
    """Stop when the lifecycle that hears the signals of this process does."""
    await leader.wait_stop_requested()
    lifecycle.request_stop(f"{leader.cause}, heard by another runtime of this process")
