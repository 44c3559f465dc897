"""Values that a paper states, matched with the cells of a study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field


@dataclass(frozen=True)
class StatedValue:
    """One value of a paper.

    Attributes:
        method: of the study, or another name such as "centralized" that the study does not run.
        metric: such as "test_accuracy", as a fraction.
        where: the sentence or the table that states it.
        case: the dimensions that it holds for; it holds for all values of a dimension that is not named.
        at: the budget that it was reached with, such as {"rounds": 1000}; empty for the end of training. With
            {"target": 0.5} it is the number of rounds to that target, with {"relative_target": 0.5} to that share of
            the centralized value.
        value, low, high, about: one of these is set: an exact value, "above", "below", "about".

    Raises `ValueError` unless exactly one of them is.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # as a table of a paper

    method: str
    metric: str
    where: Annotated[str, Field(min_length=1)]
    case: Mapping[str, Any] = field(default_factory=dict)
    at: Mapping[str, float] = field(default_factory=dict)
    value: float | None = None
    low: float | None = None
    high: float | None = None
    about: float | None = None

    def __post_init__(self) -> None:
        if len(self._numbers) != 1:
            raise ValueError("exactly one of value, low, high and about must be set")

    @property
    def _numbers(self) -> list[float]:
        numbers = (self.value, self.low, self.high, self.about)
        return [number for number in numbers if number is not None]

    @property
    def number(self) -> float:
        """The number to draw.

        >>> StatedValue("fedavgm", "test_accuracy", "section 4.2", low=0.75).number
        0.75
        """
        return self._numbers[0]

    @property
    def word(self) -> str:
        """What stands before the number: "above ", "below ", "about ", or nothing."""
        words = {"above ": self.low, "below ": self.high, "about ": self.about}
        return next((word for word, number in words.items() if number is not None), "")

    @property
    def text(self) -> str:
        """The value in words.

        >>> StatedValue("fedavgm", "test_accuracy", "section 4.2", low=0.75).text
        'above 0.75'
        """
        return f"{self.word}{self.number:g}"

    def holds_for(self, case: Mapping[str, Any]) -> bool:
        """Whether it is about this case.

        >>> StatedValue("fedavg", "test_accuracy", "", {"local.epochs": 1}, about=0.35).holds_for(
        ...     {"local.epochs": 1, "data.partition.alpha": 0.0})
        True
        """
        return all(key in case and case[key] == value for key, value in self.case.items())


def stated_values(document: Mapping[str, Any], metric: str | None = None) -> list[StatedValue]:
    """The values of `StudyInfo.document`, of one metric or of all.

    >>> document = {"values": [{"method": "fedavg", "metric": "test_loss", "where": "table 1", "value": 0.5}]}
    >>> [value.text for value in stated_values(document)], stated_values(document, "test_accuracy")
    (['0.5'], [])
    """
    values = [StatedValue(**entry) for entry in document.get("values", ())]
    return [value for value in values if metric in (None, value.metric)]


def stated_label(document: Mapping[str, Any], method: str, label: str) -> str:
    """The label of a method beside the paper's numbers: that of the paper's scale, if `label` is another.

    >>> stated_label({"labels": {"fedavg-many": "FedAvg, K = 100"}}, "fedavg-many", "FedAvg, K = 20")
    'FedAvg, K = 100'
    """
    return str(document.get("labels", {}).get(method, label))
