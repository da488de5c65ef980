"""``--ask``: one question, its answer on standard output, and the stop that follows."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

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
    assert server.end() == 0
    assert server.report["requests"]["cut"] == 1
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
    assert server.end() == 0
    assert read_stdout(server) == ""
