"""Settings from recipes and files, what is set on top of them, and where a person finds each."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedlens.base.errors import ConfigError
from fedlens.settings.config import plain, read_config
from fedlens.settings.config_source import Source, override, read_source, recipe_path, recipes
from fedlens.settings.toml_lines import key_lines

TEXT = """\
name = "x"
rounds = 2   # a comment

[data]
dataset = "digits"
partition = { name = "iid", clients = 4 }  # [not.a.table]

[ model ]  # a table all the same
name = "mlp"
hidden = 20

[evaluation]
list = [
  [1, 2],
  [3, 4]
]
every = 2
"""


def test_the_line_of_each_table_and_key() -> None:
    lines = key_lines(TEXT)
    assert lines == {
        "name": 1, "rounds": 2, "data": 4, "data.dataset": 5, "data.partition": 6, "data.partition.name": 6,
        "data.partition.clients": 6, "model": 8, "model.name": 9, "model.hidden": 10, "evaluation": 12,
        "evaluation.list": 13, "evaluation.list.0": 14, "evaluation.list.0.0": 14, "evaluation.list.0.1": 14,
        "evaluation.list.1": 15, "evaluation.list.1.0": 15, "evaluation.list.1.1": 15, "evaluation.every": 17,
    }  # fmt: skip


def test_a_missing_key_has_the_line_of_its_table_and_one_in_a_list_its_own() -> None:
    text = '[data.dataset]\nname = "digits"\n\n[[client]]\nname = "topk"\n[[client]]\nnaem = "topk"'
    source = Source(tomllib.loads(text), Path("my.toml"), key_lines(text))
    assert source.locate("data.validation") == "my.toml, line 1: data.validation, which is not set there"
    assert source.locate("client.1.naem") == "my.toml, line 7: client.1.naem"


def test_where_a_person_finds_a_key() -> None:
    source = override(
        Source(tomllib.loads(TEXT), Path("my.toml"), key_lines(TEXT)),
        ["model.name=linear", "select.fraction=1"],
    )
    assert source.locate("rounds") == "my.toml, line 2: rounds"
    assert source.locate("data.partition.clients") == "my.toml, line 6: data.partition.clients"
    assert source.locate("data.validation") == "my.toml, line 4: data.validation, which is not set there"
    assert source.locate("local.lr") == "my.toml: local.lr"
    assert source.locate("model.name") == "--set model.name"
    assert source.locate("model.hidden") == "my.toml, line 10: model.hidden"
    assert source.locate("model") == "my.toml, line 8: model, with --set model.name"
    assert source.locate("select") == "--set select.fraction"
    assert override(source, ["model={name='mlp', hidden=3}"]).locate("model.hidden") == "--set model.hidden"
    assert Source({}).locate("local.lr") == "local.lr"


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ("data.dataset", "mnist"),
        ("data.partition", "dirichlet"),
        ("model", "'small-cnn'"),
        ("algorithm", "fedprox"),
        ("select", "fraction"),
        ("aggregate", "weighted"),
        ("server", "adam"),
        ("engine", "ray"),
    ],
)
def test_a_name_for_a_table_is_the_name_in_it(table: str, name: str) -> None:
    given = {**tomllib.loads(TEXT), "aggregate": {"x": 1}, "server": {"name": "sgd", "lr": 1}, "engine": {}}
    given["data"]["partition"] = {"name": "iid", "clients": 3}
    given["data"]["dataset"] = {"name": "digits"}
    given |= {"algorithm": {"name": "fedavg"}, "select": {"clients_per_round": 3}}
    short, long = (override(Source(given), [f"{key}={name}"]) for key in (table, f"{table}.name"))
    assert short == long
    assert short.renamed == {table}


def test_a_table_without_components_takes_no_name() -> None:
    assert override(Source({"local": {"lr": 0.1}}), ["local=x"]).values == {"local": "x"}
    assert override(Source({"model": "mlp"}), ["model=linear"]).values == {"model": "linear"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("local.lr=0.5", 0.5),
        ("local.lr=1e-3", 1e-3),
        ("local.lr = 3 ", 3),
        ("local.lr=true", True),
        ("local.lr=inf", float("inf")),
        ("local.lr=word", "word"),
        ("local.lr='3'", "3"),
        ("local.lr=[1, 2]", [1, 2]),
        ("local.lr={name='x', y=1}", {"name": "x", "y": 1}),
        ("local.lr=a=b", "a=b"),
        ("local.lr=my file.py:f", "my file.py:f"),
        ("local.lr=", ""),
    ],
)
def test_a_value_is_toml_or_else_a_word(text: str, value: Any) -> None:
    assert override(Source({"local": {"lr": 1.0}}), [text]).values == {"local": {"lr": value}}


def test_an_override_changes_neither_the_source_nor_the_other_settings() -> None:
    values = tomllib.loads(TEXT)
    source = Source(values, Path("my.toml"), key_lines(TEXT))
    changed = override(source, ["data.dataset.download=1", "model.name=linear", "new.table.key=1"])
    assert values == source.values == tomllib.loads(TEXT)
    assert changed.values["data"]["dataset"] == {"name": "digits", "download": 1}
    assert changed.values["new"] == {"table": {"key": 1}}
    assert changed.renamed == {"model"}
    assert override(changed, ["rounds=3"]).renamed == {"model"}


def test_the_seed_of_a_finished_run_can_be_changed() -> None:
    least = {
        "rounds": 1,
        "model": "linear",
        "local": {"lr": 1},
        "data": {"dataset": "digits", "partition": "iid"},
    }
    written = plain(read_config({**least, "seeds": {"data": 5}}))
    again = read_config(override(Source(written), ["seed=9"]).values)
    assert again.seeds.data == 5
    assert again.seeds.training == read_config({**least, "seed": 9}).seeds.training


def test_every_recipe_can_be_read() -> None:
    assert "digits" in recipes()
    for name, path in recipes().items():
        source = read_source(name)
        assert source.path == path == recipe_path(name)
        assert read_config(source.values, source.locate).name


def test_a_file_goes_before_a_recipe_and_needs_no_suffix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_source("digits").path == recipes()["digits"]
    (tmp_path / "digits").mkdir()
    assert read_source("digits").path == recipes()["digits"]  # a folder of that name is not meant
    (tmp_path / "digits").rmdir()
    (tmp_path / "digits").write_text(TEXT)
    assert read_source("digits").path == Path("digits")


def test_paths_of_data_start_at_the_current_folder_and_else_at_that_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home / "images", here):
        folder.mkdir(parents=True)
    for file in ("p.npz", "beside.csv", "images/inside.csv", "inside.csv"):
        (home / file).touch()
    monkeypatch.chdir(here)
    file = home / "x.toml"

    def read(table: str) -> dict[str, Any]:
        file.write_text(
            f'[data]\ndataset = {{ name = "csv", path = "images", table = "{table}" }}\n'
            'partition = { path = "p.npz" }\n'
        )
        data: dict[str, Any] = read_source(str(file)).values["data"]
        return {**data["dataset"], "partition": data["partition"]["path"]}

    assert read("beside.csv") == {
        "name": "csv",
        "path": str(home / "images"),
        "table": str(home / "beside.csv"),
        "partition": str(home / "p.npz"),
    }
    assert read("inside.csv")["table"] == "inside.csv"  # in the folder of the data
    assert read("nowhere.csv")["table"] == "nowhere.csv"
    (here / "images").mkdir()
    (here / "beside.csv").touch()
    assert (read("beside.csv")["path"], read("beside.csv")["table"]) == ("images", "beside.csv")
    file.write_text('[data]\ndataset = "digits"\n')
    assert read_source(str(file), ["data.dataset.path=images"]).values["data"]["dataset"]["path"] == "images"


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/config.toml").write_text(TEXT)
    Path("bad.toml").write_text("rounds 3")
    for name, said in {
        "digits.tml": "unknown recipe 'digits.tml'; did you mean 'digits'.",
        "gone.toml": "the file gone.toml does not exist; pass the path of a TOML file, or a recipe "
        "('fedlens list recipes').",
        "run": "run is a directory, not a recipe or a file; 'fedlens resume run' resumes the run in it.",
        "bad.toml": "the file is not valid TOML: Expected '=' after a key in a key/value pair "
        "(at line 1, column 8) (bad.toml).",
    }.items():
        with pytest.raises(ConfigError) as caught:
            read_source(name)
        assert str(caught.value) == said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(TEXT)
    path.chmod(0)
    with pytest.raises(ConfigError, match="the file cannot be read: Permission denied"):
        read_source(str(path))


@pytest.mark.parametrize("text", ["local.lr", "=3", " = 3", ""])
def test_what_is_not_key_and_value(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not key=value \(--set\); write e.g. --set local\.lr=0\.1\."):
        override(Source({}), [text])


def test_a_value_has_nothing_below_it() -> None:
    with pytest.raises(
        ConfigError, match=r"'rounds' is a value, not a table, so it has no settings \(--set rounds\.x=1\)"
    ):
        override(Source({"rounds": 3}), ["rounds.x=1"])
