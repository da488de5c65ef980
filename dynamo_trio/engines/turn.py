"""What enters a core and what comes back: the check of a request, and one turn of the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from attrs import evolve, frozen

from dynamo_trio import errors
from dynamo_trio.engines.protocol import Delta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_trio.engines.protocol import (
        CachingCore,
        CheckedCore,
        CoreInfo,
        KvEvent,
        Request,
        Stats,
        StepCore,
    )


@frozen
class Turn:
    """What one turn brought back from the core."""

    deltas: Sequence[Delta]
    stats: Stats
    has_work: bool
    kv_events: Sequence[KvEvent] = ()


def iterate(core: StepCore, adds: Sequence[Request], aborts: Sequence[str]) -> Turn:
    """One turn, in the thread of the host: a single hop for all that is to do."""
    for request_id in aborts:
        core.abort(request_id)
    deltas: list[Delta] = []
    for request in adds:
        try:
            core.add(request)
        except errors.RequestRejected as exc:
            deltas.append(Delta(request.request_id, (), "error", exc))
    if core.has_work():
        deltas.extend(core.step())
    return Turn(deltas, core.stats(), core.has_work(), _kv_events(core))


def _kv_events(core: StepCore) -> Sequence[KvEvent]:
    return cast("CachingCore", core).take_kv_events() if core.info.kv_events else ()


def check(core: StepCore) -> None:
    """Ask a core whether it is well, in the thread of the host.

    Raises:
        EngineShutdown: it is not.
    """
    try:
        cast("CheckedCore", core).check_health()
    except errors.EngineShutdown:
        raise
    except Exception as exc:
        text = f"the engine failed its health check: {type(exc).__name__}: {exc}"
        raise errors.EngineDead(text) from exc


def settled(request: Request, info: CoreInfo) -> Request:
    """The request with ``max_tokens`` filled in, if a core of that kind can serve it.

    Raises:
        RequestRejected: the prompt is empty, does not fit, or has an unknown token.
    """
    prompt = len(request.token_ids)
    if not prompt:
        raise errors.RequestRejected("the prompt is empty")
    room = info.context_tokens - prompt
    wanted = max(room, 1) if request.max_tokens is None else request.max_tokens
    if wanted < 1:
        raise errors.RequestRejected("max_tokens must be at least 1", param="max_tokens")
    if wanted > room:
        raise errors.RequestRejected(
            f"this model's context has {info.context_tokens} tokens; "
            f"the prompt has {prompt} and {wanted} are to be generated"
        )
    if info.vocab_size is not None and not _known(request.token_ids, info.vocab_size):
        raise errors.RequestRejected(f"token ids must be between 0 and {info.vocab_size - 1}")
    return evolve(request, max_tokens=wanted)


def _known(token_ids: tuple[int, ...], vocab_size: int) -> bool:
    return min(token_ids) >= 0 and max(token_ids) < vocab_size
