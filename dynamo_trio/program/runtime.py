"""From the configuration to a runtime that other processes can reach."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from dynamo_trio.program.network import open_discovery, open_plane, wait_unreachable
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
    """The runtime of a process that serves: the store, the request plane, and between them.

    Raises:
        StartupError: the store cannot be reached, or the plane's settings cannot be used.
    """
    async with (
        open_discovery(config) as discovery,
        open_plane(config) as plane,
        open_runtime(
            lifecycle,
            discovery=discovery,
            planes=[plane],
            codec=codec_named(config.request_plane_codec),
            request_limit=config.engine_request_limit or math.inf,
            inhibited=config.inhibited_duration,
        ) as runtime,
    ):
        lifecycle.grace_over = partial(wait_unreachable, [plane])
        yield runtime
