"""Defines what islands and their lead tell each other through the store.

Pure. An *island* is one or more nodes that train together, with a world of their own. All islands
share the samples of one loop, and a *round* averages what they have learnt: each island's
*contribution* is by how much its inner steps have changed the parameters; the mean of the
contributions is the gradient of one step of the outer optimizer (DiLoCo: Douillard et al., 2023).
Parameters are divided into *fragments*, each with rounds of its own (Streaming DiLoCo: Douillard et
al., 2025).

Samples have positions in the order of all epochs of the loop, which consists of *sections*. Those
of a dataset with a length are its epochs. An epoch of a stream has several, one for some of its
readers each, so that islands read different shards; how many samples a section of a stream has is
not known until it is read, so it has positions without a sample at its end.

Each island writes one report, under a lease; the first island that is alive is the *lead*, and
writes the one document of the rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from elasticzero.ipc.rounds import StreamMark
from elasticzero.launcher.protocol.documents import UNSTATED
from elasticzero.serialization import OMIT_DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Names samples by their positions `[start, stop)` in the order of all epochs of the loop."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """Says which samples the islands divide: the same on all of them."""

    section: int
    """Number of positions in a section."""
    is_stream: bool = field(default=False, metadata=OMIT_DEFAULT)
    """True: sections have fewer samples than positions, and nobody knows before how many."""
    total: int
    """Number of positions in the whole loop."""
    limit: int | None = field(default=None, metadata=OMIT_DEFAULT)
    """Most samples of the whole loop; None: as many as there are."""
    global_batch: int
    """Number of samples of an inner step of all islands together."""
    digest: str
    """Digest of all that the order of samples depends on, and of the model's shapes."""

    def section_stop(self, position: int) -> int:
        """Returns the position after the section that a position is in, or after the loop."""
        return min((position // self.section + 1) * self.section, self.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """Names a state of the outer optimizer for one fragment: its parameters and momentum."""

    round: int
    """Number of the round after which it is the state; 0: before the first."""
    digest: str
    """Digest of its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """Describes an island's contribution to the rounds of one fragment, which it has ready."""

    number: int
    """Number among the island's contributions to this fragment, from 1."""
    base: int
    """Round whose outer parameters it is the difference from."""
    samples: int
    """Number of samples of the inner steps that it sums up: its weight."""
    steps: int
    """Number of these inner steps."""
    claim: int = 0
    """Number of the newest claim of which it has samples."""
    upto: int = 0
    """Position after the last of its samples: it has all samples of earlier claims."""
    mark: StreamMark | None = field(default=None, metadata=OMIT_DEFAULT)
    """Where the readers of a stream go on at `upto`; None: it is of no stream."""
    digest: str
    """Digest of its bytes."""
    waits: bool = False
    """True once the island has made `grace` inner steps since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """Says that an island has the result of one attempt to close a round."""

    attempt: int
    mean: str
    """Digest of the contributions' mean."""
    outer: str
    """Digest of the state of the outer optimizer that follows from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributor:
    """Names a contribution that a round sums."""

    island: str
    incarnation: str
    number: int
    samples: int
    staleness: int
    """Number of rounds that were committed since the one that the contribution differs from."""
    claim: int
    upto: int
    mark: StreamMark | None = field(default=None, metadata=OMIT_DEFAULT)
    """As of the contribution, until the round is committed."""
    taken: tuple[Samples, ...] = ()
    """The samples that are committed with it; empty before that, and where it is of another
    fragment than the last."""

    @property
    def place(self) -> tuple[str, str]:
        """Returns the island and its incarnation."""
        return self.island, self.incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Records a committed round, or what there was before the first."""

    outer: Outer
    """State of the outer optimizer after it."""
    attempt: int = 0
    contributors: tuple[Contributor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """Names islands whose contribution could not be fetched."""

    attempt: int
    islands: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentReport:
    """Says what an island has of one fragment."""

    outer: Outer | None = None
    """Newest state of the outer optimizer that it holds; None: it has none."""
    contribution: Contribution | None = None
    """Contribution that it keeps ready; None: it has none."""
    sum: Sum | None = None
    """Result of the attempt that is under way; None: it has none."""
    unreachable: Unreachable | None = None
    """Names what it could not fetch as the owner of an attempt; None: it has fetched all."""

    def has(self, past: Committed) -> bool:
        """Returns whether the island has the state after a round, as its newest or as a result."""
        result = self.sum
        computed = result is not None and (result.attempt, result.outer) == (
            past.attempt,
            past.outer.digest,
        )
        return computed or self.outer == past.outer


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Says where an island's state comes from that no other island gave it."""

    next: int = 0
    """Position of the first sample that no island had been given."""
    free: tuple[Samples, ...] = ()
    """Earlier samples that are in no committed round."""
    samples: int = 0
    """Number of samples in committed rounds."""
    marks: tuple[StreamMark, ...] = field(default=(), metadata=OMIT_DEFAULT)
    """Where the readers of a stream can go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandReport:
    """Says what an island has and wants; a later report replaces an earlier one."""

    incarnation: str
    """Drawn anew whenever the island begins, or has lost its registration."""
    address: str
    """Address of the agent that serves what the island holds: HOST:PORT."""
    order: SampleOrder
    origin: Origin
    fragments: tuple[FragmentReport, ...]
    seat: int = 0
    """Number of the seat with which it has all of this; 0: none yet."""
    claim: int = 0
    """Number of the claim that it trains on; 0: it has begun none."""
    ahead: int = 0
    """Number of claims that it wants to have besides that one; 0: it is about to leave."""
    ends: tuple[int, ...] = field(default=(), metadata=OMIT_DEFAULT)
    """Positions after the last samples of sections, as it has found them to end."""
    is_over: bool = False
    """True if it has no samples, has contributed all its steps, and has taken the newest states."""
    run: int = field(default=UNSTATED, compare=False, metadata=OMIT_DEFAULT)
    """Number of the job's run: see `compare_runs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Gives samples to an island, to train on them in inner steps."""

    number: int
    """Number among the claims of the island, from 1."""
    samples: Samples
    """Samples of it that are in no committed round."""
    batch: int
    """Number of samples of an inner step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Says what has become of an island's contributions to one fragment."""

    number: int = 0
    """Number of the last one that is settled; 0: none is."""
    round: int | None = None
    """Round in which that one counts; None: it was dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Holds what the rounds know of one registration of an island."""

    island: str
    incarnation: str
    number: int
    """Number among all seats that there have been: an island whose seat was taken away has another
    one, and what it has done with the first counts no more."""
    claims: tuple[Claim, ...] = ()
    granted: int = 0
    """Number of claims that it was given in all."""
    after: int = field(default=0, metadata=OMIT_DEFAULT)
    """Position after its newest claim of a stream, where its readers go on."""
    settled: tuple[Settled, ...]
    """One for each fragment."""

    @property
    def place(self) -> tuple[str, str]:
        """Returns the island and its incarnation."""
        return self.island, self.incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """Says that a round takes no further contribution, and which it has."""

    attempt: int
    """Number among all attempts for this fragment, from 1."""
    owner: str
    """Island that fetches the contributions and computes their mean."""
    contributors: tuple[Contributor, ...]
    """In the order in which they are summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """Holds the rounds of one fragment."""

    called: bool = False
    """True once islands that have not contributed to the present round are asked to do so with
    what they have."""
    closing: Closing | None = None
    """Attempt to close the present round; None: it is open."""
    attempts: int = 0
    """Number of attempts so far."""
    left_out: tuple[str, ...] = ()
    """Islands whose contribution to the present round could not be fetched."""
    recent: tuple[Committed, ...]
    """Committed rounds, the newest last; without contributors where all islands that live hold a
    later state."""

    @property
    def outer(self) -> Outer:
        """Returns the state of the outer optimizer after the last committed round."""
        return self.recent[-1].outer

    def since_forgotten(self) -> tuple[Committed, ...]:
        """Returns the recent rounds from the last one on whose contributors are not there."""
        last = max(n for n, past in enumerate(self.recent) if n == 0 or not past.contributors)
        return self.recent[last:]

    def has(self, outer: Outer | None) -> bool:
        """Returns whether a state is that after one of the recent rounds."""
        return any(outer == past.outer for past in self.recent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Holds all that the islands of a job have agreed on."""

    history: int = 1
    """Grows by one each time that all islands were lost, and rounds with them."""
    order: SampleOrder
    fragments: tuple[Fragment, ...]
    seats: tuple[Seat, ...]
    """Registrations of islands, in the order in which they came. One that is gone stays as long as
    a closing round has a contribution of it."""
    numbered: int = 0
    """Number of seats that there have been."""
    next: int
    """Position from which on no samples were given to islands."""
    free: tuple[Samples, ...] = ()
    """Earlier samples: given back by islands that were lost or whose contribution was dropped, and
    what is left of a stream's sections that are begun."""
    samples: int = 0
    """Number of samples in committed rounds."""
    marks: tuple[StreamMark, ...] = field(default=(), metadata=OMIT_DEFAULT)
    """Where the readers of a stream can go on: for each piece of samples that are or may be given
    to an island the nearest mark before it, if there is one in its section."""
    done: bool = False
    """True once all samples are, and no island has a contribution left."""
    run: int = field(default=UNSTATED, compare=False, metadata=OMIT_DEFAULT)
    """Number of the job's run: see `compare_runs`."""

    def seat(self, island: str, incarnation: str) -> Seat | None:
        """Returns the seat of an island's registration; None: it has none."""
        place = island, incarnation
        return next((seat for seat in self.seats if seat.place == place), None)

    def uncommitted(self) -> Iterator[Samples]:
        """Yields the samples that islands have been given, and those given back; the rest begins
        at `next`."""
        yield from self.free
        for seat in self.seats:
            for claim in seat.claims:
                yield claim.samples
