"""Algorithms: one paper, one file, the client half and the server half together."""

from fedlens.core.registry import Entry, Registry

ALGORITHMS = Registry(
    "algorithm",
    {
        "fedavg": Entry("fedlens.algorithms.fedavg:fedavg", "Federated Averaging (McMahan et al. 2017)"),
        "fedavgm": Entry("fedlens.algorithms.fedavgm:fedavgm", "FedAvg with server momentum (hsu2019)"),
        "fedprox": Entry(
            "fedlens.algorithms.fedprox:fedprox", "a proximal term at the clients (Li et al. 2020)"
        ),
        "centralized": Entry(
            "fedlens.algorithms.centralized:centralized", "the upper bound: the pooled data in one place"
        ),
    },
)

# What `[client]` can name; on top of the algorithm's own rule, and several in a list.
RULES = Registry(
    "client rule",
    {
        "plain": Entry("fedlens.local.rules:plain", "plain local training"),
        "proximal": Entry("fedlens.local.rules:proximal", "FedProx's proximal term"),
    },
)

# These select and aggregate nothing. Tables of a recipe that were meant for another algorithm do not stand in the way.
WITHOUT_SLOTS = frozenset({"centralized"})
