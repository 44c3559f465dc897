"""The weighted mean of the replies, summed where the work ran."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

from fedlens.base.errors import FedlensError, HookError, told
from fedlens.base.registry import Entry, Registry
from fedlens.base.signatures import place_of
from fedlens.core.protocol import (
    Answer,
    Answers,
    Ask,
    Failure,
    FederationInfo,
    Op,
    Payload,
    Reduce,
    Reply,
    RoundContext,
)
from fedlens.core.reduction import REPLIES, How, Refusal, Update, add_reply
from fedlens.core.schema import Schema
from fedlens.core.tree import Tree

Weighting = Literal["examples", "uniform"]


@dataclass(frozen=True)
class AggregateContext(RoundContext):
    """The round, as an aggregate sees it.

    Attributes:
        state: the aggregate's state: that of `init` in the first round, then the last `Update.state`. Do not change it.
    """

    state: Payload = field(default_factory=dict)

    @classmethod
    def of(cls, ctx: RoundContext, state: Payload) -> AggregateContext:
        """The context of this round with this state."""
        return cls(**vars(ctx) | {"state": state})


class Aggregate(ABC):
    """Base class of aggregates: turns the replies of a round into one update.

    An aggregate that one function defines inherits from `fedlens.aggregate.custom.ByWeights` or `ByColumn`. Any
    other aggregate of one exchange defines `aggregate`, and `reduce` if partial sums suffice. An aggregate of several
    exchanges, for example norms before the updates or masks after them, overrides `exchange`.

    In all methods, `fields` are the fields that the client rule adds to the reply, and how each is aggregated. `ctx`
    has the round, and the aggregate's state.

    With the class attribute `follows_device = True`, an aggregate declares that it computes where the replies are and
    keeps none of them: replies may then stay on a GPU. Otherwise they are in CPU memory.

    With `asked_without_replies = True`, it declares that it makes an update of every round, also of one in which no
    client was asked or no reply was accepted, as a rule that adds noise for privacy must. Such a round is not skipped
    (`max_skipped`) and does not end the run.

    With `linear = True`, it declares that it needs no single reply, only the sums that `averaged` divides, so that a
    blind aggregate may compute them. With `blind = True`, the server sees one sum over the clients and no reply:
    replies have no metrics, and `exchange` adds the loss of the sum to `ctx.metrics`. With `once = True`, no client may
    be asked twice in a round.
    """

    asked_without_replies: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    blind: ClassVar[bool] = False
    once: ClassVar[bool] = False

    @property
    def weighting(self) -> Weighting:
        """The `weight` in a client's reply: its number of examples, or 1."""
        return "examples"

    @property
    def normalized(self) -> bool:
        """Whether clients divide their update by its number of steps (FedNova)."""
        return False

    @property
    def server_data(self) -> str | None:
        """The data of the server that `exchange` evaluates models on: "@validation" or "@test"; None for none."""
        return None

    @property
    def discloses(self) -> tuple[str, ...]:
        """What a reader of the run's report has to know, beyond model updates, as sentences."""
        return ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know before the first round, as sentences."""
        return ()

    @property
    def ops(self) -> Mapping[str, Callable[[Any], Op]]:
        """The operations that `exchange` asks for besides training, each made from the algorithm's `Train`."""
        return {}

    def takes(self, op: str, training: Schema, clients: int, rounds: int | None) -> Schema | None:
        """What a client may be asked by an operation of `exchange`; None if nothing. See `AlgorithmBase.takes`.

        Args:
            op: its name, "train" for local training.
            training: what plain local training takes.
            clients, rounds: how many there are; None if the number of rounds is not known.
        """
        return training if op == "train" else None

    def reduce(self, cohort: int, fields: Mapping[str, How]) -> Reduce | None:
        """How workers sum replies, for a cohort of this size; None sends every reply."""
        return None

    def fitted(self, train: Any, cohort: int, federation: FederationInfo) -> Aggregate:
        """A `blind` aggregate for this local training, the algorithm's `Train`, and for cohorts of at most this size.

        Raises `ConfigError` if they do not fit.
        """
        return self

    def summed(self, update: Update) -> Update:
        """The update of a `linear` aggregate, from the weighted means and the sums of all fields."""
        return update

    def init(self, weights: Tree, federation: FederationInfo) -> Payload:
        """The state before the first round, from the trainable weights; empty if the aggregate keeps none.

        The state is saved with the run's checkpoints. `Update.state` replaces it.
        """
        return {}

    @abstractmethod
    def aggregate(
        self, answers: Iterable[Answer], fields: Mapping[str, How], ctx: AggregateContext
    ) -> Update | Refusal | None:
        """Aggregates the answers to one ask into an update; None without an accepted reply.

        Returns a `Refusal` with the reason where the accepted replies do not allow an update, such as too few for a
        robust rule. The server state then stays as it was before the round.
        """

    def exchange(
        self, ask: Ask, fields: Mapping[str, How], ctx: AggregateContext
    ) -> Generator[Ask, Answers, Update | Refusal | None]:
        """Yields the asks of a round and returns what `aggregate` returns.

        Args:
            ask: local training of the cohort. It may be changed before it is yielded, and other asks may be yielded
                before and after it.
        """
        good = Counter[str]()
        answers = yield replace(ask, reduce=self.reduce(len(ask.requests), fields))
        refused: list[Failure] = []
        try:
            update = self.aggregate(_counted(answers, good, refused), fields, ctx)
        except Exception as error:
            if good["replies"] or not refused or isinstance(error, FedlensError):
                raise
            raise HookError(
                f"no reply was accepted so far ({refused[0].client}: {refused[0].reason}), and `aggregate` of "
                f"{type(self).__name__} raised {told(error)}",
                hint="mend the reason; in `aggregate`, skip each Failure, and return None if no reply is left",
            ) from error
        if update is None and good["replies"]:
            raise HookError(
                f"`aggregate` of {type(self).__name__} returned None, although these replies were accepted: "
                f"{good['replies']}",
                where=place_of(self.aggregate),
                hint="return an Update; to reject a reply, call its refuse(reason)",
            )
        return checked(self.aggregate, update)


def _counted(answers: Answers, good: Counter[str], refused: list[Failure]) -> Answers:
    """The answers; counts the replies that were not refused, and keeps the failures."""
    for answer in answers:
        if isinstance(answer, Failure):
            refused.append(answer)
        yield answer
        good["replies"] += isinstance(answer, Reply) and answer.refused is None
        del answer  # frees its tree before the next answer comes


def checked(method: Any, returned: Any) -> Update | Refusal | None:
    """What a method of an aggregate returned. Raises `HookError` if it is of another type."""
    if returned is not None and not isinstance(returned, Update | Refusal):
        raise HookError(
            f"`{method.__name__}` of {type(method.__self__).__name__} returned a {type(returned).__name__}",
            where=place_of(method),
            hint="return an Update, a Refusal with the reason, or None if no reply was accepted",
        )
    return returned


def reweighted(replies: Sequence[Reply], weights: Sequence[float]) -> list[Reply]:
    """The same replies with these weights."""
    return [
        replace(reply, payload={**reply.payload, "weight": weight})
        for reply, weight in zip(replies, weights, strict=True)
    ]


def reduced_fields(fields: Mapping[str, How], block: int = 1) -> Reduce:
    """How replies are reduced: update and buffers by weight, counters to the largest, and `fields` as they say."""
    hows: dict[str, Literal["sum", "plain", "max"]] = {"update": "sum", "buffers": "sum", "counters": "max"}
    hows |= {name: "sum" if how == "mean" else "plain" for name, how in fields.items()}
    return Reduce(hows, block=block)


def totals(answers: Iterable[Answer], fields: Mapping[str, How]) -> dict[str, Any]:
    """The sum of replies or reduced blocks; empty where no reply was good."""
    total: dict[str, Any] = {}
    how = reduced_fields(fields)
    for answer in answers:
        allocate = answer.allocate if isinstance(answer, Reply) else None
        if answer.reduced is not None:
            add_reply(total, how, answer.reduced, reduced=True, allocate=allocate)
        elif isinstance(answer, Reply) and "update" in answer.payload:
            add_reply(total, how, answer.payload, allocate=allocate)
        del answer  # otherwise its tree would stay in memory until the next reply arrives
    return total


def averaged(total: Mapping[str, Any], fields: Mapping[str, How]) -> Update | None:
    """What the totals come to: divided by the sum of the weights, but for plain sums. The totals are used up."""
    if not total:
        return None
    weight = total["weight"]

    def mean(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value / weight
        # In their own memory: a heavy model would otherwise be there once more.
        if floats := [v for v in value.values() if v.is_floating_point()]:
            torch._foreach_div_(floats, weight)
        return {n: v if v.is_floating_point() else v / weight for n, v in value.items()}

    more = {name: mean(total[name]) if how == "mean" else total[name] for name, how in fields.items()}
    update = mean(total["update"])
    return Update(
        update,
        mean(total["buffers"]),
        total["counters"],
        more,
        total[REPLIES],
        weight,
        donated=update,
    )


@dataclass(frozen=True)
class Mean(Aggregate):
    """sum_k n_k Delta_k / sum_k n_k over the accepted replies (Hsu et al. 2019, section 4.2); n_k = 1 if uniform.

    Running statistics get the same mean, counters the largest value. The additions form a tree that depends on
    the size of the cohort alone, so that every engine gets the same bits.

    >>> import torch
    >>> from fedlens.core.protocol import Id
    >>> def reply(slot, weight, value):
    ...     trees = {"update": {"w": torch.tensor([value])}, "buffers": {}, "counters": {}}
    ...     return Reply(Id(1, 0, slot), slot, {**trees, "weight": weight})
    >>> Mean().aggregate([reply(0, 1.0, 4.0), reply(1, 3.0, 8.0)]).update
    {'w': tensor([7.])}
    """

    follows_device: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    weighting: Weighting = "examples"

    def reduce(self, cohort: int, fields: Mapping[str, How] | None = None) -> Reduce | None:
        """Single replies below 64 clients; then blocks of two, from 96 on blocks of three, and so on.

        So 32 workers always have enough blocks, and a thousand small replies are not sent one by one.
        """
        return reduced_fields(fields or {}, block=cohort // 32) if cohort >= 64 else None

    def aggregate(
        self,
        answers: Iterable[Answer],
        fields: Mapping[str, How] | None = None,
        ctx: AggregateContext | None = None,
    ) -> Update | None:
        """Sums replies or reduced blocks, and divides by the sum of the weights."""
        return averaged(totals(answers, fields or {}), fields or {})


def mean(
    *,
    weighting: Annotated[
        Weighting, Field(description="weight of a client: its number of examples, or the same for all")
    ] = "examples",
) -> Mean:
    """The weighted mean of the clients' updates."""
    return Mean(weighting)


AGGREGATES = Registry(
    "aggregate",
    {
        "mean": Entry("fedlens.aggregate.mean:mean", "weighted mean, by examples or uniform"),
        "normalized": Entry(
            "fedlens.aggregate.normalized:normalized",
            "FedNova's: updates normalized by their number of steps",
        ),
        "quantized": Entry(
            "fedlens.aggregate.secure.quantized:quantized",
            "mean or normalized, from one sum of quantized replies, as a secure sum gives it",
        ),
        "secagg": Entry(
            "fedlens.aggregate.secure.secagg:secagg",
            "mean or normalized, from a sum of which the server sees no part (Bonawitz et al. 2017)",
        ),
        "secagg-plus": Entry(
            "fedlens.aggregate.secure.secagg_plus:secagg_plus",
            "the same for 200 clients a round or more, each with a few neighbours (Bell et al. 2020)",
        ),
        "lightsecagg": Entry(
            "fedlens.aggregate.secure.lightsecagg:lightsecagg",
            "the same with masks that survivors remove at once, whoever left; simulation only (So et al. 2022)",
        ),
        "turbo-aggregate": Entry(
            "fedlens.aggregate.secure.turbo_aggregate:turbo_aggregate",
            "the same in a circle of groups, for 15 clients a round or more; simulation only (So et al. 2021)",
        ),
        "optimal-convex": Entry(
            "fedlens.aggregate.optimal_convex:optimal_convex",
            "weights that score best on the server's data (Chen et al. 2022, Eq. 5)",
        ),
    },
)
