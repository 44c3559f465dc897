"""The recipes say what they are, can be built, and say what their papers say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedlens import Experiment
from fedlens.base.errors import ConfigError
from fedlens.models.darts import ARCHITECTURE
from fedlens.models.registry import MODELS as REGISTRY
from fedlens.settings.config import Config
from fedlens.settings.config_source import read_source, recipes
from fedlens.settings.plan import plan

FASHION = [f"fashion-mnist/{a}-{p}" for a in ("fedavg", "fedprox", "centralized") for p in ("iid", "shards")]
CIFAR = ["cifar10/fedavg-dirichlet", "cifar10/fedavgm-dirichlet"]
GKT = ["cifar10/fedgkt", "cifar10/fedgkt-paper"]
NAS = ["digits-fednas", "cifar10/fednas-paper"]
# Recipes of the algorithms that need one more setting than the recipe digits has.
LACKING = {
    "digits-personal": ["fedbn", "local-only", "finetune"],
    "digits-admm": ["admm", "ceadmm", "iceadmm", "liadmm"],
}
PEERS = ["fashion-mnist/dsgd-ring", "fashion-mnist/push-sum", "fashion-mnist/vertical-quadrants"]
MATCHED = ["fashion-mnist/fedma", "cifar10/fedma-paper"]
PRIVATE = ["fashion-mnist/dp-fedavg", "fashion-mnist/dp-sgd"]
MOCO = "cifar10/moco-v2"
TABLE_2 = [
    *(
        f"fedcv/table2-cifar100-{m}-{p}"
        for m in ("efficientnet", "mobilenet")
        for p in ("centralized", "a0.1", "a0.5", "a100")
    ),
    *(
        f"fedcv/table2-gld23k-{m}-{p}"
        for m in ("efficientnet", "mobilenet", "vit")
        for p in ("centralized", "natural")
    ),
]
TABLES = [f"fedcv/table{number}" for number in range(11, 16)]
SPLIT = ["fashion-mnist/splitfed", "fashion-mnist/split-relay"]
SECURE = "fashion-mnist/secagg"
LAPTOP = ["fedcv/cifar100-laptop", "omniglot/drawers"]
SHAKESPEARE = ["shakespeare/roles", "shakespeare/roles-centralized"]
# He et al. 2021, table 5: training of the backbone, distribution, clients.
ROWS = [
    *(
        ("resnet101", *row)
        for row in (
            ("ft", "iid", 4),
            ("ft", "niid", 4),
            ("ft", "niid", 8),
            ("sfl", "niid", 4),
            ("fz", "niid", 4),
        )
    ),
    ("mobilenetv2", "ft", "niid", 4),
]
SEGMENTED = ("deeplabv3plus", "unet")
TABLE_5 = [f"fedcv/table5-{model}-{'-'.join(map(str, row))}" for model in SEGMENTED for row in ROWS]
VOC = [*TABLE_5, *(f"fedcv/{name}" for name in ("table6", "table7", "fig6", "fig7", "fig8"))]
COCO = [f"fedcv/{name}" for name in ("table8", "fig9a", "fig9b")]
CAMVID = [
    f"camvid/{name}" for name in ("drives", "iid", "drives-centralized", "frozen", "frozen-centralized")
]
BCCD = [f"bccd/{name}" for name in ("four", "four-iid", "eight", "eight-iid", "centralized")]
HSU2020 = [f"hsu2020/{name}" for name in ("cifar10", "cifar100", "inaturalist", "landmarks")]
CHEN2022 = [
    f"chen2022/{name}"
    for name in (
        "cifar10",
        "cityscapes",
        "fps-simsiam",
        "inaturalist",
        "penn-treebank",
        "sent140",
        "shakespeare",
        "supervised",
        "tiny-imagenet",
    )
]
STAND_INS = ["hsu2020/drawers", "hsu2020/places"]
PLACED = [*HSU2020, *STAND_INS, *VOC, *COCO, *CHEN2022, *CAMVID, *BCCD]


def test_they_are_these() -> None:
    assert sorted(recipes()) == sorted(
        [
            "demo",
            "digits",
            "digits-centralized",
            *LACKING,
            *NAS,
            *FASHION,
            *CIFAR,
            *GKT,
            *PEERS,
            *SPLIT,
            *MATCHED,
            *PRIVATE,
            MOCO,
            SECURE,
            *TABLE_2,
            *TABLES,
            *LAPTOP,
            *SHAKESPEARE,
            *PLACED,
        ]
    )


@pytest.mark.parametrize(
    "name",
    [
        "demo",
        "digits",
        *LACKING,
        *NAS,
        *FASHION,
        *CIFAR,
        *GKT,
        *PEERS,
        *SPLIT,
        *MATCHED,
        *PRIVATE,
        MOCO,
        *TABLE_2,
        *TABLES,
        *LAPTOP,
        *SHAKESPEARE,
        *PLACED,
    ],
)
def test_a_recipe_says_what_it_is_and_every_setting_is_right(name: str) -> None:
    first, second, *_ = recipes()[name].read_text(encoding="utf-8").splitlines()
    assert first.startswith("# ")
    assert first.endswith(".")
    assert second == "#", "the first comment line is the whole description"
    config = plan(Experiment.load(name).config, read_source(name)).config
    assert config.name == name.replace("/", "-"), "the runs of a recipe lie under its name"


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        pytest.param(recipe, name, marks=pytest.mark.nightly if name != names[0] else ())
        for recipe, names in LACKING.items()
        for name in names
    ],
)
def test_an_algorithm_that_digits_cannot_run_names_a_recipe_that_can(
    recipe: str, name: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"the recipe {recipe}"):
        Experiment.load("digits", [f"algorithm.name={name}"]).run(tmp_path / "digits")
    small = ["rounds=1", "select.clients_per_round=2", "engine.name=inline", f"algorithm.name={name}"]
    result = Experiment.load(recipe, small).run(tmp_path / "run", report=False)
    assert result.metrics[-1]["clients"] == 2


@pytest.mark.parametrize("name", FASHION)
def test_ghaemi2022(name: str) -> None:
    config = Experiment.load(name).config
    local = config.local
    assert (local.batch_size, local.lr, local.momentum) == (128, 0.05, 0.9)
    assert config.data.partition["clients"] == 100
    if "centralized" in name:
        assert config.rounds * (local.epochs or 1) == 10
    else:
        assert (config.rounds, local.epochs, config.select) == (80, 10, {"name": "uniform", "fraction": 0.1})
    if "fedprox" in name:
        assert config.algorithm == {"name": "fedprox", "mu": 3.0}


def test_he2020() -> None:
    config = Experiment.load("cifar10/fedgkt-paper").config
    local, algorithm = config.local, config.algorithm
    assert (config.rounds, local.optimizer, local.lr, local.epochs, local.batch_size) == (
        200,
        "adam",
        0.001,
        1,
        256,
    )
    assert (algorithm["client"], config.model["name"]) == ("gkt-resnet8", "gkt-resnet56")
    assert (algorithm["cut"], algorithm["server_epochs"]) == ("bn1", 20)


def weights(config: Config) -> int:
    """The trainable parameters of the recipe's model on CIFAR-10."""
    name, settings = config.model["name"], {k: v for k, v in config.model.items() if k != "name"}
    with torch.device("meta"):
        module = REGISTRY.find(name)((3, 32, 32), 10, **settings)
    return sum(p.numel() for name, p in module.named_parameters() if name not in ARCHITECTURE)


def test_fednas() -> None:
    config = Experiment.load("cifar10/fednas-paper").config
    local, algorithm = config.local, config.algorithm
    assert weights(config) == 1_930_618
    assert (config.rounds, local.epochs, local.batch_size) == (50, 5, 64)
    assert (local.lr, local.momentum, local.weight_decay, local.clip_norm) == (0.025, 0.9, 3e-4, 5.0)
    assert (algorithm["alpha_lr"], algorithm["alpha_decay"], algorithm["balance"]) == (3e-4, 1e-3, 1.0)
    assert config.data.partition == {"name": "dirichlet-classwise", "clients": 16, "alpha": 0.5}


def test_fedma(tmp_path: Path) -> None:
    experiment = Experiment.load("cifar10/fedma-paper")
    local, algorithm = experiment.config.local, experiment.config.algorithm
    assert weights(experiment.config) == 3_491_530
    assert (experiment.config.rounds, local.epochs, local.batch_size) == (10, 20, 64)
    assert (local.lr, local.momentum) == (0.01, 0.9)
    assert [algorithm[name] for name in ("sigma", "sigma0", "gamma", "passes")] == [1.0, 1.0, 7.0, 5]
    assert experiment.config.data.partition == {"name": "dirichlet-classwise", "clients": 16, "alpha": 0.5}
    # Its network is a chain that the algorithm takes: a pass with two units a layer on small images.
    small = ["data.dataset=digits", "data.partition={name='iid',clients=2}", "rounds=1", "local.epochs=1"]
    small += ["model.hidden_widths=[2,2,2,2,2,2,2,2]"]
    result = Experiment.load("cifar10/fedma-paper", small).run(tmp_path / "run", report=False)
    assert result.summary["failures"] == {}
    assert result.metrics[1]["clients"] == 2


@pytest.mark.parametrize("name", CIFAR)
def test_hsu2019(name: str) -> None:
    config = Experiment.load(name).config
    local = config.local
    assert (local.batch_size, local.epochs, local.weight_decay, local.lr_decay) == (64, 1, 0.004, 1.0)
    assert config.data.partition == {"name": "dirichlet", "clients": 100, "alpha": 0.1}
    assert config.select == {"name": "uniform", "fraction": 0.1}
    assert local.lr in [a * 10.0**e for e in (-4, -3, -2, -1) for a in (1, 3)]


@pytest.mark.parametrize("name", HSU2020)
def test_hsu2020(name: str) -> None:
    config = Experiment.load(name).config
    local = config.local
    cifar, landmarks = "cifar" in name, "landmarks" in name
    assert (local.lr, local.momentum, local.lr_decay) == (0.01, 0.0, 1.0)
    assert local.weight_decay == (4e-4 if cifar else 4e-5)
    assert (local.batch_size, local.epochs) == ((32, 5) if landmarks else (64, 1))
    assert config.select == {"name": "uniform", "clients_per_round": 10}
    if cifar:
        assert config.data.partition["clients"] == 100
        assert config.rounds == (20_000 if "100" in name else 10_000)
    else:
        assert config.model["norm"] == "group"
        assert config.data.dataset["size"] == (224 if landmarks else 299)
        assert config.model.get("bottleneck") == (64 if landmarks else None)


def test_fedavgm_and_fedavg_have_the_same_effective_rate() -> None:
    fedavg, fedavgm = (Experiment.load(name).config for name in CIFAR)
    beta = fedavgm.algorithm["momentum"]
    assert fedavgm.algorithm == {"name": "fedavgm", "momentum": 0.9, "nesterov": True, "lr": 1.0}
    assert fedavgm.local.lr / (1 - beta) == pytest.approx(fedavg.local.lr)


# Learning rates of He et al. 2021, table 2, by dataset and model: centralized, then the federated rows.
RATES = {
    ("cifar100", "efficientnet"): (0.01, 0.003, 0.01, 0.003),
    ("cifar100", "mobilenet"): (0.01, 0.003, 0.01, 0.003),
    ("gld23k", "efficientnet"): (0.3, 0.1),
    ("gld23k", "mobilenet"): (0.3, 0.03),
    ("gld23k", "vit"): (0.03, 0.03),
}
MODELS = {"efficientnet": "efficientnet-b0", "mobilenet": "mobilenet-v3-large", "vit": "vit-b-16"}


@pytest.mark.parametrize(("dataset", "model"), RATES)
def test_fedcv_table_2(dataset: str, model: str) -> None:
    names = [name for name in TABLE_2 if name.startswith(f"fedcv/table2-{dataset}-{model}-")]
    configs = [Experiment.load(name).config for name in names]
    assert tuple(config.local.lr for config in configs) == RATES[dataset, model]
    for config in configs:
        assert (config.local.momentum, config.local.epochs, config.data.normalize) == (0.9, 1, "half")
        assert config.model == {"name": MODELS[model], "weights": "imagenet"}
        assert config.data.dataset["name"] == dataset
    centralized, *federated = configs
    assert (centralized.algorithm["name"], centralized.local.batch_size, centralized.local.lr_decay) == (
        "centralized",
        256,
        0.97,
    )
    for config in federated:
        assert config.rounds == (8000 if model == "vit" else 4000)
        assert (config.local.batch_size, config.local.lr_decay, config.evaluation.every) == (32, 1.0, 100)
        assert config.select == {"name": "uniform", "clients_per_round": 10}
    if dataset == "cifar100":
        alphas = [config.data.partition["alpha"] for config in federated]
        assert alphas == [0.1, 0.5, 100.0]


def test_the_tables_of_fedcv_are_cells_of_table_2_or_beside_it() -> None:
    lrs = {name: Experiment.load(name).config.local.lr for name in TABLES}
    assert list(lrs.values()) == [0.01, 0.01, 0.1, 0.03, 0.03]


@pytest.mark.parametrize("name", VOC)
def test_fedcv_segmentation(name: str) -> None:
    config = Experiment.load(name).config
    local = config.local
    assert config.data.dataset == {"name": "pascal-voc", "augmented": True, "test": "sbd", "size": 512}
    assert (config.data.normalize, local.momentum, local.lr_schedule, local.lr_decay) == (
        "half",
        0.9,
        "constant",
        1,
    )
    assert local.epochs in (1, 2)
    assert isinstance(local.batch_size, int)
    assert 4 <= local.batch_size <= 16
    assert local.lr_scale == {"decoder": 10.0, "segmentation_head": 10.0}
    assert 0.0007 <= local.lr <= 10 * local.lr <= 0.1
    assert (config.select, config.algorithm) == ({"name": "all"}, {"name": "fedavg"})


@pytest.mark.parametrize("name", TABLE_5)
def test_fedcv_table_5(name: str) -> None:
    _, model, backbone, training, distribution, clients = name.split("-")
    config = Experiment.load(name).config
    assert (config.model["name"], config.model["backbone"].replace("-", "")) == (model, backbone)
    assert config.model.get("atrous") == ("plain" if model == "deeplabv3plus" else None)
    assert config.model.get("weights") == (None if training == "sfl" else "imagenet")
    assert config.model.get("freeze") == ("backbone" if training == "fz" else None)
    assert config.data.partition["clients"] == int(clients)
    skewed = {"name": "lda-multilabel", "clients": int(clients), "alpha": 0.5}
    assert config.data.partition == ({"name": "iid", "clients": 4} if distribution == "iid" else skewed)


@pytest.mark.parametrize("name", COCO)
def test_fedcv_detection(name: str) -> None:
    config = Experiment.load(name).config
    assert config.data.dataset["name"] == "coco"
    assert config.data.partition == {"name": "detection-frequency", "clients": 4}
    assert "weights" not in config.model
    local = config.local
    assert (config.data.normalize, local.momentum, local.epochs) == ("half", 0.9, 1)
    # The loss here is that of the document over the batch size.
    assert isinstance(local.batch_size, int)
    assert local.lr / local.batch_size == pytest.approx(0.01)


@pytest.mark.parametrize("name", ["cifar10", "tiny-imagenet", "inaturalist"])
def test_chen2022_table_6(name: str) -> None:
    """Chen et al. 2022, table 6 and appendix B.1."""
    config = Experiment.load(f"chen2022/{name}").config
    local = config.local
    places = name == "inaturalist"
    assert (local.optimizer, local.momentum, local.lr) == ("sgd", 0.9, 0.1 if places else 0.01)
    assert (local.batch_size, local.weight_decay) == (128 if places else 32, 1e-4)
    assert (config.rounds, local.epochs, local.lr_decay, local.lr_decay_every) == (100, 5, 0.1, 30)
    assert config.data.validation == 0.02
    if not places:
        assert config.data.partition == {"name": "dirichlet-classwise", "clients": 10, "alpha": 0.3}
    assert config.model["name"] == ("resnet20" if name == "cifar10" else "resnet18")


def test_chen2022_cityscapes() -> None:
    config = Experiment.load("chen2022/cityscapes").config
    local = config.local
    assert (local.optimizer, local.lr, local.batch_size) == ("adam", 0.001, 16)
    assert config.rounds == 100
    assert (config.data.partition, config.select) == ({"name": "natural"}, {"name": "all"})
    assert (config.model["name"], config.model["backbone"]) == ("deeplabv3plus", "mobilenet-v2")


def test_chen2022_fps() -> None:
    config = Experiment.load("chen2022/fps-simsiam").config
    assert (config.rounds, config.local.epochs) == (100, 1)
    settings = plan(config, read_source("chen2022/fps-simsiam")).config.data.dataset
    # The defaults are those of sections 5.2 and 6.1, or depend on the size alone.
    assert (settings["size"], settings["labels"], settings["pairs"]) == (32, "none", True)


# The cells of a table that its recipe's header names.
CELLS = {
    "fedcv/table6": [["local.batch_size=4"], ["model.name=unet", "local.batch_size=10"]],
    "fedcv/table7": [["model.freeze=backbone"], ["model.backbone=mobilenet-v2"], ["model.name=unet"]],
    "fedcv/table8": [[f"model.name=yolov5{size}"] for size in "mlx"],
    "fedcv/fig6": [["model.weights=none"], ["model.name=unet", "model.weights=none"], ["local.batch_size=6"]],
    "fedcv/fig7": [["data.partition.alpha=100", "model.name=unet"], ["data.partition.clients=8"]],
    "fedcv/fig8": [["model.freeze=backbone", "local.batch_size=16", "model.name=unet"]],
    "fedcv/fig9a": [["local.lr=1.6", "model.name=yolov5x"]],
    "fedcv/fig9b": [["data.partition.clients=8"], ["algorithm.name=centralized", "local.lr_schedule=linear"]],
    "chen2022/cityscapes": [["model.weights=none"], ["algorithm.name=centralized"]],
    "chen2022/fps-simsiam": [["data.dataset.pairs=false"]],
    "chen2022/sent140": [["model.weights=none"], ["algorithm.name=centralized"]],
}


@pytest.mark.parametrize("name", CELLS)
def test_the_cells_in_a_header_are_settings(name: str) -> None:
    header = recipes()[name].read_text(encoding="utf-8").split("\n\n", 1)[0]
    for cell in CELLS[name]:
        source = read_source(name, cell)
        planned = plan(Experiment.load(name, cell).config, source).config
        for change in cell:
            assert change.partition("=")[0] in header, change
        if "model.name=unet" in cell:
            assert planned.model["name"] == "unet"
            assert planned.model["backbone"] == "resnet101"


@pytest.mark.parametrize("name", [*CAMVID, *BCCD])
def test_a_federated_recipe_trains_on_three_times_the_images_of_its_centralized_twin(name: str) -> None:
    config = Experiment.load(name).config
    twin = {"camvid/frozen": "camvid/frozen-centralized"}.get(name, "camvid/drives-centralized")
    bound = Experiment.load("bccd/centralized" if name in BCCD else twin).config
    central = config.algorithm["name"] == "centralized"
    assert config.rounds == bound.rounds * (1 if central else 3)
    assert config.local == bound.local
    assert config.data.dataset == bound.data.dataset
    assert central == (config.select is None)


@pytest.mark.parametrize(("name", "twin"), [("four", "four-iid"), ("eight", "eight-iid")])
def test_the_iid_twin_differs_in_who_holds_an_image_alone(name: str, twin: str) -> None:
    skewed, iid = (Experiment.load(f"bccd/{one}").config for one in (name, twin))
    assert iid.data == skewed.data.model_copy(update={"reassign": True})
    assert (iid.model, iid.local, iid.rounds) == (skewed.model, skewed.local, skewed.rounds)


def test_shakespeare_is_trained_with_as_many_steps_federated_as_centrally() -> None:
    roles, pooled = (Experiment.load(name).config for name in SHAKESPEARE)
    assert roles.model == pooled.model == {"name": "lstm", "units": 128}
    assert (roles.local.optimizer, roles.local.lr, roles.local.batch_size) == (
        pooled.local.optimizer,
        pooled.local.lr,
        pooled.local.batch_size,
    )
    assert roles.select is not None
    assert (
        roles.rounds * roles.select["clients_per_round"] * (roles.local.steps or 0)
        == pooled.rounds * (pooled.local.steps or 0)
        == 20_000
    )
