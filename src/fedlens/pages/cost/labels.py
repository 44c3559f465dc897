"""What the runs of `fedlens cost` say about labels: clients below the others with every model, suspicious images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedlens.base.errors import RunDirectoryError
from fedlens.base.format import client_name, many, percent
from fedlens.data.partition.partition import Partition
from fedlens.observers.held_out_predictions import HeldOutPredictions
from fedlens.pages.cost.measures import listed
from fedlens.pages.low_clients import answers_of, below_with_every_model, owners_of
from fedlens.pages.shown_images import may_get_images, shows_images
from fedlens.pages.suspicious_labels import CLIENTS, FILE, NOTES, label_card, suspicious_labels
from fedlens.results.run import Run

_ASKED = ("federated", "centralized")  # about a label: their models trained on all clients' images
HOW = "With --set record.images=true and another --out, this page has the images."
_IN_TEXT = 5  # images of a client in the terminal
_MODELS = {"iid": "the IID twin", "centralized": "the centralized model", "local-only": "models of their own"}

Finished = Mapping[str, Mapping[int, Run]]  # by role and seed


def label_findings(finished: Finished) -> dict[str, Any]:
    """What the finished runs say about labels.

    - `low_clients`: the clients that are clearly below the others with every model, the lowest first: client, held_out,
      and `models`, by role share, others, images, p and allowed; see `fedlens.pages.low_clients`.
    - `suspicious`: by client, those above first, all held-out images whose label the federated and the
      centralized models contradict: client, held_out, found, models and images; see
      `fedlens.pages.suspicious_labels`. None if the task is not the classification of images.
    """
    by_role = _predictions(finished)
    if "federated" not in by_role:
        return {"low_clients": [], "suspicious": None}
    low = _low_clients(by_role, finished)
    found = suspicious_labels(_asked(by_role), [row["client"] for row in low])
    return {"low_clients": low, "suspicious": [each.as_row() for each in found]}


def cost_label_card(finished: Finished, answer: Mapping[str, Any]) -> dict[str, Any] | None:
    """The card with the suspicious images of the answer, pictured where the settings let pages contain them."""
    if answer["suspicious"] is None:
        return None
    runs = [run for of in finished.values() for run in of.values()]
    first = [row["client"] for row in answer["low_clients"]]
    shown = all(map(shows_images, runs))
    found = suspicious_labels(_asked(_predictions(finished)), first, pictures=shown)
    return label_card(found, HOW if all(map(may_get_images, runs)) else "")


def low_client_sentences(answer: Mapping[str, Any]) -> list[str]:
    """A sentence for each client that is clearly below the others with every model."""
    said = []
    for row in answer["low_clients"]:
        (_, first), *others = row["models"].items()
        name, images = client_name(row["client"], begins=True), first["images"]
        of = f"its {images:,} held-out images"
        if images < row["held_out"]:
            of = f"{images:,} of its {row['held_out']:,} held-out images"
            of += " (no other client has the classes of the rest)"
        more = [
            f"{percent(each['share'])} and {percent(each['others'])} with {_MODELS[role]}"
            for role, each in others
        ]
        said.append(
            f"{name} is clearly below the other clients with every model: check its labels. The federated model has "
            f"{percent(first['share'])} of {of} right, and {percent(first['others'])} of the others' images of the "
            f"same classes ({'; '.join(more)}). If its labels are right, its images differ from all others'."
        )
    return said


def label_warnings(answer: Mapping[str, Any]) -> list[str]:
    """A sentence if the test images have the mistakes of a client that is to check its labels."""
    low = [client_name(row["client"]) for row in answer["low_clients"]]
    if not low or not answer["work"].get("test_drawn"):
        return []
    return [
        "The test images are drawn from the clients' own images, and no client trains on them. If labels of "
        f"{listed(low)} are wrong, so are labels of test images, and the models "
        "look worse than they are: correct the labels before you read the test values."
    ]


def suspicious_lines(answer: Mapping[str, Any], directory: Path) -> list[str]:
    """The suspicious images for the terminal; empty without any. The last line names the file with all of them.

    Clients that are below the others are shown with their first images; of the rest there is a count.
    """
    rows = answer["suspicious"] or []
    if not rows:
        return []
    low = {row["client"] for row in answer["low_clients"]}
    lines = ["Held-out images whose label the federated and centralized models contradict:"]
    for row in rows[:CLIENTS]:
        lines.append(f"  {row['client']}: {row['found']:,} of {row['held_out']:,}")
        for image in row["images"][:_IN_TEXT] if row["client"] in low else ():
            name = image["file"] or f"training image {image['index']}"
            said = f"{image['models']} of {row['models']} models"
            lines.append(f"    {name}: label {image['label']}, {said} suggest {image['suggested']}")
        if row["client"] in low and row["found"] > _IN_TEXT:
            lines.append(f"    and {row['found'] - _IN_TEXT:,} more")
    if len(rows) > CLIENTS:
        lines.append(f"  and {many(len(rows) - CLIENTS, 'more client')}")
    total = sum(row["found"] for row in rows)
    return [*lines, " ".join(NOTES), f"list of {many(total, 'label')} to check: {directory / FILE}"]


def _predictions(finished: Finished) -> dict[str, list[HeldOutPredictions]]:
    by_role: dict[str, list[HeldOutPredictions]] = {}
    for role, runs in sorted(finished.items()):
        for _, run in sorted(runs.items()):
            with suppress(RunDirectoryError):  # the page of the run says that the file is corrupt
                if run.held_out is not None:
                    by_role.setdefault(role, []).append(run.held_out)
    return by_role


def _asked(by_role: Mapping[str, Sequence[HeldOutPredictions]]) -> list[HeldOutPredictions]:
    return [predictions for role in _ASKED for predictions in by_role.get(role, ())]


def _low_clients(
    by_role: Mapping[str, Sequence[HeldOutPredictions]], finished: Finished
) -> list[dict[str, Any]]:
    partition = next((run.partition for run in finished["federated"].values()), None)
    # Without the centralized model, a client that federated training serves badly looks as one with wrong labels.
    if not isinstance(partition, Partition) or "centralized" not in by_role:
        return []
    first = by_role["federated"][0]
    answers = answers_of(
        {role: by_role[role] for role in ("federated", *sorted(by_role))}, owners_of(partition, first)
    )
    held_out = dict(zip(first.clients, (first.offsets[1:] - first.offsets[:-1]).tolist(), strict=True))
    rows = [
        {
            "client": partition.ids[client],
            "held_out": held_out.get(partition.ids[client], 0),
            "models": {role: asdict(each) for role, each in models.items()},
        }
        for client, models in below_with_every_model(answers).items()
    ]
    return sorted(rows, key=lambda row: row["models"]["federated"]["share"])
