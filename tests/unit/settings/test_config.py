"""The schema of the settings, what it fills in, and the sentence for each kind of fault."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from typing import Annotated, Any, Literal

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedlens.base.errors import ConfigError
from fedlens.base.setting_errors import explained, refuse_loose
from fedlens.settings.config import Config, Seeds, plain, read_config

LEAST: dict[str, Any] = {
    "rounds": 3,
    "model": "linear",
    "local": {"lr": 0.1},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}},
}


def test_a_name_alone_is_short_for_a_table_and_the_rest_has_defaults() -> None:
    config = read_config(LEAST)
    assert config.model == {"name": "linear"}
    assert config.data.dataset == {"name": "digits"}
    assert (config.algorithm, config.engine) == ({"name": "fedavg"}, {"name": "default"})
    assert (config.seed, config.select, config.evaluation.every, config.checkpoint.seconds) == (
        0,
        None,
        1,
        30.0,
    )
    assert read_config({**LEAST, "select": {"fraction": 0.5}}).select == {"name": "uniform", "fraction": 0.5}


def test_seeds_come_from_the_seed_unless_they_are_set() -> None:
    one, same, two = (read_config({**LEAST, "seed": seed}).seeds for seed in (1, 1, 2))
    assert one == same
    names = list(Seeds.model_fields)
    values = [getattr(seeds, name) for seeds in (one, two) for name in names]
    assert len(set(values)) == 2 * len(names)
    fixed = read_config({**LEAST, "seed": 2, "seeds": {"partition": 7}}).seeds
    assert fixed.partition == 7
    assert fixed.training == two.training


@pytest.mark.parametrize(
    "more", [{}, {"select": {"fraction": 0.5}, "seed": 4}, {"record": {"clients": True}, "server": "plain"}]
)
def test_what_is_written_down_reads_back_as_the_same(more: dict[str, Any]) -> None:
    config = read_config({**LEAST, **more})
    again = read_config(tomllib.loads(tomli_w.dumps(plain(config))))
    assert again == config
    assert plain(again) == plain(config)


def test_a_function_is_written_down_by_where_it_is() -> None:
    config = read_config({**LEAST, "algorithm": {"name": plain, "mu": 1.0}})
    assert plain(config)["algorithm"] == {"name": "fedlens.settings.config:plain", "mu": 1.0}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rounds": None}, "'rounds' is None, but must be a whole number (at rounds)."),
        ({"rouns": 3}, "unknown setting 'rouns' (at rouns); did you mean 'rounds'."),
        (
            {"evaluation": {"beside": True}},
            "the setting 'evaluation.beside' is now 'evaluation.overlap' (at evaluation.beside); write the new name.",
        ),
        ({"local": {"lrr": 0.1}}, "unknown setting 'lrr' (at local.lrr); did you mean 'lr'."),
        (
            {"client_column": "shop"},
            "unknown setting 'client_column' (at client_column); did you mean 'data.dataset.client_column'.",
        ),
        ({"local": 0.1}, "'local' is 0.1, but must be a table (at local)."),
        (
            {"local": {}},
            "the setting 'lr' is missing (at local.lr); add it there, or pass --set local.lr=VALUE.",
        ),
        (
            {"data": {"dataset": "digits"}},
            "the setting 'partition' is missing (at data.partition); add it there",
        ),
        ({"seeds": 3}, "'seeds' is 3, but must be a table (at seeds)."),
        ({"seed": True}, "'seed' is true, but must be a number (at seed)."),
        ({"evaluation": {"every": True}}, "'every' is true, but must be a number (at evaluation.every)."),
        (
            {"checkpoint": {"seconds": float("inf")}},
            "'seconds' is inf, but must be a finite number (at checkpoint.seconds).",
        ),
        ({"model": {}}, "the table [model] has no 'name' (at model)."),
        ({"model": 3}, "'model' is 3, but must be a table (at model)."),
    ],
)
def test_each_fault_is_one_sentence_that_says_where(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config({**LEAST, **values}, lambda key: f"at {key}")
    assert str(caught.value).startswith(said)
    assert caught.value.exit_code == 2


class Many(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: Annotated[int, Field(ge=1)] | Literal["all"] = 1
    pair: tuple[float, float] = (0, 0)
    numbers: list[Annotated[int, Field(ge=0)]] = []
    word: str = Field("a", min_length=1)
    kind: Literal["soft", "hard"] = "soft"
    needed: int


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"size": "some"}, "'size' is 'some', but must be a whole number or 'all' (t.size)."),
        ({"size": 0}, "'size' is 0, but must be at least 1 or 'all' (t.size)."),
        ({"pair": [1]}, "'pair' is [1], but must contain more numbers (t.pair)."),
        ({"pair": [1, "x"]}, "'pair' is [1, 'x'], but number 2 in it must be a number (t.pair)."),
        (
            {"numbers": [1, -1]},
            "'numbers' is [1, -1], but number 2 in it must be at least 0 (t.numbers).",
        ),
        ({"numbers": 1}, "'numbers' is 1, but must be a list (t.numbers); write a list, e.g. numbers = [1]."),
        ({"word": ""}, "'word' is '', but must have at least 1 character (t.word)."),
        ({"word": 3}, "'word' is 3, but must be a string (t.word)."),
        ({"kind": "sofd"}, "'kind' is 'sofd', but must be 'soft' or 'hard' (t.kind); did you mean 'soft'."),
        ({"kind": "x"}, "'kind' is 'x', but must be 'soft' or 'hard' (t.kind)."),
        ({"neded": 1}, "unknown setting 'neded' (t.neded); did you mean 'needed'."),
    ],
)
def test_what_pydantic_says_of_unions_lists_and_words(values: dict[str, Any], said: str) -> None:
    given_values = values if "neded" in values else {"needed": 1, **values}
    with pytest.raises(ValidationError) as caught:
        Many.model_validate(given_values)
    fault = explained(caught.value, given_values, "t", str, lambda key: list(Many.model_fields))
    assert str(fault) == said


@given(st.dictionaries(st.sampled_from([*Config.model_fields, "other"]), st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | st.sampled_from(["", "x", "digits"]),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(st.sampled_from(["name", "lr", "x", "dataset"]), inner, max_size=3),
    max_leaves=6,
)))  # fmt: skip
def test_whatever_is_given_it_is_settings_or_one_sentence(values: dict[str, Any]) -> None:
    try:
        read_config({**LEAST, **values})
    except ConfigError as error:
        text = str(error)
        assert "\n" not in text
        assert "Value error" not in text
        assert "nput should" not in text


def test_true_is_no_number_and_infinity_only_where_it_is_allowed() -> None:
    refuse_loose({"a": 1, "b": True}, {"a": 1, "b": True}, "t", str, finite=True)
    refuse_loose({"a": float("inf")}, {"a": float("inf")}, "t", str, finite=False)
    with pytest.raises(ConfigError, match=r"'a' is true, but must be a number \(t\.a\)"):
        refuse_loose({"a": True}, {"a": 1}, "t", str, finite=False)


def test_nothing_here_imports_torch_or_numpy() -> None:
    code = (
        "import sys, fedlens.settings.config, fedlens.settings.config_source as s; s.recipes(); "
        "print([m for m in ('torch', 'numpy', 'pandas', 'plotly', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment()
    )
    assert done.stdout == "[]\n"


def _environment() -> dict[str, str]:
    import os
    from pathlib import Path

    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
