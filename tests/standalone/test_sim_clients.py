"""A stop with every kind of client connected, and the health routes all through it."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import attrs
import h2.config
import h2.connection
import h2.events
import h11

from tests.standalone.harness import (
    PATIENCE,
    Answer,
    Http1,
    Server,
    ask,
    chat,
    in_parallel,
    open_streams,
    wait_stalled,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.standalone.conftest import Start
    from tests.standalone.harness import Json

PATIENT = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "120"}
ENDLESS = chat(1900)
SLOW = ("--itl-ms", "50")
HALF_A_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ncontent-le"
WHOLE_BODY = json.dumps(chat(4)).encode()
HALF_A_BODY = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n%b"
    % (len(WHOLE_BODY), WHOLE_BODY[:20])
)
UPGRADE = (
    b"GET /v1/realtime HTTP/1.1\r\nhost: test\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@contextmanager
def connected(port: int, sent: bytes = b"", *, receive_buffer: int = 0) -> Iterator[socket.socket]:
    """A connection that has sent these bytes and reads nothing."""
    with socket.socket() as client:
        client.settimeout(PATIENCE)
        if receive_buffer:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.connect(("127.0.0.1", port))
        client.sendall(sent)
        yield client


def read_to_end(client: socket.socket) -> bytes:
    """Everything up to the end of the connection, by a reset too."""
    data = b""
    try:
        while piece := client.recv(65536):
            data += piece
    except ConnectionError:
        pass
    return data


# --- connections that no request runs on hold nobody up ------------------------------------------


def test_connections_without_a_request_do_not_hold_a_stop(start_sim: Start) -> None:
    server = start_sim(**PATIENT)
    port = server.port
    with ExitStack() as stack:
        clients = [
            stack.enter_context(connected(port, sent))
            for sent in (b"", HALF_A_HEAD, HALF_A_BODY, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        ]
        idle = stack.enter_context(Http1(port))
        assert idle.ask("GET", "/live").status == 200
        assert server.stop() == 0
        for client in [*clients, idle.socket]:
            assert b"200" not in read_to_end(client)
    assert server.report["seconds"] < 12
    assert server.report["leftovers"] == []


def test_a_body_that_is_completed_during_the_drain_is_refused(start_sim: Start) -> None:
    server = start_sim("--itl-ms", "20", **PATIENT)
    with open_streams(server.port, 1, chat(50)) as streams, Http1(server.port) as late:
        late.socket.sendall(HALF_A_BODY)
        # Another connection's request has come through: by now the half one has, too.
        assert ask(server.port, "GET", "/live").status == 200
        server.kill(signal.SIGTERM)
        server.wait_log("phase draining")
        late.socket.sendall(WHOLE_BODY[20:])
        answer = read_to_end(late.socket)
        assert streams[0].finish().is_done
    assert server.end() == 0
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"x-dynamo-reason: draining" in answer
    assert b"connection: close" in answer
    assert server.report["requests"]["finished"] == 1


# --- a client that never reads -------------------------------------------------------------------


def test_a_client_that_never_reads_cannot_hold_a_stop(start_sim: Start) -> None:
    flags = ("--itl-ms", "0", "--context-tokens", "1000000", "--kv-blocks", "1000000")
    server = start_sim(*flags, DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="0.5")
    body = json.dumps(chat(900_000)).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n"
    with connected(server.port, head % len(body) + body, receive_buffer=4096) as deaf:
        wait_stalled(server.port)  # everything between the two is full
        assert server.stop() == 0
        data = read_to_end(deaf)
    assert b"[DONE]" not in data
    ended = server.report["requests"]
    assert ended["finished"] == ended["failed"] == 0
    assert ended["cut"] + ended["cancelled"] + ended["lost"] == 1
    assert server.report["seconds"] < 12
    assert server.report["leftovers"] == []


# --- HTTP/2 --------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Http2:
    """A client with prior knowledge."""

    socket: socket.socket
    h2: h2.connection.H2Connection = attrs.field(
        factory=lambda: h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        )
    )
    headers: dict[int, dict[str, str]] = attrs.field(factory=dict)
    bodies: dict[int, bytes] = attrs.field(factory=dict)
    ended: set[int] = attrs.field(factory=set)

    def __attrs_post_init__(self) -> None:
        self.h2.initiate_connection()
        self._flush()

    def _flush(self) -> None:
        self.socket.sendall(self.h2.data_to_send())

    def send(self, method: str, path: str, body: Json | None = None) -> int:
        stream = self.h2.get_next_available_stream_id()
        data = b"" if body is None else json.dumps(body).encode()
        fields = {":method": method, ":path": path, ":scheme": "http", ":authority": "test"}
        self.h2.send_headers(stream, list(fields.items()), end_stream=not data)
        if data:
            self.h2.send_data(stream, data, end_stream=True)
        self._flush()
        return stream

    def read_until(self, stream: int, *, ended: bool) -> Answer:
        """Read until a stream has some body, or its end."""
        while stream not in self.ended if ended else not self.bodies.get(stream):
            data = self.socket.recv(65536)
            assert data, "the connection broke off"
            for event in self.h2.receive_data(data):
                self._take(event)
            self._flush()
        headers = self.headers[stream]
        return Answer(int(headers[":status"]), headers, self.bodies.get(stream, b""))

    def _take(self, event: object) -> None:
        match event:
            case h2.events.ResponseReceived():
                self.headers[event.stream_id] = {str(k): str(v) for k, v in event.headers}
            case h2.events.DataReceived():
                self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamEnded():
                self.ended.add(event.stream_id)
            case h2.events.StreamReset():
                raise AssertionError(f"stream {event.stream_id} was reset")


def test_http2_streams_complete_and_new_ones_are_refused(start_sim: Start) -> None:
    server = start_sim("--itl-ms", "20", **PATIENT)
    with connected(server.port) as raw:
        client = Http2(raw)
        streams = [client.send("POST", "/v1/chat/completions", chat(50)) for _ in range(4)]
        for stream in streams:
            client.read_until(stream, ended=False)
        server.kill(signal.SIGTERM)
        server.wait_log("phase draining")
        refused = client.read_until(client.send("GET", "/v1/models"), ended=True)
        answers = [client.read_until(stream, ended=True) for stream in streams]
    assert (refused.status, refused.headers["x-dynamo-reason"]) == (503, "draining")
    assert all(answer.is_done for answer in answers)
    assert server.end() == 0
    assert server.report["requests"]["finished"] == 4


def test_http2_streams_say_farewell_at_the_limit(start_sim: Start) -> None:
    server = start_sim(*SLOW, DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="0.3")
    with connected(server.port) as raw:
        client = Http2(raw)
        streams = [client.send("POST", "/v1/chat/completions", ENDLESS) for _ in range(4)]
        for stream in streams:
            client.read_until(stream, ended=False)
        server.kill(signal.SIGTERM)
        answers = [client.read_until(stream, ended=True) for stream in streams]
    assert [answer.error["code"] for answer in answers] == ["cut"] * 4
    assert server.end() == 0
    assert server.report["requests"]["cut"] == 4


# --- WebSocket -----------------------------------------------------------------------------------


def test_a_websocket_upgrade_is_refused_before_and_during_a_drain(start_sim: Start) -> None:
    server = start_sim("--itl-ms", "20", **PATIENT)
    with open_streams(server.port, 1, chat(40)) as streams:
        with Http1(server.port) as early:
            early.socket.sendall(UPGRADE.replace(b"/realtime", b"/realtime?model=nobody"))
            assert read_refusal(early) == (404, "model_not_found")
        server.kill(signal.SIGTERM)
        server.wait_log("phase draining")
        with Http1(server.port) as late:
            late.socket.sendall(UPGRADE)
            assert read_refusal(late) == (503, "draining")
        assert streams[0].finish().is_done
    assert server.end() == 0


def read_refusal(client: Http1) -> tuple[int, str]:
    head, _, rest = b"".join(iter(lambda: client.socket.recv(1), b"")).partition(b"\r\n\r\n")
    assert b"application/json" in head.lower()
    return int(head.split()[1]), json.loads(rest)["error"]["code"]


# --- health, all through a stop ------------------------------------------------------------------


@attrs.define(eq=False)
class Prober:
    """Asks /health and /live every 50 ms, on new connections, until nobody answers."""

    server: Server
    lives: list[int | None] = attrs.field(factory=list)
    healths: list[tuple[int, str] | None] = attrs.field(factory=list)
    #: How many polls had been answered when the signal was sent.
    signalled_after: int = 0

    def run(self, polls_before: int) -> None:
        port = self.server.port
        for number in itertools.count():
            if number == polls_before:
                self.server.kill(signal.SIGTERM)
                self.signalled_after = number
            self.healths.append(self._health(port))
            self.lives.append(self._live(port))
            if self.lives[-1] is None and self.server.popen.poll() is not None:
                return
            time.sleep(0.05)

    @staticmethod
    def _health(port: int) -> tuple[int, str] | None:
        try:
            answer = ask(port, "GET", "/health")
        except (OSError, h11.RemoteProtocolError):
            return None
        return answer.status, answer.json()["stage"]

    @staticmethod
    def _live(port: int) -> int | None:
        try:
            return ask(port, "GET", "/live").status
        except (OSError, h11.RemoteProtocolError):
            return None

    def check(self) -> list[str]:
        """No gap, no wrong answer; returns the stages that were seen, in order."""
        answered = [code for code in self.lives if code is not None]
        assert answered == [200] * len(answered)
        assert self.lives == answered + [None] * (len(self.lives) - len(answered))
        before = self.healths[: self.signalled_after]
        after = [health for health in self.healths[self.signalled_after :] if health is not None]
        assert before == [(200, "ready")] * len(before)
        assert {status for status, _ in after} == {503}
        return [stage for stage, _ in itertools.groupby(stage for _, stage in after)]


def test_health_and_live_through_a_whole_stop(start_sim: Start) -> None:
    server = start_sim("--itl-ms", "20", **PATIENT)
    prober = Prober(server)
    with open_streams(server.port, 2, chat(60)) as streams:
        done = in_parallel([lambda: prober.run(5), lambda: [s.finish() for s in streams]])
    answers = done[1]
    assert answers is not None
    assert all(answer.is_done for answer in answers)
    assert server.end() == 0
    stages = prober.check()
    assert stages in (["draining"], ["draining", "stopping"])
    assert len([live for live in prober.lives if live == 200]) > 8


def test_the_port_answers_while_the_engine_is_being_closed(start_sim: Start) -> None:
    flags = ("--sim-fault", "hang-close", "--sim-fault-after", "0")
    server = start_sim(*flags, DYN_TRIO_FRONTEND_SHUTDOWN_TOTAL_TIMEOUT_SECS="2")
    prober = Prober(server)
    prober.run(3)
    assert server.end() == 1
    assert prober.check()[-1] == "stopping"
    assert len([live for live in prober.lives if live == 200]) > 8
    assert any("EngineHung" in error for error in server.report["errors"])
