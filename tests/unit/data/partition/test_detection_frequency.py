import numpy as np
import pytest

from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.data.partition.detection_frequency import detection_frequency
from fedlens.data.table import Table

# In how many images: class 0 in 3, class 1 in 4, class 2 in 3, class 3 in 1.
#        0       1    2       3    4         5    6    7   8
SETS = [[0, 1], [1], [1, 2], [0], [0, 2, 1], [2], [3], [], []]


def rows(clients: int, to: str = "turns", sets: list[list[int]] = SETS) -> list[list[int]]:
    p = detection_frequency(Table.of_sets(sets), 0, clients=clients, to=to)  # type: ignore[arg-type]
    return [row.tolist() for row in p]


def test_small_cases_by_hand() -> None:
    """Class 1 goes first (0, 1, 2, 4); then 0, 2 and 3 are in one image each: 3, then 5, then 6."""
    assert rows(1) == [[0, 1, 2, 3, 4, 5, 6, 7, 8]]
    # In turn; then the classless 7 and 8 to the smaller client.
    assert rows(2) == [[0, 1, 2, 4, 5], [3, 6, 7, 8]]
    assert rows(3) == [[0, 1, 2, 4, 6], [3, 7], [5, 8]]
    assert rows(4) == [[0, 1, 2, 4], [3, 7], [5, 8], [6]]


def test_the_client_with_the_fewest_images_gets_the_next_class() -> None:
    assert rows(2, "fewest") == [[0, 1, 2, 4, 8], [3, 5, 6, 7]]
    assert rows(3, "fewest") == [[0, 1, 2, 4], [3, 6, 8], [5, 7]]


def test_the_last_client_may_get_all_the_rest() -> None:
    assert rows(2, "rest") == [[0, 1, 2, 4, 8], [3, 5, 6, 7]]
    assert rows(3, "rest") == [[0, 1, 2, 4], [3, 7, 8], [5, 6]]


def test_an_image_counts_once_for_a_class_however_often_it_shows_it() -> None:
    table = Table.of_sets([[0, 0, 0, 0], [1], [1, 1]])
    assert [row.tolist() for row in detection_frequency(table, 0, clients=2)] == [[1, 2], [0]]


def test_frequencies_are_counted_again_after_every_class() -> None:
    """Class 1 is in 3 images at first, but two of them go with class 0: class 2 is next."""
    sets = [[0], [0], [0, 1], [0, 1], [1], [2], [2]]
    assert rows(3, sets=sets) == [[0, 1, 2, 3], [5, 6], [4]]


def literal(sets: list[list[int]], clients: int) -> list[list[int]]:
    """The paper's three sentences, one image at a time, with clients in turn."""
    left = [i for i, classes in enumerate(sets) if classes]
    out: list[list[int]] = [[] for _ in range(clients)]
    turn = 0
    while left:
        frequency: dict[int, int] = {}
        for i in left:
            for c in set(sets[i]):
                frequency[c] = frequency.get(c, 0) + 1
        most = min(frequency, key=lambda c: (-frequency[c], c))
        out[turn % clients] += [i for i in left if most in sets[i]]
        left = [i for i in left if most not in sets[i]]
        turn += 1
    for i, classes in enumerate(sets):
        if not classes:
            min(out, key=len).append(i)
    return [sorted(part) for part in out]


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_rule_word_for_word(seed: int) -> None:
    rng = np.random.default_rng(seed)
    share = 0.5 / np.arange(1, 13)
    sets = [np.flatnonzero(rng.random(12) < share).tolist() for _ in range(150)]
    assert rows(4, sets=sets) == literal(sets, 4)


def test_eighty_classes_over_eight_clients_are_ten_classes_each() -> None:
    labels = np.repeat(np.arange(80), 3)
    counts = detection_frequency(labels, 0, clients=8).class_counts(labels)
    assert (counts > 0).sum(axis=1).tolist() == [10] * 8


def test_the_seed_plays_no_part_and_is_recorded() -> None:
    p, q = (detection_frequency(Table.of_sets(SETS), seed, clients=3) for seed in (0, 9))
    assert p.digest == q.digest
    assert p.digest[:16] == "b8a36fe6b113709b"
    assert q.spec == {"name": "detection-frequency", "clients": 3, "to": "turns", "seed": 9}


@pytest.mark.parametrize("to", ["turns", "fewest", "rest"])
def test_fewer_classes_than_clients_is_an_error_also_with_images_to_fill_up(to: str) -> None:
    with pytest.raises(
        ConfigError, match=r"only 4 of 5 clients.*\(clients\).*take clients = 4, or lda-multilabel"
    ):
        rows(5, to)


@pytest.mark.parametrize(
    ("sets", "settings", "what"),
    [
        ([[], [], []], {"clients": 2}, "only 0 of 2 clients.*take iid or quantity"),
        (SETS, {"clients": 10}, "10 clients are more than the 9 examples"),
        (SETS, {"clients": 2, "to": "all"}, "'to' is 'all', but must be 'turns', 'fewest' or 'rest'"),
    ],
)
def test_what_cannot_be_dealt_is_an_error(
    sets: list[list[int]], settings: dict[str, object], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        detection_frequency(Table.of_sets(sets), 0, **settings)  # type: ignore[arg-type]
    if "to" in settings:
        with pytest.raises(ConfigError, match=r"data.partition.to"):
            read_settings(detection_frequency, settings, "data.partition")
