"""What modules keep besides parameters: buffers of every kind, and extra state."""

from __future__ import annotations

from tests.integration.generator.elements import ALL, Element

BUFFERS = [
    Element(
        name="buffer replaced by each forward",
        init='self.register_buffer("replaced", torch.zeros((), dtype=D))',
        hidden="""
if self.training:
    self.replaced = 0.9 * self.replaced + 1
h = h / (1 + 0.05 * self.replaced)
""",
        whole=True,
    ),
    Element(
        name="buffer that is None until the first batch",
        init='self.register_buffer("late", None)',
        hidden="""
if self.training:
    self.late = torch.zeros(2, dtype=D) if self.late is None else self.late + 1
if self.late is not None:
    h = h / (1 + 0.05 * self.late.sum())
""",
        whole=True,
    ),
    Element(
        name="buffer that is None until the fourth batch",
        init="""
self.register_buffer("latest", None)
self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
""",
        hidden="""
if self.training:
    self.batches += 1
    if self.batches == 4:
        self.latest = torch.full((3,), 0.5, dtype=D)
if self.latest is not None:
    h = h * self.latest.mean()
""",
        whole=True,
    ),
    Element(
        name="buffer that becomes None",
        init="""
self.register_buffer("dropped", torch.ones(1, dtype=D))
self.register_buffer("until", torch.zeros((), dtype=torch.int32))
""",
        hidden="""
if self.training:
    self.until += 1
    if self.until == 3:
        self.dropped = None
if self.dropped is not None:
    h = h + self.dropped
""",
        whole=True,
    ),
    Element(
        name="buffer that grows",
        init='self.register_buffer("growing", torch.zeros(0, dtype=D))',
        hidden="""
if self.training and len(self.growing) < 6:
    self.growing = torch.cat([self.growing, torch.ones(1, dtype=D)])
h = h / (1 + 0.05 * self.growing.sum())
""",
        whole=True,
    ),
    Element(
        name="buffer resized in place",
        init='self.register_buffer("resized", torch.ones(1, dtype=D))',
        hidden="""
if self.training and len(self.resized) < 6:
    self.resized.resize_(len(self.resized) + 1)[-1] = 1
h = h / (1 + 0.05 * self.resized.sum())
""",
        whole=True,
        odds=2,
    ),
    Element(
        name="buffer of changing dtype",
        init='self.register_buffer("widened", torch.zeros(2, dtype=torch.int32))',
        hidden="""
if self.training:
    wide = torch.float64 if self.widened.sum() > 5 else torch.int32
    self.widened = self.widened.to(wide) + 1
h = h / (1 + 0.05 * self.widened.sum().to(D))
""",
        whole=True,
    ),
    Element(
        name="buffer made by expand",
        init='self.register_buffer("expanded", torch.zeros(1, dtype=D).expand(3))',
        hidden="""
if self.training:
    self.expanded = (self.expanded[:1] + 1).expand(3)
h = h / (1 + 0.05 * self.expanded.sum())
""",
        whole=True,
    ),
    Element(
        name="buffer made by expand that only stays",
        init='self.register_buffer("spread", torch.full((1,), 0.5, dtype=D).expand(5))',
        hidden="h = h * self.spread",
    ),
    Element(
        name="buffers that are views of one tensor",
        init="""
memory = torch.zeros(4, dtype=D)
self.register_buffer("whole_view", memory)
self.register_buffer("part_view", memory[1:3])
""",
        hidden="""
if self.training:
    self.part_view += 1
h = h / (1 + 0.05 * self.whole_view.sum())
""",
        whole=True,
    ),
    Element(
        name="one buffer under two names",
        init="""
self.register_buffer("original", torch.zeros(2, dtype=D))
self.register_buffer("tied_buffer", self.original)
""",
        hidden="""
if self.training:
    self.original += 1
h = h / (1 + 0.05 * self.tied_buffer.sum())
""",
        whole=True,
    ),
    Element(
        name="buffer that is not persistent, counted in place",
        init='self.register_buffer("passing", torch.zeros(2, dtype=torch.int64), persistent=False)',
        hidden="""
if self.training:
    self.passing += 1
h = h / (1 + 0.05 * self.passing.sum().to(D))
""",
        whole=True,
    ),
    Element(
        name="buffer that is not persistent, replaced",
        init='self.register_buffer("swapped", torch.zeros(1, dtype=D), persistent=False)',
        hidden="""
if self.training:
    self.swapped = 0.5 * self.swapped + 1
h = h / (1 + 0.05 * self.swapped)
""",
        whole=True,
    ),
    Element(
        name="buffer that is not persistent and None until the first batch",
        init='self.register_buffer("cache", None, persistent=False)',
        hidden="""
if self.training:
    self.cache = torch.zeros(1, dtype=D) if self.cache is None else self.cache + 1
if self.cache is not None:
    h = h / (1 + 0.05 * self.cache)
""",
        whole=True,
    ),
    Element(
        name="buffer that a forward registers",
        hidden="""
if self.training:
    if "registered" not in self._buffers:
        self.register_buffer("registered", torch.zeros((), dtype=D))
    self.registered += 1
if "registered" in self._buffers:
    h = h / (1 + 0.05 * self.registered)
""",
        whole=True,
        odds=2,
    ),
    Element(
        name="buffer that follows a parameter",
        init="""
self.follower = nn.Linear(5, 5)
self.register_buffer("center", torch.zeros(5, 5, dtype=D))
""",
        hidden="""
h = h + torch.tanh(self.follower(h)) + h @ self.center * 0.1
if self.training:
    self.center = 0.5 * self.center + 0.5 * self.follower.weight.detach()
""",
        whole=True,
    ),
    Element(
        name="buffer that is a view of a parameter",
        init="""
self.watched = nn.Linear(5, 5)
self.register_buffer("row", self.watched.weight.data[0])
""",
        hidden="h = h + torch.tanh(self.watched(h)) + 0.1 * self.row",
    ),
    Element(
        name="buffers of narrow dtypes",
        init="""
self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
self.register_buffer("coarse", torch.zeros(2, dtype=torch.bfloat16))
self.register_buffer("bytes", torch.zeros(2, dtype=torch.uint8))
self.register_buffer("nothing", torch.zeros(0, 4))
""",
        hidden="""
if self.training:
    self.flags = ~self.flags
    self.coarse += 0.5
    self.bytes += 1
h = h / (1 + 0.05 * (self.flags.sum() + self.coarse.sum() + self.bytes.sum()).to(D))
""",
        whole=True,
    ),
    Element(
        name="complex buffer",
        init='self.register_buffer("phase", torch.ones(5, dtype=torch.complex128))',
        hidden="""
if self.training:
    self.phase = self.phase * torch.tensor(0.6 + 0.8j, dtype=torch.complex128)
h = h + self.phase.real.to(D)
""",
        whole=True,
        narrow=False,
        odds=1,
    ),
    Element(
        name="buffer that the script replaces",
        init='self.register_buffer("temperature", torch.ones((), dtype=D))',
        hidden="h = h * self.temperature",
        stepped="OWNER.temperature = OWNER.temperature * 0.9",
    ),
    Element(
        name="buffer that the script changes in place",
        init='self.register_buffer("warmth", torch.ones((), dtype=D))',
        hidden="h = h * self.warmth",
        stepped="OWNER.get_buffer('warmth').mul_(0.9)",
    ),
    Element(
        name="batch statistics that stay",
        init="""
self.normal = nn.BatchNorm1d(5).eval()
self.normal.train = lambda mode=True: self.normal
""",
        hidden="h = self.normal(h)",
        odds=1,
        narrow=False,
    ),
]
"""Left out: batch statistics that are taken (docs/training.md says that they follow the ranks'
micro-batches), and buffers that follow samples (rank 0's count): neither is that of one process."""

UNSEEN = Element(
    name="count in a plain attribute",
    init="self.forwards = 0",
    hidden="""
if self.training:
    self.forwards += 1
h = h / (1 + 0.05 * self.forwards)
""",
    whole=True,
    limits={ALL: "nothing says that a plain attribute is state: `elasticzero rehearse` finds it"},
)
EXTRA = [
    Element(
        name="extra state that is a tensor",
        top="""
class TensorState(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = torch.zeros(2, dtype=torch.float64)

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, state):
        self.value = state

    def forward(self, h):
        if self.training:
            self.value = self.value + 1
        return h / (1 + 0.05 * self.value.sum().to(D))
""",
        init="self.tensor_state = TensorState()",
        hidden="h = self.tensor_state(h)",
        whole=True,
    ),
    Element(
        name="extra state that is a tree",
        top="""
class TreeState(nn.Module):
    def __init__(self):
        super().__init__()
        self.tree = {"count": 0, "parts": (1.5, [None, "x"]), "sum": torch.zeros(1), 3: True}

    def get_extra_state(self):
        return self.tree

    def set_extra_state(self, state):
        self.tree = state

    def forward(self, h):
        if self.training:
            self.tree["count"] += 1
            self.tree["sum"] = self.tree["sum"] + 0.5
        return h / (1 + 0.05 * (self.tree["count"] + self.tree["sum"].to(D)))
""",
        init="self.tree_state = TreeState()",
        hidden="h = self.tree_state(h)",
        whole=True,
    ),
    Element(
        name="extra state that is None at first and then a tensor",
        top="""
class KindState(nn.Module):
    value = None

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, state):
        self.value = state

    def forward(self, h):
        if self.training:
            self.value = torch.zeros(1) if self.value is None else self.value + 1
        return h if self.value is None else h / (1 + 0.05 * self.value.to(D))
""",
        init="self.kind_state = KindState()",
        hidden="h = self.kind_state(h)",
        whole=True,
    ),
    Element(
        name="extra state that is a number, then a list",
        top="""
class NumberState(nn.Module):
    value = 0

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, state):
        self.value = state

    def forward(self, h):
        total = sum(self.value) if isinstance(self.value, list) else self.value
        if self.training:
            self.value = total + 1 if total < 2 else [total, 1]
        return h / (1 + 0.05 * total)
""",
        init="self.number_state = NumberState()",
        hidden="h = self.number_state(h)",
        whole=True,
    ),
    Element(
        name="extra state that cannot be stored",
        top="""
class SetState(nn.Module):
    seen = frozenset()

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state

    def forward(self, h):
        if self.training:
            self.seen = self.seen | {len(self.seen)}
        return h / (1 + 0.05 * len(self.seen))
""",
        init="self.set_state = SetState()",
        hidden="h = self.set_state(h)",
        whole=True,
        odds=1,
    ),
    Element(
        name="state that hooks of state_dict add",
        top="""
class HookedState(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(1, dtype=torch.float64)
        self.register_state_dict_post_hook(HookedState.save)
        self.register_load_state_dict_pre_hook(HookedState.load)

    @staticmethod
    def save(module, state, prefix, metadata):
        state[prefix + "scale"] = module.scale

    @staticmethod
    def load(module, state, prefix, *others):
        module.scale = state.pop(prefix + "scale")

    def forward(self, h):
        if self.training:
            self.scale = self.scale * 0.9
        return h * self.scale.to(D)
""",
        init="self.hooked_state = HookedState()",
        hidden="h = self.hooked_state(h)",
        whole=True,
        odds=2,
    ),
    Element(
        name="state that _save_to_state_dict adds",
        top="""
class SavedState(nn.Module):
    def __init__(self):
        super().__init__()
        self.level = torch.ones(1, dtype=torch.float64)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "level"] = self.level

    def _load_from_state_dict(self, state, prefix, *others):
        self.level = state.pop(prefix + "level")
        super()._load_from_state_dict(state, prefix, *others)

    def forward(self, h):
        if self.training:
            self.level = self.level * 0.9
        return h * self.level.to(D)
""",
        init="self.saved_state = SavedState()",
        hidden="h = self.saved_state(h)",
        whole=True,
        odds=2,
    ),
    UNSEEN,
]
