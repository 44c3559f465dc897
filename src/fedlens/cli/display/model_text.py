"""Which model of a run was taken, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedlens.use.trained_model import TrainedModel


def model_text(trained: TrainedModel) -> str:
    """The round of a model, whether it is the best or the last one, and what the best was chosen on."""
    from fedlens.base.format import label

    chosen = trained.chosen
    round = "" if trained.round is None else f" of round {trained.round}"
    if chosen.on is None or chosen.metric is None:
        return f"the model{round}, the {chosen.name} round"
    return f"the model{round}, the best by {label(chosen.metric)} on the {chosen.on} data"
