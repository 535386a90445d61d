"""Processes that are forked from a warm one are what the same commands would be without it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elasticzero.processes import bound_to_this_process, is_alive
from tests.support import warm
from tests.support.deadlines import patience

IS_WARM = "import sys; sys.exit(0 if 'torch' in sys.modules else 1)"


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)


@pytest.mark.parametrize("mark", ["warm", pytest.param("cold", marks=pytest.mark.cold)])
def test_what_a_command_prints_and_returns(mark: str, tmp_path: Path) -> None:
    """Code, a script and a module; with arguments, input, variables, a directory and an error."""
    if os.environ.get("TESTS_COLD") != "1":
        assert python("-c", IS_WARM).returncode == (mark == "cold")
    (tmp_path / "beside.py").write_text("NAME = __name__\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import beside, os, sys\n"
        "print(beside.NAME, __name__, __file__, sys.argv[1:], os.environ['A'], os.getcwd())\n"
        "print(input(), file=sys.stderr)\n"
        "sys.exit(7)\n"
    )
    place: dict[str, Any] = {"cwd": tmp_path, "env": os.environ | {"A": "b"}, "input": "said\n"}
    told = f"beside __main__ {{}} ['-x', 'y'] b {tmp_path}\n"
    for arguments in ([str(script)], ["-m", "script"]):
        done = python(*arguments, "-x", "y", **place)
        assert (done.returncode, done.stderr) == (7, "said\n")
        assert done.stdout == told.format(script)
    done = python("-c", "import sys; print(sys.argv); 1 / 0", "z")
    assert (done.returncode, done.stdout) == (1, "['-c', 'z']\n")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "warm_server" not in done.stderr
    done = python("-m", "no_such_module")
    assert done.returncode == 1 and "No module named no_such_module" in done.stderr
    assert python("-c", "import sys; sys.exit('a reason')").stderr == "a reason\n"


def test_processes_stay_warm_once_torch_has_set_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import of its compiler sets it for good, in whichever test comes first."""
    if os.environ.get("TESTS_COLD") != "1":
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/nowhere")
        assert python("-c", IS_WARM).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_process(number: signal.Signals) -> None:
    """Short sleeps: Python handles a signal that comes just before a sleep only after it."""
    code = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.01)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        assert process.poll() is None and is_alive(process.pid)
        process.send_signal(number)
        assert process.wait(30) == -number
    assert not is_alive(process.pid)


def test_a_time_out_is_raised_and_the_process_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        python("-c", "import time; time.sleep(600)", timeout=0.2)


def test_a_bound_process_ends_with_what_it_is_bound_to() -> None:
    """Agents are bound to the test process, and so to the server that it starts."""
    server = warm.Server()
    warm.install(server)
    command = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)"]
    with subprocess.Popen(bound_to_this_process(command), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        server.close()
        assert process.wait(30) == -signal.SIGKILL
    deadline_s = time.monotonic() + patience(30.0)
    while is_alive(process.pid):  # it is killed when the server's last thread is gone
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
