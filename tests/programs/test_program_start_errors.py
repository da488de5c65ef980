"""What keeps a worker or a frontend from starting: exit code 64, and what to mend."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.programs.conftest import Fleet
    from tests.standalone.harness import Server

WORKER, FRONTEND = "dynamo_trio.worker", "dynamo_trio.frontend"


def check_refusal(server: Server, *words: str) -> None:
    assert server.end() == 64, server.log
    for word in words:
        assert word in server.log
    assert "Traceback" not in server.log
    assert server.report["exit_code"] == 64


#: Variable -> a bad value, and what is said of it.
WRONG = {
    "DYN_DISCOVERY_BACKEND": ("kubernetes", "discovery through Kubernetes is not there yet"),
    "DYN_REQUEST_PLANE": ("nats", "NATS is not offered; the request plane is tcp"),
    "DYN_EVENT_PLANE": ("nats", "NATS is not offered; the event plane is zmq"),
    "DYN_TCP_RPC_PORT": ("-1", "must be a whole number from 0 to 65535"),
    "DYN_TCP_CONNECT_TIMEOUT": ("soon", "must be a number of seconds"),
    "ETCD_ENDPOINTS": ("", "must be one or more of http://HOST:PORT"),
}
WRONG_FOR = {
    WORKER: {
        "DYN_SYSTEM_PORT": ("-2", "must be a port from 0 to 65535, or -1 for none"),
        "DYN_ENGINE_REQUEST_LIMIT": ("0", "must be a whole number from 1"),
        "DYN_ENDPOINT_TYPES": ("embedding", "must be one or more of chat, completions"),
    },
    FRONTEND: {
        "DYN_ROUTER_MODE": ("kv", "KV routing is not there yet"),
        "DYN_MIGRATION_LIMIT": ("-1", "must be a whole number from 0"),
        "DYN_HTTP_PORT": ("x", "must be a whole number from 0 to 65535"),
    },
}
#: Flags of other programs.
ELSEWHERE = {WORKER: ("--http-port", "--ask"), FRONTEND: ("--system-port", "--itl-ms")}


@pytest.mark.parametrize("module", [WORKER, FRONTEND])
def test_settings_that_are_wrong(fleet: Fleet, module: str) -> None:
    wrong = WRONG | WRONG_FOR[module]
    flags = [f"{flag}=1" for flag in ELSEWHERE[module]]
    server = fleet.start(module, *flags, **{name: value for name, (value, _) in wrong.items()})
    told = [f"{name}={value!r}: {words}" for name, (value, words) in wrong.items()]
    told += [f"{flag}: no such flag" for flag in ELSEWHERE[module]]
    check_refusal(server, f"{len(told)} settings are wrong", *told)


def test_a_worker_without_a_model(fleet: Fleet) -> None:
    server = fleet.start(WORKER, "--engine", "sim")
    check_refusal(server, "cannot start: --model-path (DYN_MODEL_PATH) is not set")


def test_a_model_folder_that_is_missing(fleet: Fleet, tmp_path: Path) -> None:
    server = fleet.start(WORKER, "--engine", "sim", "--model-path", str(tmp_path / "no"))
    check_refusal(server, f"cannot start: --model-path: {tmp_path}/no: ")


def test_a_model_folder_that_lacks_a_file(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "tokenizer.json").write_bytes(
        (fleet.model / "tokenizer.json").read_bytes()
    )
    half = str(tmp_path / "half")
    server = fleet.start(WORKER, "--engine", "sim", DYN_MODEL_PATH=half)
    check_refusal(server, f"cannot start: DYN_MODEL_PATH: {half}/config.json: ")
    assert fleet.records("instances") == fleet.records("mdc") == []


def test_a_model_that_offers_nothing_of_what_is_wanted(fleet: Fleet, tmp_path: Path) -> None:
    for path in fleet.model.iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    flags = ("--engine", "sim", "--model-path", str(tmp_path), "--endpoint-types", "chat")
    server = fleet.start(WORKER, *flags)
    check_refusal(server, "--endpoint-types (DYN_ENDPOINT_TYPES) is chat", "completions only")


#: What is tried -> how its settings are called.
PORTS = {"http": "HTTP", "system": "SYSTEM", "rpc": "TCP_RPC", "response": "TCP_RESPONSE_STREAM"}


@pytest.mark.parametrize("which", PORTS)
def test_a_port_in_use(fleet: Fleet, which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        match which:
            case "http":
                server = fleet.frontend("--http-port", str(port), ready=False)
            case "system":
                server = fleet.worker("--system-port", str(port), ready=False)
            case "rpc":
                server = fleet.worker("--tcp-rpc-port", str(port), ready=False)
            case _:
                flag = "--tcp-response-stream-port"
                server = fleet.frontend(flag, str(port), ready=False)
        check_refusal(server, f"127.0.0.1:{port} (", f"DYN_{PORTS[which]}_PORT)", "in use")
    assert fleet.records("instances") == fleet.records("mdc") == []


def test_a_host_that_cannot_be_listened_on(fleet: Fleet) -> None:
    server = fleet.worker("--system-host", "256.1.1.1", "--system-port", "0", ready=False)
    check_refusal(server, "'256.1.1.1' (--system-host, DYN_SYSTEM_HOST)")
    server = fleet.frontend("--http-host", "256.1.1.1", ready=False)
    check_refusal(server, "'256.1.1.1' (--http-host, DYN_HTTP_HOST)")
    server = fleet.frontend(ready=False, DYN_TCP_RESPONSE_STREAM_HOST="nowhere0")
    check_refusal(server, "'nowhere0' (DYN_TCP_RESPONSE_STREAM_HOST): must be an address")


@pytest.mark.parametrize("module", [WORKER, FRONTEND])
def test_a_store_that_cannot_be_made(fleet: Fleet, module: str) -> None:
    (fleet.folder / "file").touch()
    store = str(fleet.folder / "file" / "store")
    flags = ("--engine", "sim", "--model-path", str(fleet.model)) if module == WORKER else ()
    server = fleet.start(module, *flags, DYN_FILE_KV=store, DYN_HTTP_PORT="0")
    check_refusal(server, "cannot start: DYN_FILE_KV=")


def test_a_certificate_that_is_missing(fleet: Fleet) -> None:
    nowhere = str(fleet.folder / "no.pem")
    pair = {"DYN_TCP_TLS_CERT_PATH": nowhere, "DYN_TCP_TLS_KEY_PATH": nowhere}
    server = fleet.worker(ready=False, **pair)
    check_refusal(server, f"cannot start: DYN_TCP_TLS_CERT_PATH={nowhere}: must be")


# --- what is asked for and not started ------------------------------------------------------


def test_print_config_shows_the_groups_of_the_program_and_no_password(fleet: Fleet) -> None:
    secret = {"ETCD_AUTH_USERNAME": "root", "ETCD_AUTH_PASSWORD": "s3cret"}
    server = fleet.start(FRONTEND, "--print-config", **secret)
    assert server.popen.stdout is not None
    text = server.popen.stdout.read()
    assert server.end() == 0
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    assert lines["DYN_HTTP_HOST"] == ["0.0.0.0", "default"]
    assert lines["DYN_DISCOVERY_BACKEND"] == ["file", "DYN_DISCOVERY_BACKEND"]
    assert lines["ETCD_AUTH_PASSWORD"] == ["(not", "shown)", "ETCD_AUTH_PASSWORD"]
    assert "s3cret" not in text
    assert "DYN_SYSTEM_PORT" not in lines
    assert "DYN_TRIO_ENGINE" not in lines


@pytest.mark.parametrize("module", [WORKER, FRONTEND])
def test_help_names_the_program(fleet: Fleet, module: str) -> None:
    server = fleet.start(module, "--help")
    assert server.popen.stdout is not None
    text = server.popen.stdout.read()
    assert server.end() == 0
    assert text.startswith(f"usage: python -m {module} ")
    assert "--discovery-backend" in text


def test_what_has_no_effect_yet_is_a_warning(fleet: Fleet) -> None:
    frontend = fleet.frontend("--migration-limit", "3")
    assert "--migration-limit=3: migration is not there yet" in frontend.log
    worker = fleet.worker(DYN_DISCOVERY_BACKEND="mem")
    assert "discovery backend mem: no other process sees this one" in worker.log
