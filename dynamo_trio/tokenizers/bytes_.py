"""A tokenizer that needs no file: one token per byte, and three special ones.

For the simulated engine, tests and benchmarks. Its chat template is ChatML.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Final

from dynamo_trio.tokenizers.abc import TableDecoder, TokenTable

if TYPE_CHECKING:
    from collections.abc import Sequence

END_OF_TEXT: Final = 256
IM_START: Final = 257
IM_END: Final = 258

_SPECIALS = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
_SPLIT = re.compile("(" + "|".join(map(re.escape, _SPECIALS)) + ")")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ByteTokenizer:
    """Ids 0 to 255 are bytes; 256 to 258 end of text, begin and end of a turn."""

    vocab_size = 256 + len(_SPECIALS)
    bos_token_id: int | None = None
    eos_token_ids = (END_OF_TEXT, IM_END)
    bos_token = ""
    eos_token = "<|im_end|>"
    chat_template: str | None = CHAT_TEMPLATE
    context_length: int | None = None
    fingerprint = hashlib.sha256(b"bytes/1" + CHAT_TEMPLATE.encode()).hexdigest()

    _table = TokenTable([*(bytes([n]) for n in range(256)), *[b""] * len(_SPECIALS)], _SPECIALS)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """The UTF-8 bytes of ``text``; the text of a special token is that token."""
        ids: list[int] = []
        for part in _SPLIT.split(text):
            special = _SPECIALS.get(part)
            ids.extend(part.encode() if special is None else (special,))
        return ids

    def least_tokens(self, text: str) -> int:
        """See :class:`~dynamo_trio.tokenizers.abc.Tokenizer`."""
        return self._table.least_tokens(text)

    def decode(self, ids: Sequence[int]) -> str:
        """See :class:`~dynamo_trio.tokenizers.abc.Tokenizer`."""
        return self._table.decode(ids)

    def decoder(self) -> TableDecoder:
        """See :class:`~dynamo_trio.tokenizers.abc.Tokenizer`."""
        return self._table.decoder()

    def close(self) -> None:
        """Nothing is held."""
