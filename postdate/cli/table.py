"""`postdate table`: adopts a table whose data folder is lost."""

import argparse
from pathlib import Path

from postdate.cli.command import OK, REFUSED, add_json, describe, print_json, set_run
from postdate.cli.render import count, moment, print_facts
from postdate.extras import require_extra
from postdate.process import keep_files_private

HELP = """\
Adopts a table into a new data folder, after the one that it belonged to was lost.

examples:
  postdate table adopt --table s3://bucket/table --data ./new-data --dry-run     what would be delivered, and what not
  postdate table adopt --table s3://bucket/table --data ./new-data
  postdate up --data ./new-data --table s3://bucket/table

No broker and no pipeline may run on the folder or the table. What only the lost folder had is lost: messages that no
pipeline had taken, queues with what was delivered, groups and their offsets. What was promoted last is delivered again.

exit codes: 0 adopted, or shown, 2 wrong usage, 3 refused: the folder has a log of its own, the table cannot be read or
does not say which queue is which, 130 interrupted
"""


def add(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    summary = "make a new data folder for a table whose own is lost"
    verb = verbs.add_parser("adopt", help=summary, allow_abbrev=False)
    describe(verb, f"{summary[0].upper()}{summary[1:]}.\n\n{HELP.partition(chr(10) * 2)[2]}")
    verb.add_argument("--table", metavar="URI", required=True, help="the table's folder or URI")
    verb.add_argument("--data", metavar="DIR", default="postdate-data", help="the new folder (default: postdate-data)")
    verb.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    add_json(verb)
    set_run(verb, _adopt, failed=REFUSED)


def _adopt(arguments: argparse.Namespace) -> int:
    require_extra("table", "postdate table adopt")
    keep_files_private()
    from postdate import adoption  # it loads deltalake
    from postdate.config import Limits, Settings
    from postdate.storage.disk import RealDisk

    root = arguments.table.rstrip("/") if "://" in arguments.table else str(Path(arguments.table).resolve())
    disk, settings = RealDisk(arguments.data), Settings()
    if arguments.dry_run:
        found = adoption.look_at(disk, root, settings)
    else:
        found = adoption.adopt(disk, root, settings, arguments.limits or Limits())
    if arguments.json:
        print_json(
            {
                "adopted": not arguments.dry_run, "identity": found.identity, "horizon": found.seen.horizon,
                "deliverable": found.deliverable, "past": found.past, "deleted": found.ownerless,
                "cancels": found.cancels, "beside": found.beside, "written_at_ms": found.written_at_ms,
            }
        )  # fmt: skip
        return OK
    verb = "will be" if arguments.dry_run else "are"
    lines = [(f"{verb} delivered, {topic}", count(number, "message")) for topic, number in found.deliverable.items()]
    lines += [(f"delivered before, {topic}", count(number, "message")) for topic, number in found.past.items()]
    lines += [(f"of a deleted topic, {topic}", count(number, "message")) for topic, number in found.ownerless.items()]
    if found.beside:
        what = "of imports and jobs that no batch had taken in: repeat these imports and jobs"
        lines.append(("not delivered", f"{count(found.beside, 'row')} {what}"))
    lost = (
        f"messages and cancels that no pipeline had taken by {moment(found.written_at_ms)}, queues, groups and offsets"
    )
    print_facts(
        [
            ("table", root), ("belonged to", found.identity), ("delivered up to", moment(found.seen.horizon)), *lines,
            ("cancels that wait", str(found.cancels)), ("lost with the folder", lost),
        ]
    )  # fmt: skip
    if not arguments.dry_run:
        print(f"adopted; start it with: postdate up --data {arguments.data} --table {arguments.table}")
    return OK
