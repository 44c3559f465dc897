"""What the file of a client rule imports: the rule, its hooks and its part at the server.

>>> from fedlens.rules import ClientRule
>>> def halved(gradients, parameters, context):
...     return [gradient / 2 for gradient in gradients]
>>> rule = ClientRule(grad=halved)
"""

from fedlens.core.random import Rng
from fedlens.core.schema import Bound, NumberField, TensorField, TreeField
from fedlens.local.problem import LocalProblem
from fedlens.local.rules import (
    ClientRule,
    FinishHook,
    GradHook,
    LocalContext,
    LossHook,
    RiskHook,
    ServerRule,
    Solved,
    Tensors,
    Traits,
    proximal,
)

__all__ = [
    "Bound", "ClientRule", "FinishHook", "GradHook", "LocalContext", "LocalProblem", "LossHook",
    "NumberField", "RiskHook", "Rng", "ServerRule", "Solved", "TensorField", "Tensors", "Traits",
    "TreeField", "proximal",
]  # fmt: skip
