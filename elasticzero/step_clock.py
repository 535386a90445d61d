"""Measures the time that a rank spends on its own part of a step.

That is the time of its forwards and backwards, without that for which they waited for data or for
collectives, whether of a slower peer or of the network. On a GPU it is the GPU's own time, which
CUDA events give once the step is over. FSDP2 waits where this module does not see it: with zero3
its waits count as the rank's own time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch


class _Waits:
    """Adds up the waits of this process for collectives."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.events: list[tuple[Any, Any]] | None = None
        """CUDA events around each wait of the present global batch; None: the host's clock
        counts."""


_waits = _Waits()


def wait_for(works: Iterable[Any]) -> None:
    """Waits for collectives that have begun, one after another, and counts the time; raises their
    errors."""
    before = _mark() if _waits.events is not None else None
    began_s = time.monotonic()
    try:
        for work in works:
            work.wait()
    finally:
        _waits.seconds += time.monotonic() - began_s
    if _waits.events is not None and before is not None:
        _waits.events.append((before, _mark()))


def _mark() -> Any:
    """Returns an event that the GPU passes when it has done all work submitted so far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class StepClock:
    """Measures this rank's own time in the micro-batches of one global batch at a time."""

    def __init__(self, *, on_gpu: bool) -> None:
        self.began_s = 0.0
        """Start of the global batch, later by what was excluded, by the monotonic clock."""
        self.data_wait_s = 0.0
        """Time in seconds for which the global batch waited for samples."""
        self._on_gpu = on_gpu
        self._own_s = 0.0
        self._began_s: float | None = None
        """Start of the present micro-batch; None: none runs."""
        self._waited_s = 0.0
        """Seconds of waits before it."""
        self._start: Any = None
        """The event at its start, on a GPU."""
        self._spans: list[tuple[Any, Any]] = []
        """Events at the start and the end of each micro-batch before."""
        self._excluded: list[tuple[Any, Any]] = []
        """Events around the waits within them."""
        self._measurable = True
        """False: a GPU's events around a micro-batch have other work of the script between them."""

    def reset(self) -> None:
        """Begins another global batch."""
        self.began_s, self.data_wait_s = time.monotonic(), 0.0
        self._own_s, self._began_s, self._measurable = 0.0, None, True
        self._spans, self._excluded = [], []

    def waited(self, seconds: float) -> None:
        """Adds a wait for samples."""
        self.data_wait_s += seconds

    def start(self) -> None:
        """Notes that the script gets a micro-batch."""
        self._began_s, self._waited_s = time.monotonic(), _waits.seconds
        _waits.events = [] if self._on_gpu else None
        if self._on_gpu:
            self._start = _mark()

    def stop(self) -> None:
        """Notes that the backward of the micro-batch is over."""
        if self._began_s is None:
            return
        own_s = time.monotonic() - self._began_s - (_waits.seconds - self._waited_s)
        self._own_s += max(0.0, own_s)
        self._began_s = None
        if self._on_gpu:
            self._spans.append((self._start, _mark()))
            self._excluded += _waits.events or []
            _waits.events = None

    def exclude_since(self, since_s: float) -> None:
        """Excludes the time since then, in which the script has done something else."""
        self.began_s += time.monotonic() - max(since_s, self.began_s)
        if self._began_s is not None:
            self._began_s += time.monotonic() - max(since_s, self._began_s)
        self._measurable = self._measurable and not self._on_gpu

    @property
    def seconds(self) -> float | None:
        """Returns this rank's own time in the global batch; None: it is not known.

        On a GPU it is known once the GPU has done the work, as the norm of the gradient shows.
        """
        if not self._on_gpu:
            return self._own_s
        if not self._measurable or not self._spans or not self._spans[-1][1].query():
            return None
        spans, waits = (
            sum(begin.elapsed_time(end) for begin, end in pairs)
            for pairs in (self._spans, self._excluded)
        )
        return float(max(0.0, spans - waits)) / 1000
