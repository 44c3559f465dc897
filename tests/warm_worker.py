"""The loop of a local worker, in a process that has imported before the fork what most workers import after it."""

import fedlens.algorithms.averaging
import fedlens.algorithms.peers
import fedlens.data.augmentation.augment
import fedlens.data.client_datasets
import fedlens.data.datasets.synthetic
import fedlens.local.training
import fedlens.local.vectorized.batched_train
import fedlens.models.user_models
import fedlens.tasks.classification  # noqa: F401
from fedlens.engines.worker_main import main

__all__ = ["main"]
