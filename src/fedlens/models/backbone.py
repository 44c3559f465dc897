"""Networks that end in a decoder or in heads behind a classifier's body: what is their backbone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn


class WithBackbone(nn.Module):
    """A network of which one submodule is the body of a classifier, as networks for segmentation and detection are.

    `model.freeze = "backbone"` freezes that submodule, and `model.weights` of a classifier are loaded into it. A
    network of a library becomes one by a subclass of both: `class Net(WithBackbone, LibraryNet)`.

    Attributes:
        backbone: the name of the submodule.
        heads: the names of the submodules whose shapes depend on the number of classes. Where weights of the whole
            network have another number of classes, their leaves of other shapes keep the drawn values.
        body: timm's name of the classifier whose ImageNet weights fit the backbone; None if there is none.

    >>> class Net(WithBackbone):
    ...     backbone = "encoder"
    ...
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.encoder, self.decoder = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)
    >>> backbone_of(Net()), backbone_of(nn.Linear(1, 1))
    ('encoder', None)
    """

    backbone: ClassVar[str]
    heads: ClassVar[tuple[str, ...]] = ()
    body: str | None = None

    @property
    def configuration(self) -> Mapping[str, object]:
        """The keys and values that a `config.json` beside the network's weights must have, beyond what shapes show."""
        return {}

    def backbone_leaf(self, name: str) -> str | None:
        """The name, inside the backbone, of what a file of a classifier calls `name`; None if it has no such leaf.

        By default it is the same name. A backbone whose code is not timm's translates timm's names here.
        """
        return name


def backbone_of(module: nn.Module) -> str | None:
    """The name of the module's backbone; None if the module declares none."""
    return module.backbone if isinstance(module, WithBackbone) else None
