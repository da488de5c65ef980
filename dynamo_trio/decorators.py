"""The decorators of ``dynamo.runtime``, for programs that are ported from it."""

from __future__ import annotations

import inspect
import logging
from contextlib import aclosing
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from dynamo_trio.config.programs import LIBRARY
from dynamo_trio.errors import InvalidArgument
from dynamo_trio.lifecycle import Lifecycle
from dynamo_trio.process import ProcessContext
from dynamo_trio.program.entry import attach_lifecycle, exporting_as_set, log_as_set
from dynamo_trio.program.limits import worker_timetable
from dynamo_trio.program.nest import Nest
from dynamo_trio.program.stopping import tell_stop
from dynamo_trio.worker.status import WorkerStatus
from dynamo_trio.worker.status_server import open_worker_runtime, serve_status

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from dynamo_trio.config import Config
    from dynamo_trio.endpoint import Handler
    from dynamo_trio.runtime import DistributedRuntime


def dynamo_worker(
    enable_nats: bool | None = None,
) -> Callable[[Callable[..., Awaitable[Any]]], Callable[..., Awaitable[None]]]:
    """Give the decorated function a runtime, set up as the environment says.

    Both ``trio.run(main)`` and :func:`run_process(main) <dynamo_trio.process.run.run_process>` run
    the result; only with the second is the process told of signals. When the function returns
    the runtime stops gracefully; when a stop comes first, the function is cancelled once the
    work is over. With ``DYN_SYSTEM_PORT`` there is a status server, which is healthy while an
    endpoint is served. Under ``run_process``, and unless the root logger has a handler already,
    logging is set up as ``DYN_LOG`` and its kind say; the function's own package is heard like
    this one. ``enable_nats`` is there for old callers; True is refused.

    Raises:
        StartupError: when run: a variable is wrong, or the store cannot be reached.
    """
    if enable_nats:
        raise ValueError("enable_nats=True: there is no NATS here")

    def decorate(function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[None]]:
        @wraps(function)
        async def run(*args: Any, **kwargs: Any) -> None:
            given = bool(args) and isinstance(args[0], ProcessContext)
            call = partial(_call, function, args[int(given) :], kwargs)
            own = function.__module__.partition(".")[0]
            await _run_worker(call, args[0] if given else None, own)

        return run

    return decorate


async def _call(
    function: Callable[..., Awaitable[Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    runtime: DistributedRuntime,
) -> None:
    await function(runtime, *args, **kwargs)


async def _run_worker(
    call: Callable[[DistributedRuntime], Awaitable[None]], process: ProcessContext | None, own: str
) -> None:
    config = LIBRARY.read_config(())
    lifecycle = _lifecycle(config, process, own)
    nest, status = Nest(lifecycle), WorkerStatus(lifecycle)

    async def inside(services: trio.Nursery) -> None:
        services.start_soon(tell_stop, lifecycle)
        await serve_status(status, services, config)
        async with open_worker_runtime(config, status) as runtime:
            nest.ready()  # a stop waits for the function's requests from here on
            async with trio.open_nursery() as body:
                body.start_soon(_cancel_when_stopped, lifecycle, body.cancel_scope)
                await call(runtime)
                lifecycle.request_stop("the worker function has returned")
                await lifecycle.wait_stopped()

    async with exporting_as_set(config, lifecycle):
        await nest.run(inside)


def _lifecycle(config: Config, process: ProcessContext | None, own: str) -> Lifecycle:
    """The lifecycle; of a process of its own it also sees to signals and the log."""
    limits = worker_timetable(config)
    if process is None:
        return Lifecycle(limits, exit_code_on_loss=config.exit_code_on_loss)
    process.report_path = process.report_path or config.shutdown_report
    if not logging.getLogger().handlers:
        log_as_set(config, own=own)
    return attach_lifecycle(config, limits, process)


async def _cancel_when_stopped(lifecycle: Lifecycle, scope: trio.CancelScope) -> None:
    await lifecycle.wait_stopped()
    scope.cancel("the process has stopped")


def dynamo_endpoint(request_model: type, response_model: type) -> Callable[[Handler], Handler]:
    """Give the handler its request as a ``request_model``.

    That is a class of attrs, msgspec, dataclasses or pydantic; ``str`` and other plain types are
    handed on as they came. Works on ``(request)``, ``(request, context)`` and methods. A request
    that does not fit raises :exc:`~dynamo_trio.errors.InvalidArgument` at the client.
    ``response_model`` is for the reader only, as in Dynamo. Code that is not ported has it
    simpler with ``serving(handler, request_type=...)``.
    """
    del response_model
    convert = _converter(request_model)

    def decorate(handler: Handler) -> Handler:
        before = int(next(iter(inspect.signature(handler).parameters)) == "self")

        @wraps(handler)
        async def parsed(*args: Any) -> AsyncGenerator[Any, None]:
            rest = args[before + 1 :]
            async with aclosing(handler(*args[:before], convert(args[before]), *rest)) as items:
                async for item in items:
                    yield item

        return parsed

    return decorate


def _converter(model: type) -> Callable[[object], object]:
    validate = getattr(model, "model_validate", None)  # pydantic's
    if validate is None:
        return lambda value: _convert(value, model)
    return lambda value: _validated(validate, value)


def _convert(value: object, model: type) -> object:
    try:
        return msgspec.convert(value, model)
    except msgspec.ValidationError as exc:
        raise InvalidArgument(f"the request is no {model.__name__}: {exc}") from None


def _validated(validate: Callable[[object], object], value: object) -> object:
    try:
        return validate(value)
    except ValueError as exc:  # pydantic's ValidationError is one
        raise InvalidArgument(f"the request is not valid: {exc}") from None
