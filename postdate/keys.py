"""Hashes of keys and ids. Apart from `message`, because executors of the pipeline have no xxhash and need none."""

from xxhash import xxh3_64_intdigest


def key_hash(key: str) -> int:
    """Return the unsigned 64-bit hash of a unique or user key. 0 means "no key" and is returned for "" alone."""
    if not key:
        return 0
    try:
        data = key.encode()
    except UnicodeEncodeError:  # asked for at first, this way would cost every key twice the time
        data = key.encode("utf-8", "surrogatepass")
    return xxh3_64_intdigest(data) or 1


def once_name(topic: str, id: str) -> str:
    """Return what a message is known by that is stored once: its topic and its id, neither of which holds 0x01."""
    return f"{topic}\x01{id}"


def once_hash(name: str) -> int:
    """Return the unsigned 32-bit hash of such a name, which is not 0."""
    return key_hash(name) >> 32 or 1
