"""Engines by name."""

from fedlens.base.registry import Entry, Registry

ENGINES = Registry(
    "engine",
    {
        "default": Entry(
            "fedlens.engines.default:default",
            "inline, and then processes if a few timed steps show that the run is long",
        ),
        "auto": Entry(
            "fedlens.engines.auto:auto",
            "times inline, vectorized and processes, and takes the fastest",
        ),
        "inline": Entry("fedlens.engines.inline:inline", "in this process, one client after the other"),
        "vectorized": Entry(
            "fedlens.engines.vectorized:vectorized",
            "in this process, several clients as one batched computation",
        ),
        "processes": Entry(
            "fedlens.engines.processes:processes",
            "local worker processes that share data and weights in memory",
        ),
        "network": Entry(
            "fedlens.engines.network:network", "the sites of a federation, each where its data are"
        ),
        "ray": Entry("fedlens.engines.ray:ray", "workers on a Ray cluster, or on a local Ray"),
    },
)
