"""What the broker, bulk and Spark say to each other, as types that every side imports.

    TableMarks   whose a table is, and which place of the log it has seen: what a pipeline tells when it registers
    State        where broker and pipeline are: what a pipeline asks first
    Stage        what a batch has done: far rows taken, a horizon reached, chunks uploaded
    JobStatus    where a job is, for people and for programs that wait for it
    JobOrder     a job for the pipeline that carries it out
    Selection    what a pipeline has selected for a job
    ImportOrder  an import that may begin: where its files go
    Report       what a batch reports about itself

They travel as JSON in the bodies of requests and answers (docs/protocol.md, "Pipelines" and "Jobs"): `plain` gives a
value that `dump` writes, `read` takes one that `load` has read. A reader ignores fields that it does not know: a newer
peer may add some. The standard library is all this module needs, since it travels to Spark's executors.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard, TypeVar, get_args

from postdate.errors import ProtocolError

LOADING, WAITING, RUNNING, DONE, FAILED = "loading", "waiting", "running", "done", "failed"  # states of a job
IMPORT, CANCEL, POSTPONE = "import", "cancel", "postpone"  # kinds of jobs
ENDED = (DONE, FAILED)

# Codes of the requests that carry all this; wire/requests.py has their fields and answers.
GET_BULK_STATE, REGISTER_PIPELINE, STAGE, REPORT_BATCH, GET_STATUS = 9_802, 9_804, 9_805, 9_806, 9_807
JOB, GET_BULK_TOPIC, GET_BROKER_CLUSTER_INFO = 9_814, 9_820, 106
BULK = "bulk"  # the `master` of a report about what bulk has promoted in place of a pipeline

Plain = Mapping[str, Any]
Figures = dict[str, Any]  # names with texts and numbers
Item = TypeVar("Item")

_NUMBER_END = 1 << 63
_MINUTE_MS = 60_000


# -- JSON -------------------------------------------------------------------------------------------------------


def load(body: bytes, what: str) -> dict[str, Any]:
    """Reads a JSON object. Raises ProtocolError that names `what` cannot be read."""
    try:
        found = json.loads(body)
    except ValueError as error:  # no JSON, or no text at all
        raise ProtocolError(f"{what} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ProtocolError(f"{what} is {found!r:.64}, expected a JSON object")
    return found


def dump(plain: object) -> bytes:
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()


def is_number(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number of 64 bits; True and False are none."""
    return type(value) is int and -_NUMBER_END <= value < _NUMBER_END


class Fields:
    """Reads the fields of a JSON object, each by its type. Raises ProtocolError that names the field."""

    def __init__(self, plain: Plain, what: str) -> None:
        self._plain = plain
        self._what = what

    def value(self, name: str, is_right: Callable[[Any], bool], expected: str) -> Any:
        """Reads a value of any form that a function can tell."""
        value = self._plain.get(name)
        if not is_right(value):
            found = f"{name} is {value!r:.64}" if name in self._plain else f"{name} is missing"
            raise ProtocolError(f"{self._what} cannot be read: {found}, expected {expected}")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        return default if default is not None and name not in self._plain else int(self.value(name, *_NUMBER[:2]))

    def text(self, name: str) -> str:
        """Empty where the field is missing."""
        return str(self.value(name, _is_text, "a text")) if name in self._plain else ""

    def files(self, name: str) -> "tuple[TableFile, ...]":
        return _make_files(self.value(name, *_FILES[:2]))

    def read(self, kind: type[Item]) -> Item:
        """Reads a NamedTuple, each field by its annotation. One that may be None may be missing."""
        found: dict[str, Any] = {}
        for name, annotation in kind.__annotations__.items():
            if annotation is str:
                found[name] = self.text(name)
            elif annotation in _FORMS or self._plain.get(name) is not None:
                is_right, expected, make = _FORMS.get(annotation) or _FORMS[get_args(annotation)[0]]
                found[name] = make(self.value(name, is_right, expected))
        return kind(**found)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_row(value: object, *kinds: Callable[[Any], bool]) -> bool:
    """Whether a value is a list that has one value of each kind."""
    if not isinstance(value, list) or len(value) != len(kinds):
        return False
    return all(is_kind(each) for is_kind, each in zip(kinds, value, strict=True))


def _list_of(is_right: Callable[[Any], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


# -- the pipeline -----------------------------------------------------------------------------------------------


class BatchSize(NamedTuple):
    """How large the next batch may be: this many far rows and bytes of the log, from a far row on."""

    start: int
    rows_max: int
    bytes_max: int


class OpenJob(NamedTuple):
    """A job that waits or runs, and its far row; -1 where it has none before it is decided."""

    number: int
    far: int


class TableMarks(NamedTuple):
    """Whose table it is, and what it knows of that broker's log. A table of an earlier version knows only `far`."""

    identity: str = ""  # of the broker
    far: int = 0  # the table holds the far rows before this one
    position: int = -1  # where a batch of the log begins that the table has seen; -1: none is known
    mark: int = 0  # the checksum of that batch, without its highest bit


NO_MARKS = TableMarks()


class State(NamedTuple):
    """Where broker and pipeline are."""

    now_ms: int
    lead_ms: int
    delay_ms_max: int
    epoch: int  # of the pipeline that registered last; the only one that may stage
    taken: int  # far rows before this one are in the table
    horizon: int  # epoch ms: everything due until then is in the wheel
    far_first: int  # the first far row that is not gone
    far_length: int  # far rows that are durable
    arrival_of_taken: int
    rows_in: int  # that ever came into the table
    rows_out: int  # that ever left it
    rescued: int
    table: str  # where the last pipeline keeps its table, "" for none
    bulk: str  # where bulk listens, "" while none is attached
    commands: tuple[OpenJob, ...]
    gone: tuple[int, ...]  # numbers of the queues of deleted topics
    stop: int | None = None  # where a batch of the size that was asked about ends
    wanted: int | None = None  # the far row up to which a job waits for the table
    select: int | None = None  # the number of the job that may be selected for now
    job_ms_max: int | None = None  # how long a selection may take
    staged: tuple[str, ...] | None = None  # names of staged chunks, for a pipeline that registers
    identity: str = ""  # of the broker
    position: int | None = None  # where the last batch begins that all this follows from
    mark: int | None = None  # its checksum, without the highest bit
    rescue_lead_ms: int | None = None  # others step in where the horizon is not this far ahead
    queues: int | None = None  # how many queue numbers were ever given
    permit: str | None = None  # with which the asker reads everything from bulk; None where bulk asks for none

    def plain(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if value is not None}

    @classmethod
    def read(cls, plain: Plain) -> "State":
        return Fields(plain, "the state of a broker").read(cls)


def horizon_of(now_ms: int, lead_ms: int) -> int:
    """Returns the instant up to which everything is promoted: the lead from now, rounded up to a whole minute."""
    return -(-(now_ms + lead_ms) // _MINUTE_MS) * _MINUTE_MS


class Registration(NamedTuple):
    """A pipeline that begins: where its table is, where its Spark runs, and what the table's marks are."""

    table: str
    master: str
    identity: str = ""
    far: int | None = None
    position: int | None = None
    mark: int | None = None

    @property
    def marks(self) -> TableMarks:
        """What the table knows; nothing where the pipeline does not say."""
        found = {name: getattr(self, name) for name in TableMarks._fields}
        return TableMarks(**{name: value for name, value in found.items() if value is not None})

    @classmethod
    def read(cls, plain: Plain) -> "Registration":
        return Fields(plain, "the registration of a pipeline").read(cls)


class Stage(NamedTuple):
    """What a batch has done: it took far rows, promoted up to a horizon, and uploaded chunks."""

    epoch: int
    far: tuple[int, int]  # `taken` before and after
    horizon: tuple[int, int]  # before and after
    chunks: tuple[str, ...]  # names of files
    rows_in: int  # rows that ever came into the table
    rows_out: int  # rows that this stage takes out of it
    # Rows that bulk brings from files of jobs that no batch has taken in: job, and due until which before and after.
    brought: tuple[tuple[int, int, int], ...] = ()

    def plain(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if value or name != "brought"}

    @classmethod
    def read(cls, plain: Plain) -> "Stage":
        return Fields({"brought": [], **plain}, "a stage").read(cls)


class Report(NamedTuple):
    """What a batch reports about itself. `postdate status` shows it, and the history keeps it."""

    at_ms: int
    batch: int
    epoch: int
    far_from: int
    far_to: int
    horizon: int
    rows_in: int
    promoted: int
    cancelled: int
    chunks: int
    opened_files: int
    files: int
    bytes: int
    forgotten_files: int
    merged_rows: int
    table_files: int
    table_bytes: int
    rescued: int
    backlog: int
    workers: int
    ingest_s: float
    promote_s: float
    stage_s: float
    merge_s: float
    total_s: float
    master: str

    def plain(self) -> Figures:
        return self._asdict()


def read_report(plain: Plain) -> Figures:
    """Reads the figures of a batch. A pipeline of another make may report others than `Report` has; all are flat."""
    for name, value in plain.items():
        if isinstance(value, dict | list):
            raise ProtocolError(f"the report of a batch has {name} = {value!r:.64}, expected a text or a number")
    return dict(plain)


class QueueSpan(NamedTuple):
    """How far a queue of a topic goes, in offsets."""

    id: int
    number: int
    first: int  # that is not gone
    next: int  # that the next message gets
    since: int  # the first that became visible at or after the instant that was asked about


def read_spans(plain: Plain) -> list[QueueSpan]:
    is_right = _list_of(lambda value: _is_row(value, *(is_number for _ in QueueSpan._fields)))
    found = Fields(plain, "the queues of a topic").value("queues", is_right, "a list of five numbers for each queue")
    return [QueueSpan(*each) for each in found]


class TopicQueues(NamedTuple):
    """A topic, and the numbers of its queues by their ids."""

    name: str
    read: int  # how many of its queues may be read, and written
    write: int
    perm: int
    attributes: dict[str, str]
    numbers: list[int]


class DeletedQueue(NamedTuple):
    """A queue of a deleted topic."""

    number: int
    topic: str
    id: int


class NamedQueues(NamedTuple):
    """Which number is which queue, of all numbers that were ever given."""

    topics: list[TopicQueues]
    deleted: list[DeletedQueue]

    @property
    def given(self) -> int:
        """How many numbers were ever given."""
        return len(self.deleted) + sum(len(topic.numbers) for topic in self.topics)

    @classmethod
    def read(cls, plain: Plain) -> "NamedQueues":
        fields = Fields(plain, "the queues of a broker")
        is_topic = (_is_text, is_number, is_number, is_number, _is_object, _list_of(is_number))
        found = fields.value("topics", _list_of(lambda value: _is_row(value, *is_topic)), "a list of topics")
        is_deleted = _list_of(lambda value: _is_row(value, is_number, _is_text, is_number))
        deleted = fields.value("deleted", is_deleted, "a list of queues")
        return cls([TopicQueues(*each) for each in found], [DeletedQueue(*each) for each in deleted])


# -- jobs -------------------------------------------------------------------------------------------------------


class TableFile(NamedTuple):
    """A file beside the table: its size, and the bounds of what it holds."""

    path: str
    bytes: int
    rows: int
    due_low: int
    due_high: int
    arrival_low: int
    arrival_high: int


class JobStatus(NamedTuple):
    """Where a job is."""

    id: str
    number: int
    op: str
    state: str
    topic: str  # of an import
    where: str  # of the others
    by_ms: int
    rows: int
    changed: int
    late: int
    bad: int
    at_ms: int
    ended_at_ms: int
    reason: str  # why it failed
    step: str = ""  # what it does at the moment
    done: int = 0
    total: int = 0
    tries: int | None = None  # that have begun
    aside: bool | None = None  # it is decided, and the table could not follow: `reason` says why

    @property
    def is_over(self) -> bool:
        return self.state in ENDED

    @classmethod
    def read(cls, plain: Plain) -> "JobStatus":
        return Fields(plain, "the state of a job").read(cls)


class OrderPart(NamedTuple):
    """A file of rows that a job has selected."""

    name: str
    own: int  # arrival of its first row when that is brought again, where the job postpones
    late: tuple[int, ...]  # rows of it that came too late

    @classmethod
    def read(cls, plain: Plain) -> "OrderPart":
        return Fields(plain, "a part of a job").read(cls)


class JobOrder(NamedTuple):
    """A job for the pipeline that carries it out."""

    number: int
    id: str
    op: str
    state: str
    where: str
    by_ms: int
    arrival: int  # of its command
    changed: int
    files: tuple[TableFile, ...]
    parts: tuple[OrderPart, ...]
    brought_until_ms: int | None = None  # bulk has brought the rows of its files due until then; -1 = none
    loading: tuple[int, ...] | None = None  # numbers of earlier imports that came after its command
    aside: bool | None = None  # the table could not follow
    refusal: str = ""  # why there is nothing to try any more

    def plain(self) -> dict[str, Any]:
        found = self._asdict() | {"parts": [part._asdict() for part in self.parts]}
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def read(cls, plain: Plain) -> "JobOrder":
        return Fields(plain, "the order for a job").read(cls)


class Selection(NamedTuple):
    """What a pipeline has selected for a job."""

    epoch: int
    number: int
    parts: tuple[tuple[str, int], ...]  # names of files, and the arrival of the first row when that is brought again
    files: tuple[TableFile, ...] = ()  # beside the table: the rows as they are brought again, where the job postpones

    @classmethod
    def read(cls, plain: Plain) -> "Selection":
        return Fields({"files": [], **plain}, "what is selected for a job").read(cls)


class ImportOrder(NamedTuple):
    """An import that may begin, or one of the same id that has begun before."""

    job: JobStatus
    is_new: bool
    table: str
    now_ms: int
    delay_ms_max: int
    queues: tuple[tuple[int, int], ...]  # id and number of those that may be written
    identity: str = ""  # of the broker

    def plain(self) -> dict[str, Any]:
        return self._asdict() | {"job": self.job._asdict()}

    @classmethod
    def read(cls, plain: Plain) -> "ImportOrder":
        return Fields(plain, "the order for an import").read(cls)


def read_jobs(plain: Plain) -> list[JobStatus]:
    found = Fields(plain, "the list of jobs").value("jobs", _list_of(_is_object), "a list of objects")
    return [JobStatus.read(each) for each in found]


def plain_files(files: Iterable[tuple[Any, ...]]) -> list[list[Any]]:
    """Files as JSON lists."""
    return [list(file) for file in files]


# -- forms of fields, by their annotation -----------------------------------------------------------------------

_Form = tuple[Callable[[Any], bool], str, Callable[[Any], Any]]  # what is right, what was expected, what it becomes


def _is_pair(value: object) -> bool:
    return _is_row(value, is_number, is_number)


def _make_files(found: Iterable[Iterable[Any]]) -> tuple[TableFile, ...]:
    return tuple(TableFile(*file) for file in found)


_NUMBER: _Form = (is_number, "a whole number", int)
_PAIRS = (_list_of(_is_pair), "a list of pairs of whole numbers")
_FILES: _Form = (
    _list_of(lambda value: _is_row(value, _is_text, *(is_number for _ in TableFile._fields[1:]))),
    "a list of files, each with its path, bytes, rows, and bounds of due and arrival",
    _make_files,
)
_FORMS: dict[Any, _Form] = {
    int: _NUMBER,
    str: (_is_text, "a text", str),
    bool: (lambda value: isinstance(value, bool), "true or false", bool),
    tuple[int, int]: (_is_pair, "two whole numbers: from and to", tuple),
    tuple[int, ...]: (_list_of(is_number), "a list of whole numbers", tuple),
    tuple[str, ...]: (_list_of(_is_text), "a list of names", tuple),
    tuple[tuple[int, int, int], ...]: (
        _list_of(lambda value: _is_row(value, is_number, is_number, is_number)),
        "a list of three whole numbers each",
        lambda found: tuple(map(tuple, found)),
    ),
    tuple[tuple[int, int], ...]: (*_PAIRS, lambda found: tuple(map(tuple, found))),
    tuple[OpenJob, ...]: (*_PAIRS, lambda found: tuple(OpenJob(*pair) for pair in found)),
    tuple[tuple[str, int], ...]: (
        _list_of(lambda value: _is_row(value, _is_text, is_number)),
        "a list of names and arrivals",
        lambda found: tuple(map(tuple, found)),
    ),
    tuple[TableFile, ...]: _FILES,
    tuple[OrderPart, ...]: (_list_of(_is_object), "a list of objects", lambda found: tuple(map(OrderPart.read, found))),
    JobStatus: (_is_object, "an object", JobStatus.read),
}
