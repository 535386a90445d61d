"""Defines what a rehearsal records of each rank and step, and the JSON lines that hold it.

A rank writes one file a generation, `<directory>/<generation>-<rank>.jsonl`. Its first line is a
`Header`; each line after it is a `StepRecord`. A process that is killed while it writes leaves a
last line without an end, which is left out.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


class Moment(enum.Enum):
    """The moment at which a record was made."""

    START = "start"
    """After the restore, before the generation's first step."""
    BOUNDARY = "boundary"
    """After a step, at the boundary that follows it."""


@dataclass(frozen=True, slots=True)
class LiveValue:
    """One value that training goes on from, read from its owner."""

    kind: str
    """parameter, buffer, extra state, optimizer, optimizer attribute, tracked, or generator"""
    name: str
    """such as 'head.calls', "state['net.0.weight']['exp_avg']" or "param_groups[0]['lr']" """
    digest: str
    """blake2b of dtype, shape and bytes, or of the canonical text of a plain value"""
    text: str
    """short, for sentences: '6', 'float32[3, 4]'"""
    projections: tuple[float, ...] = ()
    """8 sums in float64 with signs fixed by the name; none for what is not numeric"""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one rank has at one moment of one step."""

    generation: int
    rank: int
    world_size: int
    step: int
    """number of steps made: the START of generation 1 has 0"""
    moment: Moment
    loss: str = ""
    """`float.hex()` of the rank's loss of this step; empty at START"""
    gradient_norm: str = ""
    """`float.hex()` of the norm of all gradients; empty where there is none"""
    samples: tuple[int, ...] = ()
    """indices of the samples of the rank's batch of this step"""
    live: tuple[LiveValue, ...] = ()
    """Whole values on rank 0, at least; values of kind 'generator' are those of each rank."""
    draws: bool = False
    """True: the forward or the data of this step drew from a generator."""


@dataclass(frozen=True, slots=True)
class Header:
    """What holds for a script during all of a generation."""

    virtual_batch: bool = False
    """True: draws belong to samples, whatever the world."""
    batch_norm: bool = False
    """True: the model has a layer whose values depend on which samples share a batch."""
    half_parameters: bool = False
    """True: the model has parameters of 16 bits."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run of a rehearsal gives to the comparison."""

    strategy: str
    fault: str
    """none, none again, nudged, kill-worker, kill-node, drain, or join"""
    world: int
    """number of ranks at the beginning"""
    fault_step: int
    records: tuple[StepRecord, ...]
    exit_code: int
    refusal: str
    """the sentence in which the run was refused; empty where it was not"""
    failure: str
    """the last error where the run failed otherwise; empty where it did not"""
    virtual_batch: bool
    batch_norm: bool
    half_parameters: bool
    wire: str = "fp32"
    """the format of gradients between ranks"""


def header_line(header: Header) -> str:
    """Returns the first line of a rank's file, with its end."""
    return json.dumps({"header": dataclasses.asdict(header)}) + "\n"


def record_line(record: StepRecord) -> str:
    """Returns the line of one record, with its end."""
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    fields["moment"] = record.moment.value
    fields["live"] = [dataclasses.astuple(value) for value in record.live]
    return json.dumps(fields) + "\n"


def parse_lines(lines: Iterable[str]) -> tuple[Header, list[StepRecord]]:
    """Reads one rank's file.

    Returns:
        The header, with no property set where the file has no header, and the records in order.

    Raises:
        ValueError: A line is no record.
    """
    header, records = Header(), []
    for line in lines:
        if not line.endswith("\n"):
            break
        fields = json.loads(line)
        if "header" in fields:
            header = Header(**fields["header"])
        else:
            records.append(_record(fields))
    return header, records


def _record(fields: Mapping[str, Any]) -> StepRecord:
    live = tuple(
        LiveValue(kind, name, digest, text, tuple(projections))
        for kind, name, digest, text, projections in fields["live"]
    )
    return StepRecord(
        generation=int(fields["generation"]),
        rank=int(fields["rank"]),
        world_size=int(fields["world_size"]),
        step=int(fields["step"]),
        moment=Moment(fields["moment"]),
        loss=str(fields["loss"]),
        gradient_norm=str(fields["gradient_norm"]),
        samples=tuple(fields["samples"]),
        live=live,
        draws=bool(fields["draws"]),
    )
