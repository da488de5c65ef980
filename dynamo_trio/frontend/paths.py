"""At which paths the frontend answers, and what is open to everybody.

Most paths can be moved, with Dynamo's variables ``DYN_HTTP_SVC_*_PATH``. A *probe* answers
without a key and while the process drains: those who ask are the cluster's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from dynamo_trio.config.checks import BUSY_THRESHOLD, REALTIME

if TYPE_CHECKING:
    from dynamo_trio.config import Config

#: Routes of OpenAI's API and of Dynamo's frontend that are not there yet.
LATER: Final = (
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/files",
    "/v1/batches",
    "/v1/uploads",
    "/v1/moderations",
    "/v1/images",
    "/v1/audio",
    "/v1/videos",
    "/v1/assistants",
    "/v1/threads",
    "/v1/vector_stores",
    "/v1/fine_tuning",
    "/v1/conversations",
    "/v1/classify",
    "/v1/pooling",
)


@attrs.frozen(kw_only=True)
class Paths:
    """Each begins with a slash, and no two are the same (:mod:`dynamo_trio.config.checks`)."""

    chat: str = "/v1/chat/completions"
    completions: str = "/v1/completions"
    #: With the name of a model below it, that model alone.
    models: str = "/v1/models"
    metrics: str = "/metrics"
    health: str = "/health"
    live: str = "/live"

    @classmethod
    def of(cls, config: Config) -> Paths:
        """Those that the settings name."""
        return cls(
            chat=config.chat_path,
            completions=config.completions_path,
            models=config.models_path,
            metrics=config.metrics_path,
            health=config.health_path,
            live=config.live_path,
        )

    @property
    def probes(self) -> frozenset[str]:
        """What answers anybody, at any time."""
        return frozenset({self.metrics, self.health, self.live})

    def is_probe(self, path: str) -> bool:
        return path in (self.metrics, self.health, self.live)

    def is_api(self, path: str) -> bool:
        """Is it something that a process that drains refuses, there or not?"""
        if self.is_probe(path) or path == BUSY_THRESHOLD:
            return False
        return (
            path in ("/v1", self.chat, self.completions, self.models, REALTIME)
            or path.startswith("/v1/")
            or self.model_name(path) is not None
        )

    def model_name(self, path: str) -> str | None:
        """The model of ``/v1/models/NAME``. ASGI has decoded the path."""
        name = path.removeprefix(f"{self.models}/")
        return name if name and name != path else None

    @staticmethod
    def is_later(path: str) -> bool:
        """Would OpenAI or Dynamo answer here, and this server does not yet?"""
        return any(path == later or path.startswith(f"{later}/") for later in LATER)
