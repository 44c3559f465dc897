"""Models: the parameter counts of the documents, shapes, and sizes that do not fit."""

import pytest
import torch

from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.models.registry import MODELS
from tests.unit.models.zoo_kit import CIFAR_RESNETS, CLASSIFIERS, OF_TIMM


def parameters(name: str, shape, classes: int = 10, **settings) -> int:
    return sum(p.numel() for p in MODELS.find(name)(shape, classes, **settings).parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "count"),
    [
        ("mcmahan-cnn", (1, 28, 28), 10, 1_663_370),  # McMahan et al. 2017, ghaemi2022 section 3
        ("hsu-cnn", (3, 32, 32), 10, 1_756_426),  # hsu2019, "same" padding
        ("vgg9", (3, 32, 32), 10, 3_491_530),  # FedMA
        ("mlp", (1, 28, 28), 10, 199_210),  # McMahan's 2NN
        ("linear", (1, 28, 28), 10, 7_850),
        ("linear", (3, 32, 32), 100, 307_300),
        ("small-cnn", (1, 8, 8), 10, 9_930),
    ],
)
def test_the_parameter_counts_of_the_documents(name: str, shape, classes: int, count: int) -> None:
    assert parameters(name, shape, classes) == count


def test_the_layers_of_mcmahans_cnn() -> None:
    module = MODELS.find("mcmahan-cnn")((1, 28, 28), 10)
    x, shapes = torch.zeros(2, 1, 28, 28), []
    for layer in module:
        x = layer(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [
        (32, 28, 28), (32, 28, 28), (32, 14, 14), (64, 14, 14), (64, 14, 14), (64, 7, 7),
        (3136,), (512,), (512,), (10,),
    ]  # fmt: skip


SMALL = ["linear", "mlp", "small-cnn", "mcmahan-cnn", "hsu-cnn", "projection"]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 9, 14), (2, 4, 5)])
@pytest.mark.parametrize("classes", [2, 10])
def test_every_small_model_takes_every_image(name: str, shape, classes: int) -> None:
    module = MODELS.find(name)(shape, classes)
    logits = module(torch.randn(3, *shape))
    assert logits.shape == (3, classes)
    assert logits.isfinite().all()
    logits.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mcmahan-cnn", (1, 3, 28)),
        ("hsu-cnn", (3, 32, 3)),
        ("vgg9", (3, 32, 7)),
        ("small-cnn", (1, 1, 8)),
    ],
)
def test_an_image_that_is_too_small_is_a_clear_error(name: str, shape) -> None:
    with pytest.raises(ConfigError, match="needs images of at least") as caught:
        MODELS.find(name)(shape, 10)
    assert caught.value.where == "model.name"


def test_widths_are_settings() -> None:
    assert parameters("mlp", (1, 8, 8), hidden=7) == 64 * 7 + 7 + 7 * 7 + 7 + 70 + 10
    assert parameters("small-cnn", (1, 8, 8), width=4) < parameters("small-cnn", (1, 8, 8))
    for name, setting in (("mlp", "hidden"), ("small-cnn", "width")):
        for value in (0, -1, 10**9, "wide"):
            with pytest.raises(ConfigError):
                read_settings(MODELS.find(name), {setting: value}, "model")


def test_every_classifier_is_of_the_small_ones_the_cifar_resnets_or_of_timm() -> None:
    assert [
        *SMALL[:-1],
        "vgg9",
        *CIFAR_RESNETS,
        "gkt-resnet8",
        "gkt-resnet56",
        "darts-search",
        "darts",
        *OF_TIMM,
        SMALL[-1],
    ] == CLASSIFIERS
