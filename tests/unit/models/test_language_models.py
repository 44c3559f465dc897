"""Models of text: parameter counts, forms of outputs, padding, and that they learn real text."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.data.datasets.text import LETTERS, letter_ids
from fedlens.models.language import MeanEmbedding
from fedlens.models.registry import MODELS
from tests.unit.models.zoo_kit import made, parameters

SONNET = (
    "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\nRough winds do shake "
    "the darling buds of May,\nAnd summer's lease hath all too short a date;"
)


def test_the_lstm_has_the_parameters_of_the_documents() -> None:
    assert parameters(made("lstm", (80,), 90)) == 822_570
    by_hand = 90 * 8 + 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2) + 256 * 90 + 90
    assert by_hand == 822_570


def test_the_vocabulary_is_not_the_number_of_classes() -> None:
    assert parameters(made("lstm", (80,), 90, vocabulary=100)) == 822_570 + 10 * 8
    assert parameters(made("mean-embedding", (25,), 2, vocabulary=10_002)) == 64 * 10_002 + 64 * 2 + 2


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("lstm", {"units": 6}, (3, 5)),
        ("lstm", {"units": 6, "layers": 1, "dropout": 0.5}, (3, 5)),
        ("lstm", {"units": 6, "outputs": "every"}, (3, 9, 5)),
        ("mean-embedding", {"embedding": 4}, (3, 5)),
    ],
)
def test_tokens_give_logits_and_every_weight_a_gradient(
    name: str, settings: dict[str, Any], expected: tuple[int, ...]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = made(name, (9,), 5, vocabulary=11, **settings)
    logits = module(torch.randint(1, 11, (3, 9), generator=torch.Generator().manual_seed(0)))
    assert logits.shape == expected
    logits.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in module.parameters())


def test_the_last_logits_of_every_position_are_those_of_the_last() -> None:
    tokens = torch.randint(11, (3, 9), generator=torch.Generator().manual_seed(0))
    last, every = (made("lstm", (9,), 5, units=6, vocabulary=11, outputs=form) for form in ("last", "every"))
    torch.testing.assert_close(last(tokens), every(tokens)[:, -1])


def test_dropout_acts_in_training_alone() -> None:
    module = made("lstm", (9,), 5, units=6, layers=1, dropout=0.5).eval()
    tokens = torch.zeros(3, 9, dtype=torch.int64)
    assert torch.equal(module(tokens), module(tokens))
    torch.manual_seed(0)
    assert not torch.equal(module.train()(tokens), module(tokens))


def test_the_mean_leaves_padding_out_and_an_empty_text_has_the_mean_0() -> None:
    module = MeanEmbedding(6, 3, embedding=4)
    short, long = torch.tensor([[2, 5]]), torch.tensor([[2, 5, 0, 0, 0]])
    torch.testing.assert_close(module(short), module(long))
    by_hand = module.classifier(module.embedding.weight[[2, 5]].mean(0, keepdim=True))
    torch.testing.assert_close(module(long), by_hand)
    assert torch.equal(module(torch.zeros(1, 5, dtype=torch.int64)), module.classifier.bias[None])
    everything = MeanEmbedding(6, 3, embedding=4, padding=-1)
    assert not torch.equal(everything(short), everything(long))


def test_padding_gets_no_gradient() -> None:
    module = MeanEmbedding(6, 3, embedding=4)
    module(torch.tensor([[2, 5, 0, 0]])).sum().backward()
    assert module.embedding.weight.grad is not None
    assert module.embedding.weight.grad.any(1).tolist() == [False, False, True, False, False, True]


def windows(length: int) -> tuple[Tensor, Tensor]:
    """Windows of a sonnet by Shakespeare, and the character after each."""
    ids = torch.from_numpy(letter_ids(SONNET)[0]).long()
    return ids.unfold(0, length, 1)[:-1], ids[length:]


@pytest.mark.parametrize("settings", [{}, {"layers": 1, "dropout": 0.1}])
def test_the_lstm_fits_real_text(settings: dict[str, Any]) -> None:
    module = made("lstm", (12,), len(LETTERS), units=32, **settings)
    tokens, following = windows(12)
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    first = F.cross_entropy(module(tokens), following).item()
    for _ in range(200):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(tokens), following)
        loss.backward()
        optimizer.step()
    assert first > 4
    assert loss.item() < 0.4


def test_the_models_are_listed_for_language() -> None:
    assert [name for name, entry in MODELS.entries.items() if entry.task == "language"] == [
        "lstm",
        "mean-embedding",
        "distilbert",
    ]
