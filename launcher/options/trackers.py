"""Parses `--log-to`: to which experiment trackers a job's scalars go. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from elasticzero.errors import UserError

PLACES = {
    "tensorboard": "runs",
    "wandb": "wandb",
    "mlflow": "",
}
"""Known trackers, each with the place where it writes unless one is given; empty: the tracker's own
settings choose it. A tracker's name is also that of its package, and of the extra that installs
it."""


@dataclass(frozen=True, slots=True)
class TrackerTarget:
    """Says where scalars go."""

    kind: str
    """A key of `PLACES`."""
    place: str
    """TensorBoard, W&B: a directory. MLflow: a tracking URI; empty: that of its environment."""


def tracker_targets(flag: str, text: str | None) -> tuple[TrackerTarget, ...]:
    """Parses a list such as tensorboard:DIR,mlflow; raises `UserError` for an unknown tracker."""
    targets: dict[str, TrackerTarget] = {}
    for part in (text or "").split(","):
        kind, _, place = part.strip().partition(":")
        if not part.strip():
            continue
        if kind not in PLACES:
            names = ", ".join(PLACES)
            raise UserError(
                f"{flag} {text}: {kind!r} is no tracker; a list of {names} is expected, each with "
                "its place after a colon, as in tensorboard:runs,mlflow"
            )
        if kind in targets:
            raise UserError(f"{flag} {text}: {kind} is given twice; give it once")
        targets[kind] = TrackerTarget(kind, place or PLACES[kind])
    return tuple(targets.values())
