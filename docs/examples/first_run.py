"""The first run in Python: twenty clients with two of the ten digits each learn to read all ten."""

from fedlens import Experiment

experiment = Experiment(
    name="digits",
    rounds=60,
    data={"dataset": "digits", "partition": {"name": "shards", "clients": 20, "classes_per_client": 2}},
    model="small-cnn",
    select={"name": "uniform", "clients_per_round": 10},
    algorithm="fedavg",
    local={"optimizer": "sgd", "lr": 0.1, "epochs": 2, "batch_size": 10},
)

if __name__ == "__main__":
    result = experiment.run("runs/python")
    print(f"accuracy {result.metrics[-1]['test_accuracy']:.1%}")
    twin = experiment.with_settings("data.reassign=true").run("runs/python-iid")
    print(f"accuracy with evenly mixed digits {twin.metrics[-1]['test_accuracy']:.1%}")
