"""The codes of answers and the bits of flags. Names are RocketMQ's; requests stand in requests.py."""

# Answers.
SUCCESS = 0
SYSTEM_ERROR = 1
SYSTEM_BUSY = 2
REQUEST_CODE_NOT_SUPPORTED = 3
MESSAGE_ILLEGAL = 13
SERVICE_NOT_AVAILABLE = 14
NO_PERMISSION = 16
TOPIC_NOT_EXIST = 17
PULL_NOT_FOUND = 19
PULL_RETRY_IMMEDIATELY = 20
PULL_OFFSET_MOVED = 21
QUERY_NOT_FOUND = 22
SUBSCRIPTION_NOT_EXIST = 24
SUBSCRIPTION_GROUP_NOT_EXIST = 26
INVALID_PARAMETER = 29
CONSUMER_NOT_ONLINE = 206
NO_MESSAGE = 208
POLLING_FULL = 209
POLLING_TIMEOUT = 210
ILLEGAL_OPERATION = 604

# Bits of a header's flag.
FLAG_RESPONSE = 1
FLAG_ONEWAY = 2

# Bits of a message's sys flag.
SYS_COMPRESSED = 1
SYS_COMMIT, SYS_ROLLBACK = 8, 12  # how a transaction ended
SYS_TRANSACTION = 12  # both bits: 4 is its half

# Bits of a pull's sys flag.
PULL_COMMIT_OFFSET = 1
PULL_SUSPEND = 2
PULL_SUBSCRIPTION = 4

# Where a group that pops starts a queue without an offset.
POP_FROM_END = 1

# The version of RocketMQ whose protocol we speak (5.4.0), as its ordinal: clients decide by it what they may ask for.
PROTOCOL_VERSION = 493
LANGUAGE = "PYTHON"
