"""What the file of an algorithm, a task, a partition or an augmentation imports.

>>> from fedlens.parts import Averaging, Parts, averaging
>>> from fedlens.rules import ClientRule
>>> def plain(parts: Parts) -> Averaging:
...     return averaging(parts, client=ClientRule())
"""

from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.algorithms.client_evaluation import EVALUATE_OWN, EvaluateOwn
from fedlens.algorithms.client_sampling import Select
from fedlens.base.errors import ConfigError, DataError
from fedlens.core.algorithm_base import AlgorithmBase
from fedlens.core.dataset_info import DatasetInfo, FederationInfo
from fedlens.core.protocol import Ask, Client, Failure, ModelSpec, Outcome, Reply, Request, RoundContext
from fedlens.core.random import Rng
from fedlens.core.schema import Bound, NumberField, Schema, TensorField, TreeField
from fedlens.data.augmentation.augmented import Augmentation
from fedlens.data.datasets.registry import DATASETS
from fedlens.data.partition.partition import Partition
from fedlens.data.table import Table
from fedlens.models.registry import MODELS
from fedlens.tasks.classification import Classification
from fedlens.tasks.task import Task
from fedlens.vision.change import Change, Pieces

__all__ = [
    "DATASETS", "EVALUATE_OWN", "MODELS", "AlgorithmBase", "Ask", "Augmentation", "Averaging", "Bound",
    "Change", "Classification", "Client", "ConfigError", "DataError", "DatasetInfo", "EvaluateOwn",
    "Failure", "FederationInfo", "ModelSpec", "NumberField", "Outcome", "Partition", "Parts", "Pieces",
    "Reply", "Request", "Rng", "RoundContext", "Schema", "Select", "Table", "Task", "TensorField",
    "TreeField", "averaging",
]  # fmt: skip
