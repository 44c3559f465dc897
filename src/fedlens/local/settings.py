"""The settings of local training. No import of torch: the command line reads this."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]


class LocalSettings(BaseModel):
    """How a client trains: the `[local]` table.

    The optimizer starts fresh each time the global model arrives: momentum is cleared, as in fedcv appendix 7.1.4.

    >>> LocalSettings(lr=0.1, epochs=5).steps_at(examples=500), LocalSettings(lr=0.1, epochs=5).lr_at(round=3)
    (80, 0.1)
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    optimizer: Literal["sgd", "adam"] = Field("sgd", description="sgd, or adam (chen2022 table 6)")
    lr: float = Field(gt=0, description="learning rate in the first round")
    momentum: float = Field(0.0, ge=0, lt=1, description="of sgd")
    nesterov: bool = Field(False, description="Nesterov's momentum (sgd)")
    betas: tuple[float, float] = Field((0.9, 0.999), description="decay rates of adam's two moments")
    eps: float = Field(1e-8, gt=0, description="adam's epsilon")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty, added to the gradient")
    epochs: Positive | None = Field(
        None, description="passes over the client's data a round (1 unless steps is set)"
    )
    steps: Positive | None = Field(None, description="a fixed number of steps instead of epochs")
    examples: Positive | None = Field(
        None, description="FedVC's N_VC: a client trains on so many of its examples, drawn anew each round"
    )
    batch_size: Positive | Literal["all"] = Field(32, description="examples a step; 'all' is one full batch")
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor on the learning rate ...")
    lr_decay_every: Positive = Field(1, description="... every so many rounds")
    clip_norm: float | None = Field(None, gt=0, description="largest norm of a step's gradient")
    stragglers: float = Field(
        0.0, ge=0, le=1, description="share of a cohort that does partial work (FedProx)"
    )

    @model_validator(mode="after")
    def _check(self) -> LocalSettings:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("epochs and steps are both set; give one of them")
        if self.nesterov and (self.momentum == 0 or self.optimizer != "sgd"):
            raise ValueError("nesterov needs optimizer = 'sgd' and a momentum above 0")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError("momentum belongs to optimizer = 'sgd'; adam has betas")
        if self.optimizer == "sgd" and {"betas", "eps"} & self.model_fields_set:
            fields = type(self).model_fields
            if (self.betas, self.eps) != (fields["betas"].default, fields["eps"].default):
                raise ValueError("betas and eps belong to optimizer = 'adam'; sgd has momentum")
        if self.lr_decay == 1 and self.lr_decay_every != 1:
            raise ValueError("lr_decay_every does nothing as long as lr_decay is 1")
        if self.examples and self.batch_size != "all" and self.examples % self.batch_size:
            raise ValueError(
                f"examples ({self.examples}) has to be a multiple of batch_size ({self.batch_size}): "
                "a virtual client takes exactly examples / batch_size steps an epoch"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError("betas have to be at least 0 and below 1")
        if self.stragglers and self.work == 1:
            raise ValueError(
                "stragglers run fewer epochs than the others, so epochs (or steps) has to be above 1"
            )
        return self

    @property
    def work(self) -> int:
        """Epochs, or steps where those are set: what a straggler does less of."""
        return self.steps or self.epochs or 1

    def batch(self, examples: int) -> int:
        """The batch size at a client of this many examples."""
        return examples if self.batch_size == "all" else min(self.batch_size, examples)

    @property
    def plain_steps(self) -> bool:
        """Whether a step is w <- w - lr g and nothing else."""
        return (
            self.optimizer == "sgd" and not self.momentum and not self.weight_decay and self.clip_norm is None
        )

    def steps_at(self, examples: int, work: int | None = None) -> int:
        """The number of steps at a client of this many examples that does `work` epochs or steps."""
        work = self.work if work is None else work
        return work if self.steps else work * -(-examples // max(1, self.batch(examples)))

    def lr_at(self, round: int) -> float:
        """The learning rate of a round, the first being 1."""
        return float(self.lr * self.lr_decay ** ((round - 1) // self.lr_decay_every))
