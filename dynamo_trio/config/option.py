"""What is known of one setting: its names, its rule, its default, and whom it concerns."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast

import attrs

from dynamo_trio.config.rules import FilePath, OriginsRule, Rule, Secret, Text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

#: The key under which a field of a config class carries its :class:`Option`.
METADATA_KEY = "dynamo_trio.option"


class Group(enum.StrEnum):
    """Settings that go together. A program takes the groups that concern it."""

    PROGRAM = "Program"
    ASK = "One question"
    HTTP = "HTTP front"
    ROUTING = "Routing"
    DISCOVERY = "Discovery"
    REQUEST_PLANE = "Request plane"
    TLS = "TLS on the request plane"
    STATUS = "Status server of a worker"
    CANARY = "Health checks of a worker's endpoint"
    STOP = "Stopping: every process"
    STOP_FRONTEND = "Stopping: frontend"
    STOP_WORKER = "Stopping: worker"
    MODEL = "Model"
    ENDPOINT = "Name and endpoint"
    SERVE = "What a worker offers"
    ENGINE = "Engine"
    SIM = "Simulated engine"
    LOG = "Logging"


@attrs.frozen(kw_only=True)
class Option(Generic[T]):
    """One setting, as data: the loader, ``--help``, ``--print-config`` and the docs read it."""

    group: Group
    rule: Rule[T]
    help: str
    #: None for what only makes sense on a command line.
    env: str | None
    flag: str
    #: None: not set, which the help text then explains.
    default: T | None
    #: A default that depends on the environment, with the words that describe it.
    derive: Callable[[Mapping[str, str]], T] | None = None
    derived_text: str = ""

    @property
    def blank_is_unset(self) -> bool:
        """Whether an empty value means "not set": text that may be absent, never a number.

        A variable may have to be emptied because it cannot be removed. What is a flag alone
        can be left out.
        """
        is_text = isinstance(self.rule, Text | FilePath | OriginsRule)
        return self.env is not None and self.default is None and is_text

    @property
    def is_secret(self) -> bool:
        """Whether the value stays out of every message."""
        return isinstance(self.rule, Secret)

    @property
    def rule_text(self) -> str:
        return self.rule.text + (", or empty for none" if self.blank_is_unset else "")

    def show(self, value: T | None) -> str:
        """The value with its unit."""
        if value is None:
            return "none"
        return f"{self.rule.show(value)} {self.rule.unit}".rstrip()

    @property
    def default_text(self) -> str:
        return self.derived_text or self.show(self.default)

    def read(self, text: str) -> T | None:
        """The value of ``text``. Raises ValueError."""
        if self.blank_is_unset and not text.strip():
            return None
        return self.rule.parse(text)

    def initial(self, environ: Mapping[str, str]) -> T | None:
        """The value when neither flag nor variable is given."""
        return self.default if self.derive is None else self.derive(environ)


#: An option of whatever type; what it holds is known only to its own field.
AnyOption: TypeAlias = "Option[Any]"


def flag_of(env: str) -> str:
    """The flag of a variable: its name without ``DYN_`` or ``DYN_TRIO_``, in kebab case."""
    return "--" + env.removeprefix("DYN_").removeprefix("TRIO_").lower().replace("_", "-")


def _check(_instance: object, attribute: attrs.Attribute[T | None], value: T | None) -> None:
    """A value that came from code obeys the same rule as one that came from text."""
    found: Option[T] = attribute.metadata[METADATA_KEY]
    try:
        if value is not None:
            found.rule.check(value)
        elif found.default is not None:
            raise ValueError(value)
    except (TypeError, ValueError):
        given = "" if found.is_secret else f"={value!r}"
        message = f"{attribute.name}{given}: must be {found.rule_text}"
        raise ValueError(message) from None


def option(
    default: T,
    rule: Rule[T],
    *,
    group: Group,
    help: str,
    env: str | None = None,
    flag: str | None = None,
    derive: Callable[[Mapping[str, str]], T] | None = None,
    derived_text: str = "",
) -> T:
    """A field of a config class that always has a value. The flag follows from ``env``."""
    about = Option(
        group=group,
        rule=rule,
        help=help,
        env=env,
        flag=flag or flag_of(env or ""),
        default=default,
        derive=derive,
        derived_text=derived_text,
    )
    return cast("T", _field(default, about))


def optional(
    rule: Rule[T], *, group: Group, help: str, env: str | None = None, flag: str | None = None
) -> T | None:
    """A field of a config class that may be absent."""
    about = Option(
        group=group, rule=rule, help=help, env=env, flag=flag or flag_of(env or ""), default=None
    )
    return cast("T | None", _field(None, about))


def _field(default: T | None, about: Option[T]) -> object:
    return attrs.field(
        default=default,
        metadata={METADATA_KEY: about},
        validator=_check,
        repr=not about.is_secret,
    )


def options_of(config_class: type[attrs.AttrsInstance]) -> dict[str, AnyOption]:
    """Field name -> option, group by group, each in the order of its table."""
    options: dict[str, AnyOption] = {
        field.name: field.metadata[METADATA_KEY]
        for field in attrs.fields(config_class)
        if METADATA_KEY in field.metadata
    }
    order = list(Group)
    return dict(sorted(options.items(), key=lambda item: order.index(item[1].group)))
