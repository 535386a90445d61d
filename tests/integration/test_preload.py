"""Workers find modules imported that the user names, and none after which nothing may fork."""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from elasticzero.errors import UserError
from elasticzero.launcher.secrets import VARIABLES
from elasticzero.launcher.workers.forking.client import ForkServer
from tests.integration.clusters import elasticzero
from tests.integration.test_local import local
from tests.integration.test_starts import TRAINS
from tests.integration.test_workers import Play
from tests.support.deadlines import patience

COUNTS = """
import os
with open({folder!r} + "/imports", "a") as file:
    file.write(f"{{os.getpid()}}\\n")
"""
THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
SHOWS = (
    "import sys\nprint(sorted(n for n in ('counts', 'threaded', 'broken') if n in sys.modules))\n"
    "print(sys.path[0])\n"
)
COUNTED = "import counts\n" + TRAINS.replace("epochs=1", "epochs=20")


def write_modules(folder: Path, **modules: str) -> None:
    for name, code in modules.items():
        (folder / f"{name}.py").write_text(code)


def imports(folder: Path) -> Counter[str]:
    """How often each process has imported `counts`."""
    return Counter((folder / "imports").read_text().split())


def test_what_is_named_is_imported_once_for_all_workers(tmp_path: Path) -> None:
    """From the script's directory, which is not left on the path."""
    write_modules(tmp_path, counts=COUNTS.format(folder=str(tmp_path)))
    with closing(ForkServer(("json",), ("counts", "json"), str(tmp_path))) as server:
        assert server.wait_until_ready() == ()
        play = Play(server, tmp_path, SHOWS + "import counts\n", workers=2)
        assert play.wait_for_end() == [0, 0]
        assert [play.log(rank) for rank in (0, 1)] == [f"['counts']\n{tmp_path}\n"] * 2
    assert [*imports(tmp_path).values()] == [1]


def test_what_starts_threads_or_fails_is_left_to_the_workers(tmp_path: Path) -> None:
    """And the server is single-threaded again, with all else that is named."""
    broken = "raise RuntimeError('no license')\n"
    counts = COUNTS.format(folder=str(tmp_path))
    write_modules(tmp_path, broken=broken, threaded=THREADED, counts=counts)
    write_modules(tmp_path, both=THREADED + broken)
    named = ("broken", "threaded", "both", "counts")
    with closing(ForkServer((), named, str(tmp_path))) as server:
        assert server.wait_until_ready() == (
            "broken cannot be imported: RuntimeError: no license",
            "importing threaded starts threads (1), which a worker would not have",
            "both cannot be imported: RuntimeError: no license",
        )
        play = Play(server, tmp_path, SHOWS)
        assert play.wait_for_end() == [0]
        assert play.log() == f"['counts']\n{tmp_path}\n"


def test_a_module_that_ends_the_server_while_it_imports_ends_no_agent(tmp_path: Path) -> None:
    write_modules(tmp_path, leaves="raise SystemExit(3)\n")
    with closing(ForkServer((), ("leaves",), str(tmp_path))) as server:
        assert server.wait_until_ready() == ("leaves cannot be imported: SystemExit: 3",)
        assert Play(server, tmp_path, SHOWS).wait_for_end() == [0]


def test_a_module_that_ends_the_process_is_named(tmp_path: Path) -> None:
    write_modules(tmp_path, dies="import os\nos._exit(3)\n")
    ended = pytest.raises(UserError, match="--preload json,dies: the process that imports")
    with closing(ForkServer((), ("json", "dies"), str(tmp_path))) as server, ended:
        server.wait_until_ready()


def test_what_a_module_sets_is_set_in_workers_but_for_their_ranks(tmp_path: Path) -> None:
    """On the path, where it stands before the script's directory, and in the environment."""
    (extra := tmp_path / "extra").mkdir()
    sets = f"import os, sys\nsys.path.insert(0, {str(extra)!r})\n"
    sets += "os.environ.update(FROM_MODULE='1', MINE='changed', RANK='9')\n"
    write_modules(tmp_path, sets=sets)
    shows = "import os, sys\nprint(sys.path[:2], *map(os.environ.get, ('FROM_MODULE', 'RANK')))\n"
    with closing(ForkServer((), ("sets",), str(tmp_path))) as server:
        server.wait_until_ready()
        play = Play(server, tmp_path, shows)
        assert play.wait_for_end() == [0]
        assert play.log() == f"{[str(extra), str(tmp_path)]} 1 0\n"


def test_modules_that_are_preloaded_see_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "hidden")
    write_modules(
        tmp_path,
        looks=f"import os\nassert not {{*os.environ}} & {{{', '.join(map(repr, VARIABLES))}}}\n",
    )
    with closing(ForkServer((), ("looks",), str(tmp_path))) as server:
        assert server.wait_until_ready() == ()


def test_a_server_that_began_again_dies_with_its_agent(tmp_path: Path) -> None:
    write_modules(tmp_path, threaded=THREADED)
    server = ForkServer((), ("threaded",), str(tmp_path))
    server.wait_until_ready()
    play = Play(server, tmp_path, "import time\ntime.sleep(600)\n")
    worker = play.group.workers[0].pid
    server.close()
    play.group.fail_all("the fork server was closed")
    deadline_s = time.monotonic() + patience(30.0)
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{worker}")


@pytest.mark.timeout(180)
def test_a_worker_that_takes_the_place_of_a_killed_one_imports_nothing(
    tmp_path: Path, job: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(COUNTED)
    write_modules(tmp_path, counts=COUNTS.format(folder=str(tmp_path)))
    options = ["--nodes", "2", "--preload", "counts", "--fault", "kill-worker@10"]
    output = local(job, tmp_path / "logs", *options, str(script))
    assert "2 generations" in output, output
    assert sorted(imports(tmp_path).values()) == [1, 1], "one for each node's server"


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("transfomers", "there is no module 'transfomers' beside the script or on Python's path"),
        ("json,a-b", "'a-b' is no module; a list of modules as in `import` is expected"),
    ],
)
def test_a_name_that_is_no_module_is_an_error(tmp_path: Path, named: str, expected: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(COUNTED)
    ended = subprocess.run(
        elasticzero("local", "--nodes", "1", "--preload", named, str(script)),
        capture_output=True,
        text=True,
        timeout=patience(60.0),
        check=False,
    )
    assert ended.returncode == 64
    assert f"error: --preload {named}: {expected}" in ended.stderr
