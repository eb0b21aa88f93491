"""`postdate completion`: the scripts, sourced in the real shells that this machine has."""

import os
import pty
import select
import shutil
import subprocess
from pathlib import Path

import pytest

from postdate import cli
from postdate.cli import app

Capsys = pytest.CaptureFixture[str]

# What bash does when somebody presses tab behind the words.
_PRESS_TAB = """
source "$1"; shift
compopt() { :; }  # it works only while bash itself completes
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_postdate
printf '%s\\n' "${COMPREPLY[@]}"
"""

# zsh completes only in a terminal. It writes what it would offer to a file, and then a line that ends the list.
_ZSH_SETUP = """
autoload -U compinit; compinit -D
source {script}
compadd() {{
    builtin compadd "$@"; local code=$?
    if (( ! ${{@[(I)-[OAD]]}} )); then
        local -a hits; builtin compadd -O hits "$@"; print -rl -- $hits >> {offers}
    fi
    return $code
}}
offer() {{ _main_complete; print -r -- "[end]" >> {offers} }}
zle -C offer complete-word offer
bindkey "^I" offer
"""
_ANSWER_S = 30.0


def press_tab_in_bash(script: Path, line: str) -> set[str]:
    words = [*line.split(), *([""] if line.endswith(" ") else [])]
    command = ["bash", "--norc", "-c", _PRESS_TAB, "bash", str(script), *words]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())


def press_tab_in_fish(script: Path, line: str) -> set[str]:
    command = ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {offer.split("\t")[0] for offer in done.stdout.splitlines()}


def press_tab_in_zsh(script: Path, line: str) -> set[str]:
    offers, setup = script.with_name("offers"), script.with_name("setup")
    offers.write_text("")
    setup.write_text(_ZSH_SETUP.format(script=script, offers=offers))
    ours, terminal = pty.openpty()
    with subprocess.Popen(["zsh", "-f", "-i"], stdin=terminal, stdout=terminal, stderr=terminal) as zsh:
        os.close(terminal)
        os.write(ours, f"source {setup}\n{line}\t".encode())
        while "[end]" not in offers.read_text():
            assert select.select([ours], [], [], _ANSWER_S)[0], "zsh says nothing"
            os.read(ours, 65_536)
        zsh.kill()
        os.close(ours)
    return set(offers.read_text().split()) - {"[end]"}


PRESS = {"bash": press_tab_in_bash, "zsh": press_tab_in_zsh, "fish": press_tab_in_fish}
INSTALLED = [shell for shell in PRESS if shutil.which(shell)]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script for each shell, named after it."""
    return tmp_path_factory.mktemp("completion")


def script_of(shell: str, folder: Path, capsys: Capsys) -> Path:
    path = folder / shell
    if not path.exists():
        assert cli.main(["completion", shell]) == 0
        path.write_text(capsys.readouterr().out)
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sen"], {"send"}),
        (["s"], {"send", "sql", "status", "settings"}),
        ([""], {*app.COMMANDS, "-h", "--help", "--version"}),
        (["send", "--de"], {"--delay"}),
        (["topic", "c"], {"create"}),
        (["topic", "create", "orders", "--qu"], {"--queues"}),
        (["topic", "create", "orders", "--perm", "r"], {"r", "rw"}),
        (["up", "--flush", ""], {"sync", "async"}),
        (["up", "--auto-create-topics", "t"], {"true"}),
        (["up", "--snapshot-b"], {"--snapshot-bytes"}),  # not --snapshot-batches, which is a setting no more
        (["send", "--key", ""], {""}),  # a key is the user's
        (["completion", ""], {"bash", "zsh", "fish", "-h", "--help"}),
    ],
)
def test_bash_completes(words: list[str], expected: set[str], scripts: Path, capsys: Capsys) -> None:
    script = script_of("bash", scripts, capsys)
    command = ["bash", "--norc", "-c", _PRESS_TAB, "bash", str(script), "postdate", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert set(done.stdout.split("\n")[:-1]) == expected


def test_bash_completes_folders(scripts: Path, tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "postdate-data").mkdir()
    script = script_of("bash", scripts, capsys)
    for words in (["check", "postd"], ["up", "--data", "postd"], ["import", "postd"]):
        command = ["bash", "--norc", "-c", _PRESS_TAB, "bash", str(script), "postdate", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert done.stdout == "postdate-data\n"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_every_command_and_flag(shell: str, scripts: Path, capsys: Capsys) -> None:
    text = script_of(shell, scripts, capsys).read_text()
    for name, summary in app.COMMANDS.items():
        assert name in text
        assert summary.partition("'")[0] in text  # each shell quotes in its own way
    assert ("--delay[" if shell == "zsh" else "-l delay ") in text


@pytest.mark.parametrize("shell", INSTALLED)
def test_shells_read_their_script(shell: str, scripts: Path, capsys: Capsys) -> None:
    subprocess.run([shell, "-n", str(script_of(shell, scripts, capsys))], check=True)


@pytest.mark.parametrize("shell", INSTALLED)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sen", {"send"}),
        ("send --de", {"--delay"}),
        ("send orders hello --de", {"--delay"}),
        ("topic c", {"create"}),
        ("topic create orders --perm r", {"r", "rw"}),
        ("up --flush ", {"sync", "async"}),
    ],
)
def test_every_shell_completes(shell: str, line: str, expected: set[str], scripts: Path, capsys: Capsys) -> None:
    script = script_of(shell, scripts, capsys)
    assert PRESS[shell](script, f"postdate {line}") == expected


def test_another_shell_is_wrong_usage() -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["completion", "tcsh"])
