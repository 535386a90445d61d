"""The file of --config: typed, below flag and environment, and no key is passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticzero.cli.main import main, parse
from elasticzero.errors import ExitCode, UserError
from elasticzero.launcher.local.command import agent_arguments
from elasticzero.launcher.options.config_file import line_of
from elasticzero.launcher.options.rendezvous import check_rendezvous
from elasticzero.launcher.options.table import RUN_OPTIONS
from elasticzero.options.diloco import DiLoCo, diloco_of
from elasticzero.options.option import Option
from elasticzero.options.sources import Origin


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "job.toml"


def parsed(file: Path, text: str, *arguments: str, command: str = "run") -> Any:
    file.write_text(text)
    return parse([command, "--config", str(file), *arguments])


def test_values_come_from_the_file_below_flag_and_environment(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICZERO_SETTLE", "7")
    text = 'nnodes = "2:8"\nsettle = 9.5\nmax-restarts = 4\ncheckpoint_dir = "c"\nlease-ttl = 6\n'
    args = parsed(file, text, "--max-restarts", "1", "train.py")
    values = (args.nnodes, args.settle, args.max_restarts, args.checkpoint_dir, args.lease_ttl)
    assert values == ("2:8", 7.0, 1, "c", 6)
    assert args.grace == 25.0
    shown = {name: args.sources[name].text for name in ("settle", "max_restarts", "grace")}
    assert shown == {"settle": "ELASTICZERO_SETTLE", "max_restarts": "flag", "grace": "default"}
    assert args.sources["checkpoint_dir"].text == f"{file}:4"


def test_a_section_holds_the_options_of_a_heading(file: Path) -> None:
    text = "keep = 3\n\n[network]\nhttp_names = 'a.example, b.example'\nopen-status = true\n"
    args = parsed(file, text, "--http-port", "9", "train.py")
    assert (args.keep, args.http_names, args.open_status) == ("3", "a.example, b.example", True)
    assert args.http_port == 9
    assert args.sources["http_names"].text == f"{file}:4"


def test_a_section_holds_the_settings_of_an_option(file: Path) -> None:
    text = "strategy = 'diloco'\n\n[diloco]\nevery = 20\nouter_lr = 0.5\ninner = 'zero2'\n"
    settings = diloco_of("--diloco", parsed(file, text, "train.py").diloco)
    assert settings == DiLoCo(every=20, outer_lr=0.5, inner="zero2")
    text = "strategy = 'diloco'\ndiloco = 'every=20'"
    assert diloco_of("--diloco", parsed(file, text, "train.py").diloco) == DiLoCo(every=20)


def test_an_option_in_a_section_and_outside_is_given_twice(file: Path) -> None:
    with pytest.raises(UserError, match=r"http-host is given twice; .*job.toml"):
        parsed(file, "http-host = 'a'\n[network]\nhttp_host = 'b'\n", "train.py")


def test_the_environment_names_the_file_too(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("keep = 3\n")
    monkeypatch.setenv("ELASTICZERO_CONFIG", str(file))
    assert parse(["run", "train.py"]).keep == "3"
    assert parse(["run", "--config=", "train.py"]).keep is None


@pytest.mark.parametrize("option", RUN_OPTIONS, ids=lambda option: option.flags[0])
def test_every_option_may_stand_in_the_file(option: Option, file: Path) -> None:
    value: Any = {int: 7, float: 7.5}.get(option.type, "seven")
    if option.choices:
        value = option.choices[-1]
    if option.is_switch:
        value = True
    key = option.flags[0].removeprefix("--")
    shown = str(value).lower() if value is True else repr(value)
    args = parsed(file, f"{key} = {shown}\n", "train.py")
    assert getattr(args, option.name) == value
    assert args.sources[option.name].text == f"{file}:1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nnodes = 4", {"nnodes": "4"}),
        ("keep-workers = false", {"keep_workers": False}),
        ("settle = 2", {"settle": 2.0}),
        ("tee = true", {"tee": True, "tee_streams": None}),
        ("tee = 3", {"tee": False, "tee_streams": "3"}),
        ("tee = '0:3,1:1'", {"tee": False, "tee_streams": "0:3,1:1"}),
        ("rdzv-endpoint = 'h:1'", {"rdzv_endpoint": "h:1"}),
        ("module = true", {"module": True}),
    ],
)
def test_types_of_values(text: str, expected: dict[str, Any], file: Path) -> None:
    args = parsed(file, text, "train.py")
    assert {name: getattr(args, name) for name in expected} == expected


def test_local_takes_lists_where_an_option_repeats(file: Path) -> None:
    text = "nodes = 3\nfault = ['kill-node@60', 'join@110']\nscript = 'train.py'\n"
    args = parsed(file, text, command="local")
    assert (args.nodes, args.fault) == (3, ["kill-node@60", "join@110"])
    assert parsed(file, "nodes = 3\nfault = 'drain@4'\n", "t.py", command="local").fault == [
        "drain@4"
    ]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("\ncheckpont-dir = 'c'", 2, "did you mean checkpoint-dir?"),
        ("etcd-password = 'x'", 1, "did you mean etcd-password-file?"),
        ("quux = 1", 1, "elasticzero run has no option 'quux' for a file; see: elasticzero run"),
        ("fault = 'join@3'", 1, "elasticzero run has no option 'fault' for a file"),
        ("config = 'other.toml'", 1, "has no option 'config' for a file"),
        ("dry-run = true", 1, "has no option 'dry-run' for a file"),
        ("keep = 1\n[run]\nkeep = 3", 2, "has no option 'run' for a file"),
        ("[network]\nkeep = 3", 2, "has no option 'keep' for a file in [network]; see: "),
        ("[network]\nhttp-hosts = 'h'", 2, "in [network]; did you mean http-host?"),
        ("host = 'a'\n[network]\nhttp-port = 'b'", 3, "http-port: a whole number is expected"),
        ("strategy = 'diloco'\n[diloco]\nevery = true", 2, "diloco: every: a string or a number"),
        ("[network]\nscript = 'train.py'", 2, "has no option 'script' for a file in [network]"),
        ("network = 3", 1, "has no option 'network' for a file"),
        ("keep-workers = 'yes'", 1, "keep-workers: true or false is expected"),
        ("max-restarts = '3'", 1, "max-restarts: a whole number is expected"),
        ("max-restarts = 1.5", 1, "max-restarts 1.5: a whole number is expected"),
        ("settle = true", 1, "settle: a number is expected"),
        ("nnodes = [2, 8]", 1, "nnodes: a string or a number is expected"),
        ("job = 2026-01-01", 1, "job: a string or a number is expected"),
        (
            "\n\nstrategy = 'zero9'",
            3,
            "strategy zero9: one of ddp, zero1, zero2, zero3, diloco, auto",
        ),
        ("log_dir = 'a'\nlog-dir = 'b'", 2, "log-dir is given twice"),
        ("script = 3", 1, "script: a string is expected"),
        ("args = '--lr 3'", 1, "args: a list of strings and numbers is expected"),
        ("args = [true]", 1, "args: a list of strings and numbers is expected"),
        ("keep = 1\nkeep 2", 2, "not TOML: "),
        ("keep = 1\nkeep = 2", 2, "not TOML: "),
    ],
)
def test_a_mistake_is_named_with_file_and_line(
    text: str, line: int, message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    assert main(["run", "--config", str(file), __file__]) == ExitCode.USAGE
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"error: {file}:{line}: "), stderr
    assert message in stderr
    assert stderr.count("\n") == 1


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    for path, why in (
        (tmp_path / "none.toml", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (binary, "it is not UTF-8 text"),
    ):
        assert main(["run", "--config", str(path), "train.py"]) == ExitCode.USAGE
        assert capsys.readouterr().err == (
            f"error: --config {path}: {why}; name a TOML file to read\n"
        )


@pytest.mark.parametrize(
    ("key", "where"),
    [
        ("keep", "keep"),
        ("keep", "'keep'"),
        ("keep", '"keep"'),
    ],
)
def test_the_line_of_a_key(key: str, where: str) -> None:
    assert line_of(f"# keep = 1\nkeep-every = 2\n  {where} = 3\n", key) == 3


def test_a_line_that_may_be_another_is_not_told() -> None:
    assert line_of("job = '''\nkeep = 1\n'''\nkeep = 2\n", "keep") is None


def test_the_script_and_its_arguments_may_stand_in_the_file(file: Path) -> None:
    text = "script = 'train.py'\nargs = ['--lr', 0.1, '--epochs', 3]\n"
    args = parsed(file, text)
    assert (args.script, args.arguments) == ("train.py", ["--lr", "0.1", "--epochs", "3"])
    assert args.sources["script"].text == f"{file}:1"
    args = parsed(file, text, "other.py", "--lr", "9")
    assert (args.script, args.arguments) == ("other.py", ["--lr", "9"])
    assert args.sources["arguments"].text == "command line"
    assert parsed(file, text, "other.py").arguments == ["--lr", "0.1", "--epochs", "3"]


def test_a_bad_value_names_where_it_stands(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("keep = 0\n")
    assert main(["run", "--config", str(file), __file__]) == ExitCode.USAGE
    assert capsys.readouterr().err == (
        f"error: --keep 0 must be 1 or more: at least one checkpoint must stay (from {file}:1)\n"
    )
    monkeypatch.setenv("ELASTICZERO_NNODES", "3:1")
    assert main(["run", "--config", str(file), __file__]) == ExitCode.USAGE
    assert "(from ELASTICZERO_NNODES)" in capsys.readouterr().err


def test_torchruns_options_go_before_own_ones_of_a_weaker_source(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "etcd = 'file:1'\njob = 'of-file'\nhost = 'here'\nlease-ttl = 9\nsettle = 8\n"
    conf = "lease_ttl=4,last_call_timeout=2"
    args = parsed(file, text, "--rdzv-endpoint", "h:1", "--rdzv-conf", conf, "t.py")
    check_rendezvous(args, 2)
    assert (args.etcd, args.job, args.host) == ("h:1", "of-file", "here")
    assert (args.lease_ttl, args.settle) == (4, 2.0)
    assert args.sources["etcd"].text == "--rdzv-endpoint, flag"
    monkeypatch.setenv("PET_RDZV_ID", "of-environment")
    args = parsed(file, text, "t.py")
    check_rendezvous(args, 2)
    assert (args.etcd, args.job) == ("file:1", "of-environment")
    assert args.sources["job"].origin is Origin.ENVIRONMENT
    args = parsed(file, text + "rdzv-conf = 'lease_ttl=4,join_timeout=5'\n", "t.py")
    check_rendezvous(args, 2)
    assert (args.lease_ttl, args.join_timeout) == (9, 5.0)


def test_agents_of_local_read_no_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICZERO_CONFIG", str(file))
    args = parsed(file, "nodes = 2\nkeep-workers = true\n", "train.py", "-x", command="local")
    agent = parse(["run", *agent_arguments(args, "h:1", 2)])
    assert agent.keep_workers
    assert agent.sources["keep_workers"].text == "flag"
    assert (agent.script, agent.arguments) == ("train.py", ["-x"])


def test_a_file_is_refused_by_its_type_not_its_text(file: Path) -> None:
    with pytest.raises(UserError, match="has no option 'token' for a file"):
        parsed(file, "token = 'secret-words'\n", "t.py")
    with pytest.raises(UserError) as refused:
        parsed(file, "etcd-passwort-file = ['secret-words']\n", "t.py")
    assert "secret-words" not in str(refused.value)


def test_the_logs_have_a_section(file: Path) -> None:
    args = parsed(file, '[logs]\nlog-max-size = "200MB"\nlog_keep = 3\ntee = true\n', "train.py")
    assert (args.log_max_size, args.log_keep, args.tee) == ("200MB", 3, True)
    assert args.sources["log_max_size"].text == f"{file}:2"
