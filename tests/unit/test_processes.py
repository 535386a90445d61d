"""What is read and ended of this machine's processes."""

from __future__ import annotations

import mmap
import subprocess
import sys
import textwrap
from pathlib import Path

from elasticzero.processes import Ram, private_bytes, ram


def test_a_container_limits_memory(tmp_path: Path) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal:  100 kB\nMemAvailable:   64 kB\n")
    assert ram(memory, tmp_path) == Ram(65536, 102400)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert ram(memory, tmp_path) == Ram(65536, 102400)
    (tmp_path / "memory.max").write_text("3000\n")
    assert ram(memory, tmp_path) == Ram(2000, 3000)
    (tmp_path / "memory.max").write_text("900\n")
    assert ram(memory, tmp_path) == Ram(0, 900)


def test_files_that_the_kernel_can_drop_take_no_memory(tmp_path: Path) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal:  100 kB\nMemAvailable:   64 kB\n")
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("2900\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 2000\nactive_file 400\n")
    assert ram(memory, tmp_path) == Ram(2100, 3000)


def test_memory_of_its_own_is_counted() -> None:
    before = private_bytes()
    with mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.write(b"x" * len(held))
        assert private_bytes() - before > (28 << 20)


def test_strays_end_and_spared_children_live() -> None:
    """Also those below a spared child; what has left its parent is a stray."""
    code = """
        import os, subprocess, sys, time
        from elasticzero.processes import adopt_orphans, children_of, is_alive, kill_strays
        adopt_orphans()
        two = "import subprocess, time; subprocess.Popen(['sleep', '300']); time.sleep(300)"
        spared, stray = (subprocess.Popen([sys.executable, "-c", two]) for _ in range(2))
        leaves = "import subprocess; subprocess.Popen(['sleep', '300'], start_new_session=True)"
        subprocess.run([sys.executable, "-c", leaves], check=True)
        while not (children_of(spared.pid) and children_of(stray.pid)):
            time.sleep(0.01)
        below = children_of(spared.pid)
        assert len(children_of(os.getpid())) == 3
        assert kill_strays(30.0, {spared.pid})
        assert children_of(os.getpid()) == [spared.pid]
        assert children_of(spared.pid) == below and all(map(is_alive, below))
        spared.kill()
        os.kill(below[0], 9)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    subprocess.run(command, check=True, timeout=100)
