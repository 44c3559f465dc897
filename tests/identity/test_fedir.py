"""FedIR: the weighted loss against torch's own, its bias by enumeration, and weights that are 0."""

from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.algorithms.client_sampling import Everyone, Fixed, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedir import fedir, importance, risk
from fedlens.local.rules import LocalContext
from fedlens.tasks.classification import Classification
from tests.identity.identity_kit import (
    CLASSES,
    FEATURES,
    Points,
    World,
    close,
    course,
    epoch,
    mean,
    model,
    parts,
    rng_of,
    same,
    world,
)

SGD = {"lr": 0.2, "momentum": 0.5, "epochs": 2, "batch_size": 4}
FULL = {"lr": 0.3, "steps": 2, "batch_size": "all"}
SKEWED = [0.5, 0.3, 0.2]
UNIFORM = [1 / 3] * 3


def shares(points: Points) -> list[float]:
    """q_k, counted by hand."""
    found = points.targets.tolist()
    return [found.count(y) / len(found) for y in range(CLASSES)]


def ratios(points: Points, target: list[float]) -> Tensor:
    pairs = zip(target, shares(points), strict=True)
    return torch.tensor([p / q if q else 0.0 for p, q in pairs], dtype=torch.float64)


def bare(spec, tree, points, weights, rng, *, normalize, epochs, batch_size, mu=0.0) -> dict[str, Tensor]:
    """One client in bare PyTorch; torch's mean with a `weight` is divided by the weights' sum: Eq. 4."""
    module = spec.build()
    module.load_state_dict(dict(tree))
    module.train()
    step = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.2, momentum=0.5)
    order = rng.torch("batches")
    for _ in range(epochs):
        for at in epoch(len(points), batch_size, order):
            step.zero_grad()
            how = {"weight": weights, "reduction": "mean" if normalize else "sum"}
            loss = F.cross_entropy(module(points.inputs[at]), points.targets[at], **how)
            loss = loss if normalize else loss / len(at)
            loss = loss + mu / 2 * sum(((p - tree[n]) ** 2).sum() for n, p in module.named_parameters())
            loss.backward()
            step.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def expected(run, step, target, *, normalize=True, spec=None, mu=0.0) -> dict[str, Tensor]:
    """The round in bare PyTorch."""
    clients = [
        bare(
            spec or model(),
            step.before["model"],
            run.there.clients[k],
            ratios(run.there.clients[k], target),
            rng_of(step, slot),
            normalize=normalize,
            epochs=2,
            batch_size=4,
            mu=mu,
        )
        for slot, k in enumerate(step.cohort)
    ]
    return mean(clients, [len(run.there.clients[k]) for k in step.cohort])


# -- local training is that of the weighted loss -------------------------------------------------------------


@pytest.mark.parametrize("normalize", [True, False], ids=["eq. 4", "eq. 1"])
@pytest.mark.parametrize("target", [SKEWED, "uniform"], ids=["a list", "uniform"])
def test_sampled_clients_descend_the_weighted_loss_and_are_averaged_by_examples(target, normalize) -> None:
    there = world()
    run = course(fedir(parts(there, SGD, select=Uniform(3)), target=target, normalize=normalize), there)
    plain = course(fedavg(parts(there, SGD, select=Uniform(3))), there)
    p = UNIFORM if target == "uniform" else target
    for step in run.steps:
        close(step.after["model"], expected(run, step, p, normalize=normalize))
    assert len({step.cohort for step in run.steps}) == 4
    assert any(0.0 in shares(points) for points in there.clients)  # classes that a client lacks
    assert not same(run.final, plain.final)


def test_batch_norm_and_a_frozen_layer() -> None:
    there = world([4, 8, 12, 1])
    spec = model(norm=True, frozen=True)
    local = SGD | {"batch_size": 12}
    run = course(fedir(parts(there, local, spec, select=Fixed((0, 2))), target=SKEWED), there)
    for step in run.steps:
        clients = []
        for slot, k in enumerate(step.cohort):
            points, tree = there.clients[k], step.before["model"]
            how = {"normalize": True, "epochs": 2, "batch_size": 12}
            rng, weights = rng_of(step, slot), ratios(points, SKEWED)
            clients.append(bare(spec, tree, points, weights, rng, **how))
        after = mean(clients, [4, 12])
        close({n: step.after["model"][n] for n in after}, after)


def test_the_clients_own_distribution_as_the_target_is_fedavg() -> None:
    there = world()
    for normalize in (True, False):
        for k in (1, 4):
            given = parts(there, SGD, select=Fixed((k,)))
            own = shares(there.clients[k])
            close(
                course(fedir(given, target=own, normalize=normalize), there).final,
                course(fedavg(given), there).final,
            )


def test_a_client_with_one_class_or_one_example_is_fedavgs_under_eq_4() -> None:
    there = World((world().clients[3], Points(world().clients[1].inputs, torch.full((8,), 2))))
    given = parts(there, SGD, select=Everyone())
    close(course(fedir(given, target=SKEWED), there).final, course(fedavg(given), there).final)
    assert not same(
        course(fedir(given, target=SKEWED, normalize=False), there).final, course(fedavg(given), there).final
    )


def test_the_logged_loss_is_the_tasks_mean() -> None:
    there = world()
    local = {"lr": 0.3, "steps": 1, "batch_size": "all"}
    run = course(fedir(parts(there, local, select=Uniform(3)), target=SKEWED), there)
    for step in run.steps:
        module = model().build()
        module.load_state_dict(step.before["model"])
        pooled = there.pooled(step.cohort)
        total = F.cross_entropy(module(pooled.inputs), pooled.targets, reduction="sum")
        assert step.tally.sums["loss"] == pytest.approx(float(total.detach()), rel=1e-12)


# -- Eq. 1 to 4 by enumeration -------------------------------------------------------------------------------


def tiny() -> Points:
    """Seven points of three classes: 4, 2 and 1 of them."""
    g = torch.Generator().manual_seed(3)
    inputs = torch.randn(7, FEATURES, generator=g, dtype=torch.float64)
    return Points(inputs, torch.tensor([0, 0, 1, 0, 2, 1, 0]))


def visit_of(points: Points, classes: int = CLASSES) -> LocalContext:
    context = LocalContext(["w"], [torch.zeros(1, dtype=points.inputs.dtype)], {}, {}, 0.1, 1)
    client = SimpleNamespace(id=0, data=points, scratch={})
    context.problem = SimpleNamespace(  # type: ignore[assignment]
        task=Classification(), client=client, model=SimpleNamespace(classes=classes)
    )
    return context


def estimate(points: Points, at: tuple[int, ...], normalize: bool, target=SKEWED) -> Tensor:
    """The gradient of a batch's loss with respect to a linear model's weights, flat, with the loss in front."""
    w = (
        torch.linspace(-1, 1, FEATURES * CLASSES, dtype=torch.float64)
        .view(FEATURES, CLASSES)
        .requires_grad_()
    )
    rows = torch.tensor(at)
    loss = risk(
        points.inputs[rows] @ w, points.targets[rows], visit_of(points), target=target, normalize=normalize
    )
    (gradient,) = torch.autograd.grad(loss, w)
    return torch.cat([loss.detach().view(1), gradient.flatten()])


def wanted(points: Points) -> Tensor:
    """E_p of loss and gradient, where x given y is as at the client: sum_y p(y) of the class's mean (Eq. 2)."""
    w = (
        torch.linspace(-1, 1, FEATURES * CLASSES, dtype=torch.float64)
        .view(FEATURES, CLASSES)
        .requires_grad_()
    )
    total = torch.zeros((), dtype=torch.float64)
    for y, p in enumerate(SKEWED):
        of = points.targets == y
        total = total + p * F.cross_entropy(points.inputs[of] @ w, points.targets[of])
    (gradient,) = torch.autograd.grad(total, w)
    return torch.cat([total.detach().view(1), gradient.flatten()])


def over_batches(points: Points, size: int, normalize: bool) -> Tensor:
    """The mean over all batches of that size."""
    batches = list(combinations(range(len(points)), size))
    return torch.stack([estimate(points, at, normalize) for at in batches]).mean(0)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_eq_1_is_an_unbiased_estimate_of_the_targets_loss_and_gradient(size: int) -> None:
    points = tiny()
    torch.testing.assert_close(over_batches(points, size, normalize=False), wanted(points))


def test_eq_4_is_the_targets_loss_on_the_full_batch_and_biased_on_small_ones() -> None:
    points = tiny()
    torch.testing.assert_close(over_batches(points, 7, normalize=True), wanted(points))
    bias = [(over_batches(points, size, normalize=True) - wanted(points)).norm() for size in (1, 2, 4, 6)]
    assert bias[0] > bias[1] > bias[2] > bias[3] > 1e-3
    # Of a single example the weight cancels: the estimate is the client's own plain loss.
    w = torch.linspace(-1, 1, FEATURES * CLASSES, dtype=torch.float64).view(FEATURES, CLASSES)
    plain = F.cross_entropy(points.inputs @ w, points.targets)
    torch.testing.assert_close(over_batches(points, 1, normalize=True)[0], plain)


def test_eq_4_by_hand() -> None:
    # q = 1/2, 1/2 and p = 0.8, 0.2: weights 1.6 and 0.4. Logits (0, 0) cost log 2 whatever the class; (0, log 3)
    # cost log 4 for class 0.
    points = Points(torch.zeros(2, 1), torch.tensor([0, 1]))
    context = visit_of(points, classes=2)
    outputs = torch.tensor([[0.0, 3.0], [0.0, 1.0]]).log1p().double()  # log 1, log 4; log 1, log 2
    first, second = torch.tensor([5.0, 1.5]).double().log()  # -log 1/5, -log 2/3
    both = risk(outputs, points.targets, context, target=[0.8, 0.2], normalize=True)
    torch.testing.assert_close(both, (1.6 * first + 0.4 * second) / 2)
    context = visit_of(points, classes=2)
    unequal = risk(outputs[[0, 0, 1]], points.targets[[0, 0, 1]], context, target=[0.8, 0.2], normalize=False)
    torch.testing.assert_close(unequal, (1.6 * 2 * first + 0.4 * second) / 3)


def test_the_weights_of_the_examples_of_a_client_that_has_every_class_sum_to_their_number() -> None:
    points = tiny()
    weights = importance(
        torch.bincount(points.targets, minlength=CLASSES), torch.tensor(SKEWED, dtype=torch.float64)
    )
    assert weights[points.targets].sum().item() == pytest.approx(7)
    assert weights.tolist() == pytest.approx([0.5 * 7 / 4, 0.3 * 7 / 2, 0.2 * 7])


# -- classes of probability 0 --------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [True, False])
def test_a_batch_whose_weights_are_all_zero_has_loss_0_and_gradient_0(normalize: bool) -> None:
    points = Points(tiny().inputs, torch.ones(7, dtype=torch.int64))
    assert torch.equal(
        estimate(points, (0, 1, 2), normalize, target=[0.5, 0.0, 0.5]), torch.zeros(13).double()
    )
    module = torch.nn.Linear(2, 3)  # float32, where the floor is another one
    outputs = module(torch.randn(4, 2))
    loss = risk(
        outputs,
        torch.ones(4, dtype=torch.int64),
        visit_of(points),
        target=[0.5, 0.0, 0.5],
        normalize=normalize,
    )
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    assert loss.item() == 0.0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


def test_a_client_of_unwanted_classes_alone_sends_a_zero_update_and_no_failure() -> None:
    there = world()
    points = there.clients[4]
    there = World((Points(points.inputs, torch.full((12,), 2)), points))
    run = course(fedir(parts(there, SGD, select=Fixed((0,))), target=[0.5, 0.5, 0.0]), there, rounds=2)
    assert same(run.final, run.steps[0].before["model"])
    assert [step.tally.failed for step in run.steps] == [0, 0]
    # Beside others, an unwanted example has no say at all under Eq. 1 but for the batch's length.
    both = course(fedir(parts(there, FULL, select=Fixed((1,))), target=[0.5, 0.5, 0.0]), there).final
    kept = points.targets != 2
    cut = World((there.clients[0], Points(points.inputs[kept], points.targets[kept])))
    close(both, course(fedir(parts(cut, FULL, select=Fixed((1,))), target=[0.5, 0.5, 0.0]), cut).final)
