"""The seeds that tests play, and what they say of a draw that fails."""

from __future__ import annotations

from pathlib import Path

from tests.integration.generator.draws import Draw, draw
from tests.integration.generator.play import Verdict, play
from tests.integration.generator.shrink import shrink
from tests.integration.training_harness import Pool

QUICK, SLOW = range(40), range(40, 1040)
"""Seeds for `make test` and for `make slow`."""
LEAST_EXACT = 0.2
"""Share of draws that must train to the end: a grammar of which all is refused proves nothing."""


def parts(seeds: range, size: int) -> list[range]:
    """Returns the seeds of each test."""
    return [seeds[first : first + size] for first in range(0, len(seeds), size)]


def check(pool: Pool, seeds: range, folder: Path) -> None:
    """Plays the draws of seeds; each is exact or refused."""
    verdicts: dict[int, Verdict] = {}
    for seed in seeds:
        verdicts[seed] = play(pool, draw(seed), folder / str(seed))
    failed = {seed: verdict for seed, verdict in verdicts.items() if not verdict.is_right}
    for seed, verdict in failed.items():
        raise AssertionError(describe(pool, draw(seed), verdict, folder, len(failed)))
    exact = [verdict for verdict in verdicts.values() if verdict.kind == "exact"]
    assert len(exact) >= LEAST_EXACT * len(seeds), [str(v.text)[:99] for v in verdicts.values()]


def describe(pool: Pool, failing: Draw, verdict: Verdict, folder: Path, failures: int) -> str:
    """Says what came of a draw that fails, and of the smallest one that fails alike.

    Args:
        pool: What plays draws.
        failing: The draw.
        verdict: What came of it.
        folder: Where scripts are written.
        failures: Number of draws that fail beside it.
    """
    plays: list[Verdict] = []

    def fails(candidate: Draw) -> bool:
        again = play(pool, candidate, folder / f"smaller-{len(plays)}")
        plays.append(again)
        return again.kind == verdict.kind

    smallest = shrink(failing, fails)
    script = next((p.script for p in reversed(plays) if p.kind == verdict.kind), verdict.script)
    return (
        f"{failures} of the draws failed; the first is {verdict.kind}: {verdict.text}\n{failing}\n"
        f"its script: {verdict.script}\n"
        f"The smallest that fails alike: {smallest}\n"
        f"its script, {script}:\n{script.read_text()}"
    )
