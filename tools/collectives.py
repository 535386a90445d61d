"""Finds calls that leave torch's process group out, and so mean its default group.

A call of torch's default group is of the group that happens to be the default one: beside a second
world, of the wrong ranks. What torch's functions are is read from the source of torch, which takes
a tenth of a second; to import it takes some.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

GROUP = "group"
MODULES = ("torch.distributed", "torch.distributed.distributed_c10d", "elasticzero.comm.gloo")
"""The modules that have these functions, or another name of one."""
NAMESPACES = ("distributed", "distributed_c10d")
DEFAULT_OWNERS = ("group", "GroupMember")


@cache
def functions_of_groups() -> Mapping[str, int]:
    """Returns torch's functions that take a process group, each with the place of that parameter;
    -1: it is given by name alone."""
    spec = find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None
    [folder] = spec.submodule_search_locations
    source = Path(folder, "distributed", "distributed_c10d.py").read_text()
    return {
        node.name: place
        for node in ast.parse(source).body
        for function in _functions(node)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and (place := _place(function)) is not None
    }


def _functions(node: ast.AST) -> list[ast.FunctionDef]:
    """Returns what is called where a function, or a class, is called."""
    if isinstance(node, ast.FunctionDef):
        return [node]
    if not isinstance(node, ast.ClassDef):
        return []
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    return [method for method in methods if method.name in ("__init__", "__new__")]


def _place(function: ast.FunctionDef) -> int | None:
    positional = [*function.args.posonlyargs, *function.args.args]
    names = [a.arg for a in positional if a.arg not in ("self", "cls")]
    if GROUP in names:
        return names.index(GROUP)
    return -1 if GROUP in (a.arg for a in function.args.kwonlyargs) else None


@dataclass(slots=True)
class Source:
    """What the names of a module's text stand for."""

    modules: set[str] = field(default_factory=set)
    functions: dict[str, str] = field(default_factory=dict)
    """torch's name of each function that has a name of its own here."""

    @classmethod
    def of(cls, tree: ast.AST) -> Source:
        source = cls()
        for node in ast.walk(tree):
            match node:
                case ast.Import(names=names):
                    source.modules |= {n.asname for n in names if n.asname and n.name in MODULES}
                case ast.ImportFrom(module=str(module), names=names):
                    for name in names:
                        source._import(module, name)
                case ast.Assign(targets=[ast.Name(id=alias)], value=value):
                    source._assign(alias, value)
                case ast.AnnAssign(target=ast.Name(id=alias), value=ast.expr() as value):
                    source._assign(alias, value)
        return source

    def _import(self, module: str, name: ast.alias) -> None:
        bound = name.asname or name.name
        if f"{module}.{name.name}" in MODULES:
            self.modules.add(bound)
        elif module in MODULES and name.name in functions_of_groups():
            self.functions[bound] = name.name

    def _assign(self, alias: str, value: ast.expr) -> None:
        """Notes another name of a function; what a call of one returns is none."""
        called = {id(node.func) for node in ast.walk(value) if isinstance(node, ast.Call)}
        for node in ast.walk(value):
            if id(node) not in called and (name := self.function(node)) is not None:
                self.functions[alias] = name

    def function(self, node: ast.AST) -> str | None:
        """Returns torch's name of the function that an expression stands for; None: it is none."""
        match node:
            case ast.Name(id=name):
                return self.functions.get(name)
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in self.modules:
                return name if name in functions_of_groups() else None
            case ast.Attribute(value=ast.Attribute(attr=module), attr=name):
                return name if module in NAMESPACES and name in functions_of_groups() else None
        return None


def calls_of_groups(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yields the line and torch's name of each call of a function that takes a process group, and
    whether it names one."""
    tree = ast.parse(text)
    source = Source.of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := source.function(node.func)) is not None:
            yield node.lineno, name, _names_group(node, functions_of_groups()[name])


def _names_group(call: ast.Call, place: int) -> bool:
    values = [keyword.value for keyword in call.keywords if keyword.arg == GROUP]
    if not values and 0 <= place < len(call.args):
        values = [call.args[place]]
    return bool(values) and not (isinstance(values[0], ast.Constant) and values[0].value is None)


def uses_of_default_group(text: str) -> Iterator[int]:
    """Yields each line that has torch's default group by its name."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(attr="WORLD", value=ast.Attribute(attr=owner) | ast.Name(id=owner)):
                if owner in DEFAULT_OWNERS:
                    yield node.lineno
