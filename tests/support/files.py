"""What tests ask of files."""

import os
from pathlib import Path


def open_to_others(folder: Path) -> list[str]:
    """Files and folders in a folder, and that itself, that another user of the machine may read, write or enter."""
    found = [folder, *(Path(root) / name for root, folders, files in os.walk(folder) for name in (*folders, *files))]
    return [str(path) for path in found if not path.is_symlink() and path.stat().st_mode & 0o077]
