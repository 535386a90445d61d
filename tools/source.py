"""Reads classes, functions and docstrings from source files, without importing them."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("elasticzero", "launcher", "checkpoint")
_RULE = re.compile(r"^ ?([A-Z]{1,2})(\d+  |\d\d ) *(\S.*(?:\n {4,}\S.*)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Documented:
    """A name with its type or default, as the source spells them, and its docstring."""

    name: str
    type: str
    text: str
    default: str = ""


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method."""

    name: str
    signature: str
    text: str
    """Its docstring without the sections `Args`, `Returns` and `Raises`."""
    parameters: tuple[str, ...]
    is_property: bool
    arguments: tuple[tuple[str, str], ...] = ()
    returns: str = ""
    raises: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """A numbered rule in the docstring of a module: its first sentence."""

    letter: str
    number: int
    text: str


def module(path: str) -> ast.Module:
    """path: below the repository's root."""
    return ast.parse((ROOT / path).read_text())


def files() -> list[str]:
    """Every source file of the package, below the root; `elasticzero` has links to the others."""
    paths = [
        path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    ]
    linked = [Path("elasticzero") / name for name in PACKAGES[1:]]
    return sorted(str(p) for p in paths if not any(p.is_relative_to(link) for link in linked))


def class_named(name: str, folder: str) -> ast.ClassDef:
    """The class of this name in a file of the folder, or in the file that `folder` names."""
    for path in files():
        if path == folder or path.startswith(f"{folder}/"):
            for node in module(path).body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return node
    raise LookupError(f"no class {name} in {folder}")


def plain(text: str | None) -> str:
    """A docstring as paragraphs of one line each."""
    paragraphs = re.split(r"\n\s*\n", text or "")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs).strip()


def sections(text: str) -> dict[str, str]:
    """Divides a docstring into its sections (`Args`, `Returns`, `Raises`), with what comes before
    them under ``."""
    heads = re.split(r"^(Args|Returns|Raises):\n", text, flags=re.MULTILINE)
    return {"": heads[0], **dict(zip(heads[1::2], heads[2::2], strict=True))}


def entries(section: str) -> tuple[tuple[str, str], ...]:
    """Divides a section into its entries `name: what it is`; further lines are indented more."""
    named = re.findall(r"^    (\w+): (.*(?:\n(?: {5,}.*)?)*)", section, re.MULTILINE)
    return tuple((name, plain(text)) for name, text in named)


def fields(node: ast.ClassDef) -> list[Documented]:
    """The public fields, or members, that a class body gives; a string after one describes it."""
    documented: list[Documented] = []
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=value):
                default = "" if value is None else ast.unparse(value)
                documented.append(Documented(name, ast.unparse(kind), "", default))
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                documented.append(Documented(name, ast.unparse(value), ""))
            case ast.Expr(value=ast.Constant(value=str(text))) if documented:
                documented[-1] = replace(documented[-1], text=plain(text))
            case _:
                continue
    return [item for item in documented if not item.name.startswith("_")]


def functions(body: list[ast.stmt]) -> Iterator[Function]:
    """The public functions, in the order of the file."""
    for node in body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            text = sections(ast.get_docstring(node) or "")
            yield Function(
                name=node.name,
                signature=_signature(node, manages="contextmanager" in decorators),
                text=plain(text[""]),
                parameters=tuple(a.arg for a in (*node.args.args, *node.args.kwonlyargs)),
                is_property="property" in decorators,
                arguments=entries(text.get("Args", "")),
                returns=plain(text.get("Returns")),
                raises=entries(text.get("Raises", "")),
            )


def constructor(node: ast.ClassDef) -> Function:
    """Returns the class's `__init__` under its name, with the class's text first."""
    [made] = [s for s in node.body if isinstance(s, ast.FunctionDef) and s.name == "__init__"]
    renamed = copy.copy(made)
    renamed.name, renamed.returns = node.name, ast.Name(node.name)
    [function] = functions([renamed])
    return replace(function, text=f"{plain(ast.get_docstring(node))}\n\n{function.text}")


def _signature(node: ast.FunctionDef, *, manages: bool) -> str:
    """As a caller writes it: without `self`, and without what catches misspelt arguments."""
    parameters = node.args
    parameters.args = [
        argument for argument in parameters.args if argument.arg not in ("self", "cls")
    ]
    if parameters.kwarg is not None and parameters.kwarg.annotation is not None:
        parameters.kwarg = (
            None if ast.unparse(parameters.kwarg.annotation) == "Never" else parameters.kwarg
        )
    returns = ast.unparse(node.returns) if node.returns is not None else "None"
    if manages:
        returns = "ContextManager[None]"
    parts = [_part(part) for part in _parts(ast.unparse(parameters)) if part]
    line = f"{node.name}({', '.join(parts)}) -> {returns}"
    if len(line) <= 88:
        return line
    return f"{node.name}(\n" + "".join(f"    {part},\n" for part in parts) + f") -> {returns}"


def _parts(arguments: str) -> list[str]:
    """Splits the text of a list of arguments at the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(arguments):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(arguments[start:at].strip())
            start = at + 1
    return [*parts, arguments[start:].strip()]


def _part(argument: str) -> str:
    """An argument with spaces around `=`, and its default's value in place of its name."""
    name, equals, default = argument.partition("=")
    return f"{name} = {constants().get(default, default)}" if equals else argument


@cache
def constants() -> dict[str, str]:
    """The numbers among the constants of the modules."""
    return {
        name: ast.unparse(value)
        for path in files()
        for node in module(path).body
        if isinstance(node, ast.Assign) and isinstance(value := node.value, ast.Constant)
        for name in [ast.unparse(target) for target in node.targets]
    }


def rules(path: str) -> list[Rule]:
    """The numbered rules in a module's docstring, such as `A1  …`."""
    text = ast.get_docstring(module(path)) or ""
    return [
        Rule(letter, int(number), re.split(r"(?<=\.) (?=[A-Z`])", " ".join(rule.split()))[0])
        for letter, number, rule in _RULE.findall(text)
    ]


def summary(path: str) -> str:
    """The first sentence of a module's docstring."""
    return plain(ast.get_docstring(module(path))).split("\n\n")[0]
