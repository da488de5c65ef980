"""Rigs: one core, watched, and the host it runs on. Every contract test runs on each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest

from dynamo_trio.engines import CoreSpec, Host, InlineHost, Request, ThreadHost, make_core
from dynamo_trio.testing.cores import WatchedCore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LLAMA = pytest.param("llama-thread", marks=pytest.mark.llama)


@attrs.define(eq=False)
class Rig:
    """Makes what a test needs; checks at the end that no core was misused."""

    spec: CoreSpec
    make_host: Callable[[], Host]
    cores: list[WatchedCore] = attrs.field(factory=list)

    def core(self) -> WatchedCore:
        self.cores.append(WatchedCore(make_core(self.spec)))
        return self.cores[-1]

    def host(self) -> Host:
        return self.make_host()

    def request(self, name: str = "r", max_tokens: int | None = 8, prompt: int = 6) -> Request:
        """A request that goes on until ``max_tokens``."""
        token_ids = (7, *(100 + ord(letter) for letter in name), *range(20, 20 + prompt))
        return Request(
            request_id=name,
            token_ids=token_ids,
            max_tokens=max_tokens,
            ignore_eos=True,
        )


def _rig(request: pytest.FixtureRequest) -> Rig:
    if request.param == "llama-thread":
        model_path: Path = request.getfixturevalue("model_path")
        spec = CoreSpec(kind="llama", model_path=model_path, max_running=4, context_tokens=256)
        return Rig(spec, ThreadHost)
    spec = CoreSpec(kind="sim", max_running=4, context_tokens=256, itl_ms=1, vocab_size=1000)
    return Rig(spec, InlineHost if request.param == "sim-inline" else ThreadHost)


@pytest.fixture(params=["sim-inline", "sim-thread", LLAMA])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = _rig(request)
    yield made
    for core in made.cores:
        core.check()
