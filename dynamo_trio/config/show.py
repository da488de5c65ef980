"""The settings as text: for ``--print-config`` and for the reference page of the docs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_trio.config.config import Config
from dynamo_trio.config.option import AnyOption, Group, options_of
from dynamo_trio.config.programs import PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


def by_group(
    groups: Collection[Group] = tuple(Group),
) -> Iterator[tuple[Group, dict[str, AnyOption]]]:
    """Each group with its options, in the order of the table."""
    options = options_of(Config)
    for group in Group:
        if group in groups:
            yield group, {name: o for name, o in options.items() if o.group is group}


def effective(config: Config, *, groups: Collection[Group] = tuple(Group)) -> str:
    """Every setting of ``groups`` with its value and where the value came from.

    All but ``--print-config`` itself, which is not a setting of the run that is asked about.
    """
    sections = {
        group: [
            (option.env or option.flag, option.show(getattr(config, name)), _source(config, name))
            for name, option in options.items()
            if name != "print_config"
        ]
        for group, options in by_group(groups)
    }
    widest = max(len(value) for rows in sections.values() for _, value, _ in rows)
    lines: list[str] = []
    for group, rows in sections.items():
        lines += ["", f"# {group}"]
        lines += [f"{name:<50} {value:<{widest}} {source}" for name, value, source in rows]
    return "\n".join(lines[1:])


def _source(config: Config, name: str) -> str:
    return config.sources.get(name, "default")


def markdown() -> str:
    """The reference tables: one section a group."""
    parts = []
    for group, options in by_group():
        rows = "".join(_row(name, option) for name, option in options.items())
        takers = ", ".join(f"`{p.command}`" for p in PROGRAMS if group in p.groups)
        parts.append(
            f"## {group}\n\nTaken by {takers}.\n\n"
            "| variable | flag | default | must be | meaning |\n"
            f"|---|---|---|---|---|\n{rows}"
        )
    return "\n".join(parts)


def _defaults(name: str, option: AnyOption) -> str:
    """The default, and that of each program which has another."""
    others = [
        f"`{program.command}`: {option.show(program.defaults[name])}"
        for program in PROGRAMS
        if name in program.defaults
    ]
    return "; ".join([option.default_text, *others])


def _row(name: str, option: AnyOption) -> str:
    cells = (
        f"`{option.env}`" if option.env else "",
        f"`{option.flag}`",
        _defaults(name, option),
        option.rule_text,
        option.help,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
