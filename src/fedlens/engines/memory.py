"""The C library's habit of giving freed memory back."""

from __future__ import annotations

import contextlib
import ctypes


def keep_freed_memory() -> None:
    """Asks glibc to keep freed memory: otherwise every batch of a large model pays for its pages again.

    Affects the whole process and cannot be undone. Does nothing with another C library.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            mallopt(parameter, 1 << 30)


def release_freed_memory() -> None:
    """Asks glibc to return all freed memory to the system now. Does nothing with another C library."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
