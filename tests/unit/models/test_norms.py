"""`model.norm`: what is replaced, what is kept, and the four normalizations against their formulas."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedlens import load_result, resume
from fedlens.base.errors import ConfigError
from fedlens.core.tree import count, spec_of, tree_of
from fedlens.local.vectorized.layers import known
from fedlens.models.norms import FrozenBatchNorm, with_norm
from tests.covering import covering
from tests.unit.models.zoo_kit import (
    CONVOLUTIONAL,
    WITH_BATCH_NORM,
    experiment,
    images,
    made,
    parameters,
    shape_only,
)

KINDS = ("group", "layer", "frozen")
NEW = {"group": nn.GroupNorm, "layer": nn.GroupNorm, "frozen": FrozenBatchNorm}


def others(module: nn.Module) -> Counter[str]:
    """The layers of a module that are no normalization, by what they print."""
    norms = (_BatchNorm, nn.GroupNorm, FrozenBatchNorm)
    leaves = (
        layer for layer in module.modules() if not isinstance(layer, norms) and not any(layer.children())
    )
    return Counter(map(repr, leaves))


@pytest.mark.parametrize(("name", "kind"), covering([*CONVOLUTIONAL, "resnet20", "resnet56"], KINDS))
def test_every_batch_normalization_is_replaced_and_every_other_layer_is_kept(name: str, kind: str) -> None:
    before, after = shape_only(name), shape_only(name, prepare={"norm": kind})
    assert sum(isinstance(layer, _BatchNorm) for layer in before.modules()) == WITH_BATCH_NORM[name]
    assert sum(isinstance(layer, NEW[kind]) for layer in after.modules()) == WITH_BATCH_NORM[name]
    assert not any(isinstance(layer, _BatchNorm) for layer in after.modules())
    assert others(after) == others(before)
    assert [n for n, _ in after.named_parameters()] == [n for n, _ in before.named_parameters()]
    assert count(spec_of(after)) == parameters(before)


@pytest.mark.parametrize(
    ("name", "kind"),
    covering(["mobilenet-v3-large", "efficientnet-b0", "mobilenet-v2", "resnet18", "resnet20"], KINDS),
)
def test_with_all_normalizations_made_identities_the_network_stays_the_same(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So activations inside timm's normalization layers stay: without them the outputs would be linear."""
    before = made(name).eval()
    for layer in before.modules():
        if isinstance(layer, _BatchNorm):
            layer.eps = 0.0  # statistics are 0 and 1, so it does nothing
            torch.nn.init.ones_(layer.weight)
    tree = {n: value for n, value in before.state_dict().items() if kind == "frozen" or "running" not in n}
    after = made(name, prepare={"norm": kind})
    after.load_state_dict({n: value for n, value in tree.items() if not n.endswith("tracked")})
    for layer in after.modules():
        if isinstance(layer, FrozenBatchNorm):
            layer.eps = 0.0
    monkeypatch.setattr(nn.functional, "group_norm", lambda input, *_: input)
    x = images(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(after.train()(x), before(x), rtol=1e-4, atol=1e-5)


def affine(layer: nn.Module) -> nn.Module:
    """The layer with a scale and a shift that are not 1 and 0."""
    torch.nn.init.uniform_(layer.weight, 0.5, 2)
    torch.nn.init.uniform_(layer.bias, -1, 1)
    return layer


def by_groups(x: Tensor, groups: int, bn: nn.BatchNorm2d) -> Tensor:
    """Wu and He 2018, equations 1 and 2: mean and variance over the channels of a group and all pixels."""
    rows = x.double().view(len(x), groups, -1)
    rows = (rows - rows.mean(2, keepdim=True)) / (rows.var(2, unbiased=False, keepdim=True) + bn.eps).sqrt()
    return rows.view_as(x) * bn.weight[:, None, None] + bn.bias[:, None, None]


@pytest.mark.parametrize(
    ("kind", "channels", "groups"),
    [
        ("group", 16, 2),
        ("group", 24, 3),
        ("group", 12, 3),
        ("group", 4, 1),
        ("group", 3, 3),
        ("layer", 16, 1),
    ],
)
def test_group_and_layer_normalization_are_the_formula_with_the_scale_that_the_layer_had(
    kind: Any, channels: int, groups: int
) -> None:
    torch.manual_seed(0)
    bn = affine(nn.BatchNorm2d(channels, eps=0.1))
    bn.bias.requires_grad_(False)
    x = images(3, channels, 4, 5)
    expected = by_groups(x, groups, bn)
    layer = with_norm(nn.Sequential(bn), kind)[0]
    torch.testing.assert_close(layer(x).double(), expected.double(), rtol=1e-5, atol=1e-6)
    assert [p.requires_grad for p in layer.parameters()] == [True, False]


def test_small_cnn_and_any_other_model_have_the_same_group_normalization() -> None:
    own = [layer for layer in made("small-cnn", norm="group").modules() if isinstance(layer, nn.GroupNorm)]
    general = made("small-cnn", norm="batch")
    replaced = [layer for layer in with_norm(general, "group").modules() if isinstance(layer, nn.GroupNorm)]
    assert [repr(layer) for layer in own] == [repr(layer) for layer in replaced]
    assert [layer.num_groups for layer in own] == [2, 4]


def test_a_frozen_normalization_is_the_evaluated_one_and_does_not_move() -> None:
    torch.manual_seed(0)
    bn = affine(nn.BatchNorm2d(6))
    torch.nn.init.uniform_(bn.running_mean, -1, 1)
    torch.nn.init.uniform_(bn.running_var, 0.5, 2)
    x = images(4, 6, 5, 5)
    expected = bn.eval()(x)
    module = with_norm(nn.Sequential(nn.Conv2d(6, 6, 1), bn), "frozen").train()
    before = tree_of(module)
    assert torch.equal(module[1](x), expected)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for _ in range(3):
        module(x).square().mean().backward()
        optimizer.step()
    after = tree_of(module)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved == {"0.weight", "0.bias"}
    roles = {name: (leaf.role, leaf.trainable) for name, leaf in spec_of(module).items()}
    assert roles["1.running_mean"] == roles["1.running_var"] == ("fixed", False)
    assert roles["1.weight"] == ("weight", False)
    assert count(spec_of(module)) == 6 * 6 + 6 + 12


def test_a_frozen_normalization_loads_the_state_of_a_batch_normalization() -> None:
    published = affine(nn.BatchNorm2d(4))
    published.running_mean += 1
    layer = with_norm(nn.Sequential(nn.BatchNorm2d(4)), "frozen")
    layer.load_state_dict(nn.Sequential(published).state_dict())
    assert torch.equal(layer[0].running_mean, published.running_mean)
    assert torch.equal(layer[0].weight, published.weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(16), (3, 16)),
        (nn.BatchNorm1d(16), (3, 16, 5)),
        (nn.BatchNorm3d(16), (3, 16, 2, 3, 4)),
        (nn.BatchNorm2d(16, affine=False), (3, 16, 4, 4)),
        (nn.SyncBatchNorm(16), (3, 16, 4, 4)),
    ],
)
def test_batch_normalization_of_every_dimension_is_replaced(layer: nn.Module, kind: Any, shape) -> None:
    x = images(*shape)
    for module in (with_norm(nn.Sequential(layer), kind), with_norm(layer, kind)):
        assert isinstance(next(iter(module.children()), module), NEW[kind])
        assert module(x).shape == x.shape


def test_one_layer_under_two_names_stays_one_layer() -> None:
    shared = nn.BatchNorm2d(8)
    module = with_norm(nn.Sequential(shared, nn.ReLU(), shared), "group")
    assert module[0] is module[2]


def test_batch_keeps_the_layers_themselves() -> None:
    module = made("resnet20")
    layers = list(module.modules())
    assert list(with_norm(module, "batch").modules()) == layers


class Squared(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).square()


@pytest.mark.parametrize("kind", ["batch", *KINDS])
@pytest.mark.parametrize("name", ["hsu-cnn", "vit-tiny"])
def test_a_model_without_batch_normalization_is_refused(name: str, kind: str) -> None:
    with pytest.raises(ConfigError, match="no batch normalization") as caught:
        shape_only(name, (3, 64, 64), prepare={"norm": kind})
    assert caught.value.where == "model.norm"


def test_a_layer_that_may_do_more_than_normalize_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="'1' is a Squared, a batch normalization with a forward pass of its own"
    ):
        with_norm(nn.Sequential(nn.Conv2d(1, 8, 3), Squared(8)), "group")
    with pytest.raises(ConfigError, match="'0' keeps no statistics"):
        with_norm(nn.Sequential(nn.BatchNorm2d(8, track_running_stats=False)), "frozen")


class Net(nn.Module):
    """A user's own, with the first normalization before anything else."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.before = nn.BatchNorm2d(in_channels)
        self.conv, self.bn = nn.Conv2d(in_channels, 8, 3), nn.BatchNorm2d(8)
        self.out = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.bn(self.conv(self.before(x)))).mean((2, 3)))


@pytest.mark.parametrize("kind", ["class", "object", "file"])
def test_frozen_leaves_of_a_users_own_model_are_unchanged_after_a_run(kind: str, tmp_path) -> None:
    own = tmp_path / "net.py"
    own.write_text("from tests.unit.models.test_norms import Net", encoding="utf-8")
    given: dict[str, Any] = {"class": Net, "object": Net(1, 10), "file": f"{own}:Net"}
    result = experiment({"name": given[kind], "norm": "frozen"}).run(tmp_path / "run")
    assert result.config["model"]["norm"] == "frozen"
    if kind == "object":
        result = load_result(tmp_path / "run", model=given["object"])
    trained = result.model
    assert isinstance(trained.before, FrozenBatchNorm)
    start, end = tree_of(with_norm(Net(1, 10), "frozen")), tree_of(trained)
    fixed = [name for name, leaf in spec_of(trained).items() if not leaf.trainable]
    assert len(fixed) == 8
    assert all(torch.equal(end[name], start[name]) for name in fixed)
    sent = result.metrics[-1]["bytes_up"]
    moving = sum(torch.Size(leaf.shape).numel() for leaf in spec_of(trained).values() if leaf.trainable)
    assert sent == 2 * (4 * moving + 8)


@pytest.mark.parametrize("model", ["mobilenet-v3-large", "efficientnet-b0"])
def test_each_trained_layer_has_a_form_for_stacked_clients(model: str) -> None:
    assert known(made(model, (1, 8, 8), prepare={"norm": "group"}))


@pytest.mark.parametrize(
    ("model", "norm", "close"),
    [
        ("resnet20", "group", 1e-4),
        ("resnet20", "frozen", 1e-4),
        # One pixel a channel is left at its end, so in float32 rounding shows; the engine tries it in float64 before.
        pytest.param("mobilenet-v3-large", "group", 2e-2, marks=pytest.mark.nightly),
        pytest.param("mobilenet-v3-large", "frozen", 2e-2, marks=pytest.mark.nightly),
    ],
)
def test_without_batch_statistics_clients_train_stacked_as_one_after_the_other(
    model: str, norm: str, close: float, tmp_path
) -> None:
    table: dict[str, Any] = {"name": model, "norm": norm, **({"width": 8} if model == "resnet20" else {})}
    assert known(made(model, (1, 8, 8), prepare={"norm": norm}))  # each layer has a form for stacked clients
    ends = [
        tree_of(experiment(table, engine, rounds=1).run(tmp_path / engine).model)
        for engine in ("inline", "vectorized")
    ]
    gaps = [(a - b).norm() / (a.norm() + 1e-3) for a, b in zip(*(e.values() for e in ends), strict=True)]
    assert max(gaps) < close


def test_a_run_with_an_object_is_resumed_with_the_same_normalization(tmp_path) -> None:
    given = Net(1, 10)
    whole = experiment({"name": given, "norm": "group", "bottleneck": 5}).run(tmp_path / "whole")
    again = experiment({"name": given, "norm": "group", "bottleneck": 5}, rounds=1)
    again.run(tmp_path / "half")
    config = tmp_path / "half" / "config.toml"
    config.write_text(config.read_text("utf-8").replace("rounds = 1", "rounds = 2"), encoding="utf-8")
    half = resume(tmp_path / "half", model=given, accept_changes=True)
    assert half.config["model"] == whole.config["model"]
    for folder in ("whole", "half"):
        module = load_result(tmp_path / folder, model=given).model
        assert sum(isinstance(layer, nn.GroupNorm) for layer in module.modules()) == 2
        assert module.out.bottleneck.out_features == 5


def test_stacked_clients_refuse_batch_normalization_and_say_which_setting_replaces_it(tmp_path) -> None:
    with pytest.raises(ConfigError, match="normalizes over the examples of a batch") as caught:
        experiment("resnet20", "vectorized").run(tmp_path / "run")
    assert "model.norm = 'group'" in str(caught.value)


def test_a_run_keeps_the_setting_and_its_model_is_read_with_it(tmp_path) -> None:
    experiment({"name": "resnet20", "width": 4, "norm": "layer"}, rounds=1).run(tmp_path / "run")
    result = load_result(tmp_path / "run")
    assert result.config["model"] == {"name": "resnet20", "width": 4, "norm": "layer"}
    assert sum(isinstance(layer, nn.GroupNorm) for layer in result.model.modules()) == 19


def test_fedbn_names_the_setting_that_took_batch_normalization_away(tmp_path) -> None:
    with pytest.raises(ConfigError, match="has no batch normalization") as caught:
        experiment({"name": "resnet20", "norm": "group"}, algorithm="fedbn").run(tmp_path / "run")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("set model.norm = 'batch'")
