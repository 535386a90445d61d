"""Replay a schedule, or run many: `python -m tests.simulation.islands SEED [--count N]`."""

from __future__ import annotations

import argparse
import sys

from tests.simulation.islands.play import Play


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.islands", description=__doc__)
    parser.add_argument("seed", type=int, help="of the schedule, or of the first of many")
    parser.add_argument("--count", type=int, default=1, help="so many schedules")
    parser.add_argument("--first", action="store_true", help="no more after the first failure")
    options = parser.parse_args()
    failed = ran = 0
    for seed in range(options.seed, options.seed + options.count):
        ran += 1
        try:
            Play(seed, print if options.count == 1 else lambda line: None).run()
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to a seed
            failed += 1
            last = f"seed {seed} breaks {type(error).__name__}: {error}"
            if options.first:
                print(f"{ran} schedules: {last}")
                return 1
            print(last)
    print(f"{ran} schedules: {f'{failed} broke a rule' if failed else 'none broke a rule'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
