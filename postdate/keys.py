"""The hash of a key. Apart from `message`, because executors of the pipeline have no xxhash and need none."""

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
