"""The token of a data folder."""

from pathlib import Path

import pytest

from postdate.access.token import TOKEN_FILE, find_token, open_token, read_token
from postdate.errors import UsageError


def test_a_folder_gets_a_token_that_only_its_owner_can_read(tmp_path: Path) -> None:
    token = open_token(tmp_path)
    assert len(token) == 64
    assert (tmp_path / TOKEN_FILE).stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == [TOKEN_FILE]


def test_a_folder_keeps_its_token(tmp_path: Path) -> None:
    assert open_token(tmp_path) == open_token(tmp_path)


def test_two_folders_have_different_tokens(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    assert open_token(tmp_path / "one") != open_token(tmp_path / "two")


def test_a_token_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    token = open_token(tmp_path)
    (tmp_path / TOKEN_FILE).chmod(0o644)
    assert open_token(tmp_path) == token
    assert (tmp_path / TOKEN_FILE).stat().st_mode & 0o777 == 0o600


def test_a_token_that_a_crash_left_half_made_is_made_again(tmp_path: Path) -> None:
    (tmp_path / f"{TOKEN_FILE}.new").write_text("12")
    assert len(open_token(tmp_path)) == 64


@pytest.mark.parametrize("content", [b"", b"short", b"\xff\xfe", b"G" * 64])
def test_a_damaged_token_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / TOKEN_FILE).write_bytes(content)
    with pytest.raises(UsageError, match="holds no token"):
        open_token(tmp_path)


def test_a_flag_wins_over_the_environment(tmp_path: Path) -> None:
    token = open_token(tmp_path)
    file = str(tmp_path / TOKEN_FILE)
    assert find_token({"POSTDATE_TOKEN": "other"}, file) == token
    assert find_token({"POSTDATE_TOKEN": " other\n", "POSTDATE_TOKEN_FILE": "/nowhere"}) == "other"
    assert find_token({"POSTDATE_TOKEN_FILE": file}) == token
    assert find_token({}) == ""


def test_a_token_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere cannot be read"):
        read_token(tmp_path / "nowhere")
