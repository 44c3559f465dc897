"""The GPUs of this machine, and why torch cannot use one of them."""

from __future__ import annotations

import os
import re
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

_NVIDIA, _DISPLAY = "0x10de", "0x03"  # a vendor of PCI devices, and the class of display and 3-d controllers
_HIDDEN = ("", "-1", "NoDevFiles")  # of CUDA_VISIBLE_DEVICES: no GPU is wanted


@dataclass(frozen=True)
class Hardware:
    """What torch can compute on.

    Attributes:
        gpus: the names of the usable GPUs.
        torch: the version of torch.
        built: the version of CUDA or ROCm that torch is built for; None for a CPU-only build.
        nvidia: whether the machine has an NVIDIA GPU, usable or not.
        failure: torch's reason why no GPU is usable.
        mps: whether torch can use an Apple GPU.
    """

    gpus: tuple[str, ...] = ()
    torch: str = torch.__version__
    built: str | None = None
    nvidia: bool = False
    failure: str = ""
    mps: bool = False

    def named(self) -> str:
        """The GPUs in words.

        >>> Hardware(("NVIDIA H100",)).named(), Hardware(("NVIDIA H100", "NVIDIA A100")).named()
        ('1 GPU, NVIDIA H100', '2 GPUs, NVIDIA H100 and NVIDIA A100')
        """
        one = "GPU" if len(self.gpus) == 1 else "GPUs"
        return f"{len(self.gpus)} {one}, {' and '.join(Counter(self.gpus))}"

    def obstacle(self) -> str | None:
        """A sentence that says why the GPU of this machine is not used; None if there is no such GPU.

        >>> Hardware(torch="2.9.0+cpu", nvidia=True).obstacle()
        'the NVIDIA GPU is not used: torch 2.9.0+cpu is built for the processor; install a CUDA build, see pytorch.org'
        >>> Hardware(built="13.0").obstacle()
        """
        if self.gpus:
            return None
        if self.mps:
            return "the Apple GPU is not used: mps is not tried, as fedlens has not been tested on it"
        old = re.search(r"driver on your system is too old \(found version (\d+)\)", self.failure)
        if old:
            has = f"{int(old[1]) // 1000}.{int(old[1]) % 1000 // 10}"
            return (
                f"the NVIDIA GPU is not used: its driver is for CUDA {has}, too old for torch {self.torch} (CUDA "
                f"{self.built}); update the driver, or install a torch for CUDA {has}"
            )
        if not self.nvidia:
            return None
        if self.built is None:
            reason = f"torch {self.torch} is built for the processor; install a CUDA build, see pytorch.org"
        elif "Found no NVIDIA driver" in self.failure:
            reason = (
                "it has no driver; install one, or start the container with its GPUs (docker run --gpus all)"
            )
        else:
            reason = self.failure or "torch does not find it"
        return f"the NVIDIA GPU is not used: {reason}"


@cache
def hardware() -> Hardware:
    """What this machine has, determined once per process, without a CUDA context."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `Hardware.obstacle` reports it instead
        if torch.cuda.is_available():
            gpus = tuple(torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count()))
            missing = _without_kernels(torch.cuda.get_device_capability(0), torch.cuda.get_arch_list())
            failure = f"torch {torch.__version__} has no kernels for a {gpus[0]}" if missing else ""
            return Hardware(() if missing else gpus, built=_built(), nvidia=True, failure=failure)
        failure = ""
        if _built() is not None:
            try:
                torch.cuda.init()  # type: ignore[no-untyped-call]
            except (RuntimeError, AssertionError) as error:
                failure = str(error).strip().partition("\n")[0]
    if os.environ.get("CUDA_VISIBLE_DEVICES") in _HIDDEN:
        return Hardware(built=_built())
    return Hardware(
        (), torch.__version__, _built(), _shows_nvidia(), failure, torch.backends.mps.is_available()
    )


def announcements(
    found: Hardware, engine: Mapping[str, Any], line: str | None, chosen: bool = True
) -> list[str]:
    """What a run says about its engine and its device.

    Args:
        engine: the engine's settings, after its own choices.
        line: what the engine says about its choice.
        chosen: whether the device was chosen for the user.

    >>> announcements(Hardware(("NVIDIA H100",)), {"name": "inline", "device": "cuda"}, None)
    ['1 GPU, NVIDIA H100: inline; --set engine.device=cpu for the processor']
    """
    device = str(engine.get("device"))
    if not chosen or device == "cpu":
        why = found.obstacle() if chosen else None
        return [
            sentence for sentence in (line, why and f"{why}; the run trains on the processor") if sentence
        ]
    where = f" on {device}" if device != "cuda" and len(found.gpus) > 1 else ""
    what = line.removeprefix("engine: ") if line else f"{engine['name']}{where}"
    return [f"{found.named()}: {what}; --set engine.device=cpu for the processor"]


def driver_version(path: Path = Path("/sys/module/nvidia/version")) -> str | None:
    """The version of the NVIDIA driver, such as '580.82.07'; None where Linux does not say."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


@cache
def multiplies_in_bf16(file: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has products of bf16 (AMX, AVX512-BF16); False where Linux does not say."""
    with suppress(OSError):
        flags = re.search(r"^flags\s*:(.*)$", file.read_text(), re.MULTILINE)
        return flags is not None and not {"amx_bf16", "avx512_bf16"}.isdisjoint(flags[1].split())
    return False


def _built() -> str | None:
    return torch.version.cuda or torch.version.hip


def _shows_nvidia(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether an NVIDIA GPU is connected, with or without a driver."""
    if sys.platform == "win32":
        return shutil.which("nvidia-smi") is not None
    for device in devices.glob("*"):
        with suppress(OSError):
            vendor = (device / "vendor").read_text().strip()
            if vendor == _NVIDIA and (device / "class").read_text().startswith(_DISPLAY):
                return True
    return False


def _without_kernels(capability: tuple[int, int], built: list[str]) -> bool:
    """Whether this torch has no kernels for a GPU of this compute capability.

    >>> _without_kernels((7, 0), ["sm_75", "sm_80"]), _without_kernels((8, 9), ["sm_75", "sm_80"])
    (True, False)
    >>> _without_kernels((12, 1), ["sm_80", "compute_120"])
    False
    """
    major, minor = capability
    kinds = [re.fullmatch(r"(sm|compute)_(\d+)(\d)", name) for name in built]
    known = [(kind[1], int(kind[2]), int(kind[3])) for kind in kinds if kind]
    # Machine code runs on later GPUs of its generation, PTX on all later ones.
    runs = any(
        (of, at_least) <= (major, minor) and (kind == "compute" or of == major)
        for kind, of, at_least in known
    )
    return bool(known) and not runs
