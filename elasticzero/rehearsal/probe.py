"""Writes the records of one rank in a generation, and holds or kills it where a fault is to come.

It draws no random numbers and changes no value, but for the one gradient that it is to nudge.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from elasticzero.data.position import GlobalBatch, LoopPlan, MicroBatch
from elasticzero.errors import UserError
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.ipc.messages import FLAG_STOP
from elasticzero.parallel.gradients import GradientHook
from elasticzero.rehearsal.owners import Owners
from elasticzero.rehearsal.plan import Plan
from elasticzero.rehearsal.records import Header, Moment, StepRecord, header_line, record_line
from elasticzero.rehearsal.unkept import UnkeptTensors

POLL_S = 0.01
CAPTURE_S = 5.0
"""Seconds for which a capture is waited for."""
NARROW = (torch.float16, torch.bfloat16)
"""Types of parameters that have 32-bit masters under zero1, zero2 and zero3."""


def nudge(gradient: Tensor, unit: float) -> None:
    """Changes each element but zeros by one unit in the last place, away from zero.

    A sum in another order errs by a unit of what is summed, which may be much more than what is
    left of it. So small elements count as large as those of the whole tensor are on average.

    Args:
        gradient: The gradient, which is changed in place.
        unit: One unit in the last place, of the number 1.
    """
    if gradient.numel():
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        size = wide.abs().clamp_min(wide.square().mean().sqrt())
        gradient.copy_(wide + wide.sign() * size * unit)


class NudgingHook(GradientHook):
    """Nudges the gradients, after the script's own function was called with them."""

    def __init__(self, script: GradientHook | None, unit: torch.dtype | None) -> None:
        """Takes the script's hook.

        Args:
            script: The script's hook; None: it has none.
            unit: The type whose unit counts; None: that of each gradient.
        """
        super().__init__(lambda name, elements: None, lambda: 0)
        self.script = script
        self._unit = unit

    def call(self, gradients: Mapping[str, tuple[int, Tensor]]) -> dict[str, float]:
        """Calls the script's function, and changes the gradients."""
        results = dict.fromkeys(gradients, 0.0)
        if self.script is not None:
            results = self.script.call(gradients)
        with torch.no_grad():
            for _, gradient in gradients.values():
                nudge(gradient, torch.finfo(self._unit or gradient.dtype).eps)
        return results


class Probe:
    """Records what one rank of a generation has at each boundary."""

    def __init__(
        self,
        plan: Plan,
        owners: Owners,
        link: AgentClient,
        header: Header,
        unit: torch.dtype | None = None,
    ) -> None:
        """Begins before the first step.

        Args:
            plan: What the workers of this run do.
            owners: The objects in which the training state lives.
            link: The client of the agent.
            header: What is known of the script before its first loop.
            unit: The type in which forwards compute; None: that of the parameters.
        """
        self._plan, self._owners, self._link, self._header = plan, owners, link, header
        self._unit = unit
        self._place = link.assignment
        self._file = plan.records(self._place.generation, self._place.rank)
        self._recorded: int | None = None
        """The step of the newest record; None: there is none."""
        self._generators: tuple[str, ...] = ()
        """Digests of the random generators at the newest record."""
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._samples: list[int] = []
        self._nudging: NudgingHook | None = None
        self._unkept: UnkeptTensors | None = None
        if plan.looks_around and owners.is_first and owners.strategy.shards == 1:
            self._unkept = UnkeptTensors(owners.tensors, owners.objects)
        if torch.cuda.is_available():
            torch.use_deterministic_algorithms(True, warn_only=True)

    def begin(self, step: int, *, virtual_batch: bool) -> None:
        """Records the state before the generation's first step; all ranks call this together, and
        what a later loop calls changes nothing.

        Args:
            step: Number of steps made.
            virtual_batch: Whether the loop has `virtual_batch=`.
        """
        if self._recorded is not None:
            return
        self._file.write_text(header_line(replace(self._header, virtual_batch=virtual_batch)))
        self._write(step, Moment.START)
        self._wait_for_stop(step)

    def give(self, plan: LoopPlan, batch: GlobalBatch, part: MicroBatch) -> None:
        """Takes note of the samples of a micro-batch that the script is given.

        Args:
            plan: The plan of the loop.
            batch: The global batch.
            part: The micro-batch.
        """
        if part.weight:
            start, stop = part.positions.start, part.positions.stop
            try:
                indices = plan.indices(GlobalBatch(epoch=batch.epoch, start=start, stop=stop))
            except UserError:  # the samples of a stream have none
                return
            self._samples += indices

    def hook(self, script: GradientHook | None, step: int) -> GradientHook | None:
        """Returns what is to be called with the gradients of a step.

        Args:
            script: The script's own hook; None: it has none.
            step: The number of the step.
        """
        if step != self._plan.nudge_step:
            return script
        self._nudging = NudgingHook(script, self._unit)
        return self._nudging

    def complete(self, norm: float, loss: float) -> None:
        """Takes note of what a step has computed, before it is applied.

        Args:
            norm: The norm of all gradients.
            loss: The mean loss of the global batch.
        """
        self._norms.append(norm)
        self._losses.append(loss)
        nudging, self._nudging = self._nudging, None
        if nudging is not None and nudging.script is not None:
            nudging.script.sums = nudging.sums

    def record(self, step: int) -> None:
        """Records the state at the boundary after a step; all ranks call this together.

        step: number of steps made; a second record of one changes nothing.
        """
        if step != self._recorded:
            self._write(step, Moment.BOUNDARY)

    def _write(self, step: int, moment: Moment) -> None:
        generators = self._owners.generators()
        digests = tuple(value.digest for value in generators)
        record = StepRecord(
            generation=self._place.generation,
            rank=self._place.rank,
            world_size=self._place.world_size,
            step=step,
            moment=moment,
            loss=math.fsum(self._losses).hex() if self._losses else "",
            gradient_norm=math.fsum(self._norms).hex() if self._norms else "",
            samples=tuple(self._samples),
            live=(*self._owners.live(), *generators),
            draws=moment is Moment.BOUNDARY and digests != self._generators,
        )
        with self._file.open("a") as file:
            file.write(record_line(record))
        if self._unkept is not None:
            self._unkept.look()
            self._plan.unkept.write_text(json.dumps(list(self._unkept.names)))
        self._recorded, self._generators = step, digests
        self._losses, self._norms, self._samples = [], [], []

    def hold(self, step: int, is_idle: Callable[[], bool]) -> None:
        """Waits at the boundary after a step, where the plan says so, or ends this process.

        Up to that boundary it also waits until the capture of each has ended, for a real step takes
        longer than one.

        Args:
            step: Number of steps made.
            is_idle: Returns whether no capture is in flight.

        Raises:
            GenerationEnded: The agent has ended the generation meanwhile.
        """
        plan, rank = self._plan, self._place.rank
        before = self._place.generation == 1 and step <= (plan.hold_step or 0)
        if before and not self._link.standalone:
            until_s = time.monotonic() + CAPTURE_S
            self._wait(lambda: is_idle() or time.monotonic() > until_s)
        if before and step == plan.hold_step:
            plan.held(rank).touch()
            if plan.kill_rank is None:
                self._wait(self._may_go)
            elif plan.kill_rank == rank:
                self._wait(lambda: all(map(self._is_held, range(self._place.world_size))))
                os.kill(os.getpid(), signal.SIGKILL)
        self._wait_for_stop(step)

    def _is_held(self, rank: int) -> bool:
        return self._plan.held(rank).exists()

    def _may_go(self) -> bool:
        """Tells whether the command has let the ranks go on, and tells it what the agent asks."""
        if self._link.flags:
            self._plan.asked(self._place.rank).touch()
        return self._plan.go.exists()

    def _wait_for_stop(self, step: int) -> None:
        """Waits, once one step is left, until the agent asks for the end at the next boundary."""
        if step >= self._plan.steps - 1 and not self._link.standalone:
            self._plan.ending(self._place.rank).touch()
            self._wait(self._may_end)

    def _may_end(self) -> bool:
        """Tells whether the agent of any rank asks for the end."""
        if self._link.flags & FLAG_STOP:
            self._plan.end.touch()
        return self._plan.end.exists()

    def _wait(self, is_over: Callable[[], bool]) -> None:
        with self._link.busy("a rehearsal waits"):
            while not is_over():
                self._link.check()
                time.sleep(POLL_S)
