"""Compares two algorithms over three seeds: the mean final accuracy and its standard deviation."""

from pathlib import Path
from statistics import mean, stdev

from my_prox import my_prox

from fedlens import Experiment

for algorithm in ("fedavg", my_prox):
    accuracies = []
    for seed in (0, 1, 2):
        experiment = Experiment(
            seed=seed,
            rounds=30,
            data={"dataset": "digits", "partition": {"name": "shards", "clients": 20}},
            model="small-cnn",
            select={"clients_per_round": 10},
            algorithm=algorithm,
            local={"lr": 0.1, "epochs": 2, "batch_size": 10},
        )
        name = algorithm if isinstance(algorithm, str) else algorithm.__name__
        result = experiment.run(Path("runs") / f"{name}-seed-{seed}", report=False)
        accuracies.append(result.metrics[-1]["test_accuracy"])
    print(f"{name:8}  {mean(accuracies):.3f} ± {stdev(accuracies):.3f}")
