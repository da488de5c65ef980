"""The drain of a whole process: who completes, who is told what, and the report of it."""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.standalone.harness import (
    Answer,
    Http1,
    ask,
    chat,
    finish_all,
    in_parallel,
    metric,
    open_streams,
    wait_until,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.standalone.conftest import Start

PATIENT = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "120"}
HASTY = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "0.3"}
#: A request that outlasts every test.
ENDLESS = chat(1900)
SLOW = ("--itl-ms", "50")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_streams_in_flight_complete(start_sim: Start, signum: signal.Signals) -> None:
    server = start_sim("--itl-ms", "15", **PATIENT)
    with open_streams(server.port, 8, chat(32)) as streams:
        server.kill(signum)
        answers = finish_all(streams)
    assert server.end() == 0
    for answer in answers:
        assert answer.is_done
        assert answer.chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len({answer.text for answer in answers}) == 1
    report = server.report
    assert report["cause"] == signum.name
    assert report["requests"]["finished"] == 8
    assert report["requests"]["cut"] == report["requests"]["lost"] == 0
    assert report["leftovers"] == report["errors"] == []
    phases = {phase["phase"]: phase["outcome"] for phase in report["phases"]}
    assert phases == {"grace": "skipped", "draining": "completed", "stopping": "completed"}


def is_farewell(answer: Answer) -> bool:
    """A stream that was cut: some words, one error event with a reason, a proper end."""
    said = [chunk for chunk in answer.chunks if "choices" in chunk]
    assert said
    assert [chunk for chunk in answer.chunks if "error" in chunk] == answer.chunks[-1:]
    assert answer.error["message"]
    assert answer.headers["transfer-encoding"] == "chunked"
    return bool(answer.error["code"] == "cut")


@pytest.mark.parametrize("limit", ["0", "0.3"])
def test_at_the_limit_each_stream_says_farewell(start_sim: Start, limit: str) -> None:
    server = start_sim(*SLOW, DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS=limit)
    with open_streams(server.port, 8, ENDLESS) as streams:
        server.kill(signal.SIGTERM)
        answers = finish_all(streams)
    assert server.end() == 0
    assert all(is_farewell(answer) for answer in answers)
    assert server.report["requests"]["cut"] == 8
    assert server.report["requests"]["lost"] == 0
    steps = {step["step"]: step["outcome"] for step in server.report["steps"]}
    assert steps["http_drain"] == "timed_out"
    assert steps["http_farewells"] == "completed"


def test_short_streams_complete_beside_one_that_is_cut(start_sim: Start) -> None:
    server = start_sim("--itl-ms", "15", DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="2")
    with (
        open_streams(server.port, 1, ENDLESS) as long,
        open_streams(server.port, 3, chat(16)) as short,
    ):
        server.kill(signal.SIGTERM)
        assert all(answer.is_done for answer in finish_all(short))
        assert is_farewell(long[0].finish())
    assert server.end() == 0
    assert server.report["requests"]["finished"] == 3
    assert server.report["requests"]["cut"] == 1


def test_unary_requests_complete_and_their_connections_close(start_sim: Start) -> None:
    server = start_sim("--itl-ms", "15", **PATIENT)
    with Http1(server.port) as connection:
        connection.send("POST", "/v1/chat/completions", chat(32, stream=False))
        wait_until(lambda: metric(server.port, "dynamo_frontend_active_requests") == 1, "begun")
        server.kill(signal.SIGTERM)
        answer = connection.read()
        assert connection.socket.recv(1) == b""
    assert answer.status == 200
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 32
    assert answer.headers["connection"] == "close"
    assert server.end() == 0
    assert server.report["requests"]["finished"] == 1


def test_a_unary_request_that_is_cut_gets_a_503(start_sim: Start) -> None:
    server = start_sim(*SLOW, **HASTY)
    with Http1(server.port) as connection:
        connection.send("POST", "/v1/chat/completions", ENDLESS | {"stream": False})
        wait_until(lambda: metric(server.port, "dynamo_frontend_active_requests") == 1, "begun")
        server.kill(signal.SIGTERM)
        answer = connection.read()
    assert answer.status == 503
    assert answer.error["code"] == answer.headers["x-dynamo-reason"] == "cut"
    assert server.end() == 0
    assert server.report["requests"]["cut"] == 1


# --- requests that come during the drain ----------------------------------------------------


LATE = [
    ("POST", "/v1/chat/completions", chat(4)),
    ("POST", "/v1/completions", {"model": "sim", "prompt": "x"}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/sim", None),
    ("GET", "/v1/whatever", None),
]


@pytest.mark.parametrize("kept_alive", [False, True])
def test_new_requests_are_refused_while_it_drains(start_sim: Start, kept_alive: bool) -> None:
    server = start_sim("--itl-ms", "20", **PATIENT)
    port = server.port
    with ExitStack() as stack, open_streams(port, 1, chat(60)) as streams:
        used = [stack.enter_context(Http1(port)) for _ in LATE]
        assert all(one.ask("GET", "/live").status == 200 for one in used)
        server.kill(signal.SIGTERM)
        server.wait_log("phase draining")
        fresh = [stack.enter_context(Http1(port)) for _ in LATE]
        for connection, late in zip(used if kept_alive else fresh, LATE, strict=True):
            answer = connection.ask(*late)
            check_refusal(answer)
            assert connection.socket.recv(1) == b""
        assert ask(port, "GET", "/metrics").status == 200
        assert streams[0].finish().is_done
    assert server.end() == 0
    assert server.report["requests"]["finished"] == 1


def check_refusal(answer: Answer) -> None:
    assert answer.status == 503
    assert answer.headers["x-dynamo-reason"] == "draining"
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["connection"] == "close"
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "code", "param"}
    assert error["code"] == "draining"


# --- nobody to wait for ----------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_process_leaves_at_once(start_sim: Start, signum: signal.Signals) -> None:
    server = start_sim(DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="100")
    port = server.port
    assert ask(port, "POST", "/v1/chat/completions", chat(4)).is_done
    # The client has the end of its answer a moment before the request is over.
    wait_until(lambda: metric(port, "dynamo_frontend_active_requests") == 0, "nothing active")
    server.kill(signum)
    assert server.end() == 0
    assert server.report["seconds"] < 5  # of the 100 that it might wait
    assert server.report["served_before"] == 1
    assert {phase["outcome"] for phase in server.report["phases"]} == {"skipped", "completed"}
    assert "nothing is in flight" in server.wait_log("stopping gracefully")


def test_a_client_that_leaves_frees_the_engine(start_sim: Start) -> None:
    server = start_sim(*SLOW, "--max-running", "2", **PATIENT)
    port = server.port
    with open_streams(port, 2, ENDLESS):
        assert metric(port, "dynamo_frontend_active_requests") == 2
    wait_until(lambda: metric(port, "dynamo_frontend_active_requests") == 0, "nothing active")
    assert metric(port, "dynamo_frontend_model_cancellation_total") == 2
    # Both places are free again: two more run at once, where two endless ones had them.
    answers = in_parallel([lambda: ask(port, "POST", "/v1/chat/completions", chat(4))] * 2)
    assert all(answer.is_done for answer in answers)
    assert server.stop() == 0
    assert server.report["served_before"] + server.report["requests"]["finished"] == 4


def test_a_client_that_hangs_up_after_done_was_served(start_sim: Start) -> None:
    # As OpenAI's SDK does: it does not wait for the end of the body behind [DONE].
    server = start_sim("--itl-ms", "1", "--max-running", "16")

    def read_up_to_done() -> None:
        with Http1(server.port) as connection:
            connection.send("POST", "/v1/chat/completions", chat(4))
            assert connection.read_head()[0] == 200
            said = b""
            while b"[DONE]" not in said:
                piece = connection.read_piece()
                assert piece is not None
                said += piece

    for _ in range(8):
        in_parallel([read_up_to_done] * 8)
    assert server.stop() == 0
    assert server.report["served_before"] + server.report["requests"]["finished"] == 64
    assert server.report["requests"]["cancelled"] == 0
    assert "cancelled" not in server.log.partition("shutdown_report")[0]


def test_a_client_that_leaves_during_the_drain_ends_it(start_sim: Start) -> None:
    server = start_sim(*SLOW, **PATIENT)
    with open_streams(server.port, 2, ENDLESS):
        server.kill(signal.SIGTERM)
        server.wait_log("phase draining")
    assert server.end() == 0
    assert server.report["requests"]["cancelled"] == 2
    assert server.report["requests"]["cut"] == 0


# --- the report ------------------------------------------------------------------------------


def test_lost_work_can_have_an_exit_code(start_sim: Start, tmp_path: Path) -> None:
    path = tmp_path / "report"
    environ = {"DYN_TRIO_EXIT_CODE_ON_LOSS": "7", "DYN_TRIO_SHUTDOWN_REPORT": str(path)}
    server = start_sim(*SLOW, **HASTY, **environ)
    with open_streams(server.port, 1, ENDLESS) as streams:
        server.kill(signal.SIGTERM)
        assert is_farewell(streams[0].finish())
    assert server.end() == 7
    assert json.loads(path.read_text()) == server.report
    assert server.report["exit_code"] == 7


def test_without_loss_the_exit_code_is_0(start_sim: Start) -> None:
    server = start_sim("--itl-ms", "15", **PATIENT, DYN_TRIO_EXIT_CODE_ON_LOSS="7")
    with (
        open_streams(server.port, 1, chat(16)) as streams,
        open_streams(server.port, 1, ENDLESS),  # leaves by itself: not lost
    ):
        server.kill(signal.SIGTERM)
        assert streams[0].finish().is_done
    assert server.end() == 0
    assert server.report["requests"]["finished"] == 1
    assert server.report["requests"]["cancelled"] == 1


def test_a_repeated_sigterm_is_logged_and_changes_nothing(start_sim: Start) -> None:
    server = start_sim("--itl-ms", "20", **PATIENT)
    with open_streams(server.port, 2, chat(32)) as streams:
        server.kill(signal.SIGTERM)
        server.wait_log("phase draining")
        server.kill(signal.SIGTERM)
        again = server.wait_log("SIGTERM again")
        answers = finish_all(streams)
    assert "requests" in again
    assert "chat_completions" in again
    assert all(answer.is_done for answer in answers)
    assert server.end() == 0


def test_what_is_in_flight_is_counted_once(start_sim: Start) -> None:
    server = start_sim(*SLOW, **HASTY)
    with open_streams(server.port, 2, ENDLESS):
        server.kill(signal.SIGTERM)
        assert "2 requests of 1 endpoint" in server.wait_log("stopping gracefully")
        assert server.end() == 0
