"""From the configuration to a runtime that other processes can reach."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from dynamo_trio.program.canary import canary_settings
from dynamo_trio.program.network import open_discovery, open_events, open_planes, wait_unreachable
from dynamo_trio.runtime import DistributedRuntime, open_runtime
from dynamo_trio.wire.dynamo.codec import codec_named

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dynamo_trio.config import Config
    from dynamo_trio.lifecycle import Lifecycle


@asynccontextmanager
async def open_configured_runtime(
    config: Config, lifecycle: Lifecycle
) -> AsyncIterator[DistributedRuntime]:
    """The runtime of a process that serves: the store, the request planes, and between them.

    Raises:
        StartupError: the store cannot be reached, or a plane's settings cannot be used.
    """
    canary = await canary_settings(config)
    async with (
        open_discovery(config, lifecycle.cleanup) as discovery,
        open_planes(config, lifecycle.cleanup) as planes,
        open_runtime(
            lifecycle,
            discovery=discovery,
            planes=planes,
            codec=codec_named(config.request_plane_codec),
            request_limit=config.engine_request_limit or math.inf,
            queue_limit=config.request_queue_limit,
            inhibited=config.inhibited_duration,
            events=open_events(config),
            canary=canary,
        ) as runtime,
    ):
        lifecycle.grace_over = partial(wait_unreachable, planes, lifecycle.explain_grace)
        lifecycle.places = lambda: planes.places
        yield runtime
