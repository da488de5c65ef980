"""NVIDIA's frontend in front of our worker."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.interop.processes import wait_until
from tests.interop.scene import axes
from tests.standalone.harness import chat, in_parallel, open_streams

if TYPE_CHECKING:
    from tests.interop.fleet import Frontend, Worker
    from tests.interop.model import Model
    from tests.interop.scene import Scene
    from tests.standalone.harness import Answer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def completion(model: Model, max_tokens: int, **more: object) -> dict[str, Any]:
    body = {"model": model.name, "prompt": "Once", "max_tokens": max_tokens, "stream": False}
    return body | more


def served(scene: Scene, model: Model, *flags: str) -> tuple[Frontend, Worker]:
    worker = scene.our_worker(model, *flags)
    frontend = scene.their_frontend
    frontend.wait_model(model, worker.process)
    return frontend, worker


def idle(worker: Worker) -> bool:
    return worker.running == 0


@axes(0)
def test_chat_and_completions_streaming_and_unary(scene: Scene) -> None:
    model = scene.model()
    frontend, _ = served(scene, model)

    body = chat(12, model=model.name, stream_options={"include_usage": True})
    streamed = frontend.ask("POST", CHAT, body)
    unary = frontend.ask("POST", CHAT, chat(12, model=model.name, stream=False)).json()
    assert streamed.is_done
    assert streamed.text == unary["choices"][0]["message"]["content"] != ""
    assert unary["choices"][0]["finish_reason"] == "length"
    assert streamed.chunks[-1]["usage"]["completion_tokens"] == 12
    assert unary["usage"]["completion_tokens"] == 12

    streamed = frontend.ask("POST", COMPLETIONS, completion(model, 12, stream=True))
    unary = frontend.ask("POST", COMPLETIONS, completion(model, 12)).json()
    assert streamed.is_done
    text = "".join(chunk["choices"][0]["text"] for chunk in streamed.chunks)
    assert text == unary["choices"][0]["text"] != ""


@axes(1)
def test_a_stop_string_ends_the_answer_and_its_handler(scene: Scene) -> None:
    model = scene.model()
    frontend, worker = served(scene, model, "--itl-ms", "5")
    # NVIDIA's frontend looks for no stop string if it is to ignore the end of the sequence.
    whole = frontend.ask("POST", CHAT, chat(40, model=model.name, ignore_eos=False)).text
    stop = whole[len(whole) // 2 :][:6]

    body = chat(4000, model=model.name, stop=[stop], stream=False, ignore_eos=False)
    answer = frontend.ask("POST", CHAT, body).json()["choices"][0]
    assert answer["message"]["content"] == whole[: whole.index(stop)]
    assert answer["finish_reason"] == "stop"
    wait_until(partial(idle, worker), "an idle worker", worker.process)


@axes(0)
def test_a_client_that_leaves_is_noticed_by_the_handler_within_a_second(scene: Scene) -> None:
    model = scene.model()
    frontend, worker = served(scene, model, "--itl-ms", "20")
    with open_streams(frontend.port, 1, chat(4000, model=model.name)):
        assert worker.running == 1
    left = time.monotonic()
    wait_until(partial(idle, worker), "an idle worker", worker.process)
    assert time.monotonic() - left < 10  # a quarter of a second, by design
    assert worker.process.is_running


def ask_for(frontend: Frontend, model: Model, question: str) -> Answer:
    messages = [{"role": "user", "content": question}]
    return frontend.ask("POST", CHAT, chat(20, model=model.name, messages=messages))


@axes(1)
def test_forty_requests_in_parallel(scene: Scene) -> None:
    model = scene.model()
    frontend, worker = served(scene, model)
    questions = [f"Question {number}?" for number in range(8)]
    alone = {question: ask_for(frontend, model, question).text for question in questions}
    assert len(set(alone.values())) == len(questions)

    many = questions * 5
    answers = in_parallel([partial(ask_for, frontend, model, question) for question in many])
    assert all(answer.is_done for answer in answers)
    assert [answer.text for answer in answers] == [alone[question] for question in many]
    assert worker.taken == len(questions) + len(many)


@axes(0)
def test_a_prompt_of_twenty_thousand_tokens(scene: Scene) -> None:
    model = scene.model(context_length=32768)
    frontend, _ = served(scene, model, "--context-tokens", "32768")
    prompt = "the " * 20_000
    body = completion(model, 8, prompt=prompt)
    answer = frontend.ask("POST", COMPLETIONS, body).json()
    assert answer["usage"]["prompt_tokens"] >= 20_000
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["text"]


@axes(1)
def test_a_request_that_our_worker_finds_too_large_fails_at_once(scene: Scene) -> None:
    model = scene.model(context_length=32768)
    worker = scene.our_worker(model, DYN_TCP_MAX_MESSAGE_SIZE="16384")
    frontend = scene.their_frontend
    frontend.wait_model(model, worker.process)
    small, large = (completion(model, 8, prompt="the " * count) for count in (10, 20_000))
    assert frontend.ask("POST", COMPLETIONS, small).status == 200
    assert frontend.ask("POST", COMPLETIONS, large).status >= 500
    worker.process.wait_log("too large")


@axes(0)
def test_a_prompt_that_is_too_long_for_the_model_is_the_clients_mistake_alone(
    scene: Scene,
) -> None:
    model = scene.model()
    frontend, _ = served(scene, model)
    long, short = (completion(model, 8, prompt="the " * count) for count in (9000, 10))
    answer = frontend.ask("POST", COMPLETIONS, long)
    assert answer.status == 400
    assert "context has 8192 tokens" in answer.json()["message"]
    assert frontend.ask("POST", COMPLETIONS, short).status == 200
