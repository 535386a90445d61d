"""Defines the options of `run` on logs: of workers, of the agent, and what trackers get.

They are a part of the table of options, which `table` describes.
"""

from __future__ import annotations

from elasticzero.launcher.observability.progress.states import CHOICES
from elasticzero.launcher.options.trackers import tracker_targets
from elasticzero.options.option import Option, grouped
from elasticzero.options.values import Number, expanded_items, expanded_path
from elasticzero.text import bytes_of

LOG_OPTIONS = grouped(
    "logs",
    Option(
        ("--log-dir",),
        "The workers' output is written to DIR/JOB/NODE/LOCAL_RANK.log and no longer to the "
        "terminal. (default: a temporary directory, and the terminal)",
        metavar="DIR",
        expand=expanded_path,
        pet=True,
        in_local="taken",
        is_listed=True,
    ),
    Option(
        ("--progress",),
        "What the job does is shown by a line that moves (line), or by a line of the log every 30 "
        "s (log); auto takes line on a terminal, except where the variable CI says that this is a "
        "build server.",
        "auto",
        choices=CHOICES,
        in_local="taken",
    ),
    Option(
        ("--quiet", "-q"),
        "Only warnings, errors and the workers' output are shown.",
        False,
        is_switch=True,
        in_local="taken",
    ),
    Option(
        ("--log-level",),
        "The agent logs messages of this level and above.",
        "info",
        choices=("debug", "info", "warning", "error"),
    ),
    Option(
        ("--log-format",),
        "The agent logs text, or JSON: one object a line with the time, level, node, "
        "generation and rank.",
        "text",
        choices=("text", "json"),
        in_local="absent",
    ),
    Option(
        ("--log-max-size",),
        "A log that has this size is cut off, and its bytes become LOG.1; off: it may grow "
        "without a limit.",
        "1GiB",
        metavar="SIZE",
        parse=Number(
            unit="bytes",
            least=1,
            convert=bytes_of,
            alternatives={"off": 0},
            expected="a size such as 200MB, or off, is expected",
        ),
        field="logs.max_bytes",
    ),
    Option(
        ("--log-keep",),
        "N older parts of a log stay, as LOG.1 to LOG.N.",
        1,
        type=int,
        metavar="N",
        parse=Number(unit="parts", expected="a number of parts, 0 or more, is expected"),
        field="logs.keep",
    ),
    Option(
        ("--tee",),
        "The workers' output is repeated on the terminal even with --log-dir; torchrun's --tee "
        "STREAMS is accepted too (see --redirects).",
        False,
        is_switch=True,
        in_local="taken",
    ),
    Option(
        ("--log-to",),
        "The job's scalars (session.log) go to these trackers, each with its place after a colon: "
        "tensorboard:DIR (by default runs), wandb:DIR (wandb), mlflow:URI (MLflow's own setting).",
        metavar="TRACKERS",
        parse=tracker_targets,
        expand=expanded_items,
        field="log_to",
        is_listed=True,
    ),
)
