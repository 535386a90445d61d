"""Defines the settings of strategy diloco, and parses their text. Pure."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from elasticzero.errors import UserError
from elasticzero.options.wire import parse_wire
from elasticzero.spans import STRATEGIES

NAME = "diloco"
"""The strategy's name."""
FOLDER = "islands"
"""Below it are the parts of a job that each island has for itself: in etcd, and of checkpoints."""
WIRES = ("fp32", "bf16", "fp8", "int8", "int4", "topk", "powersgd")
"""Formats of what islands send each other; `topk` with a share and `powersgd` with a rank, as
`--wire` has them."""
INNER = STRATEGIES
"""Strategies with which an island can train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCo:
    """Trains on islands that average what they have learnt every so many steps.

    Each node is an island. It makes inner steps by itself, and contributes by how much these have
    changed its parameters. The mean of the islands' contributions, weighted by samples, is the
    gradient of an outer step: SGD with Nesterov momentum (Douillard et al., arXiv 2311.08105).
    """

    every: int = 50
    """Number of inner steps between two contributions to a fragment."""
    outer_lr: float = 0.7
    """Learning rate of the outer step; 1, with an `outer_momentum` of 0, averages parameters."""
    outer_momentum: float = 0.9
    fragments: int = 1
    """Number of parts of the model that are averaged one after the other (arXiv 2501.18512)."""
    overlap: int = 0
    """Number of inner steps after a contribution, after which its round is in time."""
    alpha: float = 0.0
    """Share of an island's own parameters that stays where it takes a round in time."""
    quorum: float = 1.0
    """Share of the islands without which no round is closed."""
    grace: int = 2
    """Number of inner steps that an island makes before the others of its quorum are averaged
    without the rest."""
    wait: float = 0.0
    """Seconds for which an island waits at most for a round that it has contributed to, once it has
    made its `overlap` steps; it goes on then, and takes the round when that comes."""
    wire: str = "fp32"
    """Format in which contributions and their mean are sent: fp32, bf16, fp8, int8, int4,
    topk:SHARE or powersgd:RANK. What a contribution leaves out by it comes with the next one."""
    inner: str = "ddp"
    """Strategy with which an island trains: ddp, zero1, zero2 or zero3."""

    def checked(self) -> DiLoCo:
        """Returns the settings; raises `UserError` for a value that is not possible."""
        possible = {
            "every": self.every >= 1,
            "outer_lr": self.outer_lr > 0,
            "outer_momentum": 0 <= self.outer_momentum < 1,
            "fragments": 1 <= self.fragments <= self.every,
            "overlap": 0 <= self.overlap < max(1, self.every // max(1, self.fragments)),
            "alpha": 0 <= self.alpha < 1,
            "quorum": 0 < self.quorum <= 1,
            "grace": self.grace >= 0,
            "wait": 0 <= self.wait < math.inf,
            "wire": _is_wire(self.wire),
            "inner": self.inner in INNER,
        }
        for name, holds in possible.items():
            if not holds:
                raise UserError(
                    f"diloco has {name}={getattr(self, name)}; {_EXPECTED[name]} is expected"
                )
        return dataclasses.replace(self, wire=str(parse_wire(self.wire)))


def _is_wire(text: str) -> bool:
    """Returns whether islands can send each other that format."""
    try:
        return parse_wire(text).format in WIRES
    except ValueError:
        return False


_EXPECTED = {
    "every": "a number of inner steps, 1 at least,",
    "outer_lr": "a number above 0",
    "outer_momentum": "a number from 0 to below 1",
    "fragments": "a number from 1 to that of `every`",
    "overlap": "a number of inner steps below every / fragments",
    "alpha": "a number from 0 to below 1",
    "quorum": "a number above 0, and 1 at most,",
    "grace": "a number of inner steps",
    "wait": "a number of seconds",
    "wire": f"one of {', '.join(WIRES[:-2])}, topk:SHARE or powersgd:RANK, such as topk:0.01,",
    "inner": f"one of {', '.join(INNER)}",
}
"""Says what a value may be, by name."""
_KINDS = {"int": int, "float": float, "str": str}


def diloco_of(flag: str, text: str | None) -> DiLoCo | None:
    """Parses `every=50,outer-lr=0.7`: values by name, separated by commas; there are no settings
    without a text.

    Args:
        flag: Option that is named in errors.
        text: The values that are not the defaults; None: the option is not given.

    Raises:
        UserError: A name is unknown, or a value is not possible.
    """
    if text is None:
        return None
    kinds = {field.name: _KINDS[str(field.type)] for field in dataclasses.fields(DiLoCo)}
    values = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if name not in kinds:
            names = ", ".join(kinds).replace("_", "-")
            raise UserError(f"{flag} {text}: {part!r} is none of {names}, with = and a value")
        try:
            values[name] = kinds[name](value)
        except ValueError:
            shown = f"{name.replace('_', '-')} is {value!r}"
            raise UserError(f"{flag} {text}: {shown}; {_EXPECTED[name]} is expected") from None
    try:
        return DiLoCo(**values).checked()
    except UserError as error:
        raise UserError(f"{flag} {text}: {error}") from None


def island_nodes_of(flag: str, text: str | None) -> tuple[int, int] | None:
    """Parses the number of nodes of an island, `N` or `MIN:MAX`, to the fewest and the most.

    Args:
        flag: Option that is named in errors.
        text: The number; None: the option is not given.

    Raises:
        UserError: It is no such number.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(?:(\d+):)?(\d+)", str(text))
    least, most = (int(match[1] or 1), int(match[2])) if match else (0, 0)
    if not 1 <= least <= most:
        raise UserError(
            f"{flag} {text}: a number of nodes, or MIN:MAX, is expected, such as 4 or 2:4"
        )
    return least, most


def islands_of(strategy: str, settings: DiLoCo | None) -> DiLoCo | None:
    """Returns the settings of a job's islands; None: its nodes are no islands.

    Args:
        strategy: What `--strategy` says.
        settings: What `--diloco` says; None: nothing.

    Raises:
        UserError: There are settings of islands, and no islands.
    """
    if strategy == NAME:
        return settings or DiLoCo()
    if settings is not None:
        raise UserError(f"--diloco needs --strategy {NAME}, and not {strategy}: give both or none")
    return None
