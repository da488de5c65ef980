"""Each ending that a worker can give a request, shown to NVIDIA's own frontend."""

from __future__ import annotations

import select
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from dynamo_trio.wire.dynamo import keys
from tests.interop.load import CHAT
from tests.interop.model import Model
from tests.interop.processes import wait_until
from tests.interop.rows import ACKS, ANSWERS, CHUNK, LEFT_OPEN, Moves, Row
from tests.interop.scripted_worker import LETTERS, Faults, ScriptedWorker, scripted_worker
from tests.standalone.harness import Answer, Http1, chat, in_parallel

if TYPE_CHECKING:
    from tests.interop.fleet import Frontend
    from tests.interop.scene import Stage
    from tests.standalone.harness import Json

PAGE = Path(__file__).parents[2] / "docs" / "interop.md"
TOKENS = 8
WHOLE = LETTERS[:TOKENS]
#: How long a test looks at a frontend that hangs, in seconds.
HANGING = 1.0


@attrs.frozen
class Seen:
    """What became of one request."""

    answer: Answer
    asked: list[dict[str, Any]]  # what workers were sent
    seconds: float
    #: The status of a further request.
    after: int | None

    @property
    def limits(self) -> list[int]:
        """How many tokens each worker was asked for."""
        return [request["stop_conditions"]["max_tokens"] for request in self.asked]

    @property
    def summary(self) -> str:
        """As it stands in the tables."""
        if "text/event-stream" not in self.answer.headers["content-type"]:
            return str(self.answer.status)
        assert self.answer.is_done  # NVIDIA's frontend says so after an error, too
        return CHUNK if any("error" in chunk for chunk in self.answer.chunks) else "ok"


def ask_once(stage: Stage, row: Row, codec: str, *, migrations: int, stream: bool) -> Seen:
    """Ask a frontend that knows one worker, or two if it may migrate."""
    store = stage.file_store(f"rows {migrations}")
    frontend = stage.their_frontend(store, migrations)
    # The same endpoint for every row: per endpoint that goes, this frontend loses an inotify
    # instance, and without one (128 per user) it shuts down.
    model = Model(stage.folder(), namespace=f"rows-{migrations}-{stream}")
    body = chat(TOKENS, model=model.name, stream=stream)
    faults = Faults()
    with ExitStack() as stack:
        playing = partial(scripted_worker, store, model, faults, codec)
        workers = [stack.enter_context(playing()) for _ in range(2 if migrations else 1)]
        frontend.wait_model(model)
        warm_up(frontend, body, workers)
        faults.set(row.fault)
        if row.dead:
            workers[0].die()
        connection = stack.enter_context(Http1(frontend.port))
        began = time.monotonic()
        connection.send("POST", CHAT, body)
        if row.hangs:
            see_it_hang(connection, faults)
        answer, asked = connection.read(), list(faults.requests)
        seconds = time.monotonic() - began
        again = None if row.hangs else frontend.ask("POST", CHAT, body).status
        return Seen(answer, asked, seconds, again)


def warm_up(frontend: Frontend, body: Json, workers: list[ScriptedWorker]) -> None:
    """Until the frontend knows all of them."""

    def all_have_worked() -> bool:
        frontend.ask("POST", CHAT, body)
        return all(worker.taken for worker in workers)

    wait_until(all_have_worked, "all workers take part", frontend.process)


def see_it_hang(connection: Http1, faults: Faults) -> None:
    """Nothing comes; so the instance leaves, and that is what ends it."""
    assert select.select([connection.socket], [], [], HANGING)[0] == []
    assert len(faults.requests) == 1
    assert faults.victim is not None
    faults.victim.registration.remove(keys.INSTANCES)


def check_moving(row: Row, seen: Seen) -> None:
    """With another worker, and a frontend that may migrate."""
    moved = row.moves in (Moves.YES, Moves.LATE)
    if moved or row.moves is Moves.WHOLE:
        assert seen.answer.is_done
        assert seen.answer.text == WHOLE
    else:
        assert seen.summary == row.stream
    assert seen.limits == ([TOKENS, row.rest] if moved and not row.dead else [TOKENS])
    assert seen.after in (None, 200)  # there is the other one
    if moved and not row.dead:
        assert len(seen.asked[1]["token_ids"]) - len(seen.asked[0]["token_ids"]) == (
            TOKENS - row.rest
        )


def check_staying(row: Row, stream: Seen, unary: Seen) -> None:
    """Without another worker."""
    if row.hangs:
        assert (stream.summary, unary.summary) == ("500", "500")
        return
    assert (stream.summary, unary.summary) == (row.stream, row.unary)
    assert (stream.after, unary.after) == (row.after, row.after)
    if row.stream == CHUNK:
        assert stream.answer.text == (WHOLE if row.rest == 0 else WHOLE[: row.before])


CODECS = ["msgpack", pytest.param("json", marks=pytest.mark.soak)]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("row", [*ACKS, *ANSWERS], ids=lambda row: row.name)
def test_what_their_frontend_makes_of_it(lone_stage: Stage, row: Row, codec: str) -> None:
    once = partial(ask_once, lone_stage, row, codec)
    moving, stream, unary = in_parallel(
        [
            partial(once, migrations=3, stream=True),
            partial(once, migrations=0, stream=True),
            partial(once, migrations=0, stream=False),
        ]
    )
    check_moving(row, moving)
    check_staying(row, stream, unary)
    if "left open" in row.name:  # the end of the answer waits for the end of the connection
        assert min(stream.seconds, unary.seconds) >= LEFT_OPEN


@pytest.mark.parametrize("row", [*ACKS, *ANSWERS], ids=lambda row: row.name)
def test_the_page_says_so(row: Row) -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {row.name} |")]
    assert [line.endswith(row.cells) for line in lines] == [True]
