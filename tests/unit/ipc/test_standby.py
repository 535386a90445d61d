"""What a process that stands by does with its output, its priority and a GPU."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elasticzero.ipc import standby
from elasticzero.ipc.standby import GpuTaken, make_gpu_context


@pytest.mark.parametrize("separate", [False, True])
def test_its_output_goes_to_the_worker_s_logs(separate: bool, tmp_path: Path) -> None:
    """What was printed before, and what follows, also by a child, without Python's buffers, and by
    a copy of the descriptor; what the script has redirected stays so."""
    code = f"""
        import os, subprocess, sys
        from elasticzero.ipc.standby import take_logs
        output = os.memfd_create("output")
        os.dup2(output, 2)
        os.dup2(os.memfd_create("stdout") if {separate} else output, 1)
        names = ["err", "out"] if {separate} else ["err"]
        logs = [os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT) for name in names]
        outputs = [os.dup(number) for number in (2, 1)[:len(names)]]
        print("out 1", flush=True)
        print("err 1", file=sys.stderr, flush=True)
        copy = os.dup(2)
        print("out 2")
        take_logs(outputs, logs)
        print("out 3", flush=True)
        subprocess.run(["sh", "-c", "echo err 2 >&2"], check=True)
        os.write(copy, b"err 3\\n")
    """
    (tmp_path / "err").write_text("of the worker before\n")
    command = [sys.executable, "-c", textwrap.dedent(code)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=100)
    before, text = "of the worker before\n", (tmp_path / "err").read_text()
    if separate:
        assert text == before + "err 1\nerr 2\nerr 3\n"
        assert (tmp_path / "out").read_text() == "out 1\nout 2\nout 3\n"
    else:
        assert text == before + "out 1\nerr 1\nout 2\nout 3\nerr 2\nerr 3\n"


def test_what_a_script_has_redirected_stays(tmp_path: Path) -> None:
    code = """
        import os
        from elasticzero.ipc.standby import take_logs
        output = os.memfd_create("output")
        for number in (1, 2):
            os.dup2(output, number)
        kept = [os.dup(2)]
        os.write(1, b"before\\n")
        os.dup2(os.open("mine", os.O_WRONLY | os.O_CREAT), 1)
        take_logs(kept, [os.open("err", os.O_WRONLY | os.O_APPEND | os.O_CREAT)])
        os.write(1, b"to mine\\n")
        os.write(2, b"to the log\\n")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=100)
    assert (tmp_path / "mine").read_text() == "to mine\n"
    assert (tmp_path / "err").read_text() == "before\nto the log\n"


def test_it_runs_where_cores_rest_and_then_like_others() -> None:
    code = """
        import os, threading
        from elasticzero.ipc.standby import run_like_others, run_when_nothing_else_does
        run_when_nothing_else_does()
        inherited, held = [], threading.Event()
        thread = threading.Thread(target=lambda: held.wait(60))
        thread.start()
        def policies():
            threads = os.listdir("/proc/self/task")
            return {os.sched_getscheduler(int(number)) for number in threads}
        print(policies() <= {os.SCHED_IDLE, os.SCHED_OTHER}, len(policies()))
        run_like_others()
        print(policies() == {os.SCHED_OTHER})
        held.set()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, check=True, timeout=100, capture_output=True, text=True)
    assert done.stdout == "True 1\nTrue\n"


class Gpu:
    """Stands for torch.cuda where one GPU is seen, and for CUDA's own library."""

    def __init__(self, *, free: int, mode: int) -> None:
        self.free, self.mode, self.contexts = free, mode, 0
        device_count, is_available = (lambda: 1), (lambda: True)
        self.cuda = SimpleNamespace(
            is_available=is_available,
            device_count=device_count,
            synchronize=lambda index: None,
            mem_get_info=lambda index: (self.free, 1000),
        )

    def zeros(self, count: int, *, device: str) -> None:
        assert (count, device) == (1, "cuda:0")
        self.contexts += 1

    def cuDeviceGetAttribute(self, place: Any, attribute: int, index: int) -> None:
        assert (attribute, index) == (20, 0)
        place._obj.value = self.mode

    def cuInit(self, flags: int) -> None:
        assert flags == 0


@pytest.mark.parametrize(
    ("free", "mode", "why"),
    [(500, 0, None), (40, 0, "has only 0 MiB of memory left"), (500, 3, "mode is exclusive")],
)
def test_a_context_is_made_where_the_gpu_has_room(
    free: int, mode: int, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(free=free, mode=mode)
    monkeypatch.setattr(standby, "torch", gpu)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: gpu)
    if why is None:
        make_gpu_context(0)
        assert gpu.contexts == 1
        make_gpu_context(1)  # which it does not see
        assert gpu.contexts == 1
    else:
        with pytest.raises(GpuTaken, match=why):
            make_gpu_context(0)
        assert gpu.contexts == (mode == 0)


def test_without_a_gpu_there_is_no_context() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    make_gpu_context(0)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") is None or not torch.cuda.is_initialized()
