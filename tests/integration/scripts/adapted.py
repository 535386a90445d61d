"""What the scripts of frameworks have in common: their arguments, and the trace of their steps."""

from __future__ import annotations

import argparse
import json

import elasticzero as ez
from tests.integration.scripts import regression


def parser() -> argparse.ArgumentParser:
    argument_parser = argparse.ArgumentParser()
    argument_parser.add_argument("output")
    argument_parser.add_argument("--pause", type=float, default=0.0)
    argument_parser.add_argument("--epochs", type=int, default=3)
    argument_parser.add_argument("--global-batch", type=int)
    return argument_parser


def trace(session: ez.Session, pause_s: float) -> None:
    """Writes down the samples of the step that begins, and slows it.

    All ranks do, since lines of a node that is killed may be lost.
    """
    place = {"generation": session.generation, "step": session.step_count + 1}
    told = {"trace": {**place, "samples": session.batch_indices}}
    # In one write, of which a kill leaves all or nothing.
    print(json.dumps(told) + "\n", end="", flush=True)
    regression.pause(pause_s)
