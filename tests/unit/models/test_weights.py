"""What of a file reaches a model: names, shapes, types, the first layer, position embeddings, the classifier."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from timm.models import adapt_input_conv
from torch import Tensor, nn
from torchvision import models as torchvision_models

from fedlens.base.errors import ConfigError, DataError
from fedlens.core.protocol import ModelSpec
from fedlens.core.tree import tree_of
from fedlens.models.head import with_bottleneck
from fedlens.models.prepare import Preparation
from fedlens.models.weights import InitialWeights, Match, adapted_channels, resized_positions
from fedlens.models.weights import load_weights as load
from fedlens.models.weights_file import WeightsFile


def load_weights(module: nn.Module, file: WeightsFile, partial: bool = False) -> Match:
    """The module's classifier is its last linear layer."""
    classes = [m.out_features for m in module.modules() if isinstance(m, nn.Linear)][-1]
    return load(module, file, classes, partial)


class Net(nn.Module):
    """A small network with every kind of leaf."""

    def __init__(self, channels: int = 3, classes: int = 10, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3)
        self.fc = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.conv2(self.bn1(self.conv1(images))).mean((2, 3)))


def of(tensors: Mapping[str, Tensor]) -> WeightsFile:
    return WeightsFile(tensors, "0" * 64, Path("net.pt"))


def filled(module: nn.Module) -> dict[str, Tensor]:
    """Values for every leaf of the module that no initialization draws."""
    generator = torch.Generator().manual_seed(1)
    state = module.state_dict().items()
    return {
        n: torch.rand(v.shape, generator=generator) + 2 if v.is_floating_point() else v + 7 for n, v in state
    }


def test_every_leaf_is_that_of_the_file() -> None:
    module, tensors = Net(), filled(Net())
    match = load_weights(module, of(tensors))
    assert match.leaves == len(match.loaded) == 10
    assert (match.resized, match.head, match.drawn, match.unused) == ((), (), (), ())
    for name, value in module.state_dict().items():
        assert torch.equal(value, tensors[name])


def test_a_classifier_of_another_class_count_stays_as_drawn() -> None:
    module = Net(classes=100)
    drawn, tensors = module.fc.weight.clone(), filled(Net(classes=10))
    match = load_weights(module, of(tensors))
    assert match.head == ("fc.weight", "fc.bias")
    assert len(match.loaded) == 8
    assert torch.equal(module.fc.weight, drawn)
    assert torch.equal(module.conv2.weight, tensors["conv2.weight"])
    assert match.sentence("net.pt") == (
        "weights from net.pt: 8 of 10 leaves loaded; left as drawn: fc.weight, fc.bias (the classifier)"
    )


def test_a_classifier_that_the_file_lacks_stays_as_drawn_and_does_not_count() -> None:
    tensors = {name: value for name, value in filled(Net()).items() if not name.startswith("fc.")}
    tensors["head.weight"] = torch.ones(1000, 4)
    match = load_weights(Net(), of(tensors))
    assert match.head == ("fc.weight", "fc.bias")
    assert (match.drawn, match.unused) == ((), ("head.weight",))


def test_a_bottleneck_is_part_of_the_classifier() -> None:
    module = with_bottleneck(Net(), 10, 3)
    match = load(module, of(filled(Net())), 10)
    names = ("bottleneck.weight", "bottleneck.bias", "classifier.weight", "classifier.bias")
    assert match.head == tuple(f"fc.{name}" for name in names)
    assert not match.drawn


@pytest.mark.parametrize("channels", [1, 2, 4, 6])
def test_the_first_layer_is_adapted_as_timm_does(channels: int) -> None:
    module, tensors = Net(channels), filled(Net(3))
    match = load_weights(module, of(tensors))
    assert torch.equal(module.conv1.weight, adapt_input_conv(channels, tensors["conv1.weight"]))
    assert match.resized == (f"conv1.weight (3 to {channels} channels)",)


def test_a_grey_image_gives_what_it_gave_with_its_channels_repeated() -> None:
    weight, image = torch.randn(5, 3, 3, 3), torch.randn(2, 1, 8, 8)
    grey = nn.functional.conv2d(image, adapted_channels(weight, 1))
    assert torch.allclose(grey, nn.functional.conv2d(image.expand(-1, 3, -1, -1), weight), atol=1e-5)


def test_another_convolution_is_not_adapted() -> None:
    tensors = filled(Net())
    tensors["conv2.weight"] = tensors["conv2.weight"][:, :3]
    match = load_weights(Net(), of(tensors))
    assert match.drawn == ("conv2.weight",)


@pytest.mark.parametrize(("prefix", "side"), [(1, 4), (1, 20), (0, 7), (2, 3)])
def test_position_embeddings_are_resized_as_timm_does(prefix: int, side: int) -> None:
    embedding = torch.randn(1, prefix + 14 * 14, 8)
    expected = resample_abs_pos_embed(embedding, [side, side], num_prefix_tokens=prefix)
    assert torch.equal(resized_positions(embedding, side, prefix), expected)
    assert torch.equal(resized_positions(embedding, side, prefix)[:, :prefix], embedding[:, :prefix])


def test_a_vision_transformer_of_timm_takes_weights_of_another_image_size() -> None:
    def vit(size: int, classes: int) -> nn.Module:
        return timm.create_model(
            "vit_tiny_patch16_224", img_size=size, num_classes=classes, depth=1, embed_dim=48, num_heads=3
        )

    source, module = vit(224, 1000), vit(64, 10)
    match = load_weights(module, of(source.state_dict()))
    assert match.resized == ("pos_embed (14x14 to 4x4 positions)",)
    assert match.head == ("head.weight", "head.bias")
    assert not match.drawn
    expected = resample_abs_pos_embed(source.pos_embed, [4, 4], num_prefix_tokens=1)
    assert torch.equal(module.pos_embed, expected)


def test_a_vision_transformer_of_torchvision_does_too() -> None:
    sizes: dict[str, Any] = {
        "patch_size": 16, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 16
    }  # fmt: skip
    source = torchvision_models.VisionTransformer(image_size=64, **sizes)
    match = load_weights(
        torchvision_models.VisionTransformer(image_size=32, num_classes=7, **sizes), of(source.state_dict())
    )
    assert match.resized == ("encoder.pos_embedding (4x4 to 2x2 positions)",)
    assert match.head == ("heads.head.weight", "heads.head.bias")


def test_weights_of_torchvision_s_resnet18_fit_timm_s_bit_by_bit() -> None:
    source = torchvision_models.resnet18(num_classes=5)
    for value in source.buffers():
        value.add_(1)
    module = timm.create_model("resnet18", num_classes=5)
    match = load_weights(module, of(source.state_dict()))
    assert len(match.loaded) == match.leaves == 102
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(module.eval()(images), source.eval()(images))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_point_types_become_the_model_s(dtype: torch.dtype) -> None:
    module, tensors = Net(), filled(Net())
    load_weights(module, of({n: v.to(dtype) if v.is_floating_point() else v for n, v in tensors.items()}))
    for name, value in module.state_dict().items():
        stored = tensors[name].to(dtype) if value.is_floating_point() else tensors[name]
        assert value.dtype == Net().state_dict()[name].dtype
        assert torch.equal(value, stored.to(value.dtype))


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.bool])
def test_types_that_are_no_weights_are_refused_with_the_leaf(dtype: torch.dtype) -> None:
    tensors = {**filled(Net()), "conv2.weight": torch.zeros(4, 4, 3, 3, dtype=dtype)}
    with pytest.raises(DataError, match=r"'conv2\.weight' is \w+ in the weights file"):
        load_weights(Net(), of(tensors))


@pytest.mark.parametrize(("value", "says"), [(torch.nan, "NaN"), (torch.inf, "infinite values")])
def test_a_value_that_is_not_finite_is_refused_with_the_leaf_and_changes_nothing(
    value: float, says: str
) -> None:
    module, tensors = Net(), filled(Net())
    tensors["bn1.running_var"][2] = value
    before = tree_of(module)
    with pytest.raises(
        DataError, match=rf"'bn1\.running_var' contains {says} in the weights file \(net\.pt\)"
    ):
        load_weights(module, of(tensors))
    assert all(torch.equal(before[name], leaf) for name, leaf in module.state_dict().items())


def test_a_number_too_large_for_float32_is_refused() -> None:
    tensors = filled(Net())
    tensors["fc.bias"] = tensors["fc.bias"].double() * 1e300
    with pytest.raises(DataError, match=r"'fc\.bias' contains infinite values"):
        load_weights(Net(), of(tensors))


def test_nan_in_a_tensor_that_the_model_lacks_does_no_harm() -> None:
    match = load_weights(Net(), of({**filled(Net()), "ema.decay": torch.tensor(torch.nan)}))
    assert match.unused == ("ema.decay",)
    assert match.sentence("a").endswith("; not in the model: ema.decay")


def test_weights_of_another_network_are_refused_with_how_many_names_match() -> None:
    source = timm.create_model("mobilenetv2_100", num_classes=10).state_dict()
    with pytest.raises(ConfigError) as error:
        load_weights(Net(), of({**source, "conv1.weight": torch.ones(4, 3, 3, 3)}))
    assert (
        "1 of the model's 8 names outside the classifier match net.pt, so these are weights of another network"
        in str(error.value)
    )
    assert "model.weights_partial = true" in str(error.value)


def test_weights_of_another_width_are_refused_with_a_shape() -> None:
    with pytest.raises(ConfigError) as error:
        load_weights(Net(width=8), of(filled(Net(width=4))))
    assert "conv1.weight [4, 3, 3, 3] in the file, [8, 3, 3, 3] in the model" in str(error.value)


def test_half_of_the_names_is_enough_and_less_only_on_request() -> None:
    tensors = filled(Net())
    half = {name: tensors[name] for name in [*list(tensors)[:3], "fc.weight", "fc.bias"]}
    assert len(load_weights(Net(), of(half)).loaded) == 5
    del half["conv1.bias"]
    with pytest.raises(ConfigError, match=r"4 of the model's 10 names match"):
        load_weights(Net(), of(half))
    module = Net()
    match = load_weights(module, of(half), partial=True)
    assert len(match.drawn) == 6
    assert torch.equal(module.conv1.weight, tensors["conv1.weight"])


def test_a_classifier_left_as_drawn_does_not_count_against_the_file() -> None:
    tensors = filled(Net(classes=3))
    fewer = {name: tensors[name] for name in ("conv1.weight", "conv1.bias", "bn1.weight", "bn1.bias")}
    with_head = {**fewer, "fc.weight": tensors["fc.weight"], "fc.bias": tensors["fc.bias"]}
    assert len(load_weights(Net(), of(with_head)).loaded) == 4, "4 of 8"


def test_a_file_without_any_name_of_the_model_is_always_refused() -> None:
    with pytest.raises(ConfigError) as error:
        load_weights(Net(), of({"w": torch.ones(2)}), partial=True)
    assert "0 of the model's 8 names outside the classifier match" in str(error.value)
    assert "weights_partial" not in str(error.value)


def test_a_module_that_needs_no_initial_weights_reads_no_file(tmp_path: Path) -> None:
    prepare = Preparation(weights=str(tmp_path / "none.pt"))
    spec = ModelSpec(lambda shape, classes: Net(), "net", {}, (3, 8, 8), 10, seed=0, prepare=prepare)
    assert isinstance(spec.build(initial=False), Net)
    with pytest.raises(ConfigError, match="weights file not found"):
        spec.build()


def test_every_build_has_the_weights_of_the_file(tmp_path: Path) -> None:
    tensors = filled(Net())
    save_file(tensors, tmp_path / "a.safetensors")
    prepare = Preparation(weights=str(tmp_path / "a.safetensors"))
    spec = ModelSpec(lambda shape, classes: Net(), "net", {}, (3, 8, 8), 10, seed=0, prepare=prepare)
    for _ in range(2):
        assert all(torch.equal(v, tensors[n]) for n, v in spec.build().state_dict().items())


def test_the_tensors_stay_in_their_process_unless_clients_begin_with_them(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(50, 100), "bias": torch.ones(50)}, tmp_path / "a.safetensors")
    weights = InitialWeights(str(tmp_path / "a.safetensors"))
    weights.load(nn.Linear(100, 50), 50)
    assert len(pickle.dumps(weights)) < 2_000
    weights.travels = True
    there = pickle.loads(pickle.dumps(weights))
    (tmp_path / "a.safetensors").unlink()
    module = nn.Linear(100, 50)
    there.load(module, 50)
    assert torch.equal(module.weight, torch.ones(50, 100))


def test_a_file_that_was_exchanged_is_refused_by_its_digest(tmp_path: Path) -> None:
    save_file(filled(Net()), tmp_path / "a.safetensors")
    weights = InitialWeights(str(tmp_path / "a.safetensors"))
    weights.load(Net(), 10)
    again = InitialWeights(weights.setting, expected=weights.sha256)
    again.load(Net(), 10)
    save_file({name: value + 1 for name, value in filled(Net()).items()}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=r"has the SHA-256 [0-9a-f]{64}, but model.weights_sha256 is"):
        InitialWeights(weights.setting, expected=weights.sha256).load(Net(), 10)


def test_a_path_is_kept_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert Preparation(weights="a.pt").weights == str(tmp_path / "a.pt")
    assert Preparation(weights="run:runs/a").weights == f"run:{tmp_path}/runs/a"
    assert Preparation(weights="~/a.pt").weights == "/home/someone/a.pt"
    assert Preparation(weights="imagenet").weights == "imagenet"


def test_a_model_file_says_nothing_of_the_weights_that_training_began_with() -> None:
    assert Preparation(weights="a.pt", weights_partial=True, weights_sha256="0" * 64).structure() == {}


def test_none_means_random_weights_without_the_digest_of_the_recipe_s_file() -> None:
    keys = {"weights": "none", "weights_partial": True, "weights_sha256": "0" * 64, "norm": "group"}
    without = Preparation(**keys)
    assert without == Preparation(norm="group")
    assert without.initial_weights is None
    assert Preparation.claims("weights", "none", free=False)
