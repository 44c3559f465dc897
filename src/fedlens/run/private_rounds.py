"""What a run with differential privacy keeps out of its metrics, its summary and its checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedlens.base.errors import RoundRefused, RunFailed
from fedlens.core.driver import Tally
from fedlens.core.schema import METRICS
from fedlens.core.types import client_name
from fedlens.files import jsonl
from fedlens.run.build import Built
from fedlens.run.rundir import RunDir

# Columns of metrics.jsonl that tell who took part: how many there were, what they sent, how long they took.
_COLUMNS = (
    "local_loss", "clients", "failed", "examples", "batches_max", "bytes_up", "bytes_down", "bytes_peer",
    "letters_dropped", "seconds", "elapsed",
)  # fmt: skip


class PrivateRounds:
    """Separates what a run publishes of a round from what only its owner may see.

    Under `[privacy]` no local loss is recorded, since it has no noise. If clients are hidden (`Algorithm.private`), who
    took part, with what norms, bytes and seconds, goes to `private.jsonl`, of mode 0600, and nowhere else.
    A round that is repeated after a kill has another line there. With `record.unsafe` everything is recorded.

    Attributes:
        hidden: whether who took part is hidden.
    """

    def __init__(self, built: Built, directory: RunDir) -> None:
        config = built.config
        self._lossless = config.privacy is not None and not config.record.unsafe
        self.hidden = built.algorithm.private and not config.record.unsafe
        self._path, self._ids = directory.private_path, built.partition.ids

    def kept(self, round: int, tally: Tally, sums: Mapping[str, float], seconds: float) -> Tally:
        """What the run may record of a round; the rest is written to the private file.

        Args:
            sums: the metrics that the server computed.

        Raises `RunFailed` if the disk refuses.
        """
        if self.hidden:
            row = {
                "round": round,
                "replied": [client_name(client, self._ids) for client in tally.replied],
                "failures": {client_name(k, self._ids): dict(why) for k, why in tally.failures.items()},
                "norms": [[client_name(k, self._ids), norm] for k, _, norm in tally.norms],
                "examples": int(tally.sums.get("examples", 0)),
                "bytes_up": tally.bytes_up,
                "bytes_down": tally.bytes_down,
                "seconds": seconds,
            }
            jsonl.append(self._path, [row], private=True)
            # A secure sum has the loss too, and neither a line nor the end of the run may depend on it.
            kept = {name: value for name, value in sums.items() if name not in METRICS}
            return Tally(sums=defaultdict(float, kept))
        if self._lossless:
            rows = {k: {n: v for n, v in row.items() if n != "loss"} for k, row in tally.rows.items()}
            kept = {name: value for name, value in tally.sums.items() if name != "loss"}
            return replace(tally, sums=defaultdict(float, kept), rows=rows)
        return tally

    def told(self, round: int, failed: RunFailed) -> RunFailed:
        """The error that the run may record. Why a round was refused tells who replied: that is for the private file.

        Raises `RunFailed` if the disk refuses.
        """
        if not self.hidden or not isinstance(failed, RoundRefused):
            return failed
        jsonl.append(self._path, [{"round": round, "refused": failed.what}], private=True)
        return RoundRefused(f"round {round} gave no update; {self._path.name} says why")

    def published(self, line: dict[str, Any]) -> dict[str, Any]:
        """The line of metrics.jsonl without what it may not have."""
        without = _COLUMNS if self.hidden else _COLUMNS[:1] if self._lossless else ()
        return {name: value for name, value in line.items() if name not in without}
