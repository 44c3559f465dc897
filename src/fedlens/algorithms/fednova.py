"""FedNova, normalized averaging: Wang et al. 2020 (arXiv 2007.07481)."""

from __future__ import annotations

from fedlens.aggregate.normalized import Normalized, TauEff
from fedlens.aggregate.server_steps import Rate, ServerSGD
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.base.errors import ConfigError


def fednova(parts: Parts, *, tau_eff: TauEff = "mean", lr: Rate = 1.0) -> Averaging:
    """FedNova: each client's update is divided by its number of steps before averaging.

    A client's local steps come to `lr_k sum_t a_t g_t` over its gradients `g_t`; `||a||_1` is how many plain
    gradients that weighs. Weight decay belongs to `g_t`, a proximal term to `a`.

    Fixes: A client with more examples does more local steps, and FedAvg counts it twice: by weight and by
        steps. The model converges to the optimum of another objective, with weights `p_k tau_k` for `p_k`.

    Equation:
        client k:  d_k = (w^t - w_k) / ||a_k||_1                                   (section 4)
          SGD                 ||a||_1 = tau_k, its number of steps
          momentum m          a_t = (1 - m^(tau - t)) / (1 - m),  t = 0 ... tau - 1
          proximal mu         a_t = (1 - eta mu)^(tau - 1 - t)
          Nesterov, or both   the same recursion, run on one gradient of 1
        server:    tau_eff = sum_k p_k ||a_k||_1,  p_k = n_k / n over the clients that replied
                   w^{t+1} = w^t - lr tau_eff sum_k p_k d_k                        (section 5)

    Source: Wang et al. 2020 (arXiv 2007.07481), sections 4 and 5. With a proximal term the authors' `tau_eff`
        is `sum_k p_k tau_k`, the plain number of steps; ours stays `||a_k||_1`, so that clients with equal
        steps give FedProx. Their code adds the proximal term behind the momentum, ours before it, as
        `torch.optim` does.

    Weighting: By examples.

    State: Nothing.

    Sent: What FedAvg sends, and one number up.

    Composes: Any `[select]` and `[server]`: `server.name = "momentum"` is the source's FedNova with server
        momentum. `[client]` rules that modify steps, such as `proximal`, whose mu enters `||a||_1`.
        `[aggregate]` has to be `normalized`. A local Adam and rules with their own solver are refused: their
        updates are no weighted sum of gradients.

    Ranges:
        tau_eff: "mean". A number, such as all clients' mean steps, makes the server's progress the same each
            round.
        lr: 1.
        local.stragglers: any share.
        local.momentum: any; it enters `||a||_1`.

    Try: local.epochs=5 local.stragglers=0.5

    Not when: All clients do the same number of steps (equal sizes, `local.steps`, or FedVC): it is FedAvg.
        With few rounds FedAvg's inconsistent objective can be the better one.

    Tests: tests/identity/test_fednova.py

    Example:
        >>> from fedlens.local.training import effective_steps
        >>> from fedlens.local.settings import LocalSettings
        >>> plain, heavy = LocalSettings(lr=0.1), LocalSettings(lr=0.1, momentum=0.5)
        >>> effective_steps(plain, 0.1, 3), effective_steps(heavy, 0.1, 3)  # 3, and 1.75 + 1.5 + 1
        (3.0, 4.25)
    """
    if parts.aggregate is not None and not parts.aggregate.normalized:
        raise ConfigError(
            "FedNova defines the aggregate, but [aggregate] names another one",
            where="aggregate.name",
            hint="take aggregate.name = 'normalized', or remove [aggregate]",
        )
    return averaging(parts, aggregate=Normalized(tau_eff=tau_eff), server=ServerSGD(lr))
