"""``python -m dynamo_trio.worker`` that leaves the routing pool, and comes back, when told to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from dynamo_trio.config.programs import WORKER
from dynamo_trio.program.entry import Body, Start, enter
from dynamo_trio.program.limits import worker_timetable
from dynamo_trio.worker.program import Program
from dynamo_trio.worker.status import WorkerStatus

if TYPE_CHECKING:
    from dynamo_trio.runtime import DistributedRuntime


@attrs.define(eq=False)
class RestlessStatus(WorkerStatus):
    """With two engine routes more."""

    endpoint: str = ""

    def attach(self, runtime: DistributedRuntime) -> None:
        super().attach(runtime)
        endpoint = runtime.endpoint(self.endpoint)

        async def leave(_body: dict[str, object]) -> dict[str, object]:
            await endpoint.unregister_endpoint_instance()
            return {}

        async def come_back(_body: dict[str, object]) -> dict[str, object]:
            await endpoint.register_endpoint_instance()
            return {}

        runtime.register_engine_route("leave", leave)
        runtime.register_engine_route("come_back", come_back)


async def run(start: Start) -> int:
    program = Program(start)
    endpoint = start.config.endpoint
    assert endpoint is not None
    program.status = RestlessStatus(start.lifecycle, began=start.began, endpoint=str(endpoint))
    return await program.run()


if __name__ == "__main__":
    enter(WORKER, lambda: Body(worker_timetable, run))
