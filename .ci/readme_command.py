"""Print a command of README.md, so that what CI runs and what people read cannot differ.

A command is a fenced block right after the comment ``<!-- readme-command: NAME -->``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
_COMMAND = re.compile(r"^<!-- readme-command: (\w+) -->\n+```\w*\n(.*?)^```$", re.MULTILINE | re.S)


def readme_commands(text: str) -> dict[str, str]:
    """Name -> command, in the order of the page."""
    return {name: command.strip() for name, command in _COMMAND.findall(text)}


if __name__ == "__main__":
    print(readme_commands(README.read_text())[sys.argv[1]])
