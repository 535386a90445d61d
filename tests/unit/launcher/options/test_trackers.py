"""`--log-to` names trackers and their places; mistakes are said with what is expected."""

from __future__ import annotations

import pytest

from elasticzero.errors import UserError
from elasticzero.launcher.options.trackers import TrackerTarget, tracker_targets
from elasticzero.launcher.options.validation import check_trackers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, []),
        ("", []),
        ("tensorboard", [("tensorboard", "runs")]),
        (
            "tensorboard:/shared/curves, wandb",
            [("tensorboard", "/shared/curves"), ("wandb", "wandb")],
        ),
        ("mlflow", [("mlflow", "")]),
        ("mlflow:http://host:5000", [("mlflow", "http://host:5000")]),
    ],
)
def test_a_list_of_trackers(text: str | None, expected: list[tuple[str, str]]) -> None:
    assert tracker_targets("--log-to", text) == tuple(TrackerTarget(*fields) for fields in expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensorbord", "'tensorbord' is no tracker; a list of tensorboard, wandb, mlflow"),
        ("/shared/curves", "is no tracker"),
        ("wandb,wandb:x", "wandb is given twice"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tracker_targets("--log-to", text)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'elasticzero\[wandb\]', on every node"):
        check_trackers([TrackerTarget("wandb", "wandb")])
