"""``/busy_threshold``: shows and changes when a worker counts as busy, as in Dynamo's frontend.

``GET`` lists what was set; ``POST`` with a model alone shows that model's; with thresholds it
changes these, and the others stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
import msgspec

from dynamo_trio.errors import ModelNotFound
from dynamo_trio.http.respond import send_json
from dynamo_trio.wire.openai.fields import Fields, decode_object, integer, name_text, number

if TYPE_CHECKING:
    from dynamo_trio.frontend.busy import BusyThresholds
    from dynamo_trio.frontend.state import Frontend, HttpCall

#: Bytes of a body. It holds a name and three numbers.
MAX_BODY = 64 * 1024
BLOCKS: Final = "active_decode_blocks_threshold"
TOKENS: Final = "active_prefill_tokens_threshold"
FRAC: Final = "active_prefill_tokens_threshold_frac"
#: The most that is taken for a number without an upper bound of its own.
_MOST = 2**53


async def show_thresholds(frontend: Frontend, call: HttpCall) -> None:
    """All models for which something was set."""
    thresholds = frontend.busy.thresholds
    listed = [_shown(model, thresholds[model]) for model in sorted(thresholds)]
    await _answer(frontend, call, {"thresholds": listed})


async def change_thresholds(frontend: Frontend, call: HttpCall) -> None:
    """Show or change the thresholds of one model.

    Raises:
        InvalidArgument: the body is not what it should be.
        ModelNotFound: there is no such model.
    """
    limits = attrs.evolve(frontend.limits, body_bytes=MAX_BODY)
    body = await frontend.calls.read_body(call.scope, call.receive, limits)
    fields = Fields(decode_object(body))
    fields.forbid_unknown(("model", BLOCKS, TOKENS, FRAC))
    model = fields.required("model", name_text)
    blocks = fields.optional(BLOCKS, number(0, 1))
    tokens = fields.optional(TOKENS, integer(0, _MOST))
    frac = fields.optional(FRAC, number(0, _MOST))
    found = frontend.busy.get(model)
    if any(value is not None for value in (blocks, tokens, frac)):
        if not frontend.catalog.knows(model):  # clients must not fill the table
            raise ModelNotFound(f"model {model[:200]!r} does not exist", param="model")
        found = frontend.busy.set(
            model,
            active_decode_blocks_threshold=blocks,
            active_prefill_tokens_threshold=tokens,
            active_prefill_tokens_threshold_frac=frac,
        )
    await _answer(frontend, call, _shown(model, found))


def _shown(model: str, thresholds: BusyThresholds) -> dict[str, object]:
    return {"model": model, **attrs.asdict(thresholds, filter=lambda field, _: field.init)}


async def _answer(frontend: Frontend, call: HttpCall, body: object) -> None:
    headers = call.response_headers()
    await send_json(
        call.scope, call.send, 200, msgspec.json.encode(body), headers, limits=frontend.limits
    )
