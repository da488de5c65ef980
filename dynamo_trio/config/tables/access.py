"""Settings of the HTTP front: who may ask, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from dynamo_trio.config.names import RoutePathRule
from dynamo_trio.config.option import Group, option, optional
from dynamo_trio.config.rules import FilePath, OriginsRule

if TYPE_CHECKING:
    from pathlib import Path


@attrs.frozen(kw_only=True, slots=False)
class AccessTable:
    """API keys, origins, and the paths of the routes."""

    api_keys_file: Path | None = optional(
        FilePath(metavar="FILE"),
        group=Group.HTTP,
        env="DYN_TRIO_API_KEYS_FILE",
        help="File with the API keys that are good, one a line, # for comments. It is read again"
        " when it changes. Without it, everybody may ask.",
    )
    cors_origins: tuple[str, ...] | None = optional(
        OriginsRule(),
        group=Group.HTTP,
        env="DYN_TRIO_CORS_ORIGINS",
        help="Origins whose web pages may call the API, or * for every one. Without it, none.",
    )
    chat_path: str = option(
        "/v1/chat/completions",
        RoutePathRule(),
        group=Group.HTTP,
        env="DYN_HTTP_SVC_CHAT_PATH",
        help="Path of chat completions.",
    )
    completions_path: str = option(
        "/v1/completions",
        RoutePathRule(),
        group=Group.HTTP,
        env="DYN_HTTP_SVC_CMP_PATH",
        help="Path of completions.",
    )
    models_path: str = option(
        "/v1/models",
        RoutePathRule(),
        group=Group.HTTP,
        env="DYN_HTTP_SVC_MODELS_PATH",
        help="Path of the list of models; a model's own is below it.",
    )
    metrics_path: str = option(
        "/metrics",
        RoutePathRule(),
        group=Group.HTTP,
        env="DYN_HTTP_SVC_METRICS_PATH",
        help="Path of the metrics.",
    )
    health_path: str = option(
        "/health",
        RoutePathRule(),
        group=Group.HTTP,
        env="DYN_HTTP_SVC_HEALTH_PATH",
        help="Path that tells whether the server wants requests.",
    )
    live_path: str = option(
        "/live",
        RoutePathRule(),
        group=Group.HTTP,
        env="DYN_HTTP_SVC_LIVE_PATH",
        help="Path that tells whether the process lives.",
    )
