"""The entry point behind ``python -m dynamo_trio``: settings, logging, the loop, the exit."""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from dynamo_trio.config import Config, LogFilter, effective
from dynamo_trio.errors import ConfigError
from dynamo_trio.process.exit_codes import ExitCode

if TYPE_CHECKING:
    from dynamo_trio.process.run import ProcessContext

logger = logging.getLogger("dynamo_trio")

DESCRIPTION = (
    "Serve a model with an OpenAI-compatible HTTP frontend, router and worker in one process."
)


def main() -> NoReturn:
    """Run the program and exit."""
    began = time.monotonic()
    try:
        config = Config.from_args_and_env(prog="python -m dynamo_trio", description=DESCRIPTION)
    except ConfigError as exc:
        _refuse(exc)
    if config.print_config:
        with suppress(OSError):
            for warning in config.warnings:
                print(f"dynamo_trio: {warning}", file=sys.stderr)
        _show(effective(config))
    _run(config, began)


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
    """Print, and exit. A reader that has left is no error: it has seen enough."""
    code = ExitCode.OK
    try:
        print(text, flush=True)
    except BrokenPipeError:
        pass
    except OSError as exc:
        code = ExitCode.FATAL
        with suppress(OSError):
            print(f"dynamo_trio: cannot print: {exc.strerror}", file=sys.stderr, flush=True)
    os._exit(code)  # an ordinary exit would flush once more, and complain


def _run(config: Config, began: float) -> NoReturn:
    # Imported here, so that --help and a bad setting do not wait for Trio and hypercorn.
    from dynamo_trio.console import configure_logging
    from dynamo_trio.frontend.state import Frontend
    from dynamo_trio.lifecycle import Lifecycle
    from dynamo_trio.process.run import run_process
    from dynamo_trio.standalone import assembly
    from dynamo_trio.standalone.program import Program

    terminal = configure_logging(
        _log_filter(config), jsonl=config.log_jsonl, color=False if config.no_color else None
    )
    for warning in config.warnings:
        logger.warning("%s", warning)

    async def program(process: ProcessContext) -> int:
        limits = assembly.timetable(config)
        lifecycle = Lifecycle(limits, exit_code_on_loss=config.exit_code_on_loss)
        process.attach(lifecycle)
        logger.info("shutdown timetable: %s", limits.describe())
        for warning in limits.check():
            logger.warning("%s", warning)
        frontend = Frontend(
            lifecycle,
            limits=assembly.http_limits(config),
            overload_status=config.overload_status,
        )
        return await Program(config, terminal, lifecycle, frontend, began).run()

    run_process(program, report_path=config.shutdown_report)


def _log_filter(config: Config) -> LogFilter:
    """With ``--ask`` the answer is what matters, unless somebody asks for more."""
    if config.ask is not None and "log" not in config.sources:
        return LogFilter("warn")
    return config.log
