"""What the catalogue does with a worker's card: fetch its files and make a preprocessor."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from dynamo_trio.errors import CardUnusable, LoadError
from dynamo_trio.frontend.keeper import Verbatim
from dynamo_trio.models.card_loader import fetch_card
from dynamo_trio.tokenizers import Preprocessor, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from dynamo_trio.discovery import ModelCard
    from dynamo_trio.frontend.catalog import Loader
    from dynamo_trio.models.card_loader import CardLimits
    from dynamo_trio.wire.dynamo.card import CardJson

#: What we can serve, in the words of a card.
_TEXT_TYPES = {"chat", "completions"}
_TEXT_INPUT = "tokens"
#: A model that is spoken to over a WebSocket, and by no other way.
_REALTIME_TYPE = "realtime"


def card_loader(
    cache_dir: Path, *, model_dir: Path | None = None, limits: CardLimits | None = None
) -> Loader:
    """The catalogue's loader for cards that other processes published.

    Args:
        cache_dir: their files are kept in it.
        model_dir: a local copy of the model (``--model-path``), for cards whose files cannot
            be had from where the card says.

    The loader raises :class:`~dynamo_trio.errors.StartupError` for a card that is of no use.
    """
    return partial(_load, cache_dir, model_dir, limits)


async def _load(
    cache_dir: Path, model_dir: Path | None, limits: CardLimits | None, card: ModelCard
) -> Preprocessor | Verbatim:
    path = card.model_path
    if _is_realtime(card):
        return Verbatim()
    if card.card_json is not None:
        _check(card.card_json)
        path = await fetch_card(card.card_json, cache_dir, model_dir=model_dir, limits=limits)
    return await trio.to_thread.run_sync(_preprocessor, card, path, abandon_on_cancel=True)


def _is_realtime(card: ModelCard) -> bool:
    """Does its worker take the events of a session as they are? No file of it is read then."""
    types = card.model_type if card.card_json is None else card.card_json.model_types
    return _REALTIME_TYPE in types and not types & _TEXT_TYPES


def _check(card: CardJson) -> None:
    """Refuse what is not ours to serve, before anything is fetched."""
    if not card.model_types & _TEXT_TYPES:
        served = "chat, completions or realtime"
        raise CardUnusable(f"it is of the type {card.model_type[:100]!r}; {served} are served")
    if card.model_input.lower() != _TEXT_INPUT:
        raise CardUnusable(f"it wants {card.model_input[:100]!r} as its input; Tokens are sent")


def _preprocessor(card: ModelCard, path: Path | None) -> Preprocessor:
    try:
        tokenizer = load_tokenizer(path)
        length = _context_length(card, tokenizer)
        return Preprocessor(tokenizer, context_length=length, model=card.name)
    except (ValueError, OverflowError, RecursionError) as exc:  # of a kind that nobody foresaw
        raise LoadError(f"the files of {card.name} cannot be used: {exc!r:.300}") from exc
    except Exception:
        raise
    except BaseException as exc:  # noqa: ASYNC103 - in a thread nothing is cancelled
        # The tokenizers package panics on some files, with a BaseException of its own.
        raise LoadError(f"the tokenizer of {card.name} cannot be built: {exc!r}") from exc  # noqa: ASYNC104 - as above


def _context_length(card: ModelCard, tokenizer: Tokenizer) -> int:
    """Tokens, prompt and answer together: what the engine says, else what the model can do."""
    length = card.context_length or _told(card.card_json) or tokenizer.context_length
    if not length:
        raise LoadError("neither the card nor the model's files tell a context length")
    return length


def _told(card: CardJson | None) -> int:
    if card is None:
        return 0
    runtime = getattr(card.runtime_config, "context_length", None)
    for value in (card.context_length, runtime, card.architectural_max_context_length):
        if isinstance(value, int) and value > 0:
            return value
    return 0
