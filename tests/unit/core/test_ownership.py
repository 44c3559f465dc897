"""The rule of ownership in `fedlens.core.tree`: what is given may be written into, and nothing else ever changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.server_steps import Momentum, ServerSGD, steps_in_place
from fedlens.algorithms.averaging import averaging
from fedlens.algorithms.client_sampling import Uniform
from fedlens.core.modules import module_in
from fedlens.core.protocol import Id, Reply
from fedlens.core.reduction import Update
from fedlens.core.tree import add, copied
from fedlens.local import optimizers
from fedlens.local.rules import ClientRule, ServerRule
from tests.identity.identity_kit import course, model, parts, same, world


@pytest.mark.parametrize("shape", [(), (1,), (7,), (33, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("lr", [1.0, 0.3, 1 / 3])
def test_a_step_into_a_given_update_has_the_same_bits(shape: tuple[int, ...], lr: float) -> None:
    weights, update = {"w": torch.randn(shape)}, {"w": torch.randn(shape)}
    before = copied(weights)
    expected, _ = ServerSGD(lr).step(weights, update, {})
    found, _ = ServerSGD(lr).step_in_place(weights, update, {})
    assert torch.equal(found["w"], expected["w"])
    assert found["w"].data_ptr() == update["w"].data_ptr()
    assert torch.equal(weights["w"], before["w"])


def test_a_step_leaves_an_update_alone_that_is_not_given() -> None:
    update = {"w": torch.ones(3)}
    ServerSGD(0.5).step({"w": torch.ones(3)}, update, {})
    assert update["w"].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    "given", [torch.randn(5, 3).T, torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 1)]
)
def test_a_given_tree_in_another_layout_is_not_written_into(given: Tensor) -> None:
    weights, before = torch.randn(3, 5), given.clone()
    found = add({"w": weights}, {"w": given}, scale=-0.3, donated=True)["w"]
    assert torch.equal(found, torch.add(weights, before, alpha=-0.3))
    assert torch.equal(given, before)


def test_replies_that_an_algorithm_keeps_never_change() -> None:
    def reply(slot: int, value: float) -> Reply:
        trees = {"update": {"w": torch.full((3,), value)}, "buffers": {}, "counters": {}}
        given = frozenset({"update"})
        return Reply(Id(1, 0, slot), slot, {**trees, "weight": 2.0}, donated=given, allocate=allocated)

    def allocated(tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.full_like(value, torch.nan) for name, value in tree.items()}

    kept = [reply(0, 4.0), reply(1, 8.0)]
    update = Mean().aggregate(kept)
    assert update is not None
    assert update.donated is update.update
    ServerSGD().step_in_place({"w": torch.ones(3)}, update.update, {})
    assert [r.payload["update"]["w"].tolist() for r in kept] == [[4.0] * 3, [8.0] * 3]


def test_an_update_that_a_rule_keeps_never_changes() -> None:
    """The rule's state has the update itself, so the server step may not use its memory."""

    def after(state: Any, update: Update, ctx: Any) -> tuple[Any, Update]:
        return {"last": update.update}, update

    half = ServerRule(init=lambda weights, federation: {"last": {}}, after=after)
    made = averaging(
        parts(world(), {"lr": 0.1}, select=Uniform(3)),
        client=ClientRule(name="keeps", server_rules={"keeps": half}),
    )
    steps = course(made, world(), 3).steps
    for step in steps:
        before, new = step.before["model"], step.after["model"]
        moved = {name: before[name] - new[name] for name in new}
        for name, value in step.after["rules"]["keeps"]["last"].items():
            torch.testing.assert_close(value, moved[name])


def test_replies_that_an_aggregate_puts_in_place_of_the_mean_never_change() -> None:
    kept: list[Any] = []

    @dataclass(frozen=True)
    class First(Mean):
        """The first reply, chosen as a robust aggregate does."""

        def aggregate(self, answers: Any, fields: Any = None, ctx: Any = None) -> Update | None:
            replies = list(answers)
            update = super().aggregate(replies, fields)
            assert update is not None
            first = replies[0].payload["update"]
            kept.append((first, copied(first)))
            return replace(update, update=first)

    course(averaging(parts(world(), {"lr": 0.1}, select=Uniform(3)), aggregate=First()), world(), 2)
    assert len(kept) == 2
    assert all(same(now, then) for now, then in kept)


@dataclass(frozen=True)
class Still(ServerSGD):
    """Overrides `step` alone."""

    def step(self, weights: Any, update: Any, state: Any) -> Any:
        return dict(weights), state


@dataclass(frozen=True)
class Doubled(Still):
    """Overrides both again."""

    def step(self, weights: Any, update: Any, state: Any) -> Any:
        return add(weights, update, scale=-2.0), state

    def step_in_place(self, weights: Any, update: Any, state: Any) -> Any:
        return self.step(weights, update, state)


def test_a_server_step_that_overrides_step_alone_is_taken() -> None:
    made = averaging(parts(world(), {"lr": 0.1}, select=Uniform(3)), server=Still())
    for step in course(made, world(), 2).steps:
        assert same(step.before["model"], step.after["model"])


def test_which_server_steps_are_taken_in_place() -> None:
    assert [steps_in_place(step) for step in (ServerSGD(), Momentum(), Still(), Doubled())] == [
        True, False, False, True
    ]  # fmt: skip


def test_no_state_of_a_run_changes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "HEAVY", 0)
    from fedlens.algorithms.fedavg import fedavg

    seen: list[tuple[Any, Any]] = []
    real = ServerSGD.step_in_place

    def watched(self: ServerSGD, weights: Any, update: Any, state: Any) -> Any:
        found = real(self, weights, update, state)
        seen.extend(((weights, copied(weights)), (found[0], copied(found[0]))))
        return found

    monkeypatch.setattr(ServerSGD, "step_in_place", watched)
    course(fedavg(parts(world(), {"lr": 0.2}, select=Uniform(3))), world(), 3)
    assert len(seen) == 6
    assert all(same(now, then) for now, then in seen)


def test_a_module_gives_its_weights_away_and_has_new_memory_when_it_is_loaded() -> None:
    spec = model(factory=_convolution)
    learner = module_in(spec, {}, torch.device("cpu"))
    learner.module.to(memory_format=torch.channels_last)
    tree = {name: torch.randn(value.shape) for name, value in learner.module.state_dict().items()}
    learner.load(tree)
    strides = [w.stride() for w in learner.trainable.values()]
    given = learner.give()
    assert all(torch.equal(g, tree[name]) for g, name in zip(given, learner.trainable, strict=True))
    assert [w.shape for w in learner.trainable.values()] == [g.shape for g in given]
    learner.load({name: value + 1 for name, value in tree.items()})
    assert all(torch.equal(g, tree[name]) for g, name in zip(given, learner.trainable, strict=True))
    assert [w.stride() for w in learner.trainable.values()] == strides
    assert all(torch.equal(w, tree[name] + 1) for name, w in learner.trainable.items())


def test_a_weight_with_gaps_between_its_rows_has_memory_of_its_own_when_it_is_loaded() -> None:
    learner = module_in(model(factory=_with_gaps), {}, torch.device("cpu"))
    assert not learner.trainable["weight"].is_contiguous()
    tree = {name: torch.randn(value.shape) for name, value in learner.module.state_dict().items()}
    for _ in range(2):
        learner.load(tree)
        assert all(torch.equal(w, tree[name]) for name, w in learner.trainable.items())
        learner.give()


def _with_gaps(input_shape: Any, classes: int) -> nn.Module:
    layer = nn.Linear(3, 4)
    layer.weight.data = torch.zeros(4, 30)[:, ::10]
    return layer


def _convolution(input_shape: Any, classes: int) -> nn.Module:
    return nn.Conv2d(3, 4, 3)
