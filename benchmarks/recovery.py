"""How fast training goes on after a blow, and what ElasticZero costs while there is none.

    python benchmarks/recovery.py [--rounds 10] [--strategies ddp,zero2] [--peer 1] [--record]

Two nodes of one worker each on this machine, at times three; each round is one job that suffers
every case in turn. The peer is torchrun with its defaults.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from recovery_costs import at_rest, overhead
from recovery_peer import torchrun
from recovery_report import CASES, NO_STANDBY, Report, Row
from recovery_trial import BEGIN_S, GIVE_UP_S, NotDone, Struck, round_of, slow_round

from elasticzero.launcher.store.etcd.server import EtcdServer

PEER_CASES = ("worker", "node")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def struck(
    options: argparse.Namespace, endpoint: str, runs: Path
) -> tuple[list[Row], dict[str, int]]:
    """Every case, strategies by turns in each round, then the peer; and in how many rounds of a
    case the peer made no step."""
    blows: dict[tuple[str, str], list[Struck]] = defaultdict(list)
    hung: Counter[str] = Counter()
    strategies = options.strategies.split(",")
    for number in range(options.rounds):
        for strategy in strategies:
            for case, one in round_of(strategy, endpoint, runs, options.lease_ttl):
                blows[case, strategy].append(one)
                say(f"round {number + 1}: {strategy}, {case}: {one.seconds:.3f} s")
    for number in range(options.slow):
        for strategy in strategies:
            for standby, label in (("auto", strategy), ("off", strategy + NO_STANDBY)):
                for case, one in slow_round(strategy, standby, endpoint, runs, options.lease_ttl):
                    blows[case, label].append(one)
                    say(f"slow round {number + 1}: {label}, {case}: {one.seconds:.3f} s")
    peers = [(case, case, 0.0, options.peer) for case in PEER_CASES]
    peers += [("slow worker", "worker", BEGIN_S, min(options.slow, options.peer))]
    for case, blow, begin_s, rounds in peers:
        for number in range(rounds):
            try:
                seconds = torchrun(blow, runs, options.peer_timeout, begin_s=begin_s)
            except NotDone as error:  # its figures are missing; ours stay
                hung[case] += 1
                say(f"torchrun {number + 1}: {case}: {error}; going on without it")
                continue
            blows[case, "torchrun"].append(Struck(seconds=seconds, recomputed=0))
            say(f"torchrun {number + 1}: {case}: {seconds:.3f} s")
    rows = [
        Row(case=case, launcher=launcher, found=tuple(blows[case, launcher]))
        for case in CASES
        for launcher in [*strategies, *(name + NO_STANDBY for name in strategies), "torchrun"]
        if blows.get((case, launcher))
    ]
    return rows, dict(hung)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10, help="times of each case (0: none)")
    parser.add_argument(
        "--strategies",
        default="ddp,zero1,zero2,zero3",
        help="by commas; NAME+keep is with --keep-workers, NAME+tls with a token and TLS",
    )
    parser.add_argument(
        "--slow", type=int, default=3, help="times of each case of a script that begins slowly"
    )
    parser.add_argument("--peer", type=int, default=1, metavar="ROUNDS", help="of torchrun")
    parser.add_argument(
        "--peer-timeout",
        type=float,
        default=GIVE_UP_S,
        metavar="S",
        help="for torchrun to train, and to go on after a blow; then its round is left out",
    )
    parser.add_argument("--lease-ttl", type=int, default=5, metavar="S", help="of the nodes")
    parser.add_argument("--rest", type=float, default=30.0, metavar="S", help="of training at rest")
    parser.add_argument(
        "--pairs", type=int, default=40, help="of blocks of steps, for the overhead"
    )
    parser.add_argument(
        "--record", action="store_true", help="write a result and its page in benchmarks/results"
    )
    options = parser.parse_args()
    runs = Path(tempfile.mkdtemp(prefix="elasticzero-recovery-"))
    say(f"logs in {runs}, which stay if this fails")
    with EtcdServer() as etcd:
        endpoint = etcd.endpoint
        rows, hung = struck(options, endpoint, runs)
        report = Report(
            command=shlex.join(["python", "benchmarks/recovery.py", *sys.argv[1:]]),
            rounds=options.rounds,
            lease_ttl_s=options.lease_ttl,
            rows=rows,
            peer_hung=hung,
            rest=at_rest(endpoint, runs, options.rest) if options.rest else [],
            overheads=[
                overhead(strategy, endpoint, runs, options.pairs)
                for strategy in (options.strategies.split(",") if options.pairs else [])
                if "+" not in strategy
            ],
        )
    shutil.rmtree(runs)
    print(report)
    if options.record:
        report.record()


if __name__ == "__main__":
    main()
