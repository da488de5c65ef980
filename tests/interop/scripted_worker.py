"""A worker that does once what none of ours does, to see what a frontend makes of it.

It is made of the wire's own parts on plain sockets and threads, registers in a file store, and
plays a :class:`Fault` to the first request that reaches it or one of its twins. Every further
request is answered well: with the letters of the alphabet, each a function of the token before
it, so an answer put together from two workers reads like one.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import socket
import struct
import threading
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import blake3
import msgspec

from dynamo_trio.wire.dynamo import control, keys, records
from dynamo_trio.wire.dynamo.ack import ACCEPTED, Ack
from dynamo_trio.wire.dynamo.addresses import TcpTarget
from dynamo_trio.wire.dynamo.annotated import annotate
from dynamo_trio.wire.dynamo.call_home import WorkerEnd
from dynamo_trio.wire.dynamo.call_home_states import (
    Accepted,
    CompleteFinal,
    Handshake,
    Item,
    Sentinel,
)
from dynamo_trio.wire.dynamo.card import CardJson
from dynamo_trio.wire.dynamo.codec import Codec, codec_named
from dynamo_trio.wire.dynamo.request_frame import RequestFrame
from dynamo_trio.wire.dynamo.request_plane import RequestServer
from dynamo_trio.wire.names import EndpointId
from tests.standalone.harness import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.interop.model import Model
    from tests.interop.stores import FileStore

LETTERS = "abcdefghijklmnopqrstuvwxyz"

# --- what it publishes ---------------------------------------------------------------------------


def _file(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    checksum = f"blake3:{blake3.blake3(content).hexdigest()}"
    return {"path": str(path), "checksum": checksum, "size": len(content)}


def card_of(model: Model) -> CardJson:
    """A card with files by local path."""
    file = {name.name: _file(name) for name in model.folder.iterdir()}
    template = {"is_custom": False, "file": file["chat_template.jinja"]}
    card = {
        "display_name": model.name,
        "slug": model.name,
        "kv_cache_block_size": 16,
        "migration_limit": 0,
        "model_type": "Chat | Completions",
        "model_input": "Tokens",
        "model_info": {"hf_config_json": file["config.json"]},
        "tokenizer": {"hf_tokenizer_json": file["tokenizer.json"]},
        "prompt_formatter": {"hf_tokenizer_config_json": file["tokenizer_config.json"]},
        "chat_template_file": {"hf_chat_template": template},
    }
    return msgspec.convert(card, CardJson)


class Registration:
    """Files in a file store, kept fresh until they are taken away."""

    def __init__(self, store: FileStore) -> None:
        self._root = store.folder
        self._files: dict[str, Path] = {}
        self._gone = threading.Event()
        self._keeper = threading.Thread(target=self._touch, daemon=True)
        self._keeper.start()

    def put(self, bucket: str, record: records.EndpointRecord | records.ModelRecord) -> None:
        folder = self._root / bucket
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / keys.file_name(str(record.key))
        new = folder / f".tmp_{secrets.token_hex(8)}"
        new.write_bytes(records.encode_record(record))
        new.rename(path)
        self._files[bucket] = path

    def remove(self, bucket: str) -> None:
        self._files.pop(bucket).unlink(missing_ok=True)

    def close(self) -> None:
        self._gone.set()
        self._keeper.join()
        for bucket in list(self._files):
            self.remove(bucket)

    def _touch(self) -> None:
        while not self._gone.wait(2):
            for path in list(self._files.values()):
                with suppress(FileNotFoundError):
                    os.utime(path)


# --- one answer ----------------------------------------------------------------------------------


@attrs.define(eq=False)
class Answer:
    """The way back of one request: the words of a worker, one by one, in any order."""

    reply_to: control.ReplyTo
    codec: Codec
    request: dict[str, Any]
    vocabulary: dict[str, int]
    socket: socket.socket
    end: WorkerEnd

    def say(self, *events: Any) -> None:
        self.socket.sendall(b"".join(map(self.end.send, events)))

    def greet(self) -> None:
        self.say(Handshake(self.reply_to.subject))

    def begin(self) -> None:
        self.greet()
        self.say(Accepted())

    def item(self, value: object) -> None:
        """One value in the envelope of items."""
        self.say(Item(annotate(self.codec, self.codec.encode(value))))

    def bare(self, value: object) -> None:
        """One value without it."""
        self.say(Item(self.codec.encode(value)))

    def letters(self, count: int | None = None) -> None:
        """The next tokens, ``count`` or as many as were asked for."""
        last = {self.vocabulary[letter]: n for n, letter in enumerate(LETTERS)}
        first = last.get(self.request["token_ids"][-1], -1) + 1
        most = self.request["stop_conditions"]["max_tokens"]
        for letter in itertools.islice(LETTERS, first, first + (most if count is None else count)):
            self.item({"token_ids": [self.vocabulary[letter]]})

    def finish(self, reason: object = "length") -> None:
        self.item({"token_ids": [], "finish_reason": reason})

    def well(self) -> None:
        """All of it, as it should be."""
        self.begin()
        self.letters()
        self.finish()
        self.say(CompleteFinal(), Sentinel())
        self.wait_gone()

    def reset(self) -> None:
        """RST in place of FIN."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def wait_gone(self) -> bytes:
        """What the frontend still says, until it closes or resets."""
        said = b""
        with suppress(ConnectionError):
            while data := self.socket.recv(4096):
                said += data
        return said


CLOSE, SILENCE = "close the connection", "say nothing"


@attrs.frozen
class Fault:
    """What befalls one request."""

    #: The text of the acknowledgement, or CLOSE or SILENCE in its place.
    ack: str = ""
    #: What comes instead of a good answer; None: nothing, the worker never calls home.
    answer: Callable[[Answer], object] | None = None


class Faults:
    """Who suffers it: the next request, wherever it arrives. Tells what arrived since."""

    def __init__(self) -> None:
        self._fault: Fault | None = None
        self._lock = threading.Lock()
        #: All requests since the fault was set, in the order of arrival.
        self.requests: list[dict[str, Any]] = []
        #: Who played it.
        self.victim: ScriptedWorker | None = None

    def set(self, fault: Fault) -> None:
        with self._lock:
            self._fault, self.requests = fault, []

    def take(self, worker: ScriptedWorker, request: dict[str, Any]) -> Fault:
        with self._lock:
            worker.taken += 1
            self.requests.append(request)
            fault, self._fault = self._fault, None
            if fault is None:
                return Fault(answer=Answer.well)
            self.victim = worker
            return fault


# --- the worker ----------------------------------------------------------------------------------


@attrs.define(eq=False)
class ScriptedWorker:
    """One instance."""

    registration: Registration
    listener: socket.socket
    faults: Faults
    vocabulary: dict[str, int]
    #: How many requests it has ever got.
    taken: int = 0
    _sockets: list[socket.socket] = attrs.field(factory=list)

    def serve(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                connection, _ = self.listener.accept()
                self._start(self._connection, connection)

    def _start(self, work: Callable[[socket.socket], None], connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        self._sockets.append(connection)
        threading.Thread(target=self._contained, args=(work, connection), daemon=True).start()

    def _contained(self, work: Callable[[socket.socket], None], connection: socket.socket) -> None:
        with connection, suppress(OSError):
            work(connection)

    def _connection(self, connection: socket.socket) -> None:
        server = RequestServer()
        while data := connection.recv(65536):
            server.receive_data(data)
            while isinstance(frame := server.next_event(), RequestFrame):
                if not self._request(connection, server, frame):
                    return

    def _request(
        self, connection: socket.socket, server: RequestServer, frame: RequestFrame
    ) -> bool:
        message, body = control.decode_payload(frame.payload)
        codec = message.body_codec()
        request = codec.decoder(dict, "request")(body)
        fault = self.faults.take(self, request)
        if fault.ack == CLOSE:
            return False
        if fault.ack == SILENCE:
            return True
        connection.sendall(server.send(Ack(fault.ack) if fault.ack else ACCEPTED))
        if fault.answer is not None:
            reply_to = message.reply_to()
            home = socket.create_connection((reply_to.address.host, reply_to.address.port))
            answer = partial(self._answer, fault.answer, reply_to, codec, request)
            self._start(answer, home)
        return True

    def _answer(
        self,
        script: Callable[[Answer], object],
        reply_to: control.ReplyTo,
        codec: Codec,
        request: dict[str, Any],
        home: socket.socket,
    ) -> None:
        script(Answer(reply_to, codec, request, self.vocabulary, home, WorkerEnd(codec)))

    def close(self) -> None:
        self.registration.close()
        self.die()

    def die(self) -> None:
        """Nobody listens here any more, whatever is registered."""
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # or its thread would accept once more
        self.listener.close()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def scripted_worker(
    store: FileStore, model: Model, faults: Faults, codec: str
) -> Iterator[ScriptedWorker]:
    """An instance of the model."""
    listener = socket.create_server(("127.0.0.1", 0))
    instance_id = secrets.randbits(64)
    endpoint = EndpointId.parse(model.endpoint)
    target = TcpTarget.parse(
        f"127.0.0.1:{listener.getsockname()[1]}/{keys.endpoint_path(instance_id, 'generate')}"
    )
    record = records.EndpointRecord.for_tcp(endpoint, instance_id, target, codec_named(codec))
    card = records.ModelRecord(
        namespace=endpoint.namespace,
        component=endpoint.component,
        endpoint=endpoint.name,
        instance_id=instance_id,
        card_json=card_of(model),
    )
    vocabulary = json.loads((model.folder / "tokenizer.json").read_text())["model"]["vocab"]
    worker = ScriptedWorker(Registration(store), listener, faults, vocabulary)
    threading.Thread(target=worker.serve, daemon=True).start()
    try:
        worker.registration.put(keys.INSTANCES, record)
        worker.registration.put(keys.MODELS, card)
        yield worker
    finally:
        worker.close()
