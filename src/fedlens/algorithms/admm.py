"""ADMM: ghaemi2022 section 4.3; Zhou and Li 2021 (arXiv 2110.15318) and 2022 (arXiv 2204.10607).

What the four algorithms share. With w_i the client's weight in the objective sum_i w_i f_i, the papers' dual
variable pi_i and penalty sigma_i stand here divided by it: u_i = pi_i / w_i, rho_i = sigma_i / w_i. A client sends
z_i = x_i + u_i / rho_i, so that the server's step (Eq. 2.16, 3.1, 4.4) is one weighted mean:

    y = sum_i (sigma_i x_i + pi_i) / sum_i sigma_i = sum_i sigma_i z_i / sum_i sigma_i
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.server_steps import ServerSGD
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import Answers, Ask, ClientId, FederationInfo, Payload, RoundContext
from fedlens.core.reduction import Update
from fedlens.core.tree import Tree, map_tree, select
from fedlens.local.dual import DualVariables, exact, linear, stepping
from fedlens.local.rules import ClientRule, ServerRule

Absent = Annotated[
    Literal["drop", "last"],
    Field(
        description="clients not selected: left out of the mean (Ghaemi 2022), or counted with their last reply "
        "(Zhou and Li 2022)"
    ),
]
Sigma = Annotated[float, Field(gt=0, allow_inf_nan=False, description="penalty: sigma_i = sigma w_i")]
Sigmas = Annotated[
    Literal["proportional", "equal"],
    Field(description="sigma_i = sigma w_i, or for all sigma times the mean of w_i"),
]
TOLERANCE, MAX_ITERATIONS = 1e-3, 50
TOLERANCE_FIELD = Field(gt=0, description="the exact solver stops when no entry of the gradient is larger")
MAX_ITERATIONS_FIELD = Field(ge=1, description="the exact solver stops after this many iterations")
LocalIterations = Annotated[int, Field(ge=1, description="local iterations per round")]
Gradient = Annotated[
    Literal["full", "batch"],
    Field(description="gradient of an iteration: over all of the client's examples, or over one batch"),
]


def admm(
    parts: Parts,
    *,
    sigma: Sigma = 0.1,
    sigmas: Sigmas = "proportional",
    solver: Annotated[
        Literal["exact", "sgd"],
        Field(
            description="how the client's subproblem is solved: to a tolerance, or by the steps of [local]"
        ),
    ] = "exact",
    tolerance: Annotated[float | None, TOLERANCE_FIELD] = None,
    max_iterations: Annotated[int | None, MAX_ITERATIONS_FIELD] = None,
    absent: Absent = "drop",
) -> Averaging:
    """ADMM: each client solves its own problem, and a dual variable pulls its solution to the others'.

    Fixes: FedAvg with much local work comes to rest where the clients' drifts cancel. Here the dual variable
        learns each client's gradient at the common model and takes it off, so a client that solves its
        problem stays at the common optimum.

    Equation:
        client i:  x_i = argmin_x w_i f_i(x) + <x - y, pi_i> + sigma_i/2 ||x - y||^2  (ghaemi2022 Algorithm 2,
                   pi_i <- pi_i + sigma_i (x_i - y)                                    Eq. 3.2, 3.3)
                   in the code: u_i = pi_i / w_i, rho_i = sigma_i / w_i
        sends:     z_i = x_i + pi_i / sigma_i
        server:    y <- sum_i sigma_i z_i / sum_i sigma_i                             (Eq. 2.16)
        sums:      absent = "drop": over the clients that replied
                   absent = "last": over all clients, with the last z_i of each       (Zhou and Li 2022)
        sigma_i:   proportional: sigma w_i, rho_i = sigma.  equal: rho_i = sigma mean(w) / w_i
        pi_i = 0 at first; z_i is the initial model before the first reply

    Source: ghaemi2022 section 4.3, its second "Algorithm 2", Eq. 2.16; Zhou and Li 2021 (arXiv 2110.15318),
        section 2. With `absent = "last"` and a solver that stops early (`solver = "sgd"`, or a coarse
        `tolerance`) it is FedADMM of Zhou and Li 2022 (arXiv 2204.10607), but for its tolerance, which
        shrinks from visit to visit.

    Weighting: By examples, `w_i = n_i / n`, or uniform with `aggregate.weighting = "uniform"`. With
        `absent = "drop"` they are relative to the clients that replied.

    State: At each client that took part the dual variable, one model. With `absent = "last"` one more, what
        it sent last, and two at the server: the mean of all `z_i`, and the initial one.

    Sent: What FedAvg sends: the server needs `x_i` and `pi_i` only as `z_i`.

    Composes: Any `[select]`; with `absent = "last"` one that draws no client twice. Any `[server]`, which
        moves the model towards the mean of the `z_i`. Normalized averaging (FedNova) is refused: the update
        is no sum of steps. `[client]` rules that weigh examples (FedIR) go with both solvers, those that
        modify steps with `solver = "sgd"` alone.

        With the exact solver the `[local]` settings of steps are refused (`momentum`, `epochs`, `optimizer`,
        `clip_norm`, ...), and `local.lr` is not used; `local.weight_decay` is part of `f_i`. With
        `solver = "sgd"` a `sigma` of `2 / local.lr` and more diverges, and is refused unless gradients are
        clipped.

    Ranges:
        sigma: 0.01 to 10, about the curvature of the loss. Larger holds clients closer and learns slower; too
            small, and the duals overshoot.
        sigmas: equal gives every client the same say at the server, and holds small clients closer.
        solver: exact looks at all the client's examples 10 to 100 times a round. sgd is practical for
            networks.
        tolerance: 1e-3 unless set. 1e-6 and below for float64 studies.
        max_iterations: 50 unless set. `unsolved` in metrics.jsonl counts how often it was too few.
        absent: "last" is the one with theory, and slow until most clients have been drawn. With "drop" a
            client's dual is as old as its last visit.
        local.epochs: 1 to 10 with `solver = "sgd"`.

    Try: algorithm.solver=sgd algorithm.sigma=0.1

    Not when: Clients are many and seldom drawn: duals are old or zero. For networks the exact solver costs
        many of FedAvg's epochs, and its theory asks for convexity or a large `sigma`.

    Tests: tests/identity/test_admm.py

    Example:
        >>> from fedlens.local.rules import LocalContext
        >>> context = LocalContext(["w"], [torch.tensor([1.0])], {}, {}, lr=0.1, steps=1)
        >>> rule = dual(sigma=2.0)
        >>> rule.start(context)  # u = 0 at first
        >>> rule.grad([torch.tensor([0.5])], [torch.tensor([1.5])], context)  # 0.5 + 0 + 2 (1.5 - 1)
        [tensor([1.5000])]
        >>> sent, kept = rule.finish([torch.tensor([1.5])], context)  # u = 0 + 2 (1.5 - 1), z = 1.5 + 1 / 2
        >>> kept["dual"]["w"], sent["update"]["w"]  # y - z
        (tensor([1.]), tensor([-1.]))
    """
    variables = _variables(parts, sigma, sigmas, absent)
    if solver == "exact":
        client = exact(variables, 1, tolerance or TOLERANCE, max_iterations or MAX_ITERATIONS)
        return _assembled(parts, variables, client)
    for name, value in (("tolerance", tolerance), ("max_iterations", max_iterations)):
        if value is not None:
            raise ConfigError(
                f"'{name}' belongs to solver = 'exact'; solver = 'sgd' takes the steps of [local]",
                where=f"algorithm.{name}",
                hint="remove it, or set solver = 'exact'",
            )
    return _assembled(parts, variables, stepping(variables))


def ceadmm(
    parts: Parts,
    *,
    sigma: Sigma = 0.1,
    sigmas: Sigmas = "proportional",
    k_0: LocalIterations = 5,
    tolerance: Annotated[float, TOLERANCE_FIELD] = TOLERANCE,
    max_iterations: Annotated[int, MAX_ITERATIONS_FIELD] = MAX_ITERATIONS,
    absent: Absent = "drop",
) -> Averaging:
    """CEADMM: ADMM with several local iterations, primal and dual, between two exchanges.

    Fixes: As [ADMM](admm.md), with fewer exchanges: a client does `k_0` iterations about the same global
        model.

    Equation:
        client i:  k_0 times, y fixed:
                   x_i <- argmin_x w_i f_i(x) + <x - y, pi_i> + sigma_i/2 ||x - y||^2 (ghaemi2022 Eq. 3.2)
                   pi_i <- pi_i + sigma_i (x_i - y)                                   (Eq. 3.3)
        sends:     z_i = x_i + pi_i / sigma_i
        server:    y <- sum_i sigma_i z_i / sum_i sigma_i                             (Eq. 3.1)
        sums and sigma_i as in admm; k_0 = 1 is admm

    Source: Zhou and Li 2021 (arXiv 2110.15318), CEADMM; ghaemi2022 Algorithm 3, Eq. 3.1 to 3.3.

    Weighting: By examples, as `admm`.

    State: As `admm`: one model at each client that took part, two with `absent = "last"`.

    Sent: As FedAvg.

    Composes: As `admm` with the exact solver: any `[select]` and `[server]`, only `[client]` rules that weigh
        examples (FedIR), and no `[local]` settings of steps.

    Ranges:
        sigma: 0.01 to 10, larger with larger `k_0`: each iteration adds `rho_i (x_i - y)` to the dual.
        sigmas: see `admm`.
        k_0: 1 to 10. With `y` fixed the iterations converge to `x_i = y` and `u_i = -grad f_i(y)`: what is
            sent is then one gradient step from `y`, of rate `1 / rho_i`. More work is not more progress.
        tolerance: 1e-3.
        max_iterations: 50, for each local iteration.
        absent: see `admm`.

    Try: algorithm.k_0=2 algorithm.sigma=1.0 algorithm.max_iterations=10 algorithm.absent=last local.epochs=1
        local.batch_size=all

    Not when: As `admm`; and each local iteration costs a whole solve.

    Tests: tests/identity/test_admm.py::ceadmm

    Example:
        >>> from fedlens.base.registry import settings_model
        >>> settings_model(ceadmm)().k_0
        5
    """
    variables = _variables(parts, sigma, sigmas, absent)
    client = exact(variables, k_0, tolerance, max_iterations)
    return _assembled(parts, variables, client)


def iceadmm(
    parts: Parts,
    *,
    sigma: Sigma = 10.0,
    sigmas: Sigmas = "proportional",
    r: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="proximal weight: H_i = r I; about f's curvature")
    ] = 10.0,
    k_0: LocalIterations = 5,
    gradient: Gradient = "full",
    absent: Absent = "drop",
) -> Averaging:
    """ICEADMM: CEADMM with one gradient and one closed-form step an iteration.

    Fixes: As [CEADMM](ceadmm.md), without solving anything to the end.

    Equation:
        client i:  k_0 times, y fixed, from x_i as it was left:
                   x_i+ = argmin_x w_i <grad f_i(x_i), x> + w_i r/2 ||x - x_i||^2
                                   + <x - y, pi_i> + sigma_i/2 ||x - y||^2            (Zhou and Li 2021, H_i = r I)
                        = x_i - (rho_i (x_i - y) + grad f_i(x_i) + u_i) / (r + rho_i)
                   pi_i <- pi_i + sigma_i (x_i+ - y)                                  (ghaemi2022 Eq. 3.3)
        sends:     z_i = x_i + pi_i / sigma_i
        server:    y <- sum_i sigma_i z_i / sum_i sigma_i                             (Eq. 3.1)
        x_i is y of the client's first round at first; sums and sigma_i as in admm

    Source: Zhou and Li 2021 (arXiv 2110.15318), ICEADMM; ghaemi2022 has no equations of it. The step was
        checked against the authors' published solver, where `r` is the Lipschitz constant of `grad f_i`.

    Weighting: By examples, as `admm`.

    State: Primal and dual variable at each client that took part, two models; three with `absent = "last"`.

    Sent: As FedAvg.

    Composes: As [CEADMM](ceadmm.md). `local.lr` is not used: the step is `1 / (r + rho_i)`.

    Ranges:
        sigma: about `r`, as in the authors' solver. Well below it the duals swing, what is sent is amplified
            by `1 / rho_i`, and the run diverges.
        sigmas: see `admm`.
        r: 1 to 100, the Lipschitz constant of the gradient. Smaller takes longer steps and may diverge.
        k_0: 1 to 20. Each costs one gradient: a pass over the client's data, or one batch.
        gradient: "batch" is not covered by the source's theory.
        absent: see `admm`.

    Try: algorithm.k_0=10 local.epochs=1 local.batch_size=all

    Not when: Clients hold many examples and rounds are cheap: `k_0` full passes for `k_0` steps is little
        progress next to FedAvg's epoch of small batches.

    Tests: tests/identity/test_admm.py::iceadmm

    Example:
        >>> from fedlens.base.registry import settings_model
        >>> settings_model(iceadmm)().r
        10.0
    """
    variables = replace(_variables(parts, sigma, sigmas, absent), primal=True)
    return _assembled(parts, variables, linear(variables, k_0, r, gradient == "batch"))


def liadmm(
    parts: Parts,
    *,
    gamma: Annotated[
        float | None,
        Field(gt=0, allow_inf_nan=False, description="step size; by default local.lr of the round"),
    ] = None,
    gradient: Annotated[
        Literal["full", "batch", "training"],
        Field(
            description="grad f_i of Eq. 4.5: over all of the client's examples, over one batch, or "
            "replaced by local training as in [local]"
        ),
    ] = "full",
    absent: Absent = "drop",
) -> Averaging:
    """LIADMM: linearized inexact ADMM: one gradient a round, corrected by the last one.

    Fixes: A reference, since ghaemi2022 compares with it. Eq. 4.5 in 4.6 gives `pi_i = -w_i grad f_i(x)`, so
        with all clients in every round it is optimistic gradient descent, `x <- x - gamma (2 g - g_before)`.

    Equation:
        client i:  x_i = x - gamma grad f_i(x) - gamma / w_i pi_i                     (ghaemi2022 Eq. 4.5)
                   pi_i <- pi_i + w_i / gamma (x_i - x)                               (Eq. 4.6)
        sends:     z_i = x_i + gamma / w_i pi_i,  which is x - gamma (2 grad f_i(x) + pi_i before / w_i)
        server:    x <- sum_i w_i z_i,  sum_i w_i = 1                                 (Eq. 4.4)
        gradient = "training":  x_i = (x after local training) - gamma / w_i pi_i; a constant gamma then drops out;
                   one that falls (local.lr_decay) weighs a correction of round s by gamma_t / gamma_s
        sums:      over the clients that replied, w_i relative to them; absent = "last": over all clients

    Source: ghaemi2022 Algorithm 4, Eq. 4.4 to 4.6, after Zhou and Li 2021 (arXiv 2110.15318).

    Weighting: By examples over the clients that replied, or uniform with `aggregate.weighting = "uniform"`.
        With `w_i = 1/N` over the whole population and a sum over the sample, Eq. 4.4 would shrink the model
        to nothing.

    State: As `admm`: one model at each client that took part, two with `absent = "last"`.

    Sent: As FedAvg.

    Composes: Any `[select]` and `[server]`. With `gradient = "training"` any `[client]` rule and `[local]`
        settings; else only rules that weigh examples (FedIR), and of `[local]` the rate, which is gamma.

    Ranges:
        gamma: as a learning rate of full-batch gradient descent, or somewhat smaller.
        gradient: "full" is the equation; "training" is what a paper with "batch size 128, 10 epochs" may have
            run.
        absent: "drop" is how ghaemi2022 ran it, as far as it says: a client's correction is then the gradient
            of its last visit. "last" keeps old `z_i` in the mean, and wants a much smaller `gamma`.

    Try: algorithm.gradient=training

    Not when: One gradient a round is too few, which is nearly always: FedAvg with one epoch costs the same.

    Tests: tests/identity/test_admm.py::liadmm

    Example:
        >>> from fedlens.base.registry import settings_model
        >>> list(settings_model(liadmm).model_fields)
        ['gamma', 'gradient', 'absent']
    """
    trained = gradient == "training"
    if trained and gamma is not None:
        raise ConfigError(
            "with gradient = 'training' Eq. 4.5 and 4.6 hold whatever gamma is: local.lr is the step size",
            where="algorithm.gamma",
            hint="remove it, and set local.lr",
        )
    sigma = None if gamma is None else 1 / gamma
    variables = replace(_variables(parts, sigma, "proportional", absent), trained=trained)
    client = stepping(variables) if trained else linear(variables, 1, 0.0, gradient == "batch")
    return _assembled(parts, variables, client)


def dual(*, sigma: Sigma = 0.1) -> ClientRule:
    """ADMM's dual variable on top of local training: f_i + <u_i, x - y> + sigma/2 ||x - y||^2, then u_i's step.

    With the plain mean of FedAvg it is `admm` with `solver = "sgd"`.
    """
    return stepping(DualVariables(sigma))


# -- the server ------------------------------------------------------------------------------------------------


def _variables(parts: Parts, sigma: float | None, sigmas: str, absent: str) -> DualVariables:
    weighting = (parts.aggregate or Mean()).weighting
    by_size = sigmas == "equal" and weighting == "examples"  # the same for all means something else there
    if not by_size:
        return DualVariables(sigma, last=absent == "last")
    sizes = _weights(parts)
    return DualVariables(sigma, float(sizes.mean()), float(sizes.min()), last=absent == "last")


def _weights(parts: Parts) -> NDArray[np.float64]:
    """How many examples a client that holds any trains on: its own, or FedVC's."""
    sizes = parts.federation.sizes[parts.federation.eligible].astype(np.float64)
    return np.full_like(sizes, parts.local.examples) if parts.local.examples else sizes


def _assembled(parts: Parts, variables: DualVariables, client: ClientRule) -> Averaging:
    aggregate = parts.aggregate or Mean("examples")
    if aggregate.normalized:
        raise ConfigError(
            "normalized averaging divides an update by its number of steps, but ADMM's clients do not "
            "send a sum of steps",
            where="aggregate",
            hint="take aggregate.name = 'mean'",
        )
    if variables.last:
        weights = _weights(parts)
        by_examples = aggregate.weighting == "examples" and variables.mean_size is None
        total = float(weights.sum()) if by_examples else float(len(weights))
        client = replace(client, fields={"fresh": "mean"}, server_rules={client.name: _everyone(total)})
    return averaging(parts, client=client, aggregate=Mean("examples"), server=ServerSGD(1.0))


def _everyone(total: float) -> ServerRule:
    """Keeps the mean of all clients' last z_i; `total` is sum_i sigma_i over all of them, in the replies' units."""
    return ServerRule(_at_start, prepare=_prepare, after=partial(_after, total=total), follows_device=True)


def _at_start(weights: Tree, federation: FederationInfo) -> Payload:
    return {"mean": dict(weights), "initial": dict(weights)}


def _prepare(
    state: Payload, shared: Payload, cohort: Sequence[ClientId], ctx: RoundContext
) -> Generator[Ask, Answers, Payload]:
    yield from ()  # nothing is asked: y of this round is all that `_after` needs
    return {**state, "sent": select(shared["model"], list(state["mean"]))}


def _after(state: Payload, update: Update, ctx: RoundContext, total: float) -> tuple[Payload, Update]:
    """The mean of all z_i moves by what those of this round's clients did; the model, to that mean.

    A client's update is z_i before - z_i after. One that was never heard of took y for its z_i before, and the
    initial model is what stood in the mean.
    """
    share, fresh, y = update.weight / total, update.more["fresh"], state["sent"]

    def moved(mean: Tensor, delta: Tensor, y: Tensor, initial: Tensor) -> Tensor:
        new: Tensor = mean + share * (fresh * (y - initial) - delta)
        return new

    mean = map_tree(moved, state["mean"], update.update, y, state["initial"])
    return {"mean": mean, "initial": state["initial"]}, replace(update, update=map_tree(torch.sub, y, mean))
