"""Replay a schedule, or run many: `python -m tests.simulation SEED [--nodes N] [--trace]`."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.running import Failure, first_failure, run_many, trace


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int, help="of the schedule, or of the first of many")
    parser.add_argument("--nodes", type=int, help="how many the job begins with (default: 3 to 7)")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--count", type=int, default=1, help="so many schedules")
    parser.add_argument("--processes", type=int, default=2, help="run them in so many processes")
    parser.add_argument("--first", action="store_true", help="no more after the first failure")
    parser.add_argument("--shown", type=int, default=3, help="failures to print in full")
    options = parser.parse_args()
    if options.count == 1:
        return trace(options.seed, options.nodes, aloud=options.trace)
    began_s = time.monotonic()
    seeds = range(options.seed, options.seed + options.count)
    if options.first:
        ran, failure = first_failure(seeds)
        print(f"{ran} schedules: {failure.brief if failure is not None else 'none broke a rule'}")
        return 1 if failure is not None else 0
    shown: list[Failure] = []

    def tell(failure: Failure) -> None:
        shown.append(failure)
        print(failure if len(shown) <= options.shown else failure.brief, flush=True)

    ran, failures = run_many(seeds, options.nodes, processes=options.processes, tell=tell)
    took_s = time.monotonic() - began_s
    print(f"{ran} schedules in {took_s:.1f} s; {len(failures)} broke a rule")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
