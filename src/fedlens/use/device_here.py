"""The device of this machine that the models of a run compute on after the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedlens.base.errors import ConfigError
from fedlens.engines.devices import Computing, resolved, valid_device
from fedlens.engines.hardware import announcements, hardware
from fedlens.engines.traits import traits_of

_NEEDS_GPU = ("tf32", "fp16")
_KEPT = ("threads", "precision", "channels_last")  # of the workers of a cluster


def chosen_for(engines: Iterable[Mapping[str, Any]], runs: str) -> list[str]:
    """What a command says about the device that was chosen for its runs; nothing if they name theirs.

    Args:
        engines: the tables `[engine]` of the runs.
        runs: the runs in words.

    >>> chosen_for([{"device": "cpu"}], "2 runs")
    []
    """
    if all(table.get("device", "auto") != "auto" or _on_cluster(table) for table in engines):
        return []
    device = resolved("auto", spread=True)
    return announcements(hardware(), {"device": device}, None if device == "cpu" else runs)


def device_here(wanted: str) -> tuple[str, list[str]]:
    """The device that an option asks for, and what a command says about the choice.

    Args:
        wanted: "auto" for a GPU if there is one, "cpu", "cuda", or "cuda:1" and so on.

    Raises `ConfigError` for another name, and for a GPU that this machine does not have.

    >>> device_here("cpu")
    ('cpu', [])
    """
    try:
        device = resolved(valid_device(wanted))
    except ValueError as error:
        raise ConfigError(f"the device is {wanted!r}, but {error}", where="--device") from None
    try:
        Computing(device).check()
    except ConfigError as error:
        hint = (error.hint or "").replace("set engine.device=cpu", "take --device cpu")
        raise ConfigError(error.what, where="--device", hint=hint) from None
    if wanted != "auto":
        return device, []
    if device == "cpu":
        why = hardware().obstacle()
        return device, [f"{why}; this computes on the processor"] if why else []
    return device, [f"{hardware().named()}: computing on {device}; --device cpu for the processor"]


def engine_here(engine: Mapping[str, Any], wanted: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """The engine of a run with a device of this machine, and what a command says about the choice.

    Without `wanted` it is the kind of device that the run trained on, so that its numbers come out again. If the run
    trained on a GPU and this machine has none, it is the processor. The engine of a cluster becomes `inline`.

    Args:
        engine: the table `[engine]` in the run's config.toml.
        wanted: see `device_here`.

    Raises `ConfigError` as `device_here` does.
    """
    table = dict(engine)
    if _on_cluster(table):
        table = {key: table[key] for key in _KEPT if key in table}
        table |= {"name": "inline", "device": "cuda" if engine.get("gpus") else "cpu"}
    trained = str(table.get("device", "auto")).partition(":")[0]
    said: list[str] = []
    if wanted is not None:
        device, said = device_here(wanted)
    elif trained == "cuda" and not hardware().gpus:
        device = "cpu"
        said = ["the run trained on a GPU, and this machine has none: the processor gives other last bits"]
    else:
        device = resolved("auto" if trained == "cuda" else trained)
        if trained == "cpu" and hardware().gpus:
            said = ["the run trained on the processor, and stays there; --device auto takes a GPU"]
    if device == "cpu" and table.get("precision") in _NEEDS_GPU:
        said.append(f"the precision is fp32 in place of {table['precision']}, which needs a GPU")
        table["precision"] = "fp32"
    return {**table, "device": device}, said


def _on_cluster(engine: Mapping[str, Any]) -> bool:
    return traits_of(engine).place == "cluster"
