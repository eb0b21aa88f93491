"""How bulk work behaves beside a broker."""

import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from postdate.process import PACE_BYTES, Pacer, give_freed_memory_back, make_private_folder, take_from_others
from tests.support.files import open_to_others

PROCESS = """
import os, subprocess, sys
from pathlib import Path
from postdate.process import keep_freed_memory, let_others_go_first
let_others_go_first(3)
keep_freed_memory()
child = subprocess.run([sys.executable, "-c", "import os; print(os.nice(0))"], capture_output=True, text=True)
slices = [line.split()[-1] for line in Path("/proc/self/sched").read_text().splitlines() if line.startswith("se.slice")]
print(os.nice(0), child.stdout.strip(), len(bytearray(200_000_000)), *slices)
"""


def test_a_process_and_its_children_let_others_go_first() -> None:
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    nice, nice_of_child, size, *slices = map(int, done.stdout.split())
    assert (nice, nice_of_child, size) == (3, 3, 200_000_000)
    if tuple(map(int, platform.release().split(".")[:2])) >= (6, 12):  # older kernels have no slices to ask for
        assert slices == [100_000_000]


def test_freed_memory_is_given_back() -> None:
    give_freed_memory_back()
    before = resident_mb()
    blocks = [bytearray(100_000) for _ in range(2_000)]  # too small for the system to take each back by itself
    last = bytearray(100_000)
    assert resident_mb() - before > 150
    del blocks
    give_freed_memory_back()
    assert resident_mb() - before < 50, len(last)


def resident_mb() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) // 1_024


def test_a_file_is_synced_every_few_bytes_and_never_twice_at_once() -> None:
    running, most, count, lock = 0, 0, 0, threading.Lock()

    def sync() -> None:
        nonlocal running, most, count
        with lock:
            running, count = running + 1, count + 1
            most = max(most, running)
        with lock:
            running -= 1

    pacer = Pacer(sync)
    for _ in range(40):
        pacer.wrote(PACE_BYTES // 4)
    pacer.close()
    assert (count, most, running) == (10, 1, 0)


def test_what_a_sync_raises_is_told_to_the_writer() -> None:
    def sync() -> None:
        raise OSError(28, "full")

    pacer = Pacer(sync)
    pacer.wrote(PACE_BYTES)
    with pytest.raises(OSError, match="full"):
        pacer.wrote(PACE_BYTES)
    pacer.wrote(PACE_BYTES)
    with pytest.raises(OSError, match="full"):
        pacer.close()
    pacer.close()


# -- files ------------------------------------------------------------------------------------------------------


def test_a_private_folder_and_those_above_it_are_the_owners_alone(tmp_path: Path) -> None:
    make_private_folder(tmp_path / "a/b/c")
    assert [(tmp_path / path).stat().st_mode & 0o777 for path in ("a", "a/b", "a/b/c")] == [0o700] * 3
    (tmp_path / "a").chmod(0o755)
    make_private_folder(tmp_path / "a/b/d")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o755  # it was there


def test_a_folder_is_taken_from_others_with_all_in_it_and_no_link_is_followed(tmp_path: Path) -> None:
    for path in ("data", "data/log", "beside"):
        (tmp_path / path).mkdir()
        (tmp_path / path).chmod(0o755)
    for path in ("data/FORMAT", "data/log/0", "beside/file"):
        (tmp_path / path).write_text("")
        (tmp_path / path).chmod(0o644)
    (tmp_path / "data/link").symlink_to(tmp_path / "beside")
    (tmp_path / "data/gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "way").symlink_to(tmp_path / "data")
    assert take_from_others(tmp_path / "way") == (4, 0)
    assert open_to_others(tmp_path / "data") == []
    assert (tmp_path / "beside/file").stat().st_mode & 0o777 == 0o644
    assert take_from_others(tmp_path / "way") == (0, 0)
