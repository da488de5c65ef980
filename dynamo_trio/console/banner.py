"""What a person sees once the process is ready: where it listens, how to try it, how to stop it."""

from __future__ import annotations

import json
import shlex

from attrs import frozen

#: Every interface -> the address of it that a client on this machine can use.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


CHAT = "/v1/chat/completions"


def url_of(host: str, port: int, *, tls: bool = False) -> str:
    """The URL at which a client on this machine reaches a server bound to ``host``."""
    return _url(_LOOPBACK.get(host, host), port, tls)


def bound_to(host: str, port: int, *, tls: bool = False) -> str:
    """What a server is bound to, and for every interface also where it is on this machine."""
    if host not in _LOOPBACK:
        return _url(host, port, tls)
    here = url_of(host, port, tls=tls)
    return f"{_url(host, port, tls)} (every interface; on this machine {here})"


def _url(host: str, port: int, tls: bool) -> str:
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def curl_line(url: str, model: str, *, path: str = CHAT, wants_key: bool = False) -> str:
    """A command that works as it stands, or with a key: one streaming chat completion."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "max_tokens": 64,
        "stream": True,
    }
    headers = ["-H", "content-type: application/json"]
    if wants_key:
        headers += ["-H", "authorization: Bearer KEY"]
    return shlex.join(["curl", "-N", f"{url}{path}", *headers, "-d", json.dumps(body)])


@frozen(kw_only=True)
class Banner:
    """The values of the start banner."""

    version: str
    host: str
    port: int
    #: It speaks HTTPS.
    tls: bool = False
    model: str
    #: Where chat completions are, and whether only with an API key.
    chat_path: str = CHAT
    #: Where a cluster asks.
    probes: tuple[str, ...] = ("/health", "/live", "/metrics")
    wants_key: bool = False
    engine: str
    #: The limits of a stop, in one line.
    timetable: str
    pid: int
    #: From the start of the process to readiness.
    seconds: float

    def __str__(self) -> str:
        url = url_of(self.host, self.port, tls=self.tls)
        reach = ", on every interface" if self.host in _LOOPBACK else ""
        again = "Ctrl-C again cuts short, a third time leaves at once"
        rows = {
            "address": f"{url}/v1  (and {', '.join(self.probes)}){reach}",
            "model": self.model,
            "engine": self.engine,
            "shutdown": self.timetable,
            "stop": f"Ctrl-C, or kill -TERM {self.pid}; {again}",
        }
        lines = [f"dynamo_trio {self.version} is ready after {self.seconds:.1f} s"]
        lines += [f"  {name:<9} {value}" for name, value in rows.items()]
        return "\n".join([*lines, "  try it:", "", self._curl(url), ""])

    def _curl(self, url: str) -> str:
        return curl_line(url, self.model, path=self.chat_path, wants_key=self.wants_key)
