"""`weights = "imagenet"`: the file in the cache of the Hugging Face Hub, against timm's own tables; no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from timm.models import _hub
from torch import nn

from fedlens.base.errors import ConfigError, DataError
from fedlens.models.imagenet import FILES, imagenet_file, repository_of
from fedlens.models.registry import MODELS
from fedlens.models.timm_models import TIMM_NAMES
from fedlens.models.user_models import downloads
from fedlens.models.weights import InitialWeights

REPOSITORY = "timm/mobilenetv2_100.ra_in1k"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def module(classes: int = 10) -> nn.Module:
    made: nn.Module = MODELS.find("mobilenet-v2")((3, 32, 32), classes)
    return made


def fill(cache: Path, name: str) -> Path:
    """The path of a file in the cache, in the layout of the Hub; its folder is made."""
    folder = cache / f"models--{REPOSITORY.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("0123abc")
    (folder / "snapshots/0123abc").mkdir(parents=True)
    return folder / "snapshots/0123abc" / name


@pytest.mark.parametrize("name", TIMM_NAMES)
def test_repositories_and_file_names_are_those_of_timm_s_tables(name: str) -> None:
    with torch.device("meta"):
        made = MODELS.find(name)((3, 224, 224), 1000)
    published = timm.models.get_pretrained_cfg(TIMM_NAMES[name])
    assert published is not None
    assert repository_of(made) == published.hf_hub_id
    assert published.hf_hub_id.startswith("timm/")
    assert published.num_classes == 1000
    assert published.hf_hub_filename is None, "timm would load a file of another name"
    assert FILES == (_hub.HF_SAFE_WEIGHTS_NAME, _hub.HF_WEIGHTS_NAME)


def test_a_file_in_the_cache_is_loaded_without_its_classifier(cache: Path) -> None:
    published = module(1000).state_dict()
    save_file(published, fill(cache, "model.safetensors"))
    started = module()
    weights = InitialWeights("imagenet")
    weights.load(started, 10)
    assert torch.equal(started.state_dict()["conv_stem.weight"], published["conv_stem.weight"])
    assert weights.match is not None
    assert weights.match.head == ("classifier.weight", "classifier.bias")
    assert weights.match.drawn == weights.match.unused == ()


def test_safetensors_come_before_a_pickle_and_a_pickle_before_nothing(cache: Path) -> None:
    pickled = fill(cache, "pytorch_model.bin")
    torch.save(module().state_dict(), pickled)
    assert imagenet_file(module()) == pickled
    preferred = pickled.with_name("model.safetensors")
    save_file(module().state_dict(), preferred)
    assert imagenet_file(module()) == preferred


def test_an_empty_cache_is_an_error_that_names_the_file_and_the_folder(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_: pytest.fail("downloaded"))
    with pytest.raises(ConfigError) as error:
        imagenet_file(module())
    for part in (
        f"{REPOSITORY} (model.safetensors)",
        str(cache / "models--timm--mobilenetv2_100"),
        "--download",
    ):
        assert part in str(error.value)


def test_an_allowed_download_asks_for_the_published_file(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def download(*arguments: str) -> str:
        asked.append(arguments)
        return str(tmp_path / "a.safetensors")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with downloads(True):
        assert imagenet_file(module()) == tmp_path / "a.safetensors"
    assert asked == [(REPOSITORY, "model.safetensors")]


def test_a_failed_download_is_a_data_error_with_its_reason(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: str) -> str:
        raise OSError("network unreachable\nmore")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with downloads(True), pytest.raises(DataError, match="OSError: network unreachable"):
        imagenet_file(module())


@pytest.mark.paper
@pytest.mark.parametrize("name", TIMM_NAMES)
def test_the_published_weights_match_every_leaf(name: str, cache: Path) -> None:
    """Downloads them: it needs a network that reaches the Hugging Face Hub."""
    weights = InitialWeights("imagenet")
    with downloads(True):
        weights.load(MODELS.find(name)((3, 224, 224), 1000), 1000)
    assert weights.match is not None
    assert len(weights.match.loaded) == weights.match.leaves
