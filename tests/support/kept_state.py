"""Optimizers that keep more than tensors of a parameter's shape, each in a way of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters


class Stepping(torch.optim.Optimizer):
    """Steps against the gradient, by a rate that `scale` works out from what is kept."""

    def __init__(self, parameters: Any, lr: float = 0.05, **options: Any) -> None:
        super().__init__(parameters, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * self.scale(p, self.state[p]))

    def begin(self) -> None:
        """Counts a step."""

    def scale(self, p: Any, state: dict[Any, Any]) -> float:
        """Counts a step of one parameter; returns the factor of its rate."""
        raise NotImplementedError


class Lists(Stepping):
    """Keeps a list of matrices, as Shampoo and SOAP do."""

    def scale(self, p: Any, state: dict[Any, Any]) -> float:
        if not state:
            state["GG"] = [torch.zeros(size, size, dtype=p.dtype) for size in p.shape]
        for index, matrix in enumerate(state["GG"]):
            other = [j for j in range(p.dim()) if j != index]
            matrix.lerp_(torch.tensordot(p.grad, p.grad, dims=(other, other)), 0.1)
        return 1 / float(sum(float(matrix.diagonal().sum()) for matrix in state["GG"]) + 0.1)


class Trees(Stepping):
    """Keeps a value of each kind; one of them only from its fifth step on."""

    def scale(self, p: Any, state: dict[Any, Any]) -> float:
        if not state:
            state |= {"phase": "warm", "none": None, "big": 1 << 70, "on": False}
            state |= {"pair": (0, torch.zeros_like(p)), 7: torch.ones(3), "by": {"n": [0.5]}}
        steps, sums = state["pair"]
        state["pair"] = (steps + 1, sums + p.grad)
        state["by"]["n"].append(steps / 2)
        state["phase"] = "warm" if steps < 2 else "hot"
        if steps > 3:
            state["late"] = torch.full_like(p, steps)
        state["big"] += 1
        state[7].mul_(0.9)
        factor = float(state[7].sum()) + float(len(state["by"]["n"]) + state["big"] - (1 << 70))
        factor *= 2.0 if state["phase"] == "hot" else 1.0
        return factor / (10 + float(sums.norm()))


class Names(Stepping):
    """Keeps tensors under keys with a slash, with a percent sign, and under one of ours."""

    def scale(self, p: Any, state: dict[Any, Any]) -> float:
        for key in ("avg/grad", "master", "50%", "a%2Fb", "a/b"):
            state.setdefault(key, torch.zeros_like(p)).lerp_(p.grad, 0.1 * len(key))
        p.sub_(state["avg/grad"] + state["master"] * state["50%"], alpha=0.1)
        return 0.5


class Global(Stepping):
    """Counts in an entry of its state that is no parameter."""

    def begin(self) -> None:
        entry: Any = self.state["global"]  # type: ignore[index]
        entry["n"] = entry.get("n", 0) + 1

    def scale(self, p: Any, state: dict[Any, Any]) -> float:
        entry: Any = self.state["global"]  # type: ignore[index]
        return 1 / float(entry["n"])


class Forgetful(Stepping):
    """Counts in an attribute, which its `state_dict` does not hold."""

    count = 0

    def begin(self) -> None:
        self.count += 1

    def scale(self, p: Any, state: dict[Any, Any]) -> float:
        return 1 / self.count


class Counting(Forgetful):
    """Counts in an attribute, which its `state_dict` holds."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        self.count = state_dict["count"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "count"})


def hooked(parameters: Any) -> Forgetful:
    """Returns an optimizer whose count is kept by hooks."""
    made = Forgetful(parameters)
    made.register_state_dict_post_hook(lambda optimizer, held: {**held, "count": optimizer.count})  # type: ignore[attr-defined]

    def load(optimizer: Any, held: dict[str, Any]) -> None:
        optimizer.count = held["count"]

    made.register_load_state_dict_pre_hook(load)
    return made


class Halfway(Counting):
    """Forgets in `load_state_dict` what its `state_dict` holds."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({**state_dict, "count": 0})


class Warmed(Stepping):
    """Changes an attribute at its fifth step, as at the end of a warm-up, and not before."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.factor = torch.ones(1)
        self.past: dict[str, Any] = {"ends": [], "drawn": torch.Generator()}

    def begin(self) -> None:
        self.factor = self.factor.clone()  # the same value
        if any(self.state[p].get("n") == 4 for p in self.param_groups[0]["params"]):
            self.past["ends"].append(5)

    def scale(self, p: Any, state: dict[Any, Any]) -> float:
        state["n"] = state.get("n", 0) + 1
        return 0.5 ** len(self.past["ends"]) * float(self.factor)


class Slow(torch.optim.AdamW):
    """Lookahead: it goes half of the way back to slow weights at every sixth step."""

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr=lr)
        self.slow = [p.detach().clone() for p in parameters]
        self.param_groups[0]["counter"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["counter"] += 1
        if self.param_groups[0]["counter"] % 6 == 0:
            for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)


class StoredSlow(Slow):
    """Lookahead whose `state_dict` holds the slow weights."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict: Any) -> None:
        self.slow = [slow.clone() for slow in state_dict["slow"]]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "slow"})


class Flat(Stepping):
    """Goes half of the way back to a vector of all slow weights at every fourth step."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, counter=0)
        self.slow = torch.cat([p.detach().reshape(-1) for p in parameters])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        group = self.param_groups[0]
        group["counter"] += 1
        if group["counter"] % 4 == 0:
            self.slow.lerp_(torch.cat([p.reshape(-1) for p in group["params"]]), 0.5)
            vector_to_parameters(self.slow, group["params"])

    def scale(self, p: Any, state: dict[Any, Any]) -> float:
        return 1.0


class Wrapper(torch.optim.Optimizer):
    """Wraps another optimizer, whose groups it shares, as most Lookaheads do."""

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        self.inner = torch.optim.AdamW(parameters, lr=lr)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.param_groups = self.inner.param_groups
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        outer = {
            i: self.state[p]["slow"]
            for i, p in enumerate(self.param_groups[0]["params"])
            if p in self.state
        }
        return {"inner": self.inner.state_dict(), "slow": outer, "steps": self.steps}

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups = self.inner.param_groups
        self.steps = state_dict["steps"]
        for i, slow in state_dict["slow"].items():
            self.state[self.param_groups[0]["params"][i]]["slow"] = slow

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and "slow" not in self.state[p]:
                self.state[p]["slow"] = p.detach().clone()
        self.inner.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.copy_(self.state[p]["slow"].lerp_(p, 0.5))


class Adapting(Stepping):
    """Adapts the rate of a group to the gradients of all its parameters, as D-Adaptation does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, total=0.0)

    def begin(self) -> None:
        for group in self.param_groups:
            squares = [float(p.grad.square().sum()) for p in group["params"] if p.grad is not None]
            group["total"] += sum(squares)

    def scale(self, p: Any, state: dict[Any, Any]) -> float:
        return 1e-9 / float(1 + self.param_groups[0]["total"])


class Sized(Stepping):
    """Keeps a mean over a parameter's elements, of which its first steps make no use."""

    def scale(self, p: Any, state: dict[Any, Any]) -> float:
        state["n"] = state.get("n", 0) + 1
        state["mean"] = float(p.grad.abs().mean())
        return 1.0 if state["n"] < 4 else float(state["mean"])


class Modal(torch.optim.Optimizer):
    """A small schedule-free optimizer: `eval()` puts the average into the parameters."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "beta": 0.9, "train_mode": False, "k": 0})

    @torch.no_grad()
    def _swap(self, to_train: bool) -> None:
        for group in self.param_groups:
            beta = group["beta"]
            if group["train_mode"] != to_train:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - beta if to_train else 1 - 1 / beta)
                group["train_mode"] = to_train

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise Exception("not in train mode")
            c, beta = 1 / (group["k"] + 1), group["beta"]
            for p in group["params"]:
                if p.grad is not None:
                    z: Tensor = self.state[p].setdefault("z", p.detach().clone())
                    p.lerp_(z, c)
                    p.add_(p.grad, alpha=group["lr"] * (beta * (1 - c) - 1))
                    z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


def trained(parameters: Any) -> Modal:
    """Returns a schedule-free optimizer in its mode for training."""
    made = Modal(parameters)
    made.train()
    return made


class Wide(Stepping):
    """Keeps a momentum of 32 bits for parameters of 16 bits."""

    def scale(self, p: Any, state: dict[Any, Any]) -> float:
        state.setdefault("momentum", torch.zeros_like(p, dtype=torch.float32))
        state["momentum"].lerp_(p.grad.float(), 1 / 3)
        return float(state["momentum"].abs().mean())


class Bare(Stepping):
    """Keeps a tensor for a parameter, in no dict."""

    def scale(self, p: Any, state: Any) -> float:
        momentum = torch.zeros_like(p) if isinstance(state, dict) else state
        self.state[p] = momentum.lerp(p.grad, 0.5)
        return float(momentum.abs().mean())


class Unseen(Stepping):
    """Steps no copies of its parameters; it keeps all by parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.place = self.param_groups[0]["params"][0].data_ptr()

    def begin(self) -> None:
        if self.param_groups[0]["params"][0].data_ptr() != self.place:
            raise Exception("made for one model")

    def scale(self, p: Any, state: dict[Any, Any]) -> float:
        state["n"] = state.get("n", 0) + 1
        return 1 / float(state["n"])


class Hidden(Unseen):
    """Steps no copies of its parameters, and counts in an attribute."""

    count = 0

    def begin(self) -> None:
        super().begin()
        self.count += 1


class Sharp(Stepping):
    """Asks for a closure, as sharpness-aware optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "requires a closure"


WHOLE: dict[str, Any] = {
    "lists": Lists,
    "trees": Trees,
    "names": Names,
    "global": Global,
    "counting": Counting,
    "hooked": hooked,
    "slow": StoredSlow,
    "wrapper": Wrapper,
    "adapting": Adapting,
    "modal": trained,
    "wide": Wide,
    "unseen": Unseen,
    "bare": Bare,
}
"""Optimizers whose state ddp stores, by name."""
