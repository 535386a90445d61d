"""Runs `examples/gpt.py` on nodes of this machine, and reads what it has learnt from its logs."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "gpt.py"
SIZE = ("--layers", "2", "--context", "64", "--global-batch", "16")
RESULT = "validation loss "
_STEP = re.compile(r"step (\d+) loss ([\d.]+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleRun:
    """Holds what one run has learnt."""

    loss: float
    """Mean loss of validation samples after the last step."""
    curve: tuple[tuple[int, float], ...]
    """Steps of one node's first worker, each with the loss of its own samples."""


def run_example(
    cluster: Sequence[str], seed: int, steps: int, *script: str, limit_s: float = 600.0
) -> ExampleRun:
    """Returns what one run of the example has learnt.

    Args:
        cluster: Options of `elasticzero local`.
        seed: That of weights and of the order of samples.
        steps: Number of steps.
        script: Further options of the example.
        limit_s: Most seconds that it may take.

    Raises:
        SystemExit: The run failed.
    """
    with tempfile.TemporaryDirectory(prefix="elasticzero-loss-") as logs:
        command = [sys.executable, "-m", "elasticzero.cli", "local", *cluster, "--log-dir", logs]
        command += [str(SCRIPT), *SIZE, "--steps", str(steps), "--seed", str(seed), *script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
        texts = [
            path.read_text(errors="replace").splitlines()
            for path in sorted(Path(logs).rglob("*.log"))
        ]
    curves = [
        tuple((int(m[1]), float(m[2])) for line in lines if (m := _STEP.match(line)))
        for lines in texts
    ]
    ends = [line for lines in texts for line in lines if line.startswith(RESULT)]
    if done.returncode or not ends:
        raise SystemExit(f"error: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    loss = float(ends[-1].removeprefix(RESULT))
    return ExampleRun(loss=loss, curve=next(curve for curve in curves if curve))
