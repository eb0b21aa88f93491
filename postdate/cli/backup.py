"""`postdate backup`: copies a data folder while its broker runs."""

import argparse
from pathlib import Path

from postdate.backup import back_up
from postdate.cli.command import OK, print_json
from postdate.cli.folder import add_folder, open_disk
from postdate.cli.render import Working, count, moment, size
from postdate.process import make_private_folder
from postdate.storage.disk import RealDisk

HELP = """\
Copies a data folder, with its table, into a new folder. The broker and its pipeline may run meanwhile: the copy is the
folder as a crash at one instant would have left it.

examples:
  postdate backup ./postdate-data /backup/monday
  postdate check /backup/monday                   reads every byte of the copy
  postdate up --data /backup/monday               a broker on the copy; or move it to where the folder was

A plain copy of a running broker's folder may not open. Free disk space for the whole folder is needed.

exit codes: 0 copied, 2 wrong usage, or a folder, table or target that cannot be copied, 130 interrupted
"""


def add(parser: argparse.ArgumentParser) -> None:
    add_folder(parser, _back_up)
    parser.add_argument("target", metavar="TARGET", type=Path, help="the folder for the copy, new or empty")
    parser.add_argument("--no-table", action="store_true", help="leave the table out")


def _back_up(arguments: argparse.Namespace) -> int:
    source = open_disk(arguments)
    make_private_folder(arguments.target)
    with Working(f"copying {arguments.folder}"):
        done = back_up(source, RealDisk(arguments.target), with_table=not arguments.no_table)
    if arguments.json:
        print_json({**done._asdict(), "target": str(arguments.target)})
    else:
        print(f"copied {count(done.file_count, 'file')}, {size(done.size_bytes)}, as of {moment(done.at_ms)}")
        print(f"check the copy with: postdate check {arguments.target}")
    return OK
