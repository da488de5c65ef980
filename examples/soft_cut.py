"""A request that outlasts its drain limit is cut softly: it still says farewell.

The soft scope encloses only the wait. Whatever ends the wait, the code after it runs, and nothing
around it is cancelled.
"""

from __future__ import annotations

import trio

from dynamo_trio.lifecycle import Lifecycle, Timetable


async def handle(lifecycle: Lifecycle, seconds: float, label: str) -> None:
    with lifecycle.work.admit(label) as admission:
        with admission.scope:
            await trio.sleep(seconds)  # waiting for an engine, say
        if admission.reason is None:
            print(f"{label}: complete")
        else:
            await trio.sleep(0.01)  # the farewell may take a moment
            print(f"{label}: sorry, {admission.reason}")


async def main() -> None:
    lifecycle = Lifecycle(Timetable(grace=0.0, drain=0.3))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifecycle.run)
        nursery.start_soon(handle, lifecycle, 0.1, "example 1")
        nursery.start_soon(handle, lifecycle, 60.0, "example 2")
        await trio.sleep(0.01)
        lifecycle.request_stop("the example is over")
    print(lifecycle.report().to_json())


if __name__ == "__main__":
    trio.run(main)
