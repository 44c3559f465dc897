"""`ClientDataset.batch`: the same bits in another exchange, slot and worker, and those of `batches`."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fedlens.base.threads import first
from fedlens.core.driver import Driver
from fedlens.core.protocol import Ask, Client, ClientStates, Outcome, Payload, Program, Reply, Request
from fedlens.core.random import Rng
from fedlens.data.augmentation.augment import AUGMENTS
from fedlens.data.augmentation.augmented import Chain
from fedlens.data.client_datasets import ClientDatasets
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.federated import federate
from fedlens.data.images import ImageFiles, Paths
from fedlens.data.partition.partition import Partition
from fedlens.engines.inline import inline
from fedlens.engines.processes import processes

SHAPE, IMAGES, SIZE = (3, 8, 8), 22, 4  # each of two clients has 11: the last batch has 3


def noisy(images: Tensor, targets: Any, generator: torch.Generator) -> tuple[Tensor, Any]:
    """A user's own augmentation, which draws from PyTorch's global generator."""
    return images ^ torch.randint_like(images, 8), targets


def chain(*names: str) -> Chain:
    steps = (AUGMENTS.find(name)(SHAPE) for name in names)
    return Chain((*steps, noisy))


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.RandomState(0).randint(0, 256, (IMAGES, 8, 8, 3), np.uint8)


@pytest.fixture(scope="module")
def clients(pixels: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ClientDatasets]:
    root = tmp_path_factory.mktemp("images")
    for k, image in enumerate(pixels):
        Image.fromarray(image).save(root / f"{k:02}.png")
    files = ImageFiles(root, Paths.of([f"{k:02}.png" for k in range(IMAGES)]), *SHAPE)
    shifts = {"brightness": np.array([1.0, 1.4]), "noise": np.array([0.0, 0.1])}

    def made(inputs: Any) -> ClientDatasets:
        split = Examples(inputs, np.arange(IMAGES) % 3)
        data = Dataset("made", split, split, ("a", "b", "c"), (0.4,) * 3, (0.2,) * 3, "", "")
        partition = Partition.of_owners(np.arange(IMAGES) % 2, 2, spec={})
        return federate(data, lambda table: replace(partition, features=shifts))[0]

    return {"memory": made(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()), "files": made(files)}


def look(payload: Payload, client: Client, rng: Rng) -> Outcome:
    """One step: the batch and a dropout mask; the ask says which step, and nothing about the draws."""
    key = rng.of_client().child("step", payload["step"])
    inputs, targets = client.data.batch(torch.tensor(payload["positions"]), key)
    key.seed_torch(client.device)
    mask = torch.nn.functional.dropout(torch.ones(8))
    return Outcome({"inputs": inputs.clone(), "targets": targets, "mask": mask, "pid": os.getpid()})


def asked(engine: Any, data: ClientDatasets, seed: int = 7) -> list[Reply]:
    """Three exchanges of one round: steps 0 and 1 of clients 0 and 1, then step 0 of both, in the other slots."""
    positions = {0: [3, 0, 9, 4], 1: [10, 2, 2]}

    def steps() -> Any:
        replies: list[Any] = []
        for order, step in (((0, 1), 0), ((0, 1), 1), ((1, 0), 0)):
            requests = [Request(k, {"positions": positions[k], "step": step}) for k in order]
            replies += yield Ask("look", requests)
        return replies

    states = ClientStates()
    try:
        engine.open(Program({"look": look}, data, seed), states)
        answers: list[Any] = Driver(engine, states).drive(steps(), 1)
    finally:
        engine.close()
    assert all(isinstance(answer, Reply) for answer in answers), answers
    return answers


def equal(one: Reply, other: Reply) -> bool:
    return all(torch.equal(one.payload[name], other.payload[name]) for name in ("inputs", "targets", "mask"))


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize("views", [1, 2])
def test_a_batch_has_the_same_bits_in_another_exchange_slot_and_worker(
    clients: dict[str, ClientDatasets], views: int
) -> None:
    augment = chain("random-resized-crop", "colour-jitter")
    memory, files = (replace(clients[key], augment=augment, views=views) for key in ("memory", "files"))
    alone = asked(inline(), memory)
    assert equal(alone[0], alone[5])
    assert equal(alone[1], alone[4])
    assert not equal(alone[0], alone[2])  # another step
    assert alone[1].payload["inputs"].shape == (3, *([views] if views > 1 else []), *SHAPE)
    again = alone[1].payload["inputs"]
    assert not torch.equal(again[1], again[2])  # the same image twice, augmented twice
    workers = asked(processes(workers=2), files)
    assert all(map(equal, alone, workers))
    assert os.getpid() not in {reply.payload["pid"] for reply in workers}
    assert not any(map(equal, alone, asked(inline(), memory, seed=8)))  # seeds.training keeps its say


@pytest.mark.parametrize("where", ["memory", "files"])
@pytest.mark.parametrize("augment", [None, Chain((AUGMENTS.find("random-resized-crop")(SHAPE),))])
def test_the_first_batch_of_an_epoch_is_the_batch_at_its_positions(
    clients: dict[str, ClientDatasets], where: str, augment: Chain | None
) -> None:
    data, rng = replace(clients[where], augment=augment).data_of(1), Rng((3,))
    order = torch.randperm(11, generator=rng.torch("batches"))
    for size, at in [(SIZE, order[:SIZE]), (11, torch.arange(11)), (50, torch.arange(11))]:
        with ExitStack() as ending:
            ((inputs, targets),) = first(data.batches(size, rng), 1, ending)
            found = data.batch(at, rng)
            assert torch.equal(found[0], inputs)
            assert torch.equal(found[1], targets)
    if augment is None:
        with ExitStack() as ending:
            *_, last = first(data.batches(SIZE, rng), 3, ending)
            found = data.batch(order[2 * SIZE :], rng)
            assert len(found[1]) == 3
            assert torch.equal(found[0], last[0])
            assert torch.equal(found[1], last[1])


def test_a_batch_leaves_the_global_generator_as_it_was(clients: dict[str, ClientDatasets]) -> None:
    data = replace(clients["memory"], augment=chain("flip")).data_of(0)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one = data.batch(torch.arange(4), Rng((1,)))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    assert torch.equal(one[0], data.batch(torch.arange(4), Rng((1,)))[0])


class Drawn(ImageFiles):
    """Images drawn anew in each training step: here, one level for each."""

    changing: ClassVar[bool] = True

    def draw(self, index: Any, generator: torch.Generator) -> Any:
        levels = torch.randint(256, (len(index), 1, 1, 1), dtype=torch.uint8, generator=generator)
        return levels.expand(-1, *SHAPE).numpy()


def test_images_that_are_drawn_anew_are_drawn_again(clients: dict[str, ClientDatasets]) -> None:
    data, at = clients["files"].data_of(0), torch.arange(4)
    drawn = replace(data, examples=replace(data.examples, inputs=Drawn(**vars(data.examples.inputs))))
    one = drawn.batch(at, Rng((1,)))[0]
    assert torch.equal(one, drawn.batch(at, Rng((1,)))[0])
    assert not torch.equal(one, drawn.batch(at, Rng((2,)))[0])
    with ExitStack() as ending:
        ((inputs, _),) = first(drawn.batches(SIZE, Rng((1,))), 1, ending)
    order = torch.randperm(11, generator=Rng((1,)).torch("batches"))
    assert torch.equal(inputs, drawn.batch(order[:SIZE], Rng((1,)))[0])


@pytest.mark.parametrize("position", [-1, 11])
def test_a_position_outside_the_examples_is_refused(
    clients: dict[str, ClientDatasets], position: int
) -> None:
    data = clients["memory"].data_of(0)
    with pytest.raises(IndexError, match=f"position {position} of 11 examples: take 0 to 10"):
        data.batch(torch.tensor([0, position]), Rng((1,)))
    assert len(data.batch(torch.tensor([], dtype=torch.int64), Rng((1,)))[1]) == 0


def test_all_asks_of_a_round_share_one_node_of_the_client() -> None:
    key = Rng.of_operation(5, 2, 0, 1, 9)
    assert key == Rng((5, "op", 2, 0, 1, 9))
    assert key.of_client() == Rng.of_operation(5, 2, 3, 4, 9).of_client()
    others = [Rng.of_operation(*at).of_client() for at in ((6, 2, 0, 1, 9), (5, 3, 0, 1, 9), (5, 2, 0, 1, 8))]
    assert len({key.of_client().seed("x"), *(other.seed("x") for other in others)}) == 4
    for wrong in (key.of_client(), key.child("step"), Rng((5, "rnd", 2, 0, 1, 9))):
        with pytest.raises(ValueError, match="not the rng of an operation"):
            wrong.of_client()
