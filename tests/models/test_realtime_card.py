"""The card of a model that is spoken to over a WebSocket."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import attrs
import msgspec
import pytest

from dynamo_trio.discovery import EndpointId, ModelCard
from dynamo_trio.errors import CardUnusable
from dynamo_trio.frontend.cards import card_loader
from dynamo_trio.frontend.keeper import Verbatim
from dynamo_trio.models import make_realtime_card
from dynamo_trio.models.card_files import files_of
from dynamo_trio.wire.dynamo.records import ModelRecord, decode_model, encode_record

if TYPE_CHECKING:
    from pathlib import Path


def card_named(name: str) -> ModelCard:
    card = make_realtime_card(name=name, endpoint=EndpointId("ns", "c", "e"), instance_id=7)
    assert isinstance(card, ModelCard)
    return card


def test_it_names_no_file_and_survives_the_store() -> None:
    card = card_named("Voice 1")
    assert (card.slug, card.model_type) == ("voice_1", frozenset({"realtime"}))
    assert card.card_json is not None
    record = ModelRecord(
        namespace="ns", component="c", endpoint="e", instance_id=7, card_json=card.card_json
    )
    assert decode_model(encode_record(record)).card_json == card.card_json


def test_a_name_without_a_latin_letter_has_a_slug_too() -> None:
    card_json = card_named("声").card_json
    assert card_json is not None
    assert card_json.slug.startswith("model-")


async def test_our_frontend_takes_it_without_a_file(tmp_path: Path) -> None:
    card = card_named("voice")
    assert await card_loader(tmp_path)(card) == Verbatim()
    assert os.listdir(tmp_path) == []
    assert card.card_json is not None
    with pytest.raises(CardUnusable, match=r"names no tokenizer\.json"):
        files_of(card.card_json)


async def test_a_card_of_this_process_is_taken_too(tmp_path: Path) -> None:
    card = attrs.evolve(card_named("voice"), card_json=None)
    assert await card_loader(tmp_path)(card) == Verbatim()


async def test_a_model_that_takes_text_too_is_one_that_takes_text(tmp_path: Path) -> None:
    card = card_named("voice")
    assert card.card_json is not None
    both = msgspec.structs.replace(card.card_json, model_type="Chat | Realtime")
    with pytest.raises(CardUnusable, match="wants 'Text' as its input"):
        await card_loader(tmp_path)(attrs.evolve(card, card_json=both))


async def test_other_types_are_refused_with_those_that_are_served(tmp_path: Path) -> None:
    card = card_named("voice")
    assert card.card_json is not None
    images = msgspec.structs.replace(card.card_json, model_type="Images")
    with pytest.raises(CardUnusable, match="of the type 'Images'; chat, completions or realtime"):
        await card_loader(tmp_path)(attrs.evolve(card, card_json=images))
