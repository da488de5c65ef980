"""Python's garbage collector, set for a process that serves.

By default it looks for cycles after 700 new objects, which is about one request, and from time
to time at everything that the process has loaded. That was a tenth of a frontend's CPU time.
"""

from __future__ import annotations

import gc
from typing import Final

#: New objects after which the youngest are looked at, and how often that is until the next older
#: ones are. A few MiB more may wait to be freed.
THRESHOLDS: Final = (10_000, 20, 50)


def collect_seldom() -> None:
    """Call it when all is imported: what is there now is never looked at again."""
    gc.freeze()  # without a collection before it: that takes a tenth of a second at the start
    gc.set_threshold(*THRESHOLDS)
