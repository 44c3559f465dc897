"""Weights of classifiers in the backbones of networks for masks and boxes, and of whole networks with other classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedlens.base.errors import ConfigError
from fedlens.models.imagenet import repository_of
from fedlens.models.mobilenet_names import mobilenet_v2_leaf
from fedlens.models.segmentation import ENCODERS
from fedlens.models.weights import InitialWeights
from tests.unit.models.zoo_kit import experiment, images, made


def mixed(module: nn.Module) -> nn.Module:
    """The module with every leaf drawn anew, statistics and scales too, so that two swapped leaves are seen."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, leaf in module.state_dict().items():
            if leaf.is_floating_point():
                drawn = torch.rand(leaf.shape, generator=generator)
                wide = leaf.dim() > 1
                leaf.copy_((drawn - 0.5) * (6 / leaf[0].numel()) ** 0.5 if wide else drawn + 0.5)
                if name.endswith("running_mean"):
                    leaf.sub_(1)
    return module.eval()


def loaded(module: nn.Module, tensors: dict[str, Tensor], folder: Path, **more: Any) -> InitialWeights:
    """Loads the tensors from a file."""
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "weights.safetensors")
    weights = InitialWeights(str(folder / "weights.safetensors"), **more)
    weights.load(module, 5)
    return weights


def encoder(backbone: str, channels: int = 3, name: str = "unet", **more: Any) -> nn.Module:
    return made(name, (channels, 64, 64), 5, backbone=backbone, **more).eval()


@pytest.mark.parametrize("backbone", ["mobilenet-v2", "resnet18", "resnet50"])
def test_the_encoder_computes_the_features_of_timm_s_network_on_its_weights(
    backbone: str, tmp_path: Path
) -> None:
    classifier = mixed(timm.create_model(ENCODERS[backbone][1], num_classes=10))
    module = encoder(backbone)
    weights = loaded(module, classifier.state_dict(), tmp_path)
    x = images(2, 3, 64, 64)
    with torch.no_grad():
        *_, last = module.encoder(x)
        expected = classifier.forward_features(x)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(last, expected, rtol=1e-5, atol=1e-5)
    match = weights.match
    assert match is not None
    assert match.backbone == "encoder"
    assert len(match.loaded) == match.backbone_leaves
    assert [name.partition(".")[0] for name in match.unused] in (["fc"] * 2, ["classifier"] * 2)
    assert weights.note is not None
    assert f"{match.backbone_leaves} of {match.backbone_leaves} leaves of the backbone loaded" in weights.note
    assert "left as drawn: decoder, segmentation_head; not in the model: " in weights.note


def test_the_encoder_takes_torchvision_s_names_too(tmp_path: Path) -> None:
    x = images(1, 3, 64, 64)
    for backbone, network in (
        ("mobilenet-v2", torchvision.models.mobilenet_v2()),
        ("resnet18", torchvision.models.resnet18()),
    ):
        published, module = mixed(network), encoder(backbone)
        loaded(module, published.state_dict(), tmp_path)
        kept = {f"encoder.{name}": value for name, value in published.state_dict().items()}
        assert all(
            torch.equal(v, kept[n]) for n, v in module.state_dict().items() if n.startswith("encoder.")
        )
        if backbone == "mobilenet-v2":
            with torch.no_grad():
                torch.testing.assert_close(module.encoder(x)[-1], published.features(x))


def test_every_leaf_of_timm_s_mobilenet_has_one_place() -> None:
    ours = {name.removeprefix("encoder.") for name in encoder("mobilenet-v2").encoder.state_dict()}
    theirs = timm.create_model("mobilenetv2_100", num_classes=0).state_dict()
    places = [mobilenet_v2_leaf(name) for name in theirs]
    assert set(places) == ours
    assert len(places) == len(ours)
    for name in ("blocks.0.1.bn1.weight", "blocks.7.0.bn1.weight", "blocks.x.0.bn1.bias", "conv_pw.weight"):
        assert mobilenet_v2_leaf(name) is None


def test_the_plain_network_leaves_the_last_convolution_of_mobilenet_out(tmp_path: Path) -> None:
    module = encoder("mobilenet-v2", name="deeplabv3plus", atrous="plain")
    published = mixed(timm.create_model("mobilenetv2_100", num_classes=10)).state_dict()
    match = loaded(module, published, tmp_path).match
    assert match is not None
    assert len(match.loaded) == match.backbone_leaves
    assert {name.partition(".")[0] for name in match.unused} == {"conv_head", "bn2", "classifier"}


def test_a_grey_encoder_takes_the_sum_over_the_colours(tmp_path: Path) -> None:
    published = mixed(timm.create_model("resnet18", num_classes=10)).state_dict()
    module = encoder("resnet18", channels=1)
    note = loaded(module, published, tmp_path).note
    assert torch.equal(module.encoder.conv1.weight, published["conv1.weight"].sum(1, keepdim=True))
    assert note is not None
    assert "resized: encoder.conv1.weight (3 to 1 channels)" in note


def test_a_classifier_on_another_network_is_refused(tmp_path: Path) -> None:
    published = timm.create_model("resnet18", num_classes=10).state_dict()
    with pytest.raises(ConfigError, match=r"of the model's .* match .* weights of another network"):
        loaded(encoder("mobilenet-v2"), published, tmp_path)
    with pytest.raises(ConfigError, match="names of the backbone match"):
        loaded(encoder("resnet50"), published, tmp_path)


def test_imagenet_is_what_timm_publishes_of_the_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for backbone, (_, name) in ENCODERS.items():
        with torch.device("meta"):
            repository = repository_of(encoder(backbone))
        assert repository == timm.models.get_pretrained_cfg(name).hf_hub_id
    module, weights = encoder("resnet18"), InitialWeights("imagenet")
    with pytest.raises(ConfigError, match=r"the ImageNet weights timm/resnet18.* are not in the cache"):
        weights.load(module, 5)
    repository = repository_of(module)
    assert repository is not None
    folder = tmp_path / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("0123abc")
    (folder / "snapshots/0123abc").mkdir(parents=True)
    published = mixed(timm.create_model("resnet18")).state_dict()
    save_file(published, folder / "snapshots/0123abc/model.safetensors")
    weights.load(module, 5)
    assert torch.equal(module.encoder.layer4[1].bn2.running_var, published["layer4.1.bn2.running_var"])


# ---- of a whole segmentation network


def test_a_network_with_the_same_classes_is_loaded_whole(tmp_path: Path) -> None:
    other = mixed(encoder("resnet18"))
    module = encoder("resnet18")
    match = loaded(module, other.state_dict(), tmp_path).match
    assert match is not None
    assert match.backbone is None
    assert len(match.loaded) == match.leaves
    with torch.no_grad():
        assert torch.equal(module(images(1, 3, 64, 64)), other(images(1, 3, 64, 64)))


def test_the_head_of_other_classes_is_drawn_anew_and_said(tmp_path: Path) -> None:
    other = mixed(made("unet", (3, 64, 64), 7, backbone="resnet18"))
    module = encoder("resnet18")
    drawn = module.segmentation_head[0].weight.clone()
    weights = loaded(module, other.state_dict(), tmp_path)
    assert weights.note is not None
    ending = "left as drawn: segmentation_head.0.weight, segmentation_head.0.bias (the classifier)"
    assert weights.note.endswith(ending)
    assert torch.equal(module.segmentation_head[0].weight, drawn)
    assert torch.equal(module.decoder.blocks[4].conv2[0].weight, other.decoder.blocks[4].conv2[0].weight)


def test_a_run_of_a_classifier_starts_the_encoder(tmp_path: Path) -> None:
    experiment("resnet18", rounds=1).run(tmp_path / "run")
    trained = load_file(tmp_path / "run/model.safetensors")
    module = made("unet", (1, 64, 64), 5, backbone="resnet18", prepare={"weights": f"run:{tmp_path / 'run'}"})
    assert torch.equal(module.encoder.layer2[0].conv1.weight, trained["layer2.0.conv1.weight"])
    assert torch.equal(module.encoder.bn1.running_mean, trained["bn1.running_mean"])


def shallow(name: str) -> nn.Module:
    return made(name, (3, 96, 96), 3).eval()


def test_the_body_of_a_faster_rcnn_computes_timm_s_features_on_its_weights(tmp_path: Path) -> None:
    classifier = mixed(timm.create_model("mobilenetv3_large_100", num_classes=10))
    module = shallow("fasterrcnn-mobilenet")
    note = loaded(module, classifier.state_dict(), tmp_path).note
    assert note is not None
    assert "262 of 262 leaves of the backbone loaded; left as drawn: net.backbone.fpn, net.rpn" in note
    x = images(2, 3, 96, 96)
    with torch.no_grad():
        features, expected = module.net.backbone.body(x), classifier.forward_features(x)
    torch.testing.assert_close(list(features.values())[-1], expected, rtol=1e-5, atol=1e-5)


def test_ssdlite_takes_the_blocks_before_its_reduced_tail(tmp_path: Path) -> None:
    classifier = mixed(timm.create_model("mobilenetv3_large_100", num_classes=10))
    module = shallow("ssdlite")
    note = loaded(module, classifier.state_dict(), tmp_path).note
    assert note is not None
    assert "214 of 262 leaves of the backbone loaded" in note
    x = images(2, 3, 96, 96)
    for layer in [*module.modules(), *classifier.modules()]:
        if isinstance(layer, nn.BatchNorm2d):
            layer.eps = 1e-3  # SSDLite's
    with torch.no_grad():
        found = module.net.backbone.features[0](x)
        before = classifier.blocks[:5](classifier.bn1(classifier.conv_stem(x)))
        expected = classifier.blocks[5][0].bn1(classifier.blocks[5][0].conv_pw(before))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    depthwise = classifier.blocks[5][0].conv_dw.weight
    assert torch.equal(module.get_parameter("net.backbone.features.1.0.1.0.weight"), depthwise)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("ssdlite", "mobilenetv3_large_100"),
        ("fasterrcnn-mobilenet", "mobilenetv3_large_100"),
        ("retinanet", "resnet50"),
    ],
)
def test_imagenet_weights_of_a_detector_are_those_of_its_body(name: str, body: str) -> None:
    with torch.device("meta"):
        assert repository_of(made(name, (3, 96, 96), 3)) == repository_of(timm.create_model(body))
