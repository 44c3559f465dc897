"""DistilBERT against transformers' own classifier, with the same weights; what its weights must be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedlens.base.errors import ConfigError, DataError
from fedlens.models.weights import InitialWeights
from fedlens.models.weights_setting import names_a_file
from tests.unit.models.zoo_kit import made, parameters, shape_only

SMALL: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "vocabulary": 100}
THEIRS: dict[str, Any] = {"vocab_size": 100, "n_layers": 2, "n_heads": 4, "dim": 32, "hidden_dim": 128}


def small(classes: int = 3, **changed: Any) -> nn.Module:
    return made("distilbert", (9,), classes, **{**SMALL, **changed})


def of_transformers(kind: str = "ForSequenceClassification", **changed: Any) -> Any:
    """A network of transformers, whose import takes seconds that collecting tests need not wait."""
    import transformers

    config = transformers.DistilBertConfig(**{**THEIRS, **changed})
    return getattr(transformers, f"DistilBert{kind}")(config)


def published(folder: Path, kind: str = "ForSequenceClassification", **changed: Any) -> Any:
    """A network of transformers, saved in `folder` as its authors' are."""
    torch.manual_seed(1)
    module = of_transformers(kind, **{"num_labels": 3, "initializer_range": 0.3, **changed})
    module.save_pretrained(folder)
    return module.eval()


def tokens() -> Tensor:
    """Three texts of 9 tokens, the second of them padded after its fifth."""
    drawn = torch.randint(1, 100, (3, 9), generator=torch.Generator().manual_seed(0))
    drawn[1, 5:] = 0
    return drawn


def loaded(setting: Path | str, **changed: Any) -> tuple[nn.Module, InitialWeights]:
    module, weights = small(**changed), InitialWeights(str(setting))
    weights.load(module, changed.get("classes", 3))
    return module.eval(), weights


def test_the_logits_are_those_of_transformers_with_the_same_weights(tmp_path: Path) -> None:
    theirs = published(tmp_path)
    module, weights = loaded(tmp_path)
    assert weights.match is not None
    assert (len(weights.match.loaded), weights.match.drawn) == (len(theirs.state_dict()), ())
    given = tokens()
    expected = theirs(given, attention_mask=(given != 0).long()).logits
    torch.testing.assert_close(module(given), expected)
    assert not torch.allclose(theirs(given).logits[1], expected[1], atol=1e-4), (
        "padding must make a difference"
    )


def test_of_a_text_of_padding_alone_the_first_token_counts(tmp_path: Path) -> None:
    theirs = published(tmp_path)
    module, _ = loaded(tmp_path)
    blank = torch.zeros(2, 9, dtype=torch.int64)
    torch.testing.assert_close(module(blank), theirs(blank[:, :1]).logits)


def test_the_published_network_has_66_955_010_parameters() -> None:
    assert parameters(shape_only("distilbert", (64,), 2)) == 66_955_010
    assert parameters(small(2)) == parameters(of_transformers())


def test_initial_weights_are_drawn_as_in_transformers() -> None:
    torch.manual_seed(0)
    theirs = of_transformers(num_labels=3).state_dict()
    ours = small().state_dict()
    assert ours.keys() == theirs.keys()
    assert all(
        torch.equal(value, theirs[name]) for name, value in ours.items() if name.startswith("distilbert")
    )
    for name in ("pre_classifier", "classifier"):
        assert ours[f"{name}.weight"].std().item() == pytest.approx(0.02, rel=0.3)
        assert not ours[f"{name}.bias"].any()


def test_dropout_acts_in_training_alone_and_every_weight_gets_a_gradient() -> None:
    module = small().eval()
    assert torch.equal(module(tokens()), module(tokens()))
    torch.manual_seed(0)
    assert not torch.equal(module.train()(tokens()), module(tokens()))
    module(tokens()).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in module.parameters())


def test_weights_of_a_language_model_leave_the_heads_as_drawn(tmp_path: Path) -> None:
    theirs = published(tmp_path, "ForMaskedLM")
    module, weights = loaded(tmp_path)
    body = {name: value for name, value in theirs.state_dict().items() if name.startswith("distilbert.")}
    assert all(torch.equal(module.state_dict()[name], value) for name, value in body.items())
    assert weights.match is not None
    assert {name.partition(".")[0] for name in weights.match.head} == {"pre_classifier", "classifier"}
    assert weights.match.drawn == ()


def test_weights_of_the_body_alone_are_loaded_into_it(tmp_path: Path) -> None:
    theirs = published(tmp_path / "whole").distilbert
    theirs.save_pretrained(tmp_path / "body")
    module, weights = loaded(tmp_path / "body")
    assert weights.match is not None
    assert weights.match.backbone == "distilbert"
    assert torch.equal(module(tokens()), module(tokens()))
    assert all(
        torch.equal(module.distilbert.state_dict()[name], v) for name, v in theirs.state_dict().items()
    )


def test_the_hub_s_cache_is_read_as_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert names_a_file("hub:us/tiny")
    with pytest.raises(
        ConfigError, match=r"the weights us/tiny \(config.json\) are not in the cache .*--download"
    ):
        loaded("hub:us/tiny")
    folder = tmp_path / "models--us--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("0123abc")
    theirs = published(folder / "snapshots/0123abc")
    module, _ = loaded("hub:us/tiny")
    torch.testing.assert_close(
        module(tokens()), theirs(tokens(), attention_mask=(tokens() != 0).long()).logits
    )
    published(folder / "snapshots/0123abc", n_heads=8)
    with pytest.raises(ConfigError, match=r"states n_heads = 8, but the model has 4"):
        loaded("hub:us/tiny")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_heads": 2}, r"config.json states n_heads = 2, but the model has 4"),
        ({"activation": "relu"}, r"config.json states activation = 'relu', but the model has 'gelu'"),
        (
            {"vocab_size": 90},
            r"word_embeddings.weight' is \[90, 32\] in .*, but \[100, 32\] in the model: other tokens",
        ),
        ({"dim": 64, "hidden_dim": 256}, r"is \[100, 64\] in .*, but \[100, 32\] in the model"),
    ],
)
def test_weights_of_another_network_or_vocabulary_are_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    published(tmp_path, **changed)
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path)


def test_a_folder_without_weights_or_with_a_broken_configuration_is_refused(tmp_path: Path) -> None:
    published(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match="the configuration cannot be read"):
        loaded(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"weights file not found: .*model\.safetensors"):
        loaded(tmp_path)


def test_a_file_with_code_runs_none_of_it(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "distilbert"}), encoding="utf-8")
    torch.save({"a": Evil()}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="fedlens ran nothing of it"):
        loaded(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_embeddings_of_other_tokens_are_loaded_only_where_parts_may_be(tmp_path: Path) -> None:
    path, module = tmp_path / "lstm.safetensors", made("lstm", (9,), 5, units=6, vocabulary=12)
    save_file(made("lstm", (9,), 5, units=6, vocabulary=11).state_dict(), path)
    with pytest.raises(ConfigError, match=r"'embedding.weight' is \[11, 8\]"):
        InitialWeights(str(path)).load(module, 5)
    weights = InitialWeights(str(path), partial=True)
    weights.load(module, 5)
    assert weights.match is not None
    assert weights.match.drawn == ("embedding.weight",)


def test_what_it_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"model.width is 32, which is no multiple of model.heads, 5"):
        small(heads=5)
    with pytest.raises(ConfigError, match="texts of at most 512 tokens, but they have 600"):
        made("distilbert", (600,), 2, **SMALL)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"needs transformers, which is not installed.*fedlens\[text\]"):
        small()
