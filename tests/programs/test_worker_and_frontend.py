"""A worker and a frontend as two processes: what a client gets, and what each tells of itself."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.programs.conftest import MODEL, Fleet, models, status_port, wait_instances
from tests.standalone.harness import (
    Http1,
    Json,
    Server,
    ask,
    chat,
    in_parallel,
    metric,
    open_streams,
    wait_until,
)

if TYPE_CHECKING:
    from pathlib import Path

    Pair = tuple[Server, Server]

asks = partial(chat, model=MODEL)


def completion(max_tokens: int, *, stream: bool) -> Json:
    fixed = {"model": MODEL, "prompt": "Why is the sky blue?", "ignore_eos": True}
    return fixed | {"max_tokens": max_tokens, "stream": stream}


# --- answers -------------------------------------------------------------------------------


def test_a_chat_says_the_same_streamed_and_whole(pair: Pair) -> None:
    port = pair[1].port
    streamed = ask(port, "POST", "/v1/chat/completions", asks(12))
    whole = ask(port, "POST", "/v1/chat/completions", asks(12, stream=False))
    assert (streamed.status, whole.status) == (200, 200)
    assert streamed.is_done
    choice = whole.json()["choices"][0]
    assert choice["finish_reason"] == streamed.chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert choice["message"]["content"] == streamed.text != ""
    assert whole.json()["usage"]["completion_tokens"] == 12


def test_a_completion_says_the_same_streamed_and_whole(pair: Pair) -> None:
    port = pair[1].port
    streamed = ask(port, "POST", "/v1/completions", completion(12, stream=True))
    whole = ask(port, "POST", "/v1/completions", completion(12, stream=False))
    assert streamed.is_done
    text = "".join(chunk["choices"][0]["text"] for chunk in streamed.chunks)
    assert whole.json()["choices"][0]["text"] == text != ""
    assert whole.json()["choices"][0]["finish_reason"] == "length"


def test_many_at_once_do_not_mix(pair: Pair) -> None:
    port = pair[1].port

    def tell(number: int) -> str:
        body = asks(8, messages=[{"role": "user", "content": f"number {number}"}])
        answer = ask(port, "POST", "/v1/chat/completions", body)
        assert answer.is_done
        return answer.text

    alone = [tell(number) for number in range(3)]
    together = in_parallel([partial(tell, number % 3) for number in range(24)])
    assert together == alone * 8


def test_a_prompt_that_is_too_long_is_refused(pair: Pair) -> None:
    body = asks(8, messages=[{"role": "user", "content": "the " * 9000}])
    answer = ask(pair[1].port, "POST", "/v1/chat/completions", body)
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"


def test_an_unknown_model(pair: Pair) -> None:
    answer = ask(pair[1].port, "POST", "/v1/chat/completions", chat(4, model="other"))
    assert answer.status == 404
    assert answer.error["code"] == "model_not_found"


def test_a_client_that_leaves_frees_the_worker(pair: Pair) -> None:
    worker, frontend = pair
    port = status_port(worker)
    with open_streams(frontend.port, 2, asks(8000)):
        wait_until(lambda: metric(port, "dynamo_component_inflight_requests") == 2, "both run")
    wait_until(lambda: metric(port, "dynamo_component_inflight_requests") == 0, "both have ended")


# --- what they tell -------------------------------------------------------------------------


def test_the_model_is_listed_with_the_context_that_its_folder_tells(pair: Pair) -> None:
    (model,) = ask(pair[1].port, "GET", "/v1/models").json()["data"]
    assert (model["id"], model["context_window"]) == (MODEL, 8192)


def test_health_of_both(pair: Pair) -> None:
    worker, frontend = pair
    answer = ask(frontend.port, "GET", "/health")
    assert (answer.status, answer.json()["status"]) == (200, "healthy")
    assert answer.json()["endpoints"] == ["dyn://dynamo.backend.generate"]
    answer = ask(status_port(worker), "GET", "/health")
    assert (answer.status, answer.json()["status"]) == (200, "ready")
    assert answer.json()["endpoints"] == {"generate": "ready"}
    assert ask(status_port(worker), "GET", "/live").status == 200


def test_the_workers_metrics_count_its_requests(pair: Pair) -> None:
    port = status_port(pair[0])
    before = metric(port, "dynamo_component_requests_total")
    assert ask(pair[1].port, "POST", "/v1/chat/completions", asks(4)).is_done
    wait_until(lambda: metric(port, "dynamo_component_requests_total") == before + 1, "counted")


def test_the_workers_log(pair: Pair) -> None:
    worker = pair[0]
    assert "grace <= 0.2 s, drain <= 900 s" in worker.wait_log("shutdown timetable: ")
    assert "dyn://dynamo.backend.generate as instance " in worker.wait_log("serving ")
    assert "127.0.0.1:" in worker.wait_log("status server on ")
    assert f"model {MODEL}, engine sim" in worker.wait_log("is ready after")
    for line in worker.lines:
        assert "ERROR" not in line
        assert "WARNING" not in line


def test_the_frontends_log(pair: Pair) -> None:
    frontend = pair[1]
    timetable = frontend.wait_log("shutdown timetable: ")
    assert "HTTP drain <= 5 s" in timetable
    assert "engine" not in timetable
    assert "dynamo_trio frontend " in frontend.wait_log("is ready after")


# --- settings that change something ----------------------------------------------------------


def test_without_a_status_port_the_files_are_read_from_the_folder(fleet: Fleet) -> None:
    fleet.worker()
    frontend = fleet.frontend()
    wait_instances(frontend, 1)
    assert ask(frontend.port, "POST", "/v1/chat/completions", asks(4)).is_done
    (card,) = fleet.records("mdc")
    assert str(fleet.model / "tokenizer.json") in card.read_text()


def test_the_name_of_the_endpoint_and_the_codec(fleet: Fleet) -> None:
    fleet.worker("--endpoint", "dyn://a.b.c", DYN_REQUEST_PLANE_CODEC="json")
    frontend = fleet.frontend()
    wait_instances(frontend, 1)
    (record,) = fleet.records("instances")
    assert record.name.startswith("a%2Fb%2Fc%2F")
    assert json.loads(record.read_text())["request_plane_codec"] == "json"
    assert ask(frontend.port, "POST", "/v1/chat/completions", asks(4)).is_done


def test_a_frontend_keeps_to_its_namespace(fleet: Fleet) -> None:
    fleet.worker("--namespace", "ours")
    fleet.worker("--namespace", "theirs", "--model-name", "other")
    frontend = fleet.frontend("--namespace", "ours")
    everybodys = fleet.frontend()
    wait_until(lambda: sorted(models(everybodys.port)) == [MODEL, "other"], "both models")
    wait_until(lambda: models(frontend.port) == [MODEL], "one model")


def test_a_full_worker_is_an_overload(fleet: Fleet) -> None:
    nobody_waits: dict[str, Any] = {"DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "0"}  # by default 16 do
    fleet.worker("--engine-request-limit", "1", "--itl-ms", "20", **nobody_waits)
    frontend = fleet.frontend(DYN_HTTP_OVERLOAD_STATUS_CODE="503")
    wait_instances(frontend, 1)
    with open_streams(frontend.port, 1, asks(40)) as streams:
        answer = ask(frontend.port, "POST", "/v1/chat/completions", asks(4))
        assert answer.status == 503
        assert answer.error["code"] == "overloaded"
        assert streams[0].finish().is_done
    told = frontend.wait_log(": overloaded (the worker is full (requests at once: 1)), 0 tokens")
    assert "INFO " in told  # it lives, and a full one is no failure
    assert metric(frontend.port, "dynamo_frontend_model_rejection_total") == 1


@pytest.mark.parametrize(("mode", "is_even"), [("round-robin", True), ("random", False)])
def test_two_workers_share_the_work(fleet: Fleet, mode: str, is_even: bool) -> None:
    workers = [fleet.worker("--system-port", "0", ready=False) for _ in range(2)]
    frontend = fleet.frontend("--router-mode", mode)
    wait_instances(frontend, 2)
    with Http1(frontend.port) as connection:
        for _ in range(20):
            assert connection.ask("POST", "/v1/chat/completions", asks(1)).is_done
    ports = [status_port(worker) for worker in workers]
    name = "dynamo_component_requests_total"
    wait_until(lambda: sum(metric(port, name) for port in ports) == 20, "all are counted")
    counts = [metric(port, name) for port in ports]
    assert min(counts) > 0  # at random, once in half a million runs not
    assert not is_even or counts == [10, 10]


# --- a real model ------------------------------------------------------------------------------


@pytest.mark.llama
def test_a_llama_worker_answers_like_one_process(fleet: Fleet, model_path: Path) -> None:
    named = ("--model-path", str(model_path), "--model-name", "real")
    fleet.start("dynamo_trio.worker", *named, "--system-port", "0")
    alone = fleet.start("dynamo_trio", *named, "--http-port", "0")
    frontend = fleet.frontend()
    wait_until(lambda: models(frontend.port) == ["real"], "the model is offered")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = chat(24, model="real", messages=question, temperature=0, ignore_eos=False)
    ports = (frontend.port, alone.wait_ready().port)
    answers = [ask(port, "POST", "/v1/chat/completions", body) for port in ports]
    assert all(answer.is_done for answer in answers)
    assert answers[0].text == answers[1].text != ""
