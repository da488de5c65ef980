"""Settings of every program, and the one question of ``--ask``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.config.names import LogFilter, LogFilterRule, NamespaceRule
from dynamo_trio.config.option import Group, option, optional
from dynamo_trio.config.rules import Boolean, FilePath, Text

if TYPE_CHECKING:
    from collections.abc import Mapping


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """Where fetched models are kept: the XDG cache folder."""
    home = environ.get("HOME") or os.path.expanduser("~")
    return Path(environ.get("XDG_CACHE_HOME") or Path(home, ".cache"), "dynamo_trio")


def _no_color(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("NO_COLOR"))


@attrs.frozen(kw_only=True, slots=False)
class ProgramTable:
    """What every program has."""

    print_config: bool = option(
        False,
        Boolean(),
        group=Group.PROGRAM,
        flag="--print-config",
        help="Print every setting with its value and where it came from, then exit.",
    )
    namespace: str | None = optional(
        NamespaceRule(),
        group=Group.PROGRAM,
        env="DYN_NAMESPACE",
        help="Namespace of a worker's endpoint; without it, dynamo. A frontend serves the models of"
        " this namespace only; without it, those of all.",
    )
    cache_dir: Path = option(
        default_cache_dir(os.environ),
        FilePath(metavar="FOLDER"),
        group=Group.PROGRAM,
        env="DYN_TRIO_CACHE_DIR",
        derive=default_cache_dir,
        derived_text="~/.cache/dynamo_trio, or XDG_CACHE_HOME/dynamo_trio",
        help="Folder that keeps what is fetched: models, and the files of model cards.",
    )
    log: LogFilter = option(
        LogFilter("info"),
        LogFilterRule(),
        group=Group.LOG,
        env="DYN_LOG",
        help="How much is logged, as a whole and by single loggers.",
    )
    log_jsonl: bool = option(
        False,
        Boolean(),
        group=Group.LOG,
        env="DYN_LOGGING_JSONL",
        help="Log one JSON object a line in place of text.",
    )
    no_color: bool = option(
        False,
        Boolean(),
        group=Group.LOG,
        env="DYN_SDK_DISABLE_ANSI_LOGGING",
        derive=_no_color,
        derived_text="false, or true if NO_COLOR is set",
        help="No colour, on a terminal either.",
    )


@attrs.frozen(kw_only=True, slots=False)
class AskTable:
    """What only the program has that is everything in one process."""

    ask: str | None = optional(
        Text(),
        group=Group.ASK,
        flag="--ask",
        help="Start, ask this one question, print the answer, and stop again. The exit code is 1"
        " if the answer did not complete.",
    )
