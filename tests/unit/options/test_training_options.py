"""Each row of the table of training options reaches everything that reads options.

A new option is a row of `options/training.py`, a field of `TrainingSettings`, and the file that
uses it. No other file knows it by name, and so these tests hold for it too.
"""

from __future__ import annotations

import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from elasticzero.checkpoint.steps.retention import RetentionPolicy
from elasticzero.cli.main import main, parse
from elasticzero.errors import ExitCode, UserError
from elasticzero.ipc.assignment import Assignment, Resume
from elasticzero.launcher.agent.assignments import assignments
from elasticzero.launcher.agent.config import agent_options, on_island
from elasticzero.launcher.options.table import RUN_OPTIONS, passed_on_arguments
from elasticzero.launcher.options.validation import parse_common_options
from elasticzero.launcher.protocol.documents import Member, World
from elasticzero.launcher.secrets import Secret
from elasticzero.options.option import Option
from elasticzero.options.resolve import ParsedOptions
from elasticzero.options.settings import TrainingSettings, spike_limit
from elasticzero.options.training import TRAINING_OPTIONS, compared_options
from elasticzero.options.values import Number
from elasticzero.options.wire import Wire
from elasticzero.worker.single_process import read_settings

NAMES = [option.name for option in TRAINING_OPTIONS]
VALUES = {
    "N": "7",
    "K": "7",
    "S": "7",
    "SIZE": "8MiB",
    "F": "2e9",
    "WHAT": "batch",
    "FORMAT": "topk:0.25",
    "NAME=VALUE,…": "every=7",
}
"""A value that is not the default, by the word that the help shows for it."""
SPIKES = "skip:3:10"
NEEDED = {"keep_every": ("keep",), "diloco": ("strategy",)}
"""Options without which another is refused."""


def value_of(option: Option, folder: Path) -> str:
    """Returns a valid text that is not the option's default."""
    if option.is_switch:
        return "yes"
    if option.choices is not None:
        return next(c for c in reversed(option.choices) if c not in (option.default, "rollback"))
    if option.metavar == "DIR":
        return str(folder / "held")
    return SPIKES if option.metavar == "ACTION:K:N" else VALUES[option.metavar or ""]


@pytest.fixture(params=TRAINING_OPTIONS, ids=NAMES)
def option(request: pytest.FixtureRequest) -> Option:
    row: Option = request.param
    return row


@pytest.fixture
def texts(option: Option, tmp_path: Path) -> dict[str, str]:
    """The texts of an option and of those that it needs, by name."""
    (tmp_path / "held").mkdir()
    rows = {row.name: row for row in TRAINING_OPTIONS}
    names = ["checkpoint_dir", *NEEDED.get(option.name, ()), option.name]
    texts = {name: value_of(rows[name], tmp_path) for name in names}
    return {**texts, "strategy": "diloco"} if option.name == "diloco" else texts


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for row in TRAINING_OPTIONS:
        monkeypatch.delenv(row.variable, raising=False)
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


def arguments_of(texts: dict[str, str]) -> list[str]:
    rows = {row.name: row for row in TRAINING_OPTIONS}
    return [
        word
        for name, text in texts.items()
        for word in rows[name].words(True if rows[name].is_switch else text)
    ]


def in_toml(name: str, text: str) -> str:
    """Returns a value as the file of `--config` gives it."""
    row = next(row for row in TRAINING_OPTIONS if row.name == name)
    if row.is_switch:
        return "true"
    return text if text.isdecimal() or row.type is not str else repr(text)


def parsed(*arguments: str) -> ParsedOptions:
    return parse_common_options(parse(arguments))


def check_not_default(option: Option, options: ParsedOptions) -> None:
    """Checks that the option's value has reached its field."""
    if not option.field:
        return
    group, _, name = option.field.rpartition(".")
    home: Any = getattr(options, group or "agent")
    value = home[name] if isinstance(home, dict) else getattr(home, name)
    default = option.default
    if option.parse is not None and default is not None:
        default = option.parse(option.flags[0], default)
    assert value != default, option.field


def test_each_reaches_the_command_line_and_its_variable_and_the_file(
    option: Option,
    texts: dict[str, str],
    script: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_flag = parsed("run", *arguments_of(texts), script)
    check_not_default(option, by_flag)
    lines = [f"{name.replace('_', '-')} = {in_toml(name, text)}" for name, text in texts.items()]
    file = tmp_path / "job.toml"
    file.write_text("\n".join(lines))
    assert parsed("run", "--config", str(file), script) == by_flag
    for row in TRAINING_OPTIONS:
        if row.name in texts:
            monkeypatch.setenv(row.variable, texts[row.name])
    assert parsed("run", script) == by_flag


def test_each_reaches_the_agents_of_a_local_cluster(texts: dict[str, str], script: str) -> None:
    arguments = passed_on_arguments(parse(["local", "--nodes", "2", *arguments_of(texts), script]))
    assert parsed("run", *arguments, script) == parsed("run", *arguments_of(texts), script)


def test_each_reaches_a_script_without_an_agent(texts: dict[str, str], script: str) -> None:
    by_flag = parsed("run", *arguments_of(texts), script)
    rows = {row.name: row for row in TRAINING_OPTIONS}
    settings = read_settings({rows[name].variable: text for name, text in texts.items()})
    for field in fields(TrainingSettings):
        assert getattr(settings, field.name) == getattr(by_flag.training, field.name)
    assert settings.keep == RetentionPolicy(**by_flag.keep)
    assert settings.strategy == by_flag.policy["strategy"]
    assert settings.strict == by_flag.policy["strict_checkpoint"]


def test_each_reaches_the_workers(texts: dict[str, str], script: str, tmp_path: Path) -> None:
    arguments = [*arguments_of(texts), "--log-dir", str(tmp_path / "logs")]
    options, _ = agent_options(parse(["run", *arguments, script]), (1, 1))
    if options.is_island:
        options = on_island(options, "near")
    by_flag = parsed("run", *arguments_of(texts), script)
    world = World(
        generation=1,
        token="t",
        members=(Member("a", "i", "127.0.0.1", 1, 2, options.nproc),),
        strategy=options.policy.strategy,
        resume=Resume(tier="fresh"),
        reason="a test",
    )
    for assignment in assignments(options, world, 0, Secret("x")):
        assert isinstance(assignment, Assignment)
        for field in fields(TrainingSettings):
            if field.name != "checkpoint_dir":  # which the agent resolves
                assert getattr(assignment, field.name) == getattr(by_flag.training, field.name)
        island = "/islands/near" if options.is_island else ""
        assert assignment.checkpoint_dir == texts["checkpoint_dir"] + island


def test_ranks_compare_options_by_the_same_texts_as_the_release_before() -> None:
    """Nodes of both may be in one world, and compare a digest of the texts."""
    assert compared_options(TrainingSettings()) == {
        "--deterministic": "False",
        "--bucket-bytes": "None",
        "--on-nonfinite": "stop",
        "--on-spike": "off",
    }
    settings = TrainingSettings(
        deterministic=True,
        bucket_bytes="auto",
        on_nonfinite="skip",
        on_spike=spike_limit("--on-spike", SPIKES),
    )
    assert [*compared_options(settings).values()] == ["True", "auto", "skip", SPIKES]
    assert compared_options(TrainingSettings(wire=Wire(format="bf16")))["--wire"] == "bf16"


def test_no_field_of_the_settings_is_without_an_option() -> None:
    """Nor has any two."""
    filled = [row.field for row in TRAINING_OPTIONS if row.field.startswith("training.")]
    assert sorted(filled) == sorted(f"training.{field.name}" for field in fields(TrainingSettings))


WRONG = {
    "strategy": "zero9",
    "diloco": "evry=5",
    "shard": "rack",
    "redundancy": "twice",
    "deterministic": "perhaps",
    "bucket_bytes": "0",
    "wire": "int3",
    "verify_replicas": "often",
    "on_nonfinite": "later",
    "on_spike": "later",
    "allow_data_change": "model",
    "on_straggler": "wait",
    "straggler_factor": "0.5",
    "straggler_steps": "0",
    "flops_per_sample": "-1",
    "peak_flops": "many",
    "checkpoint_every": "-3",
    "save_timeout": "inf",
    "keep": "some",
    "keep_every": "-2",
    "strict_checkpoint": "perhaps",
    "snapshot_every": "-1",
}
"""A wrong value of each option whose value is no folder."""


def test_each_option_but_folders_has_a_wrong_value_here() -> None:
    assert WRONG.keys() == {o.name for o in TRAINING_OPTIONS if o.metavar != "DIR"}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_variable_has_the_same_error_with_an_agent_and_without(
    name: str, script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variable = f"ELASTICZERO_{name.upper()}"
    monkeypatch.setenv(variable, WRONG[name])
    assert main(["run", script]) == ExitCode.USAGE
    sentence = capsys.readouterr().err
    assert variable in sentence
    with pytest.raises(UserError) as refused:
        read_settings({variable: WRONG[name]})
    assert f"error: {refused.value}\n" == sentence


@pytest.mark.parametrize("row", [o for o in TRAINING_OPTIONS if o.numbers], ids=lambda o: o.name)
def test_an_option_takes_the_numbers_that_its_row_names(row: Option, tmp_path: Path) -> None:
    rows = {other.name: other for other in TRAINING_OPTIONS}
    names = ("checkpoint_dir", *NEEDED.get(row.name, ()))
    others = {rows[name].variable: value_of(rows[name], tmp_path) for name in names}
    number = row.parse
    assert isinstance(number, Number)
    least = number.least if number.includes_least else number.least + 1
    for taken in (str(least), str(least + 8), *number.alternatives):
        read_settings({**others, row.variable: taken})
    with pytest.raises(UserError, match=row.flags[0]):
        read_settings({**others, row.variable: str(least - 1)})


@pytest.mark.parametrize(
    ("flag", "refused", "taken"),
    [
        ("--spares", ["-1", "one"], {"0": 0, "7": 7}),
        ("--settle", ["-1", "nan", "-inf"], {"0": 0.0, "inf": math.inf}),
        ("--exit-timeout", ["-1", "nan", "inf"], {"0": 0.0, "2.5": 2.5}),
        ("--lease-ttl", ["1", "-1"], {"2": 2.0, "60": 60.0}),
        ("--max-restarts", ["-1"], {"0": 0, "3": 3}),
        ("--hang-timeout", ["-1", "nan", "inf", "never"], {"auto": None, "0": 0.0, "1e3": 1e3}),
        ("--checkpoint-every", ["-1"], {"0": 0, "1" + 400 * "0": 10**400}),
        ("--bucket-bytes", ["0", "-1", "inf", "1 MB a"], {"auto": "auto", "1": 1, "2KiB": 2048}),
        ("--flops-per-sample", ["0", "nan", "inf", "-1"], {"4.2e12": 4.2e12}),
        ("--snapshot-every", ["-1", "1.5", "+7"], {"auto": None, "0": 0, "12": 12}),
    ],
)
def test_a_number_is_refused_or_converted(
    flag: str, refused: list[str], taken: dict[str, Any]
) -> None:
    row = next(row for row in RUN_OPTIONS if row.flags[0] == flag)
    assert isinstance(row.parse, Number)
    for text in refused:
        with pytest.raises(UserError, match=re.escape(f"{flag} {text}: {row.parse.expected}")):
            row.parse(flag, row.value("", text))
    for text, expected in taken.items():
        number = row.parse(flag, row.value("", text))
        assert number == expected and type(number) is type(expected), text


def test_each_option_with_a_number_names_its_unit() -> None:
    """That of --nproc-per-node has four kinds of values, which its help names."""
    metavars = ("N", "K", "S", "SIZE", "F")
    without = [o.name for o in RUN_OPTIONS if o.metavar in metavars and not o.numbers]
    assert without == ["nproc_per_node"]


def test_checkpoints_need_a_directory_without_an_agent_too() -> None:
    with pytest.raises(
        UserError, match=r"--checkpoint-dir DIR.* .from ELASTICZERO_CHECKPOINT_EVERY."
    ):
        read_settings({"ELASTICZERO_CHECKPOINT_EVERY": "7"})
    assert read_settings({"ELASTICZERO_CHECKPOINT_EVERY": "0"}).checkpoint_every == 0
