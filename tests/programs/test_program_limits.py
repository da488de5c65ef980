"""What a program takes from the system that it runs on."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.standalone.harness import Server, clean_environ

if TYPE_CHECKING:
    from tests.programs.conftest import Fleet

SOFT = 64


def test_a_program_takes_all_file_descriptors_that_it_may_have(fleet: Fleet) -> None:
    command = f'ulimit -Sn {SOFT}; exec "$0" -m dynamo_trio.frontend --http-port 0'
    popen = subprocess.Popen(
        ["sh", "-c", command, sys.executable],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environ(**fleet.environ),
    )
    fleet.servers.append(server := Server(popen))
    server.wait_ready()
    soft, hard = resource.prlimit(popen.pid, resource.RLIMIT_NOFILE)
    assert soft == hard > SOFT
    assert "(every interface; on this machine http://127.0.0.1:" in server.wait_log("listening on")
    assert server.stop() == 0


def test_the_library_leaves_the_limit_alone() -> None:
    script = f"""
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, ({SOFT}, hard))
import trio
from dynamo_trio import open_runtime
async def main():
    async with open_runtime():
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
trio.run(main)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(SOFT)
