"""`postdate completion`: the scripts, sourced in real shells where those are installed."""

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


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_script(shell: str, scripts: Path, capsys: Capsys) -> None:
    if not shutil.which(shell):
        pytest.skip(f"there is no {shell} on this machine")
    script = script_of(shell, scripts, capsys)
    subprocess.run([shell, "-n", str(script)], check=True)


def test_fish_completes(scripts: Path, capsys: Capsys) -> None:
    if not shutil.which("fish"):
        pytest.skip("there is no fish on this machine")
    script = script_of("fish", scripts, capsys)
    asked = f"source {script}; complete -C 'postdate sen'; complete -C 'postdate send --de'"
    done = subprocess.run(["fish", "--no-config", "-c", asked], capture_output=True, text=True, check=True)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["send", "--delay"]


def test_another_shell_is_wrong_usage() -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["completion", "tcsh"])
