"""What a client is told of an error holds nothing of the server's inside."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio import errors
from dynamo_trio.wire.openai.public import MAX_MESSAGE, UNNAMED, public_message
from dynamo_trio.wire.openai.response import error_body, error_event

CUT, LOST = errors.RequestCut, errors.Disconnected


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("the worker at 10.0.0.7:4711 is gone", "the worker at … is gone"),
        ("the worker at [fe80::1]:4711 is gone", "the worker at … is gone"),
        ("cannot open /srv/models/secret/weights.gguf", "cannot open …"),
        ("cannot open '/srv/models': no such file", "cannot open '…': no such file"),
        ("cannot open ~/models/a b", "cannot open … b"),
        (r"cannot open C:\models\secret", "cannot open …"),
        ("tcp://worker-7.internal:4711 does not answer", "… does not answer"),
        ("file:///etc/passwd", "…"),
        # What is none of it stays as it is.
        ("use /v1/completions in its place", "use /v1/completions in its place"),
        ("a rate of 3 tokens/s and 1/2 of it", "a rate of 3 tokens/s and 1/2 of it"),
        ("version 1.5.1", "version 1.5.1"),
        ("a step took longer than 30 s", "a step took longer than 30 s"),
    ],
)
def test_paths_and_addresses_are_taken_out(message: str, told: str) -> None:
    assert public_message(LOST(message)) == told


@pytest.mark.parametrize(
    "exc",
    [
        OSError(2, "No such file", "/srv/secret"),
        errors.Unknown("KeyError: 'password=secret'"),
        errors.EngineDead('Traceback (most recent call last):\n  File "secret.py", line 1'),
        errors.EngineDead('  File "secret.py", line 1, in step'),
    ],
)
def test_of_what_nobody_has_named_only_that_it_happened_is_told(exc: Exception) -> None:
    assert public_message(exc) == UNNAMED
    assert b"secret" not in error_body(exc) + error_event(exc)


def test_a_clients_own_words_come_back_as_they_were() -> None:
    name = "/models/llama/7b"
    assert public_message(errors.ModelNotFound(f"model {name!r}")) == f"model {name!r}"


@given(st.text(max_size=5000), st.sampled_from([CUT, LOST, errors.InvalidArgument]))
def test_any_text_gives_one_line_of_json(text: str, kind: type[errors.DynamoException]) -> None:
    body = error_body(kind(text))
    assert len(json.loads(body)["error"]["message"]) <= MAX_MESSAGE
    assert b"\n" not in body


def test_a_hostile_text_takes_no_time() -> None:
    for piece in ("/a", "a/", "::::", "1.1.", "://", "[", "~/"):
        assert public_message(LOST(piece * 200_000))
