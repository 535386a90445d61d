"""Which logs the report reads in a directory, and what it says where there are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elasticzero.cli.main import main
from elasticzero.errors import ExitCode, UserError
from elasticzero.ops.report.log_files import find_logs, read_run
from tests.unit.ops.report.made_up import eventful


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A directory with the logs of two jobs."""
    for job in ("one", "two"):
        eventful().write(tmp_path / job)
    return tmp_path


def test_the_directory_of_a_job_of_a_node_and_of_several_jobs(logs: Path) -> None:
    job, files = find_logs(logs / "one", None)
    assert (job, [file.node for file in files]) == ("one", ["a", "b", "c", "d"])
    job, files = find_logs(logs / "one" / "b", None)
    assert (job, [file.node for file in files]) == ("one", ["b"])
    assert find_logs(logs, "two") == find_logs(logs / "two", None)
    assert find_logs(logs / "one", "two")[0] == "one", "ELASTICZERO_JOB may be that of another"


def test_the_only_job_of_a_directory_needs_no_name(tmp_path: Path) -> None:
    eventful().write(tmp_path / "logs" / "only")
    assert find_logs(tmp_path / "logs", None)[0] == "only"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["missing"], "does not exist"),
        (["empty"], "has no event log (events.jsonl)"),
        (["."], "has the logs of several jobs: choose by --job one of one, two"),
        ([".", "--job", "three"], "has no logs of job 'three', only those of: one, two"),
        (["one/a/events.jsonl"], "is no directory"),
        (["one", "--output", "missing/x.html"], "--output missing/x.html: a file in a directory"),
        (["one", "--output", "two"], "--output two: a file in a directory"),
        (["blank"], "there is no event in it yet"),
        ([], "give a directory of logs (elasticzero report LOG_DIR), or --job ID and --etcd"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_exit_code_64(
    logs: Path,
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (logs / "empty").mkdir()
    (logs / "blank" / "a").mkdir(parents=True)
    (logs / "blank" / "a" / "events.jsonl").write_text("")
    if arguments == ["."] or "three" in arguments:
        (logs / "blank" / "a" / "events.jsonl").unlink()
    monkeypatch.chdir(logs)
    monkeypatch.delenv("ELASTICZERO_ETCD", raising=False)
    assert main(["report", *arguments]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert expected in error


def test_the_command_writes_the_page_and_says_where(
    logs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(logs)
    assert main(["report", "one", "-o", "page.html"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Job one finished all 100 steps in")
    assert lines[1].startswith("The report is in page.html (")
    assert (logs / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert main(["report", "one", "-o", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!DOCTYPE html>")


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    eventful().write(tmp_path / "j")
    log = tmp_path / "j" / "a" / "events.jsonl"
    with log.open("ab") as file:
        file.write(b'{"time": 1.0, "event": "ste\n\xff\xfe\n[1]\n7\n' + b"[" * 100_000)
    summary = read_run(*find_logs(tmp_path / "j", None))
    assert (summary.outcome, summary.final_step) == ("finished", 100)
    assert summary.notes == ("5 lines could not be read, in the logs of a.",)


def test_a_long_log_is_thinned_and_has_the_same_totals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = eventful()
    for events in job.logs.values():  # an agent that did not see the end of the job
        del events[-1]
    job.write(tmp_path / "j")
    whole = read_run(*find_logs(tmp_path / "j", None))
    monkeypatch.setattr("elasticzero.ops.report.log_files.WHOLE_BYTES", 30_000)
    thin = read_run(*find_logs(tmp_path / "j", None))
    assert len(thin.steps) < len(whole.steps)
    assert thin.generations[:-1] == whole.generations[:-1]
    assert thin.steps_redone == whole.steps_redone
    assert thin.faults == whole.faults
    for kind, seconds in whole.seconds.items():
        assert thin.seconds[kind] == pytest.approx(seconds, abs=0.05)
    assert "The logs are long" in thin.notes[0]


def test_a_log_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "j" / "a" / "events.jsonl").mkdir(parents=True)
    (tmp_path / "j" / "b").mkdir()
    (tmp_path / "j" / "b" / "events.jsonl").write_text(json.dumps({"time": 1.0, "event": "exit"}))
    with pytest.raises(UserError, match=r"a/events\.jsonl cannot be read"):
        read_run(*find_logs(tmp_path / "j", None))
