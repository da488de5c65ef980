"""The catalogue against workers whose cards are of no use, come and go, or come in crowds."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import msgspec
import pytest
import trio
import trio.lowlevel
import trio.testing

from dynamo_trio.discovery import Instance, MemoryDiscovery, ModelCard
from dynamo_trio.errors import CardUnusable, LoadError, ModelNotFound, NoWorker
from dynamo_trio.frontend import keeper
from dynamo_trio.frontend.cards import card_loader
from dynamo_trio.frontend.catalog import Catalog, open_catalog
from dynamo_trio.models.card_builder import make_card
from dynamo_trio.plane import MemoryPlane
from dynamo_trio.testing import make_model_folder
from dynamo_trio.tokenizers import ByteTokenizer, Preprocessor
from dynamo_trio.wire.dynamo.card import RuntimeConfig
from dynamo_trio.wire.names import EndpointId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

GENERATE = EndpointId("dynamo", "backend", "generate")
OTHER = EndpointId("dynamo", "canary", "generate")


@attrs.define(eq=False)
class Loads:
    """A loader whose outcome the test decides."""

    #: Instances whose cards are of no use.
    bad: dict[int, Exception] = attrs.field(factory=dict)
    seconds: float = 0.0
    #: (instance, time) of each load that began, was cancelled.
    begun: list[tuple[int, float]] = attrs.field(factory=list)
    cancelled: list[int] = attrs.field(factory=list)

    def last(self) -> list[float]:
        """The load that began last: instance and time."""
        return list(self.begun[-1])

    async def __call__(self, card: ModelCard) -> Preprocessor:
        self.begun.append((card.instance_id, trio.current_time()))
        try:
            await trio.sleep(self.seconds)
        except trio.Cancelled:
            self.cancelled.append(card.instance_id)
            raise
        if card.instance_id in self.bad:
            raise self.bad[card.instance_id]
        return Preprocessor(ByteTokenizer(), context_length=512, model=card.name)


@attrs.define(eq=False)
class Fleet:
    discovery: MemoryDiscovery
    catalog: Catalog
    loads: Loads

    async def worker(self, number: int, name: str = "m", endpoint: EndpointId = GENERATE) -> None:
        """A worker comes: its card, then its instance."""
        await self.discovery.register(ModelCard(name, endpoint, number))
        await self.discovery.register(Instance(endpoint, number, {"mem": "x"}))

    async def leaves(self, number: int, name: str = "m", endpoint: EndpointId = GENERATE) -> None:
        await self.discovery.unregister(Instance(endpoint, number, {"mem": "x"}))
        await self.discovery.unregister(ModelCard(name, endpoint, number))

    def names(self) -> list[str]:
        return [model.name for model in self.catalog.models()]


@asynccontextmanager
async def open_fleet(loads: Loads | None = None) -> AsyncIterator[Fleet]:
    loads = loads or Loads()
    discovery = MemoryDiscovery()
    async with open_catalog(discovery, {"mem": MemoryPlane()}, loads) as catalog:
        yield Fleet(discovery, catalog, loads)


async def test_a_bad_card_does_not_stop_the_good_ones(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_fleet(Loads(bad={1: CardUnusable("checksum")})) as fleet:
        await fleet.worker(1, "bad")
        await fleet.worker(2, "good")
        await trio.sleep(0.5)
        assert fleet.names() == ["good"]
        with pytest.raises(ModelNotFound):
            fleet.catalog.find("bad")
    assert "model bad cannot be offered from the card of dynamo/backend/generate/1" in caplog.text
    assert "checksum; next attempt in 1 s" in caplog.text
    assert all(record.exc_info is None for record in caplog.records)


async def test_a_model_that_is_being_loaded_is_not_unknown(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """What is there when a frontend starts is expected from the first moment."""
    discovery, loads = MemoryDiscovery(), Loads(seconds=3.0)
    await discovery.register(ModelCard("m", GENERATE, 1))
    await discovery.register(Instance(GENERATE, 1, {"mem": "x"}))
    async with open_catalog(discovery, {"mem": MemoryPlane()}, loads) as catalog:
        for _ in range(3):
            with pytest.raises(NoWorker, match="is being loaded"):
                catalog.find("m")
            with pytest.raises(ModelNotFound):
                catalog.find("another")
            await trio.sleep(0.9)
        await trio.sleep(1)
        assert catalog.find("m").name == "m"


async def test_a_model_is_not_expected_any_more_when_its_card_is_gone_or_bad(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_fleet(Loads(seconds=3.0, bad={2: CardUnusable("no")})) as fleet:
        await fleet.worker(1, "gone")
        await fleet.worker(2, "bad")
        await trio.sleep(1)
        for name in ("gone", "bad"):
            with pytest.raises(NoWorker):
                fleet.catalog.find(name)
        await fleet.leaves(1, "gone")
        await trio.sleep(0.1)
        with pytest.raises(ModelNotFound):
            fleet.catalog.find("gone")
        await trio.sleep(3)
        with pytest.raises(ModelNotFound):
            fleet.catalog.find("bad")


async def test_a_bad_card_is_tried_again_with_a_growing_delay(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_fleet(Loads(bad={1: CardUnusable("no")})) as fleet:
        await fleet.worker(1)
        await trio.sleep(300)
        times = [when for _, when in fleet.loads.begun]
        assert times == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]
        fleet.loads.bad.clear()
        await trio.sleep(60)
        assert fleet.names() == ["m"]


async def test_a_bad_card_that_is_gone_is_not_tried_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_fleet(Loads(bad={1: CardUnusable("no")})) as fleet:
        await fleet.worker(1)
        await trio.sleep(2)
        await fleet.leaves(1)
        await trio.sleep(1000)
        assert len(fleet.loads.begun) == 2


async def test_a_new_card_is_tried_before_one_that_failed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_fleet(Loads(bad={1: CardUnusable("no")})) as fleet:
        await fleet.worker(1)
        await trio.sleep(40)
        await fleet.worker(2)
        await trio.sleep(0.5)
        assert fleet.loads.last() == [2, 40]
        assert fleet.names() == ["m"]
        await fleet.leaves(2)
        await trio.sleep(0.5)  # the bad card's worker serves the same model
        assert fleet.catalog.find("m").client.instance_ids() == [1]


async def test_a_card_that_is_mended_is_tried_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_fleet(Loads(bad={1: CardUnusable("no")})) as fleet:
        await fleet.worker(1)
        await trio.sleep(40)
        fleet.loads.bad.clear()
        await fleet.discovery.register(ModelCard("m", GENERATE, 1, context_length=100))
        await trio.sleep(0.1)
        assert fleet.loads.last() == [1, 40]
        assert fleet.names() == ["m"]


async def test_an_exception_nobody_foresaw_is_logged_with_its_traceback(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_fleet(Loads(bad={1: ZeroDivisionError("oops")})) as fleet:
        await fleet.worker(1, "bad")
        await fleet.worker(2, "good")
        await trio.sleep(5)
        assert fleet.names() == ["good"]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert errors
    assert all(record.exc_info is not None for record in errors)


async def test_a_crowd_of_workers_costs_one_load(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fleet(Loads(seconds=5.0)) as fleet:
        for number in range(1, 201):
            await fleet.worker(number)
        model = await fleet.catalog.wait_for("m")
        assert len(model.client.instance_ids()) == 200
        await trio.sleep(100)
        assert len(fleet.loads.begun) == 1


async def test_a_card_that_goes_while_it_is_loaded(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fleet(Loads(seconds=5.0)) as fleet:
        await fleet.worker(1)
        await trio.sleep(1)
        await fleet.worker(2)
        await fleet.leaves(1)
        await trio.sleep(4.5)
        assert fleet.loads.cancelled == [1]
        assert fleet.names() == []
        await trio.sleep(1)
        assert fleet.names() == ["m"]
        await fleet.leaves(2)
        await trio.sleep(0.1)
        with pytest.raises(NoWorker):
            fleet.catalog.find("m")


async def test_a_model_that_comes_back_is_offered_anew(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_fleet() as fleet:
        for round_ in range(3):
            await fleet.worker(round_ + 1)
            model = await fleet.catalog.wait_for("m")
            assert model.client.instance_ids() == [round_ + 1]
            await fleet.leaves(round_ + 1)
            await trio.sleep(0.1)
            assert fleet.names() == []
        assert len(fleet.loads.begun) == 3


async def test_a_card_that_is_put_back_at_once_was_never_gone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_fleet() as fleet:
        await fleet.worker(1)
        model = await fleet.catalog.wait_for("m")
        for _ in range(3):
            await fleet.discovery.unregister(ModelCard("m", GENERATE, 1))
            await trio.sleep(keeper.CARD_GAP / 2)
            assert fleet.catalog.find("m") is model
            await fleet.discovery.register(ModelCard("m", GENERATE, 1))
            await trio.sleep(keeper.CARD_GAP * 2)
            assert fleet.catalog.find("m") is model
        await fleet.discovery.unregister(ModelCard("m", GENERATE, 1))
        await trio.sleep(keeper.CARD_GAP + 0.1)
        assert fleet.names() == []
        assert len(fleet.loads.begun) == 1


async def test_another_card_that_comes_in_the_gap_is_read(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_fleet() as fleet:
        for number, name in enumerate(("one", "two"), start=1):
            folder = make_model_folder(tmp_path / name, name=name)
            card = make_card(folder, name="m", endpoint=GENERATE, instance_id=1)
            await fleet.discovery.register(card)
            await fleet.discovery.register(Instance(GENERATE, 1, {"mem": "x"}))
            await fleet.catalog.wait_for("m")
            await trio.sleep(0.1)
            assert len(fleet.loads.begun) == number
            await fleet.discovery.unregister(card)
            await trio.sleep(keeper.CARD_GAP / 2)


async def test_a_withdrawn_models_client_goes_on_watching_for_its_streams(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_fleet() as fleet:
        await fleet.worker(1)
        client = (await fleet.catalog.wait_for("m")).client
        await fleet.discovery.unregister(ModelCard("m", GENERATE, 1))  # card before instance
        await trio.sleep(keeper.LINGER - 1)
        await fleet.discovery.unregister(Instance(GENERATE, 1, {"mem": "x"}))
        await trio.sleep(0.1)
        assert client.instance_ids() == []


async def test_another_endpoint_takes_over_when_the_first_is_gone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_fleet() as fleet:
        await fleet.worker(1)
        await fleet.catalog.wait_for("m")
        await fleet.worker(2, endpoint=OTHER)
        await trio.sleep(0.1)
        assert fleet.catalog.find("m").client.endpoint == GENERATE
        await fleet.leaves(1)
        await trio.sleep(0.1)
        assert fleet.catalog.find("m").client.instance_ids() == [2]


async def test_a_card_that_changes_its_name_moves(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fleet() as fleet:
        await fleet.worker(1, "old")
        await fleet.catalog.wait_for("old")
        await fleet.worker(1, "new")
        await fleet.catalog.wait_for("new")
        await trio.sleep(0.1)
        assert fleet.names() == ["new"]
        await fleet.leaves(1, "new")
        await trio.sleep(0.1)
        assert fleet.names() == []


async def test_two_models_under_one_name_are_told_of(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def card(number: int, folder: str) -> ModelCard:
        made = make_model_folder(tmp_path / folder, name=folder)
        return make_card(made, name="m", endpoint=GENERATE, instance_id=number)

    async with open_fleet() as fleet:
        for number, folder in enumerate(("one", "one", "two"), start=1):
            await fleet.discovery.register(card(number, folder))
            await trio.sleep(1)
            assert ("has other files" in caplog.text) == (folder == "two")


# --- the loader --------------------------------------------------------------------------------


async def test_the_loader_makes_a_preprocessor_of_a_published_card(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", context_length=4096)
    card = make_card(folder, name="tiny", endpoint=GENERATE, instance_id=7)
    preprocessor = await card_loader(tmp_path / "cache")(card)
    assert isinstance(preprocessor, Preprocessor)
    assert (preprocessor.context_length, preprocessor.model) == (4096, "tiny")
    assert preprocessor.tokenizer.decode([4, 5]) != ""


@pytest.mark.parametrize(
    ("card", "runtime", "architectural", "expected"),
    [(100, 200, 300, 100), (0, 200, 300, 200), (0, 0, 300, 300), (0, None, None, 4096)],
)
async def test_the_context_length_is_what_is_told_first(
    tmp_path: Path, card: int, runtime: int | None, architectural: int | None, expected: int
) -> None:
    made = make_card(
        make_model_folder(tmp_path / "m", context_length=4096),
        name="m",
        endpoint=GENERATE,
        instance_id=7,
    )
    assert made.card_json is not None
    told = msgspec.structs.replace(
        made.card_json,
        context_length=card,
        runtime_config=RuntimeConfig(context_length=runtime),
        architectural_max_context_length=architectural,
    )
    published = attrs.evolve(made, context_length=0, card_json=told)
    preprocessor = await card_loader(tmp_path / "cache")(published)
    assert preprocessor.context_length == expected


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("model_type", "Embedding", "of the type 'Embedding'"),
        ("model_type", "", "of the type ''"),
        ("model_input", "Text", "wants 'Text'"),
    ],
)
async def test_what_is_not_ours_to_serve_is_not_fetched(
    tmp_path: Path, field: str, value: str, reason: str
) -> None:
    folder = make_model_folder(tmp_path / "m")
    card = make_card(folder, name="m", endpoint=GENERATE, instance_id=7)
    assert card.card_json is not None
    odd = attrs.evolve(card, card_json=msgspec.structs.replace(card.card_json, **{field: value}))
    with pytest.raises(CardUnusable, match=reason):
        await card_loader(tmp_path / "cache")(odd)
    assert not (tmp_path / "cache").exists()


async def test_a_tokenizer_that_panics_is_an_error_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        """As of the extension modules written in Rust."""

    def panic(_path: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr("dynamo_trio.frontend.cards.load_tokenizer", panic)
    card = ModelCard("m", GENERATE, 1, context_length=10)
    with pytest.raises(LoadError, match=r"cannot be built.*index out of bounds"):
        await card_loader(tmp_path)(card)


async def test_a_card_without_files_is_the_built_in_tokenizers(tmp_path: Path) -> None:
    preprocessor = await card_loader(tmp_path)(ModelCard("m", GENERATE, 1, context_length=10))
    assert isinstance(preprocessor, Preprocessor)
    assert isinstance(preprocessor.tokenizer, ByteTokenizer)
    with pytest.raises(LoadError, match="neither the card nor"):
        await card_loader(tmp_path)(ModelCard("m", GENERATE, 1))


async def test_the_log_tells_how_many_workers_a_model_has(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dynamo_trio.frontend")
    async with open_fleet() as fleet:
        await fleet.worker(1)
        await trio.sleep(5)
        for number in range(2, 201):  # a crowd makes one line, or two
            await fleet.worker(number)
        await trio.sleep(5)
        for number in range(1, 201):
            await fleet.discovery.unregister(Instance(GENERATE, number, {"mem": "x"}))
        await trio.sleep(5)
        for number in range(1, 201):
            await fleet.discovery.unregister(ModelCard("m", GENERATE, number))
        await trio.sleep(5)
    assert (
        caplog.messages[0] == "model m is offered; it has 1 worker at dyn://dynamo.backend.generate"
    )
    assert "model m has 200 workers at dyn://dynamo.backend.generate, after " in caplog.text
    lost, gone = caplog.records[-2:]
    assert lost.getMessage().startswith("model m has no worker at dyn://dynamo.backend.generate")
    assert lost.getMessage().endswith("; its requests are refused")
    assert gone.getMessage() == (
        "model m is gone: no card of a worker at dyn://dynamo.backend.generate is left"
    )
    assert len(caplog.messages) <= 7


async def test_the_clients_of_models_leave_out_as_they_are_told(
    autojump_clock: trio.testing.MockClock,
) -> None:
    discovery = MemoryDiscovery()
    planes = {"mem": MemoryPlane()}
    async with open_catalog(discovery, planes, Loads(), inhibited=0.0) as catalog:
        await discovery.register(ModelCard("m", GENERATE, 1))
        await discovery.register(Instance(GENERATE, 1, {"mem": "x"}))
        assert (await catalog.wait_for("m")).client.inhibitions.duration == 0
