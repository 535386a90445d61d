"""What scripts do to parameters, gradients and optimizers beside the session."""

from __future__ import annotations

from tests.integration.generator.elements import Element

ELSEWHERE = ("p.data = …", "set_", "two parameters that swap their memory")
"""Changes that give a weight other memory. An alias of the weight ends there; a script that begins
anew takes a new one, which the change of the next step ends later than in an undisturbed run."""
ROUNDED = "rounded to 16 bits and back"
"""It gives the weights of one layer other memory."""
_STALE = "docs/training.md: with zero3 a rank has only its rows of such a tensor"


def _after(
    name: str,
    text: str,
    *,
    odds: int = 4,
    since: int = 0,
    rest: str = "",
) -> Element:
    """Returns a change of parameters after steps."""
    return Element(name=name, stepped=text, odds=odds, since=since, rest=rest)


PARAMETERS = [
    _after("clamped in place", "model.enter.weight.clamp_(-0.25, 0.25)"),
    _after(
        "all shrunk in place",
        """
for p in model.parameters():
    p.mul_(0.9)
""",
    ),
    _after("p.data = …", "model.enter.weight.data = model.enter.weight.data * 0.75"),
    _after("p.data changed in place", "model.enter.bias.data.sub_(0.125)"),
    _after("set_", "model.enter.weight.set_(model.enter.weight.detach() * 0.75)"),
    _after(
        "vector_to_parameters",
        """
vector = parameters_to_vector(model.leave.parameters())
vector_to_parameters(vector.clamp(-0.125, 0.125), model.leave.parameters())
""",
    ),
    _after(
        "two parameters that swap their memory",
        """
first, last = model.enter.weight, model.twin.weight
first.data, last.data = last.data, first.data
""",
    ),
    _after(
        "first weights put back",
        """
if n == SINCE + 3:
    for p, q in zip(model.enter.parameters(), make_model(SEED).enter.parameters()):
        p.copy_(q)
""",
        since=2,
    ),
    _after(
        "first weights put back by load_state_dict",
        """
if n == SINCE + 3:
    model.twin.load_state_dict(make_model(SEED).twin.state_dict())
""",
        since=2,
    ),
    _after(
        "halved by p.data while a state_dict is made, and put back",
        """
backup = [p.data for p in model.parameters()]
for p in model.parameters():
    p.data = p.data * 0.5
state = model.state_dict() if session is None else session.state_dict()
KEPT["halves"] = [value.clone() for value in state.values() if isinstance(value, Tensor)]
for p, values in zip(model.parameters(), backup):
    p.data = values
""",
        rest='rest["halves"] = KEPT["halves"]',
    ),
    _after("one row set to zero", "model.enter.weight[n % 5] = 0.0"),
    Element(
        name=ROUNDED,
        stepped="model.twin.to(torch.float16).to(D)",
        narrow=False,
        odds=2,
    ),
    Element(
        name="an alias of before prepare, read and written",
        excludes=ELSEWHERE,
        made='KEPT["early"] = model.enter.weight.data',
        stepped='KEPT["early"].mul_(1 - KEPT["early"].abs().mean() / 4)',
        limits={"zero3": _STALE},
    ),
    Element(
        name="an alias of after prepare, read and written",
        excludes=ELSEWHERE,
        prepared='KEPT["alias"] = model.enter.weight.data',
        stepped='KEPT["alias"].mul_(1 - KEPT["alias"].abs().mean() / 4)',
        limits={"zero3": _STALE},
    ),
    Element(
        name="an alias of after prepare, only read",
        excludes=(ROUNDED, ELSEWHERE[2]),
        prepared='KEPT["reader"] = model.twin.weight.detach()',
        stepped='model.enter.bias.fill_(0.25 * KEPT["reader"].abs().mean())',
        limits={"zero3": _STALE},
    ),
    Element(
        name="a numpy view of a parameter",
        excludes=ELSEWHERE,
        prepared='KEPT["numpy"] = model.enter.weight.detach().numpy()',
        stepped='KEPT["numpy"] *= 0.9',
        limits={"zero3": _STALE},
        narrow=False,
        odds=2,
    ),
    Element(
        name="shrunk before each forward",
        begin="""
with torch.no_grad():
    model.enter.weight.mul_(0.9)
""",
        whole=True,
        odds=3,
    ),
    Element(
        name="clamped before each forward",
        begin="""
with torch.no_grad():
    model.enter.weight.clamp_(-0.25, 0.25)
""",
        whole=True,
        odds=3,
    ),
    Element(
        name="changed between forward and backward",
        touched="model.leave.weight.data.clamp_(-0.1, 0.1)",
        whole=True,
        odds=2,
    ),
]

OBJECTS = [
    _after(
        "another parameter object",
        "model.leave.bias = nn.Parameter(model.leave.bias.detach().clone())",
        odds=1,
    ),
    _after(
        "load_state_dict(assign=True)",
        "model.twin.load_state_dict(copy.deepcopy(model.twin.state_dict()), assign=True)",
        odds=1,
    ),
    _after(
        "a module that is replaced by its copy",
        "model.twin = copy.deepcopy(model.twin)",
        odds=1,
    ),
    _after(
        "a buffer that is registered late",
        'model.register_buffer("later", torch.ones(2))',
        odds=1,
    ),
    _after("a second name for a module", "model.again = model.twin", odds=1),
    _after("a module that is added", 'model.add_module("head", nn.Linear(1, 1))', odds=1),
    _after(
        "a parametrization that comes late",
        """
if n == SINCE + 1:
    nn.utils.parametrizations.weight_norm(model.twin)
""",
        odds=1,
    ),
    _after("a parameter that is removed", "model.twin.bias = None", odds=1),
    _after(
        "a parameter that is tied late",
        "model.twin.bias = model.enter.bias",
        odds=1,
    ),
]

GRADIENTS = [
    Element(
        name="a hook on a gradient, before prepare",
        made="model.enter.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))",
        narrow=False,
        odds=2,
    ),
    Element(
        name="a hook on a gradient, after prepare",
        prepared="model.enter.weight.register_hook(lambda gradient: gradient.sign() * 0.01)",
        narrow=False,
        odds=2,
    ),
    Element(
        name="a hook on an accumulated gradient",
        top="""
def by_norm(parameter):
    parameter.grad.mul_(parameter.grad.norm())
""",
        prepared="model.enter.weight.register_post_accumulate_grad_hook(by_norm)",
        odds=2,
    ),
    Element(
        name="clip_grad_norm_",
        graded="nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
        odds=2,
    ),
    Element(
        name="clip_grad_value_",
        graded="nn.utils.clip_grad_value_(model.parameters(), 0.02)",
        odds=2,
    ),
    Element(
        name="gradients scaled by the script",
        graded="""
for p in model.parameters():
    if p.grad is not None:
        p.grad.mul_(0.5)
""",
        odds=2,
    ),
    Element(
        name="a gradient that is taken away",
        graded="model.twin.weight.grad = None",
        odds=2,
    ),
    Element(
        name="a gradient that the script reads",
        graded='KEPT["norm"] = model.enter.weight.grad.norm()',
        stepped='model.enter.bias.add_(0.01 * KEPT["norm"].to(D))',
        narrow=False,
        whole=True,
        odds=2,
    ),
    Element(
        name="a step by hand",
        graded="model.twin.bias.data.sub_(model.twin.bias.grad, alpha=0.05)",
        narrow=False,
        whole=True,
        odds=2,
    ),
    Element(
        name="a gradient that the script sets",
        graded="model.twin.weight.grad = torch.full_like(model.twin.weight, 0.25)",
        odds=2,
    ),
    Element(
        name="a backward of its own before the session's",
        touched="(model(PROBE, PROBE_I) ** 2).mean().backward()",
        whole=True,
        twice=True,
        odds=2,
    ),
    Element(
        name="a backward of its own after the session's",
        graded="(model(PROBE, PROBE_I) ** 2).mean().backward()",
        whole=True,
        odds=2,
    ),
    Element(
        name="gradients that are zeroed by the script",
        begin="""
for each_optimizer in listed(optimizer):
    each_optimizer.zero_grad()
""",
        odds=3,
    ),
    Element(
        name="gradients that the model zeroes",
        begin="model.zero_grad(set_to_none=True)",
        odds=3,
    ),
]

OPTIMIZER_STATE = [
    _after(
        "halved state of the optimizer",
        """
for each_optimizer in listed(optimizer):
    for entries in each_optimizer.state.values():
        for value in entries.values() if isinstance(entries, dict) else []:
            if isinstance(value, Tensor) and value.dim() > 0 and value.is_floating_point():
                value.mul_(0.5)
""",
        odds=3,
    ),
    _after(
        "cleared state of the optimizer",
        """
if n == SINCE + 2:
    for each_optimizer in listed(optimizer):
        each_optimizer.state.clear()
""",
        odds=3,
        since=1,
    ),
    _after(
        "state of the optimizer halved by parameter",
        """
for each_optimizer in listed(optimizer):
    for p in model.parameters():
        entries = each_optimizer.state.get(p, {})
        for value in entries.values() if isinstance(entries, dict) else []:
            if isinstance(value, Tensor) and value.dim() > 0 and value.is_floating_point():
                value.mul_(0.5)
""",
        odds=2,
    ),
    _after(
        "state of the optimizer taken out by parameter",
        """
if n == SINCE + 2:
    for each_optimizer in listed(optimizer):
        for p in model.parameters():
            each_optimizer.state.pop(p, None)
""",
        since=1,
        odds=2,
    ),
    _after(
        "another optimizer, made late",
        """
if "other" not in KEPT:
    KEPT["other"] = torch.optim.SGD(model.twin.parameters(), lr=0.125)
for p in model.twin.parameters():
    p.grad = torch.ones_like(p)
KEPT["other"].step()
""",
        odds=2,
    ),
    _after(
        "a parameter that is taken out of its group",
        """
if n == SINCE + 1:
    listed(optimizer)[0].param_groups[0]["params"].pop()
""",
        odds=1,
    ),
    _after(
        "entries taken out of the optimizer's state",
        """
if n == SINCE + 2:
    for each_optimizer in listed(optimizer):
        for entries in each_optimizer.state.values():
            if isinstance(entries, dict):
                entries.clear()
""",
        since=1,
        odds=2,
    ),
    _after(
        "a group that is added late",
        """
if n == SINCE + 1:
    new = nn.Parameter(torch.zeros(2, dtype=D))
    listed(optimizer)[0].add_param_group({"params": [new]})
""",
        odds=1,
    ),
    _after(
        "the optimizer's own state_dict, saved and loaded",
        """
for each_optimizer in listed(optimizer):
    each_optimizer.load_state_dict(copy.deepcopy(each_optimizer.state_dict()))
""",
        odds=2,
    ),
]

CHANGES = [*PARAMETERS, *OBJECTS, *GRADIENTS, *OPTIMIZER_STATE]
