"""The forms in which `data.augment` can be written, and what the clients then get."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fedlens.base.errors import ConfigError
from fedlens.core.random import Rng
from fedlens.data.augmentation.augment import ColourJitter, Crop, Flip
from fedlens.data.augmentation.augmented import Augmented, Chain
from fedlens.data.normalize import normalize
from fedlens.run.build import Built, build
from fedlens.settings.config import plain, read_config
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan
from fedlens.use.results import metadata
from fedlens.vision.change import Change

LEAST = {
    "rounds": 1,
    "model": "linear",
    "local": {"lr": 0.1},
    "data": {
        "dataset": {"name": "synthetic", "shape": [3, 8, 8], "train": 40, "test": 10},
        "partition": {"name": "iid", "clients": 4},
    },
}


def built(augment: Any, tmp_path: Any, **more: Any) -> Built:
    values = {**LEAST, "data": {**LEAST["data"], "augment": augment, **more}}  # type: ignore[dict-item]
    return build(plan(read_config(values), Source(values)), tmp_path, False)


@pytest.mark.parametrize("augment", ["none", []])
def test_without_augmentation_there_is_no_step(augment: Any, tmp_path: Any) -> None:
    made = built(augment, tmp_path)
    assert made.client_data.augment is None
    assert plain(made.config)["data"]["augment"] == []


def test_names_and_tables_make_a_chain_in_their_order_with_every_setting_written_down(tmp_path: Any) -> None:
    made = built(["flip", {"name": "crop", "pad": 2}, "colour-jitter"], tmp_path)
    assert made.client_data.augment == Chain((Flip(0.5), Crop(2), ColourJitter(0.4, 0.4, 0.4, 0.1)))
    assert plain(made.config)["data"]["augment"][:2] == [
        {"name": "flip", "p": 0.5, "vertical": 0.0},
        {"name": "crop", "pad": 2},
    ]
    again = build(plan(read_config(plain(made.config)), Source({})), tmp_path, False)
    assert again.client_data.augment == made.client_data.augment


def test_one_table_is_a_list_of_one(tmp_path: Any) -> None:
    assert built({"name": "flip", "p": 0.25}, tmp_path).client_data.augment == Chain((Flip(0.25),))


@pytest.mark.parametrize(("name", "mean"), [("half", 0.5), ("imagenet", 0.485), ("unit", 0.0)])
def test_the_named_normalization_is_that_of_batches_and_of_the_models_file(
    name: str, mean: float, tmp_path: Any
) -> None:
    made = built("none", tmp_path, normalize=name)
    assert made.client_data.dataset.mean[0] == mean
    pixels, _ = made.client_data.dataset.test.stretch(0, 2)
    wanted = normalize(pixels, made.client_data.dataset.mean, made.client_data.dataset.std)
    assert torch.equal(made.client_data.data_of("@test").stretch(0, 2)[0], wanted)
    assert json.loads(metadata(made, made.model)["preprocessing"])["mean"][0] == mean


def test_batches_ahead_are_a_setting_of_the_clients_data(tmp_path: Any) -> None:
    for prefetch in (0, 3):
        assert built("flip", tmp_path, prefetch=prefetch).client_data.data_of(1).prefetch == prefetch


def test_the_task_moves_the_targets(tmp_path: Any) -> None:
    made = built("flip", tmp_path)
    assert made.client_data.augment is not None
    assert made.client_data.augment.move == made.task.move
    assert made.client_data.views == made.task.views == 1


def old(input_shape: Sequence[int]) -> Any:
    return lambda images, generator: images


def fixed(result: Any) -> Any:
    """An augmentation of a user's own that returns `result`, or what it makes of the images."""

    def factory() -> Any:
        return lambda images, targets, generator: result(images, targets) if callable(result) else result

    return factory


@pytest.mark.parametrize(
    ("augment", "said"),
    [
        (old, r"takes \(images, generator\), and fedlens calls it with \(images, targets, generator\)"),
        (
            fixed(lambda images, targets: images),
            r"returned uint8 \[2, 3, 8, 8\], but must return \(images, targets\)",
        ),
        (fixed(None), r"returned a NoneType, but must return \(images, targets\)"),
        (
            fixed(lambda images, targets: (images.float(), targets)),
            r"returned float32 \[2, 3, 8, 8\] as images",
        ),
        (fixed(lambda images, targets: (images[:1], targets)), r"must return uint8 \[2, C, H, W\]"),
        (fixed(lambda images, targets: (images, targets[:1])), "returned 1 targets for 2 images"),
        (fixed(lambda images, targets: (images, targets, 5)), "returned a int as its change"),
        (fixed(lambda images, targets: images.no_such_method()), "failed: .*no_such_method"),
    ],
)
def test_an_augmentation_of_another_form_is_refused_before_the_run(
    augment: Any, said: str, tmp_path: Any
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        built({"name": augment}, tmp_path)
    assert "data.augment" in str(caught.value)


def test_an_augmentation_of_ones_own_may_return_a_pair_or_three(tmp_path: Any) -> None:
    flips = Change.flips(torch.tensor([True, False]), (8, 8))
    for result in (lambda x, y: (x, y), lambda x, y: (x, y, None), lambda x, y: Augmented(x, y, flips)):
        made = built({"name": fixed(result)}, tmp_path)
        assert made.client_data.augment is not None
        assert not made.client_data.augment.apart
    assert built(["flip", "crop"], tmp_path).client_data.augment.apart  # type: ignore[union-attr]


def test_only_training_batches_are_augmented(tmp_path: Any) -> None:
    augmented, plain_one = built({"name": "flip", "p": 1.0}, tmp_path), built("none", tmp_path)
    rng = Rng((0, "test"))
    for a, b in zip(
        [augmented.client_data.data_of(2), augmented.client_data.data_of("@test")],
        [plain_one.client_data.data_of(2), plain_one.client_data.data_of("@test")],
        strict=True,
    ):
        assert torch.equal(a.stretch(0, 5)[0], b.stretch(0, 5)[0])
    tested = [next(made.client_data.data_of("@test").batches(10, rng))[0] for made in (augmented, plain_one)]
    assert torch.equal(*tested)
    batch, labels = next(augmented.client_data.data_of(2).batches(20, rng))
    straight, same = next(plain_one.client_data.data_of(2).batches(20, rng))
    assert torch.equal(labels, same)
    torch.testing.assert_close(batch, straight.flip(3), rtol=0, atol=0)
