"""The conversation of a realtime session: order, ids and bounds."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.errors import InvalidArgument, PayloadTooLarge
from dynamo_trio.wire.openai.realtime.conversation import (
    MAX_ITEMS,
    MAX_TEXT,
    ROOT,
    Conversation,
    Item,
    messages_of,
    parse_item,
)
from dynamo_trio.wire.openai.realtime.events import ServerEvents
from dynamo_trio.wire.openai.realtime.room import Room
from dynamo_trio.wire.openai.request import Message


def item(id: str, text: str = "x") -> Item:
    return Item(id, "user", (text,))


def ids(conversation: Conversation) -> list[str]:
    return [one.id for one in conversation.items()]


def test_items_go_where_they_are_put() -> None:
    conversation = Conversation()
    assert conversation.insert(item("b"), None) is None
    assert conversation.insert(item("d"), None) == "b"
    assert conversation.insert(item("c"), "b") == "b"
    assert conversation.insert(item("a"), ROOT) is None
    assert conversation.insert(item("e"), "d") == "d"
    assert ids(conversation) == ["a", "b", "c", "d", "e"]
    conversation.delete("c")
    assert conversation.replace(item("d", "long")) == "b"
    assert conversation.replace(item("c", "deleted")) is None
    assert ids(conversation) == ["a", "b", "d", "e"]


def test_an_id_is_there_once() -> None:
    conversation = Conversation()
    conversation.insert(item("a"), None)
    with pytest.raises(InvalidArgument, match="already"):
        conversation.insert(item("a"), None)
    with pytest.raises(InvalidArgument, match="no item") as caught:
        conversation.insert(item("b"), "c")
    assert caught.value.param == "previous_item_id"
    assert ids(conversation) == ["a"]


def test_its_bounds() -> None:
    conversation = Conversation()
    conversation.insert(item("a", "x" * (MAX_TEXT - 1)), None)
    with pytest.raises(PayloadTooLarge):
        conversation.insert(item("b", "xx"), None)
    conversation.insert(item("b", "x"), None)
    conversation.delete("a")
    for number in range(MAX_ITEMS - 1):
        conversation.insert(item(str(number)), None)
    with pytest.raises(PayloadTooLarge, match=str(MAX_ITEMS)):
        conversation.insert(item("c"), None)
    with pytest.raises(PayloadTooLarge):
        conversation.reserve()
    conversation.delete("0")
    conversation.reserve()
    with pytest.raises(PayloadTooLarge):
        conversation.insert(item("c"), None)
    conversation.put(item("answer"))  # what the server has said always has a place
    assert (conversation.last_id, len(conversation.items())) == ("answer", MAX_ITEMS)


@given(st.lists(st.tuples(st.sampled_from("idp"), st.integers(0, 8), st.integers(0, 8))))
def test_its_size_is_that_of_its_items(deeds: list[tuple[str, int, int]]) -> None:
    room = Room()
    conversation = Conversation("conv", room)
    for deed, number, other in deeds:
        try:
            match deed:
                case "i":
                    after = ROOT if other == 0 else str(other) if other < 6 else None
                    conversation.insert(item(str(number), "x" * other), after)
                case "d":
                    conversation.delete(str(number))
                case _:
                    conversation.replace(item(str(number), "x" * other))
        except InvalidArgument:
            pass
        assert conversation._size == sum(one.size for one in conversation.items())
        assert room.used == sum(one.memory for one in conversation.items())
    conversation.close()
    assert room.used == 0


def test_an_item_comes_back_as_it_was_told() -> None:
    for kept in (
        Item("item_1", "user", ("a", "b"), "completed"),
        Item("item_1", "system", ("a", "b"), "completed"),
        Item("item_1", "assistant", ("a", "b"), "incomplete"),
    ):
        assert parse_item(kept.to_json(), "item", "fresh") == kept


def test_what_the_model_is_asked() -> None:
    items = [item("a", "hi"), Item("b", "assistant", ("one", "two"))]
    assert messages_of("Be kind.", items) == (
        Message("system", "Be kind."),
        Message("user", "hi"),
        Message("assistant", "one\ntwo"),
    )
    assert messages_of("", []) == ()


@given(st.text())
def test_a_delta_says_what_it_was_given(text: str) -> None:
    write = ServerEvents("ab").text_delta(item_id="i", response_id="r")
    frame = write(text.encode("utf-8", "replace").decode())
    event = json.loads(frame)
    assert event["delta"] == text.encode("utf-8", "replace").decode()
    assert (event["type"], event["item_id"]) == ("response.output_text.delta", "i")
    assert write("x") != frame
