"""`postdate check`: verifies a closed data folder."""

import argparse

from postdate.check import check_folder
from postdate.cli.command import NEGATIVE, OK, print_json
from postdate.cli.folder import add_folder, open_disk
from postdate.cli.render import Working, count

HELP = """\
Reads everything in a data folder that no broker has open, changes nothing, and says what is damaged and where.

examples:
  postdate check ./postdate-data             the verified counts, or each finding with its place
  postdate check ./postdate-data --json      the same for a program

exit codes: 0 all is well, 1 damage was found, 2 wrong usage or the folder cannot be read (a broker runs on it, or it is
not a Postdate folder), 130 interrupted
"""


def add(parser: argparse.ArgumentParser) -> None:
    add_folder(parser, _check)


def _check(arguments: argparse.Namespace) -> int:
    with Working(f"checking {arguments.folder}"):
        report = check_folder(open_disk(arguments))
    if arguments.json:
        print_json({"ok": report.ok, "findings": report.findings, "numbers": report.numbers})
    elif report.ok:
        width = max(len(f"{number:,}") for number in report.numbers.values())
        for what, number in report.numbers.items():
            print(f"{number:>{width},}  {what}")
        print("ok")
    else:
        for finding in report.findings:
            print(finding)
        print(count(len(report.findings), "finding"))
    return OK if report.ok else NEGATIVE
