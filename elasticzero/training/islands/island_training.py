"""Trains an island in a loop over batches: it takes samples, contributes, and takes rounds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from elasticzero.comm.process_group import ProcessGroups
from elasticzero.data.loader import BatchReader, ClaimedBatches, RankSchedule
from elasticzero.data.position import DataPosition, EpochEnd, GlobalBatch
from elasticzero.data.streams.loader import StreamReader
from elasticzero.data.streams.plan import StreamPlan
from elasticzero.errors import UserError
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.ipc.rounds import NONE, ROUNDS_FOLDER, IslandProgress, JoinRounds, SamplesLeft
from elasticzero.islands.claimed_stream import ClaimedStream
from elasticzero.islands.elements import Elements, RankPlace, elements_of
from elasticzero.islands.kinds import claimed, plan_of_islands
from elasticzero.islands.layout import described, fragments_of
from elasticzero.islands.plan import ClaimTable
from elasticzero.islands.progress import with_ends
from elasticzero.islands.rounds import IslandRounds, Part
from elasticzero.islands.saved_outer import SavedOuter
from elasticzero.islands.stream_plan import IslandStreamPlan
from elasticzero.options.diloco import NAME, DiLoCo
from elasticzero.parallel.base import Strategy
from elasticzero.serialization import encode
from elasticzero.state.outer_state import OuterState
from elasticzero.training.step_machine import StepEvent
from elasticzero.training.step_tracker import StepTracker
from elasticzero.training.training_state import TrainingState

LOOK_POLLS = 125
"""Number of looks for news, some 0.25 s, between two for what ends the generation, where an island
waits. All ranks look for news together, and so for the other too."""


class IslandTraining:
    """Brings the rounds into the loop of one rank."""

    def __init__(
        self,
        link: AgentClient,
        groups: ProcessGroups | None,
        settings: DiLoCo,
        strategy: Strategy,
        tracker: StepTracker,
        outer: OuterState,
    ) -> None:
        """Begins before the state is restored.

        Args:
            link: The client of the agent.
            groups: The process groups of the island.
            settings: The settings of the islands.
            strategy: The strategy of this island.
            tracker: The state of the step that this rank works on.
            outer: What is saved and restored of the rounds.
        """
        self._link, self._settings, self._tracker = link, settings, tracker
        self._strategy, model = strategy, strategy.model
        tensors = {**dict(model.named_parameters()), **_floating_buffers(model)}
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                raise UserError(
                    f"{name} is not contiguous in memory, as islands need their parameters and "
                    "buffers (--strategy diloco): leave out its memory_format, or use ddp"
                )
        self._layouts = fragments_of(
            dict(model.named_parameters()), _floating_buffers(model), settings.fragments
        )
        self._table = ClaimTable()
        self._on_epoch_end: Callable[[], object] | None = None
        folder = Path(link.assignment.snapshot_root) / ROUNDS_FOLDER
        self._rounds = IslandRounds(
            link,
            Part(
                least=_least(groups),
                folder=folder,
                elements=self._elements,
            ),
            settings,
            self._layouts,
            lambda: tracker.record(StepEvent.TEAR),
        )
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        loads = link.assignment.local_rank == 0
        self._saved = SavedOuter(folder, self._layouts, shapes, self._rounds, loads=loads)
        if link.assignment.checkpoint_dir is not None:
            outer.stored, outer.targets = self._saved.stored, self._saved.targets

    @contextmanager
    def _elements(self) -> Iterator[Elements]:
        assignment, buffers = self._link.assignment, _floating_buffers(self._strategy.model)
        place = RankPlace(
            world_size=assignment.world_size,
            rank=assignment.rank,
            nodes=assignment.nodes,
            local_world_size=assignment.local_world_size,
            local_rank=assignment.local_rank,
        )
        with self._strategy.changing() as state:
            yield elements_of(state, buffers, place)

    def schedule(
        self, schedule: RankSchedule, on_epoch_end: Callable[[], object] | None
    ) -> RankSchedule:
        """Returns the schedule of a loop whose samples the rounds give.

        Args:
            schedule: That of all samples.
            on_epoch_end: The script's function; None: it gave none.

        Raises:
            UserError: The loop has something that islands cannot have.
        """
        if schedule.virtual_batch is not None and isinstance(schedule.plan, StreamPlan):
            raise UserError(
                "strategy diloco has no virtual_batch= for streams: leave it out, or use ddp"
            )
        self._on_epoch_end = on_epoch_end
        return replace(schedule, plan=plan_of_islands(schedule.plan, self._table))

    def open(
        self,
        training: TrainingState,
        schedule: RankSchedule,
        reader: BatchReader | StreamReader,
    ) -> ClaimedBatches | ClaimedStream:
        """Joins the rounds with the state that the loop begins with, and returns its batches.

        Args:
            training: The training state.
            schedule: What this rank computes of the loop.
            reader: Reads the dataset.

        Raises:
            UserError: The loop is not the script's first.
        """
        if training.position.loop:
            raise UserError(
                "strategy diloco trains in one loop over session.batches: give its phases jobs of "
                "their own"
            )
        plan, data = claimed(schedule, reader)
        self._plan, self._data = plan, data
        progress = training.position.island or plan.begun_by(training.position)
        if not self._saved.is_restored:
            self._rounds.write_own()
        common = [
            plan.order.inputs,
            [plan.section, plan.sections, plan.total, plan.limit, plan.global_batch],
            described(self._layouts),
            encode(self._settings),
        ]
        text = json.dumps(common, sort_keys=True, default=str).encode()
        self._link.send(
            JoinRounds(
                settings=self._settings,
                section=plan.section,
                is_stream=isinstance(plan, IslandStreamPlan),
                total=plan.total,
                limit=plan.limit,
                global_batch=plan.global_batch,
                digest=hashlib.sha256(text).hexdigest()[:16],
                fragments=tuple(layout.shape for layout in self._layouts),
                progress=progress,
                has_momentum=self._saved.is_restored,
            )
        )
        return data

    def at_boundary(
        self, training: TrainingState, ends_epoch: Callable[[int], None]
    ) -> tuple[GlobalBatch, DataPosition] | None:
        """Follows the rounds between two steps, and waits until there is something to train on; all
        ranks call this together.

        Args:
            training: The training state.
            ends_epoch: Called before the script's function for an epoch of which all samples are
                committed, with its number.

        Returns:
            The next batch and the position after it; None: all samples are committed, or training
            is to stop.
        """
        following = self._follow(training, ends_epoch)
        if following is None and not self._is_over(training):
            following = self._wait(training, ends_epoch)
        self._data.begin_at(training.position)
        return following

    def _wait(
        self, training: TrainingState, ends_epoch: Callable[[int], None]
    ) -> tuple[GlobalBatch, DataPosition] | None:
        """Waits until there is something to train on; returns it, or None where all samples are
        committed, or training is to stop."""
        following, polls = None, 0
        with self._link.busy("waiting for samples or a round"):
            while following is None and not self._is_over(training):
                self._rounds.pause()
                following, polls = self._follow(training, ends_epoch), polls + 1
                if polls % LOOK_POLLS == 0:
                    training.begin_backward()  # submits what this rank knows
                    training.at_boundary()  # which ends the generation where the node leaves
                    if training.stopped is not None:
                        return None
        return following

    def _follow(
        self, training: TrainingState, ends_epoch: Callable[[int], None]
    ) -> tuple[GlobalBatch, DataPosition] | None:
        before = _island_of(training)
        has_samples = self._next(training) is not None
        progress = self._rounds.at_boundary(_island_of(training), has_samples=has_samples)
        if progress.incarnation != before.incarnation:
            self._data.drop()
            # A newcomer's schedules go on where those of the others are.
            passed = progress.left.committed // self._plan.global_batch
            training.step = max(training.step, passed)
            # One that begins without a state has no part in the epochs before it came.
            ended = before.epochs if before.incarnation else self._ended_epochs(progress.left)
            progress = replace(progress, epochs=ended)
        _go_on_with(training, progress)
        self._tracker.record(StepEvent.KEPT)
        self._table.claims = self._rounds.claims if self._rounds.takes_part else ()
        self._end_epochs(training, ends_epoch)
        if training.stopped is not None or self._rounds.waits_for_round(progress):
            return None
        return self._next(training)

    def _next(self, training: TrainingState) -> tuple[GlobalBatch, DataPosition] | None:
        """Returns the next batch that the island has samples for; all ranks call this together."""
        self._data.prepare(training.position)
        claims = [(claim.start, claim.stop) for claim in self._table.claims]
        before, plan = _island_of(training), self._plan
        _go_on_with(training, with_ends(before, plan.ends, claims, plan.section))
        return plan.next(training.position)

    def _end_epochs(self, training: TrainingState, ends_epoch: Callable[[int], None]) -> None:
        """Has the script's function run for each epoch that has ended."""
        island = _island_of(training)
        for epoch in range(island.epochs, self._ended_epochs(island.left)):
            ends_epoch(epoch)
            island = replace(_island_of(training), epochs=epoch + 1)
            after = replace(training.position, island=island)
            training.end_epoch(EpochEnd(self._on_epoch_end, after))
            if training.stopped is not None:
                return

    def _ended_epochs(self, left: SamplesLeft) -> int:
        """Returns the number of epochs of which all samples are committed."""
        return left.first // self._plan.epoch_positions

    def _is_over(self, training: TrainingState) -> bool:
        return training.stopped is not None or self._rounds.is_over(_island_of(training))


def open_islands(
    link: AgentClient,
    groups: ProcessGroups | None,
    strategy: str | DiLoCo | None,
    tracker: StepTracker,
) -> tuple[str, Callable[[Strategy, OuterState], IslandTraining] | None]:
    """Returns the strategy of an island, and what makes its part in the rounds; None: there are no
    islands.

    Args:
        link: The client of the agent.
        groups: The process groups.
        strategy: What the script has given `session.prepare`.
        tracker: The state of the step that this rank works on.

    Raises:
        UserError: The nodes were not started as islands, or are and the script trains otherwise.
    """
    settings = None if link.standalone else link.assignment.diloco
    if isinstance(strategy, DiLoCo):
        if settings is None:
            raise UserError(
                "session.prepare got strategy=DiLoCo(…), and the nodes of this job are no islands: "
                "start them with elasticzero run --strategy diloco"
            )
        settings, strategy = strategy.checked(), None
    if settings is None:
        name = strategy or link.assignment.strategy
        if name == NAME:
            raise UserError(
                "strategy diloco needs the nodes of the job to be islands: start them with "
                "elasticzero run --strategy diloco"
            )
        return name, None
    if strategy is not None:
        raise UserError(
            f"session.prepare got strategy={strategy!r}, and the nodes of this job are islands "
            "(--strategy diloco): leave one of the two out"
        )
    chosen = settings

    def make(of_island: Strategy, outer: OuterState) -> IslandTraining:
        return IslandTraining(link, groups, chosen, of_island, tracker, outer)

    return settings.inner, make


def _go_on_with(training: TrainingState, progress: IslandProgress) -> None:
    """Takes this for how far the island is, where that is new."""
    if progress != _island_of(training):
        training.position = replace(training.position, island=progress)
        training.copy = training.copy_now()


def _island_of(training: TrainingState) -> IslandProgress:
    return training.position.island or NONE


def _floating_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {n: b for n, b in model.named_buffers() if b.is_floating_point()}


def _least(groups: ProcessGroups | None) -> Callable[[int], int]:
    """Returns what finds the least of all ranks' numbers."""

    def least(number: int) -> int:
        return number if groups is None else -groups.control_tree.allreduce_max(-number)

    return least
