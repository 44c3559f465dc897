"""Language: cross-entropy, accuracy and perplexity of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.core.dataset_info import DatasetInfo, Kind
from fedlens.core.measured import Measured
from fedlens.tasks.class_weights import ClassWeighted, ClassWeightsSetting, checked
from fedlens.tasks.task import measurable, present, wrong_shape

IGNORED = -1  # the target that counts for nothing


@dataclass(frozen=True, kw_only=True)
class Language(ClassWeighted):
    """A class a text, or one at each of its tokens, such as the next character. Inputs are tokens, int64 [n, T].

    | targets | outputs, logits |
    |---|---|
    | int64 [n] | [n, classes] |
    | int64 [n, T] | [n, T, classes], the classes last |

    A target of -1 counts for nothing, in training and in the metrics. A "token" below is a target that counts.

    Args:
        score: the metric that the best model is chosen by.
        class_weights: weights of the classes in the training loss: "none", "balanced" (m / (C m_c) at each client,
            from its own counts m_c of C classes, m in all), or one number a class.
        info: the facts about the dataset that it is for; see `fitted`.

    Metrics, over all tokens together:
        loss: the mean cross-entropy in nats, without weights.
        accuracy: the share of tokens whose largest logit is that of their class.
        perplexity: exp(loss).

    Without a token no metric is defined, and the loss of a batch is 0.

    >>> task = Language()
    >>> logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [9.0, 0.0]])
    >>> metrics = task.metrics(task.measure(logits, torch.tensor([0, 0, -1])))
    >>> metrics["accuracy"], round(metrics["perplexity"], 3)
    (0.5, 3.086)
    """

    score: str = "accuracy"
    info: DatasetInfo | None = None
    kind: ClassVar[Kind] = "language"
    metric_names: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "perplexity")
    errors: ClassVar[frozenset[str]] = frozenset({"loss", "perplexity"})
    shares: ClassVar[frozenset[str]] = frozenset({"accuracy"})
    totals: ClassVar[frozenset[str]] = frozenset({"loss", "tokens", "correct"})
    example: ClassVar[str] = "text"
    averages_classes: ClassVar[bool] = False
    sends: ClassVar[str] = "its summed loss, and how many tokens it has and were right"

    def fitted(self, info: DatasetInfo) -> Language:
        """The task with the facts about this dataset."""
        return replace(self, info=info)

    @property
    def features(self) -> bool:  # type: ignore[override]
        """Whether a text has one feature vector: with a target at each token it has T of them."""
        return not self._target_shape

    def blank(self, n: int, input_shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """The last token of the vocabulary, int64 [n, T]: a model with a smaller embedding fails in its trial."""
        return torch.full((n, *input_shape), self._vocabulary - 1)

    def random_inputs(self, n: int, input_shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Random tokens, int64 [n, T]."""
        return torch.randint(self._vocabulary, (n, *input_shape), generator=generator)

    def random_targets(
        self, n: int, classes: int, input_shape: Sequence[int], generator: torch.Generator
    ) -> Tensor:
        """Random targets, int64 [n] or [n, T]."""
        return torch.randint(classes, (n, *self._target_shape), generator=generator)

    def outputs(self, module: nn.Module, inputs: Tensor, targets: Any) -> Tensor:
        """The logits; tokens that the dataset has as int16 or int32 are made int64."""
        logits: Tensor = module(inputs.long())
        return logits

    def loss(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None, normalize: bool = True
    ) -> Tensor:
        """The cross-entropy in nats over tokens i: its mean, or with `weights` sum_i w(y_i) l_i / sum_i w(y_i).

        0, with a gradient of 0, for a batch without a token.
        """
        logits, classes = _flat(outputs, targets)
        counted = classes != IGNORED
        if weights is None:
            total = F.cross_entropy(logits, classes, ignore_index=IGNORED, reduction="sum")
            return total / counted.sum().clamp(min=1)
        losses = F.cross_entropy(logits, classes, ignore_index=IGNORED, reduction="none")
        each = torch.where(counted, weights.to(losses)[classes.clamp(min=0)], 0.0)
        if not normalize:
            return (each * losses).sum() / counted.sum().clamp(min=1)
        # The floor is for batches of weight 0 alone; no other sum is as small.
        return (each * losses).sum() / each.sum().clamp(min=torch.finfo(losses.dtype).tiny)

    @property
    def losses(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The cross-entropy of each text, [n].

        None with class weights, with a target at each token, and where some texts have no target: then the texts of a
        batch share a denominator.
        """
        gaps = self.info is not None and self.info.gaps
        return None if self.weighs or gaps or self._target_shape else _losses

    def counts(self, targets: Tensor, classes: int) -> Tensor:
        """int64 [n, classes]: how often each class is a target of each text."""
        n, each = len(targets), targets.reshape(len(targets), -1)
        rows = torch.arange(n, device=targets.device)[:, None] * classes
        places = (rows + each)[each != IGNORED]
        return torch.bincount(places, minlength=n * classes).view(n, classes)

    def most_counts(self, input_shape: Sequence[int]) -> float:
        """The number of targets of a text."""
        return torch.Size(self._target_shape).numel()

    def output_values(self, info: DatasetInfo) -> int:
        """The number of logits of a text."""
        return len(info.classes) * torch.Size(info.target_shape).numel()

    def measure(self, outputs: Tensor, targets: Tensor) -> Measured:
        """The sums of a batch: `loss` float64; `tokens` and `correct` int64."""
        outputs, targets = measurable(outputs, targets)
        logits, classes = _flat(outputs, targets)
        losses = F.cross_entropy(logits, classes, ignore_index=IGNORED, reduction="none")
        return Measured(
            {
                "loss": losses.double().sum(),
                "tokens": (classes != IGNORED).sum(),
                "correct": (logits.argmax(1) == classes).sum(),
            }
        )

    def metrics(self, measured: Measured) -> dict[str, float]:
        """The metrics that the class lists."""
        sums = measured.sums
        tokens = int(sums["tokens"])
        if not tokens:
            return {}
        loss = sums["loss"] / tokens
        return present(
            {
                "loss": float(loss),
                "accuracy": int(sums["correct"]) / tokens,
                "perplexity": float(loss.exp()),  # infinite beyond a loss of 709, where `math.exp` raises
            }
        )

    def predict(self, outputs: Tensor) -> dict[str, Tensor]:
        """`class`, int64 [n] or [n, T], the most probable class, and `scores`, float [..., classes], probabilities.

        PyTorch's exporters trace it, and the names are those of the exported model's outputs.

        >>> Language().predict(torch.tensor([[0.0, 1.0]]))["class"]
        tensor([1])
        """
        return {"class": outputs.argmax(-1), "scores": outputs.softmax(-1)}

    def misfit(self, outputs: object, inputs: Tensor, classes: int) -> str | None:
        """The logits must be [n, classes], or [n, T, classes] if each token has a target."""
        shape = self._target_shape
        wrong = wrong_shape(outputs, len(inputs), *shape, classes)
        return f"{wrong} at each position" if wrong and shape else wrong

    @property
    def _vocabulary(self) -> int:
        return (self.info.vocabulary if self.info is not None else None) or 1

    @property
    def _target_shape(self) -> tuple[int, ...]:
        return self.info.target_shape if self.info is not None else ()


def _flat(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(logits [m, classes], targets [m]) of all positions."""
    return outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)


def _losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, ignore_index=IGNORED, reduction="none")


def language(*, class_weights: ClassWeightsSetting = "none") -> Language:
    """A class a text, or one at each of its tokens.

    Raises `ConfigError` for class weights of which none is above 0.
    """
    return Language(class_weights=checked(class_weights))
