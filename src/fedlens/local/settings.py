"""The settings of local training. No import of torch: the command line reads this."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]
Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# The settings that make the learning rate depend on the round or the step.
RATE_SETTINGS = (
    "lr_decay",
    "lr_decay_every",
    "lr_schedule",
    "lr_final",
    "lr_power",
    "lr_warmup",
    "lr_change",
)


def _flat(given: Any) -> Any:
    """Dotted names, if TOML or --set made nested tables of them: {"layer": {"1": 2.0}} is {"layer.1": 2.0}."""
    if not isinstance(given, Mapping):
        return given
    flat: dict[str, Any] = {}
    for name, value in given.items():
        inner = _flat(value)
        nested = isinstance(inner, Mapping)
        flat |= {f"{name}.{below}": item for below, item in inner.items()} if nested else {name: inner}
    return flat


class LocalSettings(BaseModel):
    """How a client trains: the `[local]` table.

    A client starts with a new optimizer each time it receives the global model, so momentum is cleared (FedCV,
    appendix 7.1.4).

    >>> LocalSettings(lr=0.1, epochs=5).steps_at(examples=500)
    80
    >>> local = LocalSettings(lr=0.1, lr_schedule="linear")
    >>> [round(local.lr_at(r, rounds=4), 3) for r in (1, 2, 3, 4)]
    [0.1, 0.075, 0.05, 0.025]
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    optimizer: Literal["sgd", "adam", "adamw", "lars"] = Field(
        "sgd",
        description="sgd, adam (Chen et al. 2022, table 6), adamw: adam with decoupled weight decay, or lars: sgd with "
        "a rate for each leaf, for large batches (You et al. 2017)",
    )
    lr: float = Field(gt=0, description="learning rate, before decay, schedule and warm-up")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of sgd and lars")
    nesterov: bool = Field(False, description="Nesterov momentum of sgd")
    betas: tuple[float, float] = Field(
        (0.9, 0.999), description="decay rates of the two moments of adam and adamw"
    )
    eps: float = Field(1e-8, gt=0, description="epsilon of adam and adamw")
    trust: float = Field(0.001, gt=0, description="trust coefficient of lars")
    lars_leaves: Literal["weights", "all"] = Field(
        "weights",
        description="leaves that lars scales. weights: not biases and normalization, which get neither scaling nor "
        "weight decay; all",
    )
    weight_decay: float = Field(
        0.0, ge=0, description="L2 penalty, added to the gradient; of adamw: w <- (1 - lr weight_decay) w"
    )
    epochs: Positive | None = Field(None, description="local epochs per round (1 unless steps is set)")
    steps: Positive | None = Field(
        None, description="a fixed number of local steps per round, instead of epochs"
    )
    examples: Positive | None = Field(
        None,
        description="FedVC's N_VC: the number of its examples that a client trains on, drawn anew each round",
    )
    batch_size: Positive | Literal["all"] = Field(
        32, description="examples per step; 'all' is one full batch"
    )
    lr_decay: float = Field(
        1.0, gt=0, le=1, description="factor by which the learning rate is multiplied ..."
    )
    lr_decay_every: Positive = Field(1, description="... every N rounds")
    lr_schedule: Literal["constant", "linear", "polynomial", "cosine"] = Field(
        "constant", description="how the learning rate falls over the rounds of the run, from lr to lr_final"
    )
    lr_final: float = Field(
        0.0, ge=0, le=1, description="share of lr that the schedule falls to at the end of the run"
    )
    lr_power: float = Field(0.9, gt=0, description="exponent of the polynomial schedule")
    lr_warmup: int = Field(
        0, ge=0, description="rounds in which the learning rate rises to lr, before decay or schedule begin"
    )
    lr_change: Literal["round", "step"] = Field(
        "round", description="change the rate of schedule and warm-up every round, or with every local step"
    )
    lr_scale: Annotated[dict[str, Factor], BeforeValidator(_flat)] | None = Field(
        None,
        description="factors of the learning rate by the name of a layer or leaf, the longest that fits; `head` is the "
        "classifier",
    )
    clip_norm: float | None = Field(
        None, gt=0, description="gradients with a larger norm are scaled down to this norm"
    )
    last_batch: Literal["keep", "drop"] = Field(
        "keep", description="drop leaves out the last batch of an epoch if it is smaller than the others"
    )
    stragglers: float = Field(
        0.0, ge=0, le=1, description="share of the clients of a round that do partial work (FedProx)"
    )
    straggler_work: Literal["below-E", "up-to-E", "drop"] = Field(
        "below-E",
        description="epochs (or steps) of a straggler, drawn uniformly: 1 to E - 1, as in the code of FedProx's "
        "authors; 1 to E, as in their paper; or drop it from the round, as their FedAvg does",
    )

    @model_validator(mode="after")
    def _check(self) -> LocalSettings:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("epochs and steps are both set; set only one of them")
        if self.nesterov and (self.momentum == 0 or self.optimizer != "sgd"):
            raise ValueError("nesterov needs optimizer = 'sgd' and a momentum above 0")
        adaptive, fields = self.optimizer in ("adam", "adamw"), type(self).model_fields
        if self.momentum and adaptive:
            raise ValueError(f"momentum belongs to optimizer = 'sgd' or 'lars'; {self.optimizer} has betas")
        if not adaptive and (self.betas, self.eps) != (fields["betas"].default, fields["eps"].default):
            raise ValueError(
                f"betas and eps belong to optimizer = 'adam' or 'adamw'; {self.optimizer} has momentum"
            )
        of_lars = (self.trust, self.lars_leaves) != (fields["trust"].default, fields["lars_leaves"].default)
        if of_lars and self.optimizer != "lars":
            raise ValueError("trust and lars_leaves belong to optimizer = 'lars'")
        if self.lr_decay == 1 and self.lr_decay_every != 1:
            raise ValueError("lr_decay_every has no effect while lr_decay is 1")
        if self.examples and self.batch_size != "all" and self.examples % self.batch_size:
            raise ValueError(
                f"examples ({self.examples}) must be a multiple of batch_size ({self.batch_size}): "
                "a virtual client takes exactly examples / batch_size steps an epoch"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError("betas must be at least 0 and below 1")
        self._check_schedule()
        if self.stragglers and self.work == 1 and self.straggler_work != "drop":
            raise ValueError(
                "stragglers run fewer epochs than the others, so epochs (or steps) must be above 1"
            )
        if not self.stragglers and self.straggler_work != "below-E":
            raise ValueError("straggler_work has no effect while stragglers is 0")
        return self

    def _check_schedule(self) -> None:
        fields, constant = type(self).model_fields, self.lr_schedule == "constant"
        if not constant and self.lr_decay != 1:
            raise ValueError("lr_schedule and lr_decay both lower the learning rate; set one of them")
        if constant and self.lr_final != fields["lr_final"].default:
            raise ValueError("lr_final has no effect while lr_schedule is constant")
        if self.lr_schedule != "polynomial" and self.lr_power != fields["lr_power"].default:
            raise ValueError("lr_power belongs to lr_schedule = 'polynomial'")
        if constant and not self.lr_warmup and self.lr_change == "step":
            raise ValueError(
                "lr_change = 'step' needs an lr_schedule or lr_warmup; lr_decay changes by round"
            )

    @property
    def work(self) -> int:
        """Epochs, or steps if they are set; stragglers do fewer."""
        return self.steps or self.epochs or 1

    def batch(self, examples: int) -> int:
        """The batch size at a client with this many examples."""
        return examples if self.batch_size == "all" else min(self.batch_size, examples)

    @property
    def plain_steps(self) -> bool:
        """Whether a step is exactly w <- w - lr g."""
        return (
            self.optimizer == "sgd" and not self.momentum and not self.weight_decay and self.clip_norm is None
        )

    def steps_at(self, examples: int, work: int | None = None) -> int:
        """The number of steps of `work` epochs or steps, at a client with this many examples."""
        work = self.work if work is None else work
        return work if self.steps else work * self.batches_at(examples)

    def batches_at(self, examples: int) -> int:
        """The number of batches in one epoch at a client with this many examples."""
        batch = max(1, self.batch(examples))
        return examples // batch if self.last_batch == "drop" else -(-examples // batch)

    def examples_in(self, examples: int, steps: int) -> int:
        """The number of examples in this many steps, at a client with `examples`.

        >>> LocalSettings(lr=0.1, batch_size=4).examples_in(examples=10, steps=4)  # 4 + 4 + 2 + 4
        14
        """
        batch, epoch = self.batch(examples), max(1, self.batches_at(examples))
        epochs, rest = divmod(steps, epoch)
        return epochs * min(examples, epoch * batch) + rest * batch

    @property
    def changes_by_step(self) -> bool:
        """Whether the learning rate changes from one local step to the next."""
        return self.lr_change == "step"

    def lr_at(self, round: int, rounds: int, step: int = 0, steps: int = 1) -> float:
        """The learning rate of a round, the first being 1, or of one of its steps, the first being 0.

        With W rounds of warm-up, R rounds in all and K steps a round (1 if the rate changes by round), step s of
        round r is step t = K (r - 1) + s of the run. The rate is lr times

            (t + 1) / (K W + 1)                             warm-up: t < K W
            lr_decay^floor((r - 1 - W) / lr_decay_every)    lr_schedule = "constant"
            e + (1 - e) f(p),  p = (t - K W) / (K (R - W)),  e = lr_final, else

        where f is 1 - p (linear), (1 - p)^lr_power (polynomial) or (1 + cos(pi p)) / 2 (cosine): those of
        `torch.optim.lr_scheduler`'s `LinearLR`, `PolynomialLR` and `CosineAnnealingLR`.

        Args:
            round: the round.
            rounds: the rounds of the run.
            step: the local step in the round.
            steps: the client's number of local steps in a round.
        """
        warm, at = steps * self.lr_warmup, steps * (round - 1) + step
        if at < warm:
            return self.lr * (at + 1) / (warm + 1)
        if self.lr_schedule == "constant":
            return float(self.lr * self.lr_decay ** ((round - 1 - self.lr_warmup) // self.lr_decay_every))
        done = (at - warm) / (steps * (rounds - self.lr_warmup))
        if self.lr_schedule == "cosine":
            factor = (1 + math.cos(math.pi * done)) / 2
        else:
            factor = (1 - done) ** (self.lr_power if self.lr_schedule == "polynomial" else 1)
        return float(self.lr * (self.lr_final + (1 - self.lr_final) * factor))

    def shared_rate(self, round: int, rounds: int) -> dict[str, float | list[int]]:
        """The payload for the learning rate: `lr`, and `schedule` if it changes with every step."""
        rate: dict[str, float | list[int]] = {"lr": self.lr_at(round, rounds)}
        return {**rate, "schedule": [round, rounds]} if self.changes_by_step else rate

    def rates(self, payload: Mapping[str, Any], steps: int) -> list[float]:
        """The learning rate of each local step; empty if all have the `lr` of the payload."""
        if not self.changes_by_step or "schedule" not in payload:
            return []
        round, rounds = payload["schedule"]
        return [self.lr_at(round, rounds, step, steps) for step in range(steps)]
