"""The effective learning rate of a run: hsu2019 section 4.2."""

from __future__ import annotations

from fedlens.settings.config import Config


def server_momentum(config: Config) -> float:
    """beta, the momentum of the server; 0 without.

    Args:
        config: with every setting of the algorithm filled in, as `fedlens.settings.plan.plan` returns it.
    """
    server = config.server
    if server is not None and server["name"] != "plain":
        return float(server.get("momentum", 0.0))
    return float(config.algorithm["momentum"]) if config.algorithm["name"] == "fedavgm" else 0.0


def effective_rate(config: Config) -> float:
    """Returns eta / (1 - beta): the rate at which a constant gradient moves the global model in the limit.

    Source: hsu2019 section 4.2, with the clients' rate eta (`local.lr`) and the server's momentum beta.

    >>> from fedlens.settings.config import read_config
    >>> from fedlens.settings.config_source import Source
    >>> from fedlens.settings.plan import plan
    >>> values = {"rounds": 1, "model": "linear", "local": {"lr": 0.01}, "algorithm": "fedavgm",
    ...           "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}}}
    >>> effective_rate(plan(read_config(values), Source(values)).config)
    0.1
    """
    return rounded(config.local.lr / (1 - server_momentum(config)))


def client_rate(effective: float, config: Config) -> float:
    """`local.lr` at this effective rate: eta = effective * (1 - beta).

    Args:
        config: as for `server_momentum`; its own `local.lr` has no influence.
    """
    return rounded(effective * (1 - server_momentum(config)))


def rounded(value: float) -> float:
    """12 significant digits, so that 0.1 * (1 - 0.9) is 0.01.

    >>> 0.1 * (1 - 0.9), rounded(0.1 * (1 - 0.9))
    (0.009999999999999998, 0.01)
    """
    return float(f"{value:.12g}")
