"""Finds names of datasets, models, starts and numbers in the labels of studies, and compares them with the settings.

A title, a label or a key may leave a setting out, but what it names must be a setting of its runs. The spellings are in
`recipes/studies/names.toml`. What a title names after "not" is what the runs are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from fedlens.studies.cells import StudyCells
from fedlens.studies.planned import PREFIX
from fedlens.studies.run_settings import PlacedSetting
from fedlens.studies.scale_differences import dotted, spellings
from fedlens.studies.study_plan import StudyPlan

SETTINGS = {
    "alpha": "data.partition.alpha",
    "clients": "data.partition.clients",
    "batches of": "local.batch_size",
    "rounds": "rounds",
    "K =": "select.clients_per_round",
}
_NUMBERS = re.compile(
    r"(?P<before>\balpha =?|\bbatches of|\bK =) ?(?P<value>\d[\d,.]*)"
    r"|(?<!every )(?<!\d)(?P<number>\d[\d,]*) (?P<after>clients|rounds)\b"
)
_ALPHA_OF_KEY = re.compile(r"-a(\d+(?:\.\d+)?)(?=-|$)")
_TRAINED = re.compile(r"\b(fine-tuned|pre-trained|pretrained|ft)\b", re.IGNORECASE)
_FRESH = re.compile(r"\b(from scratch|scratch|sfl|random)\b", re.IGNORECASE)
_NEGATED = re.compile(r"\bnot [^,:;]*")


@dataclass(frozen=True)
class Label:
    """One label, with the settings of the runs that it names.

    Attributes:
        kind: "title", "label" or "key" of a method, "case", or "heading" of a table or figure.
    """

    kind: str
    text: str
    runs: Sequence[Mapping[str, Any]]


def labels_of(plan: StudyPlan) -> Iterator[Label]:
    """The labels of a study at a scale."""
    cells, study = plan.cells, plan.source.settings
    runs = {
        (method.name, k): _settings(cells, dotted(cells.given(method, case)), method.tuned.values)
        for method in cells.methods
        for k, case in enumerate(cells.cases)
    }
    every = list(runs.values())
    yield Label("title", _NEGATED.sub("", study.title), every)
    for spec in (*study.tables, *study.figures):
        yield Label("heading", _NEGATED.sub("", str(spec.get("title", ""))), every)
    for method in cells.methods:
        own = [run for (name, _), run in runs.items() if name == method.name]
        yield Label("label", method.label, own)
        yield Label("key", method.table, own)
    for k, case in enumerate(cells.cases):
        if "case" in case.values:
            yield Label(
                "case", str(case.values["case"]), [run for (_, number), run in runs.items() if number == k]
            )


def _settings(
    cells: StudyCells, given: Mapping[str, Any], tuned: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """Settings with lists for those that tuning tries, and those of the pre-training below "start."."""
    weights = str(given.get("model.weights", "none"))
    start: dict[str, Any] = {}
    if (table := (cells.settings.pretrained or {}).get(weights.removeprefix(PREFIX))) is not None:
        placed = [PlacedSetting(key, value, "") for key, value in table.set.items()]
        start = {f"start.{k}": v for k, v in dotted(cells.reader.given(table.base, "", placed)).items()}
        start |= {"start.label": table.label or "", "start.base": str(table.base)}
    return {
        **given,
        **start,
        "model.weights": weights,
        **{key: list(values) for key, values in tuned.items()},
    }


def wrong_labels(name: str, path: Path, scales: Iterable[str]) -> list[str]:
    """One sentence for each wrong label of a study: study, scale, label and setting."""
    found = []
    for scale in scales:
        for label in labels_of(StudyPlan.load(path, scale, check=False)):
            found += [f"{name}, {scale}, {label.kind} '{label.text}': {what}" for what in _wrong(label)]
    return list(dict.fromkeys(found))


def _wrong(label: Label) -> Iterator[str]:
    datasets = _values(label, "data.dataset.name") | _values(label, "start.data.dataset.name")
    models = _values(label, "model.name", "model.backbone", "model.inner")
    weights = _values(label, "model.weights")
    allowed = {"datasets": datasets, "models": models}
    for term in terms(
        " ".join(PurePath(str(each)).stem for each in weights)
    ):  # "cifar10-resnet20.safetensors"
        for kind, names in term.names.items():
            allowed[kind] = allowed[kind] | names
    for term in terms(label.text):
        if not any(names & allowed[kind] for kind, names in term.names.items()):
            has = " and ".join(f"{kind} {', '.join(sorted(allowed[kind]))}" for kind in term.names)
            yield f"names {term.text}, but its runs have the {has}"
    if _TRAINED.search(label.text) and weights == {"none"}:
        yield "names trained weights, but its runs have model.weights none"
    if _FRESH.search(label.text.replace("random combinations", "")) and "none" not in weights:
        yield f"names random weights, but its runs have model.weights {', '.join(sorted(weights))}"
    if re.search(r"\bfps\b", label.text, re.IGNORECASE):
        bases = _values(label, "start.base") | _values(label, "start.label")
        if not any("fps" in base.lower() for base in bases):
            yield f"names FPS, but its runs have model.weights {', '.join(sorted(weights))}"
    yield from _wrong_numbers(label)


def _wrong_numbers(label: Label) -> Iterator[str]:
    named = [
        ((m["before"] or m["after"]).strip(), m["value"] or m["number"])
        for m in _NUMBERS.finditer(label.text)
    ]
    if label.kind == "key":
        named = [("alpha", value) for value in _ALPHA_OF_KEY.findall(label.text)]
    for word, text in named:
        key = SETTINGS["alpha" if word.startswith("alpha") else word]
        values = {float(value) for value in _values(label, key) if not isinstance(value, str)}
        if key == "data.partition.clients":  # of a natural partition, the number is that of the data
            values |= {float(value) for value in _values(label, "select.clients_per_round")}
        if values and float(text.rstrip(".,").replace(",", "")) not in values:
            yield f"names {word} {text}, but its runs have {key} = {', '.join(f'{v:g}' for v in sorted(values))}"


def _values(label: Label, *keys: str) -> set[Any]:
    found = [run[key] for run in label.runs for key in keys if run.get(key) is not None]
    return {one for value in found for one in (value if isinstance(value, list) else [value])}


@dataclass(frozen=True)
class Term:
    """A spelling in a label, and the names of settings that it can mean, by "datasets" and "models"."""

    text: str
    names: Mapping[str, set[str]]


@cache
def _vocabulary() -> tuple[re.Pattern[str], dict[str, dict[str, set[str]]]]:
    words: dict[str, dict[str, set[str]]] = {}
    for kind in ("datasets", "models"):
        for name, texts in spellings()[kind].items():
            for text in texts:
                words.setdefault(text.lower(), {}).setdefault(kind, set()).add(name)
    longest = sorted(words, key=len, reverse=True)
    pattern = rf"(?<![A-Za-z0-9])(?:{'|'.join(map(re.escape, longest))})s?(?![A-Za-z0-9])"
    return re.compile(pattern, re.IGNORECASE), words


def terms(text: str) -> list[Term]:
    """The datasets and models that a text names, the longest spelling first: "Tiny-ImageNet" is not "ImageNet"."""
    pattern, words = _vocabulary()
    found = [match[0] for match in pattern.finditer(text)]
    return [Term(one, words.get(one.lower()) or words[one.lower().removesuffix("s")]) for one in found]
