"""Saves the outer parameters and momentum with an island's state, and restores them.

They are those of the newest round that the island knows: the samples that its position in the data
has left are those behind that round. They are stored by parameter, so that a run with another
number of fragments takes them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from elasticzero.ipc.rounds import PARTS, FragmentNews, outer_name, own_name
from elasticzero.islands.files import mapped
from elasticzero.islands.layout import FragmentLayout
from elasticzero.spans import Span
from elasticzero.state.model import OUTER, LoadTarget, Spec


class Rounds(Protocol):
    """Knows the newest rounds."""

    @property
    def newest(self) -> Sequence[FragmentNews]:
        """Returns the newest news of each fragment; none before the rounds begin."""


class SavedOuter:
    """Reads and writes the outer state for captures."""

    def __init__(
        self,
        folder: Path,
        layouts: Sequence[FragmentLayout],
        shapes: Mapping[str, tuple[int, ...]],
        rounds: Rounds,
        *,
        loads: bool,
    ) -> None:
        """Begins before the state is restored.

        Args:
            folder: Folder of the node's files of the rounds.
            layouts: The fragments.
            shapes: Shape of each parameter and buffer of theirs.
            rounds: The newest rounds.
            loads: Whether this rank restores them for its node.
        """
        self._folder, self._layouts, self._shapes = folder, layouts, shapes
        self._rounds, self._loads = rounds, loads
        self._first: dict[str, Tensor] | None = None
        """Tensors of the files with what a worker begins with, until the rounds begin."""
        self.is_restored = False
        """True once the files of what a worker begins with have an outer state."""

    def stored(self) -> Mapping[str, Tensor]:
        """Returns the tensors to save, by name: of the same shapes always, so that captures have
        one size. Before the rounds begin they mean nothing."""
        newest = [(news.round, news.digest) for news in self._rounds.newest]
        if newest:
            self._first = None
            return dict(self._tensors(newest))
        if self._first is None:
            self._first = dict(self._tensors(()))
        return self._first

    def _tensors(self, newest: Sequence[tuple[int, str]]) -> Iterator[tuple[str, Tensor]]:
        for number, layout in enumerate(self._layouts):
            for part in PARTS:
                if newest:
                    path = self._folder / outer_name(number, *newest[number], part)
                    flat_E = mapped(path, layout, create=False)
                else:
                    flat_E = mapped(self._folder / own_name(number, part), layout, create=True)
                for name, span in layout.spans():
                    tensor = flat_E[span.start : span.stop].view(self._shapes[name])
                    yield f"{part}/{name}", tensor

    def targets(self, specs: Mapping[str, Spec], json: Mapping[str, Any]) -> Sequence[LoadTarget]:
        """Returns where a stored outer state goes, on the rank that restores it; none where there
        is none of this model.

        Args:
            specs: Shape and dtype of each stored tensor.
            json: The stored state that is no tensor.
        """
        island = (json.get("position") or {}).get("island") or {}
        fits = all(
            specs.get(f"{OUTER}{part}/{name}")
            == Spec(dtype=layout.torch_dtype, shape=self._shapes[name])
            for layout in self._layouts
            for name in layout.names
            for part in PARTS
        )
        if not (island.get("incarnation") and fits):
            return ()
        self.is_restored = True
        self._first = dict(self._tensors(()))
        if not self._loads:
            return ()
        return [
            LoadTarget(f"{OUTER}{name}", Span(0, tensor.numel()), tensor)
            for name, tensor in self._first.items()
        ]
