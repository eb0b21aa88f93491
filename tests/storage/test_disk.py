"""The real disk: writes that come short, locks, maps, names."""

import errno
import os
import threading
from pathlib import Path

import pytest

from postdate.errors import FolderInUse
from postdate.storage.disk import RealDisk
from tests.support.files import open_to_others


@pytest.fixture
def disk(tmp_path: Path) -> RealDisk:
    return RealDisk(tmp_path / "data")


def test_what_is_written_at_a_position_is_read_there(disk: RealDisk) -> None:
    disk.write("a/b/c", 5, b"hello", b" ", memoryview(b"world"))
    assert disk.read("a/b/c", 0, 100) == bytes(5) + b"hello world"
    assert disk.read("a/b/c", 7, 3) == b"llo"
    assert disk.read("a/b/c", 100, 3) == b""
    assert disk.size("a/b/c") == 16


def test_what_is_not_there_has_no_size_and_no_names(disk: RealDisk) -> None:
    assert disk.size("a") == -1
    assert disk.list("") == []
    with pytest.raises(FileNotFoundError):
        disk.read("a", 0, 1)


def test_files_are_renamed_cut_and_removed(disk: RealDisk) -> None:
    disk.write("b", 0, b"12345678")
    disk.write("a", 0, b"1")
    assert disk.list("") == ["a", "b"]
    disk.rename("b", "c")
    disk.truncate("c", 3)
    assert disk.read("c", 0, 100) == b"123"
    disk.remove("a")
    assert disk.list("") == ["c"]
    disk.sync("c")
    disk.sync_folder("")


def test_a_new_folder_is_synced_with_its_parents(disk: RealDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.write("queues/1/entries/0", 0, b"x")
    synced: list[str] = []
    fsync = os.fsync

    def remember(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", remember)
    disk.sync_folder("queues/1/entries")
    root = str(disk.root.resolve())
    assert {f"{root}/queues/1/entries", f"{root}/queues/1", f"{root}/queues", root} <= set(synced)


def test_short_writes_are_continued(disk: RealDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite

    def short_pwrite(descriptor: int, data: memoryview, position: int) -> int:
        return pwrite(descriptor, bytes(data[:2]), position)

    monkeypatch.setattr(os, "pwrite", short_pwrite)
    file = disk.open("f")
    file.write(4, b"abcd", b"", b"efghijk")
    file.write(15, b"lmnop")
    file.sync()
    file.close()
    assert disk.read("f", 0, 100) == bytes(4) + b"abcdefghijklmnop"


def test_a_disk_that_takes_nothing_is_an_error(disk: RealDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([1, 0])
    monkeypatch.setattr(os, "pwrite", lambda *_: next(taken))
    file = disk.open("f")
    with pytest.raises(OSError, match="the disk took 0 of 3 bytes") as caught:
        file.write(0, b"abcd")
    assert caught.value.errno == errno.EIO
    file.close()


def test_a_map_shows_what_is_written_later(disk: RealDisk) -> None:
    disk.write("f", 0, bytes(4_096))
    view, array = disk.map("f"), disk.array("f")
    file = disk.open("f")
    file.write(100, b"later")
    assert view[100:105] == b"later"
    assert array[100:105].tobytes() == b"later"
    assert len(view) == 4_096
    file.close()


def test_a_locked_folder_is_refused_with_a_sentence(disk: RealDisk) -> None:
    lock = disk.lock()
    with pytest.raises(FolderInUse) as caught:
        RealDisk(disk.root).lock()
    assert str(caught.value) == (
        f"{disk.root} is in use by process {os.getpid()}: stop that broker, or use another folder"
    )
    lock.release()
    again = disk.lock()
    again.release()


def test_a_refused_lock_leaves_no_open_file(disk: RealDisk) -> None:
    lock = disk.lock()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(FolderInUse):
            disk.lock()
    assert len(os.listdir("/proc/self/fd")) == before
    lock.release()


def test_a_file_is_synced_on_another_thread_than_it_is_written(disk: RealDisk) -> None:
    file = disk.open("f")
    file.write(0, b"first")
    thread = threading.Thread(target=file.sync)
    thread.start()
    file.write(5, b"second")
    thread.join()
    file.close()
    assert disk.read("f", 0, 100) == b"firstsecond"


def test_what_is_written_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        disk = RealDisk(tmp_path / "data")
        disk.open("log/0").close()
        disk.write("queues/1/entries/0", 0, b"x")
        disk.lock().release()
    finally:
        os.umask(before)
    assert open_to_others(tmp_path / "data") == []
