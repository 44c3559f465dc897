"""The section "Test data in detail" in the page of a run: what the last round measured, by the kind of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedlens.base.errors import RunDirectoryError
from fedlens.data.vertical.feature_partition import FeaturePartition
from fedlens.observers.final_evaluation import FinalEvaluation
from fedlens.pages import classification_section as classes
from fedlens.pages.detection_section import detection_section
from fedlens.pages.segmentation_section import segmentation_section
from fedlens.results.run import Run, subtable

# Of other kinds, the page has no such section.
_SECTIONS: Mapping[str, Callable[[Run, FinalEvaluation], dict[str, Any]]] = {
    "classification": classes.classification_section,
    "segmentation": segmentation_section,
    "detection": detection_section,
}


def section_of_test(run: Run) -> dict[str, Any] | None:
    """The section of a run; with only `missing`, a sentence, if there is nothing to show. None for other tasks."""
    try:
        evaluation = run.evaluation
        if evaluation is None:
            return {"missing": _missing(run)}
        if evaluation.kind not in _SECTIONS:
            return None
        shown = _SECTIONS[evaluation.kind](run, evaluation)
        return {"missing": "", "kind": evaluation.kind, **shown}
    except RunDirectoryError as error:
        return {"missing": f"This section is missing: {error.what}."}
    except (KeyError, ValueError) as error:
        return {"missing": f"This section is missing: evaluation.npz is corrupt: {error}."}


def _missing(run: Run) -> str:
    if run.at_sites and "test" not in subtable(subtable(run.config, "data"), "dataset"):
        return "The server has no test images: each site measures the model on images that it holds out."
    if run.split() != "test":
        return "Each client has a model of its own, so there is no global model to measure on the test data."
    if run.status != "finished":
        return "The test data are measured in detail in the last round, which this run has not reached."
    if isinstance(run.partition, FeaturePartition):
        return "The parties send embeddings of the test images, and no predictions of single images are kept."
    if tested := run.shown.get("model"):
        return (
            f"The run directory has no evaluation.npz: {tested} may be several models, each with details of its own, "
            "or an older version of fedlens wrote it."
        )
    return "The run directory has no evaluation.npz, because an older version of fedlens wrote it."
