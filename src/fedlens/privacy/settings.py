"""The settings of differential privacy: the `[privacy]` table. No import of torch: the command line reads this."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Clip = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_FIRST, _FLOOR = 0.1, 1e-6


class PrivacySettings(BaseModel):
    """The `[privacy]` table.

    >>> PrivacySettings(clip="adaptive", noise_multiplier=1.0, delta=1e-5).first_clip
    0.1
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    unit: Literal["client", "example"] = Field(
        "client",
        description="whose presence is hidden. client: a client with all of its examples, in the published model; "
        "example: one example of a client, in all that the client sends (DP-SGD)",
    )
    column: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="with unit = 'example': the column of the data whose value names the unit, such as patient. All "
        "examples of a client with one value are drawn and clipped together, and hidden together",
    )
    clip: Clip | Literal["adaptive"] = Field(
        description="C, the largest Euclidean norm of a client's update, or of an example's gradient; adaptive: the "
        "median of the norms of updates, which is estimated under noise from round to round (Andrew et al. 2021, arXiv "
        "1905.03871)"
    )
    clip_first: Clip = Field(_FIRST, description="C of the first round, of an adaptive clip only")
    clip_floor: Clip = Field(_FLOOR, description="the smallest C, of an adaptive clip only")
    noise_multiplier: float | None = Field(
        None,
        ge=0,
        description="z: the noise in the sum of the updates or gradients has the deviation z C; 0 for no noise",
    )
    epsilon: float | None = Field(
        None,
        gt=0,
        description="in place of noise_multiplier: the smallest z with which all rounds stay within epsilon; with "
        "unit = 'example' for the client that spends most, if it takes part in each of them",
    )
    delta: float = Field(
        gt=0, lt=1, description="the delta of (epsilon, delta); far below 1 / clients, or 1 / examples"
    )
    mechanism: Literal["gaussian", "tree"] = Field(
        "gaussian",
        description="the noise. gaussian: independent normals in each round; tree: in the sum of all rounds so far, "
        "from a binary tree (DP-FTRL, Kairouz et al. 2021, arXiv 2103.00039), for select.name = 'once-each'",
    )
    restart_every: int | None = Field(
        None,
        ge=1,
        description="of a tree: rounds after which a new one starts; by default when all clients have been asked",
    )
    honaker: bool = Field(
        True,
        description="of a tree: estimate each node from those below too (Honaker), which lowers the noise",
    )
    noise: Literal["system", "seeded"] = Field(
        "system",
        description="what noise and cohorts are drawn from. system: the operating system's entropy, so that no run can "
        "be repeated; seeded: the seed, for studies, where who knows the seed can subtract the noise",
    )

    @model_validator(mode="after")
    def _agree(self) -> PrivacySettings:
        if not self.hides_clients and self.adaptive:
            raise ValueError("clip = 'adaptive' is for unit = 'client': set a number for clip")
        if self.hides_clients and self.column is not None:
            raise ValueError(
                "column is for unit = 'example': with unit = 'client' all examples of a client are hidden"
            )
        if self.of_tree and (self.adaptive or not self.hides_clients):
            raise ValueError(
                "mechanism = 'tree' needs unit = 'client', and a number as clip: it sums all rounds"
            )
        if not self.of_tree and (self.restart_every is not None or not self.honaker):
            raise ValueError(
                "restart_every and honaker are of a tree: remove them, or set mechanism = 'tree'"
            )
        if (self.noise_multiplier is None) == (self.epsilon is None):
            raise ValueError("set noise_multiplier or epsilon, one of the two")
        if self.adaptive and self.clip_first < self.clip_floor:
            raise ValueError(f"clip_first is {self.clip_first:g}, below clip_floor, {self.clip_floor:g}")
        if not self.adaptive and (self.clip_first, self.clip_floor) != (_FIRST, _FLOOR):
            raise ValueError(
                "clip_first and clip_floor are of an adaptive clip: remove them, or set clip = 'adaptive'"
            )
        return self

    @property
    def z(self) -> float:
        """The noise multiplier. Raises `ValueError` if it is yet to be solved for an epsilon."""
        if self.noise_multiplier is None:
            raise ValueError("the noise for this epsilon is not solved")
        return self.noise_multiplier

    @property
    def hides_clients(self) -> bool:
        """Whether the unit is a client, so that nothing recorded may tell who took part."""
        return self.unit == "client"

    @property
    def seeded(self) -> bool:
        """Whether who knows the seed knows the noise."""
        return self.noise == "seeded"

    @property
    def of_tree(self) -> bool:
        """Whether the noise is in the sum of all rounds so far."""
        return self.mechanism == "tree"

    @property
    def adaptive(self) -> bool:
        """Whether C changes from round to round."""
        return self.clip == "adaptive"

    @property
    def first_clip(self) -> float:
        """C of the first round."""
        return self.clip_first if self.clip == "adaptive" else self.clip
