"""The sentences that every page, table and figure of a study carries: what its runs do not show."""

from __future__ import annotations

from collections.abc import Sequence

from fedlens.base.format import many
from fedlens.results.words import conjoined
from fedlens.studies.cells import StudyCells
from fedlens.studies.scale_differences import both_scales, method_pairs

_NUMBERS = ("no", "one", "two", "three", "four", "five")
_STAND_INS = ("data.dataset.name", "model.name", "model.backbone", "model.weights")
_MOST = 4  # names in a row


def caveats(here: StudyCells, paper: StudyCells, scale: str, trains: bool) -> list[str]:
    """Sentences on the rounds of a smaller scale, and on the datasets, models and starts that stand in for others.

    Args:
        trains: whether the study has runs; otherwise only its datasets count.
    """
    compared = [
        both_scales(here, paper, [method], [own] if own else None)
        for method, own in method_pairs(here, paper)
    ]
    parts = []
    for key in _STAND_INS if trains else _STAND_INS[:1]:
        new, replaced = list[str](), list[str]()
        for ours, theirs in (both.shown(key) for both in compared):
            if others := [name for name in ours if name not in theirs]:
                new += others
                replaced += [name for name in theirs if name not in ours] or theirs or ["none"]
        if new:
            parts.append(f"{_names(new)} for {_names(replaced)}")
    whole = both_scales(here, paper)
    rounds = [max(values.get("rounds", [0])) if trains else 0 for values in (whole.ours, whole.theirs)]
    sentences = [few_rounds(scale, *rounds), f"Stand-ins: {'; '.join(parts)}." if parts else ""]
    return [sentence for sentence in sentences if sentence]


def _names(names: Sequence[str]) -> str:
    """Different names in a sentence, at most four; one with a comma in quotes."""
    shown = [f'"{name}"' if "," in name else name for name in dict.fromkeys(names)]
    return conjoined([*shown[:_MOST], *([f"{len(shown) - _MOST} more"] if len(shown) > _MOST else [])])


def few_rounds(scale: str, rounds: int, paper: int) -> str:
    """A sentence on a number of rounds below that of the paper; else empty.

    >>> few_rounds("smoke", 2, 4000), few_rounds("laptop", 120, 10_000), few_rounds("laptop", 80, 80)
    ('Two rounds, nothing learned.', "At most 120 rounds, not the paper's 10,000.", '')
    """
    if rounds >= paper:
        return ""
    if scale == "smoke" and rounds < len(_NUMBERS):
        return f"{_NUMBERS[rounds].capitalize()} round{'s' if rounds > 1 else ''}, nothing learned."
    return f"At most {many(rounds, 'round')}, not the paper's {paper:,}."
