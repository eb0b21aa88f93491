"""`postdate completion`: a script that completes commands, flags and their values in bash, zsh or fish."""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from postdate.cli.command import OK, USAGE, set_run

HELP = """\
Prints a script that completes commands, verbs, flags and their values in a shell.

examples:
  source <(postdate completion bash)                                           in this bash, or in ~/.bashrc
  source <(postdate completion zsh)                                            in this zsh, or in ~/.zshrc
  postdate completion fish > ~/.config/fish/completions/postdate.fish          in every fish from now on

exit codes: 0 printed, 2 wrong usage
"""

_PATHS = {"FILE", "F", "DIR"}  # metavars of values that are files or folders


class Flag(NamedTuple):
    """A flag of a command."""

    names: tuple[str, ...]  # -h, --help
    summary: str
    value: str  # what its value is called; empty where it takes none
    choices: tuple[str, ...]  # the values that it takes, where they are few


class Command(NamedTuple):
    """A command or one of its verbs."""

    words: tuple[str, ...]  # ("topic", "list")
    summary: str
    flags: tuple[Flag, ...]
    verbs: tuple[tuple[str, str], ...]  # name and summary
    takes_paths: bool  # its arguments are files or folders
    choices: tuple[str, ...]  # the arguments that it takes, where they are few


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=tuple(_SCRIPTS), help="bash, zsh or fish")
    set_run(parser, _print_script, failed=USAGE)


def _print_script(arguments: argparse.Namespace) -> int:
    from postdate.cli import app  # it knows all commands, and this one is one of them

    commands = list(_commands((), "", app.build_parser(app.COMMANDS)))
    print("\n".join(_SCRIPTS[arguments.shell](commands)))
    return OK


# -- from the parsers -------------------------------------------------------------------------------------------


def _commands(words: tuple[str, ...], summary: str, parser: argparse.ArgumentParser) -> Iterator[Command]:
    """A command and all below it. The program itself is the command without words."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    arguments = [action for action in parser._actions if not action.option_strings and action not in below]
    verbs = tuple((action.dest, action.help or "") for each in below for action in each._choices_actions)
    choices = tuple(str(choice) for action in arguments for choice in action.choices or ())
    paths = any(action.metavar in _PATHS for action in arguments)
    yield Command(words, summary, tuple(_flags(parser)), verbs, paths, choices)
    for name, text in verbs:
        yield from _commands((*words, name), text, below[0].choices[name])


def _flags(parser: argparse.ArgumentParser) -> Iterator[Flag]:
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            takes_value = action.nargs != 0
            value = str(action.metavar or action.dest.upper()) if takes_value else ""
            choices = tuple(str(choice) for choice in action.choices or (value.split("|") if "|" in value else ()))
            summary = " ".join(str(action.help or "").replace("%%", "%").split())
            yield Flag(tuple(action.option_strings), summary, value, choices)


# -- bash -------------------------------------------------------------------------------------------------------


def _bash(commands: list[Command]) -> Iterator[str]:
    yield "# bash completion of postdate: source <(postdate completion bash)"
    yield "_postdate() {"
    yield '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"'
    yield '    local command="" words="" paths=""'
    yield "    if (( COMP_CWORD > 1 )); then command=${COMP_WORDS[1]}; fi"
    with_verbs = "|".join(command.words[0] for command in commands if len(command.words) == 1 and command.verbs)
    yield f"    case $command in {with_verbs})"
    yield '        if (( COMP_CWORD > 2 )); then command="$command ${COMP_WORDS[2]}"; fi ;;'
    yield "    esac"
    yield '    case "$command,$previous" in'
    for command in commands:
        for flag in command.flags:
            if flag.value:
                names = "|".join(f'"{" ".join(command.words)},{name}"' for name in flag.names)
                yield f"        {names}) {_bash_value(flag)} return ;;"
    yield "    esac"
    yield "    case $command in"
    for command in commands:
        flags = [name for flag in command.flags for name in flag.names]
        words = " ".join([*(name for name, _ in command.verbs), *command.choices, *flags])
        paths = " paths=1" if command.takes_paths else ""
        yield f'        "{" ".join(command.words)}") words="{words}"{paths} ;;'
    yield "    esac"
    yield '    COMPREPLY=($(compgen -W "$words" -- "$current"))'
    yield "    if [[ $paths && $current != -* ]]; then"
    yield '        compopt -o filenames; COMPREPLY+=($(compgen -f -- "$current"))'
    yield "    fi"
    yield "}"
    yield "complete -F _postdate postdate"


def _bash_value(flag: Flag) -> str:
    if flag.choices:
        return f'COMPREPLY=($(compgen -W "{" ".join(flag.choices)}" -- "$current"));'
    if flag.value in _PATHS:
        return 'compopt -o filenames; COMPREPLY=($(compgen -f -- "$current"));'
    return ""


# -- zsh --------------------------------------------------------------------------------------------------------


def _zsh(commands: list[Command]) -> Iterator[str]:
    yield "#compdef postdate"
    yield "# zsh completion of postdate: source <(postdate completion zsh)"
    for command in commands:
        yield f"{_zsh_name(command.words)}() {{"
        if command.verbs:
            yield "    local state line"
            yield "    local -a verbs"
            yield f"    verbs=({' '.join(_quoted(f'{name}:{text}') for name, text in command.verbs)})"
            flags = " ".join(_zsh_flag(flag) for flag in command.flags)
            yield f"    _arguments -C {flags} '1:command:->verb' '*::argument:->rest'"
            yield "    case $state in"
            yield "        verb) _describe command verbs ;;"
            yield "        rest) case $line[1] in"
            for name, _ in command.verbs:
                yield f"            {name}) {_zsh_name((*command.words, name))} ;;"
            yield "        esac ;;"
            yield "    esac"
        else:
            flags = " ".join(_zsh_flag(flag) for flag in command.flags)
            # Without a rule for arguments zsh would complete no flag after one.
            rest = f"({' '.join(command.choices)})" if command.choices else "_files" if command.takes_paths else " "
            yield f"    _arguments {flags} '*:argument:{rest}'"
        yield "}"
    yield "compdef _postdate postdate"


def _zsh_name(words: tuple[str, ...]) -> str:
    return "_".join(("_postdate", *words))


def _zsh_flag(flag: Flag) -> str:
    summary = flag.summary.replace("[", r"\[").replace("]", r"\]").replace(":", r"\:")
    value = flag.value.replace(":", r"\:")
    action = f"({' '.join(flag.choices)})" if flag.choices else "_files" if flag.value in _PATHS else " "
    end = f":{value}:{action}" if value else ""
    return " ".join(_quoted(f"{name}[{summary}]{end}") for name in flag.names)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# -- fish -------------------------------------------------------------------------------------------------------


def _fish(commands: list[Command]) -> Iterator[str]:
    yield "# fish completion of postdate: postdate completion fish > ~/.config/fish/completions/postdate.fish"
    yield "complete -c postdate -f"
    for command in commands:
        inside = before_verb = "__fish_use_subcommand"
        if command.words:
            inside = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.words)
            names = " ".join(name for name, _ in command.verbs)
            before_verb = _fish_quoted(f"{inside}; and not __fish_seen_subcommand_from {names}")
            inside = _fish_quoted(inside)
        for name, text in command.verbs:
            yield f"complete -c postdate -n {before_verb} -a {name} -d {_fish_quoted(text)}"
        for flag in command.flags:
            yield f"complete -c postdate -n {inside}{_fish_flag(flag)} -d {_fish_quoted(flag.summary)}"
        if command.takes_paths:
            yield f"complete -c postdate -n {inside} -F"
        if command.choices:
            yield f"complete -c postdate -n {inside} -a {_fish_quoted(' '.join(command.choices))}"


def _fish_flag(flag: Flag) -> str:
    names = "".join(f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}" for name in flag.names)
    if not flag.value:
        return names
    if flag.choices:
        return f"{names} -x -a {_fish_quoted(' '.join(flag.choices))}"
    return f"{names} -r -F" if flag.value in _PATHS else f"{names} -x"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
