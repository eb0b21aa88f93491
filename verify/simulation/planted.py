"""Planted histories: the races that the rules of the log exist for, each written as a history.

`seen` and `unseen` name messages (m1, m2, ... in the order of sending) that must, or must not, have reached a
consumer at the end. If a power loss decides (`power`), the history runs with many dice and only the model judges.
"""

from typing import NamedTuple

from verify.simulation.model import Broken
from verify.simulation.world import Op, World


class Planted(NamedTuple):
    """A history with a name, and messages that it must show or hide."""

    name: str
    history: tuple[Op, ...]
    seen: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()


_NEAR = Op("send", (3, 1_000, 0, 0, 1))  # due in a second
_FAR = Op("send", (3, 8_000, 0, 0, 1))  # due in eight: the lead is five
_ONCE, _ONCE_OTHER = (Op("send_once", (0, is_other, 3, 8_000, 0)) for is_other in (0, 1))  # far, body or another
_HALF, _FAR_HALF = (Op("half", (form, 8_000, 0, 0)) for form in (0, 3))  # of a transaction: at once, in eight seconds
_COMMIT, _ROLL_BACK, _COMMIT_TWICE = (Op("end", (0, way)) for way in range(3))
_FLUSH = Op("flush")
_CANCEL_FIRST = Op("cancel", (0, 0))
_POSTPONE = Op("job", (0, 2, 5_000))  # messages with the key of the first one, by five seconds
_CANCEL_ALL = Op("job", (0, 2, 0))
_TAKE = Op("read", (9,))
_SELECT = Op("select", (4,))  # try, upload, decide, wait
_DECIDED = (_TAKE, Op("stage", (0,)), _SELECT)  # once the table has all that came before the job
_FOLLOWED = (*_DECIDED, _TAKE)

PLANTED = (
    # -- ids: the second send is answered as the first, or a crash has lost the first
    Planted(
        "a second send after a crash",
        (_ONCE, _FLUSH, Op("snapshot", (1,)), _ONCE, Op("kill"), _ONCE, _ONCE_OTHER, Op("close"), _ONCE,
         Op("pass", (20_000,)), _ONCE),
        seen=("m1",),
    ),
    Planted("a second send beside the first, and power is lost", (_ONCE, _ONCE, Op("power", (0,)), _ONCE, _FLUSH)),
    Planted(
        "an id that is used again after its window",
        (_ONCE, _FLUSH, Op("pass", (45_000,)), _ONCE_OTHER, _FLUSH, Op("kill"), _ONCE, Op("pass", (20_000,))),
        seen=("m1", "m2"),
    ),
    # It is longer than the log is kept: the segment stays, and so does the receipt.
    Planted(
        "a second send when the log without ids is gone",
        (_ONCE, *[Op("send", (0, 0, 0, 0, 30)), _FLUSH] * 8, Op("snapshot", (1,)), Op("send", (0, 0, 0, 0, 30)), _FLUSH,
         Op("snapshot", (2,)), Op("pass", (40_000,)), Op("retain"), _ONCE, Op("kill"), _ONCE),
        seen=("m1",),
    ),
    Planted(
        "a second send of what was moved",
        (_ONCE, _FLUSH, Op("move", (0, 0, 3_000)), _FLUSH, _ONCE, Op("pass", (20_000,)), Op("kill"), _ONCE),
        seen=("m1",),
    ),
    # -- transactions: of all ends one counts, whatever a crash leaves of them
    Planted(
        "a commit whose answer is lost with power",
        (_HALF, _FLUSH, _COMMIT, Op("power", (0,)), _COMMIT_TWICE, _FLUSH, Op("kill")),
        seen=("m1",),
    ),
    Planted(
        "a commit and a rollback, and power is lost",
        (_HALF, _FLUSH, _COMMIT, _ROLL_BACK, Op("power", (0,)), _COMMIT),
    ),
    Planted(
        "a rollback and a commit, and power is lost",
        (_HALF, _FLUSH, Op("end", (1, 3)), Op("power", (0,)), _COMMIT),
    ),
    Planted("a half that is lost with power", (_HALF, Op("power", (0,)), Op("checks", (0, 0)), _FLUSH)),
    Planted(
        "a half that is older than the log",
        (_HALF, *[Op("send", (0, 0, 0, 0, 30)), _FLUSH] * 8, Op("snapshot", (1,)), Op("send", (0, 0, 0, 0, 30)), _FLUSH,
         Op("snapshot", (2,)), Op("pass", (40_000,)), Op("retain"), Op("kill"), _COMMIT, _FLUSH, Op("snapshot", (3,)),
         Op("kill")),
        seen=("m1",),
    ),
    Planted(
        "a half that is given up after three checks, and committed",
        (_HALF, _FLUSH, *[Op("pass", (7_000,)), Op("checks", (2, 0)), _FLUSH] * 5, Op("snapshot", (1,)), Op("kill"),
         Op("checks", (0, 0)), _COMMIT, _FLUSH),
        seen=("m1",),
    ),
    # Its delay begins with the commit: it is far then, and rescued from there.
    Planted(
        "a far message of a commit",
        (_FAR_HALF, _FLUSH, Op("pass", (20_000,)), _COMMIT, Op("power", (0,)), _COMMIT, _FLUSH, Op("snapshot", (1,)),
         Op("pass", (7_000,)), Op("kill"), Op("pass", (20_000,))),
        seen=("m1",),
    ),
    Planted(
        "a commit that goes through the table",
        (_FAR_HALF, _FLUSH, _COMMIT, _FLUSH, Op("register"), Op("read", (9,)), Op("stage", (20_000,)), Op("kill"),
         Op("pass", (20_000,))),
        seen=("m1",),
    ),
    Planted(
        "a committed message that is moved",
        (_FAR_HALF, _FLUSH, _COMMIT, _FLUSH, Op("move", (0, 0, 3_000)), _FLUSH, _COMMIT, Op("kill"),
         Op("pass", (30_000,))),
        seen=("m1",),
    ),
    Planted("a half whose topic is deleted", (_HALF, _FLUSH, Op("delete", (0,)), _COMMIT, _FLUSH, Op("kill"), _COMMIT)),
    # -- cancels and fires
    # The cancel and the fire are written, and neither is on disk: at most one of them may survive as true.
    Planted(
        "an unflushed cancel before a fire",
        (_NEAR, _FLUSH, _CANCEL_FIRST, Op("step", (1_500,)), Op("advance"), Op("power", (0,))),
    ),
    Planted(
        "a flushed cancel before a fire",
        (_NEAR, _FLUSH, _CANCEL_FIRST, _FLUSH, Op("step", (1_500,)), Op("advance"), Op("power", (0,))),
        unseen=("m1",),
    ),
    Planted(
        "a key used again after its cancel",
        (_NEAR, _FLUSH, _CANCEL_FIRST, _FLUSH, Op("resend", (0,)), _FLUSH, Op("pass", (2_000,))),
        seen=("m2",),
        unseen=("m1",),
    ),
    Planted(
        "a far key used again after its cancel",
        (_FAR, _FLUSH, _CANCEL_FIRST, _FLUSH, Op("resend", (0,)), _FLUSH, Op("pass", (10_000,))),
        seen=("m2",),
        unseen=("m1",),
    ),
    Planted(
        "a clock stepping back across a restart",
        (_NEAR, _NEAR, Op("pass", (2_000,)), Op("step", (-20_000,)), Op("kill"), _NEAR, Op("pass", (40_000,))),
        seen=("m1", "m2", "m3"),
    ),
    Planted(
        "a rescue between a batch's read and its stage",
        (_FAR, _FLUSH, Op("register"), Op("read", (9,)), Op("pass", (3_500,)), Op("stage", (20_000,)),
         Op("pass", (20_000,))),
        seen=("m1",),
    ),
    # The horizon passes what was rescued while its row is still untaken: the stage that takes it must drop it.
    Planted(
        "a rescue that is needed after the horizon has passed it",
        (Op("send", (3, 90_000, 1, 0, 1)), _FAR, _FLUSH, Op("register"), Op("pass", (3_500,)),
         Op("read", (1,)), Op("stage", (20_000,)), Op("read", (9,)), Op("stage", (30_000,)), Op("pass", (100_000,))),
        seen=("m1", "m2"),
    ),
    # Spark has message and cancel, then it is away: the rescue finds the message in the far queue once more.
    Planted(
        "a rescue of what was taken and cancelled",
        (_FAR, _FLUSH, _CANCEL_FIRST, _FLUSH, Op("register"), Op("read", (9,)), Op("stage", (0,)),
         Op("pass", (20_000,))),
        unseen=("m1",),
    ),
    # Spark has taken the message and not yet the cancel when the due passes; a bounded batch brings the message late.
    Planted(
        "a cancel that Spark takes after its message's due",
        (_FAR, _FLUSH, Op("register"), Op("read", (1,)), _CANCEL_FIRST, _FLUSH, Op("stage", (0,)),
         Op("pass", (10_000,)),
         Op("stage", (20_000,)), Op("pass", (20_000,))),
        unseen=("m1",),
    ),
    # The first batch is lost and the second survives: it must not appear when the first one's place is filled again.
    Planted(
        "a later batch survives an earlier one",
        (_NEAR, _NEAR, Op("power", (0,)), _NEAR, _FLUSH, Op("kill"), Op("pass", (2_000,))),
        seen=("m3",),
    ),
    Planted(
        "a cancel between a batch's read and its stage",
        (_FAR, _FLUSH, Op("register"), Op("read", (9,)), _CANCEL_FIRST, _FLUSH, Op("stage", (20_000,)),
         Op("pass", (20_000,))),
        unseen=("m1",),
    ),
    # Its rows are in the table, and it dies before the stage: the next one goes on from what the table knows.
    Planted(
        "a pipeline that dies between table and stage",
        (_FAR, _FLUSH, Op("register"), Op("read", (9,)), Op("die", (0,)), Op("register", (1,)), Op("read", (9, 1)),
         Op("stage", (20_000, 1)), Op("pass", (20_000,))),
        seen=("m1",),
    ),
    Planted(
        "a pipeline that dies between upload and stage",
        (_FAR, _FLUSH, Op("register"), Op("read", (9,)), Op("upload", (20_000,)), Op("register", (1,)),
         Op("stage", (20_000, 1)), Op("pass", (20_000,))),
        seen=("m1",),
    ),
    # The old one lives: the broker refuses its stage, the table its commit.
    Planted(
        "two pipelines",
        (_FAR, _FLUSH, Op("register"), Op("read", (9,)), Op("register", (1,)), Op("stage", (20_000, 0)),
         Op("read", (9, 1)), Op("register"), Op("stage", (20_000, 1)), Op("read", (9,)), Op("stage", (20_000,)),
         Op("pass", (20_000,))),
        seen=("m1",),
    ),
    Planted(
        "a stage that is overtaken while its chunks are read",
        (_FAR, _FLUSH, Op("register"), Op("read", (9,)), Op("begin_stage", (20_000,)), Op("stage", (20_000,)),
         Op("end_stage"), Op("pass", (20_000,))),
        seen=("m1",),
    ),
    Planted(
        "a pipeline that serves, is away, and serves again",
        (Op("serve", (3,)), _FAR, Op("serve", (2,)), _FAR, Op("die", (0,)), _FAR, Op("pass", (30_000,)), _FAR,
         Op("serve", (5,)), Op("pass", (20_000,))),
        seen=("m1", "m2", "m3", "m4"),
    ),
    # The table has it and is asked when the stage has brought it into the wheel, or a rescue has left it out.
    Planted(
        "a cancel that is answered after the stage",
        (_FAR, _FLUSH, Op("register"), Op("read", (9,)), Op("stage", (0,)), _CANCEL_FIRST, _FLUSH,
         Op("stage", (20_000,)), Op("ask_table"), Op("pass", (20_000,))),
        unseen=("m1",),
    ),
    Planted(
        "a cancel that is answered after the rescue",
        (_FAR, _FLUSH, Op("register"), Op("read", (9,)), Op("stage", (0,)), _CANCEL_FIRST, _FLUSH,
         Op("pass", (20_000,)), Op("ask_table")),
        unseen=("m1",),
    ),
    Planted(
        "a cancel while a snapshot is written",
        (_NEAR, _FLUSH, Op("snapshot", (1,)), _CANCEL_FIRST, _FLUSH, Op("snapshot", (2,)), Op("kill"),
         Op("pass", (2_000,))),
    ),
    # -- jobs
    Planted(
        "a message that is postponed out of the wheel",
        (_NEAR, _FLUSH, _POSTPONE, _FLUSH, Op("register"), *_FOLLOWED, Op("stage", (20_000,)), Op("pass", (20_000,))),
        seen=("m1",),
    ),
    # What is postponed has no row in the far queue: the tombstone must wait for the stage that takes the command.
    Planted(
        "a cancel of what a job has postponed, and its due passes before the stage",
        (_NEAR, _FLUSH, _POSTPONE, _FLUSH, Op("register"), *_FOLLOWED, _CANCEL_FIRST, _FLUSH, Op("pass", (10_000,)),
         Op("stage", (20_000,)), Op("pass", (20_000,))),
        unseen=("m1",),
    ),
    Planted(
        "a cancel of what a job has postponed to before the horizon",
        (Op("register"), Op("stage", (20_000,)), _NEAR, _FLUSH, _POSTPONE, _FLUSH, *_FOLLOWED, _CANCEL_FIRST, _FLUSH,
         Op("pass", (10_000,)), Op("stage", (20_000,)), Op("pass", (20_000,))),
        unseen=("m1",),
    ),
    # The decision is written and moves the message, the cancel comes when it is not applied yet.
    Planted(
        "a cancel behind a decision that is not durable",
        (_FAR, _FLUSH, _POSTPONE, _FLUSH, Op("register"), *_DECIDED[:2], Op("select", (3,)), _CANCEL_FIRST, _FLUSH,
         _SELECT, _TAKE, Op("stage", (20_000,)), Op("pass", (20_000,))),
        unseen=("m1",),
    ),
    Planted(
        "power is lost behind a decision",
        (_FAR, _NEAR, _FLUSH, _POSTPONE, _FLUSH, Op("register"), *_DECIDED, Op("power", (0,)),
         Op("register", (1,)), Op("read", (9, 1)), Op("stage", (20_000, 1)), Op("pass", (20_000,))),
        seen=("m1", "m2"),
    ),
    # Its parts are forgotten at once; a replay from the older snapshot decides it once more.
    Planted(
        "a job that is over before the older snapshot knows of it",
        (_NEAR, _FLUSH, Op("snapshot", (1,)), _POSTPONE, _FLUSH, Op("snapshot", (1,)), Op("serve", (5,)), Op("retain"),
         Op("spoil", (7,)), Op("pass", (20_000,))),
        seen=("m1",),
    ),
    Planted(
        "a job that is over while the log is whole",
        (_NEAR, _FLUSH, Op("register"), Op("job", (0, 2, 9_000)), Op("read", (9,)), Op("pass", (10_000,)),
         Op("stage", (20_000,)), Op("snapshot", (669641591,)), Op("snapshot", (826947551,)), Op("retain")),
        seen=("m1",),
    ),
    # Its handle has the first due; what the first job has moved is passed long before the second due comes.
    Planted(
        "a cancel of what two jobs have postponed",
        (_NEAR, _FLUSH, _POSTPONE, _FLUSH, Op("register"), *_FOLLOWED, Op("job", (1, 2, 60_000)), _FLUSH,
         *_FOLLOWED, Op("stage", (20_000,)), Op("pass", (10_000,)), Op("stage", (80_000,)), _CANCEL_FIRST, _FLUSH,
         Op("pass", (80_000,))),
        unseen=("m1",),
    ),
    # The table has not followed when the message would be rescued, or staged.
    Planted(
        "a rescue of what a job has cancelled",
        (_FAR, _FLUSH, _CANCEL_ALL, _FLUSH, Op("register"), *_DECIDED, Op("die", (0,)), Op("pass", (20_000,))),
        unseen=("m1",),
    ),
    Planted(
        "a stage of what a job has cancelled and the table has not followed",
        (_FAR, _FLUSH, _CANCEL_ALL, _FLUSH, Op("register"), *_DECIDED, Op("stage", (20_000,)),
         Op("pass", (20_000,))),
        unseen=("m1",),
    ),
    Planted(
        "a decision that another pipeline follows",
        (_FAR, _FLUSH, _POSTPONE, _FLUSH, Op("register"), *_DECIDED, Op("register", (1,)), *_FOLLOWED,
         Op("kill"), Op("read", (9, 1)), Op("stage", (20_000, 1)), Op("pass", (20_000,))),
        seen=("m1",),
    ),
    Planted(
        "an import that a job postpones",
        (Op("import", (0, 8_000, 0, 0, 1)), Op("adopt", (0,)), _FLUSH, _POSTPONE, _FLUSH, Op("register"),
         *_FOLLOWED, Op("stage", (30_000,)), Op("pass", (30_000,))),
        seen=("m1",),
    ),
    # It is in the table by then; the job is not failed, or what it brought must not be seen.
    Planted(
        "an import that is withdrawn when a pipeline has adopted it",
        (Op("import", (0, 8_000, 0, 0, 1)), Op("adopt", (0,)), _FLUSH, Op("register"), _TAKE, Op("fail", (0,)),
         _FLUSH, Op("stage", (30_000,)), Op("pass", (30_000,))),
        seen=("m1",),
    ),
    # Bulk stands in for a pipeline that is away, which comes back with the same rows.
    Planted(
        "an import that only the table has, while the pipeline is away",
        (Op("import", (0, 8_000, 0, 0, 1)), Op("adopt", (0,)), _FLUSH, Op("register"), _TAKE, Op("stage", (0,)),
         Op("die", (0,)), Op("away", (3,)), Op("serve", (2,))),
        seen=("m1",),
    ),
    Planted(
        "an import that no batch has taken in, while the pipeline is away",
        (Op("register"), Op("import", (0, 8_000, 0, 0, 1)), Op("adopt", (0,)), _FLUSH, Op("away", (3,)), Op("kill"),
         Op("serve", (2,))),
        seen=("m1",),
    ),
    Planted(
        "rows of an import that bulk brings between a batch's read and its stage",
        (Op("register"), Op("import", (0, 8_000, 0, 0, 1)), Op("adopt", (0,)), _FLUSH, _TAKE,
         Op("bulk", (20_000,)), Op("stage", (30_000,)), Op("pass", (20_000,))),
        seen=("m1",),
    ),
    Planted(
        "rows of an import that a batch stages while bulk reads them",
        (Op("register"), Op("stage", (20_000,)), Op("import", (0, 8_000, 0, 0, 1)), Op("adopt", (0,)), _FLUSH,
         Op("begin_bulk", (0, 1)), _TAKE, Op("stage", (30_000,)), Op("end_bulk"), Op("pass", (20_000,))),
        seen=("m1",),
    ),
    Planted(
        "two looks of bulk at the same rows of an import",
        (Op("register"), Op("stage", (20_000,)), Op("import", (0, 8_000, 0, 0, 1)), Op("adopt", (0,)), _FLUSH,
         Op("begin_bulk", (0, 1)), Op("bulk", (0,)), Op("end_bulk"), Op("pass", (20_000,))),
        seen=("m1",),
    ),
    Planted(
        "an import that is withdrawn while bulk reads it",
        (Op("register"), Op("stage", (20_000,)), Op("import", (0, 8_000, 0, 0, 1)), Op("adopt", (0,)), _FLUSH,
         Op("begin_bulk", (0, 1)), Op("fail", (0,)), _FLUSH, Op("end_bulk"), Op("serve", (3,))),
        unseen=("m1",),
    ),
    Planted(
        "an import that is withdrawn when bulk has brought it",
        (Op("register"), Op("import", (0, 8_000, 0, 0, 1)), Op("adopt", (0,)), _FLUSH, Op("bulk", (20_000,)),
         Op("fail", (0,)), _FLUSH, Op("pass", (10_000,))),
        seen=("m1",),
    ),
    Planted(
        "postponed messages that the table has not followed, while the pipeline is away",
        (_FAR, _FLUSH, _POSTPONE, _FLUSH, Op("register"), *_DECIDED, Op("die", (0,)), Op("away", (4,)),
         Op("serve", (2,))),
        seen=("m1",),
    ),
    Planted(
        "a cancel of what bulk has brought",
        (Op("register"), Op("import", (0, 8_000, 0, 0, 1)), Op("adopt", (0,)), _FLUSH, Op("bulk", (20_000,)),
         _CANCEL_FIRST, _FLUSH, _TAKE, Op("stage", (30_000,)), Op("pass", (20_000,))),
        unseen=("m1",),
    ),
    Planted(
        "a job that postpones what bulk has brought and shown",
        (Op("register"), Op("import", (0, 8_000, 0, 0, 1)), Op("adopt", (0,)), _FLUSH, Op("bulk", (9_000,)),
         _POSTPONE, _FLUSH, Op("pass", (9_000,)), *_FOLLOWED, Op("stage", (30_000,)), Op("pass", (30_000,))),
        seen=("m1",),
    ),
    # It selects while promotion goes on: what was found in the table is in the wheel when it is decided.
    Planted(
        "a stage between the looks into table and wheel",
        (_FAR, _FLUSH, _POSTPONE, _FLUSH, Op("register"), *_DECIDED[:2], Op("select", (1,)), Op("stage", (20_000,)),
         _SELECT, _TAKE, Op("stage", (20_000,)), Op("pass", (20_000,))),
        seen=("m1",),
    ),
    Planted(
        "a stage between a selection and its decision",
        (_FAR, _FLUSH, _CANCEL_ALL, _FLUSH, Op("register"), *_DECIDED[:2], Op("select", (2,)), Op("stage", (20_000,)),
         _SELECT, _TAKE, Op("stage", (20_000,)), Op("pass", (20_000,))),
        unseen=("m1",),
    ),
    # The table takes the cancel while the job selects: its tombstone must be there when the job is decided.
    Planted(
        "a cancel that the table takes during a selection",
        (_FAR, _FLUSH, _POSTPONE, _FLUSH, Op("register"), *_DECIDED[:2], Op("select", (2,)), _CANCEL_FIRST, _FLUSH,
         _TAKE, Op("stage", (0,)), _SELECT, _TAKE, Op("stage", (20_000,)), Op("pass", (20_000,))),
        unseen=("m1",),
    ),
    Planted(
        "an import that comes during a selection is not for it",
        (_FAR, _FLUSH, Op("import", (0, 8_000, 0, 0, 1)), _CANCEL_ALL, _FLUSH, Op("register"), *_DECIDED[:2],
         Op("adopt", (0,)), _FLUSH, _TAKE, Op("stage", (0,)), _SELECT, _TAKE, Op("stage", (20_000,)),
         Op("pass", (20_000,))),
        seen=("m2",),
        unseen=("m1",),
    ),
    # -- tries
    Planted(
        "a job whose tries all fail changes nothing",
        (_FAR, _FLUSH, _CANCEL_ALL, _FLUSH, Op("register"), Op("fail_tries", (3,)), *_DECIDED, Op("serve", (4,))),
        seen=("m1",),
    ),
    Planted(
        "a job that kills three pipelines changes nothing",
        (_FAR, _FLUSH, _CANCEL_ALL, _FLUSH, Op("register"), *_DECIDED[:2],
         *(Op("select", (2,)), Op("die", (0,)), Op("register")) * 3, Op("serve", (4,))),
        seen=("m1",),
    ),
    Planted(
        "a pipeline that is stopped in order uses no try",
        (_FAR, _FLUSH, _CANCEL_ALL, _FLUSH, Op("register"), *_DECIDED[:2],
         *(Op("select", (2,)), Op("leave", (0,)), Op("register")) * 3, Op("serve", (4,))),
        unseen=("m1",),
    ),
    Planted(
        "a withdrawn job is not decided",
        (_FAR, _FLUSH, _CANCEL_ALL, _FLUSH, Op("register"), *_DECIDED[:2], Op("select", (2,)), Op("fail", (0,)), _FLUSH,
         _SELECT, _TAKE, Op("stage", (20_000,)), Op("pass", (20_000,))),
        seen=("m1",),
    ),
    # The table cannot follow; what the job has cancelled stays away, others are promoted, and the next start follows.
    Planted(
        "a decided job that is set aside",
        (_FAR, Op("send", (3, 8_000, 1, 0, 1)), _FLUSH, _CANCEL_ALL, _FLUSH, Op("register"), *_DECIDED,
         Op("fail_tries", (3,)), *(_TAKE,) * 4, Op("stage", (20_000,)), Op("pass", (20_000,)), Op("die", (0,)),
         Op("register", (1,)), Op("read", (9, 1)), Op("stage", (20_000, 1))),
        seen=("m2",),
        unseen=("m1",),
    ),
    # It is due long before the table follows; its handle has been cancelled meanwhile, and the table has forgotten it.
    Planted(
        "a cancel of what was postponed by a job that is set aside",
        (_FAR, _FLUSH, _POSTPONE, _FLUSH, Op("register"), *_DECIDED, Op("fail_tries", (3,)), *(_TAKE,) * 4,
         Op("stage", (0,)), _CANCEL_FIRST, _FLUSH, _TAKE, Op("stage", (0,)), Op("pass", (20_000,)),
         Op("stage", (20_000,)), Op("pass", (90_000,)), Op("stage", (20_000,)), Op("serve", (3,)), Op("register"),
         Op("serve", (3,))),
        unseen=("m1",),
    ),
    Planted(
        "an import that cannot be taken in",
        (Op("import", (0, 8_000, 0, 0, 1)), Op("adopt", (0,)), _FLUSH, Op("register"), Op("fail_tries", (3,)),
         *(_TAKE,) * 4, Op("stage", (20_000,)), Op("pass", (20_000,))),
        unseen=("m1",),
    ),
    # The table keeps a promoted row for a while, and its queue went with its topic: nothing there says "delivered".
    Planted(
        "a cancel of what was delivered to a topic that is deleted since",
        (_FAR, _FLUSH, Op("register"), _TAKE, Op("stage", (20_000,)), Op("pass", (10_000,)), Op("delete", (0,)),
         _CANCEL_FIRST, _FLUSH, Op("ask_table")),
        seen=("m1",),
    ),
    # Its messages may wait in the wheel and in the far queue until they would have been due.
    Planted(
        "cancels of what waited for a topic that is deleted since",
        (*(_FAR,) * 3, _FLUSH, Op("delete", (0,)), _CANCEL_FIRST, _FLUSH, Op("register"), _TAKE, Op("stage", (20_000,)),
         _CANCEL_FIRST, _FLUSH, _CANCEL_FIRST, _FLUSH, Op("ask_table")),
        unseen=("m1", "m2", "m3"),
    ),
    # A key is cancelled that messages of the deleted topic had, too: nobody has recalled those.
    Planted(
        "a recall of what waited for a topic that is deleted since, after a cancel of its key in the new one",
        (Op("send", (6, 100_000, 2, 1, 2)), _FLUSH, Op("delete", (1,)), Op("resend", (1,)), _FLUSH,
         Op("cancel", (2, 1)), _FLUSH, _CANCEL_FIRST, _FLUSH),
        unseen=("m1", "m2", "m3"),
    ),
    # Moves: later, to now + 2 s, over the lead and back; each comes once, at its last due.
    Planted(
        "a message that is moved back and forth over the lead",
        (_FAR, _FLUSH, Op("move", (0, 2, 2_000)), Op("move", (0, 0, 20_000)), Op("move", (0, 2, 3_000)),
         Op("pass", (10_000,)), Op("pass", (20_000,))),
        seen=("m1",),
    ),
    Planted(
        "a message that is moved after the table has taken it, before the table has the move",
        (_FAR, _FLUSH, Op("register"), _TAKE, Op("stage", (0,)), Op("move", (0, 0, 20_000)), Op("stage", (20_000,)),
         Op("pass", (10_000,)), _TAKE, Op("stage", (20_000,)), Op("pass", (40_000,))),
        seen=("m1",),
    ),
    Planted(
        "a move that is begun before its message is staged, and ended after it",
        (_FAR, _FLUSH, Op("register"), _TAKE, Op("stage", (0,)), Op("begin_move", (0, 2, 2_000)),
         Op("stage", (20_000,)), Op("end_move"), Op("pass", (10_000,))),
        seen=("m1",),
    ),
    Planted(
        "a move whose write no crash has seen the answer of",
        (_NEAR, _FLUSH, Op("move", (0, 0, 9_000)), Op("power", (0,)), Op("pass", (20_000,))),
        seen=("m1",),
    ),
    Planted(
        "the first handle of a message that was moved twice",
        (_FAR, _FLUSH, Op("move", (0, 0, 9_000)), Op("move", (0, 1, 5_000)), _CANCEL_FIRST, _FLUSH,
         Op("pass", (40_000,))),
        unseen=("m1",),
    ),
    # Both have one handle. That the first was cancelled before says nothing of the second.
    Planted(
        "a handle of two messages, of which one was cancelled and the other one moved",
        (_FAR, _FLUSH, _CANCEL_FIRST, _FLUSH, Op("resend", (0,)), _FLUSH, Op("move", (0, 0, 5_000)), _FLUSH,
         _CANCEL_FIRST, _FLUSH, Op("pass", (20_000,))),
        unseen=("m1", "m2"),
    ),
    Planted(
        "a job that has selected a message before it was moved, and is decided after it",
        (Op("register"), _FAR, _FLUSH, _POSTPONE, _FLUSH, _TAKE, Op("stage", (0,)), Op("move", (0, 2, 20_000)), _SELECT,
         _TAKE, Op("pass", (30_000,))),
        seen=("m1",),
    ),
    # The job has taken it from there; the table, which has not followed, still says so.
    Planted(
        "a cancel by key of what a job has postponed, before the table follows",
        (Op("register"), _FAR, _FLUSH, _POSTPONE, _FLUSH, *_DECIDED, Op("cancel", (0, 1)), _FLUSH, Op("ask_table"),
         Op("pass", (20_000,))),
        seen=("m1",),
    ),
    # What the move leaves behind is of an instant that is fired, because the clock went back.
    Planted(
        "a move of what is due at a passed instant, and a restart",
        (Op("register"), _TAKE, Op("stage", (60_000,)), Op("advance"), Op("step", (-20_000,)), _NEAR, _FLUSH,
         Op("move", (0, 0, 100)), _FLUSH, Op("close"), Op("step", (25_000,)), Op("advance"), _FLUSH,
         Op("snapshot", (1,)), Op("kill")),
        seen=("m1",),
    ),
    Planted(
        "a moved message that a job postpones",
        (_FAR, _FLUSH, Op("move", (0, 0, 20_000)), Op("register"), _TAKE, Op("stage", (0,)), _POSTPONE, *_FOLLOWED,
         _CANCEL_FIRST, _FLUSH, Op("ask_table"), Op("stage", (20_000,)), Op("pass", (60_000,))),
        unseen=("m1",),
    ),
    Planted(
        "an import that is given up",
        (Op("import", (0, 8_000, 0, 0, 1)), Op("fail", (0,)), Op("adopt", (0,)), _FLUSH, Op("serve", (5,))),
        unseen=("m1",),
    ),
)  # fmt: skip


def run_planted(planted: Planted, power_seed: int = 0) -> World:
    """Runs a planted history, with these dice for a power loss. Raises Broken."""
    world = World()
    _run_in(world, planted, power_seed)
    return world


def digest_planted(planted: Planted) -> str:
    """The digest of a planted history, as history.digest_seed gives that of a seed."""
    world = World()
    with world.site.digest.suppress(Broken):
        _run_in(world, planted, power_seed=0)
    return world.site.digest.hex()


def _run_in(world: World, planted: Planted, power_seed: int) -> None:
    for op in planted.history:
        world.run(Op("power", (power_seed,)) if op.verb == "power" else op)
    world.finish()
    for name in planted.seen:
        if world.model.messages[name].seen_at is None:
            raise Broken(f"{planted.name}: {name} was not seen")
    for name in planted.unseen:
        if world.model.messages[name].seen_at is not None:
            raise Broken(f"{planted.name}: {name} was seen")
