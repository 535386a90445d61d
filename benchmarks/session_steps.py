"""Measures a training step as users pay for it: launcher, session and defaults, beside torch's.

`training.py` calls this. A job of one worker on each of two nodes runs `training_session.py`.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ratio import Ratio
from recovery_trial import trial, wait_for

from elasticzero.launcher.store.etcd.server import EtcdServer

LIMIT_S = 1800.0
MOST = 1.02
"""Greatest ratio wanted."""
MAX_NORM = 1.0
"""The norm of the gradient is limited to this where it is clipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSteps:
    """Holds seconds a step of neighbouring turns, in the same processes."""

    strategy: str
    reference: str
    clipped: bool
    """True: the norm of the gradient is limited, in both."""
    session_s: tuple[float, ...]
    reference_s: tuple[float, ...]

    @property
    def ratio(self) -> Ratio:
        """Returns the time with a session in times of the reference's."""
        return Ratio.of(list(self.session_s), list(self.reference_s))


def measure_session(
    strategy: str, width: int, steps: int, pairs: int, clipped: bool
) -> SessionSteps:
    """Returns the time of a step by turns, in a job of this strategy.

    Args:
        strategy: Its name.
        width: Width of the model's blocks.
        steps: Steps of one turn.
        pairs: Turns of each.
        clipped: True: the norm of the gradient is limited, in both.

    Raises:
        SystemExit: The job failed; its logs are left, and the message has their place.
    """
    runs = Path(tempfile.mkdtemp(prefix="elasticzero-steps-"))
    reference, out = "FSDP2" if strategy == "zero3" else "DDP", runs / "seconds.json"
    script = ["training_session.py", str(out), "--width", str(width), "--reference", reference]
    script += ["--pairs", str(pairs), "--steps", str(steps)]
    script += ["--max-norm", str(MAX_NORM)] if clipped else []
    with EtcdServer() as etcd, trial(etcd.endpoint, runs, ["--strategy", strategy], script) as t:

        def ended() -> bool | None:
            t.look()
            return not t.cluster.running() or None

        wait_for("the end of the training", ended, LIMIT_S)
    if not out.exists():
        raise SystemExit(f"error: {t.cluster.log_dir / t.cluster.job} says why {strategy} failed")
    turns = json.loads(out.read_text())
    shutil.rmtree(runs)
    return SessionSteps(
        strategy=strategy,
        reference=reference,
        clipped=clipped,
        session_s=tuple(turns["session"]),
        reference_s=tuple(turns["reference"]),
    )


def session_rows(measured: Iterable[SessionSteps]) -> list[list[str]]:
    """Returns a row for each: the strategy, both times, their ratio and the verdict."""
    rows = []
    for one in measured:
        ratio = one.ratio
        name = f"{one.strategy}, clipped" if one.clipped else one.strategy
        times = [statistics.median(s) * 1e3 for s in (one.session_s, one.reference_s)]
        row = [name, f"{times[0]:.0f}", one.reference, f"{times[1]:.0f}", f"{ratio.median:.3f}"]
        row += [f"{ratio.low:.3f} to {ratio.high:.3f}", f"≤ {MOST:g}"]
        rows.append([*row, "met" if ratio.low <= MOST else "NOT met"])
    return rows
