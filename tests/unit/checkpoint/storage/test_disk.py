"""Files on a disk: full ones, those without hard links, and URLs that mean one or mean none."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elasticzero.checkpoint.storage import disk as disk_module
from elasticzero.checkpoint.storage import new_file
from elasticzero.checkpoint.storage.base import read_small
from elasticzero.checkpoint.storage.disk import DiskDirectory, DiskStorage
from elasticzero.checkpoint.storage.linux import set_direct
from elasticzero.checkpoint.storage.urls import open_directory, open_storage
from elasticzero.errors import StorageError, UserError


def failing(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EPERM))


def without_either(monkeypatch: pytest.MonkeyPatch) -> None:
    without_links(monkeypatch)
    monkeypatch.setattr(disk_module, "rename_new", failing(errno.EINVAL))


@pytest.fixture(params=["link", "rename", "lock"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DiskStorage]:
    """On a file system with hard links, one with exclusive renames, one with neither."""
    with pytest.MonkeyPatch.context() as patch:
        {"link": lambda _: None, "rename": without_links, "lock": without_either}[request.param](
            patch
        )
        yield DiskStorage(tmp_path)


def test_only_the_first_creates(disk: DiskStorage) -> None:
    assert disk.create_exclusive("file", b"first")
    assert not disk.create_exclusive("file", b"second")
    assert read_small(disk, "file", 99) == b"first"
    assert disk.names() == ["file"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_file_is_replaced_only_as_it_was_read(
    disk: DiskStorage, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(disk_module, "exchange", failing(errno.EINVAL))
    disk.write("file", [b"old"])
    assert not disk.create_exclusive("file", b"new", instead_of=b"other")
    assert disk.create_exclusive("file", b"new", instead_of=b"old")
    disk.remove("file", holding=b"old")
    assert read_small(disk, "file", 99) == b"new"
    assert disk.names() == ["file"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_file_that_changes_after_the_look_stays(
    disk: DiskStorage, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    """Another writer comes between the look at the file and its replacement or removal."""
    if not exchanges:
        monkeypatch.setattr(disk_module, "exchange", failing(errno.EINVAL))
    monkeypatch.setattr(disk_module, "holds", lambda _, name, data: data in (b"old", b"newer"))
    disk.write("file", [b"newer"])
    assert not disk.create_exclusive("file", b"new", instead_of=b"old")
    disk.remove("file", holding=b"old")
    assert read_small(disk, "file", 99) == b"newer"
    assert disk.names() == ["file"]


def test_a_lock_that_a_killed_process_left_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_either(monkeypatch)
    (tmp_path / ".file.lock").write_bytes(b"")
    disk = DiskStorage(tmp_path)
    with pytest.raises(StorageError, match=r"\.file\.lock exists: .* remove that file"):
        disk.create_exclusive("file", b"first")
    assert disk.names() == [".file.lock"]


def test_a_link_that_fails_otherwise_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EIO))
    with pytest.raises(StorageError, match=r"cannot create file in .*: Input/output error"):
        DiskStorage(tmp_path).create_exclusive("file", b"x")
    assert os.listdir(tmp_path) == []


def test_small_and_large_chunks_come_in_their_order(tmp_path: Path) -> None:
    sizes = [1, 0, 100, 300_000, 5, 262_144, 262_145, 7, 262_140, 262_140, 9 << 20, 3]
    chunks = [os.urandom(size) for size in sizes]
    for durable in (True, False):
        disk = DiskStorage(tmp_path, durable=durable)
        disk.write("file", iter(chunks), size=sum(sizes))
        assert read_small(disk, "file", 1 << 30) == b"".join(chunks)


def on_pages(content: bytes) -> memoryview:
    """The same bytes, from the beginning of a page on."""
    memory = memoryview(mmap.mmap(-1, len(content) + 1))
    memory[: len(content)] = content
    return memory[: len(content)].toreadonly()


def takes_direct(path: Path) -> bool:
    with (path / "probe").open("wb") as file:
        return set_direct(file.fileno(), True)


@pytest.mark.parametrize("taken", ["all", "until the fourth", "none"])
@pytest.mark.parametrize("sizes", [[1 << 20, 8192, 4096, 5], [4096, 100, 8192, 300_000], [0, 7]])
def test_uncached_writes_bypass_the_page_cache_where_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str, sizes: list[int]
) -> None:
    """Whole pages from a page's beginning on, until a file system says no: it may do so late."""
    monkeypatch.setattr(new_file, "_DIRECT_BYTES", 1 << 18)
    really_write, really_pwrite, direct = os.write, os.pwrite, []

    def write(fd: int, data: memoryview) -> int:
        assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        direct.append(False)
        return really_write(fd, data)

    def pwrite(fd: int, data: memoryview, at: int) -> int:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        direct.append(True)
        if taken == "until the fourth":
            if direct.count(True) > 3:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            data = data[:4096]
        return really_pwrite(fd, data, at)

    if taken == "none":
        monkeypatch.setattr(new_file, "set_direct", lambda *_: False)
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "pwrite", pwrite)
    contents = [os.urandom(size) for size in sizes]
    chunks = (on_pages(content) for content in contents)
    DiskStorage(tmp_path).write("file", chunks, size=sum(sizes), cached=False)
    assert (tmp_path / "file").read_bytes() == b"".join(contents)
    if taken != "none" and takes_direct(tmp_path):
        assert any(direct) == any(size >= 4096 for size in sizes)
    assert direct[-1] is False, "what is no whole page goes through the cache"


def test_fewer_bytes_than_were_promised_leave_a_shorter_file(tmp_path: Path) -> None:
    content = os.urandom(8192)
    DiskStorage(tmp_path).write("file", [on_pages(content)], size=1 << 20, cached=False)
    assert (tmp_path / "file").read_bytes() == content


def test_a_full_disk_is_noticed_before_the_bytes_are_asked_for(tmp_path: Path) -> None:
    asked = []

    def chunks() -> Iterator[bytes]:
        asked.append(True)
        yield b"x"

    disk = DiskStorage(tmp_path)
    with pytest.raises(StorageError, match=r"cannot write file .*(No space left|too large)"):
        disk.write("file", chunks(), size=1 << 62)
    assert not asked
    assert disk.names() == []


def test_in_memory_no_space_is_taken_beforehand() -> None:
    if not os.path.ismount("/dev/shm"):
        pytest.skip("/dev/shm is no file system of its own")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        DiskStorage(Path(path)).write("file", [b"abc"], size=1 << 62)
        assert os.stat(Path(path) / "file").st_size == 3


def test_a_size_that_is_too_large_does_not_lengthen_the_file(tmp_path: Path) -> None:
    disk = DiskStorage(tmp_path)
    disk.write("file", [b"abc"], size=1000)
    assert disk.size("file") == 3


def test_a_step_that_is_removed_while_it_is_empty_is_made_again(tmp_path: Path) -> None:
    """Retention took the directory that a newer save had just made for one of a failed save."""
    directory, name = DiskDirectory(tmp_path), "step-000000000001"
    storage = directory.make(name)
    directory.remove(name)
    assert not (tmp_path / name).exists()
    storage.write("a", [b"x"], size=1)
    assert storage.names() == ["a"]
    storage.remove("a")
    directory.remove(name)
    with pytest.raises(StorageError, match="cannot create b"):
        storage.create_exclusive("b", b"x")
    with pytest.raises(FileNotFoundError):
        DiskStorage(tmp_path / name).write("a", [b"x"])
    assert not (tmp_path / name).exists(), "a manifest, and shared memory, need their directory"


def test_a_step_is_made_in_a_directory_that_many_make_at_once(tmp_path: Path) -> None:
    directory = DiskDirectory(tmp_path / "new" / "place")
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: directory.make("step").path, range(16)))
    assert made == [tmp_path / "new" / "place" / "step"] * 16
    assert made[0].is_dir()


def test_what_is_no_file_is_not_listed_among_the_steps(tmp_path: Path) -> None:
    directory = DiskDirectory(tmp_path)
    directory.make("a").write("file", [b"x"])
    (tmp_path / "a" / "folder").mkdir()
    (tmp_path / "a" / "link").symlink_to("nowhere")
    (tmp_path / "notes").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    listing = {step: list(files) for step, files in directory.files().items()}
    assert listing == {"a": ["file"], "empty": []}


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    disk = DiskStorage(tmp_path / "file")
    for use in (disk.names, lambda: disk.write("x", [b""]), lambda: disk.size("x")):
        with pytest.raises(StorageError, match=f"{tmp_path}/file: Not a directory"):
            use()


@pytest.mark.parametrize("url", ["", " ", "file://"])
def test_an_empty_path_is_not_this_directory(url: str) -> None:
    for opens in (open_directory, open_storage):
        with pytest.raises(UserError, match=r"empty|names no directory"):
            opens(url)


def test_a_place_where_no_directory_can_be_made_is_named() -> None:
    directory = DiskDirectory(Path("/proc/elasticzero/checkpoints"))
    with pytest.raises(StorageError, match="cannot make the directory /proc/elasticzero/"):
        directory.make("step-000000000001")
    with pytest.raises(StorageError, match="/proc/elasticzero/checkpoints cannot be written"):
        directory.check_writable()


def test_urls_of_checkpoint_directories(tmp_path: Path) -> None:
    for url, meant in (
        (tmp_path, tmp_path),
        (str(tmp_path), tmp_path),
        ("here/../there/", Path.cwd() / "there"),
        ("file:///a%20b/c", "/a b/c"),
        ("file://localhost/c", "/c"),
        ("~/c", Path.home() / "c"),
        ("memory://a/b/", "memory://a/b"),
    ):
        assert open_directory(url).where == str(meant)
        assert open_storage(url).where == str(meant)
        assert open_directory(url).step("s").where == f"{meant}/s"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file://other/x", "on another machine"),
        ("nonsense://bucket", "nonsense"),
        ("gs://bucket", "gcsfs"),
    ],
)
def test_urls_that_mean_none_are_refused(url: str, reason: str) -> None:
    for opens in (open_directory, open_storage):
        with pytest.raises(UserError, match=reason) as caught:
            opens(url)
        assert repr(url) in str(caught.value)


def test_a_disk_needs_no_fsspec() -> None:
    code = (
        "import sys; from elasticzero.checkpoint.steps import commit, retention; "
        "from elasticzero.checkpoint.storage.urls import open_directory; "
        "open_directory('/tmp').names(); "
        "sys.exit('fsspec' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_file_in_the_place_of_a_directory_of_steps(tmp_path: Path) -> None:
    (tmp_path / "model.pt").touch()
    with pytest.raises(UserError, match=r"model\.pt is a file, and checkpoints are directories"):
        DiskDirectory(tmp_path / "model.pt").names()
