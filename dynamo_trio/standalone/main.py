"""The entry point behind ``python -m dynamo_trio``: settings, logging, the loop, the exit."""

from __future__ import annotations

import logging
import sys
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
    try:
        config = Config.from_args_and_env(prog="python -m dynamo_trio", description=DESCRIPTION)
    except ConfigError as exc:
        print(f"dynamo_trio: {exc}", file=sys.stderr)
        sys.exit(ExitCode.USAGE)
    if config.print_config:
        print(effective(config))
        sys.exit(ExitCode.OK)
    _run(config)


def _run(config: Config) -> NoReturn:
    # Imported here, so that --help and a bad setting do not wait for Trio and hypercorn.
    from dynamo_trio.console import configure_logging
    from dynamo_trio.frontend.app import Frontend
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
        return await Program(config, terminal, lifecycle, frontend).run()

    run_process(program, report_path=config.shutdown_report)


def _log_filter(config: Config) -> LogFilter:
    """With ``--ask`` the answer is what matters, unless somebody asks for more."""
    if config.ask is not None and "log" not in config.sources:
        return LogFilter("warn")
    return config.log
