"""Sends the metrics of a run to MLflow or to Weights & Biases."""

from typing import Any

from fedlens import Observer


class MLflow(Observer):
    """A run of MLflow for each run."""

    def began(self, run: Any) -> None:
        import mlflow

        self.mlflow = mlflow
        mlflow.start_run(run_name=run.built.config.name)
        mlflow.log_param("algorithm", run.built.config.algorithm["name"])

    def round_done(self, state: Any, tally: Any, metrics: dict[str, Any]) -> None:
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        self.mlflow.log_metrics(numbers, step=metrics["round"])

    def finished(self, summary: dict[str, Any]) -> None:
        self.mlflow.end_run("FINISHED" if summary["status"] == "finished" else "FAILED")


class WandB(Observer):
    """A run of Weights & Biases for each run, which goes on where the run is resumed."""

    part_name = "wandb"

    def __init__(self, *, project: str = "fedlens") -> None:
        import wandb

        self.project, self.wandb, self.id = project, wandb, wandb.util.generate_id()

    def part(self) -> dict[str, Any]:
        return {"id": self.id}

    def restore(self, part: Any) -> None:
        self.id = part["id"]  # a resumed run continues the same curves

    def began(self, run: Any) -> None:
        self.run = self.wandb.init(
            project=self.project, name=run.built.config.name, id=self.id, resume="allow"
        )

    def round_done(self, state: Any, tally: Any, metrics: dict[str, Any]) -> None:
        self.run.log(metrics, step=metrics["round"])

    def finished(self, summary: dict[str, Any]) -> None:
        self.run.finish(exit_code=0 if summary["status"] == "finished" else 1)
