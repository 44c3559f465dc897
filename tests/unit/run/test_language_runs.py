"""Runs on text: engines, a loop in bare PyTorch, tokens at each position, exports, and what text does not have.

The text is real: two sonnets by Shakespeare, as LEAF's files have roles, and tweets in the form of sent140's files.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from fedlens import Experiment, Result, load_result
from fedlens.base.errors import ConfigError, RunDirectoryError
from fedlens.core.protocol import ModelSpec
from fedlens.data.arrays import dataset
from fedlens.data.dataset import Dataset
from fedlens.data.datasets.shakespeare import shakespeare
from fedlens.data.partition.partition import Partition
from fedlens.models.language import lstm
from tests.unit.data.datasets.small_files import leaf, write_leaf
from tests.unit.data.datasets.test_sent140 import tweet

pytestmark = pytest.mark.usefixtures("quick_workers")

SONNETS = {
    "SONNET_18": (
        "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\nRough winds do shake the "
        "darling buds of May,\nAnd summer's lease hath all too short a date;\nSometime too hot the eye of heaven "
    ),
    "SONNET_29": (
        "When, in disgrace with fortune and men's eyes,\nI all alone beweep my outcast state,\nAnd trouble deaf heaven "
        "with my bootless cries,\nAnd look upon myself and curse my fate,\nWishing me like to one more rich in hope,"
    ),
}
LSTM = {"name": "lstm", "units": 8, "embedding": 4}
MOODS = {
    "good": [
        "love this sunny day",
        "so happy , great song",
        "love love it",
        "great day !",
        "happy happy song",
    ],
    "bad": ["hate this rainy day", "so sad , awful song", "hate hate it", "awful day !", "sad sad song"],
}


def windows(text: str, start: int, stop: int) -> tuple[list[str], list[str]]:
    """Texts of 80 characters, and the character after each."""
    starts = range(start, stop)
    return [text[at : at + 80] for at in starts], [text[at + 80] for at in starts]


def write_plays(root: Path) -> None:
    """A data directory with the sonnets in LEAF's layout: 24 training and 6 test windows of each."""
    for split, stretch in (("train", (0, 24)), ("test", (90, 96))):
        people = {name: windows(text, *stretch) for name, text in SONNETS.items()}
        write_leaf(root / "shakespeare" / split, leaf(people))


@pytest.fixture
def plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the data directory of `write_plays`."""
    write_plays(tmp_path / "data")
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path / "data"))
    return tmp_path


def experiment(*overrides: str, **changed: Any) -> Experiment:
    settings: dict[str, Any] = {
        "rounds": 2,
        "data": {"dataset": "shakespeare", "partition": "natural"},
        "model": LSTM,
        "local": {"lr": 0.5, "batch_size": 8},
        "engine": "inline",
    }
    return Experiment(**(settings | changed)).with_settings(*overrides)


def weights(result: Result) -> dict[str, torch.Tensor]:
    return load_file(result.directory / "model.safetensors")


def test_a_run_has_the_vocabulary_and_the_metrics_of_tokens(plays: Path) -> None:
    result = experiment().run(plays / "run")
    written = tomllib.loads((plays / "run" / "config.toml").read_text(encoding="utf-8"))
    assert written["task"]["name"] == "language"
    assert written["model"]["vocabulary"] == 80
    last = result.metrics[-1]
    assert last["test_perplexity"] == pytest.approx(np.exp(last["test_loss"]))
    assert last["test_loss"] < result.metrics[0]["test_loss"]
    summary = json.loads((plays / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["best"]["metric"] == "test_accuracy"
    assert summary["model"]["multiply_adds"] == 80 * (4 * 8 * (4 + 8) + 4 * 8 * (8 + 8)) + 8 * 80
    assert not any("means over classes" in note for note in summary["notes"])


def test_the_engines_give_the_same_bits(plays: Path) -> None:
    inline = experiment().run(plays / "inline", report=False)
    workers = experiment('engine={name="processes", workers=2}').run(plays / "two", report=False)
    one, other = weights(inline), weights(workers)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_one_client_trains_as_a_loop_in_bare_pytorch(plays: Path) -> None:
    data = shakespeare(plays / "data", False, 0)
    tokens, following = (torch.from_numpy(part).long() for part in (data.train.inputs, data.train.targets))
    run = experiment(
        rounds=1,
        data={"dataset": "shakespeare", "partition": {"name": "iid", "clients": 1}},
        local={"lr": 0.5, "batch_size": "all", "epochs": 3},
        seeds={"initialization": 7},
    )
    result = run.run(plays / "run", report=False)
    module = ModelSpec(lstm, "lstm", {"units": 8, "embedding": 4, "vocabulary": 80}, (80,), 80, 7).build()
    sgd = torch.optim.SGD(module.parameters(), lr=0.5)
    order = torch.from_numpy(Partition.load(result.directory / "partition.npz").indices.copy())
    for _ in range(3):
        sgd.zero_grad()
        F.cross_entropy(module(tokens[order]), following[order]).backward()
        sgd.step()
    trained = weights(result)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)


def spelled(targets: str) -> Dataset:
    """Windows of both sonnets; targets are the next character of each token, some of them -1."""
    texts = [text[at : at + 11] for text in SONNETS.values() for at in range(0, 96, 4)]
    letters = sorted(set("".join(texts)))
    ids = np.array([[letters.index(letter) for letter in text] for text in texts])
    inputs, following = ids[:, :10], ids[:, 1:].copy()
    if targets == "gaps":
        following[:24, ::2] = -1
        following[24:] = -1  # the second client has no token to learn from
    clients = np.repeat(["first", "second"], 24)
    return dataset(inputs, following, inputs[:9], following[:9], classes=letters, clients=clients)


def by_position() -> Dataset:
    """A target at each position."""
    return spelled("all")


def with_gaps() -> Dataset:
    """A target at every other position of the first client's texts, and none in the second client's."""
    return spelled("gaps")


def test_a_target_at_each_position_trains_an_lstm_with_every_output(tmp_path: Path) -> None:
    data = {"dataset": by_position, "partition": "natural"}
    model = {**LSTM, "outputs": "every"}
    result = experiment(data=data, model=model, rounds=6, local={"lr": 1.0, "batch_size": 8}).run(
        tmp_path / "run", report=False
    )
    assert result.metrics[-1]["test_loss"] < result.metrics[0]["test_loss"] - 0.3
    for more, message in (
        (
            {"model": LSTM},
            r"for 2 texts, but must return \[2, 10, \d+\]: one number a class at each",
        ),
        ({"engine": "vectorized"}, "the loss of a batch is not the mean of losses of its examples"),
        ({"algorithm": "moon"}, "feature"),
    ):
        with pytest.raises(ConfigError, match=message):
            experiment(**{"data": data, "model": model, **more}).run(tmp_path / "other")


def test_a_client_without_a_token_changes_nothing_and_is_not_nan(tmp_path: Path) -> None:
    result = experiment(
        data={"dataset": with_gaps, "partition": "natural"}, model={**LSTM, "outputs": "every"}
    ).run(tmp_path / "run", report=False)
    assert all(
        np.isfinite(line["test_loss"]) and np.isfinite(line["local_loss"]) for line in result.metrics[1:]
    )
    assert all(value.isfinite().all() for value in weights(result).values())


@pytest.mark.nightly
@pytest.mark.parametrize("ending", ["pt2", "onnx"])
def test_the_exported_model_takes_tokens(ending: str, plays: Path) -> None:
    result = experiment(rounds=1).run(plays / "run", report=False)
    file = result.export(plays / f"model.{ending}", round="last")
    facts = json.loads((plays / f"model.{ending}.json").read_text(encoding="utf-8"))
    assert facts["input"] == {"name": "tokens", "type": "int64", "shape": ["n", 80]}
    assert (facts["tokens"], facts["vocabulary"]) == (80, 80)
    tokens = torch.randint(80, (5, 80), generator=torch.Generator().manual_seed(0))
    if ending == "pt2":
        answer = torch.export.load(file).module()(tokens)
        chosen, scores = answer["class"], answer["scores"].detach()
    else:
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        chosen, scores = session.run(["class", "scores"], {"tokens": tokens.numpy()})
    expected = result.model.eval()(tokens).softmax(1).detach().numpy()
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert chosen.tolist() == expected.argmax(1).tolist()


def test_predict_says_that_it_takes_images(plays: Path) -> None:
    experiment(rounds=1).run(plays / "run", report=False)
    with pytest.raises(
        RunDirectoryError, match="the model takes text, and only image files can be predicted"
    ):
        list(load_result(plays / "run").predict([str(plays)]))


@pytest.fixture
def tweets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data directory with tweets of three users in LEAF's layout, and a vocabulary of word pieces."""
    people = {
        user: ([tweet(text, user) for text in (*MOODS["good"], *MOODS["bad"])], [4] * 5 + [0] * 5)
        for user in ("amy", "zoe", "kim")
    }
    held_out = [tweet("so happy , love this song", "kim"), tweet("awful awful , hate it", "kim")]
    write_leaf(tmp_path / "sent140" / "train", leaf(people))
    write_leaf(tmp_path / "sent140" / "test", leaf({"kim": (held_out, [4, 0])}))
    words = sorted({word for texts in MOODS.values() for text in texts for word in text.split()})
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words]), encoding="utf-8"
    )
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path))
    return tmp_path


def test_tweets_of_hand_written_files_train_the_mean_of_embeddings(tweets: Path) -> None:
    result = experiment(
        rounds=8,
        data={"dataset": {"name": "sent140", "vocabulary": 12}, "partition": "natural"},
        model={"name": "mean-embedding", "embedding": 4},
        local={"lr": 2.0, "batch_size": 5},
        engine="vectorized",
    ).run(tweets / "run", report=False)
    assert result.config["model"]["vocabulary"] == 14  # 12 words, padding, and any other word
    assert result.metrics[-1]["test_accuracy"] == 1.0
    assert result.metrics[-1]["test_perplexity"] < 1.5


def distilbert(tweets: Path, *overrides: str, **model: Any) -> Experiment:
    """Two rounds of a small DistilBERT on word pieces."""
    return experiment(
        *overrides,
        data={"dataset": {"name": "sent140", "tokenizer": str(tweets), "length": 9}, "partition": "natural"},
        model={"name": "distilbert", "layers": 2, "width": 32, "heads": 4, **model},
        local={"lr": 0.003, "optimizer": "adam", "batch_size": 5, "epochs": 8},
    )


def test_tweets_in_word_pieces_train_distilbert(tweets: Path) -> None:
    result = distilbert(tweets).run(tweets / "one", report=False)
    assert result.config["model"]["vocabulary"] == len(
        (tweets / "vocab.txt").read_text(encoding="utf-8").split()
    )
    assert result.metrics[-1]["test_accuracy"] == 1.0
    assert result.metrics[-1]["test_loss"] < result.metrics[0]["test_loss"] - 0.1
    frozen = distilbert(tweets, weights=f"run:{tweets / 'one'}", freeze="backbone").run(
        tweets / "frozen", report=False
    )
    body = [name for name in weights(result) if name.startswith("distilbert.")]
    assert body
    assert all(torch.equal(weights(frozen)[name], weights(result)[name]) for name in body)
    assert not torch.equal(weights(frozen)["classifier.weight"], weights(result)["classifier.weight"])


@pytest.mark.nightly  # the export of a transformer takes long, and that of the LSTM is tried above
def test_an_exported_distilbert_has_its_scores(tweets: Path) -> None:
    result = distilbert(tweets, "rounds=1").run(tweets / "one", report=False)
    session = onnxruntime.InferenceSession(result.export(tweets / "model.onnx", round="last"))
    tokens = torch.tensor([[2, 5, 9, 3, 0, 0, 0, 0, 0], [2, 8, 3, 0, 0, 0, 0, 0, 0]])
    _, scores = session.run(["class", "scores"], {"tokens": tokens.numpy()})
    np.testing.assert_allclose(scores, result.model.eval()(tokens).softmax(1).detach().numpy(), atol=1e-5)


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop"
)  # PyTorch's attention has no form for many models
def test_clients_train_distilbert_together_without_dropout_in_its_attention(tweets: Path) -> None:
    alone = distilbert(tweets, "rounds=1", dropout=0).run(tweets / "alone", report=False)
    together = distilbert(tweets, "rounds=1", 'engine="vectorized"', dropout=0).run(
        tweets / "both", report=False
    )
    for name, value in weights(alone).items():
        torch.testing.assert_close(weights(together)[name], value, rtol=1e-3, atol=1e-4)
    with pytest.raises(ConfigError, match="cannot train several clients at once"):
        distilbert(tweets, 'engine="vectorized"').run(tweets / "dropped")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"model": {**LSTM, "vocabulary": 70}},
            "model.vocabulary is 70, but 'shakespeare' has tokens up to 79",
        ),
        (
            {"model": {**LSTM, "cache_features": True, "freeze": "backbone"}},
            "features are kept of images only",
        ),
        ({"engine": "vectorized"}, "the layer 'lstm' is recurrent"),
        (
            {"model": "resnet20"},
            "the model 'resnet20' is for classification, but the dataset 'shakespeare' is for lang",
        ),
        ({"model": "linear"}, "the model 'linear' is for classification"),
        ({"data": {"augment": "flip"}}, "the augmentation 'flip' changes images, but 'shakespeare' is text"),
        ({"data": {"normalize": "imagenet"}}, "text cannot be normalized as 'imagenet'"),
        ({"data": {"partition": {"name": "feature", "clients": 2}}}, "is text, which has no brightness"),
    ],
)
def test_what_does_not_fit_text_is_refused_before_the_run(
    plays: Path, changed: dict[str, Any], message: str
) -> None:
    data = {"dataset": "shakespeare", "partition": "natural", **changed.pop("data", {})}
    with pytest.raises(ConfigError, match=message):
        experiment(**{"data": data, **changed}).run(plays / "run")
    assert not (plays / "run").exists()


def test_a_model_of_text_is_refused_on_images(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="the model 'lstm' is for language, but the dataset 'digits' is for class"
    ):
        experiment(data={"dataset": "digits", "partition": {"name": "iid", "clients": 2}}).run(
            tmp_path / "run"
        )


OWN = """
from torch import nn

class Bag(nn.Module):
    def __init__(self, vocabulary, classes, size=3):
        super().__init__()
        self.embedding, self.out = nn.Embedding(vocabulary, size), nn.Linear(size, classes)

    def forward(self, tokens):
        return self.out(self.embedding(tokens).mean(1))

class Small(Bag):
    def __init__(self, classes):
        super().__init__(50, classes)
"""


def test_a_model_of_a_users_own_gets_the_vocabulary_or_is_tried_with_the_last_token(plays: Path) -> None:
    own = plays / "own.py"
    own.write_text(OWN, encoding="utf-8")
    result = experiment(model=f"{own}:Bag", rounds=1).run(plays / "run", report=False)
    assert result.config["model"]["vocabulary"] == 80
    assert weights(result)["embedding.weight"].shape == (80, 3)
    with pytest.raises(ConfigError, match=r"cannot take tokens .*IndexError.*tokens up to 79"):
        experiment(model=f"{own}:Small").run(plays / "other")
    with pytest.raises(ConfigError, match="needs a vocabulary, which images do not have"):
        experiment(
            model=f"{own}:Bag", data={"dataset": "digits", "partition": {"name": "iid", "clients": 2}}
        ).run(plays / "other")
