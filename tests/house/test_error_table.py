"""The table of errors in the docs is what clients get."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from docs._ext.error_tables import request_errors
from dynamo_trio import errors
from dynamo_trio.wire.openai.response import error_body, error_headers

if TYPE_CHECKING:
    from collections.abc import Iterator

#: OpenAI's SDK tries these again by itself, beside every 5xx.
SDK_RETRIES = {408, 409, 429}


def kinds() -> Iterator[type[errors.DynamoException]]:
    for kind in vars(errors).values():
        if inspect.isclass(kind) and issubclass(kind, errors.DynamoException):
            yield kind


ALL = sorted(set(kinds()) - {errors.DynamoException}, key=lambda kind: kind.__name__)


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    """Class -> its row of the table in ``docs/reference/errors.md``."""
    found = {}
    for line in request_errors().splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[re.sub(r".*errors\.(\w+)`", r"\1", cells[0])] = cells[1:]
    return found


def test_every_error_has_its_row(rows: dict[str, list[str]]) -> None:
    assert rows.keys() == {kind.__name__ for kind in ALL}


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_the_row_says_what_a_client_gets(
    rows: dict[str, list[str]], kind: type[errors.DynamoException]
) -> None:
    error = json.loads(error_body(kind("why")))["error"]
    headers = dict(error_headers(kind("why")))
    status, type_, reason, retry, moves, meaning = rows[kind.__name__]
    assert status == str(kind.status)
    assert (type_, reason) == (f"`{error['type']}`", f"`{error['code']}`")
    assert headers[b"x-dynamo-reason"] == error["code"].encode()
    assert retry == ("yes" if b"retry-after" in headers else "no")
    assert moves == ("yes" if kind.migratable else "no")
    assert meaning.endswith((".", "?"))


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_openais_sdk_retries_what_the_table_says(kind: type[errors.DynamoException]) -> None:
    told = dict(error_headers(kind("why"))).get(b"x-should-retry")
    by_itself = kind.status >= 500 or kind.status in SDK_RETRIES
    assert (by_itself and told is None) == kind.retry


def test_a_reason_has_one_status() -> None:
    """A client that looks at one of them needs no other."""
    by_reason: dict[str, set[int]] = {}
    for kind in ALL:
        by_reason.setdefault(kind.reason, set()).add(kind.status)
    several = {reason: found for reason, found in by_reason.items() if len(found) > 1}
    # What the workers have no room for has Dynamo's status, what the server has none for HTTP's.
    assert several == {"overloaded": {503, 529}}
    assert all(re.fullmatch(r"[a-z_]+", reason) for reason in by_reason)


def test_a_reason_tells_status_and_type_but_for_the_one_that_the_page_names() -> None:
    told: dict[str, set[tuple[int, str]]] = {}
    for kind in ALL:
        told.setdefault(kind.reason, set()).add((kind.status, kind.kind))
    ambiguous = {reason: both for reason, both in told.items() if len(both) > 1}
    assert ambiguous == {"overloaded": {(529, "overloaded"), (503, "service_unavailable")}}
    page = (Path(__file__).parents[2] / "docs" / "reference" / "errors.md").read_text()
    assert "`overloaded` has 529 and `overloaded`" in page
    assert all(kind.retry for kind in ALL if kind.reason == "overloaded")
