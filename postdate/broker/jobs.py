"""Jobs, as calls: work in bulk that people ask for and a pipeline carries out.

    begin, adopt     an import: its files are written beside the table, then taken into it
    ask              cancel or postpone what a predicate selects
    attempt          the pipeline begins a try, stumbles, leaves, or tries again what was set aside
    decide           the pipeline has selected rows: the fold says which of them still wait
    fail             a job that has changed nothing ends

Each call writes a record to the log; what it changes is in state/jobs.py. A call that comes twice, or for a job that
has moved on, changes nothing and answers where the job is.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from postdate.arrival import OWN
from postdate.broker.sending import refuse_system_topic
from postdate.broker.settings import CurrentSettings
from postdate.broker.writing import Ticket, Writer
from postdate.contract import Selection
from postdate.errors import CorruptSelection, FlowControl, Refused, UsageError
from postdate.state.fold import Fold
from postdate.state.jobs import ATTEMPTS as ATTEMPTS
from postdate.state.jobs import CANCEL, IMPORT, POSTPONE, STUMBLE, Job, JobAnswer
from postdate.storage import selection
from postdate.storage.batch import JOB

OPEN_MAX = 100  # jobs that are not over; each is known to the pipeline in all its details
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_BESIDE = re.compile(r"_(import|job)-[A-Za-z0-9._-]{1,200}\.parquet")
_WHERE_MAX = 16_384
_REASON_MAX = 1_000
_FILE_FIELDS = 7


class JobCalls:
    """Takes in what owners and pipelines say about jobs. All but `verify` is called on the thread that writes to the
    log.
    """

    def __init__(self, fold: Fold, writer: Writer, settings: CurrentSettings) -> None:
        self._fold = fold
        self._writer = writer
        self._settings = settings
        self._decision: Ticket | None = None  # the last one

    @property
    def is_deciding(self) -> bool:
        """Whether a decision is written that is not applied yet."""
        return self._decision is not None and self._decision.answers is None

    def find(self, job_id: str) -> Job:
        """Raises UsageError for an id that no job has, or none any more."""
        job = self._fold.jobs.find(job_id)
        if job is None:
            raise UsageError(f"there is no job {job_id!r:.200}")
        return job

    # -- asking -------------------------------------------------------------------------------------------------

    def begin(self, job_id: str, topic: str, at_ms: int) -> Ticket:
        """Begins an import. The answer is a JobAnswer, of the job of that id where there is one."""
        self._admit(job_id, IMPORT)
        refuse_system_topic(topic)
        self._fold.topics.get(topic)
        return self._write(
            {"call": "begin", "id": job_id, "op": IMPORT, "topic": topic, "where": "", "by_ms": 0}, at_ms
        )

    def ask(self, job_id: str, op: str, where: str, by_ms: int, at_ms: int) -> Ticket:
        """Cancels what a predicate selects, or postpones it by `by_ms`. The answer is a JobAnswer."""
        self._admit(job_id, op)
        if not where.strip() or len(where) > _WHERE_MAX:
            raise UsageError(f"a predicate has {len(where)} characters, expected 1 to {_WHERE_MAX}")
        limit = self._settings.now.delay_ms_max
        if op == POSTPONE and not 0 < by_ms <= limit:
            raise UsageError(f"messages are postponed by {by_ms} ms, expected 1 to delay_ms_max ({limit})")
        body = {"id": job_id, "op": op, "topic": "", "where": where, "by_ms": by_ms if op == POSTPONE else 0}
        return self._write({"call": "ask", "place": False, **body}, at_ms)

    def _admit(self, job_id: str, op: str) -> None:
        if op not in (IMPORT, CANCEL, POSTPONE):
            raise UsageError(f"a job is {op!r:.64}, expected {IMPORT}, {CANCEL} or {POSTPONE}")
        if not _ID.fullmatch(job_id):
            raise UsageError(f"the id of a job is {job_id!r:.200}, expected up to 128 of a-z A-Z 0-9 . _ -")
        known = self._fold.jobs.find(job_id)
        if known is not None and known.op != op:
            raise Refused(f"job {job_id} is known already: it is another kind of job ({known.op})")
        if known is None and sum(not job.is_over for job in self._fold.jobs.all()) >= OPEN_MAX:
            raise FlowControl(f"{OPEN_MAX} jobs are not over yet, the limit; try later")

    def adopt(self, job_id: str, files: Sequence[Any], bad: int, at_ms: int) -> Ticket:
        """Says that an import has written its files: from here on no crash can undo it. The answer is a JobAnswer."""
        job = self.find(job_id)
        if job.op != IMPORT:
            raise Refused(f"job {job_id} is no import")
        plain = [_check_file(file) for file in files]
        rows = sum(file[2] for file in plain)
        return self._write({"call": "adopt", "id": job_id, "files": plain, "rows": rows, "bad": bad}, at_ms)

    def fail(self, job_id: str, reason: str, at_ms: int) -> Ticket:
        """Ends a job that has changed nothing. The answer is a JobAnswer."""
        self.find(job_id)
        return self._write({"call": "fail", "id": job_id, "reason": reason[:_REASON_MAX]}, at_ms)

    # -- carrying out -------------------------------------------------------------------------------------------

    def attempt(self, call: str, epoch: int, number: int, reason: str, at_ms: int) -> Ticket:
        """Notes a try of a pipeline before it begins (`try`), why it failed (`stumble`), that it does not count because
        the pipeline stops (`leave`), or that what was set aside is tried again (`again`). The answer is a JobAnswer.
        """
        assert call in ATTEMPTS, call
        body = {"call": call, "epoch": epoch, "number": number}
        return self._write(body | ({"reason": reason[:_REASON_MAX]} if call == STUMBLE else {}), at_ms)

    def check(self, selected: Selection) -> None:
        """Raises Refused for a decision that comes too late, UsageError for one that names no proper files."""
        for name, _ in selected.parts:
            if not selection.is_name(name) or selection.job_of(name) != selected.number:
                raise UsageError(f"the name of a selection is {name!r:.100}, expected the job's number and more")
        for file in selected.files:
            _check_file(file)
        reason = self._fold.jobs.decision_problem(selected._asdict())
        if reason:
            raise Refused(reason)

    def verify(self, selected: Selection) -> list[dict[str, Any]]:
        """Reads every selection from its first byte to its last and describes it. May run on another thread. Raises
        CorruptSelection.
        """
        return [self._verify_part(name, own) for name, own in selected.parts]

    def _verify_part(self, name: str, own: int) -> dict[str, Any]:
        rows = self._fold.selections.verify(name)
        if not len(rows):
            raise CorruptSelection(f"selection {name} has no row")
        queues = rows["queue"]
        if queues.min() < 0 or queues.max() >= len(self._fold.queues):
            raise CorruptSelection(f"selection {name} has a row for a queue that never existed")
        logged = rows["arrival"][rows["arrival"] < OWN]
        return {
            "name": name, "rows": len(rows), "due_low": int(rows["due"][0]), "due_high": int(rows["due"][-1]),
            "arrival_high": int(logged.max()) if len(logged) else -1, "own": own,
        }  # fmt: skip

    def decide(self, selected: Selection, parts: list[dict[str, Any]], at_ms: int) -> Ticket:
        """Writes a decision; `parts` is what `verify` has returned. The answer is a JobAnswer."""
        self.check(selected)  # the job may have moved on while its files were read
        files = [_check_file(file) for file in selected.files]
        job = self._fold.jobs.get(selected.number)
        has_row = job is not None and job.op == IMPORT
        body = {"epoch": selected.epoch, "number": selected.number, "parts": parts, "files": files}
        self._decision = self._write({"call": "decide", "place": not has_row, **body}, at_ms)
        return self._decision

    def _write(self, body: Mapping[str, Any], at_ms: int) -> Ticket:
        return self._writer.write_system(JOB, body, at_ms)


def require_job(answer: JobAnswer) -> Job:
    """Returns the job that a call was about. Raises Refused for a call that had no effect."""
    if answer.job is None:
        raise Refused(answer.reason)
    return answer.job


def _check_file(plain: Any) -> list[Any]:
    """Returns a file, as table/format.py's File has it. Raises UsageError."""
    is_whole = isinstance(plain, list | tuple) and len(plain) == _FILE_FIELDS and isinstance(plain[0], str)
    if not is_whole or not all(type(number) is int and number >= 0 for number in plain[1:]):
        raise UsageError(f"a file is {plain!r:.200}, expected its path, bytes, rows, and bounds of due and arrival")
    if not _BESIDE.fullmatch(plain[0]):
        raise UsageError(f"a file is named {plain[0]!r:.200}, expected _import- or _job-, then a-z A-Z 0-9 . _ -")
    return list(plain)
