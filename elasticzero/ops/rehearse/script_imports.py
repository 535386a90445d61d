"""Says whether a script imports this package, by its text: nothing of it is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "elasticzero"


def imports_elasticzero(script: Path) -> bool:
    """Tells whether a script, or a module beside it that it imports, imports this package.

    A file that cannot be read, or is no Python, is taken to.
    """
    seen, left = set[Path](), [script]
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_text())
        except (OSError, ValueError, SyntaxError):
            return True
        for name in _imported(tree):
            top = name.partition(".")[0]
            if top == PACKAGE:
                return True
            left += _beside(script.parent, top)
    return False


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from [node.module] if node.module else (alias.name for alias in node.names)


def _beside(directory: Path, name: str) -> list[Path]:
    """Returns the files of a module or package in the script's directory; none: it is elsewhere."""
    module, package = directory / f"{name}.py", directory / name
    if module.is_file():
        return [module]
    return sorted(package.rglob("*.py")) if (package / "__init__.py").is_file() else []
