"""Decides when an island contributes to a round, and keeps what it has contributed. Pure.

An island that has contributed goes on with inner steps, and contributes again `every` inner steps
after that, or when it is called to. While a contribution to a fragment is not settled it sends no
other one for this fragment: its next one then has all steps since. Rules:
 CT1  An island contributes to fragment f of F for the first time after every · (f + 1) // F inner
      steps, and then every `every` steps (arXiv 2501.18512), or when it is called to, or when it
      has no further samples.
 CT2  The first inner step after a contribution counts for the next one.
 CT3  A contribution is the difference between the outer parameters that the island last took and
      its parameters. It is sent only where no other one waits: so these parameters are what the
      next one differs from, whatever rounds come in between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Describes a contribution that is not settled."""

    number: int
    base: int
    """Round whose outer parameters it differs from."""
    samples: int
    steps: int
    claim: int
    upto: int
    since: int = 0
    """Number of inner steps that the island has made since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentProgress:
    """Says how far an island is with one fragment."""

    base: int = 0
    """Round whose outer parameters the island last took."""
    sent: Sent | None = None
    """Contribution that is not settled; None: there is none."""
    number: int = 0
    """Number of contributions so far."""
    steps: int = 0
    """Inner steps since the last contribution."""
    samples: int = 0
    """Samples of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Says how often an island contributes."""

    every: int
    """Number of inner steps between two contributions to one fragment."""
    fragments: int = 1
    grace: int = 2
    """Number of inner steps after which an island waits for others no longer."""

    def due_after(self, fragment: int, number: int) -> int:
        """Returns after how many inner steps the next contribution is due (CT1).

        Args:
            fragment: Number of the fragment.
            number: Number of contributions to it so far.
        """
        return self.every if number else max(1, self.every * (fragment + 1) // self.fragments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Says how far an island is: in its samples, and with each fragment."""

    fragments: tuple[FragmentProgress, ...]
    claim: int = 0
    """Number of the claim that it trains on; 0: it has had none."""
    upto: int = 0
    """Position after the last sample that it has used of that."""

    def after_step(self, claim: int, upto: int, samples: int) -> Progress:
        """Returns the progress after an inner step.

        Args:
            claim: Number of the claim that its samples are of.
            upto: Position after them.
            samples: Number of them.
        """
        fragments = tuple(
            replace(
                part,
                steps=part.steps + 1,
                samples=part.samples + samples,
                sent=None if part.sent is None else replace(part.sent, since=part.sent.since + 1),
            )
            for part in self.fragments
        )
        return replace(self, fragments=fragments, claim=claim, upto=upto)

    def is_due(self, schedule: Schedule, fragment: int, *, called: bool, last: bool) -> bool:
        """Returns whether the island contributes to a fragment now.

        Args:
            schedule: Says how often.
            fragment: Number of the fragment.
            called: Whether the lead asks for what there is.
            last: Whether the island has no further samples.
        """
        part = self.fragments[fragment]
        if part.sent is not None or not part.steps:
            return False
        return called or last or part.steps >= schedule.due_after(fragment, part.number)

    def contributed(self, fragment: int) -> Progress:
        """Returns the progress once the island has a contribution to a fragment ready."""
        part = self.fragments[fragment]
        sent = Sent(
            number=part.number + 1,
            base=part.base,
            samples=part.samples,
            steps=part.steps,
            claim=self.claim,
            upto=self.upto,
        )
        return self._with(
            fragment, replace(part, sent=sent, number=sent.number, steps=0, samples=0)
        )

    def took(self, fragment: int, base: int, settled: int) -> Progress:
        """Returns the progress once the island has taken the outer parameters of a round.

        Args:
            fragment: Number of the fragment.
            base: The round.
            settled: Number of the island's last contribution that was settled by then.
        """
        part = self.fragments[fragment]
        sent = part.sent if part.sent is not None and part.sent.number > settled else None
        return self._with(fragment, replace(part, base=base, sent=sent))

    def _with(self, fragment: int, part: FragmentProgress) -> Progress:
        fragments = (*self.fragments[:fragment], part, *self.fragments[fragment + 1 :])
        return replace(self, fragments=fragments)
