"""Keeps what parameters were at a boundary, where a script changes them before the step after it.

Where a peer is lost within a step, or the step fails, the others hand over the state of the
boundary before it. The next generation computes the step again, and the script makes its changes
again: noise, a mask, an encoder that follows another one in a forward. So the state must not have
them yet.

Rules:
 BV1  What changes between a boundary and the step of the optimizers is of the step. torch's counts
      of changes and the addresses of parameters show it. A change that neither shows, through
      `.data`, is found in the steps in which the strategy compares values.
 BV2  From the boundary after such a change on, the parameter is copied at each boundary. Where the
      boundary's state is captured within a step, it has the copied value.
 BV3  A change of a parameter that is not copied leaves a rank without the boundary's state.
 BV4  The script works with a boundary's state in `on_epoch_end`, before it is the next one's. What
      is stored is read before it, and once more where the generation ends in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from elasticzero.state.digests import digests
from elasticzero.state.model import RankState
from elasticzero.torch_internals.tensors import counts_of_changes, without_torch_functions


class BoundaryValues:
    """Knows which parameters have changed since the last boundary, and copies of their values."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Begins before the first boundary.

        Args:
            parameters: The parameters of the model by name, as this rank has them.
        """
        self._parameters = {n: p for n, p in parameters.items() if not p.is_inference()}
        # One of another class, such as a DTensor, may have no memory of its own.
        self._plain = {n: p for n, p in self._parameters.items() if type(p) is nn.Parameter}
        self._marks: tuple[list[int], list[int]] | None = None
        """Counts of changes, and addresses, at the last boundary; None: there was none."""
        self._changing: set[str] = set()
        """The parameters that the script has changed between a boundary and a step before."""
        self._copies: dict[str, Tensor] = {}
        self._watched: tuple[Callable[[], RankState], dict[str, int]] | None = None
        """Returns what is stored, with its digests at the boundary; None: it is not compared."""

    def _marks_now(self) -> tuple[list[int], list[int]]:
        with without_torch_functions():  # a parameter that is gathered would wait
            places = [parameter.data_ptr() for parameter in self._plain.values()]
            return counts_of_changes(self._parameters.values()), places

    def mark(self) -> None:
        """Takes the parameters as they are for those of a boundary, and copies none yet."""
        self._copies = {}
        self._marks = self._marks_now()
        self._watched = None

    def watch(self, stored: Callable[[], RankState]) -> None:
        """Has `are_there` compare the values of what is stored, until the next boundary (BV4).

        Args:
            stored: Returns the parameters and optimizer state that this rank has.
        """
        self._watched = stored, _digests(stored())

    def copy(self) -> None:
        """Copies those that change before steps (BV2); waits for those that are being gathered, and
        raises torch's error if a peer is gone."""
        for name in self._changing:
            self._copies[name] = self._parameters[name].data.clone()

    def copy_all(self) -> None:
        """Copies all parameters, as the boundary has them, until the next one."""
        self._copies = {name: p.data.clone() for name, p in self._parameters.items()}

    def changed(self) -> set[str]:
        """Returns the names of those that have changed since the boundary, as far as torch
        tells (BV1)."""
        if self._marks is None:
            return set()
        (counts, places), (counts_now, places_now) = self._marks, self._marks_now()
        if counts == counts_now and places == places_now:
            return set()
        pairs = [*zip(self._parameters, counts, counts_now, strict=True)]
        pairs += zip(self._plain, places, places_now, strict=True)
        return {name for name, before, now in pairs if before != now}

    def learn(self) -> None:
        """Has what has changed since the boundary copied at each further one; it is called before
        the optimizers change anything."""
        self._changing |= self.changed()

    def learn_compared(self, names: Collection[str]) -> None:
        """Does what `learn` does, for parameters that the strategy has found changed by value."""
        self._changing |= set(names) & self._parameters.keys()

    def are_there(self, names: Collection[str]) -> bool:
        """Returns whether the boundary's values of all parameters are there, in place or copied.

        names: those that the strategy has found changed by their values.
        """
        changed = self.changed() | (set(names) & self._parameters.keys())
        if not changed <= self._copies.keys():
            return False
        if self._watched is None:
            return True
        stored, before = self._watched
        return _digests(stored()) == before

    def put_back(self) -> None:
        """Gives the parameters that are copied the boundary's values."""
        for name, copy in self._copies.items():
            self._parameters[name].data.copy_(copy)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Gives the copied parameters the boundary's values as long as the block runs."""
        present = {name: self._parameters[name].data.clone() for name in self._copies}
        self.put_back()
        try:
            yield
        finally:
            for name, values in present.items():
                self._parameters[name].data.copy_(values)


def _digests(state: RankState) -> dict[str, int]:
    return digests({name: held.tensor for name, held in state.held.items()})
