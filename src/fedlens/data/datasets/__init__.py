"""Datasets by name. A factory is called as `factory(root, download, seed, *, <settings>)`."""

from __future__ import annotations

from fedlens.core.registry import Entry, Registry

_HERE = "fedlens.data.datasets"

DATASETS = Registry(
    "dataset",
    {
        "digits": Entry(
            f"{_HERE}.digits:digits",
            "1,797 handwritten digits, 8x8 grey, 10 classes; comes with scikit-learn",
        ),
        "mnist": Entry(f"{_HERE}.idx:mnist", "70,000 handwritten digits, 28x28 grey, 10 classes"),
        "fashion-mnist": Entry(f"{_HERE}.idx:fashion_mnist", "70,000 clothes, 28x28 grey, 10 classes"),
        "cifar10": Entry(f"{_HERE}.cifar:cifar10", "60,000 small photographs, 32x32 colour, 10 classes"),
        "cifar100": Entry(f"{_HERE}.cifar:cifar100", "60,000 small photographs, 32x32 colour, 100 classes"),
        "synthetic": Entry(
            f"{_HERE}.synthetic:synthetic", "made-up images of any shape, learnable; for trials and tests"
        ),
    },
)
