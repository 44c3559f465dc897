"""What a run ran on: versions, hardware, the source's revision, the command."""

from __future__ import annotations

import functools
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedlens import __version__

LIBRARIES = ("torchvision", "numpy", "safetensors", "pydantic", "scikit-learn", "plotly", "pandas")
_GIT_SECONDS = 2.0


def command_words(arguments: Sequence[str]) -> list[str]:
    """The command in `sys.argv` without its folder; of `python -m package`, the name of the package.

    >>> command_words(["/env/bin/fedlens", "run", "a.toml"]), command_words(["/src/fedlens/__main__.py", "run"])
    (['fedlens', 'run', 'a.toml'], ['fedlens', 'run'])
    """
    if not arguments or not arguments[0]:
        return ["python"]
    program = Path(arguments[0])
    return [program.parent.name if program.name == "__main__.py" else program.name, *arguments[1:]]


def describe_environment(
    command: Sequence[str], seed: int, shared: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What `environment.json` says of a run that starts now in the current directory.

    Keys: `fedlens`, `python`, `torch`, `cuda` (what torch was built for, or None), `libraries` (name to
    version), `os`, `cpu` (`model`, `cores` of the machine, `usable` by this process, `capability` as torch
    sees it), `memory` in bytes, `gpus` (each `name` and `memory`), `driver` (of NVIDIA, or None), `git` (`revision`
    and `dirty`, or None outside a repository), `command`, `seed` and `started` (UTC). `shared` is the result of
    `machine`, if it is known.

    >>> found = describe_environment(["fedlens", "run", "my file.toml"], seed=3)
    >>> found["command"], found["seed"]
    ("fedlens run 'my file.toml'", 3)
    """
    return {
        **(machine() if shared is None else shared),
        "command": shlex.join(command),
        "seed": seed,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def machine() -> dict[str, Any]:
    """The keys of `describe_environment` that all runs of a process in the current directory share."""
    import torch

    from fedlens.engines.devices import usable_cores  # which imports torch too
    from fedlens.engines.hardware import driver_version

    return {
        "fedlens": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "libraries": _libraries(),
        "os": platform.platform(),
        "cpu": {
            "model": _cpu_model(),
            "cores": os.cpu_count(),
            "usable": usable_cores(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        "memory": _memory(),
        "gpus": _gpus(),
        "driver": driver_version(),
        "git": _git_revision(),
    }


def changed_bits(before: Mapping[str, Any], now: Mapping[str, Any], device: str) -> str | None:
    """A sentence on what changes the last bits of a run that is resumed on another machine; None for nothing.

    The number of GPUs changes none.

    Args:
        before, now: two results of `machine`, the former perhaps of an older version.
        device: of the run's engine; empty if it is another machine's.

    >>> changed_bits({"torch": "2.8.0"}, {"torch": "2.9.0"}, "")
    'the last bits of results may differ from now on: torch is 2.9.0, was 2.8.0'
    """
    old, new = _bits_of(before, device), _bits_of(now, device)
    changes = [
        f"{key} is {new[key]}, was {value}" for key, value in old.items() if value and value != new[key]
    ]
    return f"the last bits of results may differ from now on: {'; '.join(changes)}" if changes else None


def _bits_of(machine: Mapping[str, Any], device: str) -> dict[str, str | None]:
    """What the last bits depend on, as `machine` says it."""
    facts = {"torch": machine.get("torch")}
    if device.startswith("cuda"):
        names = [str(gpu.get("name")) for gpu in machine.get("gpus") or ()]
        index = device.partition(":")[2]
        used = names[int(index) : int(index) + 1] if index else sorted(set(names))
        facts |= {"the GPU": " and ".join(used), "its driver": machine.get("driver")}
    elif device:
        facts["the processor's instruction set"] = (machine.get("cpu") or {}).get("capability")
    return facts


def _libraries() -> dict[str, str]:
    return {name: found for name in LIBRARIES if (found := _version(name)) is not None}


@functools.cache
def _version(library: str) -> str | None:
    """The installed version; read once a process, as its file takes as long to read as a small run's round."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": device.name, "memory": device.total_memory} for device in devices]


def _git_revision() -> dict[str, Any] | None:
    """The commit that the current directory is at; None without a repository, a commit or git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        # Without optional locks git only reads, so a run never blocks the user's own git commands.
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_GIT_SECONDS,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if answer.returncode != 0:
        return None
    revision = answer.stdout.strip()
    return {"revision": revision.removesuffix("-dirty"), "dirty": revision.endswith("-dirty")}
