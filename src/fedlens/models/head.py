"""The classifier of any model: where it is, and the key `bottleneck` of `[model]`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from fedlens.base.errors import ConfigError


@dataclass(frozen=True)
class Head:
    """The classifier of a model.

    Attributes:
        prefix: the name of the classifier in the module: its leaves are `prefix.*`. With a bottleneck they are those
            of both layers. Empty where the module is the classifier.
        linear: the layer that gives the logits.
    """

    prefix: str
    linear: nn.Linear

    def holds(self, leaf: str) -> bool:
        """Whether the leaf of this name belongs to the classifier.

        >>> Head("fc", nn.Linear(2, 2)).holds("fc.weight"), Head("fc", nn.Linear(2, 2)).holds("fc2.weight")
        (True, False)
        """
        return not self.prefix or leaf.startswith(f"{self.prefix}.")


class BottleneckHead(nn.Sequential):
    """A linear layer to a few features and a linear classifier on them, with nothing in between."""

    def __init__(self, features: int, width: int, classifier: nn.Linear) -> None:
        super().__init__(
            OrderedDict(bottleneck=nn.Linear(features, width), classifier=classifier),
        )


def head_of(module: nn.Module, classes: int) -> Head | None:
    """The last linear layer, in order of definition, that has `classes` outputs; None where no layer has.

    >>> head_of(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), 3).prefix
    '1'
    """
    found = [
        (name, layer)
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and layer.out_features == classes
    ]
    if not found:
        return None
    name, layer = found[-1]
    above = name.rpartition(".")[0]
    within = isinstance(module.get_submodule(above), BottleneckHead)
    return Head(above if within else name, layer)


def with_bottleneck(module: nn.Module, classes: int, width: int) -> nn.Module:
    """The module with a linear layer of `width` outputs before its classifier; changes the module.

    hsu2020 (section 6.5) puts 64 features between the 1,280 of MobileNetV2 and the classifier. In place of the
    classifier stand both layers, newly drawn, as `NAME.bottleneck` and `NAME.classifier`.

    Raises `ConfigError` for a model without a linear classifier.

    >>> with_bottleneck(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), 10, 8)[1]
    BottleneckHead(
      (bottleneck): Linear(in_features=784, out_features=8, bias=True)
      (classifier): Linear(in_features=8, out_features=10, bias=True)
    )
    """
    head = head_of(module, classes)
    if head is None:
        raise ConfigError(
            f"the model has no linear layer with {classes} outputs, one a class, before which a bottleneck could be",
            where="model.bottleneck",
            hint="leave model.bottleneck out, or end the model in a linear layer",
        )
    last = head.linear
    made = BottleneckHead(
        last.in_features, width, nn.Linear(width, last.out_features, bias=last.bias is not None)
    ).to(device=last.weight.device, dtype=last.weight.dtype)
    if not head.prefix:
        return made
    above, _, place = head.prefix.rpartition(".")
    setattr(module.get_submodule(above), place, made)
    return module


def without_classifier(module: nn.Module, classes: int) -> nn.Module:
    """The module without its classifier, so that it returns the features [n, d]; changes the module.

    A bottleneck stays, and its features are returned.

    Raises `ConfigError` for a model without a linear classifier.

    >>> without_classifier(nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.Linear(8, 10)), 10)[2]
    Identity()
    """
    head = head_of(module, classes)
    if head is None:
        raise ConfigError(
            "the model has no linear classifier, so its features cannot be used alone",
            where="model.name",
            hint="choose a model that ends in a linear layer, such as 'resnet20'",
        )
    path = next(name for name, layer in module.named_modules() if layer is head.linear)
    if not path:
        return nn.Identity()
    above, _, place = path.rpartition(".")
    setattr(module.get_submodule(above), place, nn.Identity())
    return module
