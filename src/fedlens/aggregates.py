"""What the file of an aggregate or a server step imports.

>>> from fedlens.aggregates import ByColumn
>>> class Median(ByColumn):
...     def column(self, block):
...         return block.median(dim=0).values
"""

from fedlens.aggregate.custom import ByColumn, ByWeights, Rows
from fedlens.aggregate.mean import Aggregate, AggregateContext, Mean
from fedlens.aggregate.optimal_convex import OptimalConvex
from fedlens.aggregate.secure.blind_sum import BlindSum
from fedlens.aggregate.server_steps import Momentum, ServerSGD, ServerStep
from fedlens.core.protocol import Ask, Failure, Outcome, Reply, Request
from fedlens.core.reduction import Refusal, Update
from fedlens.core.schema import Bound, NumberField, Schema, TensorField, TreeField

__all__ = [
    "Aggregate", "AggregateContext", "Ask", "BlindSum", "Bound", "ByColumn", "ByWeights", "Failure",
    "Mean", "Momentum", "NumberField", "OptimalConvex", "Outcome", "Refusal", "Reply", "Request", "Rows",
    "Schema", "ServerSGD", "ServerStep", "TensorField", "TreeField", "Update",
]  # fmt: skip
