"""Defines what an island's workers and its agent tell each other of the rounds. Pure.

`launcher/protocol/rounds` says what rounds are, and has the words.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from elasticzero.options.diloco import DiLoCo
from elasticzero.serialization import OMIT_DEFAULT

PARTS = ("parameters", "momentum")
"""Parts of an outer state, in the order in which its digest has them."""
ROUNDS_FOLDER = "rounds"
"""Folder of the files of the rounds in the directory of a node's snapshots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMark:
    """Says from where the readers of a section of a stream can give the samples that follow a
    position."""

    at: int
    """The position, in the order of all epochs of the loop."""
    rows: tuple[tuple[int, ...], ...]
    """For each reader of the section its row, as of `data/streams/plan.py`."""


def nearest_mark(marks: Iterable[StreamMark], position: int, section: int) -> StreamMark | None:
    """Returns the last of some marks from which readers come to a position; None: there is none in
    its section.

    Args:
        marks: The marks.
        position: The position.
        section: Number of positions in a section.
    """
    start = position // section * section
    before = [mark for mark in marks if start <= mark.at <= position]
    return max(before, key=lambda mark: mark.at, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Describes a contribution that is not settled."""

    number: int
    """Number among the island's contributions to the fragment, from 1."""
    base: int
    """Round whose outer parameters it differs from."""
    samples: int
    """Number of samples of the inner steps that it sums up."""
    steps: int
    """Number of these inner steps."""
    claim: int
    """Number of the newest claim of which it has samples."""
    upto: int
    """Position after the last of its samples."""
    mark: StreamMark | None = field(default=None, metadata=OMIT_DEFAULT)
    """Where the readers of a stream go on there."""
    since: int = 0
    """Number of inner steps that the island has made since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentProgress:
    """Says how far an island is with one fragment."""

    base: int = 0
    """Round whose outer parameters the island last took."""
    digest: str = ""
    """Digest of the outer state after that round."""
    sent: Sent | None = None
    """Contribution that is not settled; None: there is none."""
    number: int = 0
    """Number of contributions so far."""
    steps: int = 0
    """Inner steps since the last contribution."""
    samples: int = 0
    """Samples of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesLeft:
    """Says which samples are in no committed round yet."""

    next: int = 0
    """Position from which on no sample is."""
    earlier: tuple[tuple[int, int], ...] = ()
    """Pieces `[start, stop)` before it."""
    committed: int = 0
    """Number of samples in committed rounds."""
    marks: tuple[StreamMark, ...] = field(default=(), metadata=OMIT_DEFAULT)
    """Where the readers of a stream can go on."""

    @property
    def first(self) -> int:
        """Returns the position of the first sample that is in no committed round."""
        return min((start for start, _ in self.earlier), default=self.next)


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandProgress:
    """Says how far an island is: in its samples, and with each fragment."""

    fragments: tuple[FragmentProgress, ...]
    incarnation: str = ""
    """The island's incarnation; empty: it takes part in no rounds yet."""
    claim: int = 0
    """Number of the claim that it trains on; 0: it has had none."""
    upto: int = 0
    """Position after the last sample that it has used of that."""
    mark: StreamMark | None = field(default=None, metadata=OMIT_DEFAULT)
    """Where the readers of a stream go on there; None: it has used none."""
    ends: tuple[int, ...] = field(default=(), metadata=OMIT_DEFAULT)
    """Positions after the last samples of a stream's sections, of which the island has been given
    positions beyond."""
    left: SamplesLeft = field(default_factory=SamplesLeft)
    """Samples with which rounds would go on that begin with this state."""
    epochs: int = field(default=0, metadata=OMIT_DEFAULT)
    """Number of epochs after which the script's `on_epoch_end` has run, or need not run."""


NONE = IslandProgress(fragments=())
"""That of an island that has begun nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentShape:
    """Describes the elements of one fragment, which lie end to end."""

    elements: int
    averaged: int
    """Number of the last of them, of buffers, which are averaged without an outer step."""
    dtype: Literal["float32", "float64"]
    """Format of outer parameters."""
    exact: int = field(default=0, metadata=OMIT_DEFAULT)
    """Number of the last elements, of small tensors, which are sent as they are whatever
    `DiLoCo.wire` says."""
    matrices: tuple[tuple[int, int], ...] = field(default=(), metadata=OMIT_DEFAULT)
    """Rows and columns of each parameter that the elements before those are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRounds:
    """Worker to agent: its state is in place, and it will train on what the rounds give it.

    Its part of the state is in the files of `own_name`.
    """

    settings: DiLoCo
    section: int
    """Number of positions in a section of the order of samples."""
    is_stream: bool = field(default=False, metadata=OMIT_DEFAULT)
    """True: sections have fewer samples than positions."""
    total: int
    """Number of positions in the whole loop."""
    limit: int | None = field(default=None, metadata=OMIT_DEFAULT)
    """Most samples of the whole loop; None: as many as there are."""
    global_batch: int
    digest: str
    """Digest of what all islands must have in common: the order of samples, the model's names and
    shapes, the settings."""
    fragments: tuple[FragmentShape, ...]
    progress: IslandProgress
    """That of the state that it has restored."""
    has_momentum: bool = field(default=False, metadata=OMIT_DEFAULT)
    """True if the state has outer parameters and momentum, which are in these files then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandAt:
    """Worker to agent: how far it is. All of its node's workers send the same, one after the other:
    files that it names are whole once all have."""

    progress: IslandProgress
    waits: bool
    """True if it makes no inner steps: it has no samples, or waits for a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentNews:
    """Says how the rounds of one fragment stand, as far as this node has their results."""

    round: int
    digest: str
    """Digest of the outer state after this round, whose files `outer_name` names."""
    called: bool
    """True if the island is to contribute what it has."""
    settled: int
    """Number of the island's last contribution that the state has, or that counts nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenSamples:
    """Gives the island samples: `[start, stop)` in the order of all epochs of its loop."""

    number: int
    start: int
    stop: int
    batch: int
    """Number of samples of an inner step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundNews:
    """Agent to worker: how the rounds stand. Later news replaces earlier."""

    version: int
    """Number of the news, from 1."""
    incarnation: str
    """The island's incarnation. Workers of another one begin with the outer states, and drop what
    they have made since."""
    fragments: tuple[FragmentNews, ...]
    claims: tuple[GivenSamples, ...]
    left: SamplesLeft
    """As of the last committed round."""
    none_left: bool
    """True if all other samples are given to other islands, or are committed."""
    done: bool
    """True if all samples are committed."""
    refused: str = field(default="", metadata=OMIT_DEFAULT)
    """Why the island can take no part; empty: it can."""


def own_name(fragment: int, part: str = "parameters") -> str:
    """Returns the name of the file with what a worker begins with.

    Args:
        fragment: Number of the fragment.
        part: The part of the outer state: its parameters or momentum.
    """
    return f"own-{fragment}.{part}"


def outer_name(fragment: int, round: int, digest: str, part: str = "parameters") -> str:
    """Returns the name of a file with a part of an outer state: its parameters or momentum.

    Args:
        fragment: Number of the fragment.
        round: The round after which it is the state.
        digest: The state's digest.
        part: The part.
    """
    return f"outer-{fragment}-{round}-{digest}.{part}"


def encoded_name(name: str) -> str:
    """Returns the name of the file with a contribution as other islands read it.

    Args:
        name: Name of the file that the workers write.
    """
    return f"{name}.wire"


def sent_name(fragment: int, incarnation: str, number: int) -> str:
    """Returns the name of the file with a contribution.

    Args:
        fragment: Number of the fragment.
        incarnation: The island's incarnation.
        number: Number of the contribution.
    """
    return f"sent-{fragment}-{incarnation}-{number}"
