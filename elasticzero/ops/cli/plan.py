"""Computes what each strategy needs for a model on a cluster: `elasticzero plan`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

from elasticzero.errors import ExitCode, UserError
from elasticzero.launcher.options.parser import Parser
from elasticzero.memory_estimate import (
    FLAT_BUCKET_BYTES,
    STATE_SIZES,
    LineUp,
    ModelSize,
    checkpoint_bytes,
    first_that_fits,
    rank_memory,
    room_for_state,
    snapshot_bytes,
)
from elasticzero.ops.cli import island_costs, link_costs
from elasticzero.options.wire import EXACT, Wire, parse_wire
from elasticzero.spans import REDUNDANCIES, STRATEGIES, ShardOver
from elasticzero.text import bytes_of, count_text, print_result, size_text, table_text

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
PRECISIONS = ("bf16", "fp16", "fp32")
"""Values of `precision=` of `session.prepare`."""
DEFAULT_LAYERS = 32
"""Layers of a model whose largest layer is not given."""
COLUMNS = ("weights", "masters", "gradients", "optimizer", "buffers")


def add_plan_options(parser: Parser) -> None:
    """Adds the options of `plan`, and sets its `run_command`."""
    add = parser.add_argument
    add(
        "--params",
        required=True,
        type=_count,
        metavar="N",
        help="The model has N parameters, such as 7e9 or 7B.",
    )
    add("--nodes", type=_at_least_one, default=1, metavar="N", help="The job has N nodes.")
    add("--gpus", type=_at_least_one, default=1, metavar="N", help="A node has N GPUs.")
    add(
        "--precision",
        choices=PRECISIONS,
        default="bf16",
        help="The forward computes in this format, as precision= of session.prepare has it; "
        "gradients and optimizer state keep the parameters' dtype. (default: bf16)",
    )
    add(
        "--dtype",
        choices=sorted(ELEMENT_BYTES),
        default="fp32",
        help="The parameters have this dtype; 16-bit ones get 32-bit masters, but not with ddp, "
        "which is no first choice then. (default: fp32)",
    )
    add(
        "--optimizer",
        choices=sorted(STATE_SIZES),
        default="adamw",
        help="The optimizer keeps its state for each parameter.",
    )
    add(
        "--shard",
        choices=get_args(ShardOver),
        help="Strategies divide state over all ranks of the world, or over those of each node. "
        "(default: both are shown)",
    )
    add(
        "--redundancy",
        choices=REDUNDANCIES,
        default="snapshot",
        help="With mirror, each rank of several nodes keeps a live copy of another rank's part.",
    )
    add(
        "--gpu-memory",
        type=_bytes,
        default="80GiB",
        metavar="SIZE",
        help="A GPU has SIZE bytes of memory, such as 80GiB.",
    )
    add(
        "--activations",
        type=_bytes,
        metavar="SIZE",
        help="A step's activations take SIZE bytes on a GPU. (default: a fifth of its memory)",
    )
    add(
        "--layer-params",
        type=_count,
        metavar="N",
        help="The largest layer has N parameters; zero3 gathers one layer at a time. (default: "
        f"1/{DEFAULT_LAYERS} of the model)",
    )
    add(
        "--outer-params",
        type=_count,
        default=0,
        metavar="N",
        help="N parameters lie outside of the layers (embedding and head); zero3 gathers them for "
        "the whole step. (default: 0)",
    )
    add(
        "--frozen-params",
        type=_count,
        default=0,
        metavar="N",
        help="N of the parameters are not trained. (default: 0)",
    )
    add(
        "--bucket-bytes",
        type=_bytes,
        default=f"{FLAT_BUCKET_BYTES >> 20}MiB",
        metavar="SIZE",
        help="zero1 and zero2 send gradients in buckets of SIZE.",
    )
    add(
        "--wire",
        type=_wire,
        default=EXACT,
        metavar="FORMAT",
        help="ddp, zero1 and zero2 send gradients in FORMAT: fp32, bf16, fp8, int8, int4, "
        "topk:SHARE or powersgd:RANK; zero2 has no powersgd, and zero3 fp32 alone.",
    )
    add(
        "--cpu-offload",
        action="store_true",
        help="zero3 keeps its state in the nodes' RAM, and GPUs get one layer at a time.",
    )
    add(
        "--link",
        type=_link,
        metavar="SPEED",
        help="A node can send so much to others, such as 100mbit or 25gbit: the time of a step's "
        "messages is shown for each format, and that of rounds of --strategy diloco; one of each "
        "is recommended.",
    )
    add(
        "--step-time",
        type=_seconds,
        metavar="S",
        help="A step computes for S seconds, without waits for the network.",
    )
    add("--json", action="store_true", help="The result is printed as JSON, for scripts.")
    parser.set_defaults(run_command=_plan)


def _count(text: str) -> int:
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper())
    try:
        value = float(text if scale is None else text[:-1]) * (scale or 1)
        if not 0 <= value <= 1e18:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 7e9 or 7B") from None
    return round(value)


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _bytes(text: str) -> int:
    try:
        return bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _wire(text: str) -> Wire:
    try:
        return parse_wire(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _link(text: str) -> tuple[str, float]:
    """Returns the speed as it is written, and in bits a second."""
    try:
        return text, link_costs.bits_per_s(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds such as 0.2")
    return seconds


def _check_numbers(args: argparse.Namespace) -> None:
    """Refuses numbers of parameters that contradict one another."""
    if not args.params:
        raise UserError("--params 0: a model has at least 1 parameter; give 7e9 or 7B, for example")
    for option in ("layer_params", "outer_params", "frozen_params"):
        count = getattr(args, option) or 0
        if count > args.params:
            raise UserError(
                f"--{option.replace('_', '-')} {count:g}: the whole model has {args.params:g} "
                "parameters (--params)"
            )
    if args.step_time is not None and args.link is None:
        raise UserError("--step-time counts with --link alone, which says what a node can send")
    if args.link is not None and args.nodes == 1:
        raise UserError("--link: one node sends nothing to others; give --nodes 2 or more")


def _check_room(args: argparse.Namespace, room: int) -> None:
    """Refuses memory of which activations and CUDA leave nothing.

    Args:
        args: the parsed options of `plan`.
        room: Bytes of a GPU that training state may take.
    """
    if room <= 0:
        raise UserError(
            f"--gpu-memory {size_text(args.gpu_memory)}: activations and CUDA leave nothing of it "
            "for training state; write its unit, such as 80GiB, or fewer --activations"
        )


def _plan(args: argparse.Namespace) -> int:
    plan = compute_plan(args)
    text = plan_text(plan)
    if args.link is not None:
        text += "\n" + link_costs.costs_text(plan["link"], args.link[0])
    if "islands" in plan:
        text += "\n" + island_costs.rounds_text(plan["islands"], args.link[0])
    print_result(json.dumps(plan, indent=2) if args.json else text, end="")
    return int(ExitCode.DONE)


def compute_plan(args: argparse.Namespace) -> dict[str, Any]:
    """Computes what each strategy that takes the optimizer needs.

    Args:
        args: the parsed options of `plan`.

    Returns:
        The options that matter, a row of sizes in bytes for each strategy with each `--shard`, and
        by `--shard` the first strategy that fits; with `--link` the time of a step's messages, and
        with `--step-time` that of rounds of islands.

    Raises:
        UserError: a number of parameters contradicts another, or a GPU has no room for state.
    """
    _check_numbers(args)
    element_bytes = ELEMENT_BYTES[args.dtype]
    forward_bytes = ELEMENT_BYTES[args.precision]
    trained = max(args.params - args.frozen_params, 0)
    layer = min(args.params, args.layer_params or -(-args.params // DEFAULT_LAYERS))
    model = ModelSize(
        elements=trained,
        element_bytes=element_bytes,
        largest=min(trained, max(layer // 3, args.outer_params // 2)),
        layer=layer,
        outer=args.outer_params,
        frozen_bytes=(args.params - trained) * element_bytes,
        forward_bytes=forward_bytes if forward_bytes < element_bytes else 0,
    )
    kept = STATE_SIZES[args.optimizer]
    room = room_for_state(args.gpu_memory, args.activations, cuda=True)
    _check_room(args, room)
    shards = _shards(args)
    rows = []
    for strategy, shard in _cases(kept.strategies, shards, args.wire):
        line_up = _line_up(args, shard, args.wire)
        memory = rank_memory(strategy, model, kept, line_up, offloaded=args.cpu_offload)
        rows.append(
            {
                "strategy": strategy,
                "shard": shard,
                "lacks_masters": model.has_masters and strategy == "ddp",
                **asdict(memory),
                "total": memory.total,
                "left": args.gpu_memory - memory.total,
                "fits": memory.total <= room,
                "node_state": memory.host * args.gpus,
                "node_snapshots": snapshot_bytes(strategy, model, kept, line_up),
                "checkpoint": checkpoint_bytes(strategy, model, kept, line_up),
            }
        )
    plan = {
        "params": args.params,
        "dtype": args.dtype,
        "precision": args.precision,
        "optimizer": args.optimizer,
        "nodes": args.nodes,
        "gpus": args.gpus,
        "redundancy": args.redundancy,
        "wire": str(args.wire),
        "cpu_offload": args.cpu_offload,
        "gpu_memory": args.gpu_memory,
        "room_for_state": room,
        "layer_params": layer,
        "strategies": rows,
        "first_that_fits": {shard: first_that_fits(_needs(rows, shard), room) for shard in shards},
    }
    if args.link is not None:
        cluster = link_costs.Cluster(
            nodes=args.nodes,
            ranks_per_node=args.gpus,
            elements=trained,
            element_bytes=element_bytes,
            gathered_bytes=min(element_bytes, forward_bytes),
            layer=layer,
        )
        fitting = [
            (strategy, shard, wire)
            for wire in link_costs.formats(args.wire, cluster)
            for strategy, shard in _cases(kept.strategies, shards, wire)
            if not (model.has_masters and strategy == "ddp")
            and rank_memory(
                strategy, model, kept, _line_up(args, shard, wire), offloaded=args.cpu_offload
            ).total
            <= room
        ]
        plan["link"] = link_costs.costs(fitting, cluster, args.link[1], args.step_time)
        if args.step_time is not None:
            plan["islands"] = island_costs.round_costs(
                args.nodes, args.params, args.link[1], args.step_time
            )
    return plan


def _line_up(args: argparse.Namespace, shard: ShardOver | None, wire: Wire) -> LineUp:
    """Returns the ranks of the plan.

    Args:
        args: the parsed options of `plan`.
        shard: How state is divided; None: it is not.
        wire: The format of gradients.
    """
    return LineUp(
        nodes=args.nodes,
        ranks_per_node=args.gpus,
        shard=shard or "world",
        bucket_bytes=args.bucket_bytes,
        mirrored=args.redundancy == "mirror",
        sent_bytes=wire.sent_bytes,
    )


def _shards(args: argparse.Namespace) -> Sequence[ShardOver]:
    """Returns the values of `--shard` that the plan shows; on one node they mean the same."""
    if args.shard is not None:
        return (args.shard,)
    return get_args(ShardOver) if args.nodes > 1 else ("world",)


def _cases(
    strategies: Iterable[str], shards: Sequence[ShardOver], wire: Wire
) -> Iterator[tuple[str, ShardOver | None]]:
    """Yields each strategy that sends such gradients with each way to divide its state; ddp has
    none."""
    for strategy in strategies:
        for shard in (None,) if strategy == "ddp" else shards:
            if not wire.refusal(strategy, by_node=shard == "node"):
                yield strategy, shard


def _needs(rows: Iterable[Mapping[str, Any]], shard: ShardOver) -> dict[str, int]:
    """Returns the bytes of each strategy that may be chosen on a rank with `--shard SHARD`."""
    return {
        row["strategy"]: row["total"]
        for row in rows
        if row["shard"] in (None, shard) and not row["lacks_masters"]
    }


def plan_text(plan: dict[str, Any]) -> str:
    """Returns the plan as a table, with a line that names the first strategies that fit."""
    ranks = plan["nodes"] * plan["gpus"]
    mirrors = ("mirrors",) if plan["redundancy"] == "mirror" else ()
    columns = (*COLUMNS, *mirrors, *(("residual",) if plan["wire"] != "fp32" else ()))
    rows = [
        [
            row["strategy"],
            row["shard"] or "-",
            *(size_text(row[column]) for column in columns),
            size_text(row["total"]),
            "yes" if row["fits"] else "no",
            *([size_text(row["node_state"])] if plan["cpu_offload"] else []),
            size_text(row["node_snapshots"]),
            size_text(row["checkpoint"]),
        ]
        for row in plan["strategies"]
    ]
    node = ["state in a node's RAM"] if plan["cpu_offload"] else []
    node.append("snapshots in a node's RAM")
    heads = ("strategy", "shard", *columns, "each rank", "fits", *node, "checkpoint")
    refused = ""
    if plan["wire"] != "fp32":
        refused = f" {_refusing(plan['wire'])} --wire {plan['wire']}."
    elif not any(row["strategy"] == "zero3" for row in plan["strategies"]):
        refused = f" zero3 refuses {plan['optimizer']}, which packs its state by blocks."
    return (
        f"{plan['params']:.4g} parameters in {plan['dtype']} with {plan['optimizer']}, on "
        f"{count_text(plan['nodes'], 'node')} of {count_text(plan['gpus'], 'GPU')} with "
        f"{size_text(plan['gpu_memory'])} each: {count_text(ranks, 'rank')}\n"
        f"{_assumption(plan['dtype'], plan['precision'])}\n\n"
        f"{table_text(heads, rows)}\n"
        f"{_verdict(plan['first_that_fits'])} Training state may take "
        f"{size_text(plan['room_for_state'])} of a GPU; the rest is for activations and CUDA."
        f"{refused}\n"
    )


def _refusing(wire: str) -> str:
    """Returns who refuses a format, as the beginning of a sentence."""
    names = [name for name in STRATEGIES if parse_wire(wire).refusal(name)]
    return f"{' and '.join(names)} {'refuse' if len(names) > 1 else 'refuses'}"


def _assumption(dtype: str, precision: str) -> str:
    """Returns a sentence about the formats that the plan counts with.

    Args:
        dtype: Dtype of the parameters.
        precision: Format of the forward.
    """
    if ELEMENT_BYTES[dtype] == 2:
        return (
            f"Assumed: parameters and gradients in {dtype} (--dtype), with masters and optimizer "
            "state in fp32. ddp keeps no masters, so that small updates are lost: it is no first "
            "choice."
        )
    forward = "the forward too (--precision)"
    if precision != dtype:
        how = f'--precision, session.prepare(…, precision="{precision}")'
        forward = f"the forward in {precision} ({how})"
    return f"Assumed: parameters, gradients and optimizer state in {dtype} (--dtype), {forward}."


def _verdict(first: Mapping[ShardOver, str | None]) -> str:
    """Returns a sentence about the first strategy that fits with each `--shard`."""
    if not any(first.values()):
        return "None fits: take more or larger GPUs, or a smaller model."
    if len(set(first.values())) == 1:
        return f"{next(iter(first.values()))} is the first that fits."
    choices = (f"{name or 'none'} with --shard {shard}" for shard, name in first.items())
    return f"The first that fits is {', '.join(choices)}."
