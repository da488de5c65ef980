"""OpenAI's own SDK against the whole process on the real model."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.standalone.harness import Server, ask, in_parallel, metric, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.standalone.conftest import Start

pytestmark = pytest.mark.llama

QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]
ON = {"ignore_eos": True}


@pytest.fixture
def model(model_path: Path) -> str:
    return model_path.name.split(".")[0]


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=100)


@pytest.fixture
def client(llama_server: Server) -> Iterator[openai.OpenAI]:
    with client_of(llama_server) as client:
        yield client


def create(client: openai.OpenAI, model: str, max_tokens: int = 16, **more: Any) -> Any:
    """A chat; greedy unless told otherwise."""
    options: Any = {"messages": QUESTION, "temperature": 0} | more
    return client.chat.completions.create(model=model, max_tokens=max_tokens, **options)


def text_of(stream: Any) -> str:
    """The text of a stream of chat chunks that must end with a finish reason."""
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    ends = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert ends[-1] in ("stop", "length")
    assert set(ends[:-1]) <= {None}
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


# --- answers --------------------------------------------------------------------------------------


def test_the_model_is_listed(client: openai.OpenAI, model: str) -> None:
    assert [entry.id for entry in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def test_a_stream_says_the_same_as_a_whole_answer(client: openai.OpenAI, model: str) -> None:
    whole = create(client, model)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    assert len(whole.choices[0].message.content) > 10
    assert text_of(create(client, model, stream=True)) == whole.choices[0].message.content


def test_usage(client: openai.OpenAI, model: str) -> None:
    whole = create(client, model).usage
    assert whole.completion_tokens == 16
    assert whole.prompt_tokens > 10
    assert whole.total_tokens == whole.prompt_tokens + 16
    *chunks, last = create(client, model, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage == whole
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert list(create(client, model, stream=True))[-1].usage is None


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(
    client: openai.OpenAI, model: str
) -> None:
    whole = create(client, model, 24).choices[0].message.content
    stop = whole[len(whole) // 2 :][:5]
    kept = whole.partition(stop)[0]
    answer = create(client, model, 24, stop=[stop, "never said"]).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("stop", kept)
    chunks = list(create(client, model, 24, stop=stop, stream=True))
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert text_of(chunks) == kept


def test_seed_and_temperature(client: openai.OpenAI, model: str) -> None:
    def answer(**options: float) -> str:
        content = create(client, model, 12, **options).choices[0].message.content
        assert isinstance(content, str)
        return content

    greedy = [answer(temperature=0) for _ in range(2)]
    assert greedy[0] == greedy[1]
    warm = [answer(temperature=1.5, seed=seed) for seed in (1, 1, 2, 3)]
    assert warm[0] == warm[1]
    assert len(set(warm)) > 1


def test_top_p_0_is_greedy(client: openai.OpenAI, model: str) -> None:
    plain = create(client, model, 12).choices[0].message.content
    narrow = create(client, model, 12, temperature=1.5, top_p=1e-9, seed=7)
    assert narrow.choices[0].message.content == plain


def test_completions(client: openai.OpenAI, model: str) -> None:
    prompt = "The capital of France is"
    whole = client.completions.create(model=model, prompt=prompt, max_tokens=8, temperature=0)
    assert whole.choices[0].finish_reason == "length"
    assert "Paris" in whole.choices[0].text
    stream = client.completions.create(
        model=model, prompt=prompt, max_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_eight_at_once(client: openai.OpenAI, model: str) -> None:
    prompts = [f"The number after {n} is" for n in range(8)]

    def complete(prompt: str) -> int:
        stream = client.completions.create(
            model=model, prompt=prompt, max_tokens=16, stream=True, extra_body=ON, temperature=0
        )
        pieces = [chunk.choices[0] for chunk in stream]
        assert pieces[-1].finish_reason == "length"
        assert "".join(piece.text for piece in pieces)
        return len(pieces)

    assert all(in_parallel([partial(complete, prompt) for prompt in prompts]))


def test_errors_are_those_that_the_sdk_knows(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        create(client, "no-such-model")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as hot:
        create(client, model, temperature=9)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        create(client, model, messages=[{"role": "user", "content": "word " * 5000}])
    assert long.value.code == "context_length_exceeded"


def test_a_client_that_leaves_half_way_frees_its_place(
    llama_server: Server, client: openai.OpenAI, model: str
) -> None:
    port = llama_server.port
    before = metric(port, "dynamo_frontend_model_cancellation_total")
    with create(client, model, 1000, stream=True, extra_body=ON) as stream:
        next(stream)
        next(stream)
        assert metric(port, "dynamo_frontend_active_requests") == 1
    wait_until(lambda: metric(port, "dynamo_frontend_active_requests") == 0, "nothing active")
    assert metric(port, "dynamo_frontend_model_cancellation_total") == before + 1
    assert text_of(create(client, model, 4, stream=True))


# --- stops ----------------------------------------------------------------------------------------


def streams_in_flight(
    server: Server, model: str, max_tokens: int, stop: Callable[[], None]
) -> list[tuple[str | None, str]]:
    """``stop()`` with eight streams in flight; each one's finish reason and error code."""

    def one(number: int) -> tuple[str | None, str]:
        messages = [{"role": "user", "content": f"Count to {number}."}]
        options = {"messages": messages, "stream": True, "extra_body": ON}
        reason = None
        try:
            for chunk in create(client, model, max_tokens, **options):
                reason = chunk.choices[0].finish_reason or reason
        except openai.APIError as exc:
            return reason, str(exc.code)
        return reason, ""

    def stop_once_all_run() -> None:
        wait_until(lambda: metric(port, "dynamo_frontend_active_requests") == 8, "8 active")
        stop()

    port = server.port
    with client_of(server) as client, ThreadPoolExecutor(1) as pool:
        client.models.list()  # what the SDK does only once is done before
        stopped = pool.submit(stop_once_all_run)
        ends = in_parallel([partial(one, number) for number in range(8)])
        stopped.result()
    return ends


def stop_under_load(
    start: Start, model_path: Path, max_tokens: int, limit: str
) -> tuple[Server, list[tuple[str | None, str]]]:
    environ = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": limit}
    server = start("--model-path", str(model_path), **environ)
    model = model_path.name.split(".")[0]
    ends = streams_in_flight(server, model, max_tokens, lambda: server.kill(signal.SIGTERM))
    return server, ends


def test_sigterm_with_eight_streams_in_flight(start: Start, model_path: Path) -> None:
    server, ends = stop_under_load(start, model_path, 32, "120")
    last = time.monotonic()
    assert server.end() == 0
    assert time.monotonic() - last < 5  # 0.5 s by design
    assert ends == [("length", "")] * 8
    assert server.report["requests"]["finished"] == 8
    assert server.report["requests"]["cut"] == 0
    steps = {step["step"]: step["outcome"] for step in server.report["steps"]}
    assert set(steps.values()) == {"completed"}
    assert "engine_close" in steps


def test_the_same_with_a_limit_of_1_s(start: Start, model_path: Path) -> None:
    server, ends = stop_under_load(start, model_path, 500, "1")
    assert server.end() == 0
    assert ends == [(None, "cut")] * 8
    assert server.report["requests"]["cut"] == 8
    assert server.report["requests"]["lost"] == 0


def test_a_farewell_has_a_proper_end_and_no_done(start: Start, model_path: Path) -> None:
    # The SDK hides both, so this one looks at the bytes.
    environ = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "0"}
    server = start("--model-path", str(model_path), **environ)
    body = {
        "model": model_path.name.split(".")[0],
        "prompt": "Once upon a time",
        "stream": True,
        "max_tokens": 1000,
        "ignore_eos": True,
    }
    answers = in_parallel(
        [
            lambda: ask(server.port, "POST", "/v1/completions", body),
            lambda: signal_once_active(server),
        ]
    )
    assert server.end() == 0
    answer = answers[0]
    assert answer is not None
    assert answer.status == 200
    assert answer.error["code"] == "cut"


def signal_once_active(server: Server) -> None:
    wait_until(
        lambda: metric(server.port, "dynamo_frontend_time_to_first_token_seconds_count") == 1,
        "the first token",
    )
    server.kill(signal.SIGTERM)


def test_a_second_sigint_ends_it_now(start: Start, model_path: Path) -> None:
    environ = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "120"}
    server = start("--model-path", str(model_path), **environ)

    def press_twice() -> None:
        server.kill(signal.SIGINT)
        server.wait_log("phase draining")
        server.kill(signal.SIGINT)

    ends = streams_in_flight(server, model_path.name.split(".")[0], 500, press_twice)
    assert server.end() == 0
    assert ends == [(None, "cut")] * 8
    assert server.report["requests"]["cut"] == 8


@pytest.mark.parametrize("line", ["listening on", "loading SmolLM2"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_load(
    start: Start, model_path: Path, line: str, signum: signal.Signals
) -> None:
    server = start("--model-path", str(model_path), ready=False)
    server.wait_log(line)
    server.kill(signum)
    assert server.end() == 0
    assert server.report["cause"] == signum.name
    assert server.report["errors"] == []
    assert "Traceback" not in server.log


@pytest.mark.parametrize("part", [0.01, 0.5, 0.99])
def test_a_model_that_is_cut_short(
    start: Start, model_path: Path, tmp_path: Path, part: float
) -> None:
    whole = model_path.read_bytes()
    path = tmp_path / "short.gguf"
    path.write_bytes(whole[: int(len(whole) * part)])
    server = start("--model-path", str(path), ready=False)
    assert server.end() == 1
    assert "cannot start: " in server.log
    assert "Traceback" not in server.log
    assert server.report["exit_code"] == 1


def test_ask(start: Start, model_path: Path) -> None:
    ask = ("--ask", "Hi")  # a short answer
    server = start("--model-path", str(model_path), *ask, ready=False)
    assert server.popen.stdout is not None
    answer = server.popen.stdout.read()
    assert server.end() == 0
    assert answer.endswith("\n")
    assert len(answer.split()) > 3
