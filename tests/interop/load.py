"""A steady load on two workers of ours, of which no request may fail."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs

from tests.interop.processes import wait_until
from tests.standalone.harness import chat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.interop.fleet import Frontend, Worker
    from tests.interop.model import Model
    from tests.interop.scene import Scene
    from tests.standalone.harness import Answer

CHAT = "/v1/chat/completions"


def two_workers(scene: Scene, model: Model, *flags: str) -> list[Worker]:
    """Both are known to the frontend: each has taken a request."""
    workers = [scene.our_restless_worker(model, *flags) for _ in range(2)]
    frontend = scene.their_frontend
    frontend.wait_model(model, *(worker.process for worker in workers))

    for worker in workers:
        worker.process.wait_log("is ready after")

    def both_have_worked() -> bool:
        frontend.ask("POST", CHAT, chat(1, model=model.name))
        return all(worker.taken > 0 for worker in workers)

    wait_until(both_have_worked, "both workers take part", *(w.process for w in workers))
    return workers


@attrs.define(eq=False)
class Load:
    """Short requests, one after the other, from a few threads; keeps each answer."""

    frontend: Frontend
    model: Model
    answers: list[Answer] = attrs.field(factory=list)
    errors: list[Exception] = attrs.field(factory=list)
    _over: threading.Event = attrs.field(factory=threading.Event)

    def ask(self) -> None:
        body = chat(3, model=self.model.name)
        while not self._over.wait(0.02):
            try:
                self.answers.append(self.frontend.ask("POST", CHAT, body))
            except Exception as exc:  # it counts, whatever it is
                self.errors.append(exc)

    @contextmanager
    def running(self, threads: int = 3) -> Iterator[None]:
        askers = [threading.Thread(target=self.ask, daemon=True) for _ in range(threads)]
        for asker in askers:
            asker.start()
        try:
            yield
        finally:
            self._over.set()
            for asker in askers:
                asker.join()

    def check(self) -> None:
        """Each request got its whole answer."""
        assert self.errors == []
        failed = [answer for answer in self.answers if answer.status != 200 or not answer.is_done]
        assert failed == []
        assert len({answer.text for answer in self.answers}) == 1
        assert len(self.answers) > 100


def wait_found(scene: Scene, model: Model, worker: Worker) -> None:
    """Wait until it is in the store, and takes requests."""
    instance_id = worker.instance_id
    processes = (scene.their_frontend.process, worker.process)
    wait_until(lambda: instance_id in scene.store.instances(model), "its key", *processes)
    taken = worker.taken
    wait_until(lambda: worker.taken > taken + 3, "its share of the requests", *processes)
