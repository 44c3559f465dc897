"""Parties in float64: windows of small images, with ids, and a label party that notes the batches it trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedlens.algorithms.averaging import Parts
from fedlens.algorithms.vertical import Vertical, vertical
from fedlens.core.dataset_info import PartyFacts, Window
from fedlens.core.driver import Driver, Tally
from fedlens.core.protocol import (
    Client,
    ClientDataSource,
    ClientStates,
    FederationInfo,
    ModelSpec,
    Outcome,
    Payload,
    Program,
    RoundContext,
)
from fedlens.core.random import Rng
from fedlens.engines.inline import inline
from fedlens.local.settings import LocalSettings
from fedlens.tasks.classification import Classification

CLASSES, SIDE = 3, 4
WINDOWS = tuple(Window(top, left, 2, 2) for top in (0, 2) for left in (0, 2))


def net(input_shape: Sequence[int], classes: int, *, hidden: int = 0) -> nn.Module:
    """A linear layer on pixels, or two with tanh between them, in float64."""
    layers: list[nn.Module] = [nn.Flatten()]
    pixels = int(np.prod(input_shape))
    layers += [nn.Linear(pixels, hidden), nn.Tanh()] if hidden else []
    return nn.Sequential(*layers, nn.Linear(hidden or pixels, classes)).double()


@dataclass(frozen=True)
class Rows:
    """The rows of a party: `fedlens.core.dataset_info.PartyExamples`."""

    ids: tuple[str, ...]
    images: Tensor
    targets: Tensor | None
    held: Any = None
    seen: list[tuple[str, ...]] = field(default_factory=list)  # the ids of each batch whose labels were read

    def __len__(self) -> int:
        return len(self.ids)

    def inputs(self, positions: Tensor) -> Tensor:
        return self.images[positions]

    def labels(self, positions: Tensor) -> Tensor:
        assert self.targets is not None
        self.seen.append(tuple(self.ids[at] for at in positions.tolist()))
        return self.targets[positions]

    def ordered(self, order: Tensor) -> Rows:
        targets = None if self.targets is None else self.targets[order]
        return replace(
            self, ids=tuple(self.ids[k] for k in order.tolist()), images=self.images[order], targets=targets
        )


@dataclass(frozen=True)
class PartyWorld(ClientDataSource):
    """Four parties, each with a quadrant, and the whole images by id."""

    parties: tuple[Rows, ...]
    whole: Mapping[str, tuple[Tensor, int]]
    tested: tuple[Tensor, Tensor]
    align: str = "psi"

    @property
    def info(self) -> FederationInfo:
        names = tuple(f"party {k}" for k in range(len(self.parties)))
        facts = PartyFacts(names, ((1, 2, 2),) * 4, WINDOWS, 1, self.align)  # type: ignore[arg-type]
        sizes = np.array([len(rows) for rows in self.parties])
        return FederationInfo(sizes, CLASSES, (1, SIDE, SIDE), {"@test": len(self.tested[1])}, parties=facts)

    def data_of(self, client: int | str) -> Rows:
        assert not isinstance(client, str)
        return self.parties[client]

    def batch(self, ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Whole images and labels."""
        images, labels = zip(*(self.whole[name] for name in ids), strict=True)
        return torch.stack(images), torch.tensor(labels)

    @property
    def batches(self) -> list[tuple[str, ...]]:
        """The ids of each batch that the label party has trained on."""
        return self.parties[1].seen

    def having(self, **parties: Rows) -> PartyWorld:
        """The same with other rows at some parties, by "p0" to "p3"."""
        return replace(self, parties=tuple(parties.get(f"p{k}", rows) for k, rows in enumerate(self.parties)))


def of(images: Tensor, window: Window) -> Tensor:
    return images[..., window.top : window.top + window.height, window.left : window.left + window.width]


def world(common: int = 30, own: int = 6, align: str = "psi", seed: int = 3) -> PartyWorld:
    """Parties that have `common` examples, and `own` more of each that not all have; each in an order of its own."""
    g = torch.Generator().manual_seed(seed)
    total = common + 4 * own
    images = torch.randn(total, 1, SIDE, SIDE, generator=g, dtype=torch.float64)
    labels = (images.flatten(1)[:, :CLASSES] + images.flatten(1)[:, -CLASSES:]).argmax(1)
    ids = [f"id-{7 * k % 101:03}" for k in range(total)]
    tested = torch.randn(20, 1, SIDE, SIDE, generator=g, dtype=torch.float64)
    answers = tested.flatten(1)[:, :CLASSES].argmax(1)
    parties = []
    for k, window in enumerate(WINDOWS):
        held = torch.cat([torch.arange(common), torch.arange(common + k * own, common + (k + 1) * own)])
        held = held[torch.randperm(len(held), generator=g)]
        names = tuple(f"test-{at:02}" for at in range(len(tested)))
        test = Rows(names, of(tested, window), answers if k == 1 else None)
        test = test.ordered(torch.randperm(len(tested), generator=g))
        targets = labels[held] if k == 1 else None
        parties.append(
            Rows(tuple(ids[at] for at in held), of(images[held], window), targets, {"@test": test})
        )
    whole = {name: (image, int(label)) for name, image, label in zip(ids, images, labels, strict=True)}
    return PartyWorld(tuple(parties), whole, (tested, answers), align)


def algorithm(there: PartyWorld, local: Mapping[str, Any], units: int = 0, **settings: Any) -> Vertical:
    spec = ModelSpec(net, f"{__file__}:net", {"hidden": units}, (1, SIDE, SIDE), CLASSES, 5)
    return vertical(Parts(spec, Classification(), LocalSettings(**local), there.info), **settings)


@dataclass
class Course:
    """What a run leaves: the server's states by round, the parties' states, metrics and tallies."""

    states: list[Any]
    clients: ClientStates
    metrics: dict[str, float]
    tallies: list[Tally]

    @property
    def final(self) -> Mapping[str, Tensor]:
        return self.states[-1]["model"]


def course(
    made: Vertical, there: PartyWorld, rounds: int, failing: Sequence[Any] = (), engine: Any = None
) -> Course:
    """Runs the rounds and the evaluation of the last. `failing`: (operation, round, step, party) that raise."""

    def op(name: str, of: Any) -> Any:
        def call(payload: Payload, client: Client, rng: Rng) -> Outcome:
            if (name, rng.key[2], payload.get("step"), client.id) in failing:
                raise OSError("the image cannot be read")
            return of(payload, client, rng)

        return call if failing else of

    engine, states = engine or inline(), ClientStates()
    engine.open(Program({name: op(name, of) for name, of in made.ops.items()}, there, 0), states)
    try:
        found = Course([made.init(made.parts.model, there.info)], states, {}, [])
        gate = Driver(engine, states)
        for round in range(1, rounds + 1):
            gate.tally = Tally()
            context = RoundContext(round, rounds, there.info, Rng((0, "round", round)))
            found.states.append(gate.drive(made.round(found.states[-1], context), round))
            found.tallies.append(gate.tally)
        gate.tally = Tally()
        found.metrics = gate.drive(made.evaluate(found.states[-1], context), rounds)
        found.tallies.append(gate.tally)
        return found
    finally:
        engine.close()
