"""The parser of a command: what argparse does, with this project's errors and late defaults."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from elasticzero.errors import ExitCode


class Parser(argparse.ArgumentParser):
    """Errors in one line with the exit code of bad input.

    Defaults that may be wrong themselves, such as those from the environment, are looked at once
    all words are understood: not for `--help`, and not where a flag goes before. What is parsed has
    as its `prog` the innermost command that was named.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.complete: Callable[[argparse.Namespace], None] | None = None
        """Sets what no word has set; raises `UserError`."""
        self.prepare: Callable[[Sequence[str]], list[str]] = list
        """Spells out what may be abbreviated among this command's words; raises `UserError`."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}\nsee: {self.prog} --help", file=sys.stderr)
        raise SystemExit(ExitCode.USAGE)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = None if args is None else self.prepare(args)
        found, unknown = super().parse_known_args(words, namespace)
        if not hasattr(found, "prog"):
            found.prog = self.prog
        if self.complete is not None:
            self.complete(found)
        return found, unknown
