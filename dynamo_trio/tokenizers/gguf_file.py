"""Look at a GGUF file before llama.cpp does."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

from dynamo_trio.wire.gguf import BrokenGguf, check_gguf

if TYPE_CHECKING:
    from pathlib import Path


def check_gguf_file(path: Path) -> None:
    """Refuse what is no whole GGUF file; blocks for some milliseconds, reads the header only.

    llama.cpp aborts the process on some broken files, and cyllama's errors do not tell a
    missing file from one that may not be read.

    Raises:
        OSError: it is missing or cannot be read.
        BrokenGguf: it is not a whole GGUF file. A ``ValueError``.
    """
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise BrokenGguf("the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            with memoryview(content) as view:
                check_gguf(view)
