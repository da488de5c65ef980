"""docs/frontend.md: what it names is there, and what is there it names."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest

from dynamo_trio.config import Config, Group
from dynamo_trio.config.checks import BUSY_THRESHOLD, REALTIME
from dynamo_trio.config.option import options_of
from dynamo_trio.frontend.paths import LATER, Paths
from dynamo_trio.frontend.routes import Routes
from dynamo_trio.frontend.state import Frontend
from dynamo_trio.lifecycle import Lifecycle, Timetable
from dynamo_trio.wire.openai import request

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "frontend.md").read_text()
#: Told where processes are told of: where it listens.
ELSEWHERE = {"DYN_HTTP_HOST", "DYN_HTTP_PORT"}
OPTIONS = options_of(Config)


@pytest.mark.parametrize(
    "variable", sorted(o.env for o in OPTIONS.values() if o.group is Group.HTTP and o.env)
)
def test_every_setting_of_the_front_is_told_of(variable: str) -> None:
    assert variable in ELSEWHERE or f"{variable}`" in PAGE or f"{variable}=" in PAGE


def test_every_setting_that_is_named_exists() -> None:
    known = {option.env for option in OPTIONS.values()}
    named = set(re.findall(r"\b(?:DYN|OTEL|ETCD)_[A-Z0-9_]+[A-Z0-9]\b", PAGE))
    assert named - known == set()


def test_every_route_is_in_the_table() -> None:
    table = PAGE.partition("## Routes")[2].partition("### Health")[0]
    told = set(re.findall(r"(?:GET|POST)`?,? ?`?(?:POST )?(/[\w/]+)", table))
    there = {*attrs.astuple(Paths()), REALTIME, BUSY_THRESHOLD}
    assert told - {"/v1/models/NAME"} == there
    routes = Routes(Paths())
    assert all(routes.methods(path) for path in there - {REALTIME})
    assert not any(routes.methods(path) for path in LATER)


def test_every_field_that_is_obeyed_or_dropped_is_told_of() -> None:
    section = PAGE.partition("## What a request may ask for")[2].partition("## Errors")[0]
    told = set(re.findall(r"`([a-z_]+)(?:\.[a-z_]+)?`", section))
    obeyed = {*request._COMMON, *request._CHAT, *request._COMPLETION}
    assert obeyed <= told
    assert set(request._NEUTRAL) <= told
    fixed = {*request._FIXED, *request._FIXED_CHAT, *request._FIXED_COMPLETION}
    assert told - obeyed - fixed <= {"invalid_request", "not_implemented", "include_obfuscation"}


async def test_every_metric_that_is_named_exists() -> None:
    exposed = Frontend(Lifecycle(Timetable())).metrics.exposition().decode()
    for name in re.findall(r"`(dynamo_\w+)`", PAGE):
        if name != "dynamo_frontend":
            assert f"# TYPE {name} " in exposed, name


def test_every_other_page_that_is_linked_exists() -> None:
    for page in re.findall(r"\]\(([\w/-]+\.md)", PAGE):
        assert (ROOT / "docs" / page).exists(), page
