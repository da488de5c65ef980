"""Imports go one way, the wire knows no I/O, and `import dynamo_trio` costs next to nothing."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import dynamo_trio

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(dynamo_trio.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

#: A unit is a module or folder directly below dynamo_trio. It may import what stands above it.
LAYERS = (
    {"errors"},
    {"wire"},
    {"config", "pem"},
    {"console", "context", "lifecycle", "migration", "routing", "tokenizers"},
    {"discovery", "engines", "events", "http", "models", "plane", "process", "temporary", "turns"},
    {"health", "metrics", "tracing"},
    {
        *("bidirectional", "call", "client", "endpoint", "membership", "push", "request_stream"),
        *("response_stream", "runtime"),
    },
    {"kv", "program"},
    {"decorators", "frontend", "graceful", "worker"},
    {"standalone", "__main__"},
)
#: Imports within a layer; together they must not form a circle.
SIDEWAYS = {
    ("console", "context"),
    ("context", "lifecycle"),
    ("__main__", "standalone"),
    ("decorators", "worker"),
    ("bidirectional", "response_stream"),
    ("call", "request_stream"),
    ("client", "bidirectional"),
    ("client", "response_stream"),
    ("endpoint", "request_stream"),
    ("call", "push"),
    ("endpoint", "call"),
    ("endpoint", "push"),
    ("models", "discovery"),
    ("models", "process"),
    ("runtime", "client"),
    ("runtime", "endpoint"),
    ("runtime", "membership"),
}
#: Stricter than the layers: the lifecycle is told its limits and never looks them up.
FORBIDDEN = {("lifecycle", "config")}
#: For people who test their own code; may import everything, and nothing imports it.
TESTING = "testing"

#: All that wire/ may use: pure computation. No clock, no socket, no file, no thread, no Trio.
PURE = {
    *("__future__", "abc", "collections", "contextlib", "dataclasses", "enum", "functools"),
    *("itertools", "operator", "types", "typing"),
    *("attrs", "jinja2", "msgspec", "xxhash"),
    *("base64", "binascii", "bisect", "codecs", "copy", "datetime", "hashlib", "heapq", "json"),
    *("array", "math", "re", "secrets", "string", "struct", "unicodedata", "uuid", "zlib"),
}

#: Too heavy to be loaded before the signal handlers stand.
HEAVY = ("trio", "attr", "httpx", "hypercorn", "msgspec", "jinja2", "logging", "argparse")


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file imports, inside functions and TYPE_CHECKING blocks too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_unit(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()


def edges() -> set[tuple[str, str]]:
    """(unit, imported unit) over the whole package, without imports inside a unit."""
    found = {
        (unit_of(path), name.split(".")[1])
        for path in SOURCES
        for name in imports_of(path)
        if name.startswith("dynamo_trio.") and is_unit(name.split(".")[1])
    }
    return {(a, b) for a, b in found if a not in (b, "__init__")}


def is_wrong(importer: str, imported: str) -> bool:
    if importer == TESTING or imported == TESTING:
        return importer != TESTING
    if (importer, imported) in FORBIDDEN or LAYER_OF[importer] < LAYER_OF[imported]:
        return True
    return LAYER_OF[importer] == LAYER_OF[imported] and (importer, imported) not in SIDEWAYS


LAYER_OF = {unit: number for number, layer in enumerate(LAYERS) for unit in layer}


def test_every_unit_has_its_layer() -> None:
    units = {unit_of(path) for path in SOURCES} - {"__init__", TESTING}
    assert units <= LAYER_OF.keys()


def test_the_layers_in_the_docs_are_these() -> None:
    page = (PACKAGE.parent / "docs" / "explanation" / "architecture.md").read_text()
    block = page.partition("## Imports go one way")[2].split("```text\n")[1].split("```")[0]
    lines = [line.split("  ")[0].split() for line in block.splitlines()]
    assert [set(line) for line in lines] == list(LAYERS)


def test_imports_go_one_way() -> None:
    assert [edge for edge in sorted(edges()) if is_wrong(*edge)] == []


def test_the_test_sees_imports() -> None:
    assert ("config", "errors") in edges()
    assert ("console", "config") in edges()


@pytest.mark.parametrize("path", sorted((PACKAGE / "wire").rglob("*.py")), ids=lambda p: p.stem)
def test_wire_does_no_io(path: Path) -> None:
    foreign = {name.split(".")[0] for name in imports_of(path)} - PURE
    assert foreign <= {"dynamo_trio"}
    calls = {n.func.id for n in ast.walk(ast.parse(path.read_text()))
             if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}  # fmt: skip
    assert not calls & {"open", "print", "input"}


def test_no_asyncio() -> None:
    for path in SOURCES:
        assert not [n for n in imports_of(path) if n.split(".")[0] == "asyncio"], path


#: Hands the environment on to a child process, and reads nothing from it.
PASSES_THE_ENVIRONMENT_ON = {PACKAGE / "models" / "pip.py"}


def test_only_config_reads_the_environment() -> None:
    for path in SOURCES:
        if unit_of(path) == "config" or path in PASSES_THE_ENVIRONMENT_ON:
            continue
        names = {n.attr for n in ast.walk(ast.parse(path.read_text()))
                 if isinstance(n, ast.Attribute)}  # fmt: skip
        assert not names & {"environ", "environb", "getenv", "getenvb"}, path


#: Where a shield may stand, each bounded in its own way. Everybody else uses lifecycle.cleanup,
#: which no shield outlives.
SHIELDS = {
    "context.py": "Context.cleanup, the same verb for handlers",
    "call.py": "the driver of a handler's generator",
    "engines/engine.py": "an engine step, and what ends it",
    "engines/hosts.py": "an engine step, and what ends it",
    "http/engine.py": "the end of a connection, within its linger time",
    "http/exchange.py": "a connection's sends, lifted when it is lost",
    "http/guard.py": "a send that waits for its client, within its write deadline",
    "http/respond.py": "an ASGI send within its write deadline",
    "http/sinks.py": "the farewell of a response within its deadline",
    "lifecycle/beside.py": "the unregistering, bounded by who waits for it; and 1/16 s",
    "lifecycle/deadlines.py": "lifecycle.cleanup itself",
}


def test_shields_stand_only_where_they_are_bounded() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.keyword) and node.arg == "shield"
    }
    assert found <= SHIELDS.keys()


def heavy_modules_after(code: str) -> list[str]:
    """Which of HEAVY a fresh interpreter has loaded after ``code``."""
    script = f"import sys; {code}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    # A coverage run would load modules of its own before ours.
    env = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return done.stdout.split()


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert heavy_modules_after("import dynamo_trio") == []


def test_the_signal_handlers_load_nothing_heavy() -> None:
    assert heavy_modules_after("import dynamo_trio.process.signals") == []


def test_configuration_and_console_do_not_load_trio() -> None:
    assert "trio" not in heavy_modules_after("import dynamo_trio.config")
    assert "trio" not in heavy_modules_after("import dynamo_trio.console")


#: Programs that serve; a command that only fetches a file needs no graceful stop.
MAINS = [p for p in SOURCES if p.name == "__main__.py" and p.parent.name != "models"]


def statements_of(path: Path) -> list[str]:
    """The top-level statements of a file, without its docstring and __future__ imports."""
    statements = [ast.unparse(node) for node in ast.parse(path.read_text()).body]
    if ast.get_docstring(ast.parse(path.read_text())) is not None:
        statements = statements[1:]
    return [s for s in statements if not s.startswith("from __future__")]


def test_a_program_first_installs_its_signal_handlers() -> None:
    assert any(path.parent == PACKAGE for path in MAINS)
    for path in MAINS:
        first_two = statements_of(path)[:2]
        assert first_two == ["from dynamo_trio.process import signals", "signals.install()"], path
