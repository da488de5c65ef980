"""``--ask``: one question, its answer on standard output, and the stop that follows."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.standalone.harness import PATIENCE, clean_environ

if TYPE_CHECKING:
    from tests.standalone.conftest import Start
    from tests.standalone.harness import Server

QUESTION = ("--ask", "Why is the sky blue?")


def read_stdout(server: Server) -> str:
    assert server.popen.stdout is not None
    return server.popen.stdout.read()


def test_the_answer_is_all_that_is_printed(start_sim: Start) -> None:
    server = start_sim(*QUESTION, "--itl-ms", "1", ready=False)
    answer = read_stdout(server)
    assert server.end() == 0
    assert answer.endswith("\n")
    assert len(answer.split()) > 1
    assert server.report["cause"] == "the question is answered"
    served = server.report["served_before"] + server.report["requests"]["finished"]
    assert served == 1
    others = [line for line in server.lines[:-1] if "WARNING" not in line]
    assert others == []


def test_the_same_question_has_the_same_answer(start_sim: Start) -> None:
    servers = [start_sim(*QUESTION, "--itl-ms", "1", ready=False) for _ in range(2)]
    answers = [read_stdout(server) for server in servers]
    assert [server.end() for server in servers] == [0, 0]
    assert answers[0] == answers[1]


def test_a_reader_that_leaves_early_is_no_error(start_sim: Start) -> None:
    server = start_sim(*QUESTION, "--itl-ms", "5", ready=False)
    assert server.popen.stdout is not None
    assert server.popen.stdout.read(4)
    server.popen.stdout.close()
    assert server.end() == 0
    assert "Traceback" not in server.log
    assert "Broken pipe" not in server.log


def test_standard_output_that_is_closed_from_the_start(start_sim: Start) -> None:
    server = start_sim(*QUESTION, "--itl-ms", "1", ready=False)
    assert server.popen.stdout is not None
    server.popen.stdout.close()
    assert server.end() == 0
    assert "Traceback" not in server.log


def test_a_stop_lets_the_answer_complete(start_sim: Start) -> None:
    patient = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "100"}
    server = start_sim(*QUESTION, "--itl-ms", "10", ready=False, **patient)
    assert server.popen.stdout is not None
    begun = server.popen.stdout.read(4)
    server.kill(signal.SIGINT)
    answer = begun + read_stdout(server)
    assert server.end() == 0
    assert server.report["cause"] == "SIGINT"
    assert server.report["requests"]["finished"] == 1
    assert "no answer" not in server.log
    assert answer.endswith("\n")


def test_two_sigints_end_it_now(start_sim: Start) -> None:
    patient = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "100"}
    server = start_sim(*QUESTION, "--itl-ms", "2000", "--log", "info", ready=False, **patient)
    assert server.popen.stdout is not None
    assert server.popen.stdout.read(2)
    server.kill(signal.SIGINT)
    server.wait_log("phase draining")
    server.kill(signal.SIGINT)
    assert server.end() == 1
    assert server.report["exit_code"] == 1
    assert server.report["requests"]["cut"] == 1
    assert "no answer: The server is shutting down; this answer is incomplete." in server.log
    assert "Traceback" not in server.log
    assert read_stdout(server).endswith("\n")


def test_an_engine_that_dies_is_no_answer(start_sim: Start) -> None:
    fault = ("--sim-fault", "die", "--sim-fault-after", "5")
    server = start_sim(*QUESTION, *fault, ready=False)
    assert read_stdout(server).endswith("\n")
    assert server.end() == 1
    assert "no answer: " in server.log


def test_a_signal_before_the_question_is_asked(start_sim: Start) -> None:
    server = start_sim(*QUESTION, "--load-ms", "100000", "--log", "info", ready=False)
    server.wait_log("loading sim")
    server.kill(signal.SIGTERM)
    assert server.end() == 1
    assert read_stdout(server) == ""
    assert "no answer: stopped before the question was asked" in server.log


def test_an_answer_that_a_limit_cuts(start_sim: Start) -> None:
    limit = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "0.2"}
    server = start_sim(*QUESTION, "--itl-ms", "2000", "--log", "info", ready=False, **limit)
    assert server.popen.stdout is not None
    assert server.popen.stdout.read(2)
    server.kill(signal.SIGTERM)
    assert server.end() == 1
    assert server.report["requests"]["cut"] == 1
    assert "http_drain was ended by its limit of 0.2 s; 1 request left" in server.log
    assert re.search(r"chat_completions of sim by [0-9a-f]+: cut, ", server.log)
    assert read_stdout(server).endswith("\n")


def test_an_answer_that_cannot_be_written() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dynamo_trio", "--engine", "sim", "--http-port", "0", *QUESTION],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environ(),
            timeout=PATIENCE,
            check=False,
        )
    assert done.returncode == 1
    told, report = done.stderr.splitlines()
    assert told.endswith("no answer: it cannot be written: No space left on device")
    assert json.loads(report)["exit_code"] == 1


def test_an_empty_question() -> None:
    command = [sys.executable, "-m", "dynamo_trio", "--engine", "sim", "--ask", ""]
    done = subprocess.run(
        command, capture_output=True, text=True, env=clean_environ(), timeout=PATIENCE, check=False
    )
    assert done.returncode == 64
    assert "--ask='': must be text that is not empty" in done.stderr
