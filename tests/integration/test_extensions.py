"""A real agent whose extensions fail: training goes on, and what they serve is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.integration.clusters import REGRESSION

PROGRAM = """
import sys

from elasticzero.launcher.agent.extensions.base import AgentExtension
from elasticzero.launcher.cli.commands import add_run
from elasticzero.launcher.options.parser import Parser


class BrokenTurn(AgentExtension):
    def turn(self, view, token):
        raise RuntimeError("a bug in each turn")


class BrokenMessages(AgentExtension):
    def received(self, rank, message):
        raise KeyError("a bug in each message")

    def close(self, outcome):
        print("closed as", outcome)
        raise OSError("a bug at the end")


parser = Parser(prog="elasticzero run", allow_abbrev=False)
extensions = lambda: (lambda context: BrokenTurn(), lambda context: BrokenMessages())
add_run(parser, extensions, completion=lambda shell: 0)
args = parser.parse_args(sys.argv[1:])
sys.exit(args.run_command(args))
"""


def test_a_job_ends_well_beside_extensions_that_fail(tmp_path: Path) -> None:
    arguments = ["--nproc-per-node=2", "--preemption=none", "--http-port=0"]
    arguments += ["--log-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments, str(REGRESSION), "--epochs", "1"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert told.count("BrokenTurn failed; the agent goes on without it") == 1, told
    assert told.count("BrokenMessages failed; the agent goes on without it") == 2, told
    assert "closed as finished" in told
