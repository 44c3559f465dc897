import subprocess
import sys

import pytest

from fedlens.base.errors import ConfigError
from fedlens.data.datasets.registry import DATASETS
from fedlens.data.partition.registry import PARTITIONS


@pytest.mark.parametrize("registry", [DATASETS, PARTITIONS])
def test_every_row_leads_to_a_factory(registry) -> None:
    for name, summary in registry.rows():
        assert registry.find(name).__doc__
        assert summary


def test_every_dataset_and_partition_that_was_promised_is_there() -> None:
    assert len(DATASETS.entries) == 39
    geo = {f"inaturalist-geo-{n}" for n in ("100", "300", "1k", "3k", "10k", "30k")}
    assert set(DATASETS) >= {
        "fashion-mnist",
        "cifar100",
        "femnist",
        "omniglot",
        "inaturalist-user-120k",
        *geo,
    }
    assert set(DATASETS) >= {"pascal-voc", "cityscapes", "camvid", "coco", "bccd", "shakespeare", "sent140"}
    assert set(DATASETS) >= {
        "image-folder",
        "mask-folder",
        "coco-json",
        "voc-xml",
        "yolo-txt",
        "parquet",
        "party-files",
    }
    assert set(PARTITIONS) == {
        *("iid", "quantity", "shards", "dirichlet", "dirichlet-classwise", "pachinko", "lda-multilabel"),
        *("detection-frequency", "natural", "s2", "feature", "mix", "federated-csv", "file"),
    }


def test_a_wrong_name_is_answered_with_the_nearest_right_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fashion-mnist'"):
        DATASETS.find("fashion_mnist")


def test_the_tables_import_nothing_heavy() -> None:
    code = (
        "import sys; import fedlens.data.datasets, fedlens.data.partition;"
        "raise SystemExit(any(name in sys.modules for name in ('numpy', 'torch', 'sklearn')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
