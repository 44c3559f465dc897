"""The row of a run in the results of a study, from its run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedlens import __version__
from fedlens.base.errors import RunDirectoryError
from fedlens.base.format import finite, split_of
from fedlens.results.rows import Row, Status
from fedlens.results.run import Run, subtable
from fedlens.settings.config import read_config
from fedlens.settings.effective_rate import effective_rate

DIGITS = 7  # significant ones of each value
_STATUS: Mapping[str, Status] = {"finished": "finished", "failed": "failed", "paused": "stopped"}
_TRAINING = "local_loss"


def row_of_run(run: Run, digest: str = "", name: str = "") -> Row:
    """The row of a run that finished, failed, or is paused (status "stopped", `rounds` the round of the pause).

    The curve has an entry for each evaluated round. `bytes_client` sums over the rounds the bytes up, down and between
    clients of one that takes part in the round, the mean over those that did. Metrics are those of the server's data
    (`test_`, `validation_`, `train_`), those over clients (`clients_`), and `local_loss`. Facts besides those of
    `Row` are `warnings`, the number of warnings of the run. Sums of counts are exact, other values are rounded to
    7 significant digits.

    Args:
        digest, name: of the run in a study.

    Raises `RunDirectoryError` if the run has not ended.
    """
    status = _STATUS.get(run.status)
    if status is None:
        raise RunDirectoryError("the run has not ended", where=str(run.path), hint="resume it")
    done = run.rounds_done
    reason = run.summary.get("error") if status == "failed" else None
    return Row(
        digest,
        name,
        status,
        f"paused after round {done}" if status == "stopped" else reason,
        done,
        f"{run.split()}_{run.metric()}",
        _curve(run.metrics),
        _facts(run),
        str(run.environment.get("fedlens") or __version__),
        device=str(run.environment.get("device", "")).partition(":")[0],
    )


def failed_row(digest: str, name: str, reason: str) -> Row:
    """The row of a run that failed before it had a directory."""
    return Row(digest, name, "failed", reason, 0, "", {"round": []}, {}, __version__)


def _curve(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """The columns of `Row.curve`."""
    names = list(dict.fromkeys(name for line in metrics for name in line if _is_metric(name)))
    sums = {"examples": 0, "batches": 0, "bytes": 0}
    client = client_up = 0.0
    rows: list[dict[str, float | None]] = []
    for line in metrics:
        both = sum(_count(line, name) for name in ("bytes_up", "bytes_down", "bytes_peer"))
        client += both / max(1, _count(line, "clients"))
        client_up += _count(line, "bytes_up") / max(1, _count(line, "clients"))
        sums["examples"] += _count(line, "examples")
        sums["batches"] += _count(line, "batches_max")
        sums["bytes"] += both
        if any(name in line for name in names):
            rows.append(
                {
                    "round": line["round"],
                    **sums,
                    "bytes_client": rounded(client),
                    "bytes_client_up": rounded(client_up),
                    "elapsed": rounded(finite(line.get("elapsed"))),
                    **{name: rounded(finite(line.get(name))) for name in (*names, _TRAINING)},
                }
            )
    columns = ["round", *sums, "bytes_client", "bytes_client_up", "elapsed", *names, _TRAINING]
    return {name: [row[name] for row in rows] for name in columns}


def _facts(run: Run) -> dict[str, float | None]:
    facts = {
        "parameters": run.recorded("model", "parameters"),
        "multiply_adds": run.recorded("model", "multiply_adds"),
        "cpu_seconds": run.recorded("totals", "cpu_seconds"),
        "seconds": run.seconds(),
        "emd": run.emd(),
        "clients": run.recorded("partition", "clients"),
        "warnings": len(run.summary.get("warnings") or ()),
        "batch_size": subtable(run.config, "local").get("batch_size"),
        "chance": _chance(run),
        "local_lr": subtable(run.config, "local").get("lr"),
        "effective_lr": effective_rate(read_config(run.config)),
    }
    return {name: rounded(finite(value)) for name, value in facts.items()}


def _chance(run: Run) -> float | None:
    """The accuracy of guessing one of the classes; None for another task."""
    if subtable(run.config, "task").get("name") != "classification":
        return None
    classes = [
        name for name in subtable(run.summary, "details") if name.startswith(f"{run.split()}_accuracy_")
    ]
    return 1 / len(classes) if len(classes) > 1 else None


def _is_metric(name: str) -> bool:
    split = split_of(name)
    return name.startswith("clients_") or (split is not None and split[0] != "local")


def _count(line: Mapping[str, Any], name: str) -> int:
    return int(finite(line.get(name)) or 0)


def rounded(value: float | None) -> float | None:
    """
    >>> rounded(2 / 3), rounded(123456789), rounded(None)
    (0.6666667, 123456789, None)
    """
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
