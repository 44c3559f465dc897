"""The base class of tasks: what a model is trained for, and how it is measured."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedlens.base.errors import ConfigError
from fedlens.core.dataset_info import DatasetInfo, Kind
from fedlens.core.measured import Measured
from fedlens.core.protocol import ModelSpec
from fedlens.core.schema import SHARE
from fedlens.core.tree import Tree, TreeSpec
from fedlens.vision.change import Change

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Task(ABC):
    """A task; `fedlens.tasks.classification` is one. Training, engines and algorithms know nothing else of it.

    A batch is (inputs, targets). Targets are a tensor, or an object with `__len__`, `take`, `cat`, `to`, `to_payload`
    and `from_payload` (see `fedlens.data.targets`); `len(targets)` is the number of examples.

    Attributes:
        kind: the kind of dataset that it needs.
        collapse_advice: what to change, besides the learning rate, if all embeddings have become alike: the end of the
            sentence "Try a lower learning rate, ...". None if the task has no embeddings.
        score: the metric that the best model is chosen by, larger is better; None if it has none.
        takes_targets: whether the module is called with the targets too, as detectors are.
        views: 2 if a batch holds two augmentations of each image, inputs [n, 2, C, H, W]; else 1.
        classifier: whether models end in a classifier. Without it, the module in `wrap` returns features [n, d].
        full_gradients: whether the gradient over all examples, each once and not augmented, is that of the objective.
        errors: the metrics of which smaller is better.
        metric_names: all names that `metrics` can return; None if they are known only after an evaluation. A study
            refuses another metric before its runs.
        shares: the metrics that are from 0 to 1. What a client measured is refused if one of them is not.
        totals: the sums over all examples of a client, none of them by class, by bin or by image, from which alone
            `metrics` returns the metrics that they define. A site may send nothing else of an evaluation.
        features: whether its models have one feature vector per example, the input of their last linear layer.
        sends: what a client that is measured tells of its examples, in words; see `condensed`.
        measures_single_examples: whether that has numbers of single examples, such as their scores.
        placed: whether its targets lie in the image, as masks and boxes do. For others an image keeps its size in
            training, and is never combined with another.
        example: the word for one example in messages.
        averages_classes: whether a metric is a mean over classes.
        absence: what a class without a test example means for the metrics, as the end of a sentence.
        sizes: the ways besides the stored size that images can be evaluated at (`evaluation.size`). "resized": at
            another size, for which the task defines `restored`; "windows": outputs are logits [n, classes, H, W] of the
            pixels, so that those of overlapping windows can be averaged.
        unstacked: why `losses` is None, in words.
        one_class: whether each term of the loss has one class, that of an image or a pixel, and only its weight.
        annotates: what `predict` finds in an image, for pages and files of predictions. "masks": `class` [n, H, W], the
            class of each pixel. "boxes": `boxes` [n, k, 4] (left, top, right, bottom in pixels), `labels` [n, k] and
            `scores` [n, k] of at most k objects; a row without an object has the label -1. None: nothing with a place.
        shown_score: the score from which pages, pictures and tables show a box.
    """

    kind: ClassVar[Kind]
    score: str | None = None
    takes_targets: ClassVar[bool] = False
    views: ClassVar[int] = 1
    classifier: ClassVar[bool] = True
    collapse_advice: ClassVar[str | None] = None
    full_gradients: ClassVar[bool] = True
    features: ClassVar[bool] = False
    errors: ClassVar[frozenset[str]] = frozenset({"loss"})
    metric_names: ClassVar[tuple[str, ...] | None] = None
    shares: ClassVar[frozenset[str]] = frozenset()
    totals: ClassVar[frozenset[str]] = frozenset()
    placed: ClassVar[bool] = False
    example: ClassVar[str] = "image"
    averages_classes: ClassVar[bool] = True
    absence: ClassVar[str] = "means over classes leave it out"
    sizes: ClassVar[frozenset[str]] = frozenset()
    unstacked: ClassVar[str] = "the loss of a batch is not the mean of losses of its examples"
    one_class: ClassVar[bool] = True
    annotates: ClassVar[Literal["masks", "boxes"] | None] = None
    shown_score: float = 0.0
    sends: ClassVar[str] = "its summed loss, and how much was right"
    measures_single_examples: ClassVar[bool] = False

    @property
    def weighs(self) -> bool:
        """Whether `client_weights` weighs the classes."""
        return False

    # ---- before training

    def validate(self, info: DatasetInfo) -> None:
        """Raises `ConfigError` with key and reason if the dataset does not fit; called before any work."""
        try:
            kind = self.kind
        except AttributeError:
            raise ConfigError(
                f"the task {type(self).__name__} does not define `kind`",
                where="task.name",
                hint=f"write kind = '{info.kind}' in the class, the kind of dataset that it needs",
            ) from None
        if info.kind != kind:
            raise ConfigError(
                f"the task is {self.kind}, but the dataset '{info.name}' is for {info.kind}",
                where="task.name",
                hint="leave task.name out: the dataset's kind names the task",
            )

    def fitted(self, info: DatasetInfo) -> Task:
        """The task for this dataset, which `validate` has accepted; a task that does not depend on it is the same."""
        return self

    def wrap(self, model: ModelSpec) -> ModelSpec:
        """The model that is trained: the given one, or one with further layers around it, such as a projector.

        Such layers are made by `ModelSpec.wrapper`.
        """
        return model

    def local_leaves(self, spec: TreeSpec) -> frozenset[str]:
        """The leaves of the model in training that each client keeps to itself and never sends."""
        return frozenset()

    def notes(self, examples: int) -> Sequence[str]:
        """What is unfit for a run in which a client trains on at most so many examples, in sentences; epochs count."""
        return ()

    def export(self, tree: Tree) -> Tree:
        """The part of a trained tree that belongs to the model itself, named as in the model."""
        return tree

    # ---- in a step

    def outputs(self, module: nn.Module, inputs: Any, targets: Any) -> Any:
        """The forward pass."""
        return module(inputs, targets) if self.takes_targets else module(inputs)

    @abstractmethod
    def loss(
        self, outputs: Any, targets: Any, weights: Tensor | None = None, normalize: bool = True
    ) -> Tensor:
        """The loss of a batch, a 0-dim tensor.

        Args:
            outputs: of the module.
            targets: of the batch.
            weights: float [classes], a weight w for each class; None weighs every term by 1.
            normalize: divides the sum of w l by the sum of w; false: by the number of terms. The loss is 0 if all
                weights are 0.
        """

    @property
    def losses(self) -> Callable[[Any, Any], Tensor] | None:
        """(outputs, targets) -> [n], the losses whose mean is `loss`; None if clients cannot train stacked."""
        return None

    @property
    def counts_classes(self) -> bool:
        """Whether the task defines `counts`."""
        return type(self).counts is not Task.counts

    def counts(self, targets: Any, classes: int) -> Tensor:
        """int64 [n, classes]: how often each class occurs in each example."""
        raise ConfigError(
            f"the task {type(self).__name__} does not count classes",
            where="task.name",
            hint="define `counts`",
        )

    def most_counts(self, input_shape: Sequence[int]) -> float:
        """The largest number of occurrences of one class in an example of this input shape."""
        return 1

    def client_weights(self, counts: Callable[[], Tensor]) -> Tensor | None:
        """The weights of the classes at a client, float [classes]; None for none.

        `counts` returns the class counts of the client's examples, int64 [classes].
        """
        return None

    # ---- evaluation

    @abstractmethod
    def measure(self, outputs: Any, targets: Any) -> Measured:
        """The measurements of a batch. Neither class weights nor label smoothing take part in them."""

    @abstractmethod
    def metrics(self, measured: Measured) -> dict[str, float]:
        """The metrics by name, from the measurements of all batches; a run records them as `test_<name>`.

        A metric that these examples do not define, such as a mean over classes of which none occurs, is left out.
        """

    @classmethod
    def known_metrics(cls) -> tuple[str, ...] | None:
        """`metric_names`; None if a class below the one that lists them defines `metrics` anew."""
        listed: tuple[str, ...] | None = cls._beside_metrics("metric_names")
        return listed

    @classmethod
    def known_totals(cls) -> frozenset[str]:
        """`totals`; none if a class below the one that lists them defines `metrics` anew."""
        return cls._beside_metrics("totals") or frozenset()

    @classmethod
    def _beside_metrics(cls, name: str) -> Any:
        for part in cls.__mro__:
            if name in vars(part):
                return vars(part)[name]
            if "metrics" in vars(part):
                return None
        return None

    def in_totals(self, measured: Measured) -> Measured:
        """The `totals` of the measurements alone."""
        names = self.known_totals()
        return Measured({name: value for name, value in measured.sums.items() if name in names})

    def has_only_totals(self, measured: Measured) -> bool:
        """Whether the measurements are `totals` alone."""
        return not measured.rows and measured.sums.keys() <= self.known_totals()

    def metric_fault(self, metrics: Mapping[str, float]) -> str | None:
        """What is wrong with the first of the `shares` that a client's measurements give; None if all are good.

        A value that is not finite is the result of a model that diverged.
        """
        for name in sorted(self.shares & metrics.keys()):
            if math.isfinite(metrics[name]) and (fault := SHARE.fault(name, metrics[name])) is not None:
                return fault
        return None

    def condensed(self, measured: Measured) -> Measured:
        """The part of the measurements that `metrics` needs: what is asked of each client."""
        return measured

    def recorded(self, measured: Measured, classes: int) -> Measured:
        """The measurements of the test data that a run directory keeps, as sums without rows.

        A task with rows, whose number grows with the data, replaces them here by what its page and `details` show.
        `classes` is the number of classes.
        """
        return Measured(measured.sums)

    def details(self, measured: Measured, classes: Sequence[str]) -> dict[str, float]:
        """Further metrics for `summary.json`, such as the accuracy of each class, from what `recorded` returned."""
        return {}

    def mistakes(self, outputs: Any, targets: Any, most: int) -> dict[str, Tensor]:
        """The wrong answers of a batch that the model is most confident of, at most `most`; empty if none are shown.

        `index`, the position in the batch, `truth` and `answer`, classes, int64 [k], and `confidence`, float64 [k]; the
        most confident first, of equal ones the one with the lowest index.
        """
        return {}

    @property
    def has_confidences(self) -> bool:
        """Whether the task defines `confidences`."""
        return type(self).confidences is not Task.confidences

    def confidences(self, outputs: Any, targets: Any, most: int) -> dict[str, Tensor]:
        """How probable the model finds the label and other classes of each example of a batch; empty if undefined.

        `label`, int64 [n], and `confidence`, float32 [n], its probability; `classes`, int64 [n, k], and `scores`,
        float32 [n, k], the k = min(most, classes) most probable classes with their probabilities, in falling order.
        """
        return {}

    def restored(self, outputs: Any, size: tuple[int, int], stored: tuple[int, int]) -> Any:
        """The outputs for images that were resized from `stored` to `size`, as those for the stored images.

        Both are (height, width) in pixels; see `sizes`.
        """
        raise self._undefined("restored")

    def output_values(self, info: DatasetInfo) -> int:
        """The number of output values for one example, which an evaluation keeps in memory."""
        return len(info.classes)

    # ---- outside of training

    def predict(self, outputs: Any) -> Mapping[str, Tensor]:
        """The predictions by name, each [n, ...], from the outputs of a batch.

        An exported model returns them under these names, so PyTorch's exporters have to be able to trace this.
        """
        raise self._undefined("predict")

    def graph(self, module: nn.Module, inputs: Tensor) -> Mapping[str, Tensor]:
        """The outputs of an exported model by name, from normalized inputs; PyTorch's exporters trace it.

        Raises `ConfigError` if the module has no such form.
        """
        return self.predict(self.outputs(module, inputs, None))

    def row(
        self, prediction: Mapping[str, NDArray[Any]], classes: Sequence[str], top: int = 5
    ) -> dict[str, Any]:
        """The prediction of one example as columns of predictions.csv, the same ones for every example.

        Args:
            prediction: the part of `predict` for this example, as arrays.
            classes: the name of each class.
            top: the number of classes that are listed.
        """
        raise self._undefined("row")

    def showing(self, score: float) -> Task:
        """The task that shows boxes from this score on; a task without boxes stays as it is."""
        return self

    def move(self, targets: Any, change: Change) -> Any:
        """The targets after a geometric augmentation of their images."""
        return targets

    def draw(
        self,
        image: NDArray[Any],
        prediction: Mapping[str, NDArray[Any]],
        target: Any = None,
        classes: Sequence[str] = (),
    ) -> NDArray[Any]:
        """A picture uint8 [H, W, 3] of an image uint8 [C, H, W] with its prediction, and its target if given.

        Args:
            prediction: the part of `predict` for this image, as arrays.
            target: of this image.
            classes: the name of each class; numbers by default.
        """
        raise self._undefined("draw")

    def _undefined(self, method: str) -> ConfigError:
        what = f"the task {type(self).__name__} does not define `{method}`"
        return ConfigError(what, where="task.name", hint="define it; see fedlens.tasks.task.Task")

    def misfit(self, outputs: object, inputs: Tensor, classes: int) -> str | None:
        """The required form of a model's outputs for these inputs, if they do not have it; None if they do."""
        return None

    def blank(self, n: int, input_shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """The inputs of n examples without content for trials of models, [n, *input_shape], or [n, views, ...]."""
        return torch.zeros(n, *self._views(), *input_shape, dtype=dtype)

    def random_inputs(self, n: int, input_shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Random inputs of n examples for trials of models, [n, *input_shape], or [n, views, ...]."""
        return torch.randn(n, *self._views(), *input_shape, generator=generator)

    def _views(self) -> tuple[int, ...]:
        return (self.views,) if self.views > 1 else ()

    def random_targets(
        self, n: int, classes: int, input_shape: Sequence[int], generator: torch.Generator
    ) -> Any:
        """Random targets of n examples of this input shape, for trials of models."""
        raise self._undefined("random_targets")

    def trial(self, module: nn.Module, inputs: Any, classes: int) -> Any:
        """The outputs for inputs without targets of their own, in the module's mode."""
        if not self.takes_targets:
            return self.outputs(module, inputs, None)
        generator = torch.Generator().manual_seed(0)
        targets = self.random_targets(len(inputs), classes, inputs.shape[1:], generator)
        return self.outputs(module, inputs, targets.to(inputs.device))


def counted(values: Tensor, length: int) -> Tensor:
    """int64 [length]: how often each number below `length` occurs in `values`, int64 [n]; on a GPU without waiting.

    >>> counted(torch.tensor([2, 0, 2]), 4).tolist()
    [1, 0, 2, 0]
    """
    if values.device.type == "cpu":
        return torch.bincount(values, minlength=length)
    # `bincount` waits for the largest number. Integers have the same sum in any order.
    counts = torch.zeros(length, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(0, values, torch.ones_like(values))


def present(values: Mapping[str, float | None]) -> dict[str, float]:
    """The metrics that are defined.

    >>> present({"loss": 1.0, "accuracy_balanced": None})
    {'loss': 1.0}
    """
    return {name: value for name, value in values.items() if value is not None}


def measurable(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets in which sums can be measured: of at least 32 bits, on a device that has float64.

    >>> measurable(torch.ones(1, dtype=torch.bfloat16), torch.ones(1))[0].dtype
    torch.float32
    """
    if outputs.dtype in (torch.float16, torch.bfloat16):
        outputs = outputs.float()
    return (outputs.cpu(), targets.cpu()) if outputs.device.type == "mps" else (outputs, targets)


def wrong_shape(outputs: object, *shape: int) -> str | None:
    """The shape that the logits must have, in words; None if they have it.

    >>> wrong_shape(torch.zeros(2, 3), 2, 3), wrong_shape(torch.zeros(2, 3), 2, 10)
    (None, '[2, 10]: one number a class')
    """
    if isinstance(outputs, Tensor) and outputs.shape == shape:
        return None
    return f"[{', '.join(map(str, shape))}]: one number a class"
