"""The operation of local training: what it sees, what it sends, what it leaves alone."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import nn

from fedlens.algorithms.registry import RULES
from fedlens.core.protocol import Client
from fedlens.core.random import Rng, Secrets
from fedlens.core.tree import spec_of, tree_of
from fedlens.local.rules import ClientRule, LocalContext
from fedlens.local.settings import LocalSettings
from fedlens.local.training import Train
from fedlens.tasks.classification import Classification
from tests.identity.identity_kit import Points, model, world

SPEC = model(norm=True)
DATA = world().clients[4]  # 12 points


def train(rule: ClientRule | None = None, spec=SPEC, **local) -> Train:
    settings = LocalSettings(**{"lr": 0.1, "batch_size": 5} | local)
    return Train(spec, Classification(), settings, rule or ClientRule())


def client(data=DATA, state=None, scratch=None) -> Client:
    return Client(
        0, data, state or {}, Secrets((0,)), {} if scratch is None else scratch, torch.device("cpu")
    )


def payload(spec=SPEC, **more) -> dict:
    return {"model": tree_of(spec.build()), "lr": 0.1, **more}


def test_the_reply_is_what_the_schema_expects() -> None:
    op = train()
    outcome = op(payload(), client(), Rng((0,)))
    schema = op.expect(spec_of(SPEC.build()), most=12)
    assert schema.fault(outcome.payload) is None
    assert outcome.payload["weight"] == 12.0
    assert set(outcome.payload["update"]) == {n for n, _ in SPEC.build().named_parameters()}
    assert set(outcome.payload["buffers"]) == {"1.running_mean", "1.running_var"}
    assert outcome.payload["counters"]["1.num_batches_tracked"] == 3
    assert (outcome.metrics["examples"], outcome.metrics["batches"]) == (12, 3)
    assert outcome.state is None
    assert schema.fault({**outcome.payload, "weight": 13.0}) == "weight is 13, outside (0, 12]"


def test_uniform_weights_are_one_and_no_other_is_taken() -> None:
    op = replace(train(), weighting="uniform")
    outcome = op(payload(), client(), Rng((0,)))
    schema = op.expect(spec_of(SPEC.build()), most=12)
    assert outcome.payload["weight"] == 1.0
    assert schema.fault(outcome.payload) is None
    assert schema.fault({**outcome.payload, "weight": 12.0}) is not None


def test_the_update_is_the_old_weights_less_the_new() -> None:
    sent, scratch = payload(), {}
    outcome = train()(sent, client(scratch=scratch), Rng((0,)))
    (learner,) = scratch.values()
    for name, update in outcome.payload["update"].items():
        assert torch.equal(sent["model"][name] - learner.trainable[name], update)
        assert update.abs().max() > 0


def test_inputs_stay_and_replies_are_copies() -> None:
    sent = payload()
    before = {name: value.clone() for name, value in sent["model"].items()}
    inputs = DATA.inputs.clone()
    op, scratch = train(), {}
    first = op(sent, client(scratch=scratch), Rng((0,)))
    kept = {k: {n: t.clone() for n, t in first.payload[k].items()} for k in ("update", "buffers", "counters")}
    op(sent, client(world().clients[1], scratch=scratch), Rng((1,)))  # the same worker, another client
    for kind, tree in kept.items():
        assert all(torch.equal(first.payload[kind][n], t) for n, t in tree.items())
    assert all(torch.equal(sent["model"][n], t) for n, t in before.items())
    assert torch.equal(DATA.inputs, inputs)


def test_a_workers_cache_does_not_show() -> None:
    op, used = train(momentum=0.9), {}
    op(payload(), client(world().clients[1], scratch=used), Rng((7,)))
    fresh = op(payload(), client(), Rng((0,)))
    again = op(payload(), client(scratch=used), Rng((0,)))
    assert all(torch.equal(fresh.payload["update"][n], t) for n, t in again.payload["update"].items())
    assert all(torch.equal(fresh.payload["buffers"][n], t) for n, t in again.payload["buffers"].items())


def test_epochs_are_passes_in_new_orders_and_steps_go_on_into_the_next() -> None:
    seen: list[list[float]] = []

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3).double()

        def forward(self, x):
            seen.append(x[:, 0].tolist())
            return self.layer(x)

    spec = model(factory=lambda shape, classes: Watching())
    all_points = sorted(DATA.inputs[:, 0].tolist())
    train(spec=spec, epochs=2)(payload(spec), client(), Rng((0,)))
    assert [len(batch) for batch in seen] == [5, 5, 2, 5, 5, 2]
    epochs = [[*chain(*seen[:3])], [*chain(*seen[3:])]]
    assert sorted(epochs[0]) == sorted(epochs[1]) == all_points
    assert epochs[0] != epochs[1]
    first = epochs[0]

    seen.clear()
    train(spec=spec, steps=4)(payload(spec), client(), Rng((0,)))
    assert [len(batch) for batch in seen] == [5, 5, 2, 5]
    assert [*chain(*seen[:3])] == first

    seen.clear()
    train(spec=spec, steps=2, batch_size="all")(payload(spec), client(), Rng((0,)))
    assert [len(batch) for batch in seen] == [12, 12]


def test_the_learning_rate_comes_from_the_server() -> None:
    slow = train(lr=9.0, batch_size="all")(payload(lr=0.1), client(), Rng((0,)))
    fast = train(lr=9.0, batch_size="all")({**payload(), "lr": 0.2}, client(), Rng((0,)))
    for name, update in slow.payload["update"].items():
        torch.testing.assert_close(2 * update, fast.payload["update"][name], rtol=1e-9, atol=1e-12)


def test_hooks_see_the_visit_and_bend_the_training() -> None:
    contexts: list[LocalContext] = []

    def loss(value, outputs, targets, context):
        contexts.append(context)
        assert outputs.shape == (len(targets), 3)
        return 0.0 * value

    def finish(parameters, context):
        assert not any(p.requires_grad for p in parameters)
        return {"extra": 1.0}, {"times": context.state.get("times", 0) + 1}

    op = train(ClientRule(loss=loss, finish=finish), epochs=2)
    outcome = op(payload(work=1), client(state={"times": 4}), Rng((0,)))
    assert all((u == 0).all() for u in outcome.payload["update"].values())
    assert (outcome.payload["extra"], outcome.state) == (1.0, {"times": 5})
    assert len(contexts) == 3  # one epoch of the two
    context = contexts[0]
    assert (context.steps, context.lr, context.state) == (3, 0.1, {"times": 4})
    assert torch.equal(context.targets, DATA.targets)
    assert context.names == [n for n, _ in SPEC.build().named_parameters()]
    assert outcome.metrics["loss"] > 0.0  # the task's, whatever is descended, so that algorithms compare


def test_an_unused_parameter_does_not_move() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 3).double(), nn.Parameter(torch.ones(2).double())

        def forward(self, x):
            return self.used(x)

    spec = model(factory=lambda shape, classes: Spare())
    outcome = train(spec=spec, momentum=0.9)(payload(spec), client(), Rng((0,)))
    assert outcome.payload["update"]["spare"].tolist() == [0.0, 0.0]


def test_a_client_without_examples_says_so() -> None:
    with pytest.raises(ValueError, match="the client holds no example"):
        train()(payload(), client(Points(DATA.inputs[:0], DATA.targets[:0])), Rng((0,)))


def test_the_optimizer_is_kept_only_where_it_is_asked_for() -> None:
    op = replace(train(momentum=0.9), keep_optimizer=True)
    state = op(payload(), client(), Rng((0,))).state
    assert [t.shape for t in state["optimizer"]["momentum"]] == [p.shape for p in SPEC.build().parameters()]
    kept = [t.clone() for t in state["optimizer"]["momentum"]]
    second = op(payload(), client(state=state), Rng((0,)))
    assert all(torch.equal(a, b) for a, b in zip(kept, state["optimizer"]["momentum"], strict=True))
    assert not torch.equal(second.state["optimizer"]["momentum"][0], kept[0])


def test_every_rule_of_the_table_can_be_made() -> None:
    assert all(isinstance(RULES.find(name)(), ClientRule) for name in RULES)
