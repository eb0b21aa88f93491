"""What can go wrong, named after whose fault it is.

Catch `PostdateError` to catch all of it. The server turns these into RocketMQ response codes, the command line into
exit codes. A mistake of our own is none of them: it is an `AssertionError` and stops the broker.
"""


class PostdateError(Exception):
    """Somebody's fault; the subclass says whose."""


class UsageError(PostdateError, ValueError):
    """The caller's fault: the contract of a call was broken."""


class IllegalMessage(PostdateError, ValueError):
    """The producer's fault: the message can never be accepted as it is (RocketMQ code 13)."""


class TopicNotFound(PostdateError, LookupError):
    """The client's fault: it named a topic that does not exist here."""


class GroupNotFound(PostdateError, LookupError):
    """The client's fault: it named a consumer group that does not exist here."""


class SubscriptionMissing(PostdateError):
    """The consumer's fault: it pulls a topic that it has not subscribed to."""


class NoPermission(PostdateError):
    """The client's fault: the topic may not be written or read, or the operation is not allowed here."""


class ProtocolError(PostdateError, ValueError):
    """The peer's fault: it sent bytes that the protocol does not know."""


class FlowControl(PostdateError):
    """Nobody's fault: a named limit is reached for now, and a later try may pass (RocketMQ code 2)."""


class PopsFull(FlowControl):
    """The group's fault: it has taken too many messages that it has not acknowledged (RocketMQ code 209)."""


class PipelineFailed(PostdateError):
    """Spark's fault, or the machine's: the pipeline cannot go on; started again, it goes on where it was."""


class Refused(PostdateError):
    """The sender's fault: a stale or repeated command, such as a stage whose compare-and-set fails."""


class ForeignTable(Refused):
    """The operator's fault: the table belongs to another broker, or knows more than this one's log."""


class TableUnread(PostdateError):
    """Bulk's fault, or the table's: what a message's key leads to cannot be known now; a later try may pass."""


class DiskFull(PostdateError):
    """The operator's fault: the disk has no room for what was sent."""


class NotWritten(PostdateError):
    """The disk's fault: a change of users or rules could not be written; they are as they were."""


class LogFailed(PostdateError):
    """The disk's fault: a write or fsync of the log failed; no more writes until a restart."""


class CorruptData(PostdateError):
    """The disk's fault: bytes read back are not the bytes written; the subclass says in which file."""


class CorruptLog(CorruptData):
    """The disk's fault: a segment, batch or record of the log is damaged."""


class CorruptQueue(CorruptData):
    """The disk's fault: a queue file is damaged; it can be rebuilt from the log."""


class CorruptChunk(CorruptData):
    """The disk's or the uploader's fault: a chunk is damaged."""


class CorruptSelection(CorruptData):
    """The disk's or the uploader's fault: a file with rows that a job has selected is damaged."""


class CorruptTable(CorruptData):
    """The disk's fault: the table of far messages cannot be read, or lacks files; what the log has stays on time."""

    path = ""  # of the file that cannot be read, where it is one


class CorruptSnapshot(CorruptData):
    """The disk's fault: a snapshot is damaged; an older one and the log replace it."""


class ForeignFolder(PostdateError):
    """The operator's fault: the data folder is not ours, or was written by a future version."""


class FolderInUse(PostdateError):
    """The operator's fault: another process holds the data folder."""
