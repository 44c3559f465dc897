"""The first example shows why one would federate, and its pages say for whom."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from fedlens import cost
from fedlens.base.registry import load_file

ROOT = Path(__file__).parents[3]
JOINING = load_file(ROOT / "docs" / "examples" / "joining.py").joining


def test_the_picture_has_two_dots_a_client(tmp_path: Path) -> None:
    with tarfile.open(ROOT / "tests" / "golden" / "folders" / "cost.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    clients = json.loads((tmp_path / "ended" / "cost.json").read_text())["clients"]
    (axes,) = JOINING(tmp_path / "ended").axes
    alone, joined, _ = (dots.get_offsets()[:, 1].tolist() for dots in axes.collections[1:])
    order = [int(label.get_text()) for label in axes.get_xticklabels()]
    by_client = {int(row["client"]): row for row in clients}
    assert alone == sorted(row["local-only"] for row in clients)
    assert joined == [by_client[client]["federated"] for client in order]
    gaining = sum(row["federated"] > row["local-only"] for row in clients)
    assert f"{gaining} of {len(clients)} gain" in axes.get_title(loc="left")


@pytest.mark.nightly
def test_joining_pays_for_most_clients_as_the_pages_say(tmp_path: Path) -> None:
    answer = cost("demo", seeds=1, out=tmp_path / "demo", report=False).answer
    assert answer["warnings"] == []
    gaining = [row["client"] for row in answer["clients"] if row["vs_local_only"]["mean"] > 0]
    assert len(gaining) >= 15
    now = {"clients": len(gaining), **{role: _percent(answer, role) for role in ("federated", "local-only")}}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    # Another processor rounds differently, and an image is worth four points of a small client.
    for page, joined, alone in (
        (readme, r"hold out, (?:.|\n)*?for ([\d.]+) %\.", r"alone they are right for ([\d.]+) %"),
        (home, r"accuracy is ([\d.]+) % with the federated", r"and ([\d.]+) % with a model of their own"),
    ):
        (gain,) = set(re.findall(r"(\d+) of 20 (?:clients\. On|gain)", page))
        assert int(gain) == pytest.approx(now["clients"], abs=1)
        assert float(re.findall(joined, page)[0]) == pytest.approx(now["federated"], abs=1)
        assert float(re.findall(alone, page)[0]) == pytest.approx(now["local-only"], abs=1)


def _percent(answer: Any, role: str) -> float:
    """The clients' mean accuracy on held-out images."""
    return 100 * float(answer["overall"][role]["clients"]["mean"])
