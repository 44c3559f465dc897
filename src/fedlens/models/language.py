"""Models of text. Each takes tokens, int64 [n, T], and gives logits: [n, classes], or [n, T, classes]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

from fedlens.models.simple import Width

Vocabulary = Annotated[
    int | None,
    Field(
        ge=1,
        le=10_000_000,
        description="number of different tokens, by default that of the dataset",
    ),
]
Embedding = Annotated[int, Field(ge=1, le=65536, description="numbers that a token is embedded in")]


class Lstm(nn.Module):
    """An embedding, LSTM layers, and a linear layer on the last layer's states; see `lstm`.

    Args:
        vocabulary: number of different tokens.
        classes: number of logits.
        embedding: numbers that a token is embedded in.
        units: of each LSTM layer.
        layers: number of LSTM layers.
        dropout: probability with which an output of an LSTM layer is set to 0 in training.
        every_position: whether the linear layer takes the states of all positions, or the last one.
    """

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        embedding: int = 8,
        units: int = 256,
        layers: int = 2,
        dropout: float = 0.0,
        every_position: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        between = dropout if layers > 1 else 0.0  # of one layer PyTorch warns
        self.lstm = nn.LSTM(embedding, units, layers, batch_first=True, dropout=between)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(units, classes)
        self.every_position = every_position

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [n, classes], or [n, T, classes], of tokens int64 [n, T]."""
        states, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.classifier(self.dropout(states if self.every_position else states[:, -1]))
        return logits


class MeanEmbedding(nn.Module):
    """A linear layer on the mean of the embeddings of a text's tokens; see `mean_embedding`.

    Args:
        vocabulary: number of different tokens.
        classes: number of logits.
        embedding: numbers that a token is embedded in.
        padding: the token that the mean leaves out.
    """

    def __init__(self, vocabulary: int, classes: int, embedding: int = 64, padding: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.classifier = nn.Linear(embedding, classes)
        self.padding = padding

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [n, classes] of tokens int64 [n, T]. The mean of a text without a token is 0."""
        embedded = self.embedding(tokens)
        given = (tokens != self.padding).unsqueeze(-1).to(embedded)
        logits: Tensor = self.classifier((embedded * given).sum(1) / given.sum(1).clamp(min=1))
        return logits


def lstm(
    input_shape: Sequence[int],
    classes: int,
    *,
    embedding: Embedding = 8,
    units: Width = 256,
    layers: Annotated[int, Field(ge=1, le=64, description="number of LSTM layers")] = 2,
    dropout: Annotated[
        float, Field(ge=0, lt=1, description="probability of dropout after each LSTM layer, in training")
    ] = 0.0,
    outputs: Annotated[
        Literal["last", "every"],
        Field(
            description="logits of the last position, or of every position for a dataset with targets [n, T]"
        ),
    ] = "last",
    vocabulary: Vocabulary = None,
) -> nn.Module:
    """The LSTM of McMahan et al. 2017 (arXiv 1602.05629, section 3) for the next character.

    An embedding of 8 numbers, two LSTM layers of 256 units, and a linear layer on the last state; chen2022 (appendix
    C.1) has two layers of 256 units. Tokens int64 [n, T] give logits [n, classes]; with `outputs = "every"`
    [n, T, classes]. Each LSTM layer has two biases, as PyTorch's have.

    >>> sum(p.numel() for p in lstm((80,), 90).parameters())
    822570
    """
    return Lstm(vocabulary or classes, classes, embedding, units, layers, dropout, outputs == "every")


def mean_embedding(
    input_shape: Sequence[int],
    classes: int,
    *,
    embedding: Embedding = 64,
    padding: Annotated[
        int, Field(ge=-1, description="token that the mean leaves out: 0 in sent140; -1 leaves none out")
    ] = 0,
    vocabulary: Vocabulary = None,
) -> nn.Module:
    """A linear classifier on the mean of the embeddings of a text's words, without its padding; for `sent140`.

    Tokens int64 [n, T] give logits [n, classes]. The order of the words does not matter.

    >>> sum(p.numel() for p in mean_embedding((25,), 2, vocabulary=10_002).parameters())  # 64 x 10,002 + 64 x 2 + 2
    640258
    """
    return MeanEmbedding(vocabulary or classes, classes, embedding, padding)
