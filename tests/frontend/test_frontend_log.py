"""What the frontend tells of each request: its log, and the counter of requests."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import trio

from dynamo_trio.console.seldom import Seldom
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.testing import Fault

if TYPE_CHECKING:
    import pytest
    from trio.testing import MockClock

    from dynamo_trio.discovery import Instance
    from tests.frontend.conftest import Opener, Site

CHAT = "/v1/chat/completions"
NAME = "dynamo_trio.frontend"


def chat(**fields: Any) -> dict[str, Any]:
    content = [{"role": "user", "content": "hi"}]
    return {"model": "sim", "messages": content, "max_tokens": 3, "ignore_eos": True, **fields}


def counted(site: Site) -> dict[tuple[str, ...], float]:
    """(model, request type, status, error type) -> requests."""
    names = ("model", "request_type", "status", "error_type")
    return {
        tuple(sample.labels[name] for name in names): sample.value
        for metric in site.frontend.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "dynamo_frontend_requests_total"
    }


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """What was told of requests."""
    told = [r.getMessage() for r in caplog.records if r.name == NAME and r.levelno == level]
    return [line for line in told if line.startswith(("chat_completions", "refused"))]


async def test_a_request_leaves_a_line_with_its_model_and_instance(
    open_site: Opener, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_site() as site:
        caplog.set_level(logging.INFO)
        await site.client.ask("POST", CHAT, chat())
        worker = f"{site.runtime.instance_id:x}"
    assert lines(caplog, logging.INFO) == [
        f"chat_completions of sim by {worker}: complete, 3 tokens in 0.20 s"
    ]


async def test_what_its_worker_failed_is_a_warning_with_the_reason(
    open_site: Opener, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_site() as site:
        worker = f"{site.runtime.instance_id:x}"
        begun = site.client.start("POST", CHAT, chat(stream=True, max_tokens=400))
        unary = site.client.start("POST", CHAT, chat(max_tokens=400))
        await trio.sleep(1)
        site.core.arm(Fault.DIE)
        await begun.done.wait()
        await unary.done.wait()
        await site.stopped()
    assert len(lines(caplog, logging.WARNING)) == 2
    for line in lines(caplog, logging.WARNING):
        assert line.startswith(f"chat_completions of sim by {worker}: engine_dead (")


async def test_a_client_that_leaves_and_a_prompt_that_is_too_long_are_no_warnings(
    open_site: Opener, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_site() as site:
        caplog.set_level(logging.INFO)
        leaver = site.client.start("POST", CHAT, chat(max_tokens=400))
        await trio.sleep(1)
        leaver.leave()
        await leaver.done.wait()
        long = [{"role": "user", "content": "x" * 600}]
        await site.client.ask("POST", CHAT, chat(messages=long))
        await trio.sleep(1)
    assert lines(caplog, logging.WARNING) == []
    left, too_long = lines(caplog, logging.INFO)
    assert ": cancelled, " in left
    assert too_long.startswith("chat_completions of sim: context_length_exceeded (")


async def test_what_a_client_did_wrong_is_counted_and_told_to_those_who_look_for_it(
    open_site: Opener, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_site() as site:
        caplog.set_level(logging.DEBUG, NAME)
        site.frontend.limits = HttpLimits(body_bytes=500)
        ask = site.client.ask
        assert (await ask("POST", CHAT, b"{")).status == 400
        assert (await ask("POST", CHAT, chat(temperature=3))).status == 400
        assert (await ask("POST", CHAT, b" " * 501)).status == 413
        for number in range(3):
            assert (await ask("POST", CHAT, chat(model=f"m{number}", stream=True))).status == 404
        assert (await ask("GET", "/v1/nowhere")).status == 404
        assert counted(site) == {
            ("unknown_model", "unary", "error", "validation"): 3,
            ("unknown_model", "stream", "error", "not_found"): 3,
        }
    told = lines(caplog, logging.DEBUG)
    assert [line.partition(": ")[0] for line in told] == [
        *[f"refused POST {CHAT}"] * 3,
        *[f"refused POST {CHAT} of m{number}" for number in range(3)],
        "refused GET /v1/nowhere",
    ]
    assert "payload_too_large" in told[2]
    assert lines(caplog, logging.WARNING) == []


async def test_a_crowd_without_a_worker_is_counted_and_makes_few_lines(
    open_site: Opener, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_site() as site:
        caplog.set_level(logging.INFO)
        instance: Instance = site.frontend.catalog.find("sim").client.instances()[0]
        await site.runtime.unregister(instance)
        await trio.sleep(2)
        for _ in range(100):
            assert (await site.client.ask("POST", CHAT, chat())).status == 503
        await trio.sleep(2)
        await site.client.ask("POST", CHAT, chat())
        assert counted(site) == {("sim", "unary", "error", "unavailable"): 101}
    text = f"refused POST {CHAT} of sim: no_worker: model 'sim' has no worker at the moment"
    assert lines(caplog, logging.WARNING) == [text, f"{text} (and 99 more before it)"]


async def test_what_a_stop_refuses_is_counted_and_no_warning(
    open_site: Opener, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_site() as site:
        caplog.set_level(logging.INFO)
        running = site.client.start("POST", CHAT, chat(max_tokens=30))
        await trio.sleep(0.5)
        site.lifecycle.request_stop("SIGTERM")
        assert (await site.client.ask("POST", CHAT, chat())).status == 503
        assert counted(site) == {("unknown_model", "unary", "error", "unavailable"): 1}
        await running.done.wait()
        await site.stopped()
    assert f"refused POST {CHAT}: draining: " in caplog.text
    assert lines(caplog, logging.WARNING) == []


async def test_no_metric_tells_when_it_was_created(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as site:
        await site.client.ask("POST", CHAT, chat())
        for text in (site.frontend.metrics.exposition(), site.runtime.metrics.exposition()):
            assert b"_total" in text
            assert b"_bucket" in text
            assert b"_created" not in text


async def test_lines_of_one_kind_are_counted_when_they_are_left_out(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    logger, seldom = logging.getLogger(NAME), Seldom(every=2.0)
    for number in range(8):
        seldom.log(logger, logging.WARNING, "%s of %d", "number", number)
        await trio.sleep(0.5)
    assert caplog.messages == ["number of 0", "number of 4 (and 3 more before it)"]
