"""Sites with several clients, whose images are summed and left out during a run, over TLS."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import tomli_w

from fedlens.data.datasets.digits import digits
from fedlens.data.partition.roster import Roster
from fedlens.site.log_export import AskedLog
from tests.seam.test_serve_and_agents import OWNERS, Wards
from tests.unit.site.site_kit import write_images, write_site
from tests.unit.site.test_workplace import SITES

LEFT_OUT = 30


class Clinics(Wards):
    """Wards whose images belong to two scanners each, in an experiment without a mean."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "fedavg")
        for key in ("mean", "std"):
            del self.settings["data"]["dataset"][key]
        self.settings |= {"record": {"clients": True}, "local": {"lr": 0.1, "epochs": 1, "batch_size": 32}}
        train = digits(Path(), False, 0).train
        for k, name in enumerate(SITES):
            rows = np.flatnonzero(k == OWNERS)
            scanners = [f"s{i % 2}" for i in range(len(rows))]
            labels = [str(t) for t in train.targets[rows]]
            write_images(folder / name / "scans", train.inputs[rows, 0], labels, {"scanner": scanners})
            write_site(
                folder / name,
                {"clients": "scanner", "exclude": "withdrawn.txt"},
                allow={"min_examples": 8},
            )
            self.listed(name).write_text("")
        (folder / "experiment.toml").write_text(tomli_w.dumps(self.settings))

    def listed(self, name: str) -> Path:
        return self.folder / name / "withdrawn.txt"


def examples(run: Path, round: int, client: str) -> int:
    """How many examples a client trained on."""
    rows = map(json.loads, (run / "clients.jsonl").read_text().splitlines())
    (row,) = [row for row in rows if (row["round"], row["client"]) == (round, client) and "batches" in row]
    return int(row["examples"])


def test_clients_of_a_column_sum_their_images_and_lose_some_in_a_run(tmp_path: Path) -> None:
    clinics = Clinics(tmp_path)
    names = [f"{2 * i:04d}.png" for i in range(LEFT_OUT)]  # all of scanner s0

    def after(round: int) -> None:
        if round == 1:
            clinics.listed("a").write_text("\n".join(names))

    clinics.progress.each_round = after
    with clinics.at_work():
        run = clinics.serve()
    roster = Roster.load(run / "roster.json")
    assert roster.ids == tuple(f"{site}/s{k}" for site in SITES for k in range(2))
    assert roster.images == 1437
    data = digits(Path(), False, 0)
    assert roster.moments is not None
    assert np.allclose(roster.moments, [data.mean, data.std], rtol=1e-9)
    trained = {client: [examples(run, round, client) for round in (1, 3)] for client in ("a/s0", "a/s1")}
    assert trained["a/s1"] == [roster.examples[1]] * 2
    first, last = trained["a/s0"]
    assert first == roster.examples[0]
    assert 0 < first - last <= LEFT_OUT  # the others were held out
    record = json.loads(next((tmp_path / "a" / "approved").glob("*.examples.json")).read_text())
    assert record["gone"] == sorted(names)
    assert sum(map(len, record["clients"].values())) == int((OWNERS == 0).sum())
    log = AskedLog.read(tmp_path / "a")
    changes = [line for line in log.told if line.get("kind") == "exclude"]
    assert [line["run"] for line in changes] == 2 * [log.asks[0]["run"]]
    assert [(line["lines"], line["images_left_out"]) for line in changes] == [(0, 0), (LEFT_OUT, LEFT_OUT)]
    assert changes[1]["sha256"] == hashlib.sha256(clinics.listed("a").read_bytes()).hexdigest()
    sent = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert b".png" not in sent
