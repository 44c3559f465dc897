"""The C library's habit of giving memory back, and how to change it."""

from __future__ import annotations

import contextlib
import ctypes


def keep_freed_memory() -> None:
    """Asks glibc to keep what is freed: otherwise every batch of a large model pays for its pages again.

    Concerns the whole process and cannot be taken back. Does nothing where the C library is another one.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            mallopt(parameter, 1 << 30)
