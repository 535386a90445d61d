"""The answers of the ranks' store, beside those of a simple one that is asked again and again."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from elasticzero.comm.store import table
from elasticzero.comm.store.table import Table
from elasticzero.comm.store.wire import Message, Operation, Outcome

KEYS = [b"a", b"b", b"c", b"d"]
ASKERS = range(1, 6)


class Plain:
    """Keeps the values and the requests that wait, and looks at all of them after each change."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.waits: dict[int, tuple[bool, Sequence[bytes], set[bytes], float]] = {}

    def ask(self, asker: int, request: Message, now_s: float) -> dict[int, Message]:
        parts, values = request.parts, self.values
        done = Message(Outcome.DONE)
        match request.code:
            case Operation.SET:
                values[parts[0]] = parts[1]
            case Operation.APPEND:
                values[parts[0]] = values.get(parts[0], b"") + parts[1]
            case Operation.ADD:
                total = int(values.get(parts[0], b"0")) + request.number
                values[parts[0]] = b"%d" % total
                done = Message(Outcome.DONE, total)
            case Operation.COMPARE_SET:
                held = values.get(parts[0], b"")
                if held == parts[1]:
                    values[parts[0]] = parts[2]
                    done = Message(Outcome.DONE, 1, (parts[2],))
                else:
                    back = held if parts[0] in values else parts[1]
                    done = Message(Outcome.DONE, 0, (back,))
            case Operation.DELETE:
                done = Message(Outcome.DONE, int(values.pop(parts[0], None) is not None))
            case Operation.CHECK:
                done = Message(Outcome.DONE, int(set(parts) <= values.keys()))
            case Operation.COUNT:
                done = Message(Outcome.DONE, len(values))
            case Operation.GET | Operation.WAIT:
                until_s = now_s + request.number / 1000 if request.number else float("inf")
                wants = request.code == Operation.GET
                self.waits[asker] = wants, parts, set(parts), until_s
                return self.woken()
        return {asker: done} | self.woken()

    def woken(self) -> dict[int, Message]:
        answers = {}
        for asker, (wants, keys, missing, _) in [*self.waits.items()]:
            missing.difference_update(self.values)
            if wants and not missing:
                missing.update(key for key in keys if key not in self.values)
            if not missing:
                parts = tuple(self.values[key] for key in keys) if wants else ()
                answers[asker] = Message(Outcome.DONE, len(parts), parts)
                del self.waits[asker]
        return answers

    def expire(self, now_s: float) -> dict[int, Message]:
        late = {n: wait for n, wait in self.waits.items() if wait[3] <= now_s}
        for number in late:
            del self.waits[number]
        return {n: Message(Outcome.TIMED_OUT, 0, tuple(wait[2])) for n, wait in late.items()}


def drawn(draw: random.Random) -> Message:
    key, value = draw.choice(KEYS), draw.choice([b"", b"x", draw.randbytes(5)])
    match draw.choice([*Operation]):
        case Operation.ADD:
            return Message(Operation.ADD, draw.randint(-9, 9), (b"n",))
        case Operation.COMPARE_SET:
            return Message(Operation.COMPARE_SET, 0, (key, draw.choice([b"", b"x"]), value))
        case (Operation.GET | Operation.WAIT) as operation:
            keys = draw.sample([*KEYS, b"n"], draw.randrange(4))
            return Message(operation, draw.choice([0, 500, 2000]), tuple(keys))
        case Operation.CHECK:
            return Message(Operation.CHECK, 0, tuple(draw.sample(KEYS, draw.randrange(3))))
        case Operation.COUNT:
            return Message(Operation.COUNT)
        case Operation.DELETE:
            return Message(Operation.DELETE, 0, (draw.choice([*KEYS, b"n"]),))
        case operation:
            return Message(operation, 0, (key, value))


def plain(answers: Sequence[tuple[int, Message]]) -> dict[int, tuple[int, int, object]]:
    """Answers by asker; the keys of one that is over its limit have no order."""
    assert len({asker for asker, _ in answers}) == len(answers)
    return {
        asker: (m.code, m.number, sorted(m.parts) if m.code == Outcome.TIMED_OUT else m.parts)
        for asker, m in answers
    }


@pytest.mark.parametrize("seed", range(200))
def test_answers_are_those_of_a_store_that_looks_at_everything(seed: int) -> None:
    draw, tested, reference, now_s = random.Random(seed), Table(), Plain(), 0.0
    for _ in range(120):
        now_s += draw.choice([0.0, 0.1, 1.0])
        assert plain(tested.expire(now_s)) == plain([*reference.expire(now_s).items()])
        free = [asker for asker in ASKERS if not tested.waits(asker)]
        assert free == [asker for asker in ASKERS if asker not in reference.waits]
        if not free or draw.random() < 0.05:
            gone = draw.choice(ASKERS)
            tested.forget(gone)
            reference.waits.pop(gone, None)
        else:
            asker, request = draw.choice(free), drawn(draw)
            answers = tested.ask(asker, request, now_s)
            assert plain(answers) == plain([*reference.ask(asker, request, now_s).items()])
        tested.check_invariants()
        due_s = min((wait[3] for wait in reference.waits.values()), default=float("inf"))
        assert tested.next_limit_s <= due_s


def test_values_that_are_large_together_come_in_several_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "MAX_VALUES_BYTES", 10)
    tested = Table()
    for key, size in ((b"a", 4), (b"b", 6), (b"c", 1), (b"d", 50)):
        tested.ask(1, Message(Operation.SET, 0, (key, bytes(size))), 0.0)

    def counts(*keys: bytes) -> int:
        ((_, answer),) = tested.ask(1, Message(Operation.GET, 0, keys), 0.0)
        return len(answer.parts)

    assert counts(b"a", b"b", b"c") == 2
    assert counts(b"d", b"a") == 1
    assert counts(b"c", b"a") == 2


@pytest.mark.parametrize(
    "request_",
    [
        Message(0),
        Message(77, 1, (b"a",)),
        Message(Operation.SET, 0, (b"a",)),
        Message(Operation.ADD, 1),
        Message(Operation.ADD, 1, (b"text",)),
        Message(Operation.COMPARE_SET, 0, (b"a", b"b")),
        Message(Operation.COUNT, 0, (b"a",)),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_and_changes_nothing(request_: Message) -> None:
    tested = Table()
    tested.ask(1, Message(Operation.SET, 0, (b"text", b"none of digits")), 0.0)
    ((asker, answer),) = tested.ask(2, request_, 0.0)
    assert (asker, answer.code) == (2, Outcome.REFUSED)
    ((_, count),) = tested.ask(2, Message(Operation.COUNT), 0.0)
    assert count.number == 1


def test_sums_have_64_bits_as_those_of_torch() -> None:
    tested = Table()
    most = (1 << 63) - 1
    assert tested.ask(1, Message(Operation.ADD, most, (b"n",)), 0.0)[0][1].number == most
    assert tested.ask(1, Message(Operation.ADD, 1, (b"n",)), 0.0)[0][1].number == -(1 << 63)
