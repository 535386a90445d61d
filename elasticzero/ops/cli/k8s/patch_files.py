"""Reads the files of `--patch`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from elasticzero.errors import UserError
from elasticzero.ops.kubernetes.patches.document import Patch
from elasticzero.ops.kubernetes.patches.document import Path as ValuePath


def read_patches(names: Iterable[str]) -> list[Patch]:
    """Returns the patches of files, in their order.

    Args:
        names: paths of the files.

    Raises:
        UserError: a file cannot be read, is no YAML or has no patch, or PyYAML is not installed.
    """
    return [patch for name in names for patch in _patches_of(name)]


def _patches_of(name: str) -> list[Patch]:
    try:
        import yaml
    except ImportError:
        raise UserError("--patch needs PyYAML: run pip install 'elasticzero[k8s]'") from None
    try:
        text = Path(name).read_text()
    except UnicodeDecodeError:
        raise UserError(f"--patch {name}: not text; YAML is expected") from None
    except OSError as error:
        raise UserError(f"--patch {name}: {error.strerror}") from None

    class Loader(yaml.SafeLoader):
        """Reads dates as texts, as Kubernetes does."""

    Loader.yaml_implicit_resolvers = {
        first: [entry for entry in entries if not entry[0].endswith(":timestamp")]
        for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    patches = []
    loader = Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            lines = dict(_lines(name, node, ()))
            value = loader.construct_document(node)
            if value is not None:
                patches.append(Patch(file=name, value=value, lines=lines))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{name}:{mark.line + 1}" if mark else name
        problem = getattr(error, "problem", None) or "a character that YAML does not have"
        raise UserError(f"{place}: not YAML: {problem}") from None
    except RecursionError:
        raise UserError(f"{name}: not YAML that ends: a value is in itself") from None
    finally:
        loader.dispose()
    if not patches:
        raise UserError(f"--patch {name}: the file has no patch")
    return patches


def _lines(name: str, node: Any, path: ValuePath) -> Iterator[tuple[ValuePath, int]]:
    """Yields the line of each value of a document.

    Args:
        name: the file's path.
        node: the value as YAML's composer returns it.
        path: keys and indices that lead to the value.

    Raises:
        UserError: a key is there twice.
    """
    yield path, node.start_mark.line + 1
    if node.id == "sequence":
        for index, entry in enumerate(node.value):
            yield from _lines(name, entry, (*path, index))
    elif node.id == "mapping":
        keys: set[str] = set()
        for key, value in node.value:
            if str(key.value) in keys:
                raise UserError(f"{name}:{key.start_mark.line + 1}: {key.value} is there twice")
            keys.add(str(key.value))
            # A value below its key has the key's line, where a reader looks first.
            below = list(_lines(name, value, (*path, str(key.value))))
            yield (*path, str(key.value)), key.start_mark.line + 1
            yield from below[1:]
