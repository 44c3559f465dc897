"""Chooses the best round of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedlens.run.build import Built


def better(built: Built, best: dict[str, Any] | None, line: Mapping[str, Any]) -> dict[str, Any] | None:
    """The best round so far, by the validation score if there is validation data, else by the test score.

    Args:
        best: the best one before this round.
        line: the metrics of this round.
    """
    score, on = built.task.score, _split(built)
    metric = f"{on}_{score}"
    if score is None or not math.isfinite(line.get(metric, math.nan)):
        return best
    if best and line[metric] <= best["value"]:
        return best
    test = line.get(f"test_{score}")
    at_test = {} if on == "test" or test is None else {"test_value": test}
    return {"round": line["round"], "metric": metric, "value": line[metric], "chosen_on": on, **at_test}


def missing_score(built: Built, line: Mapping[str, Any]) -> str | None:
    """A note that no best round can be chosen, if the evaluation has metrics and the score is not among them."""
    score, split = built.task.score, _split(built)
    names = [name.removeprefix(f"{split}_") for name in line if name.startswith(f"{split}_")]
    if score is None or not names or score in names:
        return None
    return f"no best round is chosen: task.score is '{score}', and the evaluation gives {', '.join(names)}"


def _split(built: Built) -> str:
    """The data that the best round is chosen on."""
    return "validation" if "@validation" in built.federation.held else "test"
