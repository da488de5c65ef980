"""From the configuration to the health checks of a process's endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from dynamo_trio.errors import ConfigError, FileUnusable
from dynamo_trio.health import CanarySettings, read_payload

if TYPE_CHECKING:
    from dynamo_trio.config import Config


async def canary_settings(config: Config) -> CanarySettings:
    """The health checks that the settings ask for.

    Raises:
        ConfigError: the file of the payload cannot be read, or holds no JSON object.
    """
    payload: dict[str, object] | None = None
    if config.health_check_enabled and config.health_check_payload is not None:
        payload = await trio.to_thread.run_sync(_payload, config, abandon_on_cancel=True)
    return CanarySettings(
        enabled=config.health_check_enabled,
        wait=config.canary_wait_time,
        limit=config.health_check_request_timeout,
        payload=payload,
    )


def _payload(config: Config) -> dict[str, object]:
    text = config.health_check_payload
    assert text is not None, "the caller has looked"
    try:
        return read_payload(text)
    except (FileUnusable, ValueError) as exc:
        setting = config.sources.get("health_check_payload", "health_check_payload")
        raise ConfigError(f"{setting}: {exc}") from exc
