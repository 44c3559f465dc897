"""Measures the protocols beyond averaging against bare PyTorch that does the same work, in turn.

    python -m benchmarks.protocols                       # all, one thread
    python -m benchmarks.protocols split --pairs 21

Split learning: a round of SplitFed v1 on the engine `inline`, with batches of 64, against a loop over the same batches
that runs the two halves forward and backward and takes a plain SGD step of each. The goal is 1.10 times the loop and
1 ms a request; two requests make a batch. Vertical learning: a round of four parties, each with a quadrant of the
images, with batches of 64, against a loop over the same batches and the pass that finds the mean embeddings; the goal
is 1.10. FedGKT: the operations of a client and of the server, each against a loop of
the same steps and the same pass at their end; the goal is 1.05. Mixing: the operation in which a peer of D-SGD mixes
the models of a ring, against copying each of these models once; the goal is twice. FedNAS: a client's epoch of search,
three passes a step, against a loop with PyTorch's optimizers; the goal is 1.05. FedMA: a pass of eight clients, against
the same pass with the matches known; the goal is 1.20, matching below a fifth of the training. Each figure is the
median of the ratios of pairs with its 95 % interval, of the time of the process and of the clock on the wall.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.algorithms.dsgd import MixModels
from fedlens.algorithms.fednas import searching
from fedlens.algorithms.peers import Mix, PeerModel
from fedlens.algorithms.vertical import Vertical
from fedlens.base.memory import keep_freed_memory
from fedlens.benchmark.comparison import ratio
from fedlens.benchmark.federation import Federation
from fedlens.benchmark.limit import Workload, cifar_cnn, mnist_cnn
from fedlens.core.arithmetic import Arithmetic
from fedlens.core.protocol import Client, ModelSpec, Outcome, Payload
from fedlens.core.random import Rng, Secrets
from fedlens.core.tree import tree_of
from fedlens.data.client_datasets import ClientDataset
from fedlens.data.dataset import Examples
from fedlens.local.knowledge_transfer import LOGITS, Distill, TrainAndSend, TrainServer
from fedlens.local.party_steps import MEAN_OF
from fedlens.local.rules import ClientRule
from fedlens.local.settings import LocalSettings
from fedlens.local.training import Train
from fedlens.models.darts import ARCHITECTURE, darts_search
from fedlens.models.resnet import gkt_resnet8, resnet20, resnet56
from fedlens.models.simple import hsu_cnn, small_cnn
from fedlens.models.stages import cut, stages
from fedlens.tasks.classification import Classification

Work = Callable[[], object]
FACTOR, REQUEST = 1.10, 1e-3  # of split learning: times the loop, and seconds a request
SPLIT = (
    Workload("mcmahan-cnn", mnist_cnn, clients=2, examples=512, shape=(1, 28, 28), cohort=2, batch=64),
    Workload("hsu-cnn", cifar_cnn, clients=2, examples=256, shape=(3, 32, 32), cohort=2, batch=64),
    Workload(
        "small-cnn",
        partial(small_cnn, (1, 28, 28), 10),
        clients=2,
        examples=512,
        shape=(1, 28, 28),
        cohort=2,
        batch=64,
    ),
)
VERTICAL = (
    Workload("mcmahan-cnn", mnist_cnn, clients=1, examples=2048, shape=(1, 28, 28), cohort=1, batch=64),
    Workload("hsu-cnn", cifar_cnn, clients=1, examples=1024, shape=(3, 32, 32), cohort=1, batch=64),
)
CUT = "2"  # after the first pooling
MATCHED = tuple(
    replace(load, clients=8, cohort=8, examples=250, epochs=4, batch=32) for load in (SPLIT[0], SPLIT[2])
)
# Of FedGKT and of mixing:
SHAPE, MEAN, STD = (3, 32, 32), (0.5,) * 3, (0.5,) * 3
IMAGES, BATCH, EVALUATED = 128, 64, 500
RATE, MOMENTUM, T = 0.01, 0.9, 3.0
MIXINGS = 100  # of a turn
LOCAL = LocalSettings(lr=RATE, momentum=MOMENTUM, batch_size=BATCH)
LOSS = Distill(Classification(), 1.0, T)
RNG = Rng.of_operation(0, 1, 0, 0, 0)
ON_CPU, LAYOUT = torch.device("cpu"), Arithmetic(channels_last="auto")  # as runs have it


class Case(NamedTuple):
    """What is measured: fedlens, bare PyTorch, the goal of their ratio, and how many requests may take longer."""

    ours: Work
    bare: Work
    goal: float
    requests: int = 0


class Seconds(NamedTuple):
    """Of one turn."""

    process: float
    wall: float


def main() -> None:
    """Prints two lines a case: of the process's time, and of the clock on the wall."""
    parser = argparse.ArgumentParser(description="Protocols beyond averaging against bare PyTorch.")
    parser.add_argument("cases", nargs="*", help=f"beginnings of: {', '.join(CASES)}; default: all")
    parser.add_argument("--pairs", type=int, default=15)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # on both sides, as every run does
    for name, make in CASES.items():
        if asked.cases and not name.startswith(tuple(asked.cases)):
            continue
        case = make()
        ours, bare = timed(case, asked.pairs)
        for clock in Seconds._fields:
            print(said(name, clock, case, *([getattr(t, clock) for t in times] for times in (ours, bare))))


def timed(case: Case, pairs: int) -> tuple[list[Seconds], list[Seconds]]:
    """The seconds of both sides in so many pairs, after one that warms up; either side is first in every other pair."""
    times: dict[Work, list[Seconds]] = {case.ours: [], case.bare: []}
    for pair in range(pairs + 1):
        for work in (case.ours, case.bare) if pair % 2 else (case.bare, case.ours):
            wall, process = time.perf_counter(), time.process_time()
            work()
            if pair:
                times[work].append(Seconds(time.process_time() - process, time.perf_counter() - wall))
    return times[case.ours], times[case.bare]


def said(name: str, clock: str, case: Case, ours: Sequence[float], bare: Sequence[float]) -> str:
    """A line with the ratio and its verdict; with requests also what one adds beyond the loop.

    >>> print(said("mix", "wall", Case(int, float, 2.0), [3.0, 3.0], [2.0, 2.0]))
    mix                   wall       3000.0 ms, bare     2000.0 ms: 1.500 [1.500, 1.500]; goal 2.00 met
    >>> said("split", "wall", Case(int, float, 1.1, 2), [3.0], [2.0])[-68:]
    '1.500 [1.500, 1.500]; 500.00 ms a request; goal 1.10 and 1 ms missed'
    """
    found = ratio(ours, bare)
    allowed = [case.goal * seconds + case.requests * REQUEST for seconds in bare]
    met = "met" if ratio(ours, allowed).median <= 1 else "missed"
    text, goal = "", f"{case.goal:.2f}"
    if case.requests:
        added = statistics.median(o - b for o, b in zip(ours, bare, strict=True)) / case.requests
        text, goal = f" {1e3 * added:.2f} ms a request;", f"{goal} and {1e3 * REQUEST:.0f} ms"
    middles = [1e3 * statistics.median(times) for times in (ours, bare)]
    return f"{name:21} {clock:8} {middles[0]:8.1f} ms, bare {middles[1]:8.1f} ms: {found};{text} goal {goal} {met}"


def split(workload: Workload) -> Case:
    """A round of SplitFed v1, and the same batches through both halves in PyTorch."""
    algorithm = {"name": "splitfed", "cut": CUT}
    federation = Federation(workload, {"name": "inline"}, algorithm, workload.name)
    source, lr = federation.built.source, workload.lr
    whole = federation.built.model.build()
    lower, upper = (LAYOUT.fit(part, ON_CPU) for part in cut(whole, [CUT]))
    below, above = list(lower.parameters()), list(upper.parameters())
    clients = [source.data_of(client) for client in range(workload.clients)]

    def bare() -> None:
        for client in clients:
            for epoch in range(workload.epochs):
                order = torch.randperm(len(client), generator=torch.Generator().manual_seed(epoch))
                for at in order.split(workload.batch):
                    inputs, targets = client.batch(at, Rng((0,)))
                    sent = lower(inputs)
                    received = sent.detach().requires_grad_()
                    loss = F.cross_entropy(upper(received), targets)
                    back, *gradients = torch.autograd.grad(loss, [received, *above])
                    with torch.no_grad():
                        torch._foreach_add_(above, gradients, alpha=-lr)
                        torch._foreach_add_(below, torch.autograd.grad(sent, below, back), alpha=-lr)

    steps = -(-workload.examples // workload.batch) * workload.epochs
    return Case(federation.round, bare, FACTOR, 2 * steps * workload.cohort)


def vertical(workload: Workload) -> Case:
    """A round of vertical learning with four parties, and the same batches through all networks in PyTorch."""
    algorithm = {"name": "vertical", "top": "concat", "width": 32, "hidden": [64]}
    federation = Federation(workload, {"name": "inline"}, algorithm, workload.name, parties="quadrants")
    made, lr = federation.built.algorithm, workload.lr
    assert isinstance(made, Vertical)
    bottoms = [LAYOUT.fit(half.model.build(), ON_CPU) for half in made.halves.values()]
    top, parties = made.top.model.build(), [federation.built.source.data_of(k) for k in made.parties]
    rows = [torch.tensor(sorted(range(len(p)), key=p.ids.__getitem__)) for p in parties]
    above, below = list(top.parameters()), [list(bottom.parameters()) for bottom in bottoms]

    def bare() -> tuple[list[nn.Module], nn.Module]:
        for epoch in range(workload.epochs):
            order = torch.randperm(len(rows[0]), generator=torch.Generator().manual_seed(epoch))
            for at in order.split(workload.batch):
                sent = [b(p.inputs(own[at])) for b, p, own in zip(bottoms, parties, rows, strict=True)]
                received = torch.stack([each.detach() for each in sent]).requires_grad_()
                loss = F.cross_entropy(top(received), parties[0].labels(rows[0][at]))
                back, *gradients = torch.autograd.grad(loss, [received, *above])
                with torch.no_grad():
                    torch._foreach_add_(above, gradients, alpha=-lr)
                    for each, own, gradient in zip(sent, below, back, strict=True):
                        torch._foreach_add_(own, torch.autograd.grad(each, own, gradient), alpha=-lr)
        with torch.inference_mode():  # the parties' mean embeddings
            for bottom, party, own in zip(bottoms, parties, rows, strict=True):
                few = own[torch.linspace(0, len(own) - 1, min(MEAN_OF, len(own))).long()]
                torch.cat([bottom(party.inputs(part)) for part in few.split(EVALUATED)]).mean(0)
        return bottoms, top

    return Case(federation.round, bare, FACTOR)


class Steps:
    """Steps of one network towards labels and a teacher's logits, in bare PyTorch, with momentum."""

    def __init__(self, module: nn.Module) -> None:
        self.module = LAYOUT.fit(module, ON_CPU)
        self.optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM, foreach=True)

    def train(self, batch: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]) -> None:
        """One epoch of batches, in a random order."""
        self.module.train()
        for at in torch.randperm(IMAGES).split(BATCH):
            inputs, targets, teacher = batch(at)
            outputs = self.module(inputs)
            there, here = (F.log_softmax(logits / T, 1) for logits in (teacher, outputs))
            distance = F.kl_div(here, there, reduction="batchmean", log_target=True)
            self.optimizer.zero_grad()
            (F.cross_entropy(outputs, targets) + T**2 * distance).backward()
            self.optimizer.step()


def gkt_client() -> Case:
    """A visit of FedGKT's client: an epoch, and the pass that sends."""
    images = torch.randint(0, 256, (IMAGES, *SHAPE), dtype=torch.uint8)
    data = ClientDataset(Examples(images, torch.randint(0, 10, (IMAGES,))), None, MEAN, STD)
    own = ModelSpec(gkt_resnet8, "gkt-resnet8", {}, SHAPE, 10, 0)
    below, above = (frozenset(part.build().state_dict()) for part in stages(own, "bn1"))
    client = Client(0, data, {LOGITS: torch.randn(IMAGES, 10)}, Secrets((0,)), {}, ON_CPU, LAYOUT)
    op = TrainAndSend(own, own, below, above, "bn1", LOCAL, LOSS, torch.float32, EVALUATED)
    steps = Steps(own.build())
    lower, upper = cut(steps.module, ["bn1"])

    def bare() -> None:
        steps.train(lambda at: (*data.batch(at, Rng((0,))), client.state[LOGITS][at]))
        steps.module.eval()
        with torch.no_grad():
            for inputs, _ in data.stretches(0, IMAGES, EVALUATED):
                upper(lower(inputs))

    return Case(lambda: op({"lr": RATE}, client, RNG), bare, 1.05)


def gkt_server() -> Case:
    """An epoch of FedGKT's server on what two clients have sent, and the pass that returns logits."""
    whole = ModelSpec(resnet20, "resnet20", {}, SHAPE, 10, 0)
    model = stages(whole, "bn1")[1]
    half = IMAGES // 2
    contents = [
        {
            "features": torch.rand(half, 16, *SHAPE[1:]),
            LOGITS: torch.randn(half, 10),
            "targets": torch.randint(0, 10, (half,)),
        }
        for _ in range(2)
    ]
    client = Client("@server", None, {}, Secrets((0,)), {}, ON_CPU, LAYOUT)
    op = TrainServer(model, LOCAL, LOSS, EVALUATED)
    payload = {"lr": RATE, "model": tree_of(model.build()), "letters": list(enumerate(contents))}
    features, targets, logits = (
        torch.cat([c[name] for c in contents]) for name in ("features", "targets", LOGITS)
    )
    steps = Steps(model.build())

    def bare() -> None:
        steps.train(lambda at: (features[at], targets[at], logits[at]))
        steps.module.eval()
        with torch.no_grad():
            for part in features.split(EVALUATED):
                steps.module(part)

    return Case(lambda: op(payload, client, RNG), bare, 1.05)


def mix(factory: Callable[..., nn.Module]) -> Case:
    """A hundred mixings of three models at a peer, and as many copies of these three models."""
    model = ModelSpec(factory, "network", {}, SHAPE, 10, 0)
    models = [tree_of(replace(model, seed=seed).build()) for seed in range(3)]
    peer = PeerModel(model, frozenset(models[0]))
    train = Train(model, Classification(), LocalSettings(lr=RATE), ClientRule())
    op = Mix(peer, MixModels(train, before=False, quasi_global=None, trainable=tuple(models[0])))
    draft = {"held": {}, "content": {"model": models[0]}, "optimizer": {}, "steps": 1, "trained": {}}
    state = {"draft": draft}
    client = Client(0, None, state, Secrets((0,)), {}, ON_CPU)
    letters = [(sender, {"model": models[sender]}) for sender in (1, 2)]
    payload = {"weights": [(peer, 1 / 3) for peer in range(3)], "letters": letters, "step": 0, "lr": RATE}

    def ours() -> Outcome:
        for _ in range(MIXINGS - 1):
            op(payload, client, RNG)
        return op(payload, client, RNG)

    def bare() -> None:
        for _ in range(MIXINGS):
            for each in models:
                for value in each.values():
                    value.clone()

    return Case(ours, bare, 2.0)


def nas() -> Case:
    """An epoch of a client of FedNAS on half of its images, and the same steps with PyTorch's Adam and SGD."""
    images = torch.randint(0, 256, (2 * IMAGES, *SHAPE), dtype=torch.uint8)
    data = ClientDataset(Examples(images, torch.randint(0, 10, (2 * IMAGES,))), None, MEAN, STD)
    model = ModelSpec(partial(darts_search, channels=4, cells=3, nodes=2), "darts-search", {}, SHAPE, 10, 0)
    local = LOCAL.model_copy(update={"clip_norm": 5.0})
    op = Train(model, Classification(), local, searching(3e-4, 1e-3, 1.0))
    client = Client(0, data, {}, Secrets((0,)), {}, ON_CPU, LAYOUT)
    module = LAYOUT.fit(model.build(), ON_CPU)
    payload = {"lr": RATE, "model": tree_of(model.build())}
    alphas = [module.get_parameter(name) for name in ARCHITECTURE]
    weights = [value for name, value in module.named_parameters() if name not in ARCHITECTURE]
    order = torch.randperm(2 * IMAGES, generator=RNG.of_client(each_round=False).torch("validation"))

    def bare() -> nn.Module:
        module.train()
        adam = torch.optim.Adam(alphas, 3e-4, (0.5, 0.999), weight_decay=1e-3, foreach=True)
        sgd = torch.optim.SGD(weights, RATE, MOMENTUM, foreach=True)
        for at, other in zip(order[IMAGES:].split(BATCH), order[:IMAGES].split(BATCH), strict=True):
            (x, y), (there, labels) = data.batch(at, Rng((0,))), data.batch(other, Rng((0,)))
            losses = [
                F.cross_entropy(module(images), targets) for images, targets in ((x, y), (there, labels))
            ]
            for alpha, slope in zip(alphas, torch.autograd.grad(sum(losses), alphas), strict=True):
                alpha.grad = slope
            adam.step()
            loss = F.cross_entropy(module(x), y)
            for weight, slope in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.grad = slope
            nn.utils.clip_grad_norm_(weights, 5.0, foreach=True)
            sgd.step()
        return module

    return Case(lambda: op(payload, client, RNG), bare, 1.05)


def match(workload: Workload) -> Case:
    """A pass of FedMA over a network, and the same pass when the server knows what it would find."""
    federation = Federation(workload, {"name": "inline"}, {"name": "fedma"}, workload.name)
    ops, first, found = (
        cast("dict[str, Any]", federation.built.algorithm.ops),
        federation.state,
        dict[Any, Outcome](),
    )
    op = ops["match"]

    def matching(payload: Payload, client: Client, rng: Rng) -> Outcome:
        shape = payload["letters"][0][1]["layer"]["weight"].shape
        if shape not in found:
            found[shape] = op(payload, client, rng)
        return found[shape]

    def a_pass() -> None:
        federation.state, federation.number = first, 0
        federation.round()

    def ours() -> None:
        found.clear()
        a_pass()

    ops["match"] = matching
    return Case(ours, a_pass, 1.2)


CASES: dict[str, Callable[[], Case]] = {
    **{f"split {workload.name}": partial(split, workload) for workload in SPLIT},
    **{f"vertical {workload.name}": partial(vertical, workload) for workload in VERTICAL},
    "gkt client": gkt_client,
    "gkt server": gkt_server,
    "nas": nas,
    **{f"match {workload.name}": partial(match, workload) for workload in MATCHED},
    "mix hsu-cnn": partial(mix, hsu_cnn),
    "mix resnet56": partial(mix, resnet56),
}

if __name__ == "__main__":
    main()
