"""Why tuning takes the mean over several seeds: the numbers of docs/studies.md, section Tuning."""

import re
from pathlib import Path

import numpy as np
from scipy import stats

STUDIES = 20_000
POINTS, SEEDS = 9, 5
QUALITY, NOISE = 1.0, 1.0  # standard deviations of points and of runs, in accuracy points


def false_alarms(tuning_seeds: int) -> float:
    """The share of studies in which a paired t test separates a method from itself, tuned twice."""
    rng = np.random.default_rng(tuning_seeds)
    quality = rng.normal(0, QUALITY, (STUDIES, 1, POINTS))  # of the same points for both
    tuned = quality + rng.normal(0, NOISE / np.sqrt(tuning_seeds), (STUDIES, 2, POINTS))
    chosen = np.take_along_axis(np.repeat(quality, 2, 1), tuned.argmax(2)[..., None], 2)
    values = chosen + rng.normal(0, NOISE, (STUDIES, 2, SEEDS))
    return float((stats.ttest_rel(values[:, 0], values[:, 1], axis=1).pvalue < 0.05).mean())


def test_the_page_states_how_often_a_method_differs_from_itself_by_the_seeds_of_tuning() -> None:
    text = (Path(__file__).parents[3] / "docs" / "studies.md").read_text(encoding="utf-8")
    stated = dict(re.findall(r"^\| (\d+) \| (\d+) % \|$", text.partition("## Tuning")[2], re.MULTILINE))
    assert {int(seeds): int(share) for seeds, share in stated.items()} == {
        seeds: round(100 * false_alarms(seeds)) for seeds in (1, 3, 5, 10)
    }
