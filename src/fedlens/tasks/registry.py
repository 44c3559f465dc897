"""Tasks by name; a dataset's kind names its task."""

from __future__ import annotations

from fedlens.base.registry import Entry, Registry

TASKS = Registry(
    "task",
    {
        "classification": Entry("fedlens.tasks.classification:classification", "one class an image"),
        "multi-label": Entry("fedlens.tasks.multi_label:multi_label", "any number of classes an image"),
        "detection": Entry("fedlens.tasks.detection:detection", "boxes with a class in each image"),
        "language": Entry("fedlens.tasks.language:language", "a class a text, or one a token"),
        "moco-v2": Entry("fedlens.tasks.moco:moco_v2", "an encoder without labels, by momentum contrast"),
        "segmentation": Entry("fedlens.tasks.segmentation:segmentation", "one class a pixel"),
        "simsiam": Entry(
            "fedlens.tasks.simsiam:simsiam", "an encoder without labels, by similarity of two views"
        ),
    },
)
