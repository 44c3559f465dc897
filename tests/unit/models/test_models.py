"""Models: the parameter counts of the documents, shapes, and sizes that do not fit."""

import pytest
import torch

from fedlens.core.errors import ConfigError
from fedlens.core.registry import read_settings
from fedlens.models.registry import MODELS


def parameters(name: str, shape, classes: int = 10, **settings) -> int:
    with torch.device("meta"):  # the structure without memory
        return sum(p.numel() for p in MODELS.find(name)(shape, classes, **settings).parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "count"),
    [
        ("mcmahan-cnn", (1, 28, 28), 10, 1_663_370),  # McMahan et al. 2017, ghaemi2022 section 3
        ("hsu-cnn", (3, 32, 32), 10, 1_756_426),  # hsu2019, "same" padding
        ("mlp", (1, 28, 28), 10, 199_210),  # McMahan's 2NN
        ("linear", (1, 28, 28), 10, 7_850),
        ("linear", (3, 32, 32), 100, 307_300),
        ("small-cnn", (1, 8, 8), 10, 9_930),
        ("resnet20", (3, 32, 32), 10, 269_722),  # He et al. 2016, parameter-free shortcuts
        ("resnet32", (3, 32, 32), 10, 464_154),
        ("resnet44", (3, 32, 32), 10, 658_586),
        ("resnet56", (3, 32, 32), 10, 853_018),
        ("resnet18", (3, 224, 224), 1000, 11_689_512),
        ("resnet34", (3, 224, 224), 1000, 21_797_672),
        ("resnet50", (3, 224, 224), 1000, 25_557_032),
        ("mobilenet-v2", (3, 224, 224), 1000, 3_504_872),
        ("mobilenet-v3-large", (3, 224, 224), 1000, 5_483_032),
        ("efficientnet-b0", (3, 224, 224), 1000, 5_288_548),
        ("vit-b-16", (3, 224, 224), 1000, 86_567_656),
        ("vit-tiny", (3, 224, 224), 1000, 5_717_416),
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


@pytest.mark.parametrize("name", [name for name, entry in MODELS.entries.items() if entry.extra is None])
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 9, 14), (2, 4, 5)])
@pytest.mark.parametrize("classes", [2, 10])
def test_every_own_model_takes_every_image(name: str, shape, classes: int) -> None:
    if name.startswith("resnet") and min(shape[1:]) < 8:
        pytest.skip("needs images of at least 8x8")
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
        ("small-cnn", (1, 1, 8)),
        ("resnet20", (3, 7, 8)),
        ("resnet18", (1, 32, 7)),
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
