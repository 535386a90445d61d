"""The commands of docs/quickstart.md, as a newcomer types them.

`make integrations` runs these: they install the package anew, which fetches torch.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "quickstart.md"
pytestmark = [pytest.mark.integrations, pytest.mark.timeout(900)]


def commands(page: Path) -> str:
    """The page's shell commands, which clone this repository in place of the public one."""
    text = "\n".join(re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
    clones = re.compile(r"git clone https://\S+/(\w+)\n")
    assert clones.match(text)
    return clones.sub(rf"git clone '{ROOT}' \1\n", text, count=1)


def run(script: str, directory: Path) -> str:
    """What a fresh shell prints of these commands; the first that fails ends them."""
    hidden = ("VIRTUAL_ENV", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=directory,
        env=environment | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_commands_of_the_quick_start_do_what_it_says(tmp_path: Path) -> None:
    shown = run(commands(PAGE), tmp_path)
    assert "finished after step 939" in shown
    assert "SIGKILL to every process of node-" in shown
    assert "done: 939 steps, 2 generations" in shown
    assert re.search(r"^ *939\b", shown, re.MULTILINE), shown
    clone = tmp_path / "elasticzero"
    assert len(list(clone.glob("resharded/step-*939/*.safetensors"))) == 8
    assert "zero3" in shown.partition("--world-size")[0]
