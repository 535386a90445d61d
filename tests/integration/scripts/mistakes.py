"""What people write at first: each mistake in turn, and what they are told."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, SequentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import elasticzero as ez

DATA: Any = torch.arange(16.0).view(8, 2)
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def prepared(session: ez.Session, strategy: str = "ddp") -> tuple[nn.Module, Any]:
    return session.prepare(
        network(), lambda params: torch.optim.SGD(params, lr=0.1), strategy=strategy
    )


def optimizer_object(session: ez.Session) -> None:
    model = network()
    session.prepare(model, torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type]


def closure(session: ez.Session, strategy: str) -> None:
    session.prepare(network(), torch.optim.LBFGS, strategy=strategy)


def forgotten_restore(session: ez.Session) -> None:
    prepared(session)
    for _ in session.batches(DATA, global_batch=4, epochs=1):
        pass


def data(session: ez.Session, dataset: Any, **options: Any) -> None:
    prepared(session)
    session.restore()
    for _ in session.batches(dataset, global_batch=4, epochs=1, **options):
        pass


def evaluated(session: ez.Session) -> None:
    prepared(session)
    session.evaluate(DataLoader(DATA), lambda x: x.mean())


def clipped(session: ez.Session, strategy: str, clip: Callable[[Any], Any], micro: int = 2) -> None:
    """Nothing is refused under ddp where a gradient is whole, in one micro-batch."""
    model, _ = prepared(session, strategy)
    session.restore()
    for x in session.batches(DATA, global_batch=4, micro_batch=micro, epochs=1):
        session.backward(model(x).mean())
        clip(model.parameters())
        session.step()


def stepped(session: ez.Session) -> None:
    model, optimizer = prepared(session)
    session.restore()
    for x in session.batches(DATA, global_batch=4, epochs=1):
        session.backward(model(x).mean())
        optimizer.step()


def averaged(session: ez.Session, strategy: str, from_trained: bool) -> None:
    plain = network()
    averages = None if from_trained else AveragedModel(plain)
    model, _ = session.prepare(
        plain, lambda params: torch.optim.SGD(params, lr=0.1), strategy=strategy
    )
    averages = session.track("averages", averages or AveragedModel(model))
    session.restore()
    for x in session.batches(DATA, global_batch=4, epochs=1):
        session.backward(model(x).mean())
        if session.step():
            averages.update_parameters(model)


def other_scheduler(session: ez.Session, nested: bool) -> None:
    prepared(session)
    other = torch.optim.SGD(network().parameters(), lr=0.1)
    schedule: Any = LambdaLR(other, lambda step: 1.0)
    if nested:
        schedule = SequentialLR(other, [schedule, LambdaLR(other, lambda _: 0.5)], [4])
    session.track("scheduler", schedule)


def half_a_batch(session: ez.Session) -> None:
    model, _ = prepared(session)
    session.restore()
    for x in session.batches(DATA, global_batch=4, micro_batch=2, epochs=1):
        session.backward(model(x).mean())
        session.step()
        break
    for _ in session.batches(DATA, global_batch=4, micro_batch=2, epochs=1):
        pass


def nested_loops(session: ez.Session) -> None:
    model, _ = prepared(session)
    session.restore()
    for x in session.batches(DATA, global_batch=4, epochs=1):
        for y in session.batches(DATA.clone(), global_batch=4, epochs=1):
            session.backward(model(y).mean())
            session.step()
        session.backward(model(x).mean())
        session.step()


def early_epoch(session: ez.Session) -> None:
    prepared(session)
    session.restore()
    for _ in range(session.epoch, 3):
        pass


def misspelt(session: ez.Session) -> None:
    prepared(session)
    session.track(nmae="data", thing=DATA)  # type: ignore[call-arg]


def saved(session: ez.Session, strategy: str) -> None:
    """Rows of parameters were saved as if they were all, and loaded so on other ranks."""
    model, _ = prepared(session, strategy)
    session.restore()
    for x in session.batches(DATA, global_batch=4, epochs=1):
        session.backward(model(x).mean())
        if session.step():
            torch.save({n: 0.5 * t for n, t in model.state_dict().items()}, io.BytesIO())


def zero_grad_works(session: ez.Session, strategy: str) -> None:
    """Between two micro-batches it dropped the first one's gradient."""
    model, optimizer = prepared(session, strategy)
    session.restore()
    for x in session.batches(DATA, global_batch=4, micro_batch=2, epochs=1, shuffle=False):
        optimizer.zero_grad()
        session.backward(model(x).mean())
        session.step()
    expected = network()
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for x in DATA.split(4):
        plain.zero_grad()
        expected(x).mean().backward()
        plain.step()
    state = session.state_dict()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(state[name], tensor)


def cases() -> dict[str, Callable[[ez.Session], None]]:
    norm = partial(nn.utils.clip_grad_norm_, max_norm=1.0)
    value = partial(nn.utils.clip_grad_value_, clip_value=1.0)
    mistakes: dict[str, Callable[[ez.Session], None]] = {
        "optimizer object": optimizer_object,
        "no factory": lambda s: s.prepare(network(), "adam") and None,  # type: ignore[arg-type]
        "made nothing": lambda s: s.prepare(network(), lambda _: None) and None,  # type: ignore[type-var]
        "forgotten restore": forgotten_restore,
        "loader of batches": lambda s: data(s, DataLoader(DATA, batch_size=None)),
        "evaluated loader": evaluated,
        "generator": lambda s: data(s, iter(DATA)),
        "dict": lambda s: data(s, {"train": DATA}),
        "batch_size": lambda s: data(s, DATA, batch_size=4),
        "typo": lambda s: data(s, DATA, shufle=True),
        "typo of a method": misspelt,
        "typo of prepare": lambda s: s.prepare(network(), stratgy="ddp") and None,  # type: ignore[call-arg]
        "missing": lambda s: s.prepare(network()) and None,  # type: ignore[call-arg]
        "own step": stepped,
        "scheduler": partial(other_scheduler, nested=False),
        "nested scheduler": partial(other_scheduler, nested=True),
        "half a batch": half_a_batch,
        "nested loops": nested_loops,
        "early epoch": early_epoch,
    }
    for what, clip in (("norm", norm), ("value", value)):
        mistakes[f"{what} in parts"] = partial(clipped, strategy="ddp", clip=clip)
    for strategy in STRATEGIES:
        mistakes[f"closure {strategy}"] = partial(closure, strategy=strategy)
        micro = 4 if strategy == "ddp" else 2
        mistakes[f"norm {strategy}"] = partial(clipped, strategy=strategy, clip=norm, micro=micro)
        mistakes[f"value {strategy}"] = partial(clipped, strategy=strategy, clip=value, micro=micro)
        mistakes[f"average {strategy}"] = partial(averaged, strategy=strategy, from_trained=True)
        mistakes[f"plain average {strategy}"] = partial(
            averaged, strategy=strategy, from_trained=False
        )
        mistakes[f"saved {strategy}"] = partial(saved, strategy=strategy)
        mistakes[f"zero_grad {strategy}"] = partial(zero_grad_works, strategy=strategy)
    return mistakes


def outcome(train: Callable[[ez.Session], None]) -> tuple[int, str]:
    try:
        ez.run(train)
    except SystemExit as end:
        return int(end.code or 0), str(end.__cause__)
    except Exception as error:  # noqa: BLE001 - a raw error is what the test looks for
        return 1, f"{type(error).__name__}: {error}"
    return 0, ""


if __name__ == "__main__":
    print(json.dumps({name: outcome(train) for name, train in cases().items()}))
