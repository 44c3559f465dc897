"""Engines by name."""

from fedlens.core.registry import Entry, Registry

ENGINES = Registry(
    "engine",
    {
        "default": Entry(
            "fedlens.engines.default:default",
            "inline, and processes once the first clients show that the run is long; the same bits",
        ),
        "auto": Entry(
            "fedlens.engines.auto:auto",
            "the fastest of inline, vectorized and processes, by trial",
        ),
        "inline": Entry("fedlens.engines.inline:inline", "this process, one client after the other"),
        "vectorized": Entry(
            "fedlens.engines.vectorized:vectorized",
            "this process, several clients as one batched computation",
        ),
        "processes": Entry(
            "fedlens.engines.processes:processes", "local workers that share data and weights in memory"
        ),
        "ray": Entry("fedlens.engines.ray:ray", "workers on a Ray cluster, or on a Ray of the run's own"),
    },
)
