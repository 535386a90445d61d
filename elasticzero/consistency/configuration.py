"""Compares the configuration on which all ranks' scripts must agree, before anything depends on it.

Each rank describes its script's configuration as text by name. The ranks of a generation compare a
digest; only if it differs do they exchange the descriptions. The rank that differs from those that
have trained, or from rank 0, fails with both values. What a loop over batches must have in common
with a checkpoint is decided in `data/changes.py`.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from elasticzero.comm.barriers import Call
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.consistency.differences import Verdict, by_trained, difference
from elasticzero.data.loader import RankSchedule
from elasticzero.errors import PeerSetAside, UserError
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.ipc.assignment import Assignment
from elasticzero.options.settings import TrainingSettings
from elasticzero.options.training import compared_options
from elasticzero.parallel.optimizers.groups import Optimizers
from elasticzero.state.digests import combined, of_value
from elasticzero.state.model import NamedModel, Spec, spec_of
from elasticzero.version import __version__

log = logging.getLogger(__name__)

Description = Mapping[str, str]
ADVICE = "start every node with the same script, arguments and data"
PLAIN = (bool, int, float, str, type(None))
PACKAGES = ("torch", "numpy", "elasticzero")


def of_model(named: NamedModel, strategy: str, assignment: Assignment) -> Description:
    """Describes the names, shapes and dtypes of the model's state, which parameters are trained,
    the options that must be equal on all ranks, and what the bits of gradients depend on.

    Args:
        named: The model's parameters and buffers by name.
        strategy: The strategy's name.
        assignment: This rank's settings, of which those that are compared count.

    Returns:
        The description, of one entry for each parameter and buffer besides the settings.
    """
    description = {"strategy": strategy, **compared_options(assignment)}
    if assignment.deterministic:
        description["number of threads"] = str(torch.get_num_threads())
    for name, parameter in named.parameters.items():
        trained = "" if parameter.requires_grad else ", frozen"
        description[f"parameter {name!r}"] = _spec(spec_of(parameter)) + trained
    for name, buffer in named.buffers.saved().items():
        description[f"buffer {name!r}"] = _spec(spec_of(buffer))
    return description


def of_optimizers(optimizers: Optimizers) -> Description:
    """Describes the optimizers' classes, and the options and parameters of their groups."""
    description = {
        f"optimizer {name!r}" if name else "optimizer": type(optimizer).__name__
        for name, optimizer in optimizers.by_name.items()
    }
    for index, group in enumerate(optimizers.groups):
        of = f"of optimizer group {index}" if len(optimizers.groups) > 1 else "of the optimizer"
        description[f"number of parameters {of}"] = str(len(group.names))
        description[f"digest of the names {of}"] = f"{of_value(list(group.names)):016x}"
        for key, value in group.options.items():
            if key not in ("params", "param_names"):
                description[f"{key} {of}"] = _plain(value)
    return description


def of_loop(
    schedule: RankSchedule, loop: int, settings: TrainingSettings, allowed: Collection[str] = ()
) -> Description:
    """Describes the arguments of a call of `session.batches` on which the ranks' batches depend.

    The size of micro-batches is one, because their number determines how often ranks communicate.

    Args:
        schedule: This rank's micro-batches of the loop.
        loop: The loop's number.
        settings: The training settings, of which those of stragglers count where shares follow the
            ranks' speeds.
        allowed: The changes of data that the loop makes use of; only then is that option compared,
            of which ranks of the release before have nothing.

    Returns:
        The description, by the names of the arguments.
    """
    plan = schedule.plan
    whole = -(-plan.global_batch // schedule.world_size)
    size = schedule.most_samples
    values = {
        "loop": loop,
        "global_batch": plan.global_batch,
        "micro_batch": None if size is None or size >= whole else size,
        "virtual_batch": schedule.virtual_batch,
        "epochs": plan.epochs,
        "steps": plan.steps,
        "drop_last": plan.drop_last,
        **plan.order.described,
    }
    if plan.never_one:  # never where a rank may be of the release before
        values["samples of a BatchNorm"] = "two at least"
    if schedule.shares is not None:
        when = f"every {settings.straggler_steps} steps, from {settings.straggler_factor:g} times"
        values["--on-straggler"] = f"balance, {when}"
    if allowed:
        values["--allow-data-change"] = ",".join(allowed)
    return {name: _plain(value) for name, value in values.items()}


def in_any_world(loop: Description, schedule: RankSchedule) -> Description:
    """Returns what of a loop's description is the same in every world, and however often the loop
    has gone on since it began.

    Args:
        loop: The description that `of_loop` has made.
        schedule: This rank's micro-batches of the loop.
    """
    lasting = {name: value for name, value in loop.items() if name != "--allow-data-change"}
    return {**lasting, "micro_batch": _plain(schedule.micro_batch)}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


RELEASE = "elasticzero.__version__"
VERSIONS = {
    "Python": platform.python_version(),
    **{name: _version(name) for name in PACKAGES},
    RELEASE: __version__,
}
"""Versions of packages, read once at import, so that a forked worker need not read them. Ranks of
the release before do not give the last one."""


class Comparison:
    """Compares the descriptions of the scripts of one generation's ranks."""

    def __init__(self, groups: ProcessGroups | None, link: AgentClient) -> None:
        self._groups = groups
        self._link = link
        self.digests: list[int] = []
        """Digests of what was compared in `session.prepare`, in its order."""
        self.loop: Description = {}
        """The description of the newest loop, as it is in any world."""
        self.expected_loop: Callable[[Description], None] = lambda loop: None
        """Raises where a rank that comes into a world inside of the others' loops is in another
        one."""

    def require_equal(self, call: Call, description: Description) -> None:
        """Raises if the ranks' descriptions differ.

        A rank that differs from the accepted description gets a `UserError` with both values, and
        the others get `PeerSetAside`.

        Args:
            call: The call that all ranks make together.
            description: What this rank's script has configured.

        Raises:
            UserError: This rank differs, or makes another call than the others.
            PeerSetAside: Another rank differs.
            RetryError: Another rank makes another call.
        """
        differing = self._compare(call, description)
        if differing is None:
            return
        verdict, texts = differing
        rank = self._link.assignment.rank
        if rank in verdict.odd:
            raise UserError(f"{texts[verdict.odd.index(rank)]}; {ADVICE}")
        raise PeerSetAside("; ".join(texts))

    def begin_loop(self, loop: Description) -> None:
        """Notes the loop that begins or goes on, as it is in any world; raises where a rank that
        comes in is in another one than the others."""
        self.expected_loop(loop)
        self.loop = loop

    def warn_of_versions(self) -> bool:
        """Warns if the ranks' versions of packages differ, and returns whether all run the same
        release of ElasticZero; all ranks call this in `session.prepare`.

        A rank that differs from the others prints its differences, and rank 0 prints which ranks
        differ.
        """
        differing = self._compare(Call.PREPARE, VERSIONS)
        if differing is None:
            return True
        verdict, texts = differing
        for rank, text in zip(verdict.odd, texts, strict=True):
            if self._link.assignment.rank in (rank, 0):
                log.warning("warning: %s; results may depend on the rank", text)
        return RELEASE not in verdict.names

    def _compare(self, call: Call, description: Description) -> tuple[Verdict, list[str]] | None:
        """Returns the verdict, and a sentence for each odd rank; None: all ranks have the same."""
        groups, assignment = self._groups, self._link.assignment
        if groups is None:
            return None
        digest = combined({name: of_value(value) for name, value in description.items()})
        if call is Call.PREPARE:
            self.digests.append(digest)
        if assignment.world_size == 1:
            return None
        if groups.all_equal(call, digest):
            return None
        report = {
            "node": assignment.node,
            "trained": assignment.trained,
            "values": dict(description),
        }
        reports = [json.loads(text) for text in groups.exchange(json.dumps(report).encode())]
        tables, nodes = [r["values"] for r in reports], [r["node"] for r in reports]
        verdict = by_trained(tables, [rank for rank, r in enumerate(reports) if r["trained"]])
        assert verdict.accepted is not None
        texts = [difference(rank, tables, nodes, verdict.accepted) for rank in verdict.odd]
        return verdict, texts


def _spec(spec: Spec) -> str:
    return f"{str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}"


def _plain(value: Any) -> str:
    """Returns a text of a value that is the same in every process: without addresses and device
    numbers."""
    if isinstance(value, PLAIN):
        return str(value)
    if isinstance(value, Tensor):
        return str(value.item()) if value.numel() == 1 else _spec(spec_of(value))
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_plain, value))})"
    return type(value).__name__
