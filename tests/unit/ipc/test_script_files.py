"""What a script does with files before its process has a rank, and what of them has changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUNS = """
import os, shutil, subprocess, sys, tempfile
from pathlib import Path
from elasticzero.ipc.script_files import ScriptFiles

def report(act):
    print(act.replace(os.getcwd() + "/", ""), flush=True)
    os._exit(7)

files = ScriptFiles(report)
exec(sys.argv[1])
files.close()
exec(sys.argv[2])
changed = (files.changed() or ("",))[0]
print(f"changed: {changed.replace(os.getcwd() + '/', '')}")
"""
TAKES = {
    "os.remove('kept')": "removes kept",
    "Path('kept').unlink()": "removes kept",
    "shutil.rmtree('folder')": "removes folder",
    "os.rmdir('empty')": "removes empty",
    "open('kept', 'w')": "empties kept",
    "Path('kept').write_text('x')": "empties kept",
    "os.truncate('kept', 0)": "shortens kept",
    "os.rename('kept', 'other')": "moves kept",
    "open('mine', 'w').close(); os.replace('mine', 'kept')": "replaces kept",
    "shutil.move('folder', 'elsewhere')": "moves folder",
    "os.remove('inside', dir_fd=os.open('folder', os.O_RDONLY))": "removes folder/inside",
}
LEAVES = (
    "open('kept').read(); Path('kept').exists(); os.listdir('folder')",
    "open('kept', 'a').write('more')",
    "open('new', 'w').write('x'); open('new', 'w').write('y'); os.remove('new')",
    "os.mkdir('made'); open('made/a', 'w').write('x'); shutil.rmtree('made')",
    "os.makedirs('a/b/c', exist_ok=True); open('a/b/c/d', 'w').write('x'); os.remove('a/b/c/d')",
    "made = tempfile.TemporaryDirectory(); open(made.name + '/kept', 'w'); made.cleanup()",
    "tempfile.NamedTemporaryFile().close(); tempfile.TemporaryDirectory().cleanup()",
    "import other",
    "os.close(os.open('baton', os.O_CREAT | os.O_EXCL)); os.remove('baton')",
    "sys.modules['odd'] = type('Odd', (), {'__getattr__': lambda self, name: 1 / 0})()",
    "open('a.lock', 'w').write('x'); open('a.lock', 'w')",
    "subprocess.run(['true'], stdout=subprocess.DEVNULL)",
)
CHANGES = {
    ("open('kept').read()", "open('kept', 'a').write('x')"): "kept",
    ("Path('kept').read_bytes()", "os.remove('kept')"): "kept",
    ("import other", "open('other.py', 'w').write('VALUE = 2')"): "other.py",
    ("open('kept').read()", "open('folder/inside', 'w').write('longer')"): "",
    ("open('kept').read()", "open('kept').read()"): "",
    ("open('new', 'w').write('x')", "open('new', 'a').write('x')"): "",
}


def run(folder: Path, before: str, after: str = "") -> str:
    (folder / "kept").write_text("of the training")
    (folder / "other.py").write_text("VALUE = 1")
    for name in ("folder", "empty"):
        (folder / name).mkdir()
    (folder / "folder" / "inside").write_text("x")
    command = [sys.executable, "-c", RUNS, before, after]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode in (0, 7), done.stderr
    return done.stdout


@pytest.mark.parametrize("act", TAKES)
def test_what_takes_a_file_from_others_is_told_before_it_happens(act: str, tmp_path: Path) -> None:
    assert run(tmp_path, act) == f"{TAKES[act]}\n"
    assert (tmp_path / "kept").read_text() == "of the training"
    assert (tmp_path / "folder" / "inside").exists() and (tmp_path / "empty").exists()


@pytest.mark.parametrize("act", LEAVES)
def test_what_takes_nothing_goes_on(act: str, tmp_path: Path) -> None:
    assert run(tmp_path, act) == "changed: \n"


@pytest.mark.parametrize(("read", "change"), CHANGES)
def test_a_change_of_what_was_read_is_seen(read: str, change: str, tmp_path: Path) -> None:
    assert run(tmp_path, read, change) == f"changed: {CHANGES[read, change]}\n"
