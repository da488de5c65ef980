"""A frontend that has as many connections as it takes still tells how it is, and says so."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import attrs
import pytest

from dynamo_trio.frontend.app import App
from tests.http.harness import client_of, running

if TYPE_CHECKING:
    from tests.frontend.conftest import Opener

REQUEST = {"model": "sim", "messages": [{"role": "user", "content": "a"}], "max_tokens": 400}
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("draining", [False, True])
async def test_above_the_cap_only_probes_are_served(open_site: Opener, draining: bool) -> None:
    async with open_site(itl_ms=10_000.0) as site:
        limits = attrs.evolve(site.frontend.limits, max_connections=1)
        async with running(App(site.frontend), limits) as server, client_of(server) as busy:
            await busy.send("POST", CHAT, json.dumps(REQUEST).encode())
            await server.wait_until(lambda: site.frontend.lifecycle.http.count == 1)
            if draining:
                site.lifecycle.request_stop("a test")
                await server.wait_until(lambda: site.frontend.draining)
            for path in ("/live", "/health", "/metrics"):
                async with client_of(server) as client:
                    answer = await client.ask("GET", path)
                    assert answer.status == (503 if draining and path == "/health" else 200)
                    assert answer.headers[b"connection"] == b"close"
            for method, path in (("POST", CHAT), ("GET", "/v1/models")):
                async with client_of(server) as client:
                    answer = await client.ask(method, path)
                    code = json.loads(answer.body)["error"]["code"]
                    assert (answer.status, code) == (503, "draining" if draining else "overloaded")
                    assert answer.headers[b"retry-after"] == b"1"
                    assert answer.headers[b"connection"] == b"close"
