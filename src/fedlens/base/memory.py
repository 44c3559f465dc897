"""Memory: how much is free within the limits of the process's control groups, and what the C library keeps."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

# By the controllers that /proc/self/cgroup names, version 2 and version 1: the folder below the root, the files of the
# limit and of what is in use, and the part of it, by its name in memory.stat, that the kernel can take back.
_GROUPS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_memory() -> int:
    """The bytes that this process can still take, within the limits of its control groups (a container's).

    If the system does not say, more than is ever needed.
    """
    return min([free_in_machine(), *free_in_groups()])


def free_in_machine(meminfo: Path = Path("/proc/meminfo")) -> int:
    """The bytes that the machine has left, with those of the page cache that the kernel can take back."""
    with contextlib.suppress(OSError):
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 2**62


def free_in_groups(
    mine: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """The bytes left below the memory limit of each control group that this process is in, the outer ones included."""
    with contextlib.suppress(OSError):
        for line in mine.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                if controller in _GROUPS:
                    folder, *files = _GROUPS[controller]
                    group = root / folder / path.lstrip("/")
                    # Inside a container the path is often that of the host, and its own group is the root.
                    places = [p for p in (group, *group.parents) if p.is_relative_to(root / folder)]
                    for place in places:
                        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
                            yield _free(place, *files)


def _free(group: Path, limit: str, used: str, reclaimable: str) -> int:
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    in_use = int((group / used).read_text()) - int(stat.get(reclaimable, 0))
    return max(0, int((group / limit).read_text()) - in_use)


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
