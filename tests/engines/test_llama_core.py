"""llama.cpp with the default model: what is particular to it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from dynamo_trio.engines import CoreSpec, Delta, Engine, Request, State, make_core, open_engine
from dynamo_trio.engines.llama import LlamaCore
from dynamo_trio.engines.llama_handles import LlamaSettings
from dynamo_trio.errors import EngineShutdown, FileUnusable, LoadError
from dynamo_trio.testing.cores import WatchedCore
from dynamo_trio.tokenizers.gguf import GgufTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.llama

QUESTIONS = [
    "Why is the sky blue?",
    "Name three colours.",
    "What is 2+2?",
    "Tell me a joke.",
    "Who was Newton?",
    "Write a haiku.",
    "What is Python?",
    "How do birds fly?",
]


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Iterator[GgufTokenizer]:
    made = GgufTokenizer(model_path)
    yield made
    made.close()


@pytest.fixture
def core(model_path: Path) -> Iterator[WatchedCore]:
    watched = WatchedCore(
        make_core(CoreSpec(kind="llama", model_path=model_path, max_running=8, context_tokens=512))
    )
    yield watched
    watched.check()


def chat(tokenizer: GgufTokenizer, question: str, **options: object) -> Request:
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    request = Request(
        request_id=question, token_ids=tokenizer.encode(text, add_special=False), max_tokens=24
    )
    return attrs.evolve(request, **options)  # type: ignore[arg-type]  # passed on


async def answer(engine: Engine, request: Request) -> tuple[list[int], str | None]:
    token_ids: list[int] = []
    last = None
    async with engine.open(request) as deltas:
        async for delta in deltas:
            token_ids.extend(delta.token_ids)
            last = delta.finish_reason
    return token_ids, last


async def test_eight_at_once_say_the_same_as_each_alone(
    core: WatchedCore, tokenizer: GgufTokenizer
) -> None:
    together: dict[str, tuple[list[int], str | None]] = {}
    async with open_engine(core) as engine:
        alone = {text: await answer(engine, chat(tokenizer, text)) for text in QUESTIONS}
        async with trio.open_nursery() as nursery:

            async def one(text: str, place: int) -> None:
                await trio.sleep(place * 0.05)  # so that prompts and answers mix in the batches
                together[text] = await answer(engine, chat(tokenizer, text))

            for place, text in enumerate(QUESTIONS):
                nursery.start_soon(one, text, place)
    assert together == alone
    assert "sky" in tokenizer.decode(alone[QUESTIONS[0]][0])


async def test_an_answer_stops_where_the_model_ends_it(
    core: WatchedCore, tokenizer: GgufTokenizer
) -> None:
    async with open_engine(core) as engine:
        token_ids, reason = await answer(engine, chat(tokenizer, "What is 2+2?"))
        assert reason == "stop"
        assert not set(token_ids) & set(tokenizer.eos_token_ids)
        assert tokenizer.decode(token_ids) == "The answer is: 4"
        at_least, _ = await answer(engine, chat(tokenizer, "What is 2+2?", min_tokens=15))
        assert len(at_least) >= 15
        endless, reason = await answer(engine, chat(tokenizer, "What is 2+2?", ignore_eos=True))
        assert (len(endless), reason) == (24, "length")
        assert not set(at_least + endless) & set(tokenizer.eos_token_ids)
        assert endless[: len(token_ids)] == token_ids


async def test_stop_tokens_end_an_answer_and_are_not_part_of_it(
    core: WatchedCore, tokenizer: GgufTokenizer
) -> None:
    async with open_engine(core) as engine:
        whole, _ = await answer(engine, chat(tokenizer, "Why is the sky blue?"))
        stop = {whole[5]}
        cut = whole[: whole.index(whole[5])]
        request = chat(tokenizer, "Why is the sky blue?", stop_token_ids=stop)
        assert await answer(engine, request) == (cut, "stop")


async def test_a_seed_repeats_an_answer_and_none_does_not(
    core: WatchedCore, tokenizer: GgufTokenizer
) -> None:
    async with open_engine(core) as engine:

        async def drawn(seed: int | None) -> tuple[int, ...]:
            options = {"temperature": 1.5, "top_p": 0.98, "top_k": 200, "ignore_eos": True}
            request = chat(tokenizer, "Tell me a joke.", seed=seed, **options)
            return tuple((await answer(engine, request))[0])

        assert await drawn(1) == await drawn(1)
        assert len({await drawn(None) for _ in range(3)}) > 1


async def test_a_long_prompt_is_worked_off_in_parts_while_others_go_on(
    core: WatchedCore, tokenizer: GgufTokenizer
) -> None:
    order: list[str] = []
    text = " word" * 400
    long = chat(tokenizer, "long", token_ids=tokenizer.encode(text, add_special=False))
    short = chat(tokenizer, "short", ignore_eos=True)
    async with open_engine(core) as engine:
        with engine.attach(short, lambda delta: order.append(delta.request_id)):
            while len(order) < 3:  # noqa: ASYNC110 - any moment after the start will do
                await trio.sleep(0.001)
            with engine.attach(long, lambda delta: order.append(delta.request_id)):
                await engine.drain()
    before_long = order[: order.index("long")]
    assert len(before_long) >= 3 + 3  # 400 tokens are four parts


async def test_an_interrupted_step_drops_its_requests_and_the_core_goes_on(
    core: WatchedCore, tokenizer: GgufTokenizer
) -> None:
    """Below the engine, which would end after an interrupt."""
    core.load(lambda _: None)
    core.add(chat(tokenizer, "a"))
    core.step()
    long = tokenizer.encode(" word" * 300, add_special=False)
    core.add(chat(tokenizer, "b", token_ids=long))
    async with trio.open_nursery() as nursery:

        async def step() -> None:
            deltas = await trio.to_thread.run_sync(core.step)
            assert [(d.request_id, d.finish_reason) for d in deltas] == [
                ("a", "error"),
                ("b", "error"),
            ]
            assert all(type(d.error) is EngineShutdown for d in deltas)

        nursery.start_soon(step)
        await trio.sleep(0.1)
        core.interrupt()
    assert core.stats().kv_blocks_used == 0
    core.add(chat(tokenizer, "c", max_tokens=2))
    seen: list[Delta] = []
    while core.has_work():
        seen.extend(core.step())
    assert seen[-1].finish_reason == "length"
    core.close()


async def test_leaving_the_engine_does_not_wait_for_a_long_prompt(
    core: WatchedCore, tokenizer: GgufTokenizer
) -> None:
    settings = core.core.settings  # type: ignore[attr-defined]  # a LlamaCore's
    inner = LlamaCore(attrs.evolve(settings, batch_tokens=512))
    core = WatchedCore(inner)
    long = tokenizer.encode(" word" * 480, add_special=False)
    async with open_engine(core) as engine:
        with engine.attach(chat(tokenizer, "a", token_ids=long), lambda _: None):
            while not core.steps:  # noqa: ASYNC110 - the thread tells nobody
                await trio.sleep(0.01)
        assert engine.step_count == 0
    assert core.interrupts == 1
    assert core.closes == 1
    core.check()


async def test_freed_memory_cannot_be_reached(core: WatchedCore) -> None:
    async with open_engine(core):
        pass
    with pytest.raises(AssertionError, match="not loaded, or closed"):
        core.core.step()
    core.core.interrupt()
    core.core.close()


def test_a_core_may_be_closed_while_a_request_runs(
    core: WatchedCore, tokenizer: GgufTokenizer
) -> None:
    core.load(lambda _: None)
    for name in ("a", "b"):
        core.add(chat(tokenizer, name, min_tokens=5))
    core.step()
    core.close()
    assert not core.core.has_work()


async def test_llama_cpp_prints_nothing(
    core: WatchedCore, tokenizer: GgufTokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    async with open_engine(core) as engine:
        await answer(engine, chat(tokenizer, "What is 2+2?"))
    assert capfd.readouterr() == ("", "")


# --- files that do not load ---------------------------------------------------------


async def fails(path: Path) -> BaseException:
    core = WatchedCore(LlamaCore(LlamaSettings(model_path=path, model="m")))
    with pytest.raises((FileUnusable, LoadError)) as caught:
        async with open_engine(core):
            pytest.fail("it cannot load")
    assert core.closes == 1
    core.check()
    return caught.value


async def test_a_missing_file_is_unusable(tmp_path: Path) -> None:
    error = await fails(tmp_path / "none.gguf")
    assert type(error) is FileUnusable
    assert "there is no model file" in str(error)


async def test_a_folder_is_unusable(tmp_path: Path) -> None:
    error = await fails(tmp_path)
    assert type(error) is FileUnusable
    assert "Is a directory" in str(error)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("text", "magic number"),
        ("empty", "the file is empty"),
        ("head only", "a list of strings is cut short"),
        ("cut short", "truncated: it has 3000000 of 98362432 bytes"),
        ("hole", "a key without a name"),  # llama.cpp itself would abort the process
        ("model without tensors", "not a model that llama.cpp can load"),
    ],
)
async def test_a_corrupt_file_is_a_load_error(
    kind: str, message: str, tmp_path: Path, model_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with model_path.open("rb") as file:
        head = file.read(3_000_000)
    content = {
        "text": b"this is no model\n" * 100,
        "empty": b"",
        "head only": head[:100_000],
        "cut short": head,
        "hole": head[:30] + bytes(200) + head[230:],
        "model without tensors": b"GGUF" + bytes([3, 0, 0, 0]) + bytes(16),
    }[kind]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    error = await fails(path)
    assert type(error) is LoadError
    assert message in str(error)
    assert capfd.readouterr() == ("", "")


async def test_cancelling_the_load_of_a_model_ends_it(model_path: Path) -> None:
    core = WatchedCore(LlamaCore(LlamaSettings(model_path=model_path, model="m")))
    with trio.CancelScope() as scope:
        async with open_engine(core, progress=lambda _: scope.cancel()) as engine:
            pytest.fail(f"loaded: {engine.state}")
    assert scope.cancelled_caught
    assert core.closes == 1
    core.check()


async def test_a_context_beyond_the_training_is_cut_to_it(model_path: Path) -> None:
    spec = CoreSpec(kind="llama", model_path=model_path, max_running=1, context_tokens=100_000)
    async with open_engine(make_core(spec)) as engine:
        assert engine.info.context_tokens == 8192
        assert engine.state is State.READY


async def test_without_cyllama_the_error_says_how_to_get_it(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cyllama.llama.llama_cpp", None)
    error = await fails(model_path)
    assert "pip install 'dynamo-trio[llama]'" in str(error)
