"""Calls `elasticzero.run` and raises before it has a model."""

import elasticzero as ez


def train(session: ez.Session) -> None:
    raise RuntimeError("this script is not of this job")


ez.run(train)
