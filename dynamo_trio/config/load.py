"""Reading flags and environment, and telling all that is wrong with them at once."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, NoReturn

from attrs import field, frozen

from dynamo_trio import __version__
from dynamo_trio.config.later import is_later
from dynamo_trio.config.rules import Refused
from dynamo_trio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dynamo_trio.config.option import AnyOption

#: Variables of ours that no program reads: the test suite's own.
_TEST_PREFIX = "DYN_TRIO_TEST_"
_NEGATIVE = re.compile(r"-\.?\d")


@frozen
class Reading:
    """What flags and environment say, before it becomes a config object."""

    values: dict[str, object] = field(factory=dict)
    #: Field name -> the flag or variable that gave the value; absent for defaults.
    sources: dict[str, str] = field(factory=dict)
    problems: list[str] = field(factory=list)

    def raise_problems(self) -> None:
        """Raise ConfigError if anything is wrong, with everything that is wrong."""
        if len(self.problems) == 1:
            raise ConfigError(self.problems[0])
        if self.problems:
            lines = "".join(f"\n  {problem}" for problem in self.problems)
            raise ConfigError(f"{len(self.problems)} settings are wrong:{lines}")


class _Parser(argparse.ArgumentParser):
    """argparse, but a bad command line is a ConfigError (exit 64) and not exit 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _help(option: AnyOption) -> str:
    notes = [f"default: {option.default_text}"]
    if option.env is not None:
        notes.append(f"variable: {option.env}")
    return f"{option.help} ({'; '.join(notes)})".replace("%", "%%")


def build_parser(
    options: Mapping[str, AnyOption], *, prog: str, description: str
) -> argparse.ArgumentParser:
    """A parser that only splits the command line; what the words mean is the rules' affair."""
    parser = _Parser(
        prog=prog,
        description=description,
        usage=f"{prog} [--flag VALUE ...]",
        allow_abbrev=False,
        epilog="A flag wins over its variable, a variable over the default.",
    )
    parser.add_argument("--version", action="version", version=f"dynamo_trio {__version__}")
    sections = {o.group: parser.add_argument_group(o.group) for o in options.values()}
    for name, option in options.items():
        is_switch = option.rule.metavar == "BOOL"
        sections[option.group].add_argument(
            option.flag,
            dest=name,
            metavar=option.rule.metavar,
            help=_help(option),
            nargs="?" if is_switch else None,
            const="true" if is_switch else None,
        )
    return parser


def read(
    options: Mapping[str, AnyOption],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prog: str,
    description: str,
) -> Reading:
    """Read every option: flag over variable over default. ``--help`` raises SystemExit(0)."""
    parser = build_parser(options, prog=prog, description=description)
    flags, unknown = parser.parse_known_args(argv)
    reading = Reading()
    reading.problems.extend(_unknown_flag(word, options) for word in _without_values(unknown))
    for name, option in options.items():
        _read_one(reading, name, option, getattr(flags, name), environ)
    return reading


def _read_one(
    reading: Reading,
    name: str,
    option: AnyOption,
    flag_text: str | None,
    environ: Mapping[str, str],
) -> None:
    if flag_text is not None:
        source, text = option.flag, flag_text
    elif option.env is not None and option.env in environ:
        source, text = option.env, environ[option.env]
    else:
        reading.values[name] = option.initial(environ)
        return
    try:
        reading.values[name] = option.read(text)
        reading.sources[name] = source
    except ValueError as exc:
        given = source if option.is_secret else f"{source}={_clip(text)!r}"
        why = str(exc) if isinstance(exc, Refused) else f"must be {option.rule_text}"
        reading.problems.append(f"{given}: {why}")


def _clip(text: str) -> str:
    """A value that a message can carry whole, or its beginning."""
    return text if len(text) <= 200 else text[:199] + "…"


def _similar(word: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches  # only needed when something is wrong

    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _without_values(words: Sequence[str]) -> Iterator[str]:
    """Words that no option took, without those that seem to be the value of such a flag."""
    waiting = False
    for word in words:
        is_flag = word.startswith("-") and not _NEGATIVE.match(word)
        if is_flag or not waiting:
            yield word
        waiting = is_flag and "=" not in word


def _unknown_flag(word: str, options: Mapping[str, AnyOption]) -> str:
    if not word.startswith("-"):
        return f"{word!r}: no argument stands alone here; every value follows its flag"
    flag = word.partition("=")[0]
    if is_later(flag):
        return f"{flag}: not there yet"
    return f"{flag}: no such flag{_similar(flag, (o.flag for o in options.values()))}"


def unknown_variables(
    environ: Mapping[str, str], options: Mapping[str, AnyOption]
) -> tuple[str, ...]:
    """A warning for each ``DYN_TRIO_`` variable that nothing here reads: most often a slip."""
    known = {option.env for option in options.values() if option.env is not None}
    return tuple(
        f"{name}: no such variable{_similar(name, known)}; it is ignored"
        for name in sorted(environ)
        if name.startswith("DYN_TRIO_") and name not in known and not name.startswith(_TEST_PREFIX)
    )
