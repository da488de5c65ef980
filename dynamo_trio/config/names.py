"""Values of options that have a structure of their own."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

from attrs import frozen

from dynamo_trio.errors import InvalidArgument
from dynamo_trio.wire.names import EndpointId

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Dynamo's words for how much is logged, and the level of Python's logging that each means.
LOG_LEVELS = {
    "trace": "DEBUG",
    "debug": "DEBUG",
    "info": "INFO",
    "warn": "WARNING",
    "warning": "WARNING",
    "error": "ERROR",
    "critical": "CRITICAL",
    "off": "CRITICAL",
}

_METRIC = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_SERVER = re.compile(r"https?://[^\s/:?#@]+(:\d{1,5})?|https?://\[[0-9A-Fa-f:.]+\](:\d{1,5})?")
_URL_PATH = re.compile(r"/[^\s?#]*")
_ROUTE = re.compile(r"/[A-Za-z0-9._~:@/-]+")
_LOGGER = re.compile(r"[A-Za-z0-9_.:-]+", re.ASCII)


@frozen
class EndpointRule:
    """``dyn://namespace.component.endpoint``; the ``dyn://`` may be left out."""

    text: str = "dyn://NAMESPACE.COMPONENT.ENDPOINT, each of letters, digits, '-' and '_'"
    unit: str = ""
    metavar: str = "DYN://NS.COMPONENT.ENDPOINT"

    def parse(self, text: str) -> EndpointId:
        try:
            value = EndpointId.parse(text.strip())
        except InvalidArgument as exc:
            raise ValueError(text) from exc
        self.check(value)
        return value

    def check(self, value: EndpointId) -> None:
        for part in (value.namespace, value.component, value.name):
            if not _NAME.fullmatch(part):
                raise ValueError(part)

    def show(self, value: EndpointId) -> str:
        return str(value)


@frozen
class NamespaceRule:
    """The first part of an endpoint's name."""

    text: str = "letters, digits, '-' and '_'"
    unit: str = ""
    metavar: str = "NAME"

    def parse(self, text: str) -> str:
        self.check(text.strip())
        return text.strip()

    def check(self, value: str) -> None:
        if not _NAME.fullmatch(value):
            raise ValueError(value)

    def show(self, value: str) -> str:
        return value


@frozen
class MetricsPrefixRule:
    """What the names of metrics begin with, without the last ``_``."""

    text: str = "letters, digits and '_', no digit first"
    unit: str = ""
    metavar: str = "PREFIX"

    def parse(self, text: str) -> str:
        self.check(text.strip())
        return text.strip()

    def check(self, value: str) -> None:
        if not _METRIC.fullmatch(value):
            raise ValueError(value)

    def show(self, value: str) -> str:
        return value


@frozen
class WordsRule:
    """One or more of a few words, separated by commas. Their order and repetition say nothing."""

    words: tuple[str, ...]
    unit: str = ""
    metavar: str = "WORD[,WORD...]"

    @property
    def text(self) -> str:
        return f"one or more of {', '.join(self.words)}, separated by commas"

    def parse(self, text: str) -> tuple[str, ...]:
        given = {part.strip().lower() for part in text.split(",")}
        if given - {*self.words}:
            raise ValueError(text)
        return tuple(word for word in self.words if word in given)

    def check(self, value: tuple[str, ...]) -> None:
        if not value or {*value} - {*self.words}:
            raise ValueError(value)

    def show(self, value: tuple[str, ...]) -> str:
        return ",".join(value)


@frozen
class UrlsRule:
    """URLs of servers, separated by commas. Without a scheme it is http, as Dynamo has it."""

    text: str = "one or more of http://HOST:PORT and https://HOST:PORT, separated by commas"
    unit: str = ""
    metavar: str = "URL[,URL...]"

    def parse(self, text: str) -> tuple[str, ...]:
        urls = [part.strip().rstrip("/") for part in text.split(",")]
        value = tuple(url if "://" in url else f"http://{url}" for url in urls)
        self.check(value)
        return value

    def check(self, value: tuple[str, ...]) -> None:
        if not value or not all(_SERVER.fullmatch(url) for url in value):
            raise ValueError(value)

    def show(self, value: tuple[str, ...]) -> str:
        return ",".join(value)


@frozen
class UrlPathRule:
    """The path of a URL."""

    text: str = "a path that begins with '/'"
    unit: str = ""
    metavar: str = "PATH"

    def parse(self, text: str) -> str:
        self.check(text.strip())
        return text.strip()

    def check(self, value: str) -> None:
        if not _URL_PATH.fullmatch(value):
            raise ValueError(value)

    def show(self, value: str) -> str:
        return value


@frozen
class RoutePathRule(UrlPathRule):
    """The path of a route, as it is once a server has decoded it."""

    text: str = (
        "a path that begins with '/', of letters, digits and - . _ ~ : @ / alone,"
        " without an empty part, '.' or '..', and without a slash at its end"
    )

    def check(self, value: str) -> None:
        parts = value.split("/")[1:]
        if not _ROUTE.fullmatch(value) or {".", ".."} & {*parts} or "" in parts:
            raise ValueError(value)


@frozen
class PayloadRule:
    """A JSON object, or ``@`` and the path of a file that holds one, which is read later."""

    text: str = "a JSON object, or @ and the path of a file that holds one"
    unit: str = ""
    metavar: str = "JSON|@FILE"

    def parse(self, text: str) -> str:
        self.check(text.strip())
        return text.strip()

    def check(self, value: str) -> None:
        if value.startswith("@"):
            good = len(value) > 1 and "\0" not in value
        else:
            good = isinstance(_json(value), dict)
        if not good:
            raise ValueError(value)

    def show(self, value: str) -> str:
        return value


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc


@frozen
class LogFilter:
    """How much is logged: a level for the whole, and others for single loggers."""

    level: str
    loggers: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return ",".join([self.level, *(f"{name}={level}" for name, level in self.loggers)])


@frozen
class LogFilterRule:
    """``LEVEL[,LOGGER=LEVEL...]``, the form that ``DYN_LOG`` has in Dynamo."""

    text: str = f"LEVEL[,LOGGER=LEVEL...] with a level of {', '.join(LOG_LEVELS)}"
    unit: str = ""
    metavar: str = "LEVEL[,LOGGER=LEVEL...]"

    def parse(self, text: str) -> LogFilter:
        level = "info"
        loggers: list[tuple[str, str]] = []
        for part in text.strip().split(","):
            name, equals, word = part.strip().rpartition("=")
            if equals:
                loggers.append((name.replace("::", "."), word.lower()))
            else:
                level = word.lower()
        value = LogFilter(level, tuple(loggers))
        self.check(value)
        return value

    def check(self, value: LogFilter) -> None:
        for level in (value.level, *(level for _, level in value.loggers)):
            if level not in LOG_LEVELS:
                raise ValueError(level)
        for name, _ in value.loggers:
            if not _LOGGER.fullmatch(name):
                raise ValueError(name)

    def show(self, value: LogFilter) -> str:
        return str(value)


def terminal_is_dumb(environ: Mapping[str, str] | None = None) -> bool:
    """Does the terminal of this process understand no control sequences (``TERM=dumb``)?"""
    return (os.environ if environ is None else environ).get("TERM") == "dumb"
