"""DistilBERT with a classifier, of transformers, which is in the extra `text` and is imported when one is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from fedlens.base.errors import ConfigError
from fedlens.models.backbone import WithBackbone
from fedlens.models.language import Vocabulary
from fedlens.models.simple import Width

POSITIONS = 512
"""The longest text, in tokens, as in the published weights."""
_TOKENS = 30_522


class DistilBert(WithBackbone):
    """`DistilBertForSequenceClassification` of transformers, with its names, its initial weights and its outputs.

    Args:
        body: a `DistilBertModel` of transformers.
        classes: number of logits.
        dropout: probability of dropout before the classifier.
    """

    backbone = "distilbert"
    heads = ("pre_classifier", "classifier")

    def __init__(self, body: Any, classes: int, dropout: float) -> None:
        super().__init__()
        width, deviation = body.config.dim, body.config.initializer_range
        self.distilbert = body
        self.pre_classifier = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(width, classes)
        for layer in (self.pre_classifier, self.classifier):
            nn.init.normal_(layer.weight, std=deviation)
            nn.init.zeros_(layer.bias)

    @property
    def configuration(self) -> Mapping[str, object]:
        """What config.json beside weights for this network says, besides the shapes."""
        return {"model_type": "distilbert", "n_heads": self.distilbert.config.n_heads, "activation": "gelu"}

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [n, classes] of tokens int64 [n, T]. The first token counts, even if it is padding."""
        first = torch.arange(tokens.shape[1], device=tokens.device) == 0
        seen = ((tokens != 0) | first)[:, None, None, :]
        states: Tensor = self.distilbert(tokens, attention_mask=seen).last_hidden_state
        features = torch.relu(self.pre_classifier(states[:, 0]))
        logits: Tensor = self.classifier(self.dropout(features))
        return logits


def distilbert(
    input_shape: Sequence[int],
    classes: int,
    *,
    layers: Annotated[int, Field(ge=1, le=64, description="number of transformer blocks")] = 6,
    width: Width = 768,
    heads: Annotated[int, Field(ge=1, le=1024, description="attention heads, a divisor of the width")] = 12,
    dropout: Annotated[
        float, Field(ge=0, lt=1, description="probability of dropout in the body, in its attention too")
    ] = 0.1,
    head_dropout: Annotated[
        float, Field(ge=0, lt=1, description="probability of dropout before the classifier")
    ] = 0.2,
    vocabulary: Vocabulary = None,
) -> nn.Module:
    """DistilBERT (Sanh et al. 2019, arXiv 1910.01108) with the classifier of transformers on its first token.

    The defaults are those of the published weights, which `model.weights` loads from a folder, a file or the Hugging
    Face Hub. Tokens int64 [n, T] of a tokenizer, 0 the padding, give logits [n, classes]. Without a dataset, the
    vocabulary is that of the uncased weights, 30,522.

    Raises `ConfigError` without transformers, for a width that is no multiple of the heads, and for texts of more than
    512 tokens.

    >>> with torch.device("meta"):
    ...     sum(p.numel() for p in distilbert((64,), 2).parameters())
    66955010
    """
    if width % heads:
        raise ConfigError(
            f"model.width is {width}, which is no multiple of model.heads, {heads}",
            where="model.heads",
            hint="set model.heads to a divisor of the width",
        )
    if input_shape[0] > POSITIONS:
        raise ConfigError(
            f"the model 'distilbert' takes texts of at most {POSITIONS} tokens, but they have {input_shape[0]:,}",
            where="model.name",
            hint=f"set data.dataset.length to at most {POSITIONS}",
        )
    try:
        from transformers import DistilBertConfig, DistilBertModel
    except ImportError:
        raise ConfigError(
            "the model 'distilbert' needs transformers, which is not installed",
            where="model.name",
            hint="run: pip install 'fedlens[text]'",
        ) from None
    sizes = {
        "vocab_size": vocabulary or _TOKENS,
        "max_position_embeddings": POSITIONS,
        "hidden_dim": 4 * width,
    }
    rates = {"dropout": dropout, "attention_dropout": dropout}
    config = DistilBertConfig(
        n_layers=layers, n_heads=heads, dim=width, attn_implementation="sdpa", **sizes, **rates
    )
    return DistilBert(DistilBertModel(config), classes, head_dropout)
