"""Opens the data folder that `check` and `log` read."""

import argparse
from pathlib import Path

from postdate.cli.command import USAGE, Run, add_json, set_run
from postdate.errors import ForeignFolder
from postdate.storage.disk import RealDisk
from postdate.storage.folder import FORMAT_FILE


def add_folder(parser: argparse.ArgumentParser, run: Run) -> None:
    """Adds the flags of a command that works on a data folder."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="the data folder")
    add_json(parser)
    set_run(parser, run, failed=USAGE)


def open_disk(arguments: argparse.Namespace) -> RealDisk:
    """Opens the data folder, and creates none. Raises ForeignFolder."""
    folder: Path = arguments.folder
    if not folder.is_dir():
        raise ForeignFolder(f"{folder} is not a folder")
    disk = RealDisk(folder)
    if disk.size(FORMAT_FILE) < 0:
        raise ForeignFolder(f"there is no file {FORMAT_FILE} in {folder}: it is not a Postdate folder")
    return disk
