"""Imports: what the driver does of one, by the calls of the gate. Shared by the sink and by `postdate import`.

    begin    the broker gives it a number, and says where the table is
    load     executors write files beside the table; nothing is scheduled yet
    adopt    the broker writes down which files count: from here on no crash loses it
    wait     a batch of the pipeline takes them into the table

Given up before it is adopted, an import has changed nothing. The id tells one from another: begun again, it answers
what became of it, or is loaded anew where the first try has died.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from pyarrow import flight

from postdate.errors import PipelineFailed, PostdateError, Refused
from postdate.spark.executor.bulk_client import Gate
from postdate.spark.imports.columns import Job, Wanted
from postdate.spark.imports.loading import Bad, Loaded, Plan
from postdate.state.jobs import DONE, FAILED, LOADING
from postdate.table.files import TableFolder
from postdate.table.format import MESSAGES, File
from postdate.table.merging import edge_ms

_POLL_S = 0.2
_SHOWN_MAX = 20
_AWAY_S = 60.0  # how long a broker may be away while we wait for it


class Begun(NamedTuple):
    """An import that was begun. Without a plan there is nothing to load: it was adopted before."""

    job: dict[str, Any]
    plan: Plan | None


class BadRow(NamedTuple):
    """As people count: from 1, in a file or a part of a frame."""

    file: str
    row: int
    reason: str


class BadRows(PostdateError, ValueError):
    """The fault of whoever made the data: rows that can never be scheduled. Nothing was."""


def begin(gate: Gate, job_id: str, topic: str, wanted: Wanted) -> Begun:
    """Raises Refused. Files that an earlier try has left are removed."""
    told = gate.begin({"id": job_id, "op": "import", "topic": topic})
    job = told["job"]
    if job["state"] != LOADING:
        return Begun(job, None)
    queues = tuple((queue_id, number) for queue_id, number in told["queues"])
    known = Job(job_id, job["number"], topic, queues, told["now_ms"], told["delay_ms_max"])
    folder = f"{told['table'].rstrip('/')}/{MESSAGES}"
    # The broker takes no id that a file could not have in its name.
    plan = Plan(wanted, known, folder, f"_import-{job_id}-", edge_ms(told["now_ms"]))
    if not told["is_new"]:
        remove_files(plan)
    return Begun(job, plan)


def files_of(plan: Plan) -> list[str]:
    """The files that lie beside the table for this import, whichever attempt wrote them."""
    own = re.compile(rf"{re.escape(plan.stem)}(soon|later)-[0-9a-f]{{32}}\.parquet")
    return [name for name in TableFolder(plan.folder).sizes() if own.fullmatch(name)]


def remove_files(plan: Plan, but: Iterable[str] = ()) -> None:
    place = TableFolder(plan.folder)
    for name in set(files_of(plan)) - set(but):
        place.remove(name)


def adopt(gate: Gate, plan: Plan, files: Sequence[File], bad_count: int) -> dict[str, Any]:
    """From here on the import is safe. Raises Refused."""
    names = {file.path for file in files}
    missing = names.difference(TableFolder(plan.folder).sizes())
    if missing:
        raise Refused(f"{min(missing)} is gone: is another import with the id {plan.job.id} running?")
    remove_files(plan, but=names)  # of attempts that Spark has tried again
    job = gate.adopt(plan.job.id, [list(file) for file in files], bad_count)
    if job["state"] == FAILED:
        raise Refused(f"import {plan.job.id} was given up meanwhile: {job['reason']}")
    return job


def give_up(gate: Gate, plan: Plan, reason: str) -> bool:
    """Ends an import that has not been adopted, and says whether it was one. What was adopted is left as it is, should
    its answer have been lost. The broker is told before files go: nobody adopts them any more.
    """
    job = gate.job(plan.job.id)
    if job["state"] == LOADING:
        job = gate.fail(plan.job.id, reason)
    if job["state"] != FAILED or job["number"] != plan.job.number:
        return False
    remove_files(plan)
    return True


def wait(gate: Gate, job_id: str, look: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The job when it has ended. Raises PipelineFailed where it has failed, FlightError where the broker stays away."""
    away_from: float | None = None
    while True:
        try:
            job = gate.job(job_id)
            away_from = None
        except flight.FlightError:
            away_from = away_from or time.monotonic()
            if time.monotonic() - away_from > _AWAY_S:
                raise
        else:
            if job["state"] == FAILED:
                raise PipelineFailed(f"import {job_id} has failed: {job['reason']}")
            if job["state"] == DONE:
                return job
            look(job)
        time.sleep(_POLL_S)


# -- what was loaded --------------------------------------------------------------------------------------------


def bad_rows(loaded: Sequence[Loaded]) -> list[BadRow]:
    """Those that were kept, counted in their files: a row's number needs the rows of all blocks before its own."""
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
    bad = [each for part in loaded for each in part.bad]
    return sorted(_counted(each, before) for each in bad)


def _counted(bad: Bad, before: dict[tuple[str, int], int]) -> BadRow:
    return BadRow(bad.file, before[bad.file, bad.block] + bad.row + 1, bad.reason)


def counted(bad_count: int) -> str:
    return f"{bad_count:,} bad row{'' if bad_count == 1 else 's'}"


def bad_lines(bad: list[BadRow], count: int) -> list[str]:
    """For people: the first of them, and how many there are."""
    lines = [f"{each.file}, row {each.row}: {each.reason}" for each in bad[:_SHOWN_MAX]]
    if count > len(lines):
        lines.append(f"... and {count - len(lines):,} more")
    return [*lines, f"{counted(count)}: nothing is scheduled."]


def write_bad(path: str, bad: list[BadRow]) -> None:
    """A JSON line for each."""
    with open(path, "w", encoding="utf-8") as lines:
        for each in bad:
            lines.write(json.dumps(each._asdict(), ensure_ascii=False) + "\n")
