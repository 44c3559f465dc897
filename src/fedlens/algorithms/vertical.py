"""Vertical learning: parties with other features of the same examples train one network (He et al. 2021, section 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from safetensors.torch import save
from torch import Tensor

from fedlens.algorithms.averaging import Parts
from fedlens.algorithms.party_alignment import aligned
from fedlens.algorithms.registry import refuse_unused
from fedlens.algorithms.splitfed import refuse_unfit
from fedlens.base.errors import ConfigError, RunFailed
from fedlens.core.algorithm_base import AlgorithmBase, OwnCurve
from fedlens.core.dataset_info import PartyFacts
from fedlens.core.measured import Measured
from fedlens.core.protocol import (
    Ask,
    Evaluation,
    FederationInfo,
    Metrics,
    ModelSpec,
    Op,
    Reply,
    Request,
    Round,
    RoundContext,
    State,
    Steps,
)
from fedlens.core.random import derive
from fedlens.core.schema import MEASUREMENTS, Schema, TensorField, TreeField
from fedlens.core.tree import Tree, tree_of
from fedlens.local.halves import Half
from fedlens.local.party_steps import Bottoms, Embed, Label, Measuring
from fedlens.local.set_intersection import Align, require_x25519
from fedlens.models.party_network import InDtype, Join, Top, WithoutBias, party_network
from fedlens.models.prepare import Preparation
from fedlens.tasks.central_evaluation import task_metrics

MASK_SECONDS = 27e-6  # of one mask, and its share of hashing ids to the curve


@dataclass(frozen=True)
class Vertical(AlgorithmBase):
    """Aligns the parties once, then trains bottoms and top step by step.

    Its state: `model`, the leaves of all bottoms and of the top as the parties showed them after the round; `means`,
    each party's mean embedding; `shared`, the number of common examples, 0 until they are known; and how many batches
    were `skipped` and backward passes `missed` so far.
    """

    parts: Parts
    facts: PartyFacts
    parties: tuple[int, ...]
    join: Join
    width: int
    hidden: tuple[int, ...]
    asks_each_step = True
    sends_single_examples = True
    tested_model = "the network of all parties"

    @cached_property
    def halves(self) -> dict[int, Half]:
        """The bottom of each party. Made when it is used: settings are also checked without the real model."""
        model = self.parts.model
        return {
            k: Half(
                "bottom",
                replace(
                    model,
                    input_shape=self.facts.shapes[k],
                    classes=self.width,
                    seed=derive(model.seed, "party", k),
                    wrapper=WithoutBias(),
                    fixed={},
                ),
                self.parts.local,
            )
            for k in self.parties
        }

    @cached_property
    def top(self) -> Half:
        """The network of the label party on all embeddings."""
        bottom = self.halves[self.facts.labels_at].model.leaves
        settings = {"join": self.join, "hidden": list(self.hidden)}
        shape, seed = (len(self.parties), self.width), derive(self.parts.model.seed, "top")
        dtype = next(iter(bottom.values())).dtype
        model = ModelSpec(Top, "top", settings, shape, self.parts.model.classes, seed, wrapper=InDtype(dtype))
        return Half("top", model, self.parts.local)

    @property
    def others(self) -> tuple[int, ...]:
        """The parties without labels."""
        return tuple(k for k in self.parties if k != self.facts.labels_at)

    @cached_property
    def ops(self) -> Mapping[str, Op]:
        """Those of the intersection, of a step, and of measuring."""
        at, task, bottoms = self.facts.labels_at, self.parts.task, Bottoms(self.halves)
        align = Align(at, self.others, self.facts.align == "psi" and bool(self.others))
        measuring = Measuring(bottoms, self.top, self.parties, at, task, self.parts.evaluation_batch)
        return {
            "mask": align.mask,
            "remask": align.remask,
            "match": align.match,
            "keep": align.keep,
            "embed": Embed(bottoms, at),
            "label": Label(bottoms, self.top, self.parties, task),
            "show": measuring.show,
            "embed-held": measuring.embed_held,
            "measure": measuring.measure,
        }

    @property
    def discloses(self) -> tuple[str, ...]:
        """What leaves the parties."""
        if not self.others:
            return ("To save the model, the label party shows it, which counts no bytes.",)
        lists = (
            "Private set intersection tells each party how many examples the others have, the label party which of its "
            "examples each other party has, and all parties which of theirs all have. A party can try ids that it "
            "guesses by adding them to its list, and all have to follow the protocol."
            if self.facts.align == "psi"
            else "The label party gets the ids of all parties as hashes, which can be compared with guesses, and all "
            "parties learn which of theirs all have."
        )
        return (
            lists,
            "In every step each party sends the embeddings of a batch to the label party, which can learn of its "
            "features from them, and gets gradients, from which labels can be guessed.",
            "To test and to save the model, all parties show their part of it and the embeddings of the test examples, "
            "which counts no bytes.",
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """How long private set intersection takes."""
        if self.facts.align != "psi" or not self.others:
            return ()
        sizes = self.parts.federation.sizes
        labels = int(sizes[self.facts.labels_at])
        masks = labels + sum(2 * int(sizes[k]) + labels for k in self.others)
        return (
            f"private set intersection takes about {masks * MASK_SECONDS:,.1f} s of one core, once in the run",
        )

    @property
    def curves(self) -> tuple[OwnCurve, ...]:
        """What each party is worth at prediction, and what was lost in training."""
        without = {f"without.{k}": f"without party {self.facts.names[k]}" for k in self.parties}
        lost = {"batches_skipped": "batches skipped", "steps_missed": "steps that a bottom missed"}
        return (
            OwnCurve(self.score, "one party missing, its embedding being its mean over training", without),
            OwnCurve("count", "what missing parties cost, since the first round", lost),
        )

    @property
    def score(self) -> str:
        """The metric that missing parties are shown by."""
        return self.parts.task.score or "loss"

    @property
    def evaluation_asks(self) -> int:
        """For the test examples, and validation examples if there are any, the embeddings and their measures."""
        return 2 * len(self.parts.measure)

    @property
    def no_local_models(self) -> str:
        """Why replies hold no local models."""
        return "each party has a part of the model"

    def clients_per_round(self, federation: FederationInfo) -> int:
        """All that take part."""
        return len(self.parties)

    def candidates(self, federation: FederationInfo) -> list[int]:
        """The parties that take part."""
        return list(self.parties)

    def init(self, model: ModelSpec, federation: FederationInfo) -> State:
        """The initial weights, which each party draws itself too."""
        trees = {k: {"bottom": tree_of(half.model.build())} for k, half in self.halves.items()}
        trees[self.facts.labels_at]["top"] = tree_of(self.top.model.build())
        whole = {name: value for k, shown in trees.items() for name, value in self._named(k, shown).items()}
        return {"model": whole, "means": {}, "shared": 0, "skipped": 0, "missed": 0}

    def round(self, state: State, ctx: RoundContext) -> Round:
        """The steps of a round. A batch that a party misses is skipped by all of them."""
        shared = state["shared"] or (
            yield from aligned(self.facts, self.parties, self.parts.federation.largest)
        )
        if not shared:
            return state
        local, at_labels = self.parts.local, Request(self.facts.labels_at)
        steps = local.steps_at(shared)
        sent: dict[str, Any] = {**local.shared_rate(ctx.round, ctx.rounds), "steps": steps, "back": None}
        letters = {name: Schema({name: self._embedding(-1)}) for name in ("embedding", "gradient")}
        skipped, missed = state["skipped"], state["missed"]
        for at in [*range(steps), None]:
            if at is None and sent["back"] is None:
                break
            there = self.others
            if self.others:
                requests = [Request(k) for k in self.others]
                ask = Ask(
                    "embed",
                    requests,
                    {**sent, "step": at},
                    Schema({}),
                    letter=letters["embedding"],
                    deliver=True,
                )
                there = tuple(int(a.client) for a in (yield ask) if isinstance(a, Reply))
            missed += (len(self.others) - len(there)) * (sent["back"] is not None)
            sent["back"] = None
            if at is None:
                break
            if there == self.others:
                ask = Ask(
                    "label",
                    [at_labels],
                    {**sent, "step": at},
                    Schema({}),
                    letter=letters["gradient"],
                    deliver=True,
                )
                (answer,) = yield ask
                sent["back"] = at if isinstance(answer, Reply) else None
            skipped += sent["back"] is None
        shown = yield from self._shown(state)
        return {**state, **shown, "shared": shared, "skipped": skipped, "missed": missed}

    def _shown(self, state: State) -> Steps:
        """The leaves and means that the parties show after a round; of one that fails, those of before."""
        model, means = dict(state["model"]), dict(state["means"])
        for k in self.parties:
            mean = TensorField((self.width,), self._dtype)
            fields: dict[str, TensorField | TreeField] = {
                "bottom": TreeField.like(self.halves[k].model.leaves),
                "mean": mean,
            }
            if k == self.facts.labels_at:
                fields["top"] = TreeField.like(self.top.model.leaves)
            ask = Ask("show", self._requests(k), expect=Schema(fields), counts=False, measuring=True)
            for answer in (yield ask):
                if isinstance(answer, Reply):
                    model |= self._named(k, answer.payload)
                    means[str(k)] = answer.payload["mean"]
        return {"model": model, "means": means}

    def evaluate(self, state: State, ctx: RoundContext) -> Evaluation:
        """The task's metrics, and its score on the test examples with each party missing once there are means."""
        others, at_labels = self._requests(*self.others), self._requests(self.facts.labels_at)
        metrics: Metrics = {}
        for name in self.parts.measure:
            letter = Schema({"embedding": self._embedding(ctx.federation.held[name])})
            if others:
                ask = Ask(
                    "embed-held",
                    others,
                    {"name": name},
                    Schema({}),
                    letter=letter,
                    counts=False,
                    measuring=True,
                )
                list((yield ask))
            shared = {"name": name, "means": state["means"], "without": name == "@test"}
            ask = Ask("measure", at_labels, shared, MEASUREMENTS, deliver=True, counts=False, measuring=True)
            (answer,) = yield ask
            if not isinstance(answer, Reply):
                raise RunFailed(f"the label party could not test the model: {answer.reason}")
            found = {
                part: task_metrics(self.parts.task, Measured.from_payload(payload).downloaded())
                for part, payload in answer.payload.items()
            }
            metrics |= {f"{name[1:]}_{metric}": value for metric, value in found.pop("all").items()}
            metrics |= {part: values[self.score] for part, values in found.items()}
        return {**metrics, "batches_skipped": state["skipped"], "steps_missed": state["missed"]}

    def model(self, state: State) -> tuple[ModelSpec, Tree]:
        """Bottoms and top as one network: on whole images, or on the inputs of each party if these are its own."""
        return self.composed, state["model"]

    def files(self, state: State) -> dict[str, bytes]:
        """For data of the parties' own: the `bottom` of each, and the `top` of the label party, as safetensors."""
        if self.facts.windows is not None:
            return {}
        written = {}
        for at, k in enumerate(self.parties):
            names = {f"bottoms.{at}.": "bottom."} | ({"top.": "top."} if k == self.facts.labels_at else {})
            own = {
                name.replace(prefix, short, 1): value.cpu().contiguous()
                for name, value in state["model"].items()
                for prefix, short in names.items()
                if name.startswith(prefix)
            }
            written[f"party-{k}.safetensors"] = save(own, {"party": self.facts.names[k]})
        return written

    @cached_property
    def composed(self) -> ModelSpec:  # type: ignore[override]
        """The network of all parties."""
        model, windows = self.parts.model, self.facts.windows
        prepare = model.prepare.structure() if isinstance(model.prepare, Preparation) else {}
        settings = {
            "bottom": {"name": model.name, "settings": dict(model.settings), "prepare": prepare},
            "shapes": [list(self.facts.shapes[k]) for k in self.parties],
            "windows": windows and [list(windows[k]) for k in self.parties],
            "width": self.width,
            "join": self.join,
            "hidden": list(self.hidden),
        }
        name = f"{party_network.__module__}:{party_network.__name__}"
        return ModelSpec(party_network, name, settings, model.input_shape, model.classes, 0)

    def _named(self, k: int, shown: Mapping[str, Tree]) -> dict[str, Tensor]:
        """The leaves that party k shows, by their names in the composed network."""
        own = {f"bottoms.{self.parties.index(k)}.{name}": value for name, value in shown["bottom"].items()}
        return {**own, **{f"top.{name}": value for name, value in shown.get("top", {}).items()}}

    def _embedding(self, rows: int) -> TensorField:
        size = self.parts.local.batch_size
        most = self.parts.federation.largest if size == "all" else size
        bound = most * self.width * self._dtype.itemsize if rows < 0 else np.inf
        return TensorField((rows, self.width), self._dtype, most=bound)

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = next(iter(self.top.model.leaves.values())).dtype
        return dtype

    @staticmethod
    def _requests(*parties: int) -> list[Request]:
        return [Request(k) for k in parties]


def vertical(
    parts: Parts,
    *,
    top: Annotated[
        Join, Field(description="how the label party joins embeddings: their sum and a bias, or side by side")
    ] = "sum",
    width: Annotated[
        int | None,
        Field(
            ge=1,
            le=65536,
            description="values that a party sends for an example; by default the number of classes",
        ),
    ] = None,
    hidden: Annotated[
        tuple[Annotated[int, Field(ge=1, le=65536)], ...],
        Field(
            description="units of the top's hidden layers, with ReLU; none: logits are linear in the embeddings"
        ),
    ] = (),
    parties: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...] | None,
        Field(
            min_length=1,
            description="the numbers of the parties that take part, the label party among them; all by default",
        ),
    ] = None,
) -> Vertical:
    """Vertical learning: parties hold other features of the same examples, and one of them the labels.

    Each party has its own network, its bottom, and the label party the top besides. In a step each party
    sends its bottom's output for a batch, the label party takes a step of the top, and each party one of its
    bottom.

    Fixes: In FedAvg each client has whole examples. Where a hospital has the image and an insurer the record
        of the same patient, nobody can train on both, and neither gives its features away.

    Equation:
        once:     I = the ids that all parties have, sorted; party k has row i of I as x_i^k
        party k:  h_k = phi_k(x_B^k; w_k),  and sends h_k                   (batch B: numbers into I, the same at all)
        labels:   z = sum_k h_k + b  or  z = W [h_1, ..., h_K] + b;  g_k = dL(z, y_B) / dh_k,  and sends g_k
                  v <- v - eta dL / dv                                      (the top, after g_k)
        party k:  w_k <- w_k - eta (dh_k / dw_k)^T g_k

    Source: He et al. 2021 (FedCV, arXiv 2111.11066), section 4, which names vertical learning and gives no
        algorithm. The steps are those of split learning with several inputs (Vepakomma et al. 2018,
        arXiv 1812.00564), and with linear bottoms and `top` = "sum" those of logistic regression on all
        features (Hardy et al. 2017, arXiv 1711.10677), here without encryption. Intersection: double masking
        (Meadows 1986) with X25519 (RFC 7748).

    Weighting: None: every common example counts the same. A batch that a party does not send is skipped by
        all, and a party that fails in its backward pass keeps its old bottom.

    State: Each party keeps its bottom, its optimizer, and which of its rows are common; the label party also
        the top. The server has a copy of the model to save it.

    Sent: Once, for private set intersection, 32 bytes an id and direction; in every step the embeddings of a
        batch to the label party and as many gradients back: 8 B d (K - 1) bytes for batches of B, d values an
        example and K parties. No weights, features or labels. The label party learns which examples each
        party shares with it, and embeddings, which tell of features; the others learn the common ids among
        their own, and gradients, from which labels can be guessed. Nothing stops a party that breaks the
        protocol.

    Composes: `data.parties` instead of `data.partition`. `[select]`, `[client]`, `[aggregate]` and `[server]`
        are refused, and of `[local]` clip_norm, stragglers, examples and lr_scale. `[model]` is the bottom of
        each party; its last linear layer has no bias, since the top has one. Only for classification without
        class weights, without initial weights, `model.cache_features` or `evaluation.clients`.
        `data.validation` is a share of the examples that all parties have.

    Ranges:
        top: "sum" needs the fewest weights and treats parties alike; "concat" with `hidden` can combine what
            they send.
        width: 16 to 128 where `hidden` follows.
        hidden: [], or one layer of 32 to 256 units.
        parties: [0], the label party alone, shows what the others' features add.

    Try: data.parties.split=quadrants model=linear

    Not when: Clients hold whole examples. Nor where gradients must not tell labels, or embeddings features:
        neither is encrypted.

    Tests: tests/identity/test_vertical.py

    Example:
        >>> from fedlens.base.registry import settings_model
        >>> list(settings_model(vertical).model_fields)
        ['top', 'width', 'hidden', 'parties']
    """
    refuse_unused("vertical", parts.slots, parts.local)
    refuse_unfit(parts, "vertical")
    if (facts := parts.federation.parties) is None:
        raise ConfigError(
            "'vertical' trains on parties that hold features of the same examples, and data.parties is not set",
            where="data.parties",
            hint="set data.parties = {split = 'quadrants'} in place of data.partition, or choose another algorithm",
        )
    chosen = tuple(range(len(facts.shapes))) if parties is None else tuple(sorted(set(parties)))
    if facts.labels_at not in chosen or chosen[-1] >= len(facts.shapes):
        raise ConfigError(
            f"algorithm.parties is {list(chosen)}, but parties are numbered from 0 to {len(facts.shapes) - 1}, and "
            f"party {facts.labels_at} has the labels",
            where="algorithm.parties",
            hint=f"name party {facts.labels_at}, and others that exist",
        )
    refuse_unmeasurable(parts)
    if facts.align == "psi" and len(chosen) > 1:
        require_x25519()
    classes = parts.federation.classes
    if top == "sum" and not hidden and width not in (None, classes):
        raise ConfigError(
            f"algorithm.width is {width}, but the sum of embeddings is the logits of {classes} classes",
            where="algorithm.width",
            hint="remove it, or set algorithm.hidden = [64] or algorithm.top = 'concat'",
        )
    return Vertical(parts, facts, chosen, top, width or classes, hidden)


def refuse_unmeasurable(parts: Parts) -> None:
    """Raises `ConfigError` for evaluations and initial weights that parties do not have."""
    prepare = parts.model.prepare
    where = None
    if "@train" in parts.measure:
        where = "evaluation.train"
    elif parts.measure_clients not in (None, "none"):
        where = "evaluation.clients"
    elif isinstance(prepare, Preparation) and prepare.weights is not None:
        where = "model.weights"
    if where is not None:
        raise ConfigError(
            f"'vertical' does not use {where}: parties are tested together on test and validation examples, and each "
            "draws the initial weights of its bottom",
            where=where,
            hint="remove it",
        )
