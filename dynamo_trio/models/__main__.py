"""``python -m dynamo_trio.models``: the cached default model by hand.

Exit codes: 0 done; 1 not there, damaged, or not to be had; 64 wrong usage; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dynamo_trio.errors import ConfigError, FetchError, StartupError
from dynamo_trio.models import DEFAULT_MODEL, Store, ensure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dynamo_trio.models.fetch import Progress

_COMMANDS: dict[str, Callable[[Store], str]] = {}


def _command(function: Callable[[Store], str]) -> Callable[[Store], str]:
    _COMMANDS[function.__name__] = function
    return function


@_command
def fetch(store: Store) -> str:
    """fetch the model if it is not there, and print its path"""
    with _shown_progress() as progress:
        return str(ensure(DEFAULT_MODEL, store.cache_dir, progress))


@_command
def path(store: Store) -> str:
    """print the model's path; fails if it is not there"""
    found = store.find(DEFAULT_MODEL)
    if found is None:
        raise FetchError(
            f"no model in {store.folder}; fetch it: python -m dynamo_trio.models fetch"
        )
    return str(found)


@_command
def verify(store: Store) -> str:
    """read the whole file and compare its checksum"""
    if not store.path(DEFAULT_MODEL).exists():
        return path(store)
    if store.verify(DEFAULT_MODEL) is None:
        raise FetchError(f"{store.path(DEFAULT_MODEL)} is damaged; fetch it again")
    return f"{store.path(DEFAULT_MODEL)}: intact"


@_command
def clean(store: Store) -> str:
    """remove the model and what interrupted downloads left"""
    if not store.folder.exists():
        return f"{store.folder}: nothing there"
    with store.lock(_refuse_to_wait):
        removed = store.remove(DEFAULT_MODEL)
    return f"{store.folder}: {'removed' if removed else 'nothing there'}"


def _refuse_to_wait() -> None:
    raise FetchError("another process is fetching the model at this moment")


@contextmanager
def _shown_progress() -> Iterator[Progress | None]:
    """A bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from dynamo_trio.console import Terminal, progress

    title = f"fetching {DEFAULT_MODEL.file_name}"
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

    return Config.from_args_and_env([], groups=[Group.MODEL]).cache_dir


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    try:
        arguments = _parser().parse_args(argv)
        store = Store(_cache_dir(arguments.cache_dir))
        print(_COMMANDS[arguments.command](store))
    except StartupError as exc:
        print(f"dynamo_trio.models: {exc}", file=sys.stderr)
        return exc.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
