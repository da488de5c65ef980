"""Settings of the documentation. Built with ``sphinx-build -n -W``: a broken reference fails."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

from dynamo_trio import __version__  # noqa: E402 - the path above comes first

project = "dynamo_trio"
author = "The dynamo_trio contributors"
project_copyright = "2026, The dynamo_trio contributors"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinxcontrib_trio",
    "api_page",
    "from_code",
]
exclude_patterns = ["_build", "newsfragments"]

html_theme = "furo"
html_title = f"dynamo_trio {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# Members are listed page by page: with "members" here, such a list would be ignored.
autodoc_default_options = {"show-inheritance": True}
# Engines whose packages are optional: the docs describe them without being able to run them.
autodoc_mock_imports = ["cyllama", "tokenizers"]

nitpicky = True
# Only references into this package are checked. Those into other projects would need their
# inventories from the network, and the build must work without it.
nitpick_ignore_regex = [
    ("py:.*", r"(?!dynamo_trio\.).*"),
    # Type variables, and private classes that a signature shows: neither has an entry.
    ("py:.*", r"dynamo_trio\..*\.([A-Z]|_\w+)"),
]
