"""A short run on the embedded digits, built again for its analyses, and models of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlens.api import Experiment
from fedlens.run.build import Built, build
from fedlens.settings.config import read_config
from fedlens.settings.config_source import read_source
from fedlens.settings.plan import plan
from fedlens.use.results import read_module

SHORT = ("rounds=2", "engine.name='inline'", "record.images=false")


def built_of(*overrides: str) -> Built:
    source = read_source("digits", [*SHORT, *overrides])
    return build(plan(read_config(source.values, source.locate), source), Path("none"), False)


def run_of(folder: Path, *overrides: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The last line of metrics.jsonl and the final model."""
    result = Experiment.load("digits", [*SHORT, *overrides]).run(folder / "run", report=False)
    module = read_module(folder / "run" / "model.safetensors")
    return result.metrics[-1], module.state_dict()


def models_of(built: Built, count: int) -> list[dict[str, Tensor]]:
    """Random models of the run's architecture."""
    generator = torch.Generator().manual_seed(0)
    initial = built.model.build().state_dict()
    return [
        {
            name: value + 0.3 * torch.randn(value.shape, generator=generator)
            if value.is_floating_point()
            else value + k
            for name, value in initial.items()
        }
        for k in range(count)
    ]
