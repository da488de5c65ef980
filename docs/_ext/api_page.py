"""What autodoc and napoleon get wrong about this package, and a check of what they left out."""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING

from sphinx.util import logging

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

logger = logging.getLogger(__name__)

PAGE = "reference/api"
_DIRECTIVE = re.compile(r"^\.\. auto(\w+):: ([\w.]+)", re.MULTILINE)
_MEMBERS = re.compile(r"^   :members: (.+)$", re.MULTILINE)
#: attrs' factories and lambdas, as Python spells them in a signature.
_UNSPEAKABLE = re.compile(r"NOTHING|<factory>|<function [^>]*?(<lambda>)?>")


def promised(text: str) -> list[str]:
    """The full names that the directives of a page ask for."""
    names: list[str] = []
    starts = [*_DIRECTIVE.finditer(text)]
    ends = [match.start() for match in starts[1:]] + [len(text)]
    for match, end in zip(starts, ends, strict=True):
        kind, name = match.groups()
        members = _MEMBERS.search(text, match.end(), end)
        listed = members.group(1).split(", ") if members else []
        names += [f"{name}.{member}" for member in listed]
        names += [] if kind == "module" else [name]
    return names


def check_page(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of every promised name that has no entry: autodoc itself skips them silently."""
    there = env.domains.python_domain.objects
    for name in promised(env.doc2path(PAGE).read_text()):
        if name not in there:
            logger.warning("%s promises %s and does not show it", PAGE, name)


def keep_enum_members(app: Sphinx, what: str, name: str, obj: object, skip: bool,
                      options: object) -> bool | None:  # fmt: skip
    """The values of an enum are its documentation, with a comment or without."""
    return False if isinstance(obj, enum.Enum) else None


def keep_colons(app: Sphinx, what: str, name: str, obj: object, options: object,
                lines: list[str]) -> None:  # fmt: skip
    """Napoleon takes the words before an attribute's first colon for its type.

    It looks at the first line only, so an empty comment is put before it.
    """
    if what in ("attribute", "data", "property"):
        lines[0:0] = ["..", ""]


def tidy_signature(app: Sphinx, what: str, name: str, obj: object, options: object,
                   signature: str | None, returns: str) -> tuple[str, str] | None:  # fmt: skip
    """Three dots for a default that has no spelling."""
    if signature is None:
        return None
    return _UNSPEAKABLE.sub("...", signature), returns


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("env-check-consistency", check_page)
    app.connect("autodoc-skip-member", keep_enum_members)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", tidy_signature)
    return {"parallel_read_safe": True}
