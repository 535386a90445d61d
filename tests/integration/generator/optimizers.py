"""Optimizers: torch's own with odd options, and those that keep state of every kind.

`init` and `hidden` are empty. `top` defines a class where one is needed; `made` is the body of
`make_optimizer(parameters, model)`, which returns an optimizer or a dict of several.
"""

from __future__ import annotations

from tests.integration.generator.elements import ALL, Element
from tests.integration.generator.parameters import EMPTY

PLAIN = Element(name="SGD", made="return torch.optim.SGD(parameters, lr=0.05)", odds=10)
"""What a failing draw is tried with first."""
LATE = 5
"""Steps after which an optimizer may be refused that keeps something else after three of them: the
next capture shows it."""
_UNSEEN = "docs/training.md: what a class, module or function holds outside is not seen"


def _torch(name: str, text: str, *, odds: int = 5, narrow: bool = False) -> Element:
    return Element(name=name, made=f"return torch.optim.{text}", odds=odds, narrow=narrow)


OF_TORCH = [
    PLAIN,
    _torch("SGD with momentum", "SGD(parameters, lr=0.05, momentum=0.9)", narrow=True),
    _torch(
        "SGD with dampening, Nesterov's not",
        "SGD(parameters, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.1)",
    ),
    _torch("SGD, Nesterov", "SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)"),
    _torch("SGD, maximize", "SGD(parameters, lr=0.002, maximize=True, foreach=True)"),
    _torch("SGD, fused", "SGD(parameters, lr=0.05, momentum=0.5, fused=True)"),
    _torch("Adam", "Adam(parameters, lr=0.02)", odds=12),
    _torch("Adam, amsgrad", "Adam(parameters, lr=0.02, amsgrad=True, betas=(0.5, 0.6))"),
    _torch("Adam with a tensor for its rate", "Adam(parameters, lr=torch.tensor(0.02))"),
    _torch("AdamW", "AdamW(parameters, lr=0.02, weight_decay=0.1)", odds=12),
    _torch("AdamW, fused", "AdamW(parameters, lr=0.02, fused=True)"),
    _torch("AdamW of named parameters", "AdamW(model.named_parameters(), lr=0.02)"),
    _torch("Adamax", "Adamax(parameters, lr=0.02)"),
    _torch("NAdam", "NAdam(parameters, lr=0.02, decoupled_weight_decay=True, weight_decay=0.1)"),
    _torch("RAdam", "RAdam(parameters, lr=0.05)"),
    _torch("Adagrad", "Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1, lr_decay=0.1)"),
    _torch("Adadelta", "Adadelta(parameters, lr=1.0, rho=0.5)"),
    _torch("ASGD", "ASGD(parameters, lr=0.05, lambd=0.1, t0=2)"),
    _torch("RMSprop", "RMSprop(parameters, lr=0.01, centered=True, momentum=0.5)"),
    _torch("Rprop", "Rprop(parameters, lr=0.01)"),
    Element(
        name="Adafactor",
        made="return torch.optim.Adafactor(parameters, lr=0.02)",
        odds=5,
        narrow=False,
        excludes=(EMPTY,),  # torch divides by their size
    ),
    _torch("LBFGS", "LBFGS(parameters, lr=0.02)", odds=1),
    Element(
        name="two groups with options of their own",
        made="""
wide = [p for p in parameters if p.dim() > 1]
narrow = [p for p in parameters if p.dim() <= 1]
groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "lr": 0.01, "mark": "b"}]
return torch.optim.AdamW(groups, lr=0.02)
""",
        narrow=False,
    ),
    Element(
        name="a group without parameters",
        made="""
groups = [{"params": parameters}, {"params": [], "lr": 0.5}]
return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
""",
        odds=2,
    ),
    Element(
        name="a group with a rate of 0",
        made="""
groups = [{"params": parameters[:1], "lr": 0.0}, {"params": parameters[1:]}]
return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
""",
    ),
    Element(
        name="an optimizer of some parameters",
        made="return torch.optim.AdamW(parameters[:2], lr=0.02)",
        narrow=False,
    ),
    Element(
        name="Muon and AdamW",
        made="""
matrices = [p for p in parameters if p.dim() == 2]
others = [p for p in parameters if p.dim() != 2]
return {
    "muon": torch.optim.Muon(matrices, lr=0.02),
    "adamw": torch.optim.AdamW(others, lr=0.02),
}
""",
        narrow=False,
        limits={
            ALL: "Muon rounds gradients to 16 bits inside its step: sums of another order move it"
        },
    ),
    Element(
        name="two optimizers",
        made="""
return {
    "a/b": torch.optim.SGD(parameters[::2], lr=0.05, momentum=0.9),
    "adam": torch.optim.Adam(parameters[1::2], lr=0.02, amsgrad=True),
}
""",
        narrow=False,
    ),
    Element(
        name="weights clamped by a hook of the step",
        made="""
made = torch.optim.SGD(parameters, lr=0.1, momentum=0.5)

def clamp(optimizer, *others):
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.clamp_(-0.25, 0.25)

made.register_step_post_hook(clamp)
return made
""",
    ),
]


def _kept(name: str, *sources: str, tolerance: float = 1e-9) -> Element:
    """Returns an element whose classes stand in `tests.support.kept_state`, the last one used."""
    return Element(
        name=name,
        sources=sources,
        made=f"return {sources[-1]}(parameters)",
        narrow=False,
        tolerance=tolerance,
        odds=2,
    )


OF_SUPPORT = [
    _kept("lists of matrices, as Shampoo's", "Stepping", "Lists"),
    _kept("trees of every kind", "Stepping", "Trees"),
    _kept("keys with a slash and named master", "Stepping", "Names"),
    _kept("an entry of state under no parameter", "Stepping", "Global"),
    _kept("a count that its state_dict does not hold", "Stepping", "Forgetful"),
    _kept("a count that its state_dict holds", "Stepping", "Forgetful", "Counting"),
    _kept("a count kept by hooks", "Stepping", "Forgetful", "hooked"),
    _kept("a count that it forgets at a load", "Stepping", "Forgetful", "Counting", "Halfway"),
    _kept("Lookahead", "Slow"),
    _kept("Lookahead with a state_dict", "Slow", "StoredSlow"),
    _kept("Lookahead by a vector", "Stepping", "Flat"),
    _kept("Lookahead around an optimizer", "Wrapper"),
    _kept("a rate for all its gradients", "Stepping", "Adapting"),
    _kept("a mean over the elements", "Stepping", "Sized"),
    _kept("momentum of 32 bits", "Stepping", "Wide", tolerance=1e-6),
    _kept("a tensor in no dict", "Stepping", "Bare"),
    _kept("it steps no copies", "Stepping", "Unseen"),
    _kept("it steps no copies, and counts", "Stepping", "Unseen", "Hidden"),
    _kept("it asks for a closure", "Stepping", "Sharp"),
    Element(
        name="schedule-free",
        sources=("Modal",),
        made="return Modal(parameters)",
        begin="optimizer.train()",
        stepped="""
if n % 3 == 0:
    optimizer.eval()
    optimizer.train()
""",
        finish="optimizer.eval()",
        narrow=False,
    ),
]


def _stepping(name: str, body: str, *, since: int = 0, limit: str = "") -> Element:
    """Returns an element with a class of its own, which follows `Stepping` of the support."""
    top = "class Keeper(Stepping):\n" + "\n".join(
        f"    {line}" if line else "" for line in body.strip().splitlines()
    )
    return Element(
        name=name,
        sources=("Stepping",),
        top=top,
        made="return Keeper(parameters)",
        narrow=False,
        limits={ALL: limit} if limit else {},
        since=since,
        odds=2,
    )


OF_ITS_OWN = [
    _stepping(
        "an attribute that changes at its fifth step only",
        """
factor = 1.0

def begin(self):
    if any(self.state[p].get("n") == 4 for p in self.param_groups[0]["params"]):
        self.factor = 0.25

def scale(self, p, state):
    state["n"] = state.get("n", 0) + 1
    return self.factor
""",
        since=LATE + 1,
    ),
    _stepping(
        "a deque of norms",
        """
def __init__(self, parameters):
    super().__init__(parameters)
    self.recent = collections.deque(maxlen=3)

def begin(self):
    self.recent.append(1.0 + len(self.recent))

def scale(self, p, state):
    return 1 / sum(self.recent)
""",
    ),
    _stepping(
        "an array of numpy",
        """
def __init__(self, parameters):
    super().__init__(parameters)
    self.array = numpy.ones(2)

def begin(self):
    self.array *= 0.8

def scale(self, p, state):
    return float(self.array.sum())
""",
    ),
    _stepping(
        "a dict of its own by the parameter's id",
        """
def __init__(self, parameters):
    super().__init__(parameters)
    self.momenta = {}

def scale(self, p, state):
    momentum = self.momenta.setdefault(id(p), torch.zeros_like(p))
    p.sub_(momentum.lerp_(p.grad, 0.3), alpha=0.1)
    return 0.5
""",
    ),
    _stepping(
        "a generator of its own",
        """
def __init__(self, parameters):
    super().__init__(parameters)
    self.drawn = torch.Generator().manual_seed(3)

def scale(self, p, state):
    return 0.5 + float(torch.rand((), generator=self.drawn))
""",
    ),
    _stepping(
        "a count of its class",
        """
steps = 0

def begin(self):
    type(self).steps += 1

def scale(self, p, state):
    return 1 / self.steps
""",
        limit=_UNSEEN,
    ),
    _stepping(
        "a list in the options of a group",
        """
def begin(self):
    for group in self.param_groups:
        group["past"] = [*group.get("past", []), 1.0][-4:]

def scale(self, p, state):
    return 1 / len(self.param_groups[0]["past"])
""",
    ),
    _stepping(
        "a number in the options of a group",
        """
def begin(self):
    for group in self.param_groups:
        group["k"] = group.get("k", 0) + 1

def scale(self, p, state):
    return 1 / self.param_groups[0]["k"]
""",
    ),
    _stepping(
        "None until its third step",
        """
def scale(self, p, state):
    state["n"] = state.get("n", 0) + 1
    if state["n"] < 3:
        state["before"] = None
        return 1.0
    before = torch.zeros_like(p) if state["before"] is None else state["before"]
    state["before"] = before.lerp(p.grad, 0.5)
    p.sub_(state["before"], alpha=0.1)
    return 0.5
""",
        since=LATE,
    ),
    _stepping(
        "a number that becomes a tensor",
        """
def scale(self, p, state):
    state["sum"] = state.get("sum", 0.0) + (p.grad.abs() if "sum" in state else 0.5)
    p.sub_(p.grad / (1 + state["sum"]), alpha=0.1)
    return 0.5
""",
    ),
    _stepping(
        "a history of gradients that grows",
        """
def scale(self, p, state):
    past = state.get("past", torch.zeros(0, *p.shape, dtype=p.dtype))
    state["past"] = torch.cat([past, p.grad[None]])[-4:]
    p.sub_(state["past"].mean(0), alpha=0.1)
    return 0.5
""",
    ),
    _stepping(
        "state of matrices only",
        """
def scale(self, p, state):
    if p.dim() < 2:
        return 1.0
    state.setdefault("rows", torch.zeros(p.shape[0], dtype=p.dtype)).add_(p.grad.flatten(1).sum(1))
    return 1 / (1 + float(state["rows"].abs().mean()))
""",
    ),
    _stepping(
        "masks and counts of each element",
        """
def scale(self, p, state):
    state.setdefault("positive", torch.zeros_like(p, dtype=torch.bool))
    state.setdefault("turns", torch.zeros_like(p, dtype=torch.int64))
    state["turns"] += state["positive"] != (p.grad > 0)
    state["positive"] = p.grad > 0
    p.sub_(p.grad / (1 + state["turns"]), alpha=0.1)
    return 0.5
""",
    ),
    _stepping(
        "a transposed tensor",
        """
def scale(self, p, state):
    if "turned" not in state:
        state["turned"] = torch.zeros_like(p.t() if p.dim() == 2 else p).contiguous()
        state["turned"] = state["turned"].t() if p.dim() == 2 else state["turned"]
    p.sub_(state["turned"].lerp_(p.grad, 0.3), alpha=0.1)
    return 0.5
""",
    ),
    _stepping(
        "two tensors in one memory",
        """
def scale(self, p, state):
    if not state:
        memory = torch.zeros(2, *p.shape, dtype=p.dtype)
        state["fast"], state["slow"] = memory[0], memory[1]
    state["fast"].lerp_(p.grad, 0.5)
    state["slow"].lerp_(state["fast"], 0.2)
    p.sub_(state["slow"], alpha=0.1)
    return 0.5
""",
    ),
    _stepping(
        "a tensor of one element, and an integer",
        """
def scale(self, p, state):
    state.setdefault("norm", torch.zeros(1)).add_(0.5)
    state["hits"] = state.get("hits", 0) + 2
    return 1 / (float(state["norm"]) + state["hits"])
""",
    ),
    _stepping(
        "strings that change",
        """
def scale(self, p, state):
    state["phase"] = {"up": "down", "down": "flat"}.get(state.get("phase"), "up")
    return {"up": 1.0, "down": 0.5, "flat": 0.1}[state["phase"]]
""",
    ),
    _stepping(
        'tensors under state["global"]',
        """
def begin(self):
    entry = self.state["global"]
    entry["decay"] = entry.get("decay", torch.ones(2)) * 0.8

def scale(self, p, state):
    return float(self.state["global"]["decay"].sum())
""",
    ),
    _stepping(
        "state that is zero for long",
        """
def scale(self, p, state):
    fresh = "momentum" not in state
    momentum = state.setdefault("momentum", torch.zeros_like(p))
    state["n"] = state.get("n", 0) + 1
    if state["n"] > 5:
        momentum.lerp_(p.grad, 0.5)
        p.sub_(momentum, alpha=0.1)
    return 0.1 if fresh else 1.0
""",
    ),
]

OPTIMIZERS = [*OF_TORCH, *OF_SUPPORT, *OF_ITS_OWN]
