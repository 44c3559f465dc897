import subprocess
import sys

import pytest

from fedlens.core.errors import ConfigError
from fedlens.data.datasets import DATASETS
from fedlens.data.partition import PARTITIONS


@pytest.mark.parametrize("registry", [DATASETS, PARTITIONS])
def test_every_row_leads_to_a_factory(registry) -> None:
    for name, summary in registry.rows():
        assert registry.find(name).__doc__
        assert summary


def test_the_names_are_those_of_the_issue() -> None:
    assert list(DATASETS) == ["digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "synthetic"]
    assert list(PARTITIONS) == ["iid", "shards", "dirichlet"]


def test_a_wrong_name_is_answered_with_the_nearest_right_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fashion-mnist'"):
        DATASETS.find("fashion_mnist")


def test_the_tables_import_nothing_heavy() -> None:
    code = (
        "import sys; import fedlens.data.datasets, fedlens.data.partition;"
        "raise SystemExit(any(name in sys.modules for name in ('numpy', 'torch', 'sklearn')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
