"""The virtual disk: it keeps the promises of a real one and not one more."""

import errno
import random
from collections.abc import Callable

import numpy as np
import pytest

from postdate.errors import FolderInUse
from postdate.testing.disk import SECTOR_BYTES, VirtualDisk

ROLLS = 60  # power losses with other dice each; a fate of one in five is missed by all of them once in a million
Seen = bytes | None


def after_power(story: Callable[[VirtualDisk], object], path: str = "f/a", rolls: int = ROLLS) -> set[Seen]:
    """What a file holds after the story and a loss of power, over many dice; None where it is gone."""
    found: set[Seen] = set()
    for seed in range(rolls):
        disk = VirtualDisk()
        story(disk)
        disk.lose_power(random.Random(seed))
        found.add(content(disk, path))
    return found


def content(disk: VirtualDisk, path: str = "f/a") -> Seen:
    return disk.read(path, 0, 1 << 20) if disk.size(path) >= 0 else None


def written(disk: VirtualDisk, data: bytes = b"old") -> None:
    """A file that is on disk, name and all."""
    disk.write("f/a", 0, data)
    disk.sync("f/a")
    disk.sync_folder("f")


# -------------------------------------------------------------------------------------------------------------- power


def test_a_write_is_seen_at_once_and_on_disk_only_after_a_sync() -> None:
    def story(disk: VirtualDisk) -> None:
        written(disk)
        disk.write("f/a", 0, b"new")
        assert content(disk) == b"new"

    assert after_power(story) == {b"old", b"new"}


def test_what_was_synced_stays() -> None:
    def story(disk: VirtualDisk) -> None:
        written(disk)
        file = disk.open("f/a")
        file.write(1, b"e", b"w")
        file.sync()
        file.close()

    assert after_power(story) == {b"oew"}


def test_unsynced_writes_survive_in_any_combination() -> None:
    def story(disk: VirtualDisk) -> None:
        written(disk, b"....")
        for position in range(3):
            disk.write("f/a", position, b"x")

    assert after_power(story, rolls=300) == {
        bytes(b"x"[0] if mask >> n & 1 else b"."[0] for n in range(3)) + b"." for mask in range(8)
    }


def test_a_large_write_tears_at_sectors() -> None:
    count = 4

    def story(disk: VirtualDisk) -> None:
        written(disk, bytes(count * SECTOR_BYTES))
        disk.write("f/a", 0, b"x" * (count * SECTOR_BYTES))

    found = after_power(story, rolls=300)
    whole = {b"\0" * SECTOR_BYTES, b"x" * SECTOR_BYTES}
    for data in found:
        assert data is not None
        assert {data[n * SECTOR_BYTES : (n + 1) * SECTOR_BYTES] for n in range(count)} <= whole
    assert len(found) > 8, "some are torn, not only there or gone"


def test_a_truncation_may_survive_or_not_unless_synced() -> None:
    def story(disk: VirtualDisk) -> None:
        written(disk)
        disk.truncate("f/a", 1)
        assert content(disk) == b"o"

    def synced(disk: VirtualDisk) -> None:
        story(disk)
        disk.sync("f/a")

    assert after_power(story) == {b"old", b"o"}
    assert after_power(synced) == {b"o"}


def test_a_new_name_needs_its_folder_synced() -> None:
    def story(disk: VirtualDisk) -> None:
        disk.write("f/a", 0, b"new")
        disk.sync("f/a")

    def other_folder(disk: VirtualDisk) -> None:
        story(disk)
        disk.sync_folder("g")
        disk.sync_folder("")

    assert after_power(story) == {b"new", None}
    assert after_power(other_folder) == {b"new", None}
    assert after_power(written) == {b"old"}


def test_a_removed_name_needs_its_folder_synced() -> None:
    def story(disk: VirtualDisk) -> None:
        written(disk)
        disk.remove("f/a")
        assert disk.list("f") == []

    def synced(disk: VirtualDisk) -> None:
        story(disk)
        disk.sync_folder("f")

    assert after_power(story) == {b"old", None}
    assert after_power(synced) == {None}


def test_after_a_rename_there_is_the_old_name_or_the_new_one() -> None:
    found = set()
    for seed in range(ROLLS):
        disk = VirtualDisk()
        written(disk)
        disk.write("f/b", 0, b"replaced")
        disk.sync("f/b")
        disk.sync_folder("f")
        disk.rename("f/a", "f/b")
        assert (disk.list("f"), content(disk, "f/b")) == (["b"], b"old")
        disk.lose_power(random.Random(seed))
        found.add((content(disk, "f/a"), content(disk, "f/b")))
    assert found == {(b"old", b"replaced"), (None, b"old")}
    disk = VirtualDisk()
    written(disk)
    disk.rename("f/a", "f/b")
    disk.sync_folder("f")
    disk.lose_power(random.Random(0))
    assert disk.paths() == ["f/b"]


def test_names_survive_in_the_order_in_which_they_changed() -> None:
    found = set()
    for seed in range(ROLLS):
        disk = VirtualDisk()
        for name in "abc":
            disk.write(f"f/{name}", 0, b"x")
        disk.lose_power(random.Random(seed))
        found.add("".join(disk.list("f")))
    assert found == {"", "a", "ab", "abc"}


def test_the_same_dice_give_the_same_loss() -> None:
    def outcome(seed: int) -> Seen:
        disk = VirtualDisk()
        written(disk, bytes(1_000))
        disk.write("f/a", 0, b"x" * 1_000)
        disk.lose_power(random.Random(seed))
        return content(disk)

    assert [outcome(seed) for seed in range(20)] == [outcome(seed) for seed in range(20)]


def test_a_killed_process_loses_nothing_that_was_written() -> None:
    disk = VirtualDisk()
    disk.lock()
    disk.write("f/a", 0, b"new")
    disk.failing_syncs = 1
    disk.kill()
    assert content(disk) == b"new"
    disk.sync("f/a")
    disk.lock()


# ------------------------------------------------------------------------------------------------------------- faults


def failed_sync(disk: VirtualDisk) -> None:
    """A file over which a sync failed: `new` is seen, and dropped."""
    written(disk)
    disk.write("f/a", 0, b"new")
    disk.failing_syncs = 1
    with pytest.raises(OSError, match="Input/output error") as raised:
        disk.sync("f/a")
    assert raised.value.errno == errno.EIO


def test_what_a_failed_sync_dropped_is_seen_until_power_is_lost() -> None:
    def story(disk: VirtualDisk) -> None:
        failed_sync(disk)
        assert content(disk) == b"new"

    assert after_power(story) == {b"old"}


def test_a_second_sync_succeeds_and_does_not_bring_back_what_the_first_dropped() -> None:
    def story(disk: VirtualDisk) -> None:
        failed_sync(disk)
        disk.sync("f/a")
        assert content(disk) == b"new"

    assert after_power(story) == {b"old"}


def test_after_a_failed_sync_what_is_written_anew_can_be_synced() -> None:
    def story(disk: VirtualDisk) -> None:
        failed_sync(disk)
        disk.write("f/a", 0, b"new")
        disk.sync("f/a")

    assert after_power(story) == {b"new"}


def test_a_full_disk_takes_no_growth_and_every_overwrite() -> None:
    disk = VirtualDisk(capacity_bytes=10)
    disk.write("f/a", 0, b"0123456")
    with pytest.raises(OSError, match="No space left on device") as raised:
        disk.write("f/b", 0, b"0123")
    assert raised.value.errno == errno.ENOSPC
    disk.write("f/a", 0, b"xxxxxxx")
    disk.open("f/a").write(7, b"890")
    assert (content(disk), disk.used_bytes()) == (b"xxxxxxx890", 10)
    disk.remove("f/a")
    disk.write("f/b", 0, b"0123")


def test_a_flipped_bit_is_wrong_in_memory_and_on_disk() -> None:
    disk = VirtualDisk()
    written(disk, b"\x00\x00")
    disk.flip("f/a", 11)
    assert content(disk) == b"\x00\x08"
    disk.lose_power(random.Random(0))
    assert content(disk) == b"\x00\x08"


# ---------------------------------------------------------------------------------------------------- the other calls


def test_a_missing_file_is_named() -> None:
    disk = VirtualDisk()
    assert disk.size("f/a") == -1
    for call in (disk.map, disk.array, disk.sync, disk.remove, lambda path: disk.rename(path, "f/b")):
        with pytest.raises(FileNotFoundError, match="f/a"):
            call("f/a")
    with pytest.raises(FileNotFoundError):
        disk.read("f/a", 0, 1)
    with pytest.raises(FileNotFoundError):
        disk.truncate("f/a", 1)


def test_a_map_shows_later_writes_and_a_gap_is_zeros() -> None:
    disk = VirtualDisk()
    disk.write("f/a", 2, b"x")
    view = disk.map("f/a")
    disk.write("f/a", 1, b"y")
    assert (view[0:3], len(view)) == (b"\0yx", 3)
    assert disk.array("f/a").tolist() == np.frombuffer(b"\0yx", np.uint8).tolist()


def test_a_listing_is_sorted_and_of_one_folder() -> None:
    disk = VirtualDisk()
    for path in ("f/b", "f/a", "f/deep/x", "g/c", "top"):
        disk.write(path, 0, b"")
    assert disk.list("f") == ["a", "b", "deep"]
    assert disk.list("") == ["f", "g", "top"]
    assert disk.list("h") == []


def test_a_folder_is_held_by_one() -> None:
    disk = VirtualDisk()
    held = disk.lock()
    with pytest.raises(FolderInUse):
        disk.lock()
    held.release()
    disk.lock()


def test_a_copy_has_the_same_files_all_of_them_on_disk() -> None:
    disk = VirtualDisk()
    written(disk)
    disk.write("f/a", 0, b"new")
    disk.write("g/b", 0, b"unsynced")
    twin = disk.copy()
    twin.lose_power(random.Random(1))
    assert (content(twin), content(twin, "g/b")) == (b"new", b"unsynced")
    twin.write("f/a", 0, b"xxx")
    assert content(disk) == b"new"
