"""Writes the curves of a run to TensorBoard, into the folder `tensorboard` of the run directory."""

from typing import Any

from torch.utils.tensorboard import SummaryWriter

from fedlens import Observer


class TensorBoard(Observer):
    """A point a round for each metric; `tensorboard --logdir runs` shows all runs below `runs`."""

    file, resumed = "tensorboard", "keep"

    def began(self, run: Any) -> None:
        # TensorBoard hides what an interrupted run wrote of the rounds that are repeated now.
        first = 0 if run.round is None else run.round + 1
        self.writer = SummaryWriter(str(run.directory.path / self.file), purge_step=first)

    def round_done(self, state: Any, tally: Any, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, int | float) and name != "round":
                self.writer.add_scalar(name, value, metrics["round"])
        self.writer.flush()

    def finished(self, summary: dict[str, Any]) -> None:
        self.writer.close()
