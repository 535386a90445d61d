"""Defines the table of training options: strategy, checkpoints, snapshots, and what is verified.

`elasticzero run`, `elasticzero local` and `python train.py` read it. `option.py` says what a row
is.
"""

from __future__ import annotations

from typing import get_args

from elasticzero.memory_estimate import AUTO
from elasticzero.options.diloco import NAME, diloco_of
from elasticzero.options.option import Option, grouped
from elasticzero.options.settings import (
    OnNonFinite,
    OnStraggler,
    TrainingSettings,
    data_changes,
    spike_limit,
)
from elasticzero.options.values import Number, expanded_path
from elasticzero.options.wire import wire_of
from elasticzero.spans import REDUNDANCIES, STRATEGIES, ShardOver
from elasticzero.text import bytes_of

_STEPS_OR_AUTO = Number(
    unit="steps", alternatives={"auto": None}, expected="a number of steps, 0 or auto is expected"
)

_STRATEGY = grouped(
    "training",
    Option(
        ("--strategy",),
        "ddp keeps all state on every rank; zero1 shards the optimizer state over the ranks, "
        "zero2 the gradients too, zero3 the parameters too; auto takes the first that fits the "
        "memory of all ranks, anew in each generation; diloco makes each node an island, which "
        "trains by itself and averages with the others every so many steps.",
        "ddp",
        choices=(*STRATEGIES, NAME, AUTO),
        field="policy.strategy",
        is_listed=True,
    ),
    Option(
        ("--diloco",),
        "Settings of --strategy diloco that are not the defaults, separated by commas, such as "
        "every=50,outer-lr=0.7,outer-momentum=0.9: islands average every so many inner steps, by "
        "an outer step of SGD.",
        metavar="NAME=VALUE,…",
        is_table=True,
        parse=diloco_of,
        field="training.diloco",
    ),
    Option(
        ("--shard",),
        "A strategy divides state over all ranks of the world, or over those of each node, so that "
        "every node holds the whole state. ddp divides nothing.",
        "world",
        choices=get_args(ShardOver),
        field="policy.shard",
        is_listed=True,
    ),
    Option(
        ("--redundancy",),
        "What a lost node's part of divided state is read from: snapshot is the last snapshot in "
        "memory; mirror is a copy that another node keeps up to date in each step, so that no "
        "finished step is lost.",
        "snapshot",
        choices=REDUNDANCIES,
        field="policy.redundancy",
    ),
    Option(
        ("--deterministic",),
        "Gradients are summed slice by slice in one fixed order, so that the result is the same to "
        "the last bit in every world; session.batches needs virtual_batch=.",
        False,
        is_switch=True,
        field="training.deterministic",
        is_compared=True,
        is_listed=True,
    ),
    Option(
        ("--bucket-bytes",),
        "ddp, zero1 and zero2 send gradients in buckets of SIZE, such as 16MiB; auto measures once "
        "in a job with which size they take the least time. (default: 25MiB for ddp, 16MiB for "
        "zero1 and zero2)",
        metavar="SIZE",
        parse=Number(
            unit="bytes",
            least=1,
            convert=bytes_of,
            alternatives={"auto": "auto"},
            expected="a size such as 16MiB, or auto, is expected",
        ),
        field="training.bucket_bytes",
        is_compared=True,
    ),
    Option(
        ("--wire",),
        "ddp, zero1 and zero2 send gradients as they are (fp32), encoded in 16 (bf16), 8 (fp8, "
        "int8) or 4 bits (int4), the largest alone (topk:0.01 for a hundredth of them), or, "
        "without zero2, matrices as products of two narrow ones (powersgd:4); ranks still add them "
        "up in the format that they have in memory, and what is left out of a gradient comes in a "
        "later step.",
        "fp32",
        metavar="FORMAT",
        parse=wire_of,
        field="training.wire",
        is_compared=True,
        is_new=True,
    ),
    Option(
        ("--verify-replicas",),
        "The ranks verify every N steps that their parameters, optimizer state and "
        "tracked objects are equal; 0 never does, auto does as often as 0.03 percent of the "
        "training time allows.",
        "auto",
        metavar="N",
        parse=_STEPS_OR_AUTO,
        field="training.verify_every",
    ),
    Option(
        ("--on-nonfinite",),
        "Where a loss or a gradient is NaN or infinite, stop ends the job with the state before "
        "that step saved, skip leaves the global batch out, and rollback goes back to a held state "
        "and leaves the batch out from there.",
        "stop",
        choices=get_args(OnNonFinite),
        field="training.on_nonfinite",
        is_compared=True,
        is_listed=True,
    ),
    Option(
        ("--on-spike",),
        "Where a loss is more than K standard deviations above the mean of the last N steps, the "
        "job stops (stop:K:N), leaves the global batch out (skip:K:N), or goes back to a held "
        "state and leaves it out from there (rollback:K:N).",
        "off",
        metavar="ACTION:K:N",
        parse=spike_limit,
        field="training.on_spike",
        is_compared=True,
    ),
    Option(
        ("--allow-data-change",),
        "Where training goes on within a loop, that loop may have another global_batch (batch), or "
        "another dataset, seed, shuffle or sampler (dataset), or both (batch,dataset); the "
        "position is carried over. (default: neither, and such a change is refused)",
        metavar="WHAT",
        parse=data_changes,
        field="training.allow_data_change",
        is_listed=True,
    ),
    Option(
        ("--on-straggler",),
        "Where a rank takes longer for its own part of a step than the others, report shows it, "
        "and balance gives it a smaller part of each global batch too. The gradient stays the mean "
        "over the whole batch.",
        "report",
        choices=get_args(OnStraggler),
        field="training.on_straggler",
    ),
    Option(
        ("--straggler-factor",),
        "With --on-straggler balance, a rank is slow whose own time is F times the median or more.",
        1.3,
        float,
        metavar="F",
        parse=Number(
            unit="times",
            least=1,
            convert=float,
            expected="a number such as 1.3, 1 or more, is expected",
        ),
        field="training.straggler_factor",
    ),
    Option(
        ("--straggler-steps",),
        "With --on-straggler balance, the ranks compare their speeds every N steps.",
        20,
        int,
        metavar="N",
        parse=Number(unit="steps", least=1, expected="1 or more steps are expected"),
        field="training.straggler_steps",
    ),
    Option(
        ("--flops-per-sample",),
        "The model needs F floating-point operations for the forward and the backward of one "
        "sample. With --peak-flops the metrics have the model FLOPs utilization.",
        metavar="F",
        parse=Number(
            unit="operations",
            includes_least=False,
            convert=float,
            expected="a number of operations, such as 4.2e12, is expected",
        ),
        field="flops_per_sample",
    ),
    Option(
        ("--peak-flops",),
        "The device of one worker can do F floating-point operations a second, in the format in "
        "which the model computes.",
        metavar="F",
        parse=Number(
            unit="operations a second",
            includes_least=False,
            convert=float,
            expected="operations a second, such as 989e12, are expected",
        ),
        field="peak_flops",
    ),
)

_CHECKPOINTS = grouped(
    "checkpoints",
    Option(
        ("--checkpoint-dir",),
        "Checkpoints are stored in this directory or URL, which all nodes must be able to reach.",
        metavar="DIR",
        expand=expanded_path,
        field="training.checkpoint_dir",
        is_listed=True,
    ),
    Option(
        ("--checkpoint-every",),
        "A checkpoint is saved every N steps; 0 saves one at the end only.",
        0,
        int,
        metavar="N",
        parse=Number(unit="steps", expected="0 or more steps are expected"),
        field="training.checkpoint_every",
        is_listed=True,
    ),
    Option(
        ("--save-timeout",),
        "A failed save of the last state is retried for S seconds; then the job ends without it.",
        600.0,
        float,
        metavar="S",
        parse=Number(unit="seconds", convert=float, expected="0 or more seconds are expected"),
        field="policy.save_timeout_s",
    ),
    Option(
        ("--keep",),
        "Only the newest N good checkpoints are kept. (default: all)",
        metavar="N",
        parse=Number(
            unit="checkpoints",
            least=1,
            checks_least=False,
            expected="a whole number, 1 or more, is expected",
        ),
        field="keep.last",
        is_listed=True,
    ),
    Option(
        ("--keep-every",),
        "With --keep, checkpoints whose step is a multiple of K are never removed.",
        metavar="K",
        parse=Number(
            unit="steps",
            least=1,
            checks_least=False,
            expected="a whole number, 1 or more, is expected",
        ),
        field="keep.every",
    ),
    Option(
        ("--strict-checkpoint",),
        "A damaged checkpoint ends the job; otherwise training resumes from the checkpoint "
        "before it.",
        False,
        is_switch=True,
        field="policy.strict_checkpoint",
    ),
)

_SNAPSHOTS = grouped(
    "snapshots in memory",
    Option(
        ("--snapshot-every",),
        "A snapshot is taken into the nodes' memory every N steps; 0 takes none, auto takes "
        "them as often as half a percent of the training time allows.",
        "auto",
        metavar="N",
        parse=_STEPS_OR_AUTO,
        field="training.snapshot_every",
        is_listed=True,
    ),
    Option(
        ("--snapshot-dir",),
        "Snapshots are stored in this directory of shared memory; what does not fit is stored "
        "in the temporary directory (TMPDIR).",
        "/dev/shm",
        metavar="DIR",
        expand=expanded_path,
    ),
)

TRAINING_OPTIONS = (*_STRATEGY, *_CHECKPOINTS, *_SNAPSHOTS)


def compared_options(settings: TrainingSettings) -> dict[str, str]:
    """Returns the texts of the options that must be equal on all ranks, by their flags."""
    texts = {}
    for option in TRAINING_OPTIONS:
        if option.is_compared:
            value = getattr(settings, option.field.removeprefix("training."))
            if option.is_new and str(value) == option.default:
                continue
            texts[option.flags[0]] = str(option.default if value is None else value)
    return texts
