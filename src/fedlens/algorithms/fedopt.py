"""FedOpt, adaptive optimizers at the server: Reddi et al. 2021 (arXiv 2003.00295), Algorithm 2; fedcv's FedOpt."""

from __future__ import annotations

from fedlens.aggregate.adaptive_server_steps import V0, Beta1, Beta2, BiasCorrection, Tau, adagrad, adam, yogi
from fedlens.aggregate.server_steps import Rate
from fedlens.algorithms.averaging import Averaging, Parts, averaging


def fedadagrad(
    parts: Parts,
    *,
    lr: Rate = 0.1,
    beta1: Beta1 = 0.0,
    tau: Tau = 1e-3,
    v0: V0 = None,
) -> Averaging:
    """FedAdagrad: Adagrad at the server: each weight's rate falls with its past movement.

    Fixes: FedAvg has one server rate for all weights: rare features, and layers that few clients move, get
        small averaged updates. A rate for each weight makes up for that.

    Equation:
        clients:   as in FedAvg;  Delta = sum_k (n_k / n) (w^t - w_k)
        server:    m <- beta_1 m + (1 - beta_1) Delta                              (Algorithm 2)
                   v <- v + Delta^2,  v_0 >= tau^2
                   w <- w - lr m / (sqrt(v) + tau)

    Source: Reddi et al. 2021 (arXiv 2003.00295), Algorithm 2, where Delta has the other sign.

    Weighting: By examples, as in the source's experiments; its Algorithm 2 is
        `aggregate.weighting = "uniform"`.

    State: At the server `m` and `v`, two copies of the trainable weights; running statistics are averaged.

    Sent: As FedAvg.

    Composes: Any `[select]`, `[client]` and `[aggregate]`. `server.name = "adagrad"` gives the step to
        another algorithm.

    Ranges:
        lr: 0.01 to 1, tuned together with `local.lr`; the first steps move a weight by up to `lr`.
        beta1: 0, as in the source's experiments. Above 0 it is Adagrad with momentum.
        tau: 1e-5 to 0.1.
        v0: not set. Larger slows the first rounds.
        local.lr: tuned anew: the server divides the size of the updates out, so a smaller one is no slower at
            first.
        local.lr_decay: 1, or below (the source's client decay) where the last rounds should settle.

    Not when: There are many rounds: `v` only grows, so the steps only shrink. FedAdam and FedYogi forget. Nor
        without time to tune two learning rates.

    Tests: tests/identity/test_fedopt.py

    Example:
        >>> import torch
        >>> from fedlens.aggregate.adaptive_server_steps import adagrad
        >>> step, w, delta = adagrad(lr=1.0, tau=1.0), {"w": torch.tensor([0.0])}, {"w": torch.tensor([2.0])}
        >>> w, state = step.step(w, delta, step.init(w))  # v = 1 + 4, w = -2 / (sqrt(5) + 1)
        >>> state["v"]["w"], w["w"]
        (tensor([5.]), tensor([-0.6180]))
    """
    return averaging(parts, server=adagrad(lr=lr, beta1=beta1, tau=tau, v0=v0))


def fedadam(
    parts: Parts,
    *,
    lr: Rate = 0.01,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.99,
    tau: Tau = 1e-3,
    v0: V0 = None,
    bias_correction: BiasCorrection = False,
) -> Averaging:
    """FedAdam: Adam at the server: momentum, and a rate for each weight.

    Fixes: FedAvg has one server rate for all weights, and its averaged updates point elsewhere every round.
        Momentum sums up rounds; dividing by their size lets weights that move little move as fast as the
        others.

    Equation:
        clients:   as in FedAvg;  Delta = sum_k (n_k / n) (w^t - w_k)
        server:    m <- beta_1 m + (1 - beta_1) Delta                              (Algorithm 2)
                   v <- beta_2 v + (1 - beta_2) Delta^2,  v_0 >= tau^2
                   w <- w - lr m / (sqrt(v) + tau)
        if asked:  m / (1 - beta_1^t) and v / (1 - beta_2^t) in the last line      (bias_correction)

    Source: Reddi et al. 2021 (arXiv 2003.00295), Algorithm 2, where Delta has the other sign; fedcv section 4
        calls it FedOpt.

    Weighting: By examples, as in the source's experiments; its Algorithm 2 is
        `aggregate.weighting = "uniform"`.

    State: At the server `m` and `v`, two copies of the trainable weights; running statistics are averaged.

    Sent: As FedAvg.

    Composes: Any `[select]`, `[client]` and `[aggregate]`. `server.name = "adam"` gives the step to another
        algorithm.

    Ranges:
        lr: 0.001 to 0.1, tuned together with `local.lr`; a round moves a weight by about `lr`.
        beta1: 0.9, or 0 for no momentum.
        beta2: 0.99. Larger forgets more slowly, and `v_0` as well.
        tau: 1e-5 to 0.1.
        v0: not set.
        bias_correction: false. With true the first rounds move faster, and `v_0` weighs `1 / (1 - beta2)`
            times as much in them.
        local.lr: tuned anew: the server divides the size of the updates out.
        local.lr_decay: 1, or below (the source's client decay) where the last rounds should settle.

    Try: algorithm.lr=0.03

    Not when: There is no time to tune two learning rates: at a bad server rate it is worse than FedAvg. On
        dense features and balanced clients FedAvgM often does as well.

    Tests: tests/identity/test_fedopt.py

    Example:
        >>> import torch
        >>> from fedlens.aggregate.adaptive_server_steps import adam
        >>> step = adam(lr=1.0, beta1=0.5, beta2=0.75, tau=1.0)
        >>> w, delta = {"w": torch.tensor([0.0])}, {"w": torch.tensor([6.0])}
        >>> w, state = step.step(w, delta, step.init(w))  # m = 3, v = 0.75 + 9, w = -3 / (sqrt(9.75) + 1)
        >>> state["m"]["w"], state["v"]["w"], w["w"]
        (tensor([3.]), tensor([9.7500]), tensor([-0.7277]))
    """
    server = adam(lr=lr, beta1=beta1, beta2=beta2, tau=tau, v0=v0, bias_correction=bias_correction)
    return averaging(parts, server=server)


def fedyogi(
    parts: Parts,
    *,
    lr: Rate = 0.01,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.99,
    tau: Tau = 1e-3,
    v0: V0 = None,
    bias_correction: BiasCorrection = False,
) -> Averaging:
    """FedYogi: FedAdam whose measure of size follows sudden changes more slowly.

    Fixes: After a few rounds of small updates Adam's `v` has shrunk by a constant factor each, and its next
        step is large. Yogi's `v` moves only by a share of `Delta^2`, so quiet rounds change it little.

    Equation:
        clients:   as in FedAvg;  Delta = sum_k (n_k / n) (w^t - w_k)
        server:    m <- beta_1 m + (1 - beta_1) Delta                              (Algorithm 2)
                   v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2),  v_0 >= tau^2
                   w <- w - lr m / (sqrt(v) + tau)
        if asked:  m / (1 - beta_1^t) and v / (1 - beta_2^t) in the last line      (bias_correction)

    Source: Reddi et al. 2021 (arXiv 2003.00295), Algorithm 2, where Delta has the other sign.

    Weighting: By examples, as in the source's experiments; its Algorithm 2 is
        `aggregate.weighting = "uniform"`.

    State: At the server `m` and `v`, two copies of the trainable weights; running statistics are averaged.

    Sent: As FedAvg.

    Composes: Any `[select]`, `[client]` and `[aggregate]`. `server.name = "yogi"` gives the step to another
        algorithm.

    Ranges:
        lr: 0.001 to 0.1, tuned together with `local.lr`.
        beta1: 0.9, or 0 for no momentum.
        beta2: 0.99. Smaller lets `v` follow the updates faster.
        tau: 1e-5 to 0.1.
        v0: not set. It is forgotten only as fast as updates come in, so a large one slows many rounds.
        bias_correction: false; its factors are Adam's and only make the first rounds' `v` larger.
        local.lr: tuned anew: the server divides the size of the updates out.
        local.lr_decay: 1, or below (the source's client decay) where the last rounds should settle.

    Try: algorithm.lr=0.03

    Not when: There is no time to tune two learning rates: at a bad server rate it is worse than FedAvg. Where
        updates keep their size it is FedAdam.

    Tests: tests/identity/test_fedopt.py

    Example:
        >>> import torch
        >>> from fedlens.aggregate.adaptive_server_steps import yogi
        >>> step = yogi(lr=1.0, beta1=0.5, beta2=0.75, tau=1.0, v0=10.0)
        >>> w, delta = {"w": torch.tensor([0.0])}, {"w": torch.tensor([2.0])}
        >>> w, state = step.step(w, delta, step.init(w))  # m = 1, v = 10 - 0.25 * 4, w = -1 / (3 + 1)
        >>> state["m"]["w"], state["v"]["w"], w["w"]
        (tensor([1.]), tensor([9.]), tensor([-0.2500]))
    """
    server = yogi(lr=lr, beta1=beta1, beta2=beta2, tau=tau, v0=v0, bias_correction=bias_correction)
    return averaging(parts, server=server)
