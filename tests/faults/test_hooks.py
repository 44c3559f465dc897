"""Hooks and operations that change their inputs, return nothing or take other arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens import Experiment
from fedlens.base.errors import ConfigError, HookError, RunFailed
from fedlens.local.rules import LocalContext
from tests.faults import hooked

pytestmark = pytest.mark.usefixtures("quick_workers")

FILE = str(Path(hooked.__file__))
ENGINES: dict[str, Any] = {
    "inline": "inline",
    "default": "default",
    "vectorized": "vectorized",
    "processes": {"name": "processes", "workers": 2},
    "groups": {"name": "processes", "workers": 2, "group": 2},
}
HOWS = ("anchor", "payload", "data", "numpy", "nothing")
ANCHOR = "`grad` of the client rule 'hooked' changes its input context.anchor[0] in place (hooked.py, line "


def run(out: Path, engine: str = "inline", **more: Any) -> None:
    settings: dict[str, Any] = {
        "rounds": 1,
        "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 40}},
        "select": {"clients_per_round": 3},
        "model": "linear",
        "local": {"lr": 0.1, "batch_size": 20},
        "engine": ENGINES[engine],
    }
    Experiment(**{**settings, **more}).run(out, report=False)


def said(out: Path, kind: type[Exception], engine: str = "inline", **more: Any) -> str:
    with pytest.raises(kind) as caught:
        run(out, engine, **more)
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.mark.parametrize(
    ("engine", "how"),
    [
        *((engine, how) for engine in ("inline", "vectorized") for how in HOWS),
        ("default", "payload"),
        ("processes", "anchor"),
        pytest.param("processes", "data", marks=pytest.mark.nightly),
        pytest.param("processes", "nothing", marks=pytest.mark.nightly),
        pytest.param("groups", "payload", marks=pytest.mark.nightly),
    ],
)
def test_a_hook_that_breaks_a_rule_ends_the_run_by_name(tmp_path: Path, engine: str, how: str) -> None:
    text = said(tmp_path / "run", HookError, engine, algorithm={"name": f"{FILE}:algorithm", "how": how})
    if how == "nothing":
        assert "`grad` of the client rule 'hooked' returned None (hooked.py, line " in text
        assert "return a list of 2 tensors in the shapes of the gradients" in text
    else:
        assert ANCHOR in text
        assert "write a - b, not a.sub_(b)" in text


@pytest.mark.parametrize(
    ("engine", "more", "message"),
    [
        (
            "inline",
            {"client": "halving"},
            "`grad` of the client rule 'halving' changes its input parameters[0] in",
        ),
        (
            "vectorized",
            {"client": "halving"},
            "`grad` of the client rule 'halving' changes its input parameters[0]",
        ),
        (
            "inline",
            {"server": "by_data"},
            "`step` of ByData changes its input weights['1.weight'] in place (hooked.py",
        ),
        (
            "inline",
            {"server": "init_by_data"},
            "`init` of InitByData changes its input weights['1.weight'] in place",
        ),
        ("inline", {"aggregate": "Halving"}, "`aggregate` of Halving changes its input answers["),
        (
            "inline",
            {"algorithm": "state_by_data"},
            "`round` of StateByData changes its input state['model']['1.weigh",
        ),
    ],
)
def test_a_change_that_no_version_shows_ends_the_run_by_name(
    tmp_path: Path, engine: str, more: dict[str, str], message: str
) -> None:
    named = {key: f"{FILE}:{name}" for key, name in more.items()}
    text = said(tmp_path / "run", HookError, engine, **named)
    assert message in text
    assert "(hooked.py, line " in text


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("one", "returned a list with 1 item (hooked.py, line "),
        ("shape", "in the shapes of the gradients: item 1 is [10, 64], but must be [10]"),
    ],
)
def test_wrong_gradients_are_described(tmp_path: Path, how: str, message: str) -> None:
    assert message in said(tmp_path / "run", HookError, algorithm={"name": f"{FILE}:algorithm", "how": how})


@pytest.mark.parametrize(("engine", "stackable"), [("inline", False), ("inline", True), ("vectorized", True)])
def test_start_may_not_replace_the_anchor(tmp_path: Path, engine: str, stackable: bool) -> None:
    rule = {"name": f"{FILE}:moved", "stackable": stackable}
    text = said(tmp_path / "run", HookError, engine, client=rule)
    assert "`start` of the client rule 'moved' replaces its input context.anchor (hooked.py, line " in text
    assert "context.saved" in text


@pytest.mark.parametrize("engine", ["inline", "vectorized"])
def test_a_loss_without_a_gradient_names_its_hook(tmp_path: Path, engine: str) -> None:
    text = said(tmp_path / "run", HookError, engine, client=f"{FILE}:without_gradient")
    assert (
        "`loss` of the client rule 'flat' returned a Tensor of shape [] without a gradient (hooked.py" in text
    )


@pytest.mark.parametrize("key", ["model", "lr", "schedule", "work"])
def test_a_server_rule_may_not_overwrite_the_payload(tmp_path: Path, key: str) -> None:
    text = said(tmp_path / "run", HookError, algorithm={"name": f"{FILE}:sharing", "key": key})
    assert f"`shared` of the server rule 'sharing' overwrites '{key}' (hooked.py, line " in text


def test_a_server_rule_that_shares_nothing_says_so(tmp_path: Path) -> None:
    text = said(tmp_path / "run", HookError, algorithm={"name": f"{FILE}:sharing", "key": ""})
    assert "`shared` of the server rule 'sharing' returned None (hooked.py, line " in text
    assert "{} if there are none" in text


@pytest.mark.parametrize("engine", ["inline", pytest.param("processes", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("zero the payload", "the operation 'train' changes its input payload['model']['1.weight'] in place"),
        (
            "replace in the payload",
            "the operation 'train' changes its input payload['model']['1.weight'] in place",
        ),
    ],
)
def test_an_operation_that_breaks_a_rule_ends_the_run(
    tmp_path: Path, engine: str, how: str, message: str
) -> None:
    text = said(tmp_path / "run", HookError, engine, algorithm={"name": f"{FILE}:operation", "how": how})
    assert message in text


def test_an_operation_without_a_return_says_how_it_ends(tmp_path: Path) -> None:
    text = said(tmp_path / "run", RunFailed, algorithm={"name": f"{FILE}:operation", "how": "return nothing"})
    assert "the operation 'train' returned None: end it with return Outcome(payload, state, metrics)" in text


def test_an_operation_may_not_change_the_state_that_it_finds(tmp_path: Path) -> None:
    more = {"algorithm": {"name": f"{FILE}:operation", "how": "add to the state"}, "rounds": 2}
    more["select"] = {"name": "fixed", "clients": [0]}
    assert "changes its input client.state['seen'] in place" in said(tmp_path / "run", HookError, **more)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("in_place", "`step` of InPlace changes its input weights['1.weight'] in place (hooked.py, line "),
        ("no_result", "`step` of NoResult returned None (hooked.py, line "),
        ("no_state", "`init` of NoState returned None (hooked.py, line "),
    ],
)
def test_a_server_step_that_breaks_a_rule_ends_the_run(tmp_path: Path, server: str, message: str) -> None:
    assert message in said(tmp_path / "run", HookError, server=f"{FILE}:{server}")


def test_an_aggregate_without_a_return_does_not_pass_for_a_round_without_replies(tmp_path: Path) -> None:
    text = said(tmp_path / "run", HookError, aggregate=f"{FILE}:Forgetful")
    assert (
        "`aggregate` of Forgetful returned None, although these replies were accepted: 3 (hooked.py, line "
        in text
    )


def test_a_wrong_return_of_aggregate_names_aggregate(tmp_path: Path) -> None:
    text = said(tmp_path / "run", HookError, aggregate=f"{FILE}:Mapped")
    assert "`aggregate` of Mapped returned a dict (hooked.py, line " in text


def test_a_field_that_is_not_announced_says_where_to_announce_it(tmp_path: Path) -> None:
    text = said(tmp_path / "run", RunFailed, client=f"{FILE}:unannounced")
    assert "there is an extra note, which `expect` does not announce" in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"algorithm": f"{FILE}:with_bare_aggregate"},
            "the aggregate is of the class Bare, which does not inherit from Aggregate (algorithm); inherit from "
            "fedlens.aggregate.mean.Aggregate.",
        ),
        (
            {"algorithm": f"{FILE}:with_a_class"},
            "the client rule is the class Halved, but must be an object (algorithm); write Halved().",
        ),
        (
            {"algorithm": {"name": f"{FILE}:positional", "mu": 0.5}},
            f"'mu' of the algorithm '{FILE}:positional' is not a setting, because it can be passed by position "
            "(algorithm.mu); make it keyword-only: *, mu: float = 0.1.",
        ),
        (
            {"aggregate": hooked.Bare()},
            "pass a function that returns it, or the class, instead of the Bare itself.",
        ),
    ],
)
def test_a_wrong_component_is_answered_with_what_to_write(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    assert said(tmp_path / "run", ConfigError, **more).endswith(message)


def test_a_rule_that_is_not_stackable_is_named(tmp_path: Path) -> None:
    text = said(tmp_path / "run", RunFailed, "vectorized", client=f"{FILE}:not_stackable", rounds=4)
    assert "several clients cannot be computed at once: " in text
    assert "with the client rule 'single': RuntimeError: context.problem is not available" in text


def test_a_rule_as_a_class_has_its_methods_for_hooks() -> None:
    rule = hooked.Halved()
    context = LocalContext(["w"], [torch.ones(1)], {}, {}, 0.1, 1)
    assert rule.grad is not None
    assert torch.equal(rule.grad([torch.ones(1)], [torch.ones(1)], context)[0], torch.tensor([0.5]))
    assert (rule.name, rule.traits.stackable, rule.plain) == ("halved", True, False)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"client": f"{FILE}:Short"},
            "`grad` of Short (hooked.py, line {}) takes (g, p), and fedlens calls it with (gradients, parameters, "
            "context) (client); write: def grad(self, gradients, parameters, context).",
        ),
        (
            {"server": f"{FILE}:ShortStep"},
            "`step` of the server step ShortStep (hooked.py, line {}) takes (weights, update), and fedlens calls it "
            "with (weights, update, state) (server.name); write: def step(self, weights, update, state).",
        ),
        (
            {"aggregate": f"{FILE}:ShortAggregate"},
            "`aggregate` of the aggregate ShortAggregate (hooked.py, line {}) takes (answers), and fedlens calls it "
            "with (answers, fields, ctx) (aggregate.name); write: def aggregate(self, answers, fields, ctx).",
        ),
        (
            {"aggregate": f"{FILE}:Without"},
            "the aggregate '"
            + FILE
            + ":Without' is an abstract class: it does not define aggregate(answers, fields, "
            "ctx) (aggregate.name); define it in the class.",
        ),
        (
            {"aggregate": f"{FILE}:Earlier"},
            "the aggregate '"
            + FILE
            + ":Earlier' is an abstract class: it does not define aggregate(answers, fields, "
            "ctx) (aggregate.name); rename 'fold': it is now 'aggregate'.",
        ),
        (
            {"aggregate": f"{FILE}:EarlierMean"},
            "the aggregate EarlierMean defines `fold`, which is now `aggregate` (aggregate.name); rename it.",
        ),
        (
            {"server": f"{FILE}:a_class"},
            "the server step '"
            + FILE
            + ":a_class' returned the class InPlace (server.name); return an object: "
            "InPlace(...).",
        ),
        (
            {"algorithm": f"{FILE}:short_op"},
            "the operation 'train' (hooked.py, line {}) takes (payload), and fedlens calls it with (payload, client, "
            "rng) (algorithm); write: lambda payload, client, rng: result.",
        ),
        (
            {"data": {"dataset": f"{FILE}:wide", "partition": {"name": "iid", "clients": 4}}},
            "the dataset '"
            + FILE
            + ":wide' (hooked.py, line {}) takes (folder, more, still, most), and fedlens calls "
            "it with (root, download, seed), and with settings by keyword (data.dataset.name); write: def wide(root, "
            "download, seed, *, setting: float = 0.1).",
        ),
    ],
)
def test_a_wrong_signature_is_answered_with_the_right_one(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    text = said(tmp_path / "run", ConfigError, **more)
    before, _, after = message.partition("{}")
    assert text.startswith(before)
    assert text.endswith(after)
    assert not (tmp_path / "run").exists()
