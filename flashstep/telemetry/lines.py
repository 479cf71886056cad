"""Lines that are in a file whole or not at all, whatever a disk does. Knows nothing of what stands in them."""

import contextlib
import os


def write_whole(place: int, data: bytes) -> None:
    """Append ``data`` to the file that is open as ``place`` (O_APPEND); on an ``OSError`` none of it stays.

    One system call writes 2 GB at most, and less on a disk that fills up.
    """
    size = os.fstat(place).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(place, rest) :]
    except OSError:
        with contextlib.suppress(OSError):  # a device has no length
            os.ftruncate(place, size)
        raise
