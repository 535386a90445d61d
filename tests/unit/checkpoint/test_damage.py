"""Every kind of damage: found where it is read, named by `verify`, and the older step is used."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elasticzero import checkpoint
from elasticzero.checkpoint.format.checksums import BLOCK_BYTES
from elasticzero.checkpoint.format.names import MANIFEST_NAME, SUMS_SUFFIX, step_directory
from elasticzero.checkpoint.steps import catalog, verify
from elasticzero.checkpoint.storage.disk import DiskDirectory, DiskStorage
from elasticzero.errors import CheckpointDamaged, StorageError
from tests.unit.checkpoint.cases import draft_of, elements, flip, simple_layout, write_step
from tests.unit.checkpoint.damage_cases import forge_shard, header_of, sign, signed, with_header

OLD, NEW = 10, 20
LAYOUT = simple_layout(world_size=3, numel=3000)
BLOCK = BLOCK_BYTES


@dataclass(frozen=True)
class Place:
    """A checkpoint directory with two good steps, of which the newer is about to be damaged."""

    root: Path

    @property
    def step(self) -> Path:
        return self.root / step_directory(NEW)

    @property
    def old(self) -> Path:
        return self.root / step_directory(OLD)

    def shard(self, rank: int, step: int = NEW) -> Path:
        return self.root / step_directory(step) / draft_of(LAYOUT).file_name(rank)

    def edit_manifest(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """A manifest that its digest vouches for."""
        path = self.step / MANIFEST_NAME
        value = json.loads(path.read_bytes())
        path.write_bytes(signed(change(value) or value))

    def edit_header(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """A header of rank 1 that checksums vouch for."""
        table, data = header_of(self.shard(1).read_bytes())
        text = change(table)
        text = text if isinstance(text, bytes) else json.dumps(table).encode()
        forge_shard(self.step, 1, with_header(text, data))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good")
    for step in (OLD, NEW):
        write_step(root, draft_of(LAYOUT, step=step), elements(LAYOUT.tensors, step))
    return root


@pytest.fixture
def place(written: Path, tmp_path: Path) -> Place:
    shutil.copytree(written, tmp_path / "checkpoints")
    return Place(tmp_path / "checkpoints")


def flip_in(name: str, position: int) -> Callable[[Place], None]:
    return lambda place: flip(place.step / name, position)


def cut(name: str, size: int) -> Callable[[Place], None]:
    return lambda place: os.truncate(place.step / name, size)


def swap(place: Place, *suffixes: str) -> None:
    """Ranks 1 and 2 change places."""
    for suffix in suffixes:
        first, second = (Path(f"{place.shard(rank)}{suffix}") for rank in (1, 2))
        one, other = first.read_bytes(), second.read_bytes()
        first.write_bytes(other)
        second.write_bytes(one)


def of_another_step(place: Place, *suffixes: str) -> None:
    for suffix in suffixes:
        shutil.copy(f"{place.shard(1, OLD)}{suffix}", f"{place.shard(1)}{suffix}")


def of_another_generation(place: Place, *suffixes: str) -> None:
    """Rank 1's file of what the next generation wrote for this very step."""
    other = place.root.with_name("other")
    draft = draft_of(LAYOUT, step=NEW, generation=4, token="another")
    theirs = write_step(other, draft, elements(LAYOUT.tensors, 4)).path / draft.file_name(1)
    for suffix in suffixes:
        shutil.copy(f"{theirs}{suffix}", f"{place.shard(1)}{suffix}")


def first_entry(table: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = next(table[name] for name in table if name != "__metadata__")
    return entry


def move_first(table: dict[str, Any], by: int) -> None:
    entry = first_entry(table)
    entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]


def overlap(table: dict[str, Any]) -> None:
    one, other = [table[name] for name in table if name != "__metadata__"][:2]
    one["data_offsets"][1] += 8
    one["shape"] = [one["shape"][0] + 1]
    assert one["data_offsets"][1] > other["data_offsets"][0]


def drop_one(table: dict[str, Any]) -> None:
    del table[next(name for name in table if name != "__metadata__")]


def name_twice(table: dict[str, Any]) -> bytes:
    name = next(name for name in table if name != "__metadata__")
    entry = json.dumps({name: table[name]}).encode()[1:-1]
    return json.dumps(table).encode()[:-1] + b"," + entry + b"}"


def long_header(place: Place) -> None:
    data = place.shard(1).read_bytes()
    forge_shard(place.step, 1, (1 << 60).to_bytes(8, "little") + data[8:])


def cut_header(place: Place) -> None:
    data = place.shard(1).read_bytes()
    forge_shard(place.step, 1, (100).to_bytes(8, "little") + data[8:])


def layout(**change: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda value: value | {"layout": value["layout"] | change}


def group(**change: Any) -> Callable[[dict[str, Any]], Any]:
    def edit(value: dict[str, Any]) -> None:
        value["layout"]["groups"][0] |= change

    return edit


def shape(*sizes: int) -> Callable[[dict[str, Any]], Any]:
    def edit(value: dict[str, Any]) -> None:
        value["layout"]["tensors"]["model/b"]["shape"] = list(sizes)

    return edit


def file(**change: Any) -> Callable[[dict[str, Any]], Any]:
    def edit(value: dict[str, Any]) -> None:
        value["files"][1] |= change

    return edit


def deep(place: Place) -> None:
    text = (place.step / MANIFEST_NAME).read_bytes()
    nested = b'{"version":1,"state":' + b"[" * 200_000 + b"]" * 200_000 + b","
    (place.step / MANIFEST_NAME).write_bytes(sign(text.replace(b'{"version":1,', nested)))


def manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Place], None]:
    return lambda place: place.edit_manifest(change)


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Place], None]:
    return lambda place: place.edit_header(change)


def twice_in_manifest(place: Place) -> None:
    text = (place.step / MANIFEST_NAME).read_bytes()
    again = text.replace(b'"step":20,', b'"step":20,"step":21,')
    (place.step / MANIFEST_NAME).write_bytes(sign(again[: again.rindex(b',"digest"')] + b"}"))


def cut_last(place: Place) -> None:
    path = place.step / MANIFEST_NAME
    os.truncate(path, path.stat().st_size - 1)


def edited(place: Place) -> None:
    """A number in the state, which no checksum of a tensor covers."""
    path = place.step / MANIFEST_NAME
    text = path.read_bytes()
    assert b'"epoch":1' in text
    path.write_bytes(text.replace(b'"epoch":1', b'"epoch":7'))


SHARD = draft_of(LAYOUT).file_name(1)
SUMS = SHARD + SUMS_SUFFIX
NO_DIGEST = "does not end in its own digest"
DIGEST = "does not match its own digest"
FORGED = "its header is wrong: "

CASES: dict[str, tuple[Callable[[Place], None], str, str]] = {
    # what is done; the file that is named; the complaint
    "a flipped bit in the data": (flip_in(SHARD, -3), SHARD, "bytes 0 to .* not what was written"),
    "a flipped bit in a header": (flip_in(SHARD, 40), SHARD, "bytes 0 to .* not what was written"),
    "a flipped bit in a header's length": (flip_in(SHARD, 7), SHARD, "bytes 0 to "),
    "a flipped bit in checksums": (flip_in(SUMS, -1), SHARD, "not the one that the manifest names"),
    "a flipped bit in checksums' head": (flip_in(SUMS, 0), SHARD, "not a checksum file"),
    "a flipped bit in the layout's digest": (flip_in(SUMS, 30), SHARD, "not the one that"),
    "shards of two ranks swapped": (lambda p: swap(p, ""), SHARD, "bytes 0 to "),
    "checksums of two ranks swapped": (lambda p: swap(p, SUMS_SUFFIX), SHARD, "not the one that"),
    "two ranks swapped": (lambda p: swap(p, "", SUMS_SUFFIX), SHARD, "not the one that"),
    "a shard of another step": (lambda p: of_another_step(p, ""), SHARD, "bytes 0 to "),
    "a rank of another step": (lambda p: of_another_step(p, "", SUMS_SUFFIX), SHARD, "not the one"),
    "another generation's shard": (lambda p: of_another_generation(p, ""), SHARD, "bytes 0 to "),
    "another generation's rank": (
        lambda p: of_another_generation(p, "", SUMS_SUFFIX),
        SHARD,
        "not the one that",
    ),
    "checksums cut off": (cut(SUMS, 20), SHARD, "is cut off: it has 20 bytes"),
    "checksums of fewer blocks": (cut(SUMS, 40), SHARD, "has 40 bytes, not the 48 of its 1 blocks"),
    "a header of 2^60 bytes": (long_header, SHARD, "says its header has 1152921504606846976 bytes"),
    "a header cut off": (cut_header, SHARD, FORGED),
    "tensors that overlap": (header(overlap), SHARD, FORGED + "tensor .* begins at byte"),
    "a tensor out of range": (header(lambda t: move_first(t, 1 << 40)), SHARD, FORGED),
    "a tensor before the data": (header(lambda t: move_first(t, -8)), SHARD, FORGED),
    "a hole": (header(drop_one), SHARD, FORGED + "tensor .* begins at byte"),
    "a name twice": (header(name_twice), SHARD, FORGED + "the key .* appears twice"),
    "an offset that is no number": (
        header(lambda t: first_entry(t).update(data_offsets=[0, "8"])),
        SHARD,
        FORGED + "'8' is not a whole number",
    ),
    "a shape that is no number": (
        header(lambda t: first_entry(t).update(shape=[float("nan")])),
        SHARD,
        FORGED + "nan is not a whole number",
    ),
    "a huge shape in a header": (
        header(lambda t: first_entry(t).update(shape=[1 << 62, 1 << 62])),
        SHARD,
        FORGED + ".* more bytes than can be counted",
    ),
    "a header that is no table": (header(lambda t: b"[]"), SHARD, FORGED),
    "a header nested without end": (header(lambda t: b"[" * 100_000), SHARD, FORGED),
    "a header that tells another rank": (
        header(lambda t: t["__metadata__"].update(rank="2")),
        SHARD,
        "does not hold what its manifest says",
    ),
    "a header that tells another step": (
        header(lambda t: t["__metadata__"].update(step="21")),
        SHARD,
        "does not hold what its manifest says",
    ),
    "a manifest of another shape": (
        manifest(shape(1000, 2)),
        SHARD,
        "does not hold what its manifest says",
    ),
}
CHEAP: dict[str, tuple[Callable[[Place], None], str, str]] = {
    "a file cut off": (cut(SHARD, 5000), SHARD, "has 5000 bytes, not"),
    "a file cut off within its header": (cut(SHARD, 99), SHARD, "has 99 bytes, not"),
    "a file cut off within its first word": (cut(SHARD, 5), SHARD, "has 5 bytes, not"),
    "a file grown": (lambda p: os.truncate(p.shard(1), 1 << 20), SHARD, "has 1048576 bytes, not"),
    "a missing shard": (lambda p: p.shard(1).unlink(), SHARD, "is missing"),
    "missing checksums": (lambda p: (p.step / SUMS).unlink(), SHARD, "is missing"),
    "an empty manifest": (cut(MANIFEST_NAME, 0), MANIFEST_NAME, NO_DIGEST),
    "a manifest cut off": (cut(MANIFEST_NAME, 200), MANIFEST_NAME, NO_DIGEST),
    "a manifest without its last byte": (cut_last, MANIFEST_NAME, NO_DIGEST),
    "an edited manifest": (edited, MANIFEST_NAME, DIGEST),
    "a manifest with a key twice": (twice_in_manifest, MANIFEST_NAME, "'step' appears twice"),
    "a manifest nested without end": (deep, MANIFEST_NAME, "recursion"),
    "a tensor in two groups": (
        manifest(group(tensors=["model/w", "model/b", "model/w"])),
        MANIFEST_NAME,
        "'model/w' is in the groups twice",
    ),
    "one tensor 100,000 times": (
        manifest(group(tensors=["model/w"] * 100_000)),
        MANIFEST_NAME,
        "'model/w' is in the groups twice",
    ),
    "a negative size": (manifest(shape(-3)), MANIFEST_NAME, "has a negative size"),
    "a size that is NaN": (manifest(shape(float("nan"))), MANIFEST_NAME, "int was expected"),  # type: ignore[arg-type]
    "a size with a fraction": (manifest(shape(2.5)), MANIFEST_NAME, "int was expected"),  # type: ignore[arg-type]
    "more elements than can be": (manifest(shape(1 << 62, 1 << 62)), MANIFEST_NAME, "be counted"),
    "nothing, enormous": (manifest(shape(0, 1 << 62, 1 << 62)), MANIFEST_NAME, "be counted"),
    "100,000 dimensions": (manifest(shape(*[9] * 100_000)), MANIFEST_NAME, "100000 dimens"),
    "more than the files hold": (manifest(shape(1 << 40)), MANIFEST_NAME, "its files only"),
    "a world of 10^12": (manifest(layout(world_size=10**12)), MANIFEST_NAME, "3 files for a world"),
    "a rank of 10^12": (
        manifest(group(rule="whole", ranks=[0, 10**12])),
        MANIFEST_NAME,
        "a rank outside 0..2",
    ),
    "fewer bytes than none": (manifest(file(bytes=-1)), MANIFEST_NAME, "has -1 bytes"),
    "a path upwards": (
        manifest(file(name="../../etc/passwd")),
        MANIFEST_NAME,
        r"file 1 is '../../etc/passwd'",
    ),
    "an absolute path": (manifest(file(name="/etc/passwd")), MANIFEST_NAME, "file 1 is '/etc/pas"),
    "a path with a NUL": (manifest(file(name="a\0b")), MANIFEST_NAME, r"file 1 is 'a\\x00b'"),
    "a path by the token": (
        manifest(lambda v: v | {"token": "../../../x"}),
        MANIFEST_NAME,
        "token '../../../x'",
    ),
    "another rank's file": (
        manifest(file(name=draft_of(LAYOUT).file_name(0))),
        MANIFEST_NAME,
        "file 1 is 'rank-00000",
    ),
    "a manifest of the future": (
        manifest(lambda v: v | {"version": 99}),
        MANIFEST_NAME,
        "format version is 99",
    ),
}


@pytest.mark.parametrize("name", CASES | CHEAP)
def test_damage_is_found_named_and_passed_over(place: Place, name: str) -> None:
    harm, named, complaint = (CASES | CHEAP)[name]
    harm(place)
    storage = DiskStorage(place.step)
    error = catalog.step_error_text(storage)
    if name in CASES:
        assert error is None, "not seen at a cheap look"
        error = failed_load(place.step)
    assert error is not None and re.search(complaint, error), error
    assert "\n" not in error and error.isprintable() and len(error) < 1000
    faults = list(verify.find_corruption(storage))
    assert named in [fault.file for fault in faults], faults
    assert any(fault.file in error for fault in faults)
    if complaint.startswith("bytes 0 to "):
        size = size_of(storage, named)
        assert (0, size) in [(f.start, f.stop) for f in faults if f.file == named]
    directory = DiskDirectory(place.root)
    assert catalog.newest_good(directory) == (NEW if name in CASES else OLD)
    assert catalog.newest_good(directory, excluding={NEW}) == OLD
    assert catalog.step_error_text(DiskStorage(place.old)) is None


def failed_load(step: Path) -> str:
    with pytest.raises((CheckpointDamaged, StorageError)) as caught:
        checkpoint.load(step)
    return str(caught.value)


@pytest.mark.parametrize("name", CHEAP)
def test_what_a_cheap_look_finds_is_never_loaded(place: Place, name: str) -> None:
    CHEAP[name][0](place)
    failed_load(place.step)


def test_verify_names_every_bad_byte_range(place: Place, tmp_path: Path) -> None:
    """In files of several blocks."""
    long = simple_layout(world_size=2, numel=5 * BLOCK // 8)
    storage = write_step(tmp_path / "long", draft_of(long), elements(long.tensors))
    first, second = (storage.path / draft_of(long).file_name(rank) for rank in (0, 1))
    size = first.stat().st_size
    for position in (BLOCK + 5, 2 * BLOCK, 4 * BLOCK - 1):
        flip(first, position)
    os.truncate(second, 2 * BLOCK + 100)
    ranges = [(fault.file, fault.start, fault.stop) for fault in verify.find_corruption(storage)]
    assert ranges == [
        (first.name, BLOCK, 4 * BLOCK),
        (second.name, 2 * BLOCK, size_of(storage, second.name)),
    ]
    assert size > 4 * BLOCK
    assert f"has {2 * BLOCK + 100} bytes, not {size_of(storage, second.name)}" in failed_load(
        storage.path
    )


def size_of(storage: DiskStorage, name: str) -> int:
    files = catalog.read_manifest(storage).files
    return next(file.bytes for file in files if file.name == name)


def test_an_io_error_is_told_with_its_bytes_and_passed_over(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel gives it for a sector that cannot be read: of one file, past its header."""
    plain = os.preadv

    def preadv(fd: int, buffers: Any, offset: int, *flags: Any) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path == str(place.shard(1)) and len(buffers[0]) > 8:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return plain(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    text = failed_load(place.step)
    assert SHARD in text and "Input/output error (bytes 0 to " in text
    (fault,) = verify.find_corruption(DiskStorage(place.step))
    assert fault.file == SHARD and "Input/output error (bytes 0 to " in fault.reason
    assert catalog.newest_good(DiskDirectory(place.root), excluding={NEW}) == OLD
    assert len(checkpoint.load(place.old)) == len(LAYOUT.tensors)


def test_a_step_under_another_step_s_name_is_not_that_step(place: Place) -> None:
    later = place.root / step_directory(30)
    shutil.copytree(place.step, later)
    assert "manifest.json is of step 20" in failed_load(later)
    assert catalog.newest_good(DiskDirectory(place.root)) == NEW
    elsewhere = shutil.copytree(place.step, place.root / "the-best")
    assert len(checkpoint.load(elsewhere)) == len(LAYOUT.tensors)


def test_what_no_memory_can_hold_is_refused(place: Place) -> None:
    """A manifest that promises it, and tells of files that are as large."""

    def huge(value: dict[str, Any]) -> None:
        value["layout"]["tensors"]["model/b"]["shape"] = [1 << 56]
        for entry in value["files"]:
            entry["bytes"] = 1 << 60

    place.edit_manifest(huge)
    assert catalog.step_error_text(DiskStorage(place.step)) is not None
    with pytest.raises(CheckpointDamaged, match=f"has .* bytes, not {1 << 60}"):
        checkpoint.load(place.step)


def test_a_step_without_a_manifest_is_none(place: Place) -> None:
    (place.step / MANIFEST_NAME).unlink()
    assert "never committed" in failed_load(place.step)
    assert [fault.file for fault in verify.find_corruption(DiskStorage(place.step))] == [
        MANIFEST_NAME
    ]
    assert [info.step for info in catalog.steps(DiskDirectory(place.root))] == [OLD]
    assert len(checkpoint.load(place.root)) == len(LAYOUT.tensors)


def test_a_flipped_bit_anywhere_in_a_manifest_is_found(place: Place) -> None:
    path = place.step / MANIFEST_NAME
    for position in range(path.stat().st_size):
        flip(path, position)
        with pytest.raises(CheckpointDamaged, match=MANIFEST_NAME):
            catalog.read_manifest(DiskStorage(place.step))
        flip(path, position)
    catalog.read_manifest(DiskStorage(place.step))
