"""From the command line to the loop and to the exit: what every ``main()`` does."""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, NoReturn

import attrs

from dynamo_trio.config import Config, LogFilter, effective
from dynamo_trio.errors import ConfigError
from dynamo_trio.process.exit_codes import ExitCode
from dynamo_trio.program.garbage import collect_seldom

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from signal import Signals

    from dynamo_trio.config import ProgramSpec
    from dynamo_trio.console import Terminal
    from dynamo_trio.lifecycle import Lifecycle, Timetable
    from dynamo_trio.process.run import ProcessContext

logger = logging.getLogger("dynamo_trio")


def _nobody(signum: Signals, callback: Callable[[], object]) -> None:
    """Where a program runs inside another process, as in a test, signals are not its own."""


@attrs.frozen(eq=False)
class Start:
    """What a program is given to run with."""

    config: Config
    terminal: Terminal
    lifecycle: Lifecycle
    #: When the process began, by time.monotonic().
    began: float
    #: :meth:`ProcessContext.on_signal`: callbacks for SIGUSR1 and SIGUSR2, run in the loop.
    on_signal: Callable[[Signals, Callable[[], object]], None] = _nobody

    def seconds(self) -> float:
        """Since the process began."""
        return time.monotonic() - self.began


@attrs.frozen(eq=False)
class Body:
    """What makes one program differ from the others."""

    #: The limits of its stop.
    timetable: Callable[[Config], Timetable]
    #: Starts, serves until a stop is requested, and stops. Returns an exit code.
    run: Callable[[Start], Awaitable[int]]


def enter(spec: ProgramSpec, load: Callable[[], Body]) -> NoReturn:
    """Run a program and exit.

    ``load`` imports the body, so that ``--help`` and a bad setting do not wait for Trio.
    """
    began = time.monotonic()
    try:
        config = spec.read_config()
    except ConfigError as exc:
        _refuse(exc)
    except SystemExit:  # --help and --version have printed, and what they have is to be flushed
        _show("")
    except OSError as exc:  # of their printing: not every release of argparse passes it over
        _not_shown(exc)
    if config.print_config:
        with suppress(OSError):
            for warning in config.warnings:
                print(f"dynamo_trio: {warning}", file=sys.stderr)
        _show(f"{effective(config, groups=spec.groups)}\n")
    _run(config, load, began)


def _refuse(exc: ConfigError) -> NoReturn:
    """Say what is wrong, and leave the report that every end leaves."""
    with suppress(OSError):
        print(f"dynamo_trio: {exc}", file=sys.stderr, flush=True)
    from dynamo_trio.process.last_words import LastWords

    words = LastWords(Config.report_path())
    lines = [line.strip() for line in str(exc).splitlines()]
    words.errors += lines[1:] or lines  # of several problems the first line is the heading
    words.say(ExitCode.USAGE, patience=1.0)
    os._exit(ExitCode.USAGE)


def _show(text: str) -> NoReturn:
    """Print, and exit."""
    try:
        print(text, end="", flush=True)
    except OSError as exc:
        _not_shown(exc)
    os._exit(ExitCode.OK)  # an ordinary exit would flush once more, and complain


def _not_shown(why: OSError) -> NoReturn:
    """A reader that has left is no error: it has seen enough."""
    if isinstance(why, BrokenPipeError):
        os._exit(ExitCode.OK)
    with suppress(OSError):
        print(f"dynamo_trio: cannot print: {why.strerror}", file=sys.stderr, flush=True)
    os._exit(ExitCode.FATAL)


def _run(config: Config, load: Callable[[], Body], began: float) -> NoReturn:
    from dynamo_trio.process.run import run_process

    body = load()
    collect_seldom()
    terminal = log_as_set(config)
    raise_file_limit(config.frontend_fd_limit)

    async def program(process: ProcessContext) -> int:
        lifecycle = attach_lifecycle(config, body.timetable(config), process)
        async with exporting_as_set(config, lifecycle):
            return await body.run(Start(config, terminal, lifecycle, began, process.on_signal))

    run_process(program, report_path=config.shutdown_report)


def exporting_as_set(config: Config, lifecycle: Lifecycle) -> AbstractAsyncContextManager[None]:
    """Export spans while the block runs, if the settings ask for it.

    Raises:
        ConfigError: on entering: what that needs is not installed.
    """
    if not config.otel_export:
        return nullcontext()
    from dynamo_trio.tracing import exporting

    return exporting(
        config.otel_endpoint, config.otel_protocol, config.otel_service, lifecycle.cleanup
    )


def log_as_set(config: Config, *, own: str | None = None) -> Terminal:
    """Log as ``DYN_LOG`` and its kind say, first what is odd about the settings.

    ``own`` is a logger that is heard like those of this package.
    """
    from dynamo_trio.console import configure_logging

    levels = _log_filter(config)
    if own is not None:  # what is named comes later, and wins
        levels = attrs.evolve(levels, loggers=((own, levels.level), *levels.loggers))
    color = False if config.no_color else None
    terminal = configure_logging(levels, jsonl=config.log_jsonl, color=color)
    for warning in config.warnings:
        logger.warning("%s", warning)
    return terminal


def raise_file_limit(target: int | None = None) -> None:
    """Take as many file descriptors as this process may: each connection needs one.

    ``target``: take so many, if there are so few (``DYN_FRONTEND_FD_LIMIT_TARGET``); 0 leaves
    the limit alone.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = hard if target is None else target if hard == unlimited else min(target, hard)
    if soft == unlimited or (wanted != unlimited and wanted <= soft):
        return
    with suppress(OSError, ValueError):  # as it was will do
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        logger.debug("file descriptors: %d, before %d", wanted, soft)


def attach_lifecycle(config: Config, limits: Timetable, process: ProcessContext) -> Lifecycle:
    """The process's lifecycle, tied to its signals, its limits told."""
    from dynamo_trio.lifecycle import Lifecycle
    from dynamo_trio.program.limits import tell_timetable

    lifecycle = Lifecycle(limits, exit_code_on_loss=config.exit_code_on_loss)
    process.attach(lifecycle)
    tell_timetable(lifecycle)
    for warning in limits.check():
        logger.warning("%s", warning)
    return lifecycle


def _log_filter(config: Config) -> LogFilter:
    """With ``--ask`` the answer is what matters, unless somebody asks for more."""
    if config.ask is not None and "log" not in config.sources:
        return LogFilter("warn")
    return config.log
