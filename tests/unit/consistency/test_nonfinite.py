"""What a job that NaN has ended says: where it was found, and what to do next."""

from __future__ import annotations

import pytest

from elasticzero.consistency.nonfinite import Findings
from elasticzero.errors import NotFinite

LOSS = Findings(step=5, losses=(0,), gradients=(), state=())


@pytest.mark.parametrize(
    ("findings", "places"),
    [
        (LOSS, "in the loss on rank 0"),
        (
            Findings(step=5, losses=(0, 2), gradients=(("w", 1),), state=()),
            "in the losses on ranks 0, 2 and in the gradient of 'w' on rank 1",
        ),
        (
            Findings(step=5, losses=(), gradients=(), state=()),
            "in the norm of the whole gradient (its elements are finite)",
        ),
    ],
)
def test_a_bad_batch_is_told_with_the_options_that_leave_it_out(
    findings: Findings, places: str
) -> None:
    assert findings.sentence() == f"step 5 was not applied: NaN or infinity {places}"
    advice = findings.advice()
    assert advice.startswith("--on-nonfinite skip leaves such batches out") and "rollback" in advice
    assert advice.endswith(NotFinite.ADVICE)


def test_a_broken_state_is_not_mended_by_leaving_batches_out() -> None:
    findings = Findings(step=5, losses=(0,), gradients=(), state=(("w", 0),))
    assert "the state of step 4 already holds NaN or infinity in 'w'" in findings.sentence()
    assert findings.advice() == f"an earlier step has broken the state: {NotFinite.ADVICE}"
