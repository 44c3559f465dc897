"""A model of the zoo on data of another kind is refused before the data are decoded, with models that fit."""

from __future__ import annotations

import pytest
from torch import nn

from fedlens import Experiment
from fedlens.base.errors import ConfigError
from fedlens.base.registry import Entry
from fedlens.core.dataset_info import DatasetInfo, Kind
from fedlens.models.registry import MODELS
from fedlens.models.user_models import UserModel
from fedlens.settings.model_kind import refuse_other_kind


def info(kind: Kind) -> DatasetInfo:
    return DatasetInfo("street", kind, ("road", "sky"), (3, 64, 64))


@pytest.mark.parametrize(
    ("model", "kind", "fitting"),
    [
        ("resnet20", "segmentation", "unet"),
        ("unet", "classification", "linear"),
        ("deeplabv3plus", "multi-label", "linear"),
        ("unet", "detection", "take"),
    ],
)
def test_the_message_names_the_model_both_kinds_and_models_that_fit(
    model: str, kind: Kind, fitting: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_other_kind(model, MODELS.find(model), info(kind))
    assert caught.value.what == (
        f"the model '{model}' is for {MODELS.entries[model].task}, but the dataset 'street' is for {kind}"
    )
    assert caught.value.where == "model.name"
    assert fitting in str(caught.value.hint)


@pytest.mark.parametrize(
    ("model", "kind"), [("resnet20", "classification"), ("resnet20", "multi-label"), ("unet", "segmentation")]
)
def test_a_model_on_its_own_kind_is_taken(model: str, kind: Kind) -> None:
    refuse_other_kind(model, MODELS.find(model), info(kind))


def test_models_of_a_user_and_of_other_packages_are_not_judged_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = UserModel(lambda input_shape, classes: nn.Linear(64, classes), "unet")
    refuse_other_kind("unet", own, info("classification"))
    refuse_other_kind("net:make", own, info("detection"))
    monkeypatch.setitem(MODELS.entries, "theirs", Entry("their.module:make", "a model of theirs"))
    refuse_other_kind("theirs", lambda: None, info("detection"))


def test_a_run_is_refused_before_it_starts() -> None:
    with pytest.raises(
        ConfigError, match="'unet' is for segmentation, but the dataset 'digits' is for class"
    ):
        Experiment(
            rounds=1,
            data={"dataset": "digits", "partition": {"name": "iid", "clients": 3}},
            model="unet",
            local={"lr": 0.1, "batch_size": 8},
        ).run()
