"""What a person is told of a cluster on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from elasticzero.checkpoint.format.names import step_directory
from elasticzero.errors import ExitCode
from elasticzero.ipc.assignment import Tier
from elasticzero.launcher.observability import console
from elasticzero.launcher.observability.console import (
    ClusterConsole,
    PrintedErrors,
    differs_much,
)


class Told:
    """A console, and what it has printed since it was last looked at."""

    def __init__(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, muted: bool = False
    ) -> None:
        self._capsys = capsys
        self.console = ClusterConsole(tmp_path, 2, "127.0.0.1:2379", muted=muted)
        self.lines()

    def record(self, event: str, *, node: str = "node-0", at_s: float = 5.0, **fields: Any) -> None:
        self.console.record(node, {"time": at_s, "event": event, **fields})

    def world(
        self,
        generation: int,
        *,
        resume_step: int = 0,
        reason: str = "all here",
        skipped: dict[str, Any] | None = None,
        tier: str = "",
    ) -> None:
        self.record(
            "world",
            generation=generation,
            members=["node-0", "node-1"],
            world_size=2,
            resume_step=resume_step,
            tier=tier or ("storage" if resume_step else "fresh"),
            reason=reason,
            skipped=skipped,
        )

    def step(self, generation: int, step: int, at_s: float) -> None:
        self.record("step", generation=generation, step=step, at_s=at_s)

    def lines(self) -> list[str]:
        return [line.partition(" s  ")[2] for line in self._capsys.readouterr().out.splitlines()]


@pytest.fixture
def told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Told:
    return Told(tmp_path, capsys)


def test_a_checkpoint_that_was_not_saved_is_told_once(told: Told) -> None:
    told.record("saved", step=7, error="/c: no space left")
    told.record("saved", step=7, error="gave up waiting for rank 0", node="node-1")
    told.record("saved", step=14, error=None)
    told.record("saved", step=21, error="/c: no space left")
    assert told.lines() == [
        "  the checkpoint of step 7 was not saved: /c: no space left",
        "  the checkpoint of step 21 was not saved: /c: no space left",
    ]


def test_another_batch_size_is_told(told: Told) -> None:
    told.record("data_changed", step=9, allowed=["batch"], message="after step 9 …: epoch 0 begins")
    assert told.lines() == ["  after step 9 …: epoch 0 begins"]


def test_other_shares_of_ranks_are_told(told: Told) -> None:
    told.record("shares_changed", step=40, message="shares follow speeds: rank 0 has 20 %")
    assert told.lines() == ["  shares follow speeds: rank 0 has 20 %"]


def test_what_is_lost_of_gradients_is_told(told: Told) -> None:
    text = "parts of gradients that 1 lost rank had not sent yet are lost (norm about 0.1)"
    told.record("residual_lost", step=40, ranks=1, norm=0.1, message=text)
    assert told.lines() == [f"  {text}"]


def test_where_curves_are_written_is_told_once(told: Told) -> None:
    """The agent that leads next says it again."""
    opened, error = (
        "--log-to wandb writes to wandb/run-1",
        "--log-to wandb its process ended with 1",
    )
    for node in ("node-0", "node-1"):
        told.record("tracker", opened=opened, error=None, node=node)
        told.record("tracker", opened=None, error=error, node=node)
    assert told.lines() == [f"  {opened}", f"  {error}", f"  {error}"]


def test_only_large_changes_of_the_snapshot_interval_are_told(told: Told) -> None:
    """Six of the ten lines of a first run told of it."""
    for every in (4, 1, 9, 12, 3, 20, 16, 4, 3):
        told.record("paced", every=every, cost_s=0.0012, step_s=0.03)
    assert told.lines() == [
        "  snapshots every 4 steps: one costs 1.2 ms, a step 30 ms",
        "  snapshots every 20 steps: one costs 1.2 ms, a step 30 ms",
        "  snapshots every 4 steps: one costs 1.2 ms, a step 30 ms",
    ]
    assert [differs_much(*pair) for pair in ((None, 0), (0, 0), (0, 3), (3, 0), (2, 9))] == [
        True,
        False,
        True,
        True,
        False,
    ]


def test_a_plain_script_has_no_steps_to_tell_of(told: Told) -> None:
    """It was said to begin at step 0, and to have recomputed 0 steps."""
    told.world(1)
    told.record("plain", generation=1)
    assert told.console.plain
    for _ in range(2):
        told.console.report_waiting_fault("kill-node@3")
    told.world(2, reason="node-1 is lost")
    told.console.report_missed_fault("kill-node@3", timed=False)
    told.console.report_missed_fault("kill-node@90s", timed=True)
    told.console.report_fault("kill-node", "node-1", 3.0)
    told.console.close(ExitCode.DONE)
    assert told.lines() == [
        "generation 1: 2 ranks on node-0, node-1 (all here); a fresh start",
        "--fault kill-node@3 waits: no worker has called elasticzero.run yet, and without that no "
        "steps are seen; for a script that never does, give a time, as in kill-node@30s",
        "generation 2: 2 ranks on node-0, node-1 (node-1 is lost); the script starts anew",
        "--fault kill-node@3 was not injected: the script never called elasticzero.run, so no "
        "steps were seen",
        "--fault kill-node@90s was not injected: the job ended before it",
        "SIGKILL to every process of node-1",
        "done: 2 generations; every rank's script has ended with status 0; none called "
        "elasticzero.run",
    ]


def test_steps_before_a_start_are_not_lost_at_its_end(told: Told) -> None:
    """A start that had nothing left to do ended with "done: 0 steps"."""
    told.world(1, resume_step=186)
    told.record("attached", rank=0)
    told.console.close(ExitCode.DONE)
    assert told.lines()[-1] == (
        "done: 186 steps (none were left), 1 generation, 0 steps recomputed"
    )


def test_an_interrupted_job_says_what_is_left_of_it(told: Told) -> None:
    told.world(1)
    told.console.interrupt()
    assert "interrupted" not in told.lines()[-1]  # without a session nothing could be left
    told.record("attached", rank=0)
    told.step(1, 7, 6.0)
    told.console.interrupt()
    assert told.lines()[-1] == "interrupted after step 7; no checkpoint was written"
    told.record("checkpoint", step=5, seconds=0.1)
    told.console.interrupt()
    assert told.lines()[-1] == "interrupted after step 7; the newest checkpoint is that of step 5"


def test_a_script_that_imports_slowly_is_plain_no_more(told: Told) -> None:
    told.world(1)
    told.record("plain", generation=1)
    told.record("attached", rank=0)
    assert not told.console.plain
    told.step(1, 7, 6.0)
    told.console.report_missed_fault("join@9", timed=False)
    told.console.close(ExitCode.DONE)
    assert told.lines()[-2:] == [
        "--fault join@9 was not injected: the job ended after step 7",
        "done: 7 steps, 1 generation, 0 steps recomputed",
    ]


@pytest.mark.parametrize("tier", sorted({*get_args(Tier)} - {"other"}))
def test_each_source_of_a_generations_state_has_words(told: Told, tier: str) -> None:
    told.world(2, resume_step=40, tier=tier)
    assert [line for line in told.lines() if line.startswith("generation 2: 2 ranks")]


def test_a_pause_is_told_only_where_something_was_paused(told: Told) -> None:
    told.world(1)
    told.world(2, resume_step=40)
    told.step(2, 41, 1_795_276_705.62)
    assert not [line for line in told.lines() if "paused" in line]
    told.world(3, resume_step=41)
    told.step(3, 42, 1_795_276_707.12)
    assert [line for line in told.lines() if "paused" in line] == [
        "  training paused for 1.50 s",
    ]


WHY = (
    f"/c/{step_directory(60)}/rank-1: bytes 0 to 512 are not what was written "
    "(their checksum differs)"
)


def test_a_checkpoint_that_a_rank_found_damaged_is_one_line(told: Told) -> None:
    told.world(1, resume_step=60)
    told.lines()
    for rank in (0, 1):
        told.record("failed", blame="checkpoint", rank=rank, message=WHY)
    reason = f"node-2 left; rank 1 on node-1 failed ({WHY})"
    cause = "node-2 left; rank 1 on node-1 failed"
    damage = {"step": 60, "message": WHY, "cause": cause}
    told.world(2, resume_step=40, reason=reason, skipped=damage)
    assert told.lines() == [
        f"the checkpoint of step 60 is damaged: {WHY}; going on from step 40",
        "generation 2: 2 ranks on node-0, node-1 (node-2 left; rank 1 on node-1 failed); "
        "step 40 from storage",
    ]


def test_a_checkpoint_that_the_leader_saw_damaged_is_one_line(told: Told) -> None:
    reason = "2 nodes came together; the checkpoint of step 60 is damaged: rank-1 has 9 bytes"
    damage = {"step": 60, "message": "rank-1 has 9 bytes", "cause": "2 nodes came together"}
    told.world(1, resume_step=40, reason=reason, skipped=damage)
    assert told.lines() == [
        "the checkpoint of step 60 is damaged: rank-1 has 9 bytes; going on from step 40",
        "generation 1: 2 ranks on node-0, node-1 (2 nodes came together); step 40 from storage",
    ]


def test_a_reason_is_not_searched_for_damage(told: Told) -> None:
    """Where a world has no field for it, written by an earlier version, its reason is quoted."""
    reason = "node-1 is lost; the checkpoint of step 60 is damaged: rank-1 has 9 bytes"
    told.world(1, resume_step=40, reason=reason)
    assert told.lines() == [
        f"generation 1: 2 ranks on node-0, node-1 ({reason}); step 40 from storage"
    ]


def test_the_error_of_an_agent_is_quoted_from_its_event(
    told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not from its log, where a script may print lines of the same form."""
    told.record("error", node="node-0", message="it broke", details="logs: /l", traceback="Trace\n")
    told.record("error", node="node-1", message="it broke", details="", traceback="")
    told.console.quote(["node-0", "node-1", "node-2"])
    assert capsys.readouterr().err == "error: it broke\nTrace\nlogs: /l\n"
    told.console.quote(["node-1", "node-2"])
    assert capsys.readouterr().err == "error: it broke\n"
    told.console.quote(["node-2"])
    assert capsys.readouterr().err == ""


TRACE = """\
Traceback (most recent call last):
  File "/home/u/train.py", line 12, in train
    raise ValueError("bad sample")
ValueError: bad sample
"""
FAILED: dict[str, Any] = {
    "blame": "user",
    "message": "ValueError: bad sample",
    "traceback": TRACE,
    "final": False,
}
REASON = "rank 1 on node-0 failed: ValueError: bad sample; without progress past step 4"


def fail_again_and_again(told: Told) -> None:
    told.record("failed", rank=1, **FAILED)
    told.record("failed", rank=0, node="node-1", **FAILED)
    told.world(2, resume_step=4, reason="rank 1 on node-0 failed (ValueError: bad sample)")
    told.record("failed", rank=1, **FAILED)
    told.record("error", message=REASON, details="logs: /l", traceback=TRACE)


@pytest.mark.parametrize("one_place", [True, False], ids=["a terminal", "two files"])
def test_an_error_is_printed_once(
    one_place: bool,
    told: Told,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was printed five to seven times. Where standard error is another file, it has the error
    too."""
    monkeypatch.setattr(console, "is_one_place", lambda: one_place)
    fail_again_and_again(told)
    told.console.quote(["node-0"])
    out, error = capsys.readouterr()
    assert [line.partition(" s  ")[2] or line for line in out.splitlines()] == [
        "rank 1 on node-0 failed at train.py:12 in train:",
        *TRACE.splitlines(),
        "rank 0 on node-1 failed by the same error",
        "generation 2: 2 ranks on node-0, node-1 (rank 1 on node-0 failed); step 4 from storage",
        "rank 1 on node-0 failed by the same error",
    ]
    short = "rank 1 on node-0 failed by the error above; without progress past step 4"
    assert error == f"error: {short if one_place else REASON}\nlogs: /l\n"


def test_the_traceback_is_at_the_end_where_workers_output_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path, capsys, muted=True)
    told.record("failed", rank=1, **FAILED)
    told.record("exit", code=70, reason=REASON)
    (line,) = told.lines()
    assert line == "rank 1 on node-0 failed at train.py:12 in train: ValueError: bad sample"
    told.record("error", message=REASON, details="logs: /l", traceback=TRACE)
    told.console.quote(["node-0"])
    assert capsys.readouterr().err == f"error: {REASON}\n{TRACE}logs: /l\n"


REFUSED = {**FAILED, "message": "use strategy ddp", "traceback": "", "final": True}


@pytest.mark.parametrize("follows", ["the refusal", "the next world"])
def test_a_refusal_is_read_before_the_errors_that_follow_from_it(
    follows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank read a file that another one was refused to write, and its error came first."""
    told = Told(tmp_path, capsys, muted=True)
    told.record("failed", rank=1, node="node-1", **FAILED)
    assert told.lines() == []
    if follows == "the refusal":
        told.record("failed", rank=0, **REFUSED)
        assert told.lines() == [
            "rank 0 on node-0 failed: use strategy ddp",
            "rank 1 on node-1 failed at train.py:12 in train: ValueError: bad sample",
        ]
    else:
        told.world(2, resume_step=4, reason="rank 0 on node-0 failed: use strategy ddp")
        first, second = told.lines()
        assert "use strategy ddp" in first and "bad sample" in second


def test_an_error_is_held_back_for_a_moment_only(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    told.record("failed", rank=1, **FAILED)
    told.console.tick()
    assert told.lines() == []
    monkeypatch.setattr(console, "HELD_S", 0.0)
    told.console.tick()
    assert told.lines()[0] == "rank 1 on node-0 failed at train.py:12 in train:"


def test_an_error_with_other_numbers_has_its_own_line() -> None:
    errors = PrintedErrors()

    def text(message: str, traceback: str = TRACE, *, in_one_line: bool = False) -> str:
        return errors.text("rank 1", message, traceback, in_one_line=in_one_line)

    assert text("KeyError: 3").splitlines()[1] == TRACE.splitlines()[0]
    assert text("KeyError: 4") == "rank 1 failed at train.py:12 in train: KeyError: 4"
    assert text("KeyError: 4") == "rank 1 failed by the same error"
    assert text("ImportError: no", in_one_line=True).endswith(
        "train.py:12 in train: ImportError: no"
    )
    assert text("bad batch (train.py:12 in train)", "") == (
        "rank 1 failed: bad batch (train.py:12 in train)"
    )
    ours = TRACE.replace("ValueError: bad sample", "elasticzero.errors.UserError: no epochs")
    told = text("no epochs (train.py:12 in train)", ours)
    assert told == "rank 1 failed: no epochs (train.py:12 in train)"
    assert text("killed by SIGKILL", "") == "rank 1 failed: killed by SIGKILL"
    assert errors.shortened("a (KeyError: 3); b: killed by SIGKILL", " so") == "a so; b so"
    assert errors.shortened("node-1 is lost") == "node-1 is lost"


def test_a_lost_peer_is_no_error_of_a_rank(told: Told) -> None:
    for blame in ("peer", "checkpoint", "rollback"):
        told.record("failed", rank=1, **{**FAILED, "blame": blame})
    assert told.lines() == []


def test_a_fresh_start_begins_and_every_other_goes_on(told: Told) -> None:
    """A first run was said to go on from step 0."""
    for generation, step in ((1, 0), (2, 6)):
        told.world(generation)
        told.record(
            "restored",
            generation=generation,
            step=step,
            device="the CPU",
            connect_s=0.1,
            restore_s=0.0,
        )
    lines = [line for line in told.lines() if "training" in line]
    assert lines == [
        "  training begins on the CPU (connect 0.10 s, restore 0.00 s)",
        "  training goes on from step 6 on the CPU (connect 0.10 s, restore 0.00 s)",
    ]
