"""What an engine core is: the values it takes and gives, and the calls it must answer.

Theory of operation
-------------------
A *core* is a plain synchronous object that holds a model and a scheduler. It knows
nothing of Trio. A *host* (:mod:`dynamo_trio.engines.hosts`) decides in which thread its
calls run, and the *engine* (:mod:`dynamo_trio.engines.engine`) decides when. Between
them they promise a core three things:

* one call at a time: ``load``, ``add``, ``abort``, ``step``, ``has_work``, ``stats``,
  ``take_kv_events``, ``check_health`` and ``close`` never overlap, though each may come from
  another thread;
* ``interrupt`` is the only call that may arrive while another one runs;
* ``close`` comes once, after everything else, and never after a call that did not return.

Units: seconds are floats, lengths are tokens, memory is counted in KV blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from attrs import field, frozen

from dynamo_trio.wire.dynamo.kv_events import Cleared, Removed, Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dynamo_trio.errors import DynamoException

#: Why an answer ended. ``aborted``: the core gave the request up without being asked to.
FinishReason = Literal["stop", "length", "error", "aborted"]


def _tuple(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(ids)


def _set(ids: Iterable[int]) -> frozenset[int]:
    return frozenset(ids)


@frozen(kw_only=True)
class Request:
    """One generation. Nothing in it refers to another request, so it can be sent again elsewhere.

    ``max_tokens`` None means as many as the context leaves room for; the engine replaces it
    by that number before a core sees the request. ``temperature`` 0 is greedy.
    ``top_k`` None and ``top_p`` 1 switch these filters off. ``seed`` None draws a new seed
    for each request. ``min_tokens`` tokens are generated before an end-of-sequence or stop
    token may end the answer. Of two waiting requests the lower ``priority`` goes first.
    """

    request_id: str
    token_ids: tuple[int, ...] = field(converter=_tuple)
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    stop_token_ids: frozenset[int] = field(default=frozenset(), converter=_set)
    ignore_eos: bool = False
    min_tokens: int = 0
    priority: int = 0

    @property
    def limit(self) -> int:
        """``max_tokens`` once it has been settled; what a core reads."""
        assert self.max_tokens is not None, "the engine settles max_tokens before a core sees it"
        return self.max_tokens


@frozen
class Delta:
    """What one step added to one request.

    ``token_ids`` holds the new tokens only, and never the token that ended the answer
    (end-of-sequence or one of ``stop_token_ids``). ``finish_reason`` is set on the last
    delta of a request and on no other; ``error`` says what failed when it is ``error``.
    ``cached_tokens``, on the last delta too, is how much of the prompt was in the KV cache
    and had not to be computed; None from a core that does not know.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: DynamoException | None = None
    cached_tokens: int | None = None


# --- the KV cache, as a core tells of it ------------------------------------------------


#: ``Stored``: full blocks can be reused from now on, each the continuation of the one before,
#: the first one of ``parent_hash``. ``Removed``: blocks are gone, none of them later than the
#: one that it continues. ``Cleared``: all are gone. A block's ``block_hash`` is the core's own
#: name for it and everything before it, 64 bits; its ``tokens_hash`` is Dynamo's
#: (:func:`~dynamo_trio.wire.dynamo.block_hash.tokens_hashes`).
KvEvent = Stored | Removed | Cleared


@frozen(kw_only=True)
class Stats:
    """The load of a core, as its last step left it."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0

    @property
    def kv_usage(self) -> float:
        """Used part of the KV memory, 0..1."""
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else 0.0


@frozen(kw_only=True)
class CoreInfo:
    """What a loaded core can do."""

    model: str
    #: Tokens of prompt and answer together that one request may have.
    context_tokens: int
    #: Requests that one step can advance.
    max_running: int
    kv_block_tokens: int
    kv_blocks_total: int
    #: Tokens that one step takes, those of prompts among them; None: any number.
    step_tokens: int | None = None
    #: Token ids are below this; None when the core takes any.
    vocab_size: int | None = None
    #: A core whose calls hold the GIL would stop the event loop if it ran in a thread.
    gil: Literal["released", "held"] = "released"
    #: Prompts reuse what others have left in the KV cache, and the core tells of that: it is a
    #: :class:`CachingCore`.
    kv_events: bool = False
    #: The core can say whether it is well: it is a :class:`CheckedCore`.
    health_check: bool = False


class StepCore(Protocol):
    """The interface of an engine core; the rules are in the head of this module."""

    @property
    def info(self) -> CoreInfo:
        """Valid once :meth:`load` has returned."""
        ...

    def load(self, progress: Callable[[float], None]) -> None:
        """Load the model; may take minutes.

        Raises:
            StartupError: a subclass that says who is at fault, such as ``LoadError``.
        """
        ...

    def add(self, request: Request) -> None:
        """Queue a request; never runs the model.

        Raises:
            RequestRejected: this request cannot be served; others are unaffected.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request and free its memory. An unknown id is ignored."""
        ...

    def step(self) -> Sequence[Delta]:
        """Run one scheduler iteration of bounded work. Whatever it raises is final."""
        ...

    def has_work(self) -> bool:
        """Whether another step would do something, such as reap what was aborted."""
        ...

    def stats(self) -> Stats:
        """Cheap: called after each step."""
        ...

    def owed_seconds(self) -> float:
        """How much longer the call that just returned should have taken.

        A simulated core does not sleep; its host does, so that a test's clock sees it.
        A core that really works returns 0. Asked again after :meth:`interrupt`.
        """
        ...

    def interrupt(self) -> None:
        """Make the running ``load`` or ``step`` (or else the next one) return soon.

        Best effort, must not block, called from another thread. The requests of an
        interrupted step end with an error.
        """
        ...

    def close(self) -> None:
        """Free everything, also what a failed ``load`` left behind."""
        ...


class CachingCore(StepCore, Protocol):
    """A core whose ``info.kv_events`` is true."""

    def take_kv_events(self) -> Sequence[KvEvent]:
        """What changed in the KV cache since this was last asked, in order.

        Asked after each turn. Cheap, and complete: whoever applies all events to an empty
        cache knows what the cache holds.
        """
        ...


class CheckedCore(StepCore, Protocol):
    """A core whose ``info.health_check`` is true."""

    def check_health(self) -> None:
        """Return if all is well, such as a child process or a device that steps rely on.

        Called now and then, between two steps. Whatever it raises is final, and a call that
        does not return in time means that the engine hangs.
        """
        ...
