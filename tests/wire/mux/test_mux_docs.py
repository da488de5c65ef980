"""The specification of the mux protocol and the code say the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec

import dynamo_trio
from dynamo_trio.plane.mux import MuxSettings
from dynamo_trio.wire.dynamo.addresses import TcpTarget
from dynamo_trio.wire.dynamo.codec import MSGPACK
from dynamo_trio.wire.dynamo.records import EndpointFields, EndpointRecord
from dynamo_trio.wire.mux import described, limits
from dynamo_trio.wire.mux.frames import OPTIONAL, FrameType, GoAwayCode, encode
from dynamo_trio.wire.mux.limits import BYTES_PER_CREDIT, MAGIC, VERSIONS
from dynamo_trio.wire.mux.stream_states import MOVES, StreamState
from dynamo_trio.wire.mux.streams import cost
from dynamo_trio.wire.names import EndpointId
from tests.wire.mux.mux_pair import frames_in

DOCS = Path(dynamo_trio.__file__).parents[1] / "docs"
PAGE = (DOCS / "reference" / "mux.md").read_text()
EXTENSION = (DOCS / "_ext" / "from_code.py").read_text()

TABLES = {
    "mux-frames": described.frames,
    "mux-goaway": described.go_away_codes,
    "mux-fixed-limits": described.fixed_limits,
    "mux-agreed-limits": described.agreed_limits,
    "mux-states": described.states,
    "mux-moves": described.moves,
    "mux-diagram": described.diagram,
}
#: Words in capitals that are no frames.
OTHER_WORDS = {"TCP", "TLS", "CR", "LF", "UTF", "KB"}


def prose() -> str:
    """The page without its literal blocks and directives."""
    return re.sub(r"```text.*?```|:::.*?:::", "", PAGE, flags=re.DOTALL)


def test_every_table_is_on_the_page() -> None:
    for name, table in TABLES.items():
        assert f":::{{from-code}} {name}\n" in PAGE
        assert f'"{name}": described.{table.__name__},' in EXTENSION


def test_the_prose_speaks_of_every_frame_and_of_no_other() -> None:
    words = {word.removesuffix("s") for word in re.findall(r"\b[A-Z]{2,}s?\b", prose())}
    assert words - OTHER_WORDS == {kind.name for kind in FrameType}


def test_the_numbers_in_the_prose() -> None:
    assert " ".join(f"{byte:02x}" for byte in MAGIC) in PAGE
    assert f"frames from type {OPTIONAL} on" in PAGE
    assert f"This is version {max(VERSIONS)}." in PAGE
    assert "64 KiB of its payload" in " ".join(PAGE.split())
    assert (BYTES_PER_CREDIT, cost(0), cost(64 * 1024)) == (64 * 1024, 1, 2)
    for code in (GoAwayCode.VERSION, GoAwayCode.PROTOCOL):
        assert f"code\n`{code}`" in PAGE or f"code `{code}`" in PAGE


def test_the_example_is_a_conversation() -> None:
    lines = re.findall(r"^(client|worker)  ([0-9a-f ]+)$", PAGE, re.MULTILINE)
    said = [(who, frames_in(bytes.fromhex(data))) for who, data in lines]
    assert ["".join(data.split()) for _, data in lines] == [
        b"".join(map(encode, frames)).hex() for _, frames in said
    ]
    assert [(who, frames[0].type.name) for who, frames in said] == [
        ("client", "HELLO"),
        ("worker", "HELLO"),
        ("client", "OPEN"),
        ("worker", "OPENED"),
        ("worker", "TOKENS"),
        ("worker", "DONE"),
        ("client", "GOAWAY"),
    ]


def test_the_tables_hold_what_the_code_has() -> None:
    frames, moves = described.frames(), described.moves()
    for kind in FrameType:
        assert f"| {int(kind)} | `{kind.name}` |" in frames
    assert len(moves.splitlines()) == 2 + len(MOVES)
    for state in StreamState:
        assert f"| `{state.name}` | {state.value} |" in described.states()
    for code in GoAwayCode:
        assert f"`{code}`" in described.go_away_codes()


def test_every_limit_is_in_the_table() -> None:
    here = {name for name in vars(limits) if name.startswith(("MAX_", "BYTES_"))}
    assert here - {"MAX_MESSAGE"} == set(described._MEANINGS)


def test_the_diagram_shows_every_move() -> None:
    drawing = described.diagram()
    assert "\n\n" not in drawing
    space = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(drawing)
    assert len(root.findall(f"{space}rect")) == len(StreamState)
    changes = {(m.source, m.target) for m in MOVES if m.source is not m.target}
    assert len(root.findall(f"{space}line")) == len(changes)
    words = "\n".join(text.text or "" for text in root.findall(f"{space}text"))
    for move in MOVES:
        assert re.search(rf"\b{move.sender.value}: .*\b{move.frame.name}\b", words)


def test_the_record_on_the_page_is_one() -> None:
    block = PAGE.partition("```json\n")[2].partition("```")[0]
    record = EndpointRecord.for_tcp(
        *(EndpointId("dynamo", "backend", "generate"), 0x65C89B),
        *(TcpTarget.parse("10.0.0.7:36721/65c89b/generate"), MSGPACK),
    )
    told = json.loads(block)
    assert told.pop("dynamo_trio_mux") == "10.0.0.7:40411/65c89b/generate"
    assert told == json.loads(msgspec.json.encode(record))
    target = msgspec.json.decode(block, type=EndpointFields).mux
    assert target is not None
    assert (str(target.address), target.path) == ("10.0.0.7:40411", "65c89b/generate")


def test_the_times_and_counts_on_the_page_are_the_defaults() -> None:
    page, form = " ".join(PAGE.split()), MuxSettings()
    assert f"its HELLO after {form.handshake_time:g} s" in page
    assert f"not whole {form.frame_time:g} s after" in page
    assert f"what is sent for {form.stall_time:g} s" in page
    assert f"heard nothing for {form.patience:g} s" in page
    assert f"at most {form.max_peers} peers" in page
