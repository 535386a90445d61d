"""Directories of shared memory: one living owner each, and nothing left of the dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elasticzero.errors import OperatorError, UserError
from elasticzero.launcher.snapshots.shared_memory import (
    PREFIX,
    OwnedDirectory,
    is_owned,
    remove_orphan,
    remove_orphans,
)

OWNER = """
import sys, time
from pathlib import Path
from elasticzero.launcher.snapshots.shared_memory import OwnedDirectory
claim = OwnedDirectory(Path(sys.argv[1]))
(claim.root / "slots").mkdir()
print("claimed", flush=True)
time.sleep(60)
"""

SWEEPER = """
import sys
from pathlib import Path
from elasticzero.launcher.snapshots.shared_memory import remove_orphans
print("sweeping", flush=True)
while True:
    remove_orphans(Path(sys.argv[1]))
"""


def test_memory_of_killed_owners_is_swept_that_of_others_kept(
    tmp_path: Path,
) -> None:
    owners = []
    for name in ("dead", "alive"):
        root = str(tmp_path / f"{PREFIX}{name}")
        owner = subprocess.Popen([sys.executable, "-c", OWNER, root], stdout=subprocess.PIPE)
        assert owner.stdout is not None and owner.stdout.readline() == b"claimed\n"
        owners.append(owner)
    (tmp_path / "other-program").mkdir()
    owners[0].send_signal(signal.SIGKILL)
    owners[0].wait()
    try:
        assert remove_orphans(tmp_path) == [tmp_path / f"{PREFIX}dead"]
        assert sorted(os.listdir(tmp_path)) == [f"{PREFIX}alive", "other-program"]
        with pytest.raises(UserError, match="give this node another name"):
            OwnedDirectory(tmp_path / f"{PREFIX}alive")
        assert is_owned(tmp_path / f"{PREFIX}alive")
        assert not remove_orphan(tmp_path / f"{PREFIX}alive")
        assert not is_owned(tmp_path / f"{PREFIX}dead")
    finally:
        owners[1].kill()
        for owner in owners:
            owner.wait()
            assert owner.stdout is not None
            owner.stdout.close()
    OwnedDirectory(tmp_path / f"{PREFIX}alive").release()
    assert os.listdir(tmp_path) == ["other-program"]


def test_agents_that_start_at_once_sweep_and_claim(tmp_path: Path) -> None:
    """An agent ended in a traceback where another swept the directory it had just made."""
    command = [sys.executable, "-c", SWEEPER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as sweeper:
        try:
            assert sweeper.stdout is not None and sweeper.stdout.readline() == b"sweeping\n"
            for turn in range(300):
                claim = OwnedDirectory(tmp_path / f"{PREFIX}{turn}")
                assert claim.root.is_dir()
                claim.release()
        finally:
            sweeper.kill()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A directory of somebody's, which names in shared memory lead to."""
    place = tmp_path / "other"
    (place / "below").mkdir(parents=True)
    (place / "below" / "thesis").write_bytes(b"x")
    return place


def test_links_in_shared_memory_are_not_followed(tmp_path: Path, other: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    (memory / f"{PREFIX}link").symlink_to(other)
    (memory / f"{PREFIX}nowhere").symlink_to(tmp_path / "nowhere")
    (memory / f"{PREFIX}file").write_bytes(b"x")
    dead = memory / f"{PREFIX}dead"
    dead.mkdir()
    (dead / "slots").symlink_to(other)
    lock = memory / f"{PREFIX}lock"
    lock.mkdir()
    (lock / "owner").symlink_to(other / "made")
    before = contents(other)
    assert remove_orphans(memory) == [dead]
    assert contents(other) == before
    names = {f"{PREFIX}{name}" for name in ("link", "nowhere", "file", "lock")}
    assert set(os.listdir(memory)) == names
    for name in names - {f"{PREFIX}lock"}:
        with pytest.raises(OperatorError, match="is not a directory of this user: remove it"):
            OwnedDirectory(memory / name)
    assert contents(other) == before
    assert not (tmp_path / "nowhere").exists()


def test_a_directory_that_a_link_has_replaced_stays(tmp_path: Path, other: Path) -> None:
    claim = OwnedDirectory(tmp_path / f"{PREFIX}mine")
    claim.root.rename(tmp_path / "elsewhere")
    claim.root.symlink_to(other)
    before = contents(other)
    claim.release()
    assert contents(other) == before
    assert (tmp_path / "elsewhere" / "owner").exists()
