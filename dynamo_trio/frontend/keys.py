"""API keys: who may ask (``DYN_TRIO_API_KEYS_FILE``).

Theory of operation
-------------------
The file is read at the start, where it must be right, and looked at once a second afterwards:
a new key works, and a removed one is refused, without a restart. A file that cannot be used
later on changes nothing, so that a slip does not shut everybody out; the log tells.

Keys themselves are not kept. What is kept are their digests, keyed with a secret of this
process, and each request is compared with all of them, in a time that tells nothing of which,
or how much of one, was right.
"""

from __future__ import annotations

import codecs
import hashlib
import hmac
import logging
import secrets
import stat
from typing import TYPE_CHECKING, Final

import attrs
import trio

from dynamo_trio.errors import FileUnusable, InvalidApiKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from dynamo_trio.http.asgi import Scope

logger = logging.getLogger("dynamo_trio.frontend")

#: Keys in a file, characters in a key, and bytes of the file.
MAX_KEYS, MAX_KEY, MAX_FILE = 1000, 512, 1024 * 1024
#: Seconds between two looks at the file.
LOOK_EVERY = 1.0
#: How a browser sends its key to ``/v1/realtime``, as it can set no header (OpenAI's way).
SUBPROTOCOL_PREFIX: Final = "openai-insecure-api-key."

MISSING = "This server wants an API key: send the header 'Authorization: Bearer KEY'."
WRONG = "The API key is not one of this server's."
AMBIGUOUS = "The request has more than one API key."

#: What tells whether a file has changed: its device, number, size, and times of change.
_State = tuple[int, ...]


@attrs.define(eq=False, repr=False)
class ApiKeys:
    """The keys of one file."""

    path: Path
    _secret: bytes = attrs.field(factory=lambda: secrets.token_bytes(32))
    _digests: tuple[bytes, ...] = ()
    #: For this process's own requests; until there is such a key, of none.
    _own: bytes = attrs.field(factory=lambda: secrets.token_bytes(32))
    #: Of the file as it was last looked at, used or not.
    _seen: _State = ()

    def __repr__(self) -> str:
        return f"<{len(self._digests)} API keys>"

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """The keys in ``path``: one a line; a line that begins with ``#`` is a comment.

        Raises:
            FileUnusable: it is missing or unreadable, has no key, or a line that is none.
        """
        keys = cls(path)
        keys._seen = _state(path)
        keys._take(_read(path))
        return keys

    def own_key(self) -> str:
        """A key for the requests that this process sends to itself."""
        key = secrets.token_urlsafe(32)
        self._own = self._digest(key.encode())
        return key

    def check(self, scope: Scope) -> None:
        """Refuse a request without a key of ours.

        Raises:
            InvalidApiKey: it has none, or a wrong one, or several that differ.
        """
        given = [*{*_given(scope)}]  # the same one may come in more than one way
        if not given:
            raise InvalidApiKey(MISSING)
        if len(given) > 1:
            raise InvalidApiKey(AMBIGUOUS)
        if not self._knows(given[0]):
            raise InvalidApiKey(WRONG)

    async def follow(self) -> None:
        """Take over what changes in the file, for ever."""
        while True:
            await trio.sleep(LOOK_EVERY)
            # In a thread, and abandoned by a stop: the file may be on a network's disk.
            await trio.to_thread.run_sync(self._look, abandon_on_cancel=True)

    def _look(self) -> None:
        state = _state(self.path)
        if state == self._seen:
            return
        self._seen = state  # before it is read: what is written meanwhile is seen next time
        try:
            found = _read(self.path)
        except FileUnusable as exc:
            logger.error("the API keys stay as they were: %s", exc)
            return
        self._take(found)
        logger.info("the API keys were read anew: there are %d", len(self._digests))

    def _take(self, keys: Iterable[bytes]) -> None:
        self._digests = tuple(map(self._digest, keys))

    def _knows(self, key: bytes) -> bool:
        digest = self._digest(key)
        found = False
        for known in (*self._digests, self._own):  # all of them, whichever is the right one
            found |= hmac.compare_digest(digest, known)
        return found

    def _digest(self, key: bytes) -> bytes:
        # BLAKE2 has a key of its own (RFC 7693); an HMAC by OpenSSL takes several times as long.
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()


def _given(scope: Scope) -> Iterator[bytes]:
    """The keys that a request brings."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            yield key.strip() if scheme.lower() == b"bearer" else b""
    for offered in scope.get("subprotocols") or ():
        if offered.startswith(SUBPROTOCOL_PREFIX):
            yield offered.removeprefix(SUBPROTOCOL_PREFIX).encode()


# --- the file ---------------------------------------------------------------------------


def _state(path: Path) -> _State:
    """Empty for a file that is not there, or cannot be looked at."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _read(path: Path) -> list[bytes]:
    """The keys. Raises FileUnusable."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise FileUnusable(f"{_named(path)}: must be a file")
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as exc:
        raise FileUnusable(f"{_named(path)}: cannot be read: {exc.strerror}") from None
    if len(data) > MAX_FILE:
        raise FileUnusable(f"{_named(path)}: must have at most {MAX_FILE} bytes")
    return _keys(path, data)


def _keys(path: Path, data: bytes) -> list[bytes]:
    text = data.removeprefix(codecs.BOM_UTF8)  # some editors begin every file with it
    lines = enumerate((line.strip() for line in text.splitlines()), start=1)
    keys = {line: number for number, line in lines if line and not line.startswith(b"#")}
    for key, number in keys.items():
        if len(key) > MAX_KEY or not all(0x21 <= byte <= 0x7E for byte in key):
            rule = f"must be one key of 1 to {MAX_KEY} printable ASCII characters without a space"
            raise FileUnusable(f"{_named(path)}: line {number} {rule}")
    if not keys:
        raise FileUnusable(f"{_named(path)}: must have at least one key")
    if len(keys) > MAX_KEYS:
        raise FileUnusable(f"{_named(path)}: must have at most {MAX_KEYS} keys, not {len(keys)}")
    return list(keys)


def _named(path: Path) -> str:
    return f"DYN_TRIO_API_KEYS_FILE={str(path)!r}"
