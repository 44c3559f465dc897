"""The forms in which `data.augment` can be written, and what the clients then get."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedlens.core.random import Rng
from fedlens.data.augment import ColourJitter, Crop, Flip
from fedlens.data.augmented import Chain
from fedlens.experiment.build import Built, build, plan
from fedlens.experiment.config import plain, read_config
from fedlens.experiment.config_source import Source

LEAST = {
    "rounds": 1,
    "model": "linear",
    "local": {"lr": 0.1},
    "data": {
        "dataset": {"name": "synthetic", "shape": [3, 8, 8], "train": 40, "test": 10},
        "partition": {"name": "iid", "clients": 4},
    },
}


def built(augment: Any, tmp_path: Any) -> Built:
    values = {**LEAST, "data": {**LEAST["data"], "augment": augment}}  # type: ignore[dict-item]
    return build(plan(read_config(values), Source(values)), tmp_path, False)


@pytest.mark.parametrize("augment", ["none", []])
def test_without_augmentation_there_is_no_step(augment: Any, tmp_path: Any) -> None:
    made = built(augment, tmp_path)
    assert made.holders.augment is None
    assert plain(made.config)["data"]["augment"] == []


def test_names_and_tables_make_a_chain_in_their_order_with_every_setting_written_down(tmp_path: Any) -> None:
    made = built(["flip", {"name": "crop", "pad": 2}, "colour-jitter"], tmp_path)
    assert made.holders.augment == Chain((Flip(0.5), Crop(2), ColourJitter(0.4, 0.4, 0.4, 0.1)))
    assert plain(made.config)["data"]["augment"][:2] == [
        {"name": "flip", "p": 0.5},
        {"name": "crop", "pad": 2},
    ]
    again = build(plan(read_config(plain(made.config)), Source({})), tmp_path, False)
    assert again.holders.augment == made.holders.augment


def test_one_table_is_a_list_of_one(tmp_path: Any) -> None:
    assert built({"name": "flip", "p": 0.25}, tmp_path).holders.augment == Chain((Flip(0.25),))


def test_only_training_batches_are_augmented(tmp_path: Any) -> None:
    augmented, plain_one = built({"name": "flip", "p": 1.0}, tmp_path), built("none", tmp_path)
    rng = Rng((0, "test"))
    for a, b in zip(
        [augmented.holders.holder(2), augmented.holders.holder("@test")],
        [plain_one.holders.holder(2), plain_one.holders.holder("@test")],
        strict=True,
    ):
        assert torch.equal(a.stretch(0, 5)[0], b.stretch(0, 5)[0])
    tested = [next(made.holders.holder("@test").batches(10, rng))[0] for made in (augmented, plain_one)]
    assert torch.equal(*tested)
    batch, labels = next(augmented.holders.holder(2).batches(20, rng))
    straight, same = next(plain_one.holders.holder(2).batches(20, rng))
    assert torch.equal(labels, same)
    torch.testing.assert_close(batch, straight.flip(3), rtol=0, atol=0)
