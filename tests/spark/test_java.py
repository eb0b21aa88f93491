"""Finding Java: real programs that say a version, in places of the test's own."""

import subprocess
import sys
from pathlib import Path

import pytest

from postdate.spark.session import java
from postdate.spark.session.java import Java, Missing, find

SILENT = "exec sleep 60"


def make_java(home: Path, script: str) -> Path:
    """A program `java` under a home, a small shell script; returns the home."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return home


def says(version: str) -> str:
    """As java -version does, on stderr."""
    return f"""[ "$1" = -version ] && echo 'openjdk version "{version}" 2027-01-01' >&2"""


@pytest.mark.parametrize(
    ("text", "version"), [("17", 17), ("17.0.9", 17), ("21.0.1+12-LTS", 21), ("25-ea", 25), ("117.1", 117)]
)
def test_a_java_that_is_new_enough_is_found_by_java_home(tmp_path: Path, text: str, version: int) -> None:
    home = make_java(tmp_path / "jdk", says(text))
    assert find({"JAVA_HOME": str(home)}, places=()) == Java(str(home), version)


@pytest.mark.parametrize(("text", "version"), [("1.8.0_401", 8), ("11.0.22", 11), ("16", 16)])
def test_one_that_is_too_old_is_named_with_its_version(tmp_path: Path, text: str, version: int) -> None:
    home = make_java(tmp_path / "jdk", says(text))
    found = find({"JAVA_HOME": str(home)}, places=())
    assert found == Missing((f"JAVA_HOME {home}: version {version}",))
    assert found.sentence == f"no Java 17 or newer was found (JAVA_HOME {home}: version {version})"


def test_the_path_leads_through_links_to_the_home(tmp_path: Path) -> None:
    home = make_java(tmp_path / "jdk-21", says("21"))
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "java").symlink_to(home / "bin" / "java")
    assert find({"PATH": f"/nowhere:{tmp_path / 'links'}"}, places=()) == Java(str(home), 21)


def test_java_home_comes_before_the_path_and_the_path_before_the_usual_places(tmp_path: Path) -> None:
    homes = {name: make_java(tmp_path / name, says("17")) for name in ("home", "path", "jvm/usual")}
    places = [str(tmp_path / "jvm" / "*")]
    path = str(homes["path"] / "bin")
    assert find({"JAVA_HOME": str(homes["home"]), "PATH": path}, places=places) == Java(str(homes["home"]), 17)
    assert find({"PATH": path}, places=places) == Java(str(homes["path"]), 17)
    assert find({}, places=places) == Java(str(homes["jvm/usual"]), 17)


def test_an_old_one_on_the_path_does_not_hide_a_new_one(tmp_path: Path) -> None:
    old = make_java(tmp_path / "old", says("11"))
    new = make_java(tmp_path / "jvm" / "java-17", says("17.0.2"))
    (tmp_path / "jvm" / "empty").mkdir()
    assert find({"JAVA_HOME": str(old), "PATH": str(old / "bin")}, places=[f"{tmp_path}/jvm/*"]) == Java(str(new), 17)


def test_of_two_usual_ones_the_older_that_will_do_is_taken(tmp_path: Path) -> None:
    for version in (11, 17, 25):
        make_java(tmp_path / f"java-{version}", says(f"{version}.0.1"))
    assert find({}, places=[f"{tmp_path}/*"]) == Java(str(tmp_path / "java-17"), 17)


def test_the_users_own_folder_is_written_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    home = make_java(tmp_path / ".sdkman" / "candidates" / "java" / "21-tem", says("21"))
    assert find({}, places=["~/.sdkman/candidates/java/*"]) == Java(str(home), 21)


def test_where_a_home_is_given_no_other_is_looked_at(tmp_path: Path) -> None:
    other = make_java(tmp_path / "other", says("17"))
    found = find({"JAVA_HOME": str(other), "PATH": str(other / "bin")}, home=str(tmp_path / "none"))
    assert isinstance(found, Missing)
    assert found.reasons == (
        f"java_home {tmp_path}/none: {tmp_path}/none/bin/java cannot be run: No such file or directory",
    )


def test_nothing_anywhere_is_said_shortly() -> None:
    assert find({}, places=()) == Missing(())
    assert Missing(()).sentence == "no Java 17 or newer was found"


def test_a_folder_is_asked_once_however_many_names_it_has(tmp_path: Path) -> None:
    home = make_java(tmp_path / "jvm" / "java-11", f"echo asked >> {tmp_path}/asked\n{says('11')}")
    (tmp_path / "jvm" / "default").symlink_to(home)
    found = find({"JAVA_HOME": str(home), "PATH": str(home / "bin")}, places=[f"{tmp_path}/jvm/*"])
    assert isinstance(found, Missing)
    assert (tmp_path / "asked").read_text() == "asked\n"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo broken; exit 3", "java -version ended with code 3"),
        ("echo 'Unable to locate a Java Runtime.' >&2", "java -version told no version"),
        (says("17") + "; exit 1", "java -version ended with code 1"),
        (SILENT, "no answer within 0 s"),
    ],
)
def test_a_program_that_is_no_java_is_told_from_one(tmp_path: Path, script: str, reason: str) -> None:
    home = make_java(tmp_path / "jdk", script)
    answer_s = 0.2 if script == SILENT else 60.0
    assert find({"JAVA_HOME": str(home)}, places=(), answer_s=answer_s) == Missing((f"JAVA_HOME {home}: {reason}",))


def test_a_file_that_may_not_be_run_is_named(tmp_path: Path) -> None:
    home = make_java(tmp_path / "jdk", says("17"))
    (home / "bin" / "java").write_bytes(b"\x00not a program")
    found = find({"JAVA_HOME": str(home)}, places=())
    assert isinstance(found, Missing)
    assert "Exec format error" in found.sentence


def test_scripts_are_told_the_home_or_why_there_is_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    home = make_java(tmp_path / "jdk", says("17"))
    program = [sys.executable, str(Path(java.__file__))]
    assert subprocess.run(program, env={"JAVA_HOME": str(home)}, check=False).returncode == 0
    assert capfd.readouterr() == (f"{home}\n", "")
