"""fedlens: federated learning experiments for computer vision.

Describe how the data is distributed and how the clients learn; fedlens trains the model and shows what that costs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlens import aggregates, parts, rules
    from fedlens.api import Experiment, Observer, Result, dataset, load_result, resume, resume_rounds
    from fedlens.pretraining import pretrain
    from fedlens.studies.cost_study import cost
    from fedlens.studies.study import Study

__version__ = "0.1.0"
__all__ = [
    "Experiment",
    "Observer",
    "Result",
    "Study",
    "__version__",
    "aggregates",
    "cost",
    "dataset",
    "load_result",
    "parts",
    "pretrain",
    "resume",
    "resume_rounds",
    "rules",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # Looked up when asked for, so that importing fedlens costs nothing.
    if name in ("aggregates", "parts", "rules"):
        return import_module(f"fedlens.{name}")
    if name == "cost":
        from fedlens.studies.cost_study import cost

        return cost
    if name == "pretrain":
        from fedlens.pretraining import pretrain

        return pretrain
    if name == "Study":
        from fedlens.studies.study import Study

        return Study
    if name in __all__:
        from fedlens import api

        return getattr(api, name)
    raise AttributeError(f"module 'fedlens' has no attribute '{name}'")
