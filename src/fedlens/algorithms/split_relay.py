"""Split learning from client to client: Gupta and Raskar 2018 (arXiv 1810.06060)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from fedlens.algorithms.averaging import Parts
from fedlens.algorithms.splitfed import Activations, Cut, ServerRate, SplitFed, split
from fedlens.core.protocol import (
    Ask,
    FederationInfo,
    ModelSpec,
    Op,
    Reply,
    Request,
    Round,
    RoundContext,
    State,
    Steps,
)
from fedlens.core.schema import Schema
from fedlens.local.halves import Hand, forget


@dataclass(frozen=True, kw_only=True)
class SplitRelay(SplitFed):
    """The round loop: the clients in turn. Its state has `optimizer` too, that of the lower half, if it is carried."""

    carry_optimizer: bool

    @property
    def ops(self) -> Mapping[str, Op]:
        """The steps of both halves, what hands the lower one on, and evaluation."""
        return {**super().ops, "hand": self._hand, "forget": forget}

    @property
    def _hand(self) -> Hand:
        return Hand(self.at_client, self.carry_optimizer)

    @property
    def discloses(self) -> tuple[str, ...]:
        """What leaves the clients beyond model updates."""
        handed = "layers and their optimizer" if self.carry_optimizer else "layers"
        return (
            *super().discloses,
            f"Each client hands its {handed} to the next client, and the last one of a round to the server, which "
            "tests the whole model and hands them to the first client of the next round.",
        )

    def init(self, model: ModelSpec, federation: FederationInfo) -> State:
        """The initial weights. Raises `ConfigError` if the cohort is larger than the population."""
        state = super().init(model, federation)
        return {**state, "optimizer": {}} if self.carry_optimizer else state

    def round(self, state: State, ctx: RoundContext) -> Round:
        """The clients in the order of the selection. One that fails is passed over; the upper half keeps its steps."""
        shared = {"step": 0, "order": [], "model": self._part(state, self.at_server)}
        op = "upper" if self.middle is None else "middle"
        list((yield Ask(op, [Request("@server")], shared, deliver=True)))  # no step, only the model
        finished: list[int] = []
        for client in self.select.cohort(ctx):
            lower = yield from self._handed(state, finished, client)
            finished += yield from self._trained([client], lower, {}, ctx)
        lower = yield from self._handed(state, finished, None)
        expect = self._finish(state, self.at_server)
        (answer,) = yield Ask("finish-server", [Request("@server")], expect=expect)
        assert isinstance(answer, Reply)  # a failure there has ended the run
        list((yield Ask("forget", [Request(client) for client in finished], expect=Schema({}))))
        leaves = {
            name: value for tree in (lower["model"], *answer.payload.values()) for name, value in tree.items()
        }
        return {**state, **lower, "model": {**state["model"], **leaves}}

    def _handed(self, state: State, finished: list[int], to: int | None) -> Steps:
        """Has the last client that finished hand the lower half on; if it fails, the one before, at last the server.

        Returns what the server gets or gives; nothing if a letter is under way.
        """
        content = self._hand.expect({name: self.parts.spec[name] for name in self._part(state)})
        letter, expect = (None, content) if to is None else (content, Schema({}))
        while finished:
            (answer,) = yield Ask("hand", [Request(finished[-1], {"to": to})], expect=expect, letter=letter)
            if isinstance(answer, Reply):
                return answer.payload
            finished.pop()
        carried = {"optimizer": state["optimizer"]} if self.carry_optimizer else {}
        return {"model": self._part(state), **carried}


def split_relay(
    parts: Parts,
    *,
    cut: Cut,
    carry_optimizer: Annotated[
        bool,
        Field(description="hand the optimizer on with the first layers; else each client begins a new one"),
    ] = True,
    server_rate: ServerRate = 1.0,
    activations: Activations = "float32",
) -> SplitRelay:
    """Split learning in turn: one client after the other trains the first layers, the server the others.

    A step is that of SplitFed. After its local steps a client hands the first layers on to the next; the last
    client of a round sends them to the server, which tests the whole model and hands them to the first client
    of the next round. Nothing is averaged. With two cuts the last layers go along, and labels stay at the
    clients.

    Fixes: As in SplitFed, the server never has a client's images, and a client never the whole model. With
        one model in turn instead of a mean, clients that differ do not pull their copies apart.

    Equation:
        client k:  a = f(w; x),  and sends a and y                          (of one batch)
        server:    g = dL(h(v; a), y) / da,  v <- v - s eta dL / dv,  and sends g
        client k:  w <- w - eta (da / dw)^T g
        turn:      after the steps of client k, w goes to client k + 1

    Source: Gupta and Raskar 2018 (arXiv 1810.06060), several agents that hand the weights on, with labels at
        the server. Handing on the optimizer is ours; `carry_optimizer` = false leaves it out.

    Weighting: None. A client counts by its steps, and the last ones of a round count most.

    State: During a round each client keeps the first layers that it has handed on, in case the next one
        fails. At the server the optimizers of both halves.

    Sent: In every step a batch's activations and labels up and their gradient down; for every turn the first
        layers from client to client, with the optimizer. The server learns the labels, can reconstruct images
        from activations, and has the whole model after each round. A client gets first layers that its
        predecessor has just trained: of two it can take the difference, as the server of FedAvg can. Two cuts
        and `activations` are those of [SplitFed](splitfed.md).

    Composes: Any `[select]` that chooses a client once a round, in the order of the turns. `[server]`,
        `[client]` and `[aggregate]` are refused; `[local]`, optimizers, tasks and engines as for
        [SplitFed](splitfed.md).

    Ranges:
        cut: as for SplitFed.
        carry_optimizer: true is training on the clients' data in turn, as if in one place.
        server_rate: 1.
        activations: as for SplitFed.

    Try: model=mlp algorithm.cut=1

    Not when: Clients hold few classes each: the model forgets the first ones' until the last. Nor where time
        counts: clients wait for each other. A client that fails in its turn is passed over, and its
        predecessor hands on; what the server's half learned from it stays.

    Tests: tests/identity/test_split_relay.py

    Example:
        >>> from fedlens.base.registry import settings_model
        >>> list(settings_model(split_relay).model_fields)
        ['cut', 'carry_optimizer', 'server_rate', 'activations']
    """
    fields = split(parts, "split-relay", cut, activations, server_rate, False, (False, True))
    return SplitRelay(**fields, carry_optimizer=carry_optimizer)
