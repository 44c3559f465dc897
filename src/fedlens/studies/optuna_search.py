"""Searches settings with Optuna, in batches whose points depend only on the values of earlier batches.

Optuna's sampler (a tree-structured Parzen estimator, Bergstra et al. 2011) is seeded and asked again from the start,
so a study that was killed gets the same points again, and the number of jobs has no influence. Another version of
Optuna may suggest other points.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from fedlens.base.errors import ConfigError

BATCH = 4  # points of a batch; independent of the number of jobs
_SEED = 0


class OptunaSearch:
    """Suggests points of a space.

    Args:
        space: by setting, a table `low`, `high` and perhaps `log` (integers if both bounds are), or `choices`.

    Raises `ConfigError` if Optuna is not installed, or a range is invalid.

    >>> search = OptunaSearch({"local.lr": {"low": 0.01, "high": 1.0, "log": True}})
    >>> points = search.ask(2)
    >>> search.tell([-0.5, None])
    >>> all(0.01 <= point["local.lr"] <= 1 for point in points)
    True
    """

    def __init__(self, space: Mapping[str, Mapping[str, Any]]) -> None:
        try:
            import optuna
        except ImportError:
            raise ConfigError(
                "tune.search = 'optuna' needs Optuna",
                where="tune.search",
                hint="pip install 'fedlens[search]'",
            ) from None
        self._tables = dict(space)
        self._space = {setting: _distribution(setting, table) for setting, table in sorted(space.items())}
        if not self._space:
            raise ConfigError(
                "tune.search = 'optuna' has nothing to search",
                where="tune.search",
                hint="name settings with ranges in [random], or values in [grid]",
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # releases before 5 call `constant_liar` experimental
            # Points of one batch keep away from each other.
            sampler = optuna.samplers.TPESampler(seed=_SEED, n_startup_trials=2 * BATCH, constant_liar=True)
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            self._study = optuna.create_study(sampler=sampler, direction="minimize")
        finally:
            optuna.logging.set_verbosity(verbosity)
        self._asked: list[Any] = []

    def ask(self, number: int) -> list[dict[str, Any]]:
        """The next `number` points. Numbers have four significant digits."""
        self._asked = [self._study.ask(self._space) for _ in range(number)]
        return [
            {setting: _rounded(trial.params[setting], self._tables[setting]) for setting in self._space}
            for trial in self._asked
        ]

    def tell(self, values: Sequence[float | None]) -> None:
        """The values of the points that were asked last, smaller is better; None for a point whose run failed."""
        from optuna.trial import TrialState

        for trial, value in zip(self._asked, values, strict=True):
            if value is None:
                self._study.tell(trial, state=TrialState.FAIL)
            else:
                self._study.tell(trial, value)


def _rounded(value: Any, table: Mapping[str, Any]) -> Any:
    """A suggested value, with four digits within its bounds."""
    if not isinstance(value, float) or "choices" in table:
        return value
    return min(max(float(f"{value:.4g}"), float(table["low"])), float(table["high"]))


def _distribution(setting: str, table: Mapping[str, Any]) -> Any:
    """Returns the distribution of a setting. Raises `ConfigError` if its range is invalid."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    try:
        if "choices" in table:
            return CategoricalDistribution(list(table["choices"]))
        low, high, log = table["low"], table["high"], bool(table.get("log", False))
        whole = isinstance(low, int) and isinstance(high, int)
        return IntDistribution(low, high, log) if whole else FloatDistribution(float(low), float(high), log)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the range of '{setting}' is invalid: {error}",
            where=f"random.{setting}",
            hint="give low and high with low < high, and low > 0 where log = true; or choices",
        ) from None
