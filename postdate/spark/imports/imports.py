"""Imports: what the driver does for one, shared by the sink and by `postdate import`.

    begin    the broker gives it a number, and says where the table is
    load     executors write files beside the table; nothing is scheduled yet
    adopt    the broker writes down which files count: from here on no crash loses it
    wait     a batch of the pipeline takes them into the table

An import that is given up before it is adopted has changed nothing. The id tells one from another: an import that
begins again answers what became of it, or loads anew where the first try has died.
"""

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from deltalake.exceptions import TableNotFoundError

from postdate.client import admin
from postdate.contract import FAILED, LOADING, JobStatus
from postdate.errors import PipelineFailed, PostdateError, Refused
from postdate.spark.executor.broker_client import BrokerClient
from postdate.spark.imports.columns import Job, Wanted
from postdate.spark.imports.loading import Loaded, Plan
from postdate.table.files import TableFolder, remove_file
from postdate.table.format import MESSAGES, File
from postdate.table.identity import open_table
from postdate.table.merging import edge_ms

_SHOWN_MAX = 20
_AWAY_S = 60.0  # how long a broker may be away while we wait for it


class Import(NamedTuple):
    """An import that has begun. Without a plan there is nothing to load: it was adopted before."""

    job: JobStatus
    plan: Plan | None


class BadRow(NamedTuple):
    """A bad row, counted as people count: from 1, in a file or a part of a frame."""

    file: str
    row: int
    reason: str


class BadRows(PostdateError, ValueError):
    """The fault of the data: some rows can never be scheduled, so nothing is."""


def begin(broker: BrokerClient, job_id: str, topic: str, wanted: Wanted) -> Import:
    """Begins an import, and removes files that an earlier try has left. Raises Refused, TopicNotFound,
    ForeignTable where the table is another broker's: then nothing is written there.
    """
    order = broker.begin_import(job_id, topic)
    if order.job.state != LOADING:
        return Import(order.job, None)
    with suppress(TableNotFoundError):  # nothing is there yet that could be another broker's
        open_table(order.table, order.identity)
    job = Job(job_id, order.job.number, topic, order.queues, order.now_ms, order.delay_ms_max)
    folder = f"{order.table.rstrip('/')}/{MESSAGES}"
    # The broker takes no id that a file could not have in its name.
    plan = Plan(wanted, job, folder, f"_import-{job_id}-", edge_ms(order.now_ms))
    if not order.is_new:
        remove_files(plan)
    return Import(order.job, plan)


def files_of(plan: Plan) -> list[str]:
    """The files of this import beside the table, of all attempts."""
    own = re.compile(rf"{re.escape(plan.stem)}(soon|later)-[0-9a-f]{{32}}\.parquet")
    return [name for name in TableFolder(plan.folder).sizes() if own.fullmatch(name)]


def remove_files(plan: Plan, but: Iterable[str] = ()) -> None:
    place = TableFolder(plan.folder)
    for name in set(files_of(plan)) - set(but):
        remove_file(place, name)


def adopt(broker: BrokerClient, plan: Plan, files: Sequence[File], bad_count: int) -> JobStatus:
    """Hands the files to the pipeline; from here on the import is safe. Raises Refused."""
    names = {file.path for file in files}
    missing = names.difference(TableFolder(plan.folder).sizes())
    if missing:
        raise Refused(f"{min(missing)} is gone: is another import with the id {plan.job.id} running?")
    remove_files(plan, but=names)  # of attempts that Spark has tried again
    job = broker.adopt(plan.job.id, files, bad_count)
    if job.state == FAILED:
        raise Refused(f"import {plan.job.id} was given up meanwhile: {job.reason}")
    return job


def give_up(broker: BrokerClient, plan: Plan, reason: str) -> bool:
    """Ends an import that is not adopted, and returns whether that was so. Leaves an adopted one, whose answer may have
    been lost, as it is. Tells the broker before it removes files: nobody adopts them after that.
    """
    job = broker.find_job(plan.job.id)
    if job.state == LOADING:
        job = broker.fail_job(plan.job.id, reason)
    if job.state != FAILED or job.number != plan.job.number:
        return False
    remove_files(plan)
    return True


def wait(broker: BrokerClient, job_id: str, show: admin.Show | None = None) -> JobStatus:
    """Waits until an import is in the table. Raises PipelineFailed where it fails, Unreachable or TimedOut where the
    broker stays away.
    """
    job = admin.follow_job(broker.addresses, job_id, show, _AWAY_S)
    if job.state == FAILED:
        raise PipelineFailed(f"import {job_id} has failed: {job.reason}")
    return job


# -- what was loaded --------------------------------------------------------------------------------------------


def bad_rows(loaded: Sequence[Loaded]) -> list[BadRow]:
    """The bad rows, counted in their files: the number of a row needs the rows of all blocks before its own."""
    lengths: dict[tuple[str, int], int] = {}
    for part in loaded:
        for file, block, rows in part.blocks:
            lengths[file, block] = lengths.get((file, block), 0) + rows
    before: dict[tuple[str, int], int] = {}
    last, total = "", 0
    for file, block in sorted(lengths):
        total = total if file == last else 0
        before[file, block] = total
        last, total = file, total + lengths[file, block]
    return sorted(
        BadRow(bad.file, before[bad.file, bad.block] + bad.row + 1, bad.reason) for part in loaded for bad in part.bad
    )


def counted(bad_count: int) -> str:
    return f"{bad_count:,} bad row{'' if bad_count == 1 else 's'}"


def bad_lines(bad: list[BadRow], count: int) -> list[str]:
    """Lines for people: the first bad rows, and how many there are."""
    lines = [f"{each.file}, row {each.row}: {each.reason}" for each in bad[:_SHOWN_MAX]]
    if count > len(lines):
        lines.append(f"... and {count - len(lines):,} more")
    return [*lines, f"{counted(count)}: nothing is scheduled."]


def write_bad(path: str, bad: list[BadRow]) -> None:
    """Writes a JSON line for each bad row."""
    with open(path, "w", encoding="utf-8") as lines:
        for each in bad:
            lines.write(json.dumps(each._asdict(), ensure_ascii=False) + "\n")
