"""nghttp2's clients: ``nghttp`` shows answers and their frames, ``h2load`` makes a crowd.

Both take any certificate; that ours can be trusted is for the tests with curl. ``h2load`` looks
into no answer, and sends its next request as soon as one is there, whatever it says: so it is the
client that nothing slows down.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from typing import TYPE_CHECKING, Any

import attrs
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.standalone.harness import PATIENCE, Answer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.standalone.harness import Server

CHAT = "/v1/chat/completions"
JSON = ("-H", "content-type: application/json")

#: How ``nghttp -v`` shows one.
FRAME = r"\[ *\d+\.\d+\] (?:recv|send) .*\n(?: {10}.*\n)*"


def needs_nghttp2() -> None:
    """Skip where they are not installed."""
    if shutil.which("nghttp") is None or shutil.which("h2load") is None:
        pytest.skip("needs nghttp and h2load; enable with: apt-get install nghttp2-client")


@attrs.frozen
class Nghttp:
    """What ``nghttp -v`` has shown."""

    said: str

    @property
    def answer(self) -> Answer:
        """Status, headers and body, if it is one answer."""
        fields = re.findall(r"^\[.*\] recv \(stream_id=\d+\) (:?[^:]+): (.*)$", self.said, re.M)
        headers = dict(fields)
        # What is between the frames is the body's; an event that was split has its halves again.
        body = re.sub(FRAME, "", self.said.partition("; First response header\n")[2])
        return Answer(int(headers[":status"]), headers, body.encode())

    @property
    def dones(self) -> int:
        """How many streams of a chat were complete."""
        return self.said.count("data: [DONE]\n")

    @property
    def ends(self) -> int:
        """How many answers had the proper end of HTTP/2, if none was reset."""
        assert "RST_STREAM" not in self.said
        return len(re.findall(r"recv DATA frame <length=\d+, flags=0x01, .*>", self.said))


@attrs.frozen
class Load:
    """What ``h2load`` has counted and logged."""

    said: str
    #: How many answers were whole, by status; negative for those that broke off.
    statuses: Counter[int]

    @property
    def protocol(self) -> str:
        return self._find(r"^Application protocol: (\S+)")

    @property
    def body_bytes(self) -> int:
        """Of all answers together."""
        return int(self._find(r"^traffic: .*\((\d+)\) data"))

    def _find(self, pattern: str) -> str:
        match = re.search(pattern, self.said, re.M)
        assert match is not None, self.said
        return match[1]


@attrs.define(eq=False)
class Loading:
    """An ``h2load`` that runs."""

    popen: subprocess.Popen[str]
    log: Path

    def finish(self) -> Load:
        said, complaints = self.popen.communicate(timeout=PATIENCE)
        assert (self.popen.returncode, complaints) == (0, ""), said
        statuses = [int(line.split("\t")[1]) for line in self.log.read_text().splitlines()]
        return Load(said, Counter(statuses))


@attrs.define(eq=False)
class Site:
    """A frontend, and where these clients find it. They do not outlive the block."""

    frontend: Server
    base: str
    folder: Path
    _running: list[subprocess.Popen[str]] = attrs.field(factory=list)

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        for popen in self._running:
            popen.kill()
            popen.communicate()

    # --- the clients --------------------------------------------------------------------------

    def nghttp(self, body: dict[str, Any], *flags: str) -> subprocess.Popen[str]:
        """Begin a chat, or several of the same on one connection."""
        sent = ("-v", *JSON, "-d", self._file(body))
        return self._start("nghttp", *sent, *flags, self.base + CHAT)

    def ask(self, body: dict[str, Any], *flags: str) -> Nghttp:
        """The same, to its end."""
        return self.read(self.nghttp(body, *flags))

    def read(self, nghttp: subprocess.Popen[str]) -> Nghttp:
        said, complaints = nghttp.communicate(timeout=PATIENCE)
        assert nghttp.returncode == 0, complaints
        return Nghttp(said)

    def h2load(self, body: dict[str, Any], *flags: str) -> Loading:
        """Begin to ask the same chat again and again."""
        log = self.folder / f"h2load-{len(self._running)}.log"  # an old one would be continued
        sent = (*JSON, "-d", self._file(body), f"--log-file={log}")
        return Loading(self._start("h2load", *flags, *sent, self.base + CHAT), log)

    def _file(self, body: dict[str, Any]) -> str:
        path = self.folder / f"body-{len(self._running)}.json"
        path.write_text(json.dumps(body))
        return str(path)

    def _start(self, *command: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
        )
        self._running.append(popen)
        return popen

    # --- what the frontend counts -------------------------------------------------------------

    def counted(self, name: str, *labels: str) -> Counter[tuple[str, ...]]:
        """The values of a counter, by these labels."""
        values: Counter[tuple[str, ...]] = Counter()
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name:
                    values[tuple(sample.labels[label] for label in labels)] += int(sample.value)
        return values

    def get(self, path: str) -> httpx.Response:
        # Who answers is not what these tests ask.
        return httpx.get(self.base + path, verify=False, trust_env=False, timeout=PATIENCE)
