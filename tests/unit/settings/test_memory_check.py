"""A run that does not fit the memory is refused before training, with a batch size that fits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedlens import Experiment
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import ModelSpec
from fedlens.local.settings import LocalSettings
from fedlens.models.resnet import resnet20
from fedlens.settings import memory_check
from fedlens.settings.memory_check import TrainingMemory, check_memory, training_memory
from fedlens.tasks.classification import Classification

SHAPE = (3, 32, 32)
SGD = LocalSettings(lr=0.1, batch_size=256)
INLINE = {"name": "inline"}


def module() -> nn.Module:
    return resnet20(SHAPE, 10, width=4)


def memory(batch: int) -> TrainingMemory:
    found = training_memory(module(), SHAPE, batch, SGD, Classification(), 10)
    assert found is not None
    return found


def checked(
    monkeypatch: pytest.MonkeyPatch, free: int, engine: dict[str, Any] = INLINE, largest: int = 1000
) -> list[str]:
    """The sentences of the check where `free` bytes are free."""
    monkeypatch.setattr(memory_check, "free_memory", lambda: free)
    said: list[str] = []
    spec = ModelSpec(resnet20, "resnet20", {}, SHAPE, 10, 0)
    check_memory(module(), spec, Classification(), SGD, largest, engine, said.append)
    return said


def test_what_fits_to_the_byte_is_accepted_and_one_byte_less_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = memory(256).needed()
    assert checked(monkeypatch, needed) == []
    with pytest.raises(ConfigError, match="batches of 256 images takes about") as error:
        checked(monkeypatch, needed - 1)
    assert error.value.where == "local.batch_size"


def test_the_batch_size_of_the_hint_fits_and_is_not_much_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    free = memory(256).needed() // 2
    with pytest.raises(ConfigError) as error:
        checked(monkeypatch, free)
    hint = re.search(r"set local.batch_size to (\d+) or less", str(error.value))
    assert hint is not None
    assert 0.95 * free < memory(int(hint[1])).needed() <= free


def test_no_batch_size_is_named_where_the_weights_alone_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as error:
        checked(monkeypatch, memory(256).fixed())
    assert "batch_size to" not in str(error.value)
    assert str(error.value).endswith("choose a smaller model or smaller images.")


def test_no_batch_is_larger_than_the_largest_client(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(monkeypatch, memory(8).needed(), largest=8) == []


def test_the_number_of_workers_in_the_sentence_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {"name": "processes", "workers": 4}
    each = memory(256).needed() + memory_check._WORKER
    assert checked(monkeypatch, 4 * each, engine) == []
    (sentence,) = checked(monkeypatch, 4 * each - 1, engine)
    assert sentence.startswith("4 workers take about ")
    assert "set engine.workers to 3 " in sentence
    assert checked(monkeypatch, 4 * each - 1, {**engine, "device": "meta"}) == []


def test_a_tiny_model_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    def followed(*_: Any) -> None:
        raise AssertionError("followed")

    monkeypatch.setattr(memory_check, "training_memory", followed)
    size = sum(t.nbytes for t in module().state_dict().values()) + 256 * 3 * 32 * 32 * 4
    assert checked(monkeypatch, 2000 * size) == []
    with pytest.raises(AssertionError, match="followed"):
        checked(monkeypatch, 2000 * size - 1)


def test_a_run_that_does_not_fit_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "free_memory", lambda: 2**20)
    experiment = Experiment(
        rounds=1,
        model="small-cnn",
        local={"lr": 0.1},
        data={"dataset": "digits", "partition": {"name": "iid", "clients": 4}},
    )
    with pytest.raises(ConfigError, match="but only 1 MiB is free"):
        experiment.run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "asked"), [("processes", ["cuda"]), ("vectorized", [])])
def test_only_a_process_that_trains_on_a_gpu_opens_a_context_there(
    name: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the free memory opens one, so it is read in another process where workers train."""
    opened: list[str] = []
    read: list[str] = []
    monkeypatch.setattr(memory_check, "free_memory_of", lambda device: read.append(device) or [2**20, 2**21])
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: opened.append(str(device)) or (2**21, 2**22)
    )
    with pytest.raises(ConfigError, match="only 2 MiB is free"):
        checked(monkeypatch, 2**62, {"name": name, "device": "cuda"})
    assert (read, opened) == (asked, [] if asked else ["cuda"])
