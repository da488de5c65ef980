"""The rules of the house that no tool checks: see CONTRIBUTING.md."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import dynamo_trio
from dynamo_trio.lifecycle import ShutdownReport
from dynamo_trio.process import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

PACKAGE = Path(dynamo_trio.__file__).parent
ROOT = PACKAGE.parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

#: (never more than, seldom more than): lines of a module, and of a function without docstring.
MODULE = (500, 400)
FUNCTION = (60, 30)
#: What "seldom" means: this share of all.
SELDOM = 0.05


def load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- size ----------------------------------------------------------------------------------------


def functions_of(path: Path) -> Iterator[tuple[str, int]]:
    """(where, lines of code without the docstring) of every function in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0]
        if ast.get_docstring(node) is not None and len(node.body) > 1:
            first = node.body[1]
        assert node.end_lineno is not None
        yield f"{path.relative_to(ROOT)}:{node.name}", node.end_lineno - first.lineno + 1


def too_long(sizes: dict[str, int], never: int, seldom: int) -> dict[str, int]:
    """What breaks the limits: all above ``never``, or all above ``seldom`` if they are many."""
    long = {name: size for name, size in sizes.items() if size > seldom}
    if len(long) > SELDOM * len(sizes):
        return long
    return {name: size for name, size in long.items() if size > never}


def test_functions_are_short() -> None:
    sizes = dict(pair for path in SOURCES for pair in functions_of(path))
    assert too_long(sizes, *FUNCTION) == {}


def test_modules_are_short() -> None:
    sizes = {str(p.relative_to(PACKAGE)): p.read_text().count("\n") for p in SOURCES}
    assert too_long(sizes, *MODULE) == {}


# --- names ---------------------------------------------------------------------------------------


def modules() -> list[str]:
    walked = pkgutil.walk_packages([str(PACKAGE)], "dynamo_trio.")
    return ["dynamo_trio", *(m.name for m in walked if not m.name.endswith("__main__"))]


@pytest.mark.parametrize("name", modules())
def test_what_a_module_offers_is_there_and_documented(name: str) -> None:
    if name.split(".")[-1] == "llama":
        pytest.importorskip(
            "cyllama", reason="needs llama.cpp; enable with: pip install -e '.[llama]'"
        )
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    for public in getattr(module, "__all__", ()):
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert value.__doc__, f"{name}.{public} has no docstring"


def test_the_front_of_the_package_tells_type_checkers_the_truth() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and "not" not in ast.unparse(n.test)]
    typed = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = dynamo_trio._HOMES
    assert typed == homes
    assert set(dynamo_trio.__all__) == {"__version__", *homes}
    assert set(dynamo_trio.__all__) <= set(dir(dynamo_trio))
    for name, home in homes.items():
        assert getattr(dynamo_trio, name) is getattr(importlib.import_module(home), name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = dynamo_trio.nonsense  # type: ignore[attr-defined]  # the point of the test


def test_type_checkers_may_trust_the_package() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_test_files_have_names_of_their_own() -> None:
    names = Counter(path.name for path in TESTS if path.name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []


def fixtures_used_by_mark(path: Path) -> set[str]:
    return {
        argument.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "usefixtures"
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }


def test_a_virtual_clock_is_an_argument() -> None:
    """pytest-trio runs a test in the time of a clock that it is given, and of no other."""
    clocks = {"autojump_clock", "mock_clock"}
    assert [path.name for path in TESTS if clocks & fixtures_used_by_mark(path)] == []


# --- text ----------------------------------------------------------------------------------------

_IGNORE = re.compile(r"#\s*(noqa|type:\s*ignore)[^#\n]*(#[^\n]*)?")
_REASONED = re.compile(r"noqa: [A-Z0-9, ]+ - \w+|type: ignore\[[a-z-, ]+\]  # \w+")


def test_every_ignore_has_its_reason() -> None:
    bare = [
        f"{path.relative_to(ROOT)}: {match.group(0)}"
        for path in [*SOURCES, *TESTS]
        if path != Path(__file__)
        for match in _IGNORE.finditer(path.read_text())
        if not _REASONED.search(match.group(0))
    ]
    assert bare == []


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("needs a git checkout; enable with: git clone")
    return [ROOT / name for name in done.stdout.decode().split("\0") if name]


def test_nothing_names_the_machine_that_it_was_written_on() -> None:
    pattern = re.compile(rb"(?<![\w.])/(?:work|home/\w+|root)/|/pypi-")
    guilty = [
        str(path.relative_to(ROOT))
        for path in tracked_files()
        if path.is_file() and path != Path(__file__) and pattern.search(path.read_bytes())
    ]
    assert guilty == []


# --- what people read ---------------------------------------------------------------------------


def test_the_readme_starts_with_the_two_commands_that_ci_runs() -> None:
    text = (ROOT / "README.md").read_text()
    commands = load_file(ROOT / ".ci" / "readme_command.py").readme_commands(text)
    assert list(commands.items())[:2] == [
        (
            "ask",
            "python3 -m venv .venv && . .venv/bin/activate && pip install -e '.[llama]'"
            ' && python -m dynamo_trio --ask "Why is the sky blue?"',
        ),
        ("test", "pip install -e '.[test]' && pytest -n 3 --dist loadfile"),
    ]
    assert text.index("readme-command: test") < text.index("\n## ")
    script = (ROOT / ".ci" / "run").read_text()
    assert "readme_command.py ask" in script
    assert "readme_command.py test" in script


def test_the_exit_codes_are_all_explained() -> None:
    page = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    for code in ExitCode:
        assert f"\n| {code:d} | " in page


def test_every_key_of_the_shutdown_report_is_explained() -> None:
    page = (ROOT / "docs" / "reference" / "shutdown-report.md").read_text()
    report = ShutdownReport(cause="test", phase="stopped", exit_code=0, gates={"work": {}})
    fields = json.loads(report.to_json())
    keys = {*fields, *fields["requests"], *fields["gates"]}
    assert sorted(key for key in keys if f"`{key}`" not in page) == []


_DIRECTIVE = re.compile(r"^\.\. auto(\w+):: ([\w.]+)((?:\n   :.*)*)", re.MULTILINE)
_MEMBERS = re.compile(r"^   :members: (.+)$", re.MULTILINE)


def names_on_the_api_page() -> Iterator[str]:
    """Modules, and names in modules. The docs' build checks that all is shown, members too."""
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    for kind, name, options in _DIRECTIVE.findall(page):
        yield name
        for members in _MEMBERS.findall(options) if kind == "module" else ():
            yield from (f"{name}.{member}" for member in members.split(", "))


def is_there(name: str) -> bool:
    try:
        return pkgutil.resolve_name(name) is not None
    except (ImportError, AttributeError):
        return False


def test_the_api_page_names_what_there_is() -> None:
    names = list(names_on_the_api_page())
    assert {"dynamo_trio.process.run.run_process", "dynamo_trio.lifecycle.Lifecycle"} <= {*names}
    assert [name for name in names if not is_there(name)] == []


def test_ci_refuses_a_step_that_there_is_not() -> None:
    command = [str(ROOT / ".ci" / "run"), "lint", "dosc"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert "no such step: dosc" in done.stderr
    assert "usage: .ci/run" in done.stderr
    assert done.stdout == ""
