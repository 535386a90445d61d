"""Answers the requests of the ranks' store as torch's TCPStore does, one after another.

Pure: the time comes in, and answers come out, also those of requests that have waited.

Rules:
 KV1  A request that waits for keys is answered once all of them have come, or at its limit. A limit
      of 0 is none.
 KV2  A key that comes and is deleted again has come for those that wait for it; a request for its
      value goes on waiting.
 KV3  `compare_set` sets a key that does not exist where the expected value is empty. Otherwise it
      sets a key that has the expected value. It returns the value that the key has then, or what
      was expected where there is no such key.
 KV4  `add` counts in 64 bits, and keeps the sum as decimal digits; a key that does not exist
      counts from 0.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from elasticzero.comm.store.wire import MAX_VALUES_BYTES, Message, Operation, Outcome

Answer = tuple[int, Message]
"""The number of the asker, and its answer."""
WRAP = 1 << 64
MAX_DIGITS = 32
"""Length of a value beyond which it is no number that can be added to."""


@dataclass(slots=True)
class _Wait:
    keys: tuple[bytes, ...]
    missing: set[bytes]
    until_s: float
    wants_values: bool


class Table:
    """Holds the keys, their values, and the requests that wait for keys."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._waits: dict[int, _Wait] = {}
        """The requests that wait, by asker; each asker has one request at a time."""
        self._askers: dict[bytes, set[int]] = {}
        """The askers that wait for a key."""
        self._limits: list[tuple[float, int]] = []
        """A heap of (time, asker) with those of requests that were answered meanwhile."""

    def ask(self, asker: int, request: Message, now_s: float) -> list[Answer]:
        """Carries out a request; returns its answer, if it has one yet, and those of others.

        Args:
            asker: Number of the connection that asks; none of its requests may be waiting.
            request: The request.
            now_s: The time.
        """
        parts = request.parts
        match request.code, len(parts):
            case (Operation.SET, count) if count % 2 == 0:
                return [(asker, _done()), *self._set_all(parts)]
            case (Operation.GET | Operation.WAIT, _):
                return self._wait(asker, request, now_s)
            case (Operation.CHECK, _):
                return [(asker, _done(int(all(key in self._values for key in parts))))]
            case (Operation.ADD, 1):
                return self._add(asker, parts[0], request.number)
            case (Operation.COMPARE_SET, 3):
                return self._compare_set(asker, *parts)
            case (Operation.DELETE, 1):
                return [(asker, _done(int(self._values.pop(parts[0], None) is not None)))]
            case (Operation.APPEND, 2):
                value = self._values.get(parts[0], b"") + parts[1]
                return [(asker, _done()), *self._set(parts[0], value)]
            case (Operation.COUNT, 0):
                return [(asker, _done(len(self._values)))]
            case _:
                return [(asker, _refused(f"no request {request.code} of {len(parts)} parts"))]

    def expire(self, now_s: float) -> list[Answer]:
        """Ends the requests whose limit is over; returns their answers."""
        answers = []
        while self._limits and self._limits[0][0] <= now_s:
            limit_s, asker = heapq.heappop(self._limits)
            wait = self._waits.get(asker)
            if wait is not None and wait.until_s == limit_s:
                answers.append((asker, Message(Outcome.TIMED_OUT, 0, tuple(wait.missing))))
                self.forget(asker)
        return answers

    @property
    def next_limit_s(self) -> float:
        """Returns the time at which `expire` is due; infinity where nothing has a limit."""
        return self._limits[0][0] if self._limits else math.inf

    def waits(self, asker: int) -> bool:
        """Returns whether a connection has a request that waits."""
        return asker in self._waits

    def forget(self, asker: int) -> None:
        """Drops the request of a connection that has ended."""
        wait = self._waits.pop(asker, None)
        for key in wait.missing if wait is not None else ():
            self._drop(key, asker)

    def check_invariants(self) -> None:
        """Raises unless each request that waits misses a key, and is named at just these."""
        listed = {(key, asker) for key, askers in self._askers.items() for asker in askers}
        missed = {(key, asker) for asker, wait in self._waits.items() for key in wait.missing}
        assert listed == missed
        assert all(self._askers.values())
        assert all(wait.missing <= set(wait.keys) for wait in self._waits.values())
        assert all(wait.missing for wait in self._waits.values())

    def _wait(self, asker: int, request: Message, now_s: float) -> list[Answer]:
        until_s = now_s + request.number / 1000 if request.number else math.inf
        wants_values = request.code == Operation.GET
        wait = _Wait(request.parts, self._missing(request.parts), until_s, wants_values)
        if not wait.missing:
            return [(asker, self._complete(wait))]
        self._waits[asker] = wait
        for key in wait.missing:
            self._askers.setdefault(key, set()).add(asker)
        if until_s < math.inf:
            heapq.heappush(self._limits, (until_s, asker))
        return []

    def _missing(self, keys: tuple[bytes, ...]) -> set[bytes]:
        return {key for key in keys if key not in self._values}

    def _complete(self, wait: _Wait) -> Message:
        """Returns the answer to a request whose keys are all there; of many values the first."""
        if not wait.wants_values:
            return _done()
        values: list[bytes] = []
        size = 0
        for key in wait.keys:
            value = self._values[key]
            if values and size + len(value) > MAX_VALUES_BYTES:
                break
            values.append(value)
            size += len(value)
        return Message(Outcome.DONE, len(values), tuple(values))

    def _set_all(self, parts: tuple[bytes, ...]) -> Iterator[Answer]:
        for key, value in zip(parts[::2], parts[1::2], strict=True):
            yield from self._set(key, value)

    def _set(self, key: bytes, value: bytes) -> Iterator[Answer]:
        """Sets a value; yields the answers of the requests that have waited for it last."""
        self._values[key] = value
        for asker in sorted(self._askers.pop(key, ())):
            wait = self._waits[asker]
            wait.missing.discard(key)
            if wait.missing:
                continue
            if wait.wants_values and (deleted := self._missing(wait.keys)):
                wait.missing = deleted
                for again in deleted:
                    self._askers.setdefault(again, set()).add(asker)
                continue
            del self._waits[asker]
            yield asker, self._complete(wait)

    def _drop(self, key: bytes, asker: int) -> None:
        askers = self._askers.get(key, set())
        askers.discard(asker)
        if not askers:
            self._askers.pop(key, None)

    def _add(self, asker: int, key: bytes, amount: int) -> list[Answer]:
        held = self._values.get(key, b"0")
        try:
            if len(held) > MAX_DIGITS:
                raise ValueError
            total = int(held) + amount
        except ValueError:
            return [(asker, _refused("the key holds no number that can be added to"))]
        total = (total + WRAP // 2) % WRAP - WRAP // 2
        return [(asker, _done(total)), *self._set(key, str(total).encode())]

    def _compare_set(self, asker: int, key: bytes, expected: bytes, desired: bytes) -> list[Answer]:
        held = self._values.get(key)
        if held == expected or (held is None and not expected):
            return [(asker, _done(1, desired)), *self._set(key, desired)]
        return [(asker, _done(0, expected if held is None else held))]


def _done(number: int = 0, *parts: bytes) -> Message:
    return Message(Outcome.DONE, number, parts)


def _refused(reason: str) -> Message:
    return Message(Outcome.REFUSED, 0, (reason.encode(),))
