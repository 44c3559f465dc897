"""Notices a run that diverges while it goes on: since when, which clients stood out, and what to try.

| kind | when |
|---|---|
| `loss-not-finite` | a loss is NaN or infinite |
| `loss-jump` | a loss is a hundred times its earlier level in three measured rounds in a row |
| `accuracy-at-chance` | the accuracy is at chance for a third of the run, and for three rounds at least |
| `nothing-learned` | after three rounds or more, the last mAP or mean IoU is that of a model without skill |
| `collapse` | embeddings of a self-supervised task have lost their spread for a quarter of the run, and three rounds |
| `replies-beyond-bound` | the bound on norms rejected every reply of a round (`fedlens.core.norm_bounds`) |
| `replies-not-finite` | at least half of a round's clients sent NaN or infinite values |

Each kind is reported once. A warning is a dictionary: `kind`, `metric`, `since` and `until` (the first and the last
affected round), `sentence`, `clients` (those with the largest update and the largest local loss, or those that sent
values which are not finite, by name) and `try`. In a round in which at least half of
the clients sent such values, none of the others is named for the size of its update. So many of these rounds in a row
as `divergence.patience` says end the run.

The earlier level of a loss on held-out data is its lowest value. That of the local loss is the median of the last
hundred rounds, because each round has other clients. A level below a thousandth of the first value counts as that.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from fedlens.base.errors import RunFailed
from fedlens.core.driver import Tally
from fedlens.core.schema import beyond_bound
from fedlens.core.types import ClientId
from fedlens.observers.chance import Chance, chance_levels, nothing_learned
from fedlens.run.build import Built
from fedlens.run.failed_round import TYPICAL_LR, NotFiniteReplies

COLLAPSE = "collapse"  # the kind of warning after which a run ends
NOT_FINITE = "replies-not-finite"
NOTHING_LEARNED = "nothing-learned"
JUMP = 100.0  # times the earlier level
STAYS = 3  # measured rounds in a row
SHARE = 1 / 3  # of the run's rounds
RECENT = 100  # rounds whose local losses are kept
LOSSES = ("test_loss", "validation_loss", "train_loss", "local_loss")
# Below these, all images have nearly the same embedding, or lie on a line.
# Personal models are measured on validation data alone.
SPREADS = {
    f"{split}_{metric}": least
    for split in ("test", "validation")
    for metric, least in (("embedding_deviation", 0.05), ("embedding_rank", 2.0))
}
_DEAD = 0.25  # of the run's rounds
_GROWN = 1.2  # times the first value of a streak: the embeddings are spreading again
ACCURACIES = ("test_accuracy", "validation_accuracy")
_FAR = 100.0  # times the median of the round: an update that is not that of a usual client
_CALM = 10.0  # times the median of earlier rounds: a median beyond is that of a round in which all diverge
_NOTABLE = 2.0  # times: from here on the ratio is worth mentioning

Warned = dict[str, Any]
State = Mapping[str, Any]


@dataclass(frozen=True)
class Extremes:
    """The clients of a round whose replies stood out.

    Args:
        update: name and norm of the update furthest above the median norm of its exchange, and how many times that is.
        loss: name and mean loss of the client with the largest local loss.
    """

    update: tuple[str, float, float] | None = None
    loss: tuple[str, float] | None = None

    @classmethod
    def of(cls, tally: Tally, name: Callable[[ClientId], str]) -> Extremes:
        """Those among the replies of a tally."""
        by_exchange: dict[int, list[tuple[float, ClientId]]] = defaultdict(list)
        for client, exchange, norm in tally.norms:
            by_exchange[exchange].append((norm, client))
        largest = [
            (max(norms, key=itemgetter(0)), statistics.median(map(itemgetter(0), norms)))
            for norms in by_exchange.values()
        ]
        update = max(
            ((norm / median, norm, client) for (norm, client), median in largest),
            key=itemgetter(0, 1),
            default=None,
        )
        losses = [
            (row["loss"] / row["examples"], row["client"])
            for row in tally.per_client
            if "loss" in row and row.get("examples")
        ]
        loss = max(losses, key=itemgetter(0), default=None)
        return cls(
            None if update is None else (name(update[2]), update[1], update[0]),
            None if loss is None else (name(loss[1]), loss[0]),
        )


class Divergence:
    """Follows the lines of a run. The same lines and replies give the same warnings.

    Args:
        rounds: of the whole run.
        lr: the local learning rate, and
        clip_norm: the bound of gradients, or None, for what to try.
        chance: by the name of an accuracy, what chance is; accuracies without an entry are not looked at.
        collapse_advice: that of the task; None if there are no embeddings whose spread to look at.
        patience: rounds in a row with `replies-not-finite`, after which `refuse` ends the run; 0 for never.
        mask_classes: the number of classes of the masks, if there are masks.
        state: `state` of a run's Divergence at an earlier round, to go on from.

    >>> watch = Divergence(rounds=10, lr=0.5)
    >>> for round, loss in enumerate([2.3, 900.0, 800.0, 950.0]):
    ...     warned = watch.after({"round": round, "test_loss": loss}, Extremes(update=("mainz", 7.0, 3.5)))
    >>> [(w["kind"], w["since"], w["clients"][0]["client"]) for w in warned]
    [('loss-jump', 1, 'mainz')]
    """

    def __init__(
        self,
        rounds: int,
        lr: float,
        clip_norm: float | None = None,
        chance: Mapping[str, Chance] | None = None,
        state: State | None = None,
        collapse_advice: str | None = None,
        patience: int = 0,
        mask_classes: int = 0,
    ) -> None:
        self._mask_classes = mask_classes
        self._spreads = {} if collapse_advice is None else SPREADS
        self._collapse_advice, self._patience = collapse_advice, patience
        self._rounds, self._lr, self._clip_norm, self._chance = rounds, lr, clip_norm, chance or {}
        # Replaced, never changed in place: a checkpoint may hold it while the run goes on.
        self.state: State = state or {
            "levels": {}, "streaks": {}, "learned": 0, "extremes": {}, "medians": [], "warnings": []
        }  # fmt: skip

    @property
    def warnings(self) -> list[Warned]:
        """The warnings so far."""
        return [dict(warning) for warning in self.state["warnings"]]

    def after(
        self,
        line: Mapping[str, Any],
        extremes: Extremes,
        rejected: str | None = None,
        not_finite: NotFiniteReplies | None = None,
    ) -> list[Warned]:
        """Takes a round's line of metrics.jsonl and its extreme replies; returns the warnings that are new.

        Args:
            line: the line.
            extremes: the clients whose replies stood out.
            rejected: see `rejected_by_bound`.
            not_finite: the clients that sent values which are not finite.
        """
        round = line["round"]
        before = len(self.state["warnings"])
        if self._not_finite(round, not_finite or NotFiniteReplies()):
            extremes = Extremes()
        self._set(extremes=_more_extreme(self.state["extremes"], round, extremes, self._growth(extremes)))
        if rejected is not None:
            self._warn("replies-beyond-bound", "update_norm", round, round, rejected, {})
        for metric in LOSSES:
            if line.get(metric) is not None:
                self._loss(round, metric, line[metric])
        for metric in ACCURACIES:
            if metric in self._chance and line.get(metric) is not None:
                self._accuracy(line, metric)
                break
        if round == self._rounds >= STAYS and (nothing := nothing_learned(line, self._mask_classes)):
            self._warn(NOTHING_LEARNED, nothing[0], round, round, nothing[1])
        for metric, least in self._spreads.items():
            if line.get(metric) is not None and round:
                self._spread(round, metric, line[metric], least)
        if any(line.get(metric) is not None for metric in (*LOSSES[:-1], *ACCURACIES)):
            self._set(extremes={})
        return self.warnings[before:]

    def refuse(self) -> None:
        """Raises `RunFailed` after so many rounds in a row with replies that are not finite as are allowed."""
        streak = self.state["streaks"].get(NOT_FINITE)
        if streak is None or not 0 < self._patience <= streak["times"]:
            return
        more = "in which at least half did"
        raise RunFailed(
            f"{streak['sentence']}; round {streak['until']} is number {streak['times']} in a row {more}",
            hint=f"{_lower(self._advice(NOT_FINITE, ())).rstrip('.')}; with divergence.patience = 0 such a run goes on",
        )

    def _not_finite(self, round: int, replies: NotFiniteReplies) -> bool:
        """Whether the replies of the round are not finite from many clients; counts such rounds in a row, and warns."""
        streaks = self.state["streaks"]
        if not replies.many:
            self._set(streaks={k: v for k, v in streaks.items() if k != NOT_FINITE})
            return False
        times = streaks.get(NOT_FINITE, {"times": 0})["times"] + 1
        streak = {"until": round, "times": times, "sentence": str(replies)}
        self._set(streaks={**streaks, NOT_FINITE: streak})
        clients = [{"client": client, "round": round, "not_finite": True} for client in replies.clients]
        sentence = (
            f"In round {round}, {replies}. Their updates are rejected, the model follows the others alone."
        )
        self._warn(NOT_FINITE, "local_loss", round, round, sentence, clients=clients)
        return True

    def _growth(self, now: Extremes) -> float | None:
        """The median update norm of this round, as a multiple of earlier rounds' median, which then includes it.

        None without an earlier round, and while a loss is already far beyond its level.
        """
        if now.update is None or any(metric in self.state["streaks"] for metric in LOSSES):
            return None
        _, norm, times = now.update
        median, earlier = norm / times, self.state.get("medians", [])
        if not 0 < median < math.inf:
            return None
        self._set(medians=[*earlier, median][-RECENT:])
        return median / statistics.median(earlier) if earlier else None

    def _loss(self, round: int, metric: str, loss: float) -> None:
        name = metric.replace("_", " ")
        if not math.isfinite(loss):
            if round:  # an untrained model may well have no loss
                sentence = f"The {name} of round {round} is not finite."
                self._warn("loss-not-finite", metric, round, round, sentence, self.state["extremes"])
            return
        levels, streaks = self.state["levels"], self.state["streaks"]
        level = _level(metric, levels[metric]) if metric in levels else math.inf
        if level <= 0 or loss < JUMP * level:
            self._set(
                levels={**levels, metric: _with(levels.get(metric), loss)},
                streaks={k: v for k, v in streaks.items() if k != metric},
            )
            return
        streak = streaks.get(metric) or {"since": round, "times": 0, "extremes": self.state["extremes"]}
        streak = {**streak, "times": streak["times"] + 1}
        self._set(streaks={**streaks, metric: streak})
        if streak["times"] >= STAYS:
            earlier = "median of the rounds before" if metric == "local_loss" else "lowest value before"
            sentence = (
                f"The {name} has been more than {JUMP:g} times the {earlier} ({level:.3g}) since round "
                f"{streak['since']}: it is {loss:.3g} in round {round}."
            )
            self._warn("loss-jump", metric, streak["since"], round, sentence, streak["extremes"])

    def _accuracy(self, line: Mapping[str, Any], metric: str) -> None:
        round, accuracy, streaks = line["round"], line[metric], self.state["streaks"]
        if round == 0:
            return
        if not self._chance[metric].has(accuracy):
            self._set(learned=round, streaks={k: v for k, v in streaks.items() if k != metric})
            return
        streak = streaks.get(metric) or {
            "since": self.state["learned"] + 1, "extremes": self.state["extremes"]
        }  # fmt: skip
        self._set(streaks={**streaks, metric: streak})
        if round + 1 - streak["since"] >= max(STAYS, SHARE * self._rounds):
            name, classes = metric.replace("_", " "), self._chance[metric].classes
            sentence = (
                f"The {name} has been at chance since round {streak['since']}: it is {accuracy:.3f} with "
                f"{classes} classes in round {round}, as of a model that has learned nothing."
            )
            self._warn("accuracy-at-chance", metric, streak["since"], round, sentence, streak["extremes"])

    def _spread(self, round: int, metric: str, value: float, least: float) -> None:
        streaks = self.state["streaks"]
        streak = streaks.get(metric)
        if not value < least or (streak and value > _GROWN * streak["first"]):
            self._set(streaks={k: v for k, v in streaks.items() if k != metric})
            return
        streak = streak or {"since": round, "first": value, "times": 0}
        streak = {**streak, "times": streak["times"] + 1}
        self._set(streaks={**streaks, metric: streak})
        if streak["times"] >= STAYS and round + 1 - streak["since"] >= _DEAD * self._rounds:
            name = metric.partition("_")[2].replace("_", " ")
            sentence = (
                f"The embeddings have collapsed: the {name} has been below {least:g} since round "
                f"{streak['since']}, and is {value:.3g} in round {round}. Nothing more is learned."
            )
            self._warn(COLLAPSE, metric, streak["since"], round, sentence, {})

    def _warn(
        self,
        kind: str,
        metric: str,
        since: int,
        until: int,
        sentence: str,
        extremes: Mapping[str, Any] | None = None,
        clients: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """A new warning, or a longer one where there is one of the kind."""
        warnings = list(self.state["warnings"])
        for k, warning in enumerate(warnings):
            if warning["kind"] == kind:
                warnings[k] = {**warning, "until": max(until, warning["until"])}
                self._set(warnings=warnings)
                return
        extreme = [extremes[name] for name in ("update", "loss") if name in extremes] if extremes else []
        warning = {
            "kind": kind,
            "metric": metric,
            "since": since,
            "until": until,
            "sentence": " ".join([sentence, *_named(extreme)]),
            "clients": [*clients, *extreme],
            "try": self._advice(kind, extreme),
        }
        self._set(warnings=[*warnings, warning])

    def _advice(self, kind: str, clients: Sequence[Mapping[str, Any]]) -> str:
        # A tenth of a rate above 1 is usually too much still.
        smaller = f"local.lr = {TYPICAL_LR:g}" if self._lr > 1 else f"local.lr = {self._lr / 10:g} (a tenth)"
        clip = "set local.clip_norm" if self._clip_norm is None else "lower local.clip_norm"
        first = clients[0] if clients else {}
        if kind == COLLAPSE:
            return f"Try {smaller}, {self._collapse_advice}."
        if kind == NOTHING_LEARNED:
            return "Train longer (more rounds, or more local.epochs), or try another local.lr."
        if kind == "replies-beyond-bound":
            return f"If the loss rises from there on, try {smaller}, or {clip}."
        if first.get("times_median", 0.0) >= _FAR:
            if first.get("median_times_earlier", math.inf) <= _CALM:
                return f"Check the data of client '{first['client']}'; then try {smaller}, or {clip}."
            # The others diverge too, or there is no round to compare them with.
            return (
                f"Try {smaller}, or {clip}; if client '{first['client']}' still stands out, check its data."
            )
        if kind == "accuracy-at-chance" and self._lr <= 1:
            return f"Try {smaller}; if the loss then falls too slowly, local.lr = {self._lr * 10:g}."
        return f"Try {smaller}, or {clip}."

    def _set(self, **changes: Any) -> None:
        self.state = {**self.state, **changes}


def divergence_of(built: Built) -> Divergence:
    """The Divergence of a run at its start."""
    local = built.config.local
    chance = chance_levels(built.client_data)
    return Divergence(
        built.config.rounds,
        local.lr,
        local.clip_norm,
        chance,
        None,
        built.task.collapse_advice,
        built.config.divergence.patience,
        len(built.client_data.dataset.classes) if built.client_data.dataset.kind == "segmentation" else 0,
    )


def text_of(warning: Mapping[str, Any]) -> str:
    """What happened and what to try, for the user."""
    return f"{warning['sentence']} {warning['try']}"


def _more_extreme(
    before: Mapping[str, Any], round: int, now: Extremes, growth: float | None
) -> dict[str, Any]:
    """The update and the local loss that stood out the most: those before, or those of this round."""
    new = dict(before)
    if now.update is not None:
        client, norm, times = now.update
        if times > new.get("update", {}).get("times_median", -1.0):
            new["update"] = {"client": client, "round": round, "update_norm": norm, "times_median": times}
            if growth is not None:
                new["update"]["median_times_earlier"] = growth
    if now.loss is not None:
        client, loss = now.loss
        if loss > new.get("loss", {}).get("local_loss", -math.inf):
            new["loss"] = {"client": client, "round": round, "local_loss": loss}
    return new


def _with(level: Mapping[str, Any] | None, loss: float) -> dict[str, Any]:
    """What is kept of a loss, with one more value."""
    if level is None:
        return {"first": loss, "lowest": loss, "recent": [loss]}
    recent = [*level["recent"], loss][-RECENT:]
    return {"first": level["first"], "lowest": min(level["lowest"], loss), "recent": recent}


def _level(metric: str, level: Mapping[str, Any]) -> float:
    earlier = statistics.median(level["recent"]) if metric == "local_loss" else level["lowest"]
    return max(float(earlier), float(level["first"]) / 1000)


def _named(clients: Sequence[Mapping[str, Any]]) -> list[str]:
    """The clients that stood out, as sentences."""
    told = []
    for one in clients:
        if "update_norm" in one:
            times = one["times_median"]
            ratio = f"{times:.2g}" if times < 1e4 else f"10^{math.floor(math.log10(times))}"
            ratio = f", {ratio} times the median of that round" if times >= _NOTABLE else ""
            what = f"largest update: client '{one['client']}' in round {one['round']}"
            told.append(f"{what} (norm {one['update_norm']:.3g}{ratio})")
        else:
            what = f"largest local loss: client '{one['client']}' in round {one['round']}"
            told.append(f"{what} ({one['local_loss']:.3g})")
    text = "; ".join(told)
    return [f"{text[0].upper()}{text[1:]}."] if text else []


def rejected_by_bound(round: int, tally: Tally, name: Callable[[ClientId], str]) -> str | None:
    """The sentence on a round in which the bound on norms rejected every reply; None for other rounds."""
    if not tally.unbounded:
        return None
    beyond = [
        (client, reason, times)
        for client, reasons in tally.failures.items()
        for reason, times in reasons.items()
        if beyond_bound(reason)
    ]
    client, reason, _ = beyond[0]
    replies = sum(times for _, _, times in beyond)
    ops = " and ".join(f"'{op}'" for op in tally.unbounded)
    model = "" if tally.clients else "The model is unchanged in that round. "
    return (
        f"In round {round} the norm bound rejected every reply to {ops}: {replies:,} in all, the first from client "
        f"'{name(client)}' ({reason}). {model}The scale of the replies has changed, so the bound starts anew and the "
        "next replies are accepted."
    )


def refuse_collapsed(warned: Sequence[Mapping[str, Any]]) -> None:
    """Raises `RunFailed` if one of the warnings is that the embeddings have collapsed: the run would be in vain."""
    for warning in warned:
        if warning["kind"] == COLLAPSE:
            raise RunFailed(warning["sentence"].rstrip("."), hint=_lower(warning["try"]).rstrip("."))


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]
