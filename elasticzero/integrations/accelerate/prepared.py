"""Presents the session's parts as accelerate's prepared ones: loader, optimizer and scheduler."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Sized
from typing import Any, cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from elasticzero.errors import UserError
from elasticzero.session import Session


class LoopSize:
    """Holds what the training state needs besides the script's objects; `session.track` keeps
    it."""

    def __init__(self, requested: int | None, first: int) -> None:
        """Begins with the global batch that the script requests.

        Args:
            requested: samples in a step over all ranks that the script gives, which the session
                takes or refuses; None: as many as training began with.
            first: samples in a step with which training begins if the script gives none.
        """
        self.global_batch = requested or first
        self._requested = requested

    def state_dict(self) -> dict[str, int]:
        return {"global_batch": self.global_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.global_batch = self._requested or state["global_batch"]


class Registered:
    """Holds an object that the script registers for checkpointing, which it may do after `prepare`
    has restored the state; `session.track` keeps it."""

    def __init__(self) -> None:
        self._thing: Any = None
        self._state: Any = None
        """The state that was restored before the object was registered."""

    @property
    def is_open(self) -> bool:
        """Returns whether the script has still to register its object."""
        return self._thing is None

    def adopt(self, thing: Any) -> None:
        """Takes the script's object, and gives it the state that was restored."""
        self._thing = thing
        if self._state is not None:
            thing.load_state_dict(self._state)
            self._state = None

    def state_dict(self) -> Any:
        return self._state if self._thing is None else self._thing.state_dict()

    def load_state_dict(self, state: Any) -> None:
        if self._thing is None:
            self._state = state
        else:
            self._thing.load_state_dict(state)


class GradientNorm:
    """Holds the norm of a step's whole gradient, which is known once the optimizer has stepped."""

    def __init__(self, session: Session) -> None:
        self._session, self._step = session, session.step_count

    def item(self) -> float:
        """Returns the norm; raises `UserError` before the optimizer's step."""
        norm = self._session.gradient_norm
        if norm is None or self._session.step_count == self._step:
            raise UserError(
                "the gradient's norm is known once optimizer.step() has ended the global batch: "
                "read what clip_grad_norm_ returned after that, where accelerator.sync_gradients"
            )
        return norm

    def __float__(self) -> float:
        return self.item()


class ElasticLoader:
    """Gives this rank's micro-batches of one epoch, or of what is left of it."""

    def __init__(
        self,
        loader: DataLoader[Any],
        session: Session,
        size: LoopSize,
        accumulated: int,
        registered: Sequence[Registered],
    ) -> None:
        """Takes the script's training loader.

        Args:
            loader: has the dataset, the batch size and how samples are loaded.
            session: gives the micro-batches.
            size: has the samples in a step over all ranks.
            accumulated: micro-batches of a step on one rank in the world that training began with.
            registered: the objects that the script registers for checkpointing.
        """
        self.dataset, self.batch_size = loader.dataset, loader.batch_size
        self._loader, self._session, self._size = loader, session, size
        self._accumulated = accumulated
        self._registered = registered

    @property
    def total_batch_size(self) -> int:
        """Returns the number of samples in a step over all ranks."""
        return self._size.global_batch

    def __len__(self) -> int:
        """Returns the batches of an epoch on each rank in the world that training began with, the
        same in every world; raises `TypeError` for a stream."""
        if isinstance(self._loader.dataset, IterableDataset):
            raise TypeError("a stream has no length")
        whole = math.floor if self._loader.drop_last else math.ceil
        steps = max(1, whole(len(cast(Sized, self._loader.sampler)) / self._size.global_batch))
        return steps * self._accumulated

    def __iter__(self) -> Iterator[Any]:
        missing = [str(number) for number, entry in enumerate(self._registered) if entry.is_open]
        if missing:
            raise UserError(
                f"the state that training goes on from has {len(self._registered)} objects of "
                "accelerator.register_for_checkpointing, and the script has not registered "
                f"{'that' if len(missing) == 1 else 'those'} of place {', '.join(missing)}: "
                "register the same objects in the same order before the loop"
            )
        return self._session.batches(
            self._loader,
            global_batch=self._size.global_batch,
            micro_batch=self._loader.batch_size,
            epochs=1,
        )

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: each pass is the next epoch."""


class ElasticOptimizer:
    """Steps the session where a script steps its optimizer; in all else it is the optimizer."""

    def __init__(self, optimizer: Optimizer, session: Session) -> None:
        self.optimizer = optimizer
        self._max_grad_norm: float | None = None
        """The limit for the coming step; None: no limit."""
        self.stepped = False
        """True if the last call has ended a global batch, and its step was applied."""
        self.ended = False
        """True if the last call has ended a global batch."""
        self._session = session

    @property
    def step_was_skipped(self) -> bool:
        """Returns whether the last global batch was left out."""
        return self.ended and not self.stepped

    def clip_coming_step(self, max_norm: float) -> None:
        """Limits the norm of the whole gradient, for the step of the present global batch alone."""
        self._max_grad_norm = max_norm

    def step(self, closure: None = None) -> None:
        """Ends a micro-batch; the optimizer steps at a global batch's last one."""
        if closure is not None:
            raise UserError("optimizer.step(closure) is not supported: call backward before it")
        self.ended = self._session.micro_batch.last
        self.stepped = self._session.step(max_grad_norm=self._max_grad_norm)
        if self.ended:
            self._max_grad_norm = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the session drops gradients once their step is applied."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)


class ElasticScheduler:
    """Steps a scheduler as often as accelerate does in the world that training began with: once
    for each rank at each step of the optimizer."""

    def __init__(
        self, scheduler: LRScheduler, optimizer: ElasticOptimizer, size: LoopSize, batch: int
    ) -> None:
        """Takes the script's scheduler.

        Args:
            scheduler: it is stepped by `step`, where the optimizer was.
            optimizer: the prepared one.
            size: has the samples in a step over all ranks.
            batch: samples of a step on one rank in the world that training began with.
        """
        self.scheduler = scheduler
        self._optimizer, self._size, self._batch = optimizer, size, batch

    def step(self, *args: Any, **others: Any) -> None:
        if not self._optimizer.stepped:
            return
        for _ in range(max(1, self._size.global_batch // self._batch)):
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler.last_epoch < total:
                self.scheduler.step(*args, **others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["scheduler"], name)
