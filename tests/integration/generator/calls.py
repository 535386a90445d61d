"""Losses, and what scripts call between steps."""

from __future__ import annotations

from tests.integration.generator.elements import ALL, Element

MEAN = Element(name="the mean of squares", odds=14)

NOT_AVERAGED = (
    "a parameter that is removed",
    "a parameter that is tied late",
    "a parametrization that comes late",
    "a pruned layer",
    "spectral_norm by hooks",
    "buffers of narrow dtypes",
    "buffer that grows",
    "buffer that is not persistent and None until the first batch",
    "buffer resized in place",
    "buffer of changing dtype",
    "buffer that is None until the first batch",
    "buffer that is None until the fourth batch",
    "buffer that becomes None",
    "buffer that a forward registers",
    "buffer made by expand",
    "buffer made by expand that only stays",
)
"""Elements whose models torch's AveragedModel cannot follow."""

LOSSES = [
    MEAN,
    Element(
        name="decay in the loss",
        losses="losses = losses + 0.01 * sum(p.square().sum() for p in model.parameters())",
        narrow=False,
        odds=2,
    ),
    Element(
        name="decay of one layer in the loss",
        losses="losses = losses + 0.01 * model.leave.weight.square().sum()",
        narrow=False,
        odds=2,
    ),
    Element(
        name="a gradient penalty",
        losses="""
if torch.is_grad_enabled():
    slope = torch.autograd.grad(output.sum(), x, create_graph=True)[0]
    losses = losses + 0.1 * slope.square().sum(1)
""",
        narrow=False,
        odds=2,
    ),
    Element(
        name="two forwards in one loss",
        losses="losses = losses + 0.1 * model(-x, i).squeeze(1).square()",
        twice=True,
        narrow=False,
        odds=3,
    ),
    Element(
        name="a loss of a part only",
        losses="losses = losses + 0.1 * model.twin(torch.ones(6, dtype=D)).square().mean()",
        narrow=False,
        odds=2,
    ),
    Element(
        name="a teacher beside the model, with its first weights",
        made='KEPT["teacher"] = make_model(SEED).eval()',
        losses="""
with torch.no_grad():
    taught = KEPT["teacher"](x, i).squeeze(1)
losses = losses + 0.1 * (output.squeeze(1) - taught).square()
""",
        narrow=False,
        odds=2,
    ),
    Element(
        name="functional_call with the model's own parameters halved",
        losses="""
halved = {name: 0.5 * p for name, p in model.named_parameters()}
called = torch.func.functional_call(model, halved, (x, i)).squeeze(1)
losses = losses + 0.1 * called.square()
""",
        twice=True,
        narrow=False,
        odds=1,
    ),
]

CALLS = [
    Element(
        name="evaluation",
        stepped="""
if session is not None and n % 2 == 0:
    session.evaluate(DATA, lambda batch: losses_of(model, batch).mean(), batch_size=7)
""",
        since=1,
    ),
    Element(
        name="other weights for an evaluation, and the same put back",
        stepped="""
if n % 3 == 1:
    own_weights = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.mul_(0.5)
    if session is not None:
        session.evaluate(DATA, lambda batch: losses_of(model, batch).mean(), batch_size=7)
    for p, own_weight in zip(model.parameters(), own_weights):
        p.copy_(own_weight)
""",
    ),
    Element(
        name="weights shrunk after an evaluation",
        stepped="""
if session is not None:
    session.evaluate(DATA, lambda batch: losses_of(model, batch).mean(), batch_size=7)
model.enter.weight.mul_(0.9)
""",
        odds=3,
    ),
    Element(
        name="state_dict in the middle",
        stepped="""
if session is not None and n % 3 == 0:
    session.state_dict()
""",
        odds=2,
    ),
    Element(
        name="a checkpoint that the script asks for",
        stepped="""
if session is not None and n == 2:
    session.checkpoint(tag="second")
""",
        odds=2,
    ),
    Element(
        name="a forward between steps",
        stepped="model(PROBE, PROBE_I)",
        whole=True,
        odds=3,
    ),
    Element(
        name="eval and train between steps",
        stepped="""
model.eval()
model(PROBE, PROBE_I)
model.train()
""",
        odds=3,
    ),
    Element(
        name="an average that is tracked",
        excludes=NOT_AVERAGED,
        prepared="""
KEPT["average"] = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
if session is not None:
    session.track("average", KEPT["average"])
""",
        stepped='KEPT["average"].update_parameters(model)',
        rest='rest["average"] = dict(KEPT["average"].module.named_parameters())',
        odds=3,
    ),
    Element(
        name="a counter that is tracked",
        top="""
class Counter:
    count = 0

    def state_dict(self):
        return {"count": self.count, "past": [0.5] * self.count}

    def load_state_dict(self, state):
        self.count = state["count"]
""",
        prepared="""
KEPT["counter"] = Counter()
if session is not None:
    session.track("counter", KEPT["counter"])
""",
        stepped="""
KEPT["counter"].count += 1
model.enter.bias.add_(0.01 * KEPT["counter"].count)
""",
    ),
    Element(
        name="a generator that is tracked",
        prepared="""
KEPT["drawn"] = torch.Generator().manual_seed(9)
if session is not None:
    session.track("drawn", KEPT["drawn"])
""",
        stepped='model.enter.bias.add_(0.1 * float(torch.rand((), generator=KEPT["drawn"])))',
        limits={ALL: "each rank keeps a generator of its own, and a new rank begins with another"},
    ),
    Element(
        name="noise of torch's own generator in a forward",
        hidden="h = h + 0.1 * torch.randn(5, dtype=D)",
        limits={ALL: "each rank draws for itself without virtual_batch=: not comparable"},
    ),
    Element(
        name="gradients that the session shows",
        top="""
def clamp_elements(name, elements):
    elements.clamp_(-0.02, 0.02)
""",
        prepared="""
if session is not None:
    session.on_gradients(clamp_elements)
""",
        graded="""
if SESSION is None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.clamp_(-0.02, 0.02)
""",
        narrow=False,
        odds=2,
    ),
    Element(
        name="weights shrunk at the end of an epoch",
        epoch_end="model.enter.weight.mul_(0.5)",
        odds=3,
    ),
    Element(
        name="a rate halved at the end of an epoch",
        epoch_end="""
for group in listed(optimizer)[0].param_groups:
    group["lr"] = group["lr"] * 0.5
""",
        odds=3,
    ),
    Element(
        name="an average and an evaluation at the end of an epoch",
        excludes=NOT_AVERAGED,
        prepared="""
KEPT["mean"] = torch.optim.swa_utils.AveragedModel(model)
if session is not None:
    session.track("mean", KEPT["mean"])
""",
        epoch_end="""
KEPT["mean"].update_parameters(model)
if session is not None:
    session.evaluate(DATA, lambda batch: losses_of(model, batch).mean(), batch_size=7)
""",
        rest='rest["mean"] = dict(KEPT["mean"].module.named_parameters())',
        odds=2,
    ),
    Element(
        name="a plateau that is stepped at the end of an epoch",
        prepared="""
KEPT["plateau"] = torch.optim.lr_scheduler.ReduceLROnPlateau(
    listed(optimizer)[0], patience=0, factor=0.5
)
if session is not None:
    session.track("plateau", KEPT["plateau"])
""",
        epoch_end='KEPT["plateau"].step(1.0)',
        odds=2,
    ),
]
