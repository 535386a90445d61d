"""Writes the pages of docs/reference from the code, and the pictures of states and the differences
of ported examples in other pages: `python -m tools.reference [--check]`.

With --check nothing is written: the exit code is 1 if a page differs from what the code says.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise

from elasticzero.launcher.observability.descriptions import MetricDescription
from elasticzero.launcher.observability.events import EVENTS
from elasticzero.launcher.observability.job_metrics import JOB_METRICS
from elasticzero.launcher.observability.metrics import Metrics
from tools import prose, source
from tools.configuration import configuration
from tools.markdown import code, first_sentence, marked, sentence, table
from tools.port_diffs import with_differences
from tools.source import ROOT
from tools.state_pictures import with_pictures

FOLDER = ROOT / "docs" / "reference"


# session.md


def session() -> str:
    session_class = source.class_named("Session", "elasticzero/session.py")
    functions = list(source.functions(session_class.body))
    methods = [function for function in functions if not function.is_property]
    order = {name: place for place, name in enumerate(prose.SESSION_ORDER)}
    methods.sort(key=lambda function: order.get(function.name, len(order)))
    entries = source.functions(source.module("elasticzero/entry_point.py").body)
    run = next(function for function in entries if function.name == "run")
    properties = [
        (
            code(function.name),
            code(function.signature.rpartition("-> ")[2]),
            sentence(" ".join(function.text.split()).removeprefix("Returns ")),
        )
        for function in functions
        if function.is_property
    ]
    parts = [prose.SESSION, _function(run, "elasticzero", "##"), "## Session\n\n" + prose.METHODS]
    parts += [_function(function, "session") for function in methods]
    parts.append("## Properties")
    parts.append(table(("Property", "Type", "Meaning"), [*properties, *prose.SESSION_ATTRIBUTES]))
    parts.append("## Stream\n\n" + prose.STREAM)
    stream = source.class_named("Stream", "elasticzero/data/streams/source.py")
    parts.append(_function(source.constructor(stream), "elasticzero"))
    parts += [
        _function(function, "elasticzero.Stream") for function in source.functions(stream.body)
    ]
    parts.append("## Checkpoints by hand\n\n" + prose.BY_HAND)
    by_hand = source.functions(source.module("checkpoint/api.py").body)
    parts += [_function(function, "checkpoint") for function in by_hand]
    parts.append("## Errors\n\n" + prose.ERRORS)
    return "\n\n".join(parts)


def _function(function: source.Function, owner: str, level: str = "###") -> str:
    text, described = _split(function)
    signature = f"```python\n{owner}.{function.signature}\n```"
    parts = [f"{level} {owner}.{function.name}", signature, text, _rows(described)]
    if function.returns:
        parts.append(f"Returns: {marked(function.returns)}")
    if function.raises:
        parts += ["Raises:", _rows(_sentences(function.raises))]
    return "\n\n".join(part for part in parts if part)


def _rows(described: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- `{name}`: {about}" for name, about in described)


def _sentences(entries: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, sentence(marked(text))) for name, text in entries]


def _split(function: source.Function) -> tuple[str, list[tuple[str, str]]]:
    """The prose of a docstring, and what it says of each parameter: in the section `Args`, or in
    sentences `parameter: what it is.` where it has no such section."""
    if function.arguments:
        return marked(function.text), _sentences(function.arguments)
    names = "|".join(function.parameters) or "$"
    about = re.compile(rf"(?:^|(?<=\. ))`?({names})`?: (.+?\.)(?= [A-Z`a-z]|$) ?", re.MULTILINE)
    described = [(name, sentence(marked(text))) for name, text in about.findall(function.text)]
    return marked(about.sub("", function.text)).strip(), described


# metrics.md, events.md, exit-codes.md


def metrics() -> str:
    parts = [prose.METRICS, _metrics_table(Metrics().descriptions)]
    return "\n\n".join([*parts, prose.JOB_METRICS, _metrics_table(JOB_METRICS)])


def _metrics_table(descriptions: Iterable[MetricDescription]) -> str:
    rows = [
        (code(d.name), d.kind, ", ".join(code(label) for label in d.labels), sentence(d.meaning))
        for d in descriptions
    ]
    return table(("Metric", "Type", "Labels", "Meaning"), rows)


def events() -> str:
    parts = [prose.EVENTS]
    for name, event in EVENTS.items():
        rows = [(code(field), sentence(text)) for field, text in event.fields.items()]
        if event.open_fields:
            rows.append(("…", sentence(event.open_fields)))
        parts += [f"## {name}\n\n{event.when}", table(("Field", "Meaning"), rows)]
    return "\n\n".join(parts)


def exit_codes() -> str:
    tree = {
        n.name: n
        for n in source.module("elasticzero/errors.py").body
        if isinstance(n, ast.ClassDef)
    }
    codes = source.fields(tree["ExitCode"])
    rows = [(code(item.type), item.name, item.text) for item in codes]
    errors = [
        (code(name), _code_of(name, tree), source.plain(ast.get_docstring(node)))
        for name, node in tree.items()
        if name != "ExitCode"
    ]
    return "\n\n".join(
        [
            prose.EXIT_CODES,
            table(("Code", "Name", "Meaning"), rows),
            prose.ERROR_CLASSES,
            table(("Error", "Exit code", "Meaning"), errors),
        ]
    )


def _code_of(name: str, tree: dict[str, ast.ClassDef]) -> str:
    """The exit code that an error class has, or inherits."""
    for item in source.fields(tree[name]):
        if item.name == "exit_code":
            return item.type.rpartition(".")[2]
    return _code_of(ast.unparse(tree[name].bases[0]), tree)


# checkpoint-format.md, rules.md


def checkpoint_format() -> str:
    parts = [prose.FORMAT]
    for name, title in prose.FORMAT_CLASSES.items():
        node = source.class_named(name, "checkpoint/format")
        about = {field.name: sentence(field.text) for field in source.fields(node)}
        about |= prose.FORMAT_FIELDS[name]
        rows = [
            (code(field.name), _json_type(field.type), about[field.name])
            for field in source.fields(node)
        ]
        parts += [title, table(("Key", "Type", "Meaning"), rows)]
    [rule] = [text for name, text in _strings("elasticzero/spans.py") if name == "Rule"]
    meanings = re.findall(r"(\w+): (.+?\.)(?= \w+: |$)", rule)
    parts += ["## Rules of a group", prose.GROUP_RULES]
    parts.append(table(("Rule", "Meaning"), [(code(n), sentence(text)) for n, text in meanings]))
    parts.append(prose.AFTER_FORMAT)
    return "\n\n".join(parts)


def _json_type(text: str) -> str:
    """A type of Python as one of JSON."""
    plain = {"int": "integer", "str": "string", "Rule": "string", "str | None": "string or null"}
    if items := re.fullmatch(r"tuple\[(.+), \.\.\.\]", text):
        return f"array of {prose.PLURALS[items[1]]}"
    return plain.get(text, "object")


def _strings(path: str) -> list[tuple[str, str]]:
    """The constants of a module that a string describes, and that string."""
    body = source.module(path).body
    constants = []
    for before, after in pairwise(body):
        match before, after:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(
                value=ast.Constant(value=str(text))
            ):
                constants.append((name, source.plain(text)))
            case _:
                continue
    return constants


def rules() -> str:
    rules_of = {path: source.rules(path) for path in source.files()}
    letters: dict[str, list[str]] = defaultdict(list)
    for path, listed in rules_of.items():
        for letter in sorted({rule.letter for rule in listed}):
            letters[letter].append(path)
    order = [(letter, path) for letter in sorted(letters) for path in letters[letter]]
    index = [(letter, code(path), source.summary(path)) for letter, path in order]
    parts = [prose.RULES, table(("Letter", "Module", "What the module is about"), index)]
    for letter, path in order:
        rows = [
            (f"{rule.letter}{rule.number}", marked(sentence(rule.text)))
            for rule in rules_of[path]
            if rule.letter == letter
        ]
        parts += [f"## {letter}: {path}", table(("Rule", "What it says first"), rows)]
    return "\n\n".join(parts)


# files.md


def files() -> str:
    """Lists every source file below its package, each with the first sentence of its docstring."""
    modules: dict[str, list[str]] = defaultdict(list)
    for path in source.files():
        package, _, name = path.rpartition("/")
        if name not in ("__init__.py", "__main__.py"):
            modules[package].append(path)
    parts = [prose.FILES]
    for package, paths in sorted(modules.items()):
        rows = [
            (code(path.rpartition("/")[2]), marked(first_sentence(source.summary(path))))
            for path in paths
        ]
        about = first_sentence(source.summary(f"{package}/__init__.py"))
        parts += [f"## {package}\n\n{about}", table(("File", "What it does"), rows)]
    return "\n\n".join(parts)


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "session.md": session,
    "metrics.md": metrics,
    "events.md": events,
    "exit-codes.md": exit_codes,
    "checkpoint-format.md": checkpoint_format,
    "rules.md": rules,
    "files.md": files,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/reference from the code.")
    parser.add_argument("--check", action="store_true", help="report stale pages, write none")
    check = parser.parse_args().check
    pages = {FOLDER / name: f"{prose.GENERATED}\n\n{page()}\n" for name, page in PAGES.items()}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        if path not in pages:
            pages[path] = with_differences(with_pictures(path.read_text()))
    stale = []
    for path, text in pages.items():
        if path.exists() and path.read_text() == text:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    if check and stale:
        print(
            f"These pages differ from the code; run make reference: {', '.join(stale)}",
            file=sys.stderr,
        )
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
