"""MOON's client rule: which models it takes, and what it leaves behind in a worker."""

import pytest
import torch
from torch import nn

from fedlens.algorithms.client_sampling import Fixed
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.moon import PREVIOUS, THERE, contrastive, moon
from fedlens.algorithms.registry import RULES
from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.core.modules import Loadable
from fedlens.core.random import Rng
from fedlens.core.tree import tree_of
from fedlens.local.chain import chain
from fedlens.local.features import OWN
from fedlens.local.rules import ClientRule, Solved, plain
from tests.identity.identity_kit import course, model, parts, world
from tests.unit.local.test_training import SPEC, client, payload, train

LOCAL = {"lr": 0.1}


def single(input_shape, classes) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], classes)).double()


def frozen_encoder(input_shape, classes) -> nn.Module:
    module = nn.Sequential(nn.Linear(input_shape[0], 6), nn.ReLU(), nn.Linear(6, classes)).double()
    module[0].requires_grad_(False)
    return module


def without_linear(input_shape, classes) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, classes, 4), nn.Flatten()).double()


class Reversed(nn.Module):
    """The layer that gives the classes is defined first, and one that is never used last."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(6, 3).double(), nn.Linear(4, 6).double()
        self.spare = nn.Linear(2, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (single, r"what enters the last linear layer \('1'\) does not depend on any trainable weight"),
        (
            frozen_encoder,
            r"what enters the last linear layer \('2'\) does not depend on any trainable weight",
        ),
        (without_linear, "this model has no linear layer"),
    ],
)
def test_models_on_which_the_term_has_no_gradient_are_refused_with_the_reason(factory, reason: str) -> None:
    spec = model(factory=factory)
    with pytest.raises(ConfigError, match=reason) as caught:
        moon(parts(world(), LOCAL, spec))
    assert caught.value.where == "model.name"
    moon(parts(world(), LOCAL, spec), mu=0.0)  # FedAvg
    with pytest.raises(ConfigError, match=reason):
        fedavg(parts(world(), LOCAL, spec, client=contrastive()))


def test_a_last_layer_that_takes_no_part_is_told() -> None:
    there, spec = world(), model(factory=lambda shape, classes: Reversed())
    run = course(moon(parts(there, LOCAL, spec, select=Fixed((1,)))), there, rounds=2)
    assert run.steps[0].tally.failures == {}
    ((told, _),) = run.steps[1].tally.failures[1].items()
    assert "is not used in its forward pass" in told


def hooks(scratch: dict) -> int:
    modules = [
        layer
        for loadable in scratch.values()
        if isinstance(loadable, Loadable)
        for layer in loadable.module.modules()
    ]
    return sum(len(layer._forward_pre_hooks) for layer in modules)


def test_nothing_listens_to_the_models_after_a_visit_however_it_ended() -> None:
    scratch, heard = {}, []
    state = {
        "previous": {n: t + 0.1 if t.is_floating_point() else t for n, t in tree_of(SPEC.build()).items()}
    }

    def listen(loss, outputs, targets, context):
        heard.append(hooks(scratch))
        assert {name: seen.requires_grad for name, seen in context.features.items()} == {
            OWN: True, THERE: False, PREVIOUS: False,
        }  # fmt: skip
        if len(heard) > 1:
            raise RuntimeError("in the middle of it")
        return loss

    rule = chain(contrastive(mu=1.0), ClientRule(name="listening", loss=listen))
    op = train(rule, batch_size="all")
    op(payload(), client(state=state, scratch=scratch), Rng((0,)))
    assert (heard, hooks(scratch)) == ([3], 0)
    with pytest.raises(RuntimeError, match="in the middle"):
        op(payload(), client(state=state, scratch=scratch), Rng((0,)))
    assert (heard, hooks(scratch)) == ([3, 3], 0)


def test_a_workers_cache_does_not_show_and_inputs_stay() -> None:
    op, used = train(contrastive(mu=2.0), momentum=0.9), {}
    previous = {n: t + 0.1 if t.is_floating_point() else t for n, t in tree_of(SPEC.build()).items()}
    before = {n: t.clone() for n, t in previous.items()}
    other = {n: t * 2 if t.is_floating_point() else t for n, t in previous.items()}
    op(payload(), client(state={"previous": other}, scratch=used), Rng((7,)))
    own: dict = {}
    fresh = op(payload(), client(state={"previous": previous}, scratch=own), Rng((0,)))
    again = op(payload(), client(state={"previous": previous}, scratch=used), Rng((0,)))
    for kind in ("update", "buffers"):
        assert all(torch.equal(fresh.payload[kind][n], t) for n, t in again.payload[kind].items())
    assert all(torch.equal(previous[n], t) for n, t in before.items())
    kept = {n: t.clone() for n, t in fresh.state["previous"].items()}
    op(payload(), client(state=fresh.state, scratch=own), Rng((1,)))
    assert all(torch.equal(fresh.state["previous"][n], t) for n, t in kept.items())


def test_the_previous_model_has_the_frozen_weights_that_arrived() -> None:
    spec = model(norm=True, frozen=True)
    op, sent = train(contrastive(mu=2.0), spec=spec), payload(spec)
    sent["model"] = sent["model"] | {
        "0.weight": sent["model"]["0.weight"] * 3
    }  # not what a new module starts from
    previous = {n: t + 0.1 if t.is_floating_point() else t for n, t in sent["model"].items()}
    whole = previous | {"0.weight": sent["model"]["0.weight"]}
    kept = {n: t for n, t in whole.items() if n != "0.weight"}
    first, other = (op(sent, client(state={"previous": tree}), Rng((0,))) for tree in (kept, whole))
    assert all(torch.equal(first.payload["update"][n], t) for n, t in other.payload["update"].items())
    assert "0.weight" not in first.state["previous"]


def test_the_table_and_what_it_refuses() -> None:
    assert contrastive(mu=0.0) == ClientRule()
    assert RULES.find("contrastive") is contrastive
    for wrong in ({"mu": -1}, {"temperature": 0}, {"mu": float("inf")}, {"tau": 1}):
        (key,) = wrong
        with pytest.raises(ConfigError) as caught:
            read_settings(contrastive, wrong, "client")
        assert caught.value.where == f"client.{key}"
    with pytest.raises(ConfigError, match="'contrastive' is set twice"):
        moon(parts(world(), LOCAL, client=contrastive(mu=1.0)))
    with pytest.raises(ConfigError, match="'plain' has no effect"):
        moon(parts(world(), LOCAL, client=plain()))
    solver = ClientRule(name="exact", solve=lambda context: Solved([], 0.0, 0, 0))
    with pytest.raises(ConfigError, match="'contrastive' modifies the steps"):
        moon(parts(world(), LOCAL, client=solver))
