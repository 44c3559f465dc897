"""U-Net and DeepLabV3+: the counts of the documents, any size, the libraries' outputs, and the keys of any model."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import segmentation_models_pytorch as smp
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlens.base.errors import ConfigError
from fedlens.core.protocol import ModelSpec
from fedlens.core.tree import part, spec_of
from fedlens.local.rate_scales import module_scales
from fedlens.local.settings import LocalSettings
from fedlens.models.backbone import backbone_of
from fedlens.models.counts import multiply_adds
from fedlens.models.freeze import freeze
from fedlens.models.registry import MODELS
from fedlens.models.segmentation import ENCODERS
from fedlens.settings.single_images import fails_on_one_image, refuse_single_images
from fedlens.tasks.classification import Classification
from tests.contract.contract_kit import nightly_but
from tests.covering import covering
from tests.unit.models.zoo_kit import images, made, parameters, shape_only

TASK = Classification()  # it calls the module with images alone, as segmentation does
NETWORKS: dict[str, tuple[str, dict[str, str]]] = {
    "unet": ("unet", {}),
    "separable": ("deeplabv3plus", {}),
    "plain": ("deeplabv3plus", {"atrous": "plain"}),
}


def network(
    which: str, shape: tuple[int, int, int] = (3, 64, 64), classes: int = 5, **more: Any
) -> nn.Module:
    """One on MobileNetV2."""
    name, settings = NETWORKS[which]
    return made(name, shape, classes, **settings, **more)


@pytest.mark.parametrize(
    ("name", "backbone", "atrous", "count", "trained", "products"),
    [
        ("unet", "resnet101", None, 51_516_133, 9_015_973, 62.7),
        ("unet", "mobilenet-v2", None, 6_631_845, None, 14.1),
        ("unet", "resnet50", None, 32_524_005, 9_015_973, None),
        ("deeplabv3plus", "resnet101", "plain", 59_344_309, 16_844_149, 88.6),
        ("deeplabv3plus", "mobilenet-v2", "plain", 5_816_053, 5_816_053 - 1_811_712, 26.3),
        ("deeplabv3plus", "resnet101", "separable", 45_674_853, None, 56.0),
        ("deeplabv3plus", "mobilenet-v2", "separable", 4_383_653, None, None),
        ("deeplabv3plus", "resnet50", "separable", 26_682_725, None, None),
    ],
)
def test_parameters_and_multiply_adds_are_those_of_the_issue_and_of_fedcv(
    name: str, backbone: str, atrous: str | None, count: int, trained: int | None, products: float | None
) -> None:
    settings = {"backbone": backbone, **({} if atrous is None else {"atrous": atrous})}
    module = shape_only(name, (3, 512, 512), 21, **settings)
    assert parameters(module) == count
    freeze(module, "backbone", 21)
    if trained is not None:
        assert sum(p.numel() for p in module.parameters() if p.requires_grad) == trained
    if products is not None:
        with torch.device("meta"):
            found = multiply_adds(module, torch.zeros(1, 3, 512, 512))
        assert found is not None
        assert abs(found / (products * 1e9) - 1) < 0.01


def test_the_counts_of_fedcv_s_table_7_are_explained() -> None:
    """Its 7.91 M are U-Net on MobileNetV2 and the classifier of that network, which U-Net does not use."""
    unused = shape_only("mobilenet-v2").classifier
    both = parameters(shape_only("unet", (3, 512, 512), 21)) + parameters(unused)
    assert (both, round(both / 1e6, 2)) == (7_912_845, 7.91)
    for name, settings, printed in (
        ("unet", {"backbone": "resnet101"}, 62.22),
        ("unet", {}, 14.24),
        ("deeplabv3plus", {"backbone": "resnet101", "atrous": "plain"}, 88.85),
        ("deeplabv3plus", {"atrous": "plain"}, 26.56),
    ):
        with torch.device("meta"):
            found = multiply_adds(made(name, (3, 512, 512), 21, **settings), torch.zeros(1, 3, 512, 512))
        assert found is not None
        assert abs(found / (printed * 1e9) - 1) < 0.01


@pytest.mark.parametrize("which", NETWORKS)
def test_all_leaves_are_of_the_encoder_the_decoder_or_the_head(which: str) -> None:
    with torch.device("meta"):
        module = network(which)
    assert backbone_of(module) == "encoder"
    assert {name.partition(".")[0] for name in module.state_dict()} == {
        "encoder",
        "decoder",
        "segmentation_head",
    }


@pytest.mark.parametrize(("which", "backbone"), covering(["unet", "separable"], list(ENCODERS)))
def test_the_leaves_have_the_library_s_names_and_shapes(which: str, backbone: str) -> None:
    theirs = {"unet": smp.Unet, "separable": smp.DeepLabV3Plus}[which]
    with torch.device("meta"):
        module = network(which, (3, 64, 64), 5, backbone=backbone)
        expected = theirs(ENCODERS[backbone][0], encoder_weights=None, classes=5)
    assert {n: v.shape for n, v in module.state_dict().items()} == {
        n: v.shape for n, v in expected.state_dict().items()
    }


@pytest.mark.parametrize("which", ["unet", "separable"])
def test_the_outputs_are_the_library_s_where_the_library_takes_the_size(which: str) -> None:
    module = network(which).eval()
    theirs = {"unet": smp.Unet, "separable": smp.DeepLabV3Plus}[which]
    expected = theirs("mobilenet_v2", encoder_weights=None, classes=5).eval()
    expected.load_state_dict(module.state_dict())
    x = images(2, 3, 64, 80)
    with torch.no_grad():
        assert torch.equal(module(x), expected(x))


def test_the_plain_decoder_is_that_of_the_paper_s_figure() -> None:
    """Against the same layers called one after the other, with the sizes that each enlargement has to reach."""
    module = network("plain").eval()
    x = images(2, 3, 64, 96)
    with torch.no_grad():
        _, _, fine, *_, coarse = module.encoder(x)
        assert (coarse.shape[1:], fine.shape[1:]) == ((320, 4, 6), (24, 16, 24))
        pyramid, first, second = module.decoder.aspp, module.decoder.block1, module.decoder.block2
        branches = [branch(coarse) for branch in pyramid.convs]
        assert [branch[0].dilation for branch in list(pyramid.convs)[1:4]] == [(6, 6), (12, 12), (18, 18)]
        deep = functional.interpolate(pyramid.project(torch.cat(branches, 1)), size=(16, 24), mode="bilinear")
        joined = torch.cat([deep, first(fine)], 1)
        assert joined.shape[1] == 256 + 48
        convolution = module.segmentation_head[0]
        logits = functional.interpolate(convolution(second(joined)), size=(64, 96), mode="bilinear")
        torch.testing.assert_close(module(x), logits)


@pytest.mark.parametrize(("which", "channels"), covering(list(NETWORKS), [1, 3]))
def test_images_of_any_size_give_logits_of_that_size(which: str, channels: int) -> None:
    module = network(which, (channels, 33, 47)).eval()
    with torch.no_grad():
        for side in ((33, 47), (120, 160), (64, 64)):
            assert module(images(2, channels, *side)).shape == (2, 5, *side)


@pytest.mark.parametrize("which", ["separable", "plain"])
def test_padding_is_zeros_below_and_to_the_right_and_is_cut_back(which: str) -> None:
    module = network(which).eval()
    x = images(1, 3, 40, 50)
    padded = torch.zeros(1, 3, 48, 64)
    padded[:, :, :40, :50] = x
    with torch.no_grad():
        assert torch.equal(module(x), module(padded)[:, :, :40, :50])
    with pytest.raises(RuntimeError, match="divisible by 16"):
        smp.DeepLabV3Plus("mobilenet_v2", encoder_weights=None)(torch.zeros(1, 3, 120, 160))


@pytest.mark.parametrize("name", ["unet", "deeplabv3plus"])
def test_images_below_32x32_and_unknown_backbones_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' needs images of at least 32x32, but they are 64x31"):
        shape_only(name, (3, 64, 31), 5)


@pytest.mark.parametrize("name", ["unet", "deeplabv3plus"])
def test_without_the_library_building_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    assert name in dict(MODELS.rows())
    with pytest.raises(ConfigError, match="needs segmentation-models-pytorch, which is not inst") as caught:
        made(name, (3, 64, 64))
    assert caught.value.hint == "run: pip install 'fedlens[vision]'"


def test_listing_the_models_imports_none_of_the_libraries() -> None:
    code = (
        "import sys; from fedlens.cli.main import app\n"
        "try: app(['list', 'models'])\n"
        "except SystemExit: pass\n"
        "sys.exit([m for m in ('torch', 'timm', 'torchvision', 'segmentation_models_pytorch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() in ("", "[]")
    assert "deeplabv3plus" in done.stdout


# ---- the keys of any model


def test_a_frozen_backbone_neither_trains_nor_moves_its_statistics() -> None:
    module = network("unet", prepare={"freeze": "backbone"})
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module.train()
    module(images(2, 3, 64, 64)).sum().backward()
    frozen = [name for name, weight in module.named_parameters() if weight.grad is None]
    assert frozen == [name for name, _ in module.named_parameters() if name.startswith("encoder.")]
    moved = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
    assert {name.partition(".")[0] for name in moved} == {"decoder"}
    fixed = {name.partition(".")[0] for name in part(spec_of(module), "fixed")}
    assert fixed == {"encoder"}


@pytest.mark.parametrize("which", NETWORKS)
def test_the_features_of_a_frozen_backbone_cannot_be_kept(which: str) -> None:
    with pytest.raises(ConfigError, match="takes features of several layers") as caught:
        network(which, prepare={"freeze": "backbone", "cache_features": True})
    assert caught.value.where == "model.cache_features"


@pytest.mark.parametrize(("which", "norm"), covering(list(NETWORKS), ["group", "layer", "frozen"]))
def test_every_batch_normalization_is_replaced(which: str, norm: str) -> None:
    module = network(which, prepare={"norm": norm}).train()
    assert not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())
    logits = module(images(1, 3, 64, 64))  # of a batch of one image too
    logits.square().mean().backward()
    assert logits.isfinite().all()
    assert all(p.grad is not None for p in module.parameters() if p.requires_grad)


@pytest.mark.parametrize("which", NETWORKS)
def test_the_decoder_s_rate_is_ten_times_the_backbone_s(which: str) -> None:
    with torch.device("meta"):
        module = network(which)
    settings = LocalSettings(lr=0.1, batch_size=2, lr_scale={"decoder": 10, "segmentation_head": 10})
    scales = module_scales(settings, module, 5)
    leaves = part(spec_of(module), "weight", trainable=True)
    assert [scale == 10 for scale in scales] == [not leaf.startswith("encoder.") for leaf in leaves]
    assert {1.0, 10.0} == set(scales)


@pytest.mark.parametrize(("which", "fails"), [("unet", False), ("separable", True), ("plain", True)])
def test_deeplab_cannot_train_on_one_image_under_batch_normalization(which: str, fails: bool) -> None:
    name, settings = NETWORKS[which]
    spec = ModelSpec(MODELS.find(name), name, settings, (3, 64, 64), 5, 0)
    assert fails_on_one_image(spec, TASK) == fails
    local, sizes, names = LocalSettings(lr=0.1, batch_size=2), np.array([4, 3]), ["a", "b"]
    if fails:
        with pytest.raises(ConfigError, match=f"a batch of one image, on which '{name}' fails"):
            refuse_single_images(spec, TASK, local, sizes, names)
    else:
        refuse_single_images(spec, TASK, local, sizes, names)


def test_the_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(5)
    one = network("plain").state_dict()
    torch.manual_seed(6)
    other = network("plain").state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def falling(module: nn.Module, x: Tensor, mask: Tensor, steps: int) -> list[float]:
    """The losses of some steps of Adam, without dropout."""
    optimizer, seen = torch.optim.Adam(module.train().parameters(), lr=3e-4), []
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.eval()
    for _ in range(steps):
        loss = functional.cross_entropy(module(x), mask, ignore_index=255)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize("which", nightly_but([*NETWORKS][:1], NETWORKS))
def test_the_loss_falls_over_steps(which: str) -> None:
    """Classes are the brightness of a pixel, and a strip is void."""
    x = functional.interpolate(images(2, 3, 8, 8), size=32)
    mask = (x.mean(1) > 0).long()
    mask[:, :2] = 255
    seen = falling(network(which, (3, 32, 32), 2), x, mask, 8)
    assert seen[-1] < 0.9 * seen[0]
