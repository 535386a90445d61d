"""Parameters of unusual kinds, and networks that change them in their forward."""

from __future__ import annotations

from tests.integration.generator.elements import ALL, Element

EMPTY = "parameters of 0 dimensions and of 0 elements"

KINDS = [
    Element(
        name="tied weights",
        init="""
self.into = nn.Linear(5, 5)
self.back = nn.Linear(5, 5)
self.back.weight = self.into.weight
""",
        hidden="h = self.back(torch.tanh(self.into(h)))",
    ),
    Element(
        name="one module under two names",
        init="""
self.shared = nn.Linear(5, 5)
self.shared_again = self.shared
""",
        hidden="h = self.shared_again(torch.tanh(self.shared(h)))",
    ),
    Element(
        name="weight_norm",
        init="self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))",
        hidden="h = h + torch.tanh(self.normed(h))",
        narrow=False,
    ),
    Element(
        name="orthogonal",
        init="self.turned = nn.utils.parametrizations.orthogonal(nn.Linear(5, 5))",
        hidden="h = h + torch.tanh(self.turned(h))",
        narrow=False,
        odds=2,
    ),
    Element(
        name="spectral_norm, whose forward changes buffers",
        init="self.bounded = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5))",
        hidden="h = h + torch.tanh(self.bounded(h))",
        whole=True,
        narrow=False,
    ),
    Element(
        name="spectral_norm by hooks",
        init="self.bounded_by_hook = nn.utils.spectral_norm(nn.Linear(5, 5))",
        hidden="h = h + torch.tanh(self.bounded_by_hook(h))",
        whole=True,
        narrow=False,
        odds=2,
    ),
    Element(
        name="a parametrization with state",
        top="""
class Fading(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.ones((), dtype=torch.float64))

    def forward(self, weight):
        return weight * self.factor.to(weight.dtype)
""",
        init="""
self.faded = nn.Linear(5, 5)
nn.utils.parametrize.register_parametrization(self.faded, "weight", Fading())
""",
        hidden="""
if self.training:
    fading = self.faded.parametrizations.weight[0]
    fading.factor = fading.factor * 0.9
h = h + torch.tanh(self.faded(h))
""",
        whole=True,
    ),
    Element(
        name="a pruned layer",
        init="""
self.pruned = nn.Linear(5, 5)
nn.utils.prune.l1_unstructured(self.pruned, "weight", amount=0.4)
""",
        hidden="h = h + torch.tanh(self.pruned(h))",
        narrow=False,
    ),
    Element(
        name="a frozen layer",
        init="self.frozen = nn.Linear(5, 5).requires_grad_(False)",
        hidden="h = h + torch.tanh(self.frozen(h))",
    ),
    Element(
        name="a layer that the script freezes",
        init="self.freezing = nn.Linear(5, 5)",
        hidden="h = h + torch.tanh(self.freezing(h))",
        begin="OWNER.freezing.requires_grad_(n <= 2)",
        whole=True,
    ),
    Element(
        name="a layer that the script freezes at one step alone",
        init="self.frozen_once = nn.Linear(5, 5)",
        hidden="h = h + torch.tanh(self.frozen_once(h))",
        begin="""
if n == 2:
    OWNER.frozen_once.requires_grad_(False)
""",
        whole=True,
    ),
    Element(
        name="a module that the script evaluates from one step on",
        top="""
class Doubled(nn.Module):
    def forward(self, h):
        return 2 * h if self.training else h
""",
        init="self.doubled = Doubled()",
        hidden="h = h + torch.tanh(self.doubled(h))",
        begin="""
if n == 2:
    OWNER.doubled.eval()
""",
        whole=True,
    ),
    Element(
        name="a frozen layer that the script changes",
        init="self.moved = nn.Linear(5, 5).requires_grad_(False)",
        hidden="h = h + torch.tanh(self.moved(h))",
        stepped="OWNER.moved.weight.mul_(0.9)",
    ),
    Element(
        name="a layer that nothing uses",
        init="self.unused = nn.Linear(3, 2)",
    ),
    Element(
        name=EMPTY,
        init="""
self.scale = nn.Parameter(torch.ones((), dtype=D))
self.empty = nn.Parameter(torch.zeros(0, 3, dtype=D))
""",
        hidden="h = h * self.scale + self.empty.sum()",
    ),
    Element(
        name="parameters by odd names",
        init="""
self.named = nn.ParameterDict(
    {name: nn.Parameter(torch.full((5,), 0.5, dtype=D)) for name in ("a/b", "master", "50%", "é")}
)
""",
        hidden="""
for value in self.named.values():
    h = h * (1 + 0.1 * value)
""",
    ),
    Element(
        name="a transposed weight",
        init="""
self.crossed = nn.Linear(5, 5)
self.crossed.weight = nn.Parameter(self.crossed.weight.detach().t())
""",
        hidden="h = h + torch.tanh(self.crossed(h))",
    ),
    Element(
        name="a channels_last convolution",
        init="""
self.convolve = nn.Conv2d(2, 5, 2)
self.convolve.weight.data = self.convolve.weight.data.contiguous(
    memory_format=torch.channels_last
)
""",
        hidden="""
image = torch.cat([h, h], 1)[:, :8].reshape(-1, 2, 2, 2)
h = h + torch.tanh(self.convolve(image).flatten(1))
""",
    ),
    Element(
        name="a weight and its transpose in one memory",
        init="""
self.forth = nn.Linear(5, 5)
self.mirror = nn.Linear(5, 5)
self.mirror.weight.data = self.forth.weight.data.t()
""",
        hidden="h = self.mirror(torch.tanh(self.forth(h)))",
        odds=2,
    ),
    Element(
        name="an embedding",
        init="self.words = nn.Embedding(10, 5, padding_idx=0)",
        hidden="h = h + self.words(i)",
    ),
    Element(
        name="a sparse embedding",
        init="self.rows = nn.Embedding(10, 5, sparse=True)",
        hidden="h = h + self.rows(i)",
        odds=1,
        limits={ALL: "docs/training.md: gradients are made dense, as by sparse=False"},
    ),
    Element(
        name="an embedding with max_norm",
        init="self.renormed = nn.Embedding(10, 5, max_norm=1.0)",
        hidden="h = h + self.renormed(i)",
        narrow=False,
        odds=1,
    ),
    Element(
        name="a complex parameter",
        init="self.rotation = nn.Parameter(torch.ones(5, dtype=torch.complex128))",
        hidden="h = (h * self.rotation).abs().to(D)",
        narrow=False,
        odds=1,
    ),
    Element(
        name="a lazy layer",
        init="self.lazy = nn.LazyLinear(5)",
        hidden="h = h + torch.tanh(self.lazy(h))",
        odds=1,
    ),
    Element(
        name="a layer with plain dicts of hooks",
        init="""
self.wrapped = nn.Linear(5, 5)
self.wrapped._forward_pre_hooks = {}
self.wrapped._backward_hooks = {}
""",
        hidden="h = h + torch.tanh(self.wrapped(h))",
        odds=2,
    ),
    Element(
        name="activation checkpointing",
        init="self.redone = nn.Sequential(nn.Linear(5, 5), nn.Tanh())",
        hidden="h = h + torch.utils.checkpoint.checkpoint(self.redone, h, use_reentrant=False)",
    ),
    Element(
        name="layer and group normalization",
        init="""
self.layer_norm = nn.LayerNorm(5, elementwise_affine=True)
self.group_norm = nn.GroupNorm(1, 5)
self.between = nn.Linear(5, 5)
""",
        hidden="h = h + self.group_norm(self.between(self.layer_norm(h)))",
        narrow=False,
    ),
    Element(
        name="a layer whose backward hook scales its gradient",
        init="""
self.scaled = nn.Linear(5, 5)
self.scaled.register_full_backward_hook(lambda module, into, out: tuple(0.5 * g for g in into))
""",
        hidden="h = h + torch.tanh(self.scaled(h))",
    ),
]

CHANGED_IN_FORWARDS = [
    Element(
        name="a weight that a forward clamps",
        init="self.limited = nn.Linear(5, 5)",
        hidden="""
if self.training:
    with torch.no_grad():
        self.limited.weight.clamp_(-0.2, 0.2)
h = h + torch.tanh(self.limited(h))
""",
        whole=True,
    ),
    Element(
        name="a mask that a forward pre-hook lays over a weight",
        top="""
def mask_first(module, arguments):
    if module.training:
        module.weight.data.mul_(torch.arange(25).view(5, 5) % 3 > 0)
""",
        init="""
self.masked = nn.Linear(5, 5)
self.masked.register_forward_pre_hook(mask_first)
""",
        hidden="h = h + torch.tanh(self.masked(h))",
    ),
    Element(
        name="a momentum encoder",
        init="""
self.query = nn.Linear(5, 5)
self.key = nn.Linear(5, 5).requires_grad_(False)
""",
        hidden="""
if self.training:
    for slow, fast in zip(self.key.parameters(), self.query.parameters()):
        slow.data = 0.9 * slow.data + 0.1 * fast.data
h = h + torch.tanh(self.query(h)) + 0.1 * self.key(h)
""",
        whole=True,
    ),
    Element(
        name="a momentum encoder in place",
        init="""
self.student = nn.Linear(5, 5)
self.teacher = nn.Linear(5, 5).requires_grad_(False)
""",
        hidden="""
if self.training:
    with torch.no_grad():
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters()):
            slow.lerp_(fast, 0.1)
h = h + torch.tanh(self.student(h)) + 0.1 * self.teacher(h)
""",
        whole=True,
    ),
    Element(
        name="a weight that a forward hook shrinks afterwards",
        top="""
def shrink_later(module, arguments, output):
    if module.training:
        module.weight.data = module.weight.data * 0.9
""",
        init="""
self.shrunk = nn.Linear(5, 5)
self.shrunk.register_forward_hook(shrink_later)
""",
        hidden="h = h + torch.tanh(self.shrunk(h))",
        whole=True,
    ),
    Element(
        name="rows that a function renormalizes",
        init="self.table = nn.Parameter(torch.randn(10, 5, dtype=D))",
        hidden="h = h + nn.functional.embedding(i, self.table, max_norm=1.0)",
        takes_ranks=True,
        whole=True,
        narrow=False,
        odds=2,
    ),
]
