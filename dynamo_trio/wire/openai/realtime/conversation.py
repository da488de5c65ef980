"""The conversation of a session: messages of text, in order, and bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs
from attrs import frozen

from dynamo_trio.errors import ConversationsFull, InvalidArgument, PayloadTooLarge
from dynamo_trio.wire.openai.fields import (
    Fields,
    Json,
    Rule,
    array,
    mapping,
    name_text,
    only,
    refuse,
    text,
    unsupported,
)
from dynamo_trio.wire.openai.realtime.room import Room
from dynamo_trio.wire.openai.request import Message

if TYPE_CHECKING:
    from collections.abc import Iterable

Role = Literal["system", "user", "assistant"]
Status = Literal["completed", "incomplete", "in_progress"]

#: Items of a conversation, parts of an item, and characters of all of a conversation's text.
MAX_ITEMS, MAX_PARTS, MAX_TEXT = 1000, 100, 1024 * 1024
MAX_ID = 128
#: Characters of an answer for which there must be room when it is begun.
ANSWER_TEXT = 16 * 1024
#: Bytes of memory for an item without text.
OVERHEAD = 1024
#: ``previous_item_id`` that puts an item before all others.
ROOT = "root"

_PART: dict[Role, str] = {"system": "input_text", "user": "input_text", "assistant": "output_text"}


@frozen
class Item:
    """One message. ``texts``: of its parts."""

    id: str
    role: Role
    texts: tuple[str, ...]
    status: Status = "completed"

    @property
    def size(self) -> int:
        """Characters that it counts for."""
        return sum(map(len, self.texts))

    @property
    def memory(self) -> int:
        """Bytes that it counts for."""
        return OVERHEAD + sum(map(_bytes_of, self.texts))

    def to_json(self) -> dict[str, Json]:
        """As events carry it; a client may send it back in a ``conversation.item.create``."""
        content = [{"type": _PART[self.role], "text": one} for one in self.texts]
        fields = {"id": self.id, "object": "realtime.item", "type": "message"}
        return {**fields, "status": self.status, "role": self.role, "content": content}

    def to_message(self) -> Message:
        """As a chat model is told of it."""
        return Message(self.role, "\n".join(self.texts))


def parse_item(value: Json, name: str, fresh_id: str) -> Item:
    """The item of a client's event. ``fresh_id``: its id, if the client gives it none.

    Raises:
        InvalidArgument: with ``param`` naming the field that breaks a rule.
    """
    fields = Fields(mapping(value, name), f"{name}.")
    kind = fields.required("type", text)
    if kind != "message":
        raise unsupported(fields.name("type"), f" (only 'message' is, not {kind[:60]!r})")
    fields.forbid_unknown(("type", "id", "object", "status", "role", "content"))
    fields.check({"object": only("realtime.item")})
    role = fields.required("role", _role)
    status = fields.optional("status", _status) or "completed"
    parts = fields.required("content", _parts(role))
    return Item(fields.optional("id", item_id) or fresh_id, role, parts, status)


def item_id(value: Json, name: str) -> str:
    """An id that a client gives an item."""
    given = name_text(value, name)
    if len(given) > MAX_ID:
        raise InvalidArgument(f"'{name}' must have at most {MAX_ID} characters.", param=name)
    return given


def _role(value: Json, name: str) -> Role:
    for role in _PART:
        if value == role:
            return role
    raise refuse(name, "one of system, user, assistant", value)


def _status(value: Json, name: str) -> Status:
    if value == "completed":
        return "completed"
    if value in ("incomplete", "in_progress"):  # nothing of it is to come here
        return "incomplete"
    raise refuse(name, "one of completed, incomplete", value)


def _parts(role: Role) -> Rule[tuple[str, ...]]:
    def rule(value: Json, name: str) -> tuple[str, ...]:
        parts = array(value, name)
        if len(parts) > MAX_PARTS:
            raise InvalidArgument(f"'{name}' must have at most {MAX_PARTS} parts.", param=name)
        return tuple(_part(part, f"{name}[{i}]", _PART[role]) for i, part in enumerate(parts))

    return rule


def _part(value: Json, name: str, kind: str) -> str:
    fields = Fields(mapping(value, name), f"{name}.")
    given = fields.required("type", text)
    if given not in (kind, "text"):  # "text": the API's earlier name for both
        raise unsupported(fields.name("type"), f" (only {kind} is, not {given[:60]!r})")
    fields.forbid_unknown(("type", "text"))
    return fields.required("text", text)


@attrs.define(eq=False)
class Conversation:
    """Its items, and room for the answer that is being given.

    What is in a conversation can be told to another frontend, item by item. So an answer is
    not begun unless there is room for it, and does not grow where there is none.
    Invariant: no two items have the same id.
    """

    id: str = "conv_0"
    #: For those of all sessions, in bytes of memory.
    _room: Room = attrs.field(factory=Room)
    _items: dict[str, Item] = attrs.field(factory=dict)
    #: Invariant: the characters of all items.
    _size: int = 0
    #: For the answer that is being given: items that are not there yet, and characters.
    _reserved_items: int = 0
    _reserved_text: int = 0
    #: Invariant: the bytes of all items and of what is kept beside them, which count in ``_room``.
    _bytes: int = 0
    _beside: int = 0

    @property
    def last_id(self) -> str | None:
        """Of the newest item."""
        return next(reversed(self._items), None)

    def items(self) -> list[Item]:
        """All items, the oldest first."""
        return list(self._items.values())

    def get(self, id: str, name: str = "item_id") -> Item:
        """The item with that id.

        Raises:
            InvalidArgument: there is none.
        """
        if id not in self._items:
            why = f"There is no item with the id {id[:MAX_ID]!r} in the conversation."
            raise InvalidArgument(why, param=name)
        return self._items[id]

    def insert(self, item: Item, after: str | None) -> str | None:
        """Put an item behind the one named, at the end (None), or first (:data:`ROOT`).

        Returns:
            The id of the item before it.

        Raises:
            InvalidArgument: its id is taken, or the other item is not there.
            PayloadTooLarge: the conversation has as many items, or as much text, as it may.
        """
        if item.id in self._items:
            why = f"There is an item with the id {item.id!r} already."
            raise InvalidArgument(why, param="item.id")
        if after not in (None, ROOT):
            self.get(after, "previous_item_id")
        self._check_room(1, item.size, item.memory)
        return self._put(item, after)

    def has(self, id: str) -> bool:
        """Is there an item with that id?"""
        return id in self._items

    def reserve(self) -> None:
        """Keep room for an answer, until :meth:`free_reserve`.

        Raises:
            PayloadTooLarge: there is none.
        """
        self._check_room(1, ANSWER_TEXT, ANSWER_TEXT)
        self._reserved_items, self._reserved_text = 1, ANSWER_TEXT

    def reserve_text(self, length: int) -> bool:
        """Keep room for an answer that has become so long. False: there is none."""
        if length > self._reserved_text:
            if self._size + length > MAX_TEXT or self._room.left < length:
                return False
            self._reserved_text = min(2 * length, MAX_TEXT - self._size)
        return True

    def free_reserve(self) -> None:
        """The answer is over."""
        self._reserved_items = self._reserved_text = 0

    def keep_beside(self, text: str) -> None:
        """This is kept beside the items, in place of what was before.

        Raises:
            PayloadTooLarge: the sessions of all clients leave no room for it.
        """
        size = _bytes_of(text)
        self._check_memory(size - self._beside)
        self._count(size - self._beside)
        self._beside = size

    def close(self) -> None:
        """Forget everything."""
        self._items, self._size, self._beside = {}, 0, 0
        self._count(-self._bytes)

    def put(self, item: Item, after: str | None = None) -> str | None:
        """As :meth:`insert`, for an item of the server's own: in the room that it reserved."""
        self._reserved_items = 0
        return self._put(item, after)

    def _put(self, item: Item, after: str | None) -> str | None:
        last = self.last_id
        if after in (None, last):
            self._items[item.id] = item
            previous = last
        else:
            previous = self._put_inside(item, after)
        self._size += item.size
        self._count(item.memory)
        return previous

    def replace(self, item: Item) -> str | None:
        """The item with this id has become this. Nothing happens if it was deleted.

        Returns:
            The id of the item before it.
        """
        if item.id not in self._items:
            return None
        before = self._items[item.id]
        self._size += item.size - before.size
        self._count(item.memory - before.memory)
        self._reserved_text = 0
        self._items[item.id] = item
        ids = list(self._items)
        at = ids.index(item.id)
        return ids[at - 1] if at else None

    def delete(self, id: str) -> None:
        """Take the item out.

        Raises:
            InvalidArgument: there is none with that id.
        """
        item = self.get(id)
        self._size -= item.size
        self._count(-item.memory)
        del self._items[id]

    def _put_inside(self, item: Item, after: str | None) -> str | None:
        behind = self.items()
        at = 0 if after == ROOT else list(self._items).index(str(after)) + 1
        behind.insert(at, item)
        self._items = {one.id: one for one in behind}
        return behind[at - 1].id if at else None

    def _check_room(self, items: int, text: int, memory: int) -> None:
        if len(self._items) + self._reserved_items + items > MAX_ITEMS:
            raise PayloadTooLarge(f"A conversation has at most {MAX_ITEMS} items; delete some.")
        if self._size + self._reserved_text + text > MAX_TEXT:
            why = f"A conversation has at most {MAX_TEXT} characters; delete some items."
            raise PayloadTooLarge(why)
        self._check_memory(memory)

    def _check_memory(self, more: int) -> None:
        if more > self._room.left:
            most = f"at most {self._room.most} bytes at once"
            raise ConversationsFull(f"The conversations of all sessions here have {most}.")

    def _count(self, more: int) -> None:
        self._bytes += more
        self._room.used += more


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)


def messages_of(instructions: str, items: Iterable[Item]) -> tuple[Message, ...]:
    """What a chat model is asked with."""
    system = [Message("system", instructions)] if instructions else []
    return (*system, *(item.to_message() for item in items))
