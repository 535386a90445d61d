"""Completes command lines in bash, zsh and fish: `elasticzero completion SHELL`.

The script of each shell calls `elasticzero __complete WORD…` with the words up to the cursor. It
prints one candidate a line, with a description after a tab, and then a line that says what else the
shell may add: `:files`, `:directories` or `:nothing`. So all shells complete by the same parsers
that read the command line. docs/decisions/0028-own-completion.md says why no library does it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from elasticzero.errors import ElasticZeroError, ExitCode, UserError
from elasticzero.launcher.options.parser import Parser
from elasticzero.options.option import split_default
from elasticzero.text import print_result

Rest = Literal["files", "directories", "nothing"]
ParserOf = Callable[[Sequence[str]], Parser]

_METAVARS: dict[str, Rest] = {"FILE": "files", "DIR": "directories"}
"""Kind of an option's values, by the name that the help has for them."""
_POSITIONALS: dict[str, Rest] = {
    **dict.fromkeys(("script", "arguments"), "files"),
    **dict.fromkeys(("path", "a", "b", "directory", "target"), "directories"),
}

BASH = """\
_elasticzero() {
    local program="${1/#\\~/$HOME}" line="${COMP_LINE:0:COMP_POINT}"
    local word="" prefix="" rest="" one
    local -a words=()
    read -ra words <<< "$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    word="${words[${#words[@]}-1]}"
    # Where bash takes `=` for the end of a word, it wants only what follows it.
    [[ "$word" == -*=* && "$COMP_WORDBREAKS" == *"="* ]] && prefix="${word%%=*}="
    COMPREPLY=()
    while IFS= read -r one; do
        case "$one" in
            :*) rest="${one#:}" ;;
            *) one="${one%%$'\\t'*}"; COMPREPLY+=("${one#"$prefix"}") ;;
        esac
    done < <("$program" __complete "${words[@]:1}" 2>/dev/null)
    [[ "$word" == -*=* ]] && word="${word#*=}"
    case "$rest" in
        files) compopt -o filenames 2>/dev/null; mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY \\
            < <(compgen -f -- "$word") ;;
        directories) compopt -o filenames 2>/dev/null; mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY \\
            < <(compgen -d -- "$word") ;;
    esac
}
complete -F _elasticzero elasticzero
"""

ZSH = """\
#compdef elasticzero
_elasticzero() {
    local -a lines described
    local program="${words[1]/#\\~/$HOME}" line rest="" word="${words[CURRENT]}"
    lines=("${(@f)$("$program" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    for line in "${lines[@]}"; do
        case "$line" in
            :*) rest="${line#:}" ;;
            ?*) line="${line//:/\\\\:}"; described+=("${line/$'\\t'/:}") ;;
        esac
    done
    (( ${#described} )) && _describe 'elasticzero' described
    [[ "$word" == -*=* ]] && compset -P '*='
    case "$rest" in
        files) _files ;;
        directories) _files -/ ;;
    esac
}
if [[ "${zsh_eval_context[-1]}" == loadautofunc ]]; then
    _elasticzero "$@"
else
    compdef _elasticzero elasticzero
fi
"""

FISH = """\
function __elasticzero_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l program (string replace -r '^~' $HOME -- $words[1])
    set -l word (string replace -r '^-[^=]*=' '' -- (commandline -ct))
    set -l before (string match -r '^-[^=]*=' -- (commandline -ct))
    for line in ($program __complete $words[2..-1] 2>/dev/null)
        switch $line
            case ':files'
                string replace -r -- '^' "$before" (__fish_complete_path "$word")
            case ':directories'
                string replace -r -- '^' "$before" (__fish_complete_directories "$word")
            case ':*'
            case '*'
                printf '%s\\n' $line
        end
    end
end
complete -c elasticzero -f -a '(__elasticzero_complete)'
"""

SHELLS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


@dataclass(slots=True)
class Candidates:
    """Holds the words that the shell may offer at the cursor."""

    descriptions: dict[str, str] = field(default_factory=dict)
    """Description of each word that is offered."""
    rest: Rest = "nothing"
    """Kind of names that the shell completes by itself."""


def add_completion_options(parser: Parser) -> None:
    """Adds the arguments of `completion`, and sets its `run_command`."""
    parser.add_argument("shell", choices=tuple(SHELLS), help="The script is for this shell.")
    parser.set_defaults(run_command=_print_script)


def _print_script(args: argparse.Namespace) -> ExitCode:
    return print_script(args.shell)


def print_script(shell: str) -> ExitCode:
    """Prints the script of a shell; raises `UserError` for a shell that has none."""
    if shell not in SHELLS:
        raise UserError(f"no script for the shell {shell}: {', '.join(SHELLS)} have one")
    print_result(SHELLS[shell], end="")
    return ExitCode.DONE


def print_completions(arguments: Sequence[str], build_parser: ParserOf) -> int:
    """Prints the candidates for the last word, as the scripts of the shells read them.

    Args:
        arguments: the words of the command line after `__complete`, the last of them unfinished.
        build_parser: returns the parser of a command line.
    """
    try:
        offered = completions(arguments, build_parser)
    except ElasticZeroError:
        offered = Candidates()
    for word, text in offered.descriptions.items():
        print(f"{word}\t{text}" if text else word)
    print(f":{offered.rest}")
    return int(ExitCode.DONE)


def completions(arguments: Sequence[str], build_parser: ParserOf) -> Candidates:
    """Returns the candidates for the last of the given words.

    Args:
        arguments: the words after the program's name, the last of them unfinished.
        build_parser: returns the parser of a command line.
    """
    *before, current = arguments or [""]
    parser = build_parser(before)
    value_of: argparse.Action | None = None
    positionals = 0
    for word in before:
        if value_of is not None:
            value_of = None
        elif _in_script(parser, positionals):
            continue
        elif word.startswith("-"):
            name, equals, _ = word.partition("=")
            action = _options(parser).get(name.replace("_", "-"))
            value_of = (
                action if action is not None and not equals and _takes_value(action) else None
            )
        elif parser.commands:
            if word not in parser.commands:
                return Candidates()
            parser = parser.commands[word]
        else:
            positionals += 1
    if value_of is not None:
        return _values(value_of, current)
    if _in_script(parser, positionals):
        return Candidates(rest="files")
    if current.startswith("-"):
        return _option_words(parser, current)
    if parser.commands:
        descriptions = {name: _first_sentence(p.description) for name, p in parser.commands.items()}
        return Candidates(
            {name: text for name, text in descriptions.items() if name.startswith(current)}
        )
    places = [action for action in parser.actions if not action.option_strings]
    if positionals < len(places):
        return _values(places[positionals], current)
    repeated = bool(places) and places[-1].nargs in ("*", "+")
    return _values(places[-1], current) if repeated else Candidates()


def _in_script(parser: Parser, positionals: int) -> bool:
    """Returns whether the next word belongs to the training script."""
    places = [action for action in parser.actions if not action.option_strings]
    return positionals > 0 and any(place.nargs == argparse.REMAINDER for place in places)


def _option_words(parser: Parser, current: str) -> Candidates:
    """Returns the options that begin with the word, or values after its `=`."""
    name, equals, start = current.partition("=")
    options = _options(parser)
    if not equals:
        return Candidates(
            {
                flag: _first_sentence(action.help)
                for flag, action in options.items()
                if flag.startswith(name.replace("_", "-") if len(name) > 2 else name)
            }
        )
    action = options.get(name.replace("_", "-"))
    if action is None or not _takes_value(action):
        return Candidates()
    values = _values(action, start)
    return Candidates(
        {f"{name}={word}": text for word, text in values.descriptions.items()}, values.rest
    )


def _values(action: argparse.Action, start: str) -> Candidates:
    """Returns the values of an option or positional argument that begin with a text."""
    if action.choices is not None:
        return Candidates({str(c): "" for c in action.choices if str(c).startswith(start)})
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    rest = _METAVARS.get(metavar) if action.option_strings else _POSITIONALS.get(action.dest)
    return Candidates(rest=rest or "nothing")


def _options(parser: Parser) -> dict[str, argparse.Action]:
    """Returns the options of a command by their flags with dashes, without hidden ones."""
    return {
        flag: action
        for action in parser.actions
        if action.help != argparse.SUPPRESS
        for flag in action.option_strings
        if "_" not in flag
    }


def _takes_value(action: argparse.Action) -> bool:
    return action.nargs != 0


def _first_sentence(text: str | None) -> str:
    return split_default(text or "")[0].partition(". ")[0].partition(";")[0].rstrip(".")
