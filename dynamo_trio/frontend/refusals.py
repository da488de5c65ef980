"""Requests that are turned away before they are admitted: counted, and told to the log.

What a client did wrong is its own affair, and a line for those who look for it. That no
worker is there, or that this process stops, is an operator's; but a crowd of clients must not
fill the log with it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.console.seldom import Seldom
from dynamo_trio.errors import (
    Draining,
    InvalidApiKey,
    InvalidArgument,
    MethodNotAllowed,
    UpgradeRequired,
)
from dynamo_trio.frontend.metrics import error_type

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.errors import DynamoException
    from dynamo_trio.frontend.metrics import FrontendMetrics
    from dynamo_trio.http.asgi import Headers, Scope

logger = logging.getLogger("dynamo_trio.frontend")

#: Label of models that were never here: clients must not make labels.
UNKNOWN_MODEL = "unknown_model"


def required_headers(error: DynamoException, scope: Scope) -> Headers:
    """What HTTP wants with some errors (RFC 9110: 401, 405, 426)."""
    if isinstance(error, InvalidApiKey):
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, MethodNotAllowed):
        return [(b"allow", ", ".join(error.methods).encode())]
    if isinstance(error, UpgradeRequired) and scope["http_version"] == "1.1":
        return [(b"upgrade", b"websocket")]
    return []


@attrs.define
class Attempt:
    """What is known of a request while it is not admitted."""

    #: As a person would call it.
    name: str
    #: Dynamo's metric label; empty for routes that are not counted.
    endpoint: str = ""
    model: str = ""
    request_type: str = "unary"
    admitted: bool = False
    #: On Trio's clock.
    began: float = attrs.field(factory=trio.current_time)


@attrs.define(eq=False)
class Refusals:
    """``knows``: was there ever a model of this name?"""

    _metrics: FrontendMetrics
    _knows: Callable[[str], bool]
    _lines: defaultdict[str, Seldom] = attrs.field(factory=lambda: defaultdict(Seldom))

    def note(self, attempt: Attempt, error: DynamoException) -> None:
        """The attempt ends with this error."""
        if attempt.endpoint:
            model = attempt.model if self._knows(attempt.model) else UNKNOWN_MODEL
            labels = (model, attempt.endpoint, attempt.request_type)
            spent = trio.current_time() - attempt.began
            self._metrics.refused(*labels, error_type(error), spent)
        self._tell(attempt, error)

    def _tell(self, attempt: Attempt, error: DynamoException) -> None:
        text = "refused %s%s: %s: %.200s"
        of = f" of {attempt.model[:100]}" if attempt.model else ""
        args = (attempt.name, of, error.reason, error.message)
        if isinstance(error, InvalidArgument) or error.status < 500:
            logger.debug(text, *args)
        else:
            level = logging.INFO if isinstance(error, Draining) else logging.WARNING
            self._lines[error.reason].log(logger, level, text, *args)
