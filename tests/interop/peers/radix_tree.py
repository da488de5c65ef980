"""NVIDIA's RadixTree. Run by the interpreter that has it.

Reads one step a line, as JSON: ``{"worker": ID, "event": {...}}``, ``{"gone": ID}`` or
``{"ask": [tokens hash, ...]}``. Answers each question with a line:
``[[worker, rank, blocks], ...]``.
"""

import json
import sys

from dynamo.llm import RadixTree


def main() -> None:
    tree = RadixTree()
    for line in sys.stdin:
        step = json.loads(line)
        if "event" in step:
            tree.apply_event(step["worker"], json.dumps(step["event"]).encode())
        elif "gone" in step:
            tree.remove_worker(step["gone"])
        else:
            scores = tree.find_matches(step["ask"]).scores
            print(json.dumps(sorted([*cache, blocks] for cache, blocks in scores.items())))


if __name__ == "__main__":
    main()
