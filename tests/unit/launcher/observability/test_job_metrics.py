"""The metrics of a job as a whole, and what they count."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.observability.compute_time import (
    SLOWEST,
    ComputeTimes,
    compute_ratios,
)
from elasticzero.launcher.observability.job_counts import (
    MAX_NODES,
    JobCounts,
    interrupting,
    leave_source,
)
from elasticzero.launcher.observability.job_metrics import (
    JOB_METRICS,
    JobState,
    job_exposition,
    model_flops_utilization,
)
from elasticzero.launcher.observability.metrics import PHASES
from elasticzero.launcher.protocol.documents import FailureRecord, Member, Report, World

RECOVERED: Mapping[str, object] = {
    "kind": "failure",
    "steps_lost": 3,
    **{f"{phase}_s": 0.5 for phase in PHASES},
    "build_s": None,
}


def member(node: str, incarnation: str = "1") -> Member:
    return Member(node, incarnation, "10.0.0.1", 9400, 0, 1)


def world(generation: int, *members: Member, failed: str = "", blame: str = "user") -> World:
    setback = FailureRecord(
        generation=generation - 1, node=failed, rank=0, blame=blame, step=1, message="m"
    )
    return World(
        generation=generation,
        token=f"t{generation}",
        members=members,
        strategy="ddp",
        resume=Resume(tier="fresh"),
        reason="r",
        setbacks=(setback,) if failed else (),
    )


def exposed(state: JobState) -> dict[tuple[str, ...], float]:
    text = job_exposition(state).decode()
    return {
        (
            one.name.removeprefix("elasticzero_job_"),
            one.labels.pop("job_id"),
            *(value for _, value in sorted(one.labels.items(), reverse=True)),
        ): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def full() -> JobState:
    counts = JobCounts()
    counts.world(None, world(1, member("a"), member("b")))
    counts.world(world(1, member("a"), member("b")), world(2, member("a")))
    counts.recovered(RECOVERED)
    return JobState(
        job="train",
        counts=counts,
        generation=2,
        waiting=1,
        seconds={"productive": 9.0, "startup": 1.0},
        step=7,
        progress_time=1.7e9,
        mfu=0.4,
        loss=1.5,
        compute_ratios={("b", 1): 1.5},
    )


def test_the_leader_serves_what_it_knows() -> None:
    metrics = exposed(full())
    assert metrics["generation", "train"] == 2
    assert metrics["waiting_nodes", "train"] == 1
    assert metrics["seconds", "train", "productive"] == 9.0
    assert metrics["seconds", "train", "idle"] == 0.0
    assert metrics["goodput_ratio", "train"] == pytest.approx(0.9)
    assert metrics["recoveries_total", "train", "failure"] == 1
    assert metrics["recovery_seconds_total", "train", "detect"] == 0.5
    assert metrics["recovery_seconds_total", "train", "build"] == 0.0
    assert metrics["steps_lost_total", "train"] == 3
    assert metrics["interruptions_total", "train", "b"] == 1
    assert metrics["interruptions_total", "train", "a"] == 0
    assert metrics["preemptions_total", "train", "aws"] == 0
    assert metrics["compute_ratio", "train", "b", "1"] == 1.5


def test_what_is_not_known_has_no_series() -> None:
    names = {key[0] for key in exposed(full())}
    for name in ("checkpoint_last_step", "snapshot_last_timestamp_seconds", "gradient_norm"):
        assert name not in names
    bare = exposed(JobState(job="train", counts=JobCounts()))
    assert not [key for key in bare if key[0] in ("seconds", "goodput_ratio", "step", "loss")]


def test_an_agent_that_does_not_lead_serves_nothing() -> None:
    assert job_exposition(None) == b""


def test_everything_has_the_name_of_the_job() -> None:
    for metric in JOB_METRICS:
        assert metric.labels[0] == "job_id"
    for family in text_string_to_metric_families(job_exposition(full()).decode()):
        assert all(one.labels["job_id"] == "train" for one in family.samples)


def test_promtool_accepts_the_metrics_of_a_job(program: Callable[[str], str]) -> None:
    check = subprocess.run(
        [program("promtool"), "check", "metrics"],
        input=job_exposition(full()),
        capture_output=True,
        timeout=30,
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    ("reason", "source"),
    [
        ("AWS spot terminate in 118 s", "aws"),
        ("GCP preemption in 30 s", "gcp"),
        ("Azure spot eviction in 30 s", "azure"),
        ("drained by an operator", "operator"),
        ("drained by an operator, then AWS spot stop in 9 s", "operator"),
        ("SIGTERM (25 s of grace)", "signal"),
    ],
)
def test_the_source_of_a_departure_follows_from_its_reason(reason: str, source: str) -> None:
    assert leave_source(reason) == source


def test_a_leaving_node_is_counted_once_a_generation() -> None:
    counts = JobCounts()
    report = Report(
        incarnation="1", phase="alive", leaving=True, leave_reason="GCP preemption in 9 s"
    )
    drained = Report(
        incarnation="1", phase="alive", leaving=True, leave_reason="drained by an operator"
    )
    for _ in range(3):
        counts.reports(4, {"a": report, "b": drained, "c": Report(incarnation="1", phase="alive")})
    assert counts.preemptions["gcp"] == 1
    assert counts.drains == 1
    counts.reports(5, {"a": report})
    assert counts.preemptions["gcp"] == 2


def test_a_node_interrupts_by_its_loss_or_by_the_first_failure() -> None:
    before = world(1, member("a"), member("b"), member("c"))
    assert interrupting(before, world(2, member("a"), member("b"))) == {"c"}
    assert interrupting(before, world(2, member("a"), member("b"), member("c", "2"))) == {"c"}
    assert interrupting(before, world(2, *before.members, failed="b")) == {"b"}
    assert interrupting(before, world(2, *before.members, failed="b", blame="peer")) == set()
    assert interrupting(before, world(2, *before.members, member("d"))) == set()


def test_counts_of_nodes_that_are_gone_are_bounded() -> None:
    counts = JobCounts()
    last = None
    for number in range(3 * MAX_NODES):
        new = world(number + 1, member("a"), member(f"spot-{number}"))
        counts.world(last, new)
        last = new
    assert len(counts.interruptions) == MAX_NODES + 2
    assert counts.interruptions["a"] == 0


def test_ratios_are_to_the_median_and_only_of_the_slowest() -> None:
    times = {("n", rank): 1.0 for rank in range(40)}
    times["n", 7] = 3.0
    ratios = compute_ratios(times)
    assert len(ratios) == SLOWEST
    assert next(iter(ratios.items())) == (("n", 7), 3.0)
    assert compute_ratios({("n", 0): 1.0}) == {}
    assert compute_ratios({("n", 0): 0.0, ("n", 1): 0.0}) == {}


def test_own_times_are_medians_of_the_present_generation() -> None:
    times = ComputeTimes()
    for seconds in (1.0, 1.0, 9.0):
        times.add(0, seconds)
    times.add(1, 2.0)
    assert times.medians() == {0: 1.0, 1: 2.0}
    times.begin()
    assert times.medians() == {}


def test_utilization_is_the_share_of_the_peak_of_all_ranks() -> None:
    assert model_flops_utilization(2e12, 1e15, 1000.0, 4) == pytest.approx(0.5)
    assert model_flops_utilization(None, 1e15, 1000.0, 4) is None
    assert model_flops_utilization(2e12, 1e15, None, 4) is None
