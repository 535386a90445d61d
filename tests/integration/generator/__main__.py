"""Plays draws by hand: `python -m tests.integration.generator FIRST LAST [STRATEGY]`.

It prints a line for each draw, and at the end how many came out how. The scripts of those that fail
stay in a directory, which it names.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.integration.generator.draws import draw
from tests.integration.generator.play import play
from tests.integration.training_harness import Pool


def main(arguments: list[str]) -> int:
    first, last = int(arguments[0]), int(arguments[1])
    strategy = arguments[2] if len(arguments) > 2 else None
    folder = Path(tempfile.mkdtemp(prefix="drawn-scripts-"))
    outcomes: Counter[str] = Counter()
    seconds = 0.0
    (folder / "pool").mkdir()
    with Pool(folder / "pool") as pool:
        for seed in range(first, last):
            drawn = draw(seed, strategy)
            verdict = play(pool, drawn, folder / str(seed))
            outcomes[verdict.kind] += 1
            seconds += verdict.seconds
            line = verdict.text.splitlines()[0] if verdict.text else ""
            outcome = verdict.kind.upper()
            print(f"{outcome:8} {verdict.seconds:4.1f} s  {drawn} | {line[:300]}", flush=True)
            if not verdict.is_right:
                print(f"         {verdict.script}\n{verdict.text[-4000:]}", flush=True)
    print(dict(outcomes), f"{seconds / max(1, last - first):.2f} s a draw, in {folder}")
    return 0 if not set(outcomes) & {"wrong", "failed", "hung", "invalid"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
