"""What a worker asks itself, to see whether its engine still answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_trio.errors import ConfigError, RemoteProtocolError
from dynamo_trio.wire.dynamo.codec import JSON
from dynamo_trio.wire.llm import read_request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_trio.health import CanarySettings
    from dynamo_trio.tokenizers import Tokenizer

#: What a prompt begins with where the model has no token of its own for that, as in Dynamo.
ANY_TOKEN = 1


def one_token(tokenizer: Tokenizer) -> dict[str, object]:
    """A request for one token after the shortest prompt there is."""
    begin = tokenizer.bos_token_id
    return {
        "token_ids": [ANY_TOKEN if begin is None else begin],
        "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
    }


def canary_payload(settings: CanarySettings, tokenizer: Tokenizer) -> Mapping[str, object]:
    """The operator's payload, or a request for one token.

    Raises:
        ConfigError: the operator's is no request that an engine could take.
    """
    payload = settings.payload_or(one_token(tokenizer))
    try:
        read_request(JSON, JSON.encode(payload))
    except RemoteProtocolError as exc:
        raise ConfigError(
            f"DYN_HEALTH_CHECK_PAYLOAD must be a request as a frontend sends it, with token_ids:"
            f" {exc}"
        ) from exc
    return payload
