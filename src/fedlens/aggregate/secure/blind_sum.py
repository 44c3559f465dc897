"""What aggregates have in common whose server sees one sum over the clients, and no single reply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import Field

from fedlens.aggregate.mean import Aggregate, AggregateContext, Mean, Weighting
from fedlens.aggregate.secure.encoded_train import EncodedTrain
from fedlens.aggregate.secure.encoding import LOSS, SumLayout
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import Answer, Ask, FederationInfo, Op, Request
from fedlens.core.reduction import How, Refusal, Update
from fedlens.core.tree import part

_Range = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bits = Annotated[
    int, Field(ge=1, le=46, description="fractional bits of a word: a value is rounded to range / 2^bits")
]
Ranges = Annotated[
    _Range | dict[str, _Range],
    Field(
        description="the largest magnitude of a value: one number, or one for each field. update (1.0), buffers "
        "(1024), loss (64), tau (that of the most local steps), and each field that a client rule adds, which has no "
        "default. A value beyond it fails its client"
    ),
]
RANGES: Mapping[str, float] = {"update": 1.0, "buffers": 1024.0, LOSS: 64.0}
_STEPS = "num_batches_tracked"  # a counter of batch normalization: one more in every local step


@dataclass(frozen=True)
class BlindSum(Aggregate):
    """Base class of aggregates whose server computes with the sum of the clients' vectors alone.

    Weighted means divide the sum by the sum of the weights. Counters of batch normalization grow by the largest number
    of local steps, which the server computes from the public sizes, since no sum gives a maximum. `local_loss` is the
    mean of the clients' losses, weighted as their updates; `examples` and `batches_max` follow from the public sizes.

    Attributes:
        of: the aggregate that is computed, `Mean` or `Normalized`; one that declares `linear`.
        bits: see `SumLayout`.
        ranges: that of every field, or of each by name, in place of its default.
        layout: of the vectors, once `fitted` has made it.
        local: the settings of local training, likewise.
    """

    blind: ClassVar[bool] = True
    of: Aggregate = field(default_factory=Mean)
    bits: int = 16
    ranges: float | Mapping[str, float] = field(default_factory=lambda: dict(RANGES))
    layout: SumLayout | None = None
    local: Any = None

    def __post_init__(self) -> None:
        if not self.of.linear:
            raise ConfigError(
                f"the aggregate {type(self.of).__name__} needs single replies, and with {type(self).__name__} the "
                "server sees their sum alone",
                where="aggregate.of",
                hint="take aggregate.of = 'mean' or 'normalized'",
            )

    @property
    def weighting(self) -> Weighting:
        """That of the aggregate that is computed."""
        return self.of.weighting

    @property
    def normalized(self) -> bool:
        """Whether the aggregate that is computed needs normalized updates."""
        return self.of.normalized

    @property
    def ops(self) -> Mapping[str, Callable[[Any], Op]]:
        """Local training that sends vectors, in place of plain training."""
        return {"train": lambda train: EncodedTrain(train, self.vectors)}

    @property
    def vectors(self) -> SumLayout:
        """The layout of the vectors. Raises `AssertionError` before `fitted`."""
        assert self.layout is not None
        return self.layout

    def fitted(self, train: Any, cohort: int, federation: FederationInfo) -> Self:
        """The same with the layout of this training's replies.

        Raises `ConfigError` if the sum of a cohort may overflow, if a field has no range or a range no field, and for
        counters that do not count local steps.
        """
        spec, local = train.model.leaves, train.settings
        expect = train.expect(spec, most=federation.largest)
        counters = [name for name in part(spec, "counter") if name not in train.personal]
        other = next((n for n in counters if n.split(".")[-1] != _STEPS or train.task.views > 1), None)
        if other is not None:
            raise ConfigError(
                f"the server has to know the counter '{other}' of the model without the clients, and only those of "
                "batch normalization that count each local step once follow from the public sizes",
                where="model",
                hint="take a model without it, such as model.norm = 'group', or aggregate.name = 'mean'",
            )
        fields: dict[str, How] = {**train.rule.fields, **({"tau": "mean"} if self.normalized else {})}
        most = local.steps_at(local.examples or federation.largest) / (1 - local.momentum)
        layout = SumLayout(
            expect,
            fields,
            self._ranges(fields, max(1.0, most)),
            self.bits,
            cohort,
            not train.rule.traits.hides_loss,
        )
        return replace(self, layout=layout, local=local)

    def _ranges(self, fields: Mapping[str, How], steps: float) -> dict[str, float]:
        """The range of each field. The default of `tau` is the norm of the most local steps."""
        names = [*RANGES, *fields]
        if not isinstance(self.ranges, Mapping):
            return {"tau": steps, **{name: self.ranges for name in names if name != "tau"}}
        ranges = {**RANGES, "tau": steps, **self.ranges}
        unknown = next((name for name in self.ranges if name not in names), None)
        if unknown is not None:
            raise ConfigError(
                f"aggregate.range names '{unknown}', and clients send no such field",
                where=f"aggregate.range.{unknown}",
                hint=f"the fields are {', '.join(names)}",
            )
        missing = next((name for name in names if name not in ranges), None)
        if missing is not None:
            raise ConfigError(
                f"clients also send the field '{missing}', and aggregate.range does not say how large it may be",
                where="aggregate.range",
                hint=f"set aggregate.range.{missing}, such as 1.0; a client with a larger value fails",
            )
        return ranges

    def opened(
        self, total: np.ndarray, requests: Sequence[Request], ask: Ask, ctx: AggregateContext
    ) -> Update | Refusal | None:
        """The update that the sum of these clients' vectors gives; None without a client.

        It adds `loss`, `examples` and `batches` to `ctx.metrics`, and `batches_max`. Returns a `Refusal` if the words
        cannot be such a sum.

        Args:
            total: unsigned [words], the sum.
            requests: those whose vectors are in it.
            ask: for local training, as `exchange` received it.
        """
        if not requests:
            return None
        fault = self.vectors.fault(total, len(requests))
        if fault is not None:
            return Refusal(fault)
        update, loss = self.vectors.decode(total, len(requests))
        work = [self._work(request, ctx.federation) for request in requests]
        batches, examples = [steps for steps, _ in work], sum(examples for _, examples in work)
        if loss is not None:
            ctx.metrics["loss"] = loss * examples
        ctx.metrics.update(examples=examples, batches=sum(batches), batches_max=max(batches))
        before = ask.shared["model"]
        counters = {name: before[name] + max(batches) for name in self.vectors.kinds["counters"].leaves}
        return self.of.summed(replace(update, counters=counters))

    def _work(self, request: Request, federation: FederationInfo) -> tuple[int, int]:
        """The local steps of a client, and the examples in their batches, from its public size."""
        held = self.local.examples or int(federation.sizes[request.client])
        steps = self.local.steps_at(held, request.payload.get("work"))
        return steps, self.local.examples_in(held, steps)

    def aggregate(
        self, answers: Iterable[Answer], fields: Mapping[str, How], ctx: AggregateContext
    ) -> Update | Refusal | None:
        """What `of` makes of plain replies, which a run never has: its replies are vectors."""
        return self.of.aggregate(answers, fields, ctx)
