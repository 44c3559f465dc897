"""Representations of models: features by layer, their similarity between models, and neural collapse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.analyses.model_evaluation import ModelEvaluator
from fedlens.base.errors import ConfigError
from fedlens.core.tree import Tree
from fedlens.local.features import listening
from fedlens.models.projection import last_linear
from fedlens.tasks.classification import Classification

_LAYERS = 12  # that are compared by default
_EXAMPLES = 1000


# ---- similarity


def linear_cka(features: Sequence[Tensor]) -> tuple[tuple[float | None, ...], ...]:
    """The linear CKA of each pair of features [n, d1], [n, d2], ... of n examples (Kornblith et al. 2019, Eq. 3, 5).

    |Y^T X|_F^2 / (|X^T X|_F |Y^T Y|_F) for centered columns, in float64: from 0 to 1, and 1 for features that differ by
    a rotation, a scale and a shift. None if the features of all examples are equal.

    >>> x = torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 3.0]])
    >>> round(linear_cka([x, 3 * x.flip(1) + 1])[0][1], 6)
    1.0
    """
    centered = [_centered(each) for each in features]
    norms = [_alignment(x, x) ** 0.5 for x in centered]
    matrix: list[list[float | None]] = [[None] * len(centered) for _ in centered]
    for i, x in enumerate(centered):
        for j in range(i + 1):
            scale = norms[i] * norms[j]
            matrix[i][j] = matrix[j][i] = _alignment(x, centered[j]) / scale if scale else None
    return tuple(tuple(row) for row in matrix)


def _centered(features: Tensor) -> Tensor:
    values = features.double()
    return values - values.mean(0)


def _alignment(x: Tensor, y: Tensor) -> float:
    return float((y.T @ x).square().sum())


@dataclass(frozen=True)
class FeatureSimilarity:
    """The linear CKA between models, layer by layer; see `similarity`.

    Attributes:
        layers: their names.
        values: of each layer a symmetric matrix [models][models], with None where features are constant.
    """

    layers: tuple[str, ...]
    values: tuple[tuple[tuple[float | None, ...], ...], ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row per layer and pair of models: `layer`, `first`, `second` (positions) and `cka`."""
        return [
            {"layer": layer, "first": i, "second": j, "cka": matrix[i][j]}
            for layer, matrix in zip(self.layers, self.values, strict=True)
            for i in range(len(matrix))
            for j in range(i + 1, len(matrix))
        ]


def similarity(
    models: Sequence[Tree],
    evaluator: ModelEvaluator,
    layers: Sequence[str] | None = None,
    examples: int = _EXAMPLES,
) -> FeatureSimilarity:
    """The linear CKA of each pair of models, such as those of clients or of rounds, layer by layer.

    Args:
        models: the trees.
        evaluator: of the data on which features are compared.
        layers: names of modules; see `features` for the default.
        examples: the first ones of the evaluator's that are used.

    Raises `ConfigError` for fewer than two models, and as `features` does.
    """
    if len(models) < 2:
        raise ConfigError(f"{len(models)} model was given, and a comparison needs 2", where="models")
    found = [features(model, evaluator, layers, examples) for model in models]
    values = tuple(linear_cka([each[layer] for each in found]) for layer in found[0])
    return FeatureSimilarity(tuple(found[0]), values)


# ---- features


def features(
    tree: Tree,
    evaluator: ModelEvaluator,
    layers: Sequence[str] | None = None,
    examples: int = _EXAMPLES,
) -> dict[str, Tensor]:
    """The outputs float32 [n, d] of layers for the first examples; d are channels, averaged over space or time.

    Args:
        tree: the model.
        evaluator: of the data.
        layers: names of modules; by default those with a weight matrix or kernel of their own. Of more than 12 such
            layers, 12 at equal distances in order of definition are taken, the first and the last among them. Layers
            without one output per example are left out.
        examples: the first ones of the evaluator's that are used.

    Raises `ConfigError` for a layer that the model does not have, or that does not give one row per example.
    """
    module = evaluator.learner(tree).module
    names = default_layers(module) if layers is None else _checked(module, layers)
    collected: dict[str, list[Tensor]] = {name: [] for name in names}
    with _hearing(module, names) as heard:
        for _, targets in evaluator.outputs(tree, examples):
            for name in names:
                if name not in heard or len(heard[name]) != len(targets):
                    if layers is None:
                        collected.pop(name, None)  # such as the projection that attention computes by itself
                        continue
                    raise ConfigError(
                        f"the layer '{name}' does not give one output per example",
                        where="layers",
                        hint=f"choose from: {', '.join(default_layers(module))}",
                    )
                if name in collected:
                    collected[name].append(heard.pop(name).float().cpu())
    return {name: torch.cat(parts) for name, parts in collected.items()}


def default_layers(module: nn.Module, most: int = _LAYERS) -> list[str]:
    """The layers with a weight of at least two axes of their own, at most so many, in order of definition.

    >>> default_layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2), nn.Linear(2, 1)))
    ['0', '3']
    """
    names = [
        name
        for name, layer in module.named_modules()
        if name and any(weight.dim() > 1 for weight in layer.parameters(recurse=False))
    ]
    if len(names) <= most:
        return names
    return [names[round(k * (len(names) - 1) / (most - 1))] for k in range(most)]


def _checked(module: nn.Module, layers: Sequence[str]) -> list[str]:
    known = dict(module.named_modules())
    for name in layers:
        if name not in known:
            raise ConfigError(
                f"the model has no layer '{name}'",
                where="layers",
                hint=f"choose from: {', '.join(default_layers(module))}",
            )
    return list(layers)


@contextmanager
def _hearing(module: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """While it is open, holds the last output of each layer, averaged over space."""
    heard: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def hear(layer: nn.Module, inputs: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if isinstance(value, Tensor) and value.dim() > 1:
                heard[name] = _pooled(value)

        return hear

    handles = [module.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def _pooled(value: Tensor) -> Tensor:
    """[n, d]: of feature maps [n, d, ...] the mean over space, of sequences [n, T, d] the mean over T."""
    if value.dim() == 3:
        return value.mean(1)
    return value.flatten(2).mean(2) if value.dim() > 3 else value


# ---- neural collapse


@dataclass(frozen=True)
class NeuralCollapse:
    """How far features have collapsed to their class means (Papyan et al. 2020); all are 0 at full collapse.

    With class means mu_c, their mean mu and m_c = mu_c - mu:

    Attributes:
        within: NC1, trace(Sigma_W Sigma_B^+) / C, of the covariances within and between classes.
        norms: NC2, the standard deviation of |m_c| divided by their mean.
        angles: NC2, the standard deviation of the cosines between the m_c.
        simplex: NC2, the mean of |cos(m_c, m_c') + 1 / (C - 1)|.
        classifier: NC3, |W / |W|_F - M / |M|_F|_F of the classifier's weights W and the matrix M of all m_c; None
            without a linear classifier.
        classes: C, the number of classes with examples.
    """

    within: float
    norms: float
    angles: float
    simplex: float
    classifier: float | None
    classes: int


def neural_collapse(values: Tensor, labels: Tensor, classifier: Tensor | None = None) -> NeuralCollapse:
    """The neural collapse of features [n, d] of examples with labels int64 [n], in float64.

    Args:
        values: the features that enter the classifier.
        labels: of the examples. Classes without an example are left out.
        classifier: the weights [classes, d] of a linear classifier on these features.

    mu is the mean of the class means, so the size of a class does not count; Sigma_W is the mean over examples.

    Raises `ConfigError` if fewer than two classes have examples, or if all class means are equal.
    """
    x, present = values.double(), torch.unique(labels)
    if len(present) < 2:
        raise ConfigError(
            f"the examples are of {len(present)} class, and neural collapse needs at least 2", where="labels"
        )
    means = torch.stack([x[labels == label].mean(0) for label in present])
    offsets = means - means.mean(0)
    lengths = offsets.norm(dim=1)
    if not bool(lengths.amin() > 0):
        raise ConfigError(
            "the features of a class have the mean of all classes, so its direction is undefined",
            where="features",
        )
    count = len(present)
    residuals = x - means[torch.searchsorted(present, labels)]
    between = offsets.T @ offsets / count
    within = residuals.T @ residuals / len(x)
    unit = offsets / lengths[:, None]
    cosines = (unit @ unit.T)[~torch.eye(count, dtype=torch.bool, device=x.device)]
    distance = None
    if classifier is not None:
        rows = classifier.double()[present]
        distance = float((rows / rows.norm() - offsets / offsets.norm()).norm())
    return NeuralCollapse(
        float(torch.trace(within @ torch.linalg.pinv(between, hermitian=True))) / count,
        float(lengths.std(correction=0) / lengths.mean()),
        float(cosines.std(correction=0)),
        float((cosines + 1 / (count - 1)).abs().mean()),
        distance,
        count,
    )


def classifier_inputs(
    tree: Tree, evaluator: ModelEvaluator, examples: int | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The features [n, d] that enter the last linear layer, the labels [n], and the layer's weights [classes, d].

    The weights are None if the layer is not the classifier.

    Raises `ConfigError` for a task other than classification, and for a model without a linear layer that takes part in
    its forward pass.
    """
    if not isinstance(evaluator.task, Classification):
        raise ConfigError(
            f"neural collapse needs one class per example, which {evaluator.task_name} does not have",
            where="task.name",
            hint="analyze a run of classification",
        )
    module = evaluator.learner(tree).module
    found, labels, last = [], [], last_linear(module)
    with listening(module) as heard:
        for outputs, targets in evaluator.outputs(tree, examples):
            if not heard or last is None:
                raise ConfigError(
                    "the model has no linear layer whose input could be examined", where="model.name"
                )
            found.append(heard.pop().flatten(1))
            labels.append(targets)
            heard.clear()
            classes = outputs.shape[1]
    weights = last[1].weight.detach() if last is not None and last[1].out_features == classes else None
    return torch.cat(found), torch.cat(labels), weights
