"""The settings of vertical learning, in which each party holds a part of every image. No import of torch."""

from __future__ import annotations

import re
from math import prod
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from fedlens.core.dataset_info import PartyFacts, Window
from fedlens.data.partition.settings import PartyPaths, grid_of

_SPLIT = r"quadrants|halves|(rows|columns):([2-9]|[1-9]\d{1,3})"


class PartySettings(BaseModel):
    """The table `data.parties`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    split: str | None = Field(
        None,
        description="how images are cut: quadrants, halves (left and right), rows:K or columns:K; parties are numbered "
        "from the top left, row by row",
    )
    files: PartyPaths | None = Field(
        None,
        description="your own data, in place of `split` and `data.dataset`: the table of each party, a CSV file with "
        "the columns id and path, one of them also with label and split",
    )
    labels_at: int = Field(0, ge=0, description="the number of the party that has the labels")
    overlap: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the training images that all parties have; each other image is at one party",
    )
    align: Literal["psi", "ids"] = Field(
        "psi",
        description="how the parties find the images that all of them have. psi: by private set intersection; ids: the "
        "parties send their ids",
    )

    @field_validator("split")
    @classmethod
    def _known(cls, split: str | None) -> str | None:
        if split is not None and re.fullmatch(_SPLIT, split) is None:
            raise ValueError("must be 'quadrants', 'halves', 'rows:K' or 'columns:K', K being at least 2")
        return split

    @field_validator("labels_at")
    @classmethod
    def _one_of_them(cls, labels_at: int, known: ValidationInfo) -> int:
        split = known.data.get("split")
        if split is not None and labels_at >= (parties := prod(grid_of(split))):
            raise ValueError(f"must be at most {parties - 1}, the last of {parties} parties")
        return labels_at

    @model_validator(mode="after")
    def _either(self) -> PartySettings:
        if (self.split is None) is (self.files is None):
            raise ValueError("the table needs either split or files, such as split = 'quadrants'")
        if self.files is not None and (self.labels_at or self.overlap != 1):
            raise ValueError(
                "the table has files, which say where the labels are and what overlaps: remove "
                "labels_at and overlap"
            )
        return self

    def of_one_shape(self, shape: tuple[int, ...]) -> PartyFacts:
        """The parties, as if each held whole images of this shape."""
        count = len(self.files) if self.files is not None else prod(grid_of(self.split or "halves"))
        names, windows = tuple(map(str, range(count))), (Window(0, 0, *shape[-2:]),) * count
        return PartyFacts(names, (shape,) * count, windows, self.labels_at, self.align)
