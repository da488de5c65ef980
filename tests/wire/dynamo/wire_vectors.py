"""What the real peers have said, as data; and the two ways to feed a reader."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_trio.wire.dynamo.receiver import Receiver

VECTORS = Path(__file__).parent / "vectors"

T = TypeVar("T")


@cache
def vector(name: str) -> dict[str, Any]:
    """The one vector whose name begins so."""
    [path] = VECTORS.glob(f"{name}*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def raw(name: str) -> bytes:
    return bytes.fromhex(vector(name)["hex"])


def compact(value: object) -> bytes:
    """JSON as the real peers write it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def drain(reader: Any, data: bytes) -> list[Any]:
    """Feed one piece and take all events."""
    reader.receive_data(data)
    events = []
    while (event := reader.next_event()) is not None:
        events.append(event)
    return events


def feed(reader: Any, pieces: Sequence[bytes]) -> list[Any]:
    return [event for piece in pieces for event in drain(reader, piece)]


def read_all(reader: Receiver[T], data: bytes) -> list[T]:
    return drain(reader, data)


@st.composite
def cut(draw: Callable[[st.SearchStrategy[Any]], Any], stream: bytes) -> list[bytes]:
    """The stream in pieces, none of them empty."""
    places = st.integers(0, len(stream))
    cuts = sorted({0, len(stream), *draw(st.lists(places, max_size=8))})
    return [stream[a:b] for a, b in itertools.pairwise(cuts)]
