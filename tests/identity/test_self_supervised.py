"""SimSiam and MoCo v2: Eq. 7 to 9 of chen2022, against hand-computed values and a plain loop of PyTorch."""

import copy
import math
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedlens.algorithms.averaging import Parts
from fedlens.algorithms.centralized import centralized
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.feddane import feddane
from fedlens.algorithms.scaffold import scaffold
from fedlens.base.errors import ConfigError
from fedlens.core.driver import Driver
from fedlens.core.protocol import FederationInfo, ModelSpec, Program, RoundContext
from fedlens.core.random import Rng
from fedlens.core.states import ClientStates
from fedlens.core.tree import spec_of
from fedlens.data.augmentation.augment import Crop, Flip
from fedlens.data.augmentation.augmented import Chain
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.federated import federate
from fedlens.data.partition.iid import iid
from fedlens.engines.inline import inline
from fedlens.engines.processes import processes
from fedlens.local.personal_leaves import PERSONAL
from fedlens.local.settings import LocalSettings
from fedlens.models.prepare import Preparation
from fedlens.models.simple import small_cnn
from fedlens.tasks.moco import MoCo
from fedlens.tasks.simsiam import SimSiam

pytestmark = pytest.mark.usefixtures("quick_workers")

SIDE, SEED = 8, 7
AUGMENT = Chain((Crop(pad=1), Flip(p=0.5)))
SIAM = SimSiam(width=8, bottleneck=4)
MOCO = MoCo(width=4, queue=20, momentum=0.9, temperature=0.5)
LOCAL = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "batch_size": 8}


def encoder() -> ModelSpec:
    """A classifier with batch normalization, without its last layer."""
    settings = {"width": 3, "norm": "batch"}
    return ModelSpec(small_cnn, "small-cnn", settings, (1, SIDE, SIDE), 1, 0, Preparation(classifier=False))


# ---- the losses, by hand


def test_the_loss_of_simsiam_is_the_negative_cosine_of_prediction_and_target() -> None:
    z1, z2 = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])
    p1, p2 = torch.tensor([[1.0, 0.0]]), torch.tensor([[5.0, 12.0]])
    outputs = {"z": torch.stack([z1, z2], 1), "p": torch.stack([p1, p2], 1)}
    # D(p1, z2) = -0, D(p2, z1) = -(5 * 3 + 12 * 4) / (13 * 5)
    assert float(SIAM.loss(outputs, None)) == pytest.approx(-0.5 * 63 / 65)


def test_no_gradient_reaches_the_targets_of_simsiam() -> None:
    z, p = (torch.randn(5, 2, 3, requires_grad=True) for _ in range(2))
    loss = SIAM.loss({"z": z, "p": p}, None)
    assert torch.autograd.grad(loss, [z, p], allow_unused=True)[0] is None
    open_ = SimSiam(stop_gradient=False).loss({"z": z, "p": p}, None)
    assert torch.autograd.grad(open_, [z])[0].abs().sum() > 0


def test_the_loss_of_moco_is_the_cross_entropy_of_the_positive_pair() -> None:
    net = MoCo(width=2, queue=3, temperature=0.5).network(nn.Identity(), 2)
    q, k = torch.tensor([[0.6, 0.8]]), torch.tensor([[1.0, 0.0]])
    net.head, net.key_head = nn.Identity(), nn.Identity()
    net.queue.copy_(torch.tensor([[0.0, 1.0], [-1.0, 0.0], [0.8, 0.6]]))
    outputs = net(torch.stack([q, k], 1))
    similar = [0.6, 0.8, -0.6, 0.96]
    expected = -math.log(math.exp(2 * 0.6) / sum(math.exp(2 * s) for s in similar))
    assert float(MOCO.loss(outputs, None)) == pytest.approx(expected, rel=1e-6)


# ---- training, against loops


def federation(clients: int):
    """48 images of noise, of which a batch holds two augmented views each."""
    images = np.random.RandomState(0).randint(0, 256, (48, 1, SIDE, SIDE), np.uint8)
    split = Examples(images, np.zeros((48, 0), np.uint8))
    whole = Dataset("noise", split, split, (), (0.5,), (0.25,), "", "")
    holders, _ = federate(whole, lambda table: iid(table, 0, clients=clients))
    return replace(holders, augment=AUGMENT, views=2)


def trained(make, task, holders, rounds: int, engine=None, **local: object):
    """(the trained tree, the states of the clients)"""
    there = FederationInfo(np.diff(holders.offsets), 0, (1, SIDE, SIDE), holders.held(), kind="unlabelled")
    parts = Parts(task.wrap(encoder()), task, LocalSettings(**LOCAL, **local), there)  # type: ignore[arg-type]
    algorithm, states, engine = make(parts), ClientStates(), engine or inline()
    engine.open(Program(algorithm.ops, holders, SEED), states)
    try:
        driver, state = Driver(engine, states), algorithm.init(parts.model, there)
        for round in range(1, rounds + 1):
            ctx = RoundContext(round, rounds, there, Rng((3, "round", round)))
            state = driver.drive(algorithm.round(state, ctx), round)
        return algorithm.model(state)[1], {k: states.get(k) for k in (*range(len(there.sizes)), "@train")}
    finally:
        engine.close()


def views_of(holders, round: int, steps: int):
    """The batches of a round of centralized training."""
    batches = holders.data_of("@train").batches(8, Rng((SEED, "op", round, 0, 0, "@train")))
    yield from (next(batches)[0] for _ in range(steps))
    with suppress(AttributeError):
        batches.close()


def test_simsiam_trains_as_a_plain_loop() -> None:
    holders = federation(clients=1)
    tree, _ = trained(centralized, SIAM, holders, rounds=3, steps=6)
    net = SIAM.wrap(encoder()).build().train()
    step = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    for round in range(1, 4):
        for views in views_of(holders, round, 6):
            z1, z2 = (net.projector(net.encoder(views[:, v])) for v in (0, 1))
            p1, p2 = net.predictor(z1), net.predictor(z2)
            unit = [each / each.norm(dim=1, keepdim=True) for each in (p1, p2, z1.detach(), z2.detach())]
            loss = -(unit[0] * unit[3]).sum(1).mean() / 2 - (unit[1] * unit[2]).sum(1).mean() / 2
            step.zero_grad()
            loss.backward()
            step.step()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(tree[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2])
def test_moco_trains_as_a_plain_loop_over_50_steps(groups: int) -> None:
    """Queue and momentum encoder, kept as a list of keys and a second network with parameters of its own.

    With groups, as the authors' code on as many GPUs: keys are shuffled, split, computed, and put back in order.
    """
    holders = federation(clients=1)
    task = replace(MOCO, bn_groups=groups)
    tree, states = trained(centralized, task, holders, rounds=5, steps=10)
    shuffled = torch.cat([torch.arange(group, 8, groups) for group in range(groups)])
    net = MOCO.wrap(encoder()).build().train()
    query = nn.Sequential(net.encoder, net.head)
    key = copy.deepcopy(query)
    keys = list(net.queue.clone())  # the oldest first
    step = torch.optim.SGD(query.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    for round in range(1, 6):
        for views in views_of(holders, round, 10):
            q = F.normalize(torch.cat([query(part) for part in views[:, 0].chunk(groups)]), dim=1)
            with torch.no_grad():
                for mine, other in zip(query.parameters(), key.parameters(), strict=True):
                    other.mul_(0.9).add_(mine, alpha=0.1)
                k = torch.cat([key(part) for part in views[shuffled, 1].chunk(groups)])
                k = F.normalize(k[shuffled.argsort()], dim=1)
            logits = torch.stack(
                [torch.stack([q[i] @ k[i], *[q[i] @ old for old in keys]]) / 0.5 for i in range(8)]
            )
            loss = -F.log_softmax(logits, dim=1)[:, 0].mean()
            step.zero_grad()
            loss.backward()
            step.step()
            keys = [*keys, *k][-20:]
    for name, value in query.state_dict().items():
        place, leaf = name.split(".", 1)
        torch.testing.assert_close(
            tree[f"{('encoder', 'head')[int(place)]}.{leaf}"], value, rtol=1e-3, atol=1e-5
        )
    for name, value in key.state_dict().items():
        place, leaf = name.split(".", 1)
        part = ("key_encoder", "key_head")[int(place)]
        torch.testing.assert_close(tree[f"{part}.{leaf}"], value, rtol=1e-3, atol=1e-5)
    kept = states["@train"][PERSONAL]
    assert int(kept["next_place"]) == 50 * 8 % 20
    ordered = torch.roll(kept["queue"], -int(kept["next_place"]), dims=0)
    torch.testing.assert_close(ordered, torch.stack(keys), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("task", [SIAM, MOCO], ids=["simsiam", "moco-v2"])
def test_clients_on_one_worker_and_on_two_give_the_same_bits(task) -> None:
    holders = federation(clients=2)
    reference, states = trained(fedavg, task, holders, rounds=3, steps=3)
    for workers in (1, 2):
        tree, others = trained(fedavg, task, holders, 3, processes(workers=workers), steps=3)
        assert all(torch.equal(tree[name], value) for name, value in reference.items())
        for client in (0, 1):
            for name, value in states[client].get(PERSONAL, {}).items():
                assert torch.equal(others[client][PERSONAL][name], value)


def test_the_queue_never_leaves_its_client() -> None:
    holders = federation(clients=2)
    tree, states = trained(fedavg, MOCO, holders, rounds=2, steps=3)
    queues = [states[client][PERSONAL]["queue"] for client in (0, 1)]
    initial = MOCO.wrap(encoder()).build().queue
    assert torch.equal(tree["queue"], initial)
    assert not torch.equal(queues[0], queues[1])
    assert not torch.equal(queues[0], initial)


def test_the_key_encoder_is_averaged_like_running_statistics_and_has_no_gradient() -> None:
    net = MOCO.wrap(encoder()).build()
    spec = spec_of(net)
    keys = {name: leaf for name, leaf in spec.items() if name.startswith("key_")}
    assert {leaf.role for leaf in keys.values()} == {"buffer", "counter"}
    assert {name.removeprefix("key_") for name in keys} == {
        name for name in spec if name.startswith(("encoder", "head"))
    }
    holders = federation(clients=2)
    tree, _ = trained(fedavg, MOCO, holders, rounds=1, steps=2)
    assert not torch.equal(tree["key_encoder.0.weight"], net.state_dict()["key_encoder.0.weight"])


@pytest.mark.parametrize("task", [SIAM, MOCO], ids=["simsiam", "moco-v2"])
def test_the_exported_leaves_are_those_of_the_encoder(task) -> None:
    tree, _ = trained(fedavg, task, federation(clients=2), rounds=1, steps=1)
    exported = task.export(tree)
    assert exported.keys() == encoder().build().state_dict().keys()
    assert all(torch.equal(exported[name], tree[f"encoder.{name}"]) for name in exported)


@pytest.mark.parametrize("task", [SIAM, MOCO], ids=["simsiam", "moco-v2"])
@pytest.mark.parametrize(
    "make", [feddane, lambda parts: scaffold(parts, option="I")], ids=["feddane", "scaffold-I"]
)
def test_rules_with_full_gradients_are_refused(task, make) -> None:
    with pytest.raises(ConfigError, match="augmented anew for every step"):
        trained(make, task, federation(clients=2), rounds=1, steps=1)


def test_a_batch_larger_than_the_queue_is_refused_with_the_setting() -> None:
    net = MoCo(width=4, queue=5).wrap(encoder()).build()
    with pytest.raises(ConfigError, match=r"queue of 5 .*task\.queue"):
        net.train()(torch.zeros(6, 2, 1, SIDE, SIDE))


def test_a_key_shares_batch_statistics_with_few_images_of_its_query() -> None:
    """Another image 1 changes the queries 0 to 3, and the keys 1, 3, 5 and 7."""
    views = torch.randn(8, 2, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    other = views.clone()
    other[1] += 1

    def embedded(task: MoCo, views: torch.Tensor) -> torch.Tensor:
        return task.wrap(encoder()).build().train()(views)["z"].detach()

    def changed(task: MoCo) -> list[list[int]]:
        differs = (embedded(task, views) - embedded(task, other)).abs().amax(2) > 0
        return [view.nonzero().flatten().tolist() for view in differs.t()]

    assert changed(replace(MOCO, bn_groups=2)) == [[0, 1, 2, 3], [1, 3, 5, 7]]
    assert changed(MOCO) == [[*range(8)], [*range(8)]]


def test_a_batch_with_fewer_images_than_groups_is_refused_with_the_setting() -> None:
    net = replace(MOCO, bn_groups=4).wrap(encoder()).build()
    with pytest.raises(ConfigError, match=r"batch of 3 images .* 4 groups .*task\.bn_groups"):
        net.train()(torch.zeros(3, 2, 1, SIDE, SIDE))


# ---- the measurements


def test_deviation_and_rank_show_a_collapse() -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(4000, 8, generator=generator)
    line = torch.randn(4000, 1, generator=generator) * torch.ones(1, 8)
    point = torch.ones(4000, 8) + 1e-6 * spread

    def metrics(z):
        return SIAM.metrics(SIAM.measure({"z": torch.stack([z, z], 1), "p": torch.stack([z, z], 1)}, None))

    assert metrics(spread)["embedding_deviation"] == pytest.approx(1, abs=0.02)
    assert metrics(spread)["embedding_rank"] == pytest.approx(8, abs=0.1)
    assert metrics(line)["embedding_deviation"] == pytest.approx(1, abs=0.02)
    assert metrics(line)["embedding_rank"] == pytest.approx(1, abs=0.01)
    assert metrics(point)["embedding_deviation"] < 1e-4
    assert metrics(spread)["alignment"] == pytest.approx(1)


def test_measurements_of_parts_add_up_to_those_of_the_whole() -> None:
    z = torch.randn(30, 2, 8, generator=torch.Generator().manual_seed(1))
    whole = MOCO.metrics(MOCO.measure({"z": z}, None))
    parts = MOCO.measure({"z": z[:11]}, None) + MOCO.measure({"z": z[11:]}, None)
    assert MOCO.metrics(parts) == pytest.approx(whole)
    normal = F.normalize(z[:, 0], dim=1).double().numpy()
    assert whole["embedding_deviation"] == pytest.approx(math.sqrt(8) * normal.std(axis=0).mean())
    values = np.linalg.eigvalsh(np.cov(normal.T))
    shares = values / values.sum()
    assert whole["embedding_rank"] == pytest.approx(np.exp(-(shares * np.log(shares)).sum()))
