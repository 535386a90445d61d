"""Computes the memory that a rank and a node need under each strategy. Pure.

What a strategy allocates is stated in docs/design/memory.md; a test holds this against measured
use. Symbols: P elements of the trained parameters, b bytes of one of them, w bytes of the number
that the optimizer works on (4 where b is 2, else b), s numbers that it keeps for each element, N
ranks over which state is partitioned (of the world, or of a node), C = ceil(P / N).

| | weights | masters (b = 2) | gradients | optimizer |
|---|---|---|---|---|
| ddp | P b | 0 | P b | P s b |
| zero1 | P b | C w | P b | C s w |
| zero2 | P b | C w | C b | C s w |
| zero3 | C b | C w | C b | C s w |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticzero.spans import STRATEGIES, ShardOver

AUTO = "auto"
"""The name under which users leave the choice of a strategy to `first_that_fits`."""
FLAT_BUCKET_BYTES = 16 << 20
"""Default size of a bucket of zero1 and zero2, in bytes."""
POOL_BUCKETS = 3
"""Maximum number of the largest buckets whose memory the pool of zero1 and zero2 lends."""
GATHERED_MODULES = 2
"""Number of wrapped modules whose whole weights and gradients zero3 holds at a time."""
ACTIVATIONS_SHARE = 0.2
"""Part of a device's memory that is left for activations, where their size is not given."""
CUDA_BYTES = 1 << 30
"""Memory of a GPU that a context, a communicator and fragmentation take, roughly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSize:
    """Describes what an optimizer keeps for each element of the trained parameters."""

    numbers: int = 0
    """Numbers of the dtype that it works on."""
    packed_bytes: float = 0.0
    """Bytes of what it packs; zero3 refuses such an optimizer."""

    @property
    def strategies(self) -> Sequence[str]:
        """Returns the strategies that take the optimizer."""
        return [name for name in STRATEGIES if not self.packed_bytes or name != "zero3"]

    def bytes_for(self, elements: int, number_bytes: int) -> int:
        """Returns the bytes of the state for some elements.

        Args:
            elements: Number of elements.
            number_bytes: Bytes of one number.
        """
        return elements * self.numbers * number_bytes + round(elements * self.packed_bytes)


STATE_SIZES: Mapping[str, StateSize] = {
    "sgd": StateSize(),
    "sgd-momentum": StateSize(numbers=1),
    "adagrad": StateSize(numbers=1),
    "rmsprop": StateSize(numbers=1),
    "adadelta": StateSize(numbers=2),
    "adam": StateSize(numbers=2),
    "adamw": StateSize(numbers=2),
    "nadam": StateSize(numbers=2),
    "radam": StateSize(numbers=2),
    "adamw8bit": StateSize(packed_bytes=2 * (1 + 4 / 256)),
}
"""The state of torch's optimizers with their default options, and of torchao's AdamW8bit for
parameters that it packs: two codes of a byte, and for each block of 256 a scale of 4 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Describes a model's trained parameters."""

    elements: int
    element_bytes: int
    largest: int
    """Elements of the largest parameter, which is never split between buckets."""
    layer: int
    """Elements of the largest module that zero3 gathers by itself."""
    outer: int = 0
    """Elements outside of such modules, which zero3 gathers for the whole step."""
    frozen_bytes: int = 0
    """Bytes of parameters that are not trained."""
    forward_bytes: int = 0
    """Bytes of an element in the forward, where autocast copies the parameters to another format;
    0: it computes with the parameters themselves."""

    @property
    def has_masters(self) -> bool:
        """Returns whether the divided strategies keep masters; then `ddp` trains without them."""
        return self.working_bytes != self.element_bytes

    @property
    def copied_bytes(self) -> int:
        """Returns the bytes of the copies that autocast makes and the backward needs."""
        return self.elements * self.forward_bytes

    @property
    def working_bytes(self) -> int:
        """Returns the bytes of a number that a partitioned optimizer works on."""
        return 4 if self.element_bytes == 2 else self.element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Holds the memory that one rank needs for training state, in bytes."""

    weights: int
    masters: int
    gradients: int
    optimizer: int
    buffers: int
    """Buckets on their way, gathered modules, copies of the weights that autocast makes, and
    gradients in another precision."""
    mirrors: int = 0
    """Live copies of other ranks' parts, with the gradients for them."""
    residual: int = 0
    """Parts of encoded gradients that are yet to be sent, those of the newest boundary and of the
    next."""
    host: int = 0
    """State in host memory instead of the device's, which the other numbers leave out."""

    @property
    def total(self) -> int:
        """Returns what the device needs."""
        training = self.weights + self.masters + self.gradients + self.optimizer + self.buffers
        return training + self.mirrors + self.residual


@dataclass(frozen=True, slots=True, kw_only=True)
class LineUp:
    """Describes the ranks."""

    nodes: int
    ranks_per_node: int
    shard: ShardOver = "world"
    """The ranks over which a strategy divides state."""
    direct: bool = False
    """True if ranks exchange gradients by direct messages, which need room, as on the CPU."""
    bucket_bytes: int = FLAT_BUCKET_BYTES
    """Size of a bucket of zero1 and zero2, beyond which it takes no further parameter."""
    mirrored: bool = False
    """True if each rank keeps a live copy of another node's rank's part (`--redundancy mirror`)."""
    sent_bytes: float = 0
    """Bytes of an element of a gradient in a message, where it is encoded for its way between
    ranks; 0: it is not."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def shards(self) -> int:
        """Returns the number of ranks that hold the state together."""
        return self.ranks_per_node if self.shard == "node" else self.ranks

    def encodes(self, strategy: str, model: ModelSize) -> bool:
        """Returns whether ranks encode gradients that they send with this strategy."""
        shorter = 0 < self.sent_bytes < model.element_bytes and model.element_bytes > 2
        return shorter and strategy != "zero3"

    def has_mirrors(self, strategy: str) -> bool:
        """Returns whether ranks keep mirrors with this strategy."""
        divided = strategy != "ddp" and self.shards == self.ranks
        return self.mirrored and divided and self.nodes > 1


def rank_memory(
    strategy: str, model: ModelSize, kept: StateSize, line_up: LineUp, *, offloaded: bool = False
) -> RankMemory:
    """Returns what one rank holds at the peak of a step, without activations.

    Args:
        strategy: The strategy's name.
        model: The sizes of the model.
        kept: What the optimizer keeps.
        line_up: The ranks and how state is divided among them.
        offloaded: zero3 keeps all but what it gathers in host memory.

    Raises:
        ValueError: There is no such strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"{strategy!r} is not one of {', '.join(STRATEGIES)}")
    ranks, b, w = line_up.shards, model.element_bytes, model.working_bytes
    residual = 2 * model.elements * b * line_up.encodes(strategy, model)
    whole, chunk = model.elements, -(-model.elements // ranks)
    if strategy == "ddp":
        return RankMemory(
            weights=whole * b + model.frozen_bytes,
            masters=0,
            gradients=whole * b,
            optimizer=kept.bytes_for(whole, b),
            buffers=model.copied_bytes
            + (model.largest * b if line_up.ranks > 1 else 0)
            + _messages(whole, model, line_up, line_up.ranks),
            residual=residual,
        )
    rounded = chunk * w if model.has_masters else 0
    divided = strategy == "zero3"
    frozen = -(-model.frozen_bytes // ranks) if divided else model.frozen_bytes
    buffers = _gathered(model) if divided else model.copied_bytes + _pool(strategy, model, line_up)
    if not divided:
        buffers += _messages(chunk, model, line_up, line_up.ranks // ranks)
    mirror = chunk * (b + w) + rounded + kept.bytes_for(chunk, w)
    memory = RankMemory(
        weights=(chunk if divided else whole) * b + frozen,
        masters=rounded,
        gradients=(whole if strategy == "zero1" else chunk) * b,
        optimizer=kept.bytes_for(chunk, w),
        buffers=buffers + max(rounded, 0 if divided else model.largest * b),
        mirrors=mirror if line_up.has_mirrors(strategy) else 0,
        residual=residual,
    )
    if not (offloaded and divided):
        return memory
    host = memory.total - buffers
    return RankMemory(weights=0, masters=0, gradients=0, optimizer=0, buffers=buffers, host=host)


def _pool(strategy: str, model: ModelSize, line_up: LineUp) -> int:
    """Returns the bytes that the pool of zero1 and zero2 lends at most.

    Args:
        strategy: zero1 or zero2.
        model: The sizes of the model.
        line_up: The ranks, and the size of a bucket.
    """
    ranks, b = line_up.shards, model.element_bytes
    if ranks == 1:
        return 0
    all_bytes = model.elements * b
    needed = all_bytes if strategy == "zero2" else 0
    if ranks == line_up.ranks and (messages := _messages(model.elements, model, line_up, ranks)):
        needed += messages
    elif line_up.direct:
        needed += all_bytes * (ranks - 1) // ranks
    bucket = min(all_bytes, max(line_up.bucket_bytes, model.largest * b))
    return min(needed, POOL_BUCKETS * bucket)


def _messages(elements: int, model: ModelSize, line_up: LineUp, ranks: int) -> int:
    """Returns the bytes of what a rank sends and receives of gradients that are encoded.

    Args:
        elements: Elements of the gradients.
        model: The sizes of the model.
        line_up: The ranks, and what they send.
        ranks: Number of ranks that sum these gradients.
    """
    is_encoded = line_up.encodes("ddp", model)
    return int(2 * elements * line_up.sent_bytes * is_encoded * (ranks - 1)) // ranks


def _gathered(model: ModelSize) -> int:
    """Returns the bytes of whole weights and gradients that zero3 holds at a time."""
    modules = 2 * GATHERED_MODULES * model.layer
    return min(modules + 2 * model.outer, 2 * model.elements) * model.element_bytes


def checkpoint_bytes(strategy: str, model: ModelSize, kept: StateSize, line_up: LineUp) -> int:
    """Returns the bytes of a checkpoint.

    Args:
        strategy: The strategy's name; ddp keeps no masters.
        model: The sizes of the model.
        kept: What the optimizer keeps.
        line_up: The ranks, each of which has a residual where gradients are encoded.
    """
    residuals = line_up.ranks * _stored_residual(strategy, model, line_up)
    return state_bytes(strategy, model, kept) + residuals


def _stored_residual(strategy: str, model: ModelSize, line_up: LineUp) -> int:
    """Returns the bytes of one rank's residual."""
    return model.elements * model.element_bytes * line_up.encodes(strategy, model)


def state_bytes(strategy: str, model: ModelSize, kept: StateSize) -> int:
    """Returns the bytes of weights, masters and optimizer state, each once.

    Args:
        strategy: The strategy's name; ddp keeps no masters.
        model: The sizes of the model.
        kept: What the optimizer keeps.
    """
    b, w = model.element_bytes, model.working_bytes
    stored = b if strategy == "ddp" else w
    masters = w if model.has_masters and strategy != "ddp" else 0
    weights = model.elements * (b + masters) + model.frozen_bytes
    return weights + kept.bytes_for(model.elements, stored)


def snapshot_bytes(strategy: str, model: ModelSize, kept: StateSize, line_up: LineUp) -> int:
    """Returns the RAM that a node needs for its snapshots while checkpoints are saved.

    Args:
        strategy: The strategy's name.
        model: The sizes of the model.
        kept: What the optimizer keeps.
        line_up: The ranks and how state is divided among them.
    """
    state = state_bytes(strategy, model, kept)
    replicated = strategy == "ddp" or line_up.ranks == 1 or line_up.shards < line_up.ranks
    residual = _stored_residual(strategy, model, line_up)
    return node_snapshot_bytes(
        -(-state // line_up.ranks) + residual,
        state + 2 * residual * line_up.ranks_per_node if replicated else 0,
        workers=line_up.ranks_per_node,
        captures=True,
        replicas=not replicated and line_up.nodes > 1,
        mirrors=line_up.has_mirrors(strategy),
    )


def node_snapshot_bytes(
    shard: int, whole: int, *, workers: int, captures: bool, replicas: bool, mirrors: bool
) -> int:
    """Returns the bytes of shared memory that a node with this many workers needs for snapshots.

    These are two slots per rank if captures are taken during training, two for each replica, and
    the memory of a capture at a stop, of mirrors too.

    Args:
        shard: Bytes of one rank's shard.
        whole: Bytes of the complete state if each rank has all of it; else 0.
        workers: Number of workers of the node.
        captures: Captures are taken during training.
        replicas: The node keeps replicas of other nodes' shards.
        mirrors: Ranks keep live copies of other ranks' parts.
    """
    while_training = 2 * shard * workers * (captures + replicas)
    return while_training + (whole or shard * workers * (1 + mirrors))


def first_that_fits(needs: Mapping[str, int], room: int) -> str | None:
    """Returns the first strategy, in the order of `STRATEGIES`, that needs no more than `room`."""
    return next((name for name in _ordered(needs) if needs[name] <= room), None)


def _ordered(names: Mapping[str, int]) -> Sequence[str]:
    return [name for name in STRATEGIES if name in names]


def room_for_state(device_bytes: int, activations_bytes: int | None, *, cuda: bool) -> int:
    """Returns the memory of a device that training state may take.

    Args:
        device_bytes: Memory of the device.
        activations_bytes: Memory of a step's activations; None: `ACTIVATIONS_SHARE` of the device.
        cuda: The device is a GPU.
    """
    if activations_bytes is None:
        activations_bytes = int(device_bytes * ACTIVATIONS_SHARE)
    return device_bytes - activations_bytes - (CUDA_BYTES if cuda else 0)
