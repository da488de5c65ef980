"""Which plane carries a request, which instances are left out, and what the planes are told."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from prometheus_client import CollectorRegistry
from trio.testing import MockClock, wait_all_tasks_blocked

from dynamo_trio.client import Client, open_client
from dynamo_trio.discovery import (
    EndpointId,
    FileSettings,
    Instance,
    MemoryDiscovery,
    open_file_discovery,
)
from dynamo_trio.errors import (
    CannotConnect,
    Disconnected,
    Draining,
    DynamoException,
    NotConnected,
    NoWorker,
    Overloaded,
)
from dynamo_trio.events import MemoryEvents
from dynamo_trio.events.sockets import ZmqEvents
from dynamo_trio.metrics.planes import PlaneMetrics
from dynamo_trio.plane import Connections, Planes
from dynamo_trio.plane.net.hosts import routable_address
from dynamo_trio.runtime import open_runtime
from tests.runtime.fake_planes import FakePlane

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from pathlib import Path

    from dynamo_trio.discovery.records import Record

ENDPOINT = EndpointId.parse("a.b.c")
BOTH = ("mux", "tcp")


@attrs.define(eq=False)
class Fleet:
    discovery: MemoryDiscovery
    mux: FakePlane
    tcp: FakePlane
    client: Client

    def instance(self, number: int, *names: str, at: str = "") -> Instance:
        return Instance(ENDPOINT, number, {name: f"{name}-{number}{at}" for name in names})

    async def register(self, number: int, *names: str, at: str = "") -> None:
        await self.discovery.register(self.instance(number, *names, at=at))
        await wait_all_tasks_blocked()

    async def unregister(self, number: int) -> None:
        await self.discovery.unregister(self.client.find(number))
        await wait_all_tasks_blocked()

    async def ask(self) -> None:
        async with self.client.generate(None) as stream:
            assert [item async for item in stream] == [1]

    async def fail(self, error: type[DynamoException]) -> str:
        with pytest.raises(error) as caught:
            await self.ask()
        return str(caught.value)

    @property
    def asked(self) -> list[str]:
        return self.mux.asked + self.tcp.asked


@asynccontextmanager
async def open_fleet(*names: str) -> AsyncIterator[Fleet]:
    """One instance, 1, which offers these planes."""
    discovery, mux, tcp = MemoryDiscovery(), FakePlane("mux"), FakePlane("tcp")
    async with open_client(ENDPOINT, discovery, Planes.of([mux, tcp])) as client:
        fleet = Fleet(discovery, mux, tcp, client)
        await fleet.register(1, *names)
        yield fleet


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# --- the order ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offered", "asked"), [(BOTH, "mux-1"), (("mux",), "mux-1"), (("tcp",), "tcp-1")]
)
async def test_the_first_plane_that_both_have_is_taken(
    offered: tuple[str, ...], asked: str
) -> None:
    async with open_fleet(*offered) as fleet:
        await fleet.ask()
        assert fleet.asked == [asked]


async def test_where_mux_is_not_connected_tcp_is_taken_and_the_log_says_so_once(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_fleet(*BOTH) as fleet:
        fleet.mux.refusals["mux-1"] = NotConnected("nobody listens")
        for _ in range(5):
            await fleet.ask()
        said = "instance 1 of dyn://a.b.c is asked over tcp, since over mux it is not reached: "
        assert warnings(caplog) == [said + "nobody listens"]
        assert fleet.asked == ["mux-1"] * 5 + ["tcp-1"] * 5


async def test_once_mux_has_worked_its_loss_is_told_again(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_fleet(*BOTH) as fleet:
        for reason in ("one", "two"):
            fleet.mux.refusals["mux-1"] = NotConnected(reason)
            await fleet.ask()
            await fleet.ask()
            fleet.mux.refusals.clear()
            await fleet.ask()
        assert [text.rpartition(": ")[2] for text in warnings(caplog)] == ["one", "two"]


async def test_each_worker_that_mux_does_not_reach_is_told_of(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_fleet(*BOTH) as fleet:
        await fleet.register(2, *BOTH)
        fleet.mux.refusals |= {f"mux-{n}": NotConnected("no") for n in (1, 2)}
        for _ in range(6):
            await fleet.ask()
        assert [text.split()[1] for text in warnings(caplog)] == ["1", "2"]


@pytest.mark.parametrize(
    "error", [CannotConnect("frozen"), Draining("no"), Overloaded("full"), Disconnected("torn")]
)
async def test_another_plane_is_no_remedy_for_what_the_worker_says(
    autojump_clock: MockClock, error: DynamoException
) -> None:
    async with open_fleet(*BOTH) as fleet:
        fleet.mux.refusals["mux-1"] = error
        assert await fleet.fail(type(error)) == str(error)
        assert fleet.tcp.asked == []


async def test_neither_plane_reaches_it(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_fleet(*BOTH) as fleet:
        await fleet.register(2, *BOTH)
        fleet.mux.refusals["mux-1"] = NotConnected("no")
        fleet.tcp.refusals["tcp-1"] = CannotConnect("neither")
        assert await fleet.fail(CannotConnect) == "neither"
        # One failure, so it is left out for five seconds, and no longer.
        for _ in range(3):
            await fleet.ask()
        assert fleet.tcp.asked == ["tcp-1"]
        assert len([text for text in warnings(caplog) if "left out for 5 s" in text]) == 1
        await trio.sleep(5.1)
        fleet.tcp.refusals.clear()
        for _ in range(2):
            await fleet.ask()
        assert fleet.tcp.asked == ["tcp-1"] * 2


async def test_mux_alone_and_not_connected(autojump_clock: MockClock) -> None:
    async with open_fleet("mux") as fleet:
        fleet.mux.refusals["mux-1"] = NotConnected("nobody listens")
        assert await fleet.fail(NotConnected) == "nobody listens"


async def test_an_instance_with_no_plane_of_ours_is_never_chosen(autojump_clock: MockClock) -> None:
    async with open_fleet("pigeon") as fleet:
        assert "no worker of dyn://a.b.c has a request plane that is spoken here" in (
            await fleet.fail(NoWorker)
        )
        with pytest.raises(CannotConnect, match="offers pigeon, and this process speaks mux"):
            async with fleet.client.direct(None, 1):
                pass
        await fleet.register(2, "tcp")
        for _ in range(4):
            await fleet.ask()
        assert fleet.asked == ["tcp-2"] * 4


async def test_an_instance_with_no_plane_of_ours_is_told_of_once(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_fleet("pigeon") as fleet:
        async with open_client(ENDPOINT, fleet.discovery, fleet.client._planes):
            await fleet.register(1, "pigeon", at="elsewhere")
        unlike = "offers pigeon, and this process speaks mux and tcp (see DYN_TRIO_MUX)"
        told = f"instance 1 of dyn://a.b.c gets no requests from here: it {unlike}"
        assert warnings(caplog) == [told]
        caplog.clear()
        # The request's own error does not say it, for it may go to anybody.
        for _ in range(3):
            assert "mux" not in await fleet.fail(NoWorker)
        assert warnings(caplog) == [f"no worker of dyn://a.b.c can be asked: one of them {unlike}"]
        caplog.clear()
        await fleet.unregister(1)
        await fleet.register(1, "pigeon")
        assert warnings(caplog) == [told]


async def test_an_instance_without_any_plane(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_fleet() as fleet:
        assert "offers no plane that is known here" in warnings(caplog)[0]
        await fleet.register(1, "tcp")
        await fleet.ask()


# --- what can be seen of it ---------------------------------------------------------------


def told_at_info(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]


async def test_that_a_worker_is_back_on_mux_is_told_once(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with open_fleet(*BOTH) as fleet:
        await fleet.ask()
        assert told_at_info(caplog) == []
        for _ in range(2):
            fleet.mux.refusals["mux-1"] = NotConnected("no")
            await fleet.ask()
            fleet.mux.refusals.clear()
            for _ in range(3):
                await fleet.ask()
        again = "instance 1 of dyn://a.b.c is asked over mux again"
        assert told_at_info(caplog) == [again] * 2
        caplog.clear()
        # What comes anew has nothing that it could be back on.
        fleet.mux.refusals["mux-1"] = NotConnected("no")
        await fleet.ask()
        fleet.mux.refusals.clear()
        await fleet.unregister(1)
        await fleet.register(1, *BOTH)
        await fleet.ask()
        assert told_at_info(caplog) == []


async def test_requests_are_counted_by_the_plane_that_carried_them(
    autojump_clock: MockClock,
) -> None:
    async with open_fleet(*BOTH) as fleet:
        planes = fleet.client._planes
        await fleet.ask()
        fleet.mux.refusals["mux-1"] = NotConnected("no")
        await fleet.ask()
        await fleet.ask()
        fleet.tcp.refusals["tcp-1"] = CannotConnect("no")
        await fleet.fail(CannotConnect)
        assert planes.sent == {"mux": 1, "tcp": 2}
        fleet.mux.connections = Connections(client=1)
        registry = CollectorRegistry()
        registry.register(PlaneMetrics(planes))

        def value(name: str, plane: str, role: str) -> float | None:
            labels = {"plane": plane, "role": role}
            return registry.get_sample_value(f"dynamo_trio_plane_{name}", labels)

        assert [value("requests_total", p, "client") for p in BOTH] == [1, 2]
        assert [value("requests_total", p, "worker") for p in BOTH] == [0, 0]
        assert [value("connections", p, "client") for p in BOTH] == [1, 0]
        assert [value("connections", p, "worker") for p in BOTH] == [0, 0]


# --- who is left out ----------------------------------------------------------------------


async def test_an_instance_that_a_plane_avoids_gets_nothing(autojump_clock: MockClock) -> None:
    async with open_fleet(*BOTH) as fleet:
        await fleet.register(2, *BOTH)
        fleet.mux.avoided.add("mux-1")  # although tcp knows nothing of it
        for _ in range(4):
            await fleet.ask()
        assert fleet.asked == ["mux-2"] * 4
        assert {fleet.client.pick_random().instance_id for _ in range(50)} == {2}
        fleet.mux.avoided.clear()
        for _ in range(2):
            await fleet.ask()
        assert sorted(fleet.asked[4:]) == ["mux-1", "mux-2"]


async def test_if_all_are_avoided_nobody_is_asked(autojump_clock: MockClock) -> None:
    async with open_fleet(*BOTH) as fleet:
        fleet.mux.avoided.add("mux-1")
        text = "every worker of dyn://a.b.c is stopping, or does not answer"
        assert await fleet.fail(NoWorker) == text
        assert fleet.asked == []


async def test_one_that_failed_is_taken_before_one_that_is_avoided(
    autojump_clock: MockClock,
) -> None:
    async with open_fleet(*BOTH) as fleet:
        await fleet.register(2, *BOTH)
        fleet.mux.refusals["mux-1"] = CannotConnect("gone")
        await fleet.fail(CannotConnect)
        fleet.mux.avoided.add("mux-2")
        assert fleet.client.pick().instance_id == 1


async def test_what_a_plane_avoids_is_not_left_out_for_longer(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_fleet(*BOTH) as fleet:
        fleet.mux.endings["mux-1"] = Disconnected("silent")
        instance = fleet.client.pick()
        fleet.mux.avoided.add("mux-1")
        with pytest.raises(Disconnected):
            async with fleet.client.direct(None, instance.instance_id) as stream:
                await anext(stream)
        fleet.mux.avoided.clear()
        fleet.mux.endings.clear()
        await fleet.register(2, *BOTH)
        for _ in range(2):
            await fleet.ask()
        assert sorted(fleet.asked[1:]) == ["mux-1", "mux-2"]
        assert warnings(caplog) == []


async def test_a_refusal_because_of_a_stop_leaves_nobody_out(autojump_clock: MockClock) -> None:
    async with open_fleet(*BOTH) as fleet:
        await fleet.register(2, *BOTH)
        fleet.mux.refusals["mux-1"] = Draining("the worker is stopping")
        await fleet.fail(Draining)
        await fleet.ask()
        fleet.mux.refusals.clear()
        for _ in range(2):
            await fleet.ask()
        assert fleet.asked == ["mux-1", "mux-2", "mux-1", "mux-2"]


# --- what they are told -------------------------------------------------------------------


async def test_planes_are_told_of_addresses_that_come_and_go(autojump_clock: MockClock) -> None:
    async with open_fleet(*BOTH) as fleet:
        await fleet.register(1, *BOTH)  # the same again says nothing new
        await fleet.unregister(1)
        assert fleet.mux.told == [("found", "mux-1"), ("gone", "mux-1")]
        assert fleet.tcp.told == [("found", "tcp-1"), ("gone", "tcp-1")]


async def test_a_changed_address_is_found_before_the_old_one_is_gone(
    autojump_clock: MockClock,
) -> None:
    async with open_fleet(*BOTH) as fleet:
        await fleet.discovery.register(Instance(ENDPOINT, 1, {"mux": "new", "tcp": "tcp-1"}))
        await wait_all_tasks_blocked()
        assert fleet.mux.told == [("found", "mux-1"), ("found", "new"), ("gone", "mux-1")]
        assert fleet.tcp.told == [("found", "tcp-1")]
        await fleet.ask()
        assert fleet.asked == ["new"]


async def test_a_plane_that_an_instance_begins_or_ceases_to_offer(
    autojump_clock: MockClock,
) -> None:
    async with open_fleet("tcp") as fleet:
        await fleet.register(1, *BOTH)
        await fleet.register(1, "mux")
        assert fleet.mux.told == [("found", "mux-1")]
        assert fleet.tcp.told == [("found", "tcp-1"), ("gone", "tcp-1")]


async def test_clients_that_share_planes_tell_them_once(autojump_clock: MockClock) -> None:
    mux = FakePlane("mux")
    planes, discovery = Planes.of([mux]), MemoryDiscovery()
    await discovery.register(Instance(ENDPOINT, 1, {"mux": "x"}))
    async with AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(open_client(ENDPOINT, discovery, planes))
        assert mux.told == [("found", "x")]
        async with open_client(ENDPOINT, discovery, planes):
            pass
        assert mux.told == [("found", "x")]
    # A client that is closed hears of no instance's end any more.
    assert mux.told == [("found", "x"), ("gone", "x")]


# --- as a worker --------------------------------------------------------------------------


async def handler(request: object) -> AsyncGenerator[int, None]:
    yield 1


@attrs.define(eq=False)
class WatchedDiscovery(MemoryDiscovery):
    """Notes its own part in the order of events, in the list of a plane."""

    told: list[tuple[str, str]] = attrs.field(factory=list)

    async def register(self, record: Record) -> None:
        self.told.append(("registered", ""))
        await super().register(record)

    async def unregister(self, record: Record) -> None:
        self.told.append(("unregistered", ""))
        await super().unregister(record)


async def test_peers_are_told_of_a_withdrawal_before_the_store(autojump_clock: MockClock) -> None:
    mux = FakePlane("mux")
    discovery = WatchedDiscovery(told=mux.told)
    async with open_runtime(planes=[mux], discovery=discovery) as runtime:
        endpoint = runtime.endpoint("a.b.c")
        address = f"mux/{runtime.instance_id:x}/c"
        async with endpoint.serving(handler):
            await endpoint.unregister_endpoint_instance()
            await endpoint.unregister_endpoint_instance()  # is withdrawn already
            await endpoint.register_endpoint_instance()
            await endpoint.register_endpoint_instance()
    away = [("withdraw", address), ("unregistered", "")]
    back = [("restore", address), ("registered", "")]
    assert mux.told == [("registered", ""), *away, *back, ("registered", ""), *away]


@attrs.define(eq=False)
class UnsettledPlane(FakePlane):
    """A request of it never begins to be answered."""

    async def settle(self) -> None:
        self.told.append(("settle", ""))
        await trio.sleep_forever()


async def test_a_stop_tells_peers_of_every_endpoint_at_once(autojump_clock: MockClock) -> None:
    mux = UnsettledPlane("mux")
    discovery = WatchedDiscovery(told=mux.told)
    async with open_runtime(planes=[mux], discovery=discovery) as runtime:
        async with (
            runtime.endpoint("a.b.c").serving(handler),
            runtime.endpoint("a.b.d").serving(handler),
        ):
            before = len(mux.told)
            await runtime.unregister_all()
            told = mux.told[before:]
        assert mux.told[before:] == told  # once is enough
    addresses = " ".join(f"mux/{runtime.instance_id:x}/{name}" for name in "cd")
    assert told == [("withdraw", addresses), ("settle", ""), *[("unregistered", "")] * 2]


async def test_a_stop_does_not_tell_peers_to_leave_helpers_alone(autojump_clock: MockClock) -> None:
    mux = FakePlane("mux")
    discovery = WatchedDiscovery(told=mux.told)
    async with open_runtime(planes=[mux], discovery=discovery) as runtime:
        async with (
            runtime.endpoint("a.b.c").serving(handler),
            runtime.endpoint("a.b.helper").serving(handler, listed=False),
        ):
            before = len(mux.told)
            await runtime.unregister_all()
            told = mux.told[before:]
        assert mux.told[before:] == told
    address = f"mux/{runtime.instance_id:x}/c"
    assert told == [("withdraw", address), *[("unregistered", "")] * 2]


async def test_what_is_served_anew_is_there_again(autojump_clock: MockClock) -> None:
    mux = FakePlane("mux")
    async with open_runtime(planes=[mux]) as runtime:
        for _ in range(2):
            async with runtime.endpoint("a.b.c").serving(handler):
                pass
    assert [verb for verb, _ in mux.told] == ["withdraw", "restore", "withdraw"]


# --- which planes a runtime has ---------------------------------------------------------------


async def test_a_single_plane_needs_no_list() -> None:
    async with open_runtime(planes=FakePlane("mux")) as runtime:
        assert list(runtime.planes) == ["mux"]


@pytest.mark.parametrize("planes", ["mux", [1], [FakePlane("mux"), None]])
async def test_what_is_no_plane_is_named(planes: Any) -> None:
    with pytest.raises(TypeError, match=r"planes: ('m'|1|None) is no request plane"):
        async with open_runtime(planes=planes):
            pytest.fail("it was opened")


async def test_two_planes_of_one_name() -> None:
    with pytest.raises(ValueError, match="two are called 'mux'"):
        async with open_runtime(planes=[FakePlane("mux"), FakePlane("mux")]):
            pytest.fail("it was opened")


# --- and how its events travel ----------------------------------------------------------------


async def test_events_go_as_far_as_records(tmp_path: Path) -> None:
    async with open_runtime() as runtime:
        assert isinstance(runtime.events, MemoryEvents)
    async with open_file_discovery(FileSettings(tmp_path)) as discovery:
        async with open_runtime(discovery=discovery) as runtime:
            assert runtime.events == ZmqEvents(routable_address())
        own = MemoryEvents()
        async with open_runtime(discovery=discovery, events=own) as runtime:
            assert runtime.events is own
    assert ZmqEvents("127.0.0.1").told == "127.0.0.1"
