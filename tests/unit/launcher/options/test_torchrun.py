"""torchrun's own command line is taken: every flag, every variable, every spelling."""

from __future__ import annotations

import argparse
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.argparse_util import check_env, env
from torch.distributed.run import get_args_parser

from elasticzero.cli.main import main, parse
from elasticzero.errors import ExitCode, UserError
from elasticzero.launcher.agent.config import console_of, worker_settings
from elasticzero.launcher.options.rendezvous import (
    HostedEtcd,
    Rendezvous,
    check_rendezvous,
    job_of,
    resolve_rendezvous,
)
from elasticzero.launcher.options.table import RUN_OPTIONS
from elasticzero.launcher.options.torchrun import IDLE, SILENT, check_signals, without_effect
from elasticzero.launcher.workers.console_output import ALL, ERR, OUT, ConsoleOutput


def later_actions() -> list[argparse.Action]:
    """Options of the newest torchrun, which that of the torch of these tests may lack."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--log-line-prefix-template", "--log_line_prefix_template", action=env)
    parser.add_argument("--print-completion", "--print_completion")
    return parser._actions


INSTALLED = [a for a in get_args_parser()._actions if a.option_strings and a.dest != "help"]
DESTS = {action.dest for action in INSTALLED}
ACTIONS = INSTALLED + [action for action in later_actions() if action.dest not in DESTS]
VALUES = {
    "nnodes": "2:3",
    "nproc_per_node": "5",
    "rdzv_backend": "c10d",
    "master_port": "29501",
    "node_rank": "7",
    "max_restarts": "6",
    "redirects": "0:1,1:2",
    "tee": "1:3",
    "start_method": "fork",
    "numa_binding": "node",
    "signals_to_handle": "SIGUSR1",
    "local_ranks_filter": "0,1",
    "monitor_interval": "0.5",
    "shutdown_timeout": "9",
}
"""What torchrun's parser is given for an option; `value` for the others."""
HTTPS = "https://h:1"
NAMES = {"tee": "tee_streams"}


def taken(args: argparse.Namespace, dest: str) -> Any:
    return getattr(args, NAMES.get(dest, dest))


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.dest)
def test_every_spelling_of_torchruns_options_is_taken(action: argparse.Action) -> None:
    """Fails when torch adds an option: give it a place in `torchrun_options` and in the docs."""
    for flag in action.option_strings:
        if action.nargs == 0:
            assert taken(parse(["run", flag, "train.py"]), action.dest) is True
            continue
        value = VALUES.get(action.dest, "value")
        for arguments in ([flag, value], [f"{flag}={value}"]):
            if "=" in arguments[0] and not flag.startswith("--"):
                arguments = [f"{flag}{value}"]
            args = parse(["run", *arguments, "train.py", "--lr", "3"])
            assert str(taken(args, action.dest)) == value, arguments
            assert (args.script, args.arguments) == ("train.py", ["--lr", "3"])


@pytest.mark.parametrize(
    "action", [a for a in ACTIONS if isinstance(a, env | check_env)], ids=lambda a: a.dest
)
def test_every_variable_of_torchruns_is_taken(
    action: argparse.Action, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = "1" if action.nargs == 0 else VALUES.get(action.dest, "value")
    monkeypatch.setenv(f"PET_{action.dest.upper()}", value)
    args = parse(["run", "train.py"])
    expected = "True" if action.nargs == 0 else value
    assert str(taken(args, action.dest)) == expected
    if action.nargs != 0 and action.dest != "tee":
        monkeypatch.setenv(f"PET_{action.dest.upper()}", "")
        parse(["run", "train.py"])


def test_own_variables_go_before_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "4")
    assert parse(["run", "train.py"]).nnodes == "4"
    monkeypatch.setenv("ELASTICZERO_NNODES", "5")
    assert parse(["run", "train.py"]).nnodes == "5"
    assert parse(["run", "--nnodes", "6", "train.py"]).nnodes == "6"


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.dest)
def test_prefixes_are_taken_as_torchrun_takes_them(action: argparse.Action) -> None:
    """Each prefix that fits one option of torchrun alone, and is not an own option."""
    longs = {f for a in ACTIONS for f in a.option_strings if f.startswith("--") and "_" not in f}
    longs |= {"--help", *(option.flags[0] for option in RUN_OPTIONS)}
    long_flag = next(flag for flag in action.option_strings if flag in longs)
    tried = 0
    for prefix in (long_flag[:length] for length in range(3, len(long_flag))):
        if prefix in longs or sum(flag.startswith(prefix) for flag in longs) > 1:
            continue
        arguments = [prefix] if action.nargs == 0 else [prefix, VALUES.get(action.dest, "value")]
        args = parse(["run", *arguments, "train.py"])
        assert taken(args, action.dest) not in (None, False), prefix
        assert args.script == "train.py"
        tried += 1
    assert tried or long_flag in ("--role", "--tee", "--nnodes")


@pytest.mark.parametrize(
    ("arguments", "variable", "prefix"),
    [
        ([], "", "[5] "),
        ([], "${local_rank}>", "1>"),
        (["--log-line-prefix-template="], "", "[5] "),
        (["--log-line-prefix-template", "$rank|$role_name|"], "${local_rank}>", "5|$hostname|"),
        (["--log-line-prefix-template", "${hostname}: $other $ "], "", "HOST: $other $ "),
    ],
)
def test_lines_begin_as_the_template_says(
    arguments: list[str], variable: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "HOST")
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", variable)
    console = console_of(parse(["run", "--role", "$hostname", *arguments, "t.py"]))
    assert console.line_prefix(rank=5, local_rank=1) == prefix


def test_a_prefix_of_two_options_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--rdzv=x", "train.py"]) == ExitCode.USAGE
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: --rdzv could be --rdzv-backend or --rdzv-conf")


@pytest.mark.parametrize(
    ("arguments", "tee", "streams", "script"),
    [
        (["--tee", "train.py"], True, None, "train.py"),
        (["--tee", "3", "train.py"], False, "3", "train.py"),
        (["-t", "0:3,1:1", "train.py"], False, "0:3,1:1", "train.py"),
        (["-t3", "train.py"], False, "3", "train.py"),
        (["--tee=1", "train.py"], False, "1", "train.py"),
        (["--tee", "4", "train.py"], True, None, "4"),
        (["--tee", "--log-dir", "d", "train.py"], True, None, "train.py"),
        (["train.py", "--tee", "3"], False, None, "train.py"),
    ],
)
def test_tee_takes_a_value_only_if_it_is_torchruns(
    arguments: list[str], tee: bool, streams: str | None, script: str
) -> None:
    """`--tee 3 train.py` looked for a script named 3."""
    args = parse(["run", *arguments])
    assert (args.tee, args.tee_streams, args.script) == (tee, streams, script)


def test_options_without_effect_are_said_once_each() -> None:
    arguments = ["--monitor-interval", "5", "--start-method=fork", "--run-path"]
    arguments += ["--logs-specs", "x"]
    lines = without_effect(vars(parse(["run", *arguments, "/train.py"])))
    assert [line.split()[0] for line in lines] == [
        "--monitor-interval",
        "--start-method",
        "--logs-specs",
    ]
    assert without_effect(vars(parse(["run", "train.py"]))) == []
    assert {option.flags[0] for option in IDLE} > set(SILENT)


def test_the_docs_say_what_each_option_becomes(root: Path) -> None:
    """Every flag and variable of torchrun stands in the table of docs/torchrun.md."""
    table = (root / "docs" / "torchrun.md").read_text()
    named = set(re.findall(r"`(--[a-z-]+)[` =]", table))
    for action in ACTIONS:
        flags = [f for f in action.option_strings if f.startswith("--") and "_" not in f]
        assert set(flags) <= named, flags
    assert {"--" + a.dest.replace("_", "-") for a in ACTIONS} <= named


def rendezvous(*arguments: str, nodes: int = 1) -> Rendezvous:
    args = parse(["run", *arguments, "train.py"])
    return resolve_rendezvous(vars(args), nodes)


@pytest.mark.parametrize(
    ("arguments", "nodes", "etcd", "hosted"),
    [
        ("", 1, None, None),
        ("--standalone", 1, None, None),
        ("--standalone --rdzv-endpoint h:1", 1, None, None),
        ("--etcd h:1", 2, "h:1", None),
        ("--etcd h:1 --rdzv-backend c10d --rdzv-endpoint g:2", 2, "h:1", None),
        ("--rdzv-endpoint h:1", 2, "h:1", None),
        ("--rdzv-backend etcd-v2 --rdzv-endpoint h:1,g:1", 2, "h:1,g:1", None),
        ("--rdzv-backend etcd --rdzv-endpoint h:1 --rdzv-conf protocol=https", 2, HTTPS, None),
        ("--rdzv-backend c10d --rdzv-endpoint h:1", 2, "h:1", ("h", 1, None)),
        ("--rdzv-backend c10d --rdzv-endpoint h", 2, "h:29400", ("h", 29400, None)),
        ("--rdzv-backend c10d --rdzv-endpoint [::1]:9", 2, "[::1]:9", ("::1", 9, None)),
        ("--rdzv-backend c10d", 2, "localhost:29400", ("localhost", 29400, None)),
        ("--rdzv-backend c10d", 1, None, None),
        ("--rdzv-backend c10d --rdzv-endpoint localhost:0", 1, None, None),
        ("--rdzv-backend c10d --rdzv-endpoint h:1 --rdzv-conf is_host=1", 2, "h:1", ("h", 1, True)),
        ("--rdzv-backend static --rdzv-endpoint h:1 --node-rank 1", 2, "h:1", ("h", 1, False)),
        ("--master-addr h", 2, "h:29500", ("h", 29500, None)),
        ("--master-addr h --master-port 7 --node-rank 0", 2, "h:7", ("h", 7, True)),
        ("--master-addr h --master-port 7 --node-rank 3", 4, "h:7", ("h", 7, False)),
        ("--rdzv-backend static --master-addr [::1]", 2, "[::1]:29500", ("::1", 29500, None)),
        ("--master-addr h", 1, None, None),
    ],
)  # fmt: skip
def test_where_nodes_meet(
    arguments: str, nodes: int, etcd: str | None, hosted: tuple[str, int, bool | None] | None
) -> None:
    place = rendezvous(*arguments.split(), nodes=nodes)
    expected = None
    if hosted is not None:
        expected = HostedEtcd(host=hosted[0], port=hosted[1], starts_here=hosted[2])
    assert (place.etcd, place.hosted) == (etcd, expected)


@pytest.mark.parametrize(
    ("arguments", "nodes", "text"),
    [
        ("--rdzv-backend zeus --rdzv-endpoint h:1", 2, "--rdzv-backend zeus: c10d, static"),
        ("--rdzv-backend etcd", 2, "--rdzv-backend etcd needs --rdzv-endpoint"),
        ("--rdzv-backend c10d --rdzv-endpoint h:0", 2, "the port must be one that all nodes know"),
        ("--rdzv-backend c10d --rdzv-endpoint h:port", 2, "--rdzv-endpoint h:port: HOST:PORT"),
        ("--rdzv-backend c10d --rdzv-endpoint fd00::7:9", 2, "brackets around an address of IPv6"),
        ("--rdzv-backend c10d --rdzv-endpoint h:99999", 2, "--rdzv-endpoint h:99999: HOST:PORT"),
        ("--rdzv-conf timeout", 1, "--rdzv-conf timeout: KEY=VALUE"),
        ("--rdzv-conf join_timeout=soon", 1, "--rdzv-conf join_timeout=soon: seconds"),
        ("--rdzv-conf is_host=maybe --rdzv-backend c10d", 1, "is_host=maybe: true or false"),
    ],
)
def test_rendezvous_options_that_make_no_sense(arguments: str, nodes: int, text: str) -> None:
    with pytest.raises(UserError) as refused:
        rendezvous(*arguments.split(), nodes=nodes)
    assert text in str(refused.value)


def test_the_names_of_two_ids_differ() -> None:
    assert job_of("run-1.a_b") == "run-1.a_b"
    names = {job_of(text) for text in ("a/b", "a:b", "a b", "a_b", ".a", "")}
    assert len(names) == 6
    assert all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name) or name == "" for name in names)


def test_flags_go_before_rdzv_conf(monkeypatch: pytest.MonkeyPatch) -> None:
    conf = "join_timeout=30,last_call_timeout=2,lease_ttl=4,cert=c.pem,read_timeout=9"
    monkeypatch.setenv("ELASTICZERO_SETTLE", "7")
    arguments = ["run", "--etcd", "h:1", "--job", "j", "--rdzv-conf", conf]
    arguments += ["--lease-ttl", "6", "t.py"]
    args = parse(arguments)
    place = check_rendezvous(args, 2)
    assert (args.join_timeout, args.settle, args.lease_ttl) == (30.0, 7.0, 6)
    assert args.etcd_cert == "c.pem"
    assert place.lines == ("--rdzv-conf read_timeout has no effect here",)


def test_torchruns_flags_go_before_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ETCD", "e:1"), ("JOB", "from-here"), ("HOST", "here")):
        monkeypatch.setenv(f"ELASTICZERO_{name}", value)
    args = parse(["run", "--rdzv-endpoint", "h:1", "--rdzv-id", "j", "--local-addr", "l", "t.py"])
    check_rendezvous(args, 2)
    assert (args.etcd, args.job, args.host) == ("h:1", "j", "l")
    args = parse(["run", "t.py"])
    check_rendezvous(args, 2)
    assert (args.etcd, args.job, args.host) == ("e:1", "from-here", "here")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", [ALL, ALL]),
        ("--log-dir d", [0, 0]),
        ("--log-dir d --tee", [ALL, ALL]),
        ("--log-dir d --redirects 3", [0, 0]),
        ("--log-dir d --redirects 3 --tee 3", [ALL, ALL]),
        ("--redirects 1", [ERR, ERR]),
        ("--redirects 0:2,1:3", [OUT, 0]),
        ("--redirects 3 --tee 1:1", [0, OUT]),
        ("--log-dir d --tee 0:3", [ALL, ALL]),
        ("--local-ranks-filter 1", [0, ALL]),
        ("--tee --local-ranks-filter 0", [ALL, 0]),
    ],
)
def test_what_of_the_output_is_repeated(arguments: str, shown: list[int]) -> None:
    console = console_of(parse(["run", *arguments.split(), "t.py"]))
    assert [console.repeated_streams(rank) for rank in range(2)] == shown
    assert [console.needs_separate_stdout(rank) for rank in range(2)] == [
        s in (OUT, ERR) for s in shown
    ]
    assert console.silent == (arguments == "--log-dir d")
    assert ConsoleOutput().repeated_streams(0) == ALL


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--redirects", "5"], "--redirects 5: 0 (none)"),
        (["--tee=all"], "--tee all: 0 (none)"),
        (["--local-ranks-filter", "a"], "--local-ranks-filter a: local ranks"),
        (["--signals-to-handle", "SIGKILL"], "--signals-to-handle SIGKILL"),
        (["--signals-to-handle", "USR1"], "--signals-to-handle USR1"),
        (["--no-python", "-m"], "--no-python and -m exclude"),
        (["--standalone", "--nnodes", "2"], "--standalone is one node"),
    ],
    ids=" ".join,
)
def test_bad_values_of_torchruns_options(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments, __file__]) == ExitCode.USAGE
    assert text in capsys.readouterr().err


def test_signals_and_what_workers_are_told() -> None:
    assert [s.name for s in check_signals("SIGTERM,SIGINT, SIGUSR1")] == ["SIGUSR1"]
    assert check_signals(None) == ()
    args = parse(["run", "--virtual-local-rank", "--role", "trainer", "t.py"])
    told = worker_settings(args, 2, {"CUDA_VISIBLE_DEVICES": "4,6"})
    assert (told.role, told.threads, told.devices) == ("trainer", 1, ("4", "6"))
    assert worker_settings(args, 2, {"OMP_NUM_THREADS": "3"}).threads is None
    assert worker_settings(args, 2, {"OMP_NUM_THREADS": "3"}).devices == ("0", "1")
    assert worker_settings(args, 1, {}).threads is None
    with pytest.raises(UserError, match="fewer GPUs than the 3 workers"):
        worker_settings(args, 3, {"CUDA_VISIBLE_DEVICES": "4,6"})
