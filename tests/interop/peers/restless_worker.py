"""``python -m dynamo_trio.worker`` that leaves the routing pool, and comes back, when told to.

It can also be told to fall ill: then no request is answered until it is told to recover.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.config.programs import WORKER
from dynamo_trio.program.entry import Body, Start, enter
from dynamo_trio.program.limits import worker_timetable
from dynamo_trio.push import Output, PushHandler
from dynamo_trio.worker import program as worker_program
from dynamo_trio.worker.program import Program
from dynamo_trio.worker.serve import engine_handler
from dynamo_trio.worker.status import WorkerStatus

if TYPE_CHECKING:
    from dynamo_trio.context import Context
    from dynamo_trio.engines import Engine
    from dynamo_trio.runtime import DistributedRuntime
    from dynamo_trio.wire.llm import PreprocessedRequest


@attrs.define(eq=False)
class Illness:
    """While it lasts, requests wait."""

    lasts: bool = False
    waiting: int = 0
    _over: trio.Event = attrs.field(factory=trio.Event)

    async def fall_ill(self, _body: dict[str, object]) -> dict[str, object]:
        self.lasts, self._over = True, trio.Event()
        return {}

    async def recover(self, _body: dict[str, object]) -> dict[str, object]:
        self.lasts = False
        self._over.set()
        return {}

    async def tell(self, _body: dict[str, object]) -> dict[str, object]:
        return {"waiting": self.waiting}

    def handler(self, engine: Engine) -> PushHandler:
        """The worker's own, behind the illness."""
        well = engine_handler(engine)

        async def generate(request: PreprocessedRequest, context: Context, output: Output) -> None:
            if self.lasts:
                self.waiting += 1
                try:
                    await self._over.wait()
                finally:
                    self.waiting -= 1
            await well.function(request, context, output)

        return PushHandler(generate)


@attrs.define(eq=False)
class RestlessStatus(WorkerStatus):
    """With a few engine routes more."""

    endpoint: str = ""
    illness: Illness = attrs.field(factory=Illness)

    def attach(self, runtime: DistributedRuntime) -> None:
        super().attach(runtime)
        endpoint = runtime.endpoint(self.endpoint)

        async def leave(_body: dict[str, object]) -> dict[str, object]:
            await endpoint.unregister_endpoint_instance()
            return {}

        async def come_back(_body: dict[str, object]) -> dict[str, object]:
            await endpoint.register_endpoint_instance()
            return {}

        runtime.register_engine_route("fall_ill", self.illness.fall_ill)
        runtime.register_engine_route("recover", self.illness.recover)
        runtime.register_engine_route("patients", self.illness.tell)
        runtime.register_engine_route("leave", leave)
        runtime.register_engine_route("come_back", come_back)


async def run(start: Start) -> int:
    program = Program(start)
    endpoint = start.config.endpoint
    assert endpoint is not None
    status = RestlessStatus(start.lifecycle, began=start.began, endpoint=str(endpoint))
    program.status = status
    vars(worker_program)["engine_handler"] = status.illness.handler
    return await program.run()


if __name__ == "__main__":
    enter(WORKER, lambda: Body(worker_timetable, run))
