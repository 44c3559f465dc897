"""Requests that cannot be carried out: one sentence, exit code 2, nothing started, nothing on standard output."""

# ruff: noqa: E501 (a table of sentences as they are printed)

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedlens.cli.main import app
from fedlens.data.catalogue import CATALOGUE
from tests.faults.run_kit import lives

BASE = """\
# the first line
name = "own"
rounds = 2

[data]
dataset = "digits"
partition = { name = "iid", clients = 4 }

[model]
name = "linear"

[local]
lr = 0.1
"""

OWN = """\
from fedlens.algorithms.averaging import averaging

def good(parts, *, mu: float = 1.0):
    return averaging(parts)

def bare(parts, *, mu=1.0):
    return averaging(parts)

def forgetful(*parts):
    made = parts

def broken(*parts):
    return 1 / 0

def narrow():
    return 1

def wrong(*parts):
    return {"ops": {}}

word = "x"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bad")
    (made / "base.toml").write_text(BASE)
    (made / "own.py").write_text(OWN)
    (made / "lost.py").write_text("import nowhere_at_all\n")
    (made / "typo.py").write_text("def f(:\n")
    (made / "none").mkdir()
    return made


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing that is asked for here leaves anything."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FEDLENS_DATA", str(folder / "none"))
    before = sorted(p for p in folder.rglob("*") if "__pycache__" not in p.parts)
    yield folder
    assert sorted(p for p in folder.rglob("*") if "__pycache__" not in p.parts) == before


def refused(*arguments: str) -> str:
    """What is said, the request being refused as every one is."""
    answer = CliRunner().invoke(app, ["run", *arguments, "--json"])
    assert answer.exit_code == 2, answer.stderr
    said = json.loads(answer.stdout)
    assert (said["status"], said["exit_code"]) == ("error", 2)
    assert said["error"]["what"] in answer.stderr
    assert answer.stderr.startswith("error: ")
    assert answer.stderr.endswith(".\n")
    assert answer.stderr.count("\n") == 1
    assert "Traceback" not in answer.stderr
    told = answer.stderr.removeprefix("error: ").removesuffix(".\n")
    return told.replace(f"{Path.cwd()}/own.py", "own.py")  # a user's own file is named by its whole path


def settings(*changes: str) -> list[str]:
    return ["base.toml", *(word for change in changes for word in ("--set", change))]


DIRICHLET = "data.partition={name='dirichlet', clients=4, alpha=%s}"

UNKNOWN = {
    "rouns=3": "unknown setting 'rouns' (--set rouns); did you mean 'rounds'",
    "modle=linear": "unknown setting 'modle' (--set modle); did you mean 'model'",
    "data.partion.name=iid": "unknown setting 'partion' (--set data.partion.name); did you mean 'partition'",
    "local.lrr=1": "unknown setting 'lrr' (--set local.lrr); did you mean 'lr'",
    "seeds.partitions=1": "unknown setting 'partitions' (--set seeds.partitions); did you mean 'partition'",
    "record.client=true": "unknown setting 'client' (--set record.client); did you mean 'clients'",
    "data.partition.cliens=4": "the partition 'iid' has no setting 'cliens' (--set data.partition.cliens); did you mean 'clients'",
    "data.partition.alpha=1": "the partition 'iid' has no setting 'alpha' (--set data.partition.alpha); known: clients, exponent, minimum, sigma, sizes",
    "model.width=3": "the model 'linear' has no setting 'width' (--set model.width); known: bottleneck, cache_features, classifier, freeze, hidden_widths, norm, weights, weights_partial, weights_sha256",
    "select.both=1": "the selection 'uniform' has no setting 'both' (--set select.both); known: clients_per_round, fraction",
    "data.dataset=digit": "unknown dataset 'digit' (--set data.dataset.name); did you mean 'digits'",
    "data.partition.name=irichlet": "unknown partition 'irichlet' (--set data.partition.name); did you mean 'dirichlet'",
    "model.name=lineer": "unknown model 'lineer' (--set model.name); did you mean 'linear'",
    "algorithm=fedproxx": "unknown algorithm 'fedproxx' (--set algorithm.name); did you mean 'fedprox'",
    "engine=process": "unknown engine 'process' (--set engine.name); did you mean 'processes'",
    "select.name=unifrom": "unknown selection 'unifrom' (--set select.name); did you mean 'uniform'",
    "client=proximall": "unknown client rule 'proximall' (--set client.name); did you mean 'proximal'",
    "aggregate=men": "unknown aggregate 'men' (--set aggregate.name); did you mean 'mean'",
    "server=momentumm": "unknown server step 'momentumm' (--set server.name); did you mean 'momentum'",
    "local.optimizer=sdg": "'optimizer' is 'sdg', but must be 'sgd', 'adam', 'adamw' or 'lars' (--set local.optimizer); did you mean 'sgd'",
}

VALUES = {
    "rounds=0": "'rounds' is 0, but must be at least 1 (--set rounds)",
    "rounds=many": "'rounds' is 'many', but must be a whole number (--set rounds)",
    "rounds=2.5": "'rounds' is 2.5, but must be a whole number (--set rounds)",
    "rounds=true": "'rounds' is true, but must be a number (--set rounds)",
    "seed=-1": "'seed' is -1, but must be at least 0 (--set seed)",
    "seeds.partition=-1": "'partition' is -1, but must be at least 0 (--set seeds.partition)",
    "local.lr=-1": "'lr' is -1, but must be greater than 0 (--set local.lr)",
    "local.lr=fast": "'lr' is 'fast', but must be a number (--set local.lr)",
    "local.lr=inf": "'lr' is inf, but must be a finite number (--set local.lr)",
    "local.lr=nan": "'lr' is nan, but must be ",
    "local.batch_size=some": "'batch_size' is 'some', but must be a whole number or 'all' (--set local.batch_size)",
    "local.batch_size=0": "'batch_size' is 0, but must be at least 1 or 'all' (--set local.batch_size)",
    "local.betas=[0.9]": "'betas' is [0.9], but must contain more numbers (--set local.betas)",
    "local.nesterov=true": "nesterov needs optimizer = 'sgd' and a momentum above 0 (base.toml, line 12: local, with --set local.nesterov)",
    "evaluation=3": "'evaluation' is 3, but must be a table (--set evaluation)",
    "record.clients=maybe": "'clients' is 'maybe', but must be true or false (--set record.clients)",
    "data.validation=1.5": "'validation' is 1.5, but must be less than 1 (--set data.validation)",
    "data.validation_from=client": "`data.validation_from = 'client'` needs `data.validation` above 0 "
    "(--set data.validation_from); set data.validation = 0.2, the share that each client holds out",
    "data.validation=0.9999": "a validation share of 0.9999 leaves no training example (--set data.validation)",
    "data.augment=flipp": "unknown augmentation 'flipp' (--set data.augment.name); did you mean 'flip'",
    "data.augment={pad=3}": "the table [data.augment] has no 'name' (--set data.augment)",
    'data.augment={name="colour-jitter",hue=0.1}': "images of 1 channel have no hue (--set data.augment.hue); leave it out",
    "data.partition=3": "'partition' is 3, but must be a table (--set data.partition)",
    "data.partition={clients=4}": "the table [data.partition] has no 'name' (--set data.partition)",
    "data.partition.name=7": "the name of the partition is 7, but must be a string (--set data.partition.name)",
    "data.partition.clients=4.5": "'clients' is 4.5, but must be a whole number (--set data.partition.clients)",
    "data.partition.clients=5000": "5000 clients are more than the 1437 examples (--set data.partition.clients); "
    "set clients to at most 1437",
    DIRICHLET % "-1": "'alpha' is -1, but must be at least 0 (--set data.partition.alpha)",
    DIRICHLET % "'a'": "'alpha' is 'a', but must be a number (--set data.partition.alpha)",
    DIRICHLET
    % "1,prior=[1,2]": "the prior has 2 numbers, but there are 10 classes (--set data.partition.prior)",
    DIRICHLET
    % "1,prior='x'": "'prior' is 'x', but must be 'uniform' or 'data' or a list (--set data.partition.prior)",
    "data.partition={name='dirichlet',clients=4}": "the setting 'alpha' is missing (--set data.partition.alpha); "
    "pass --set data.partition.alpha=VALUE",
    "select.clients_per_round=10": "10 clients per round are set, but only 4 of the 4 clients have data "
    "(--set select.clients_per_round); take at most 4",
    "select.clients_per_round=0": "'clients_per_round' is 0, but must be at least 1 "
    "(--set select.clients_per_round)",
    "select.fraction=2": "'fraction' is 2, but must be at most 1 (--set select.fraction)",
    "select={name='fixed',clients=[7]}": "there is no client 7: the 4 clients are numbered from 0 (--set select.clients)",
    "select={name='fixed',clients=[]}": "'clients' is [], but must have at least 1 item, not 0 (--set select.clients)",
    "select={name='fixed',clients=[-1]}": "'clients' is [-1], but number 1 in it must be at least 0 "
    "(--set select.clients)",
    "model.name.x=3": "the name of the model is {'name': 'linear', 'x': 3}, but must be a string "
    "(base.toml, line 10: model.name, with --set model.name.x)",
    "server={name='momentum',momentum=0,nesterov=true}": "nesterov needs a momentum above 0 (--set server.nesterov)",
    "engine.workers=-2": "'workers' is -2, but must be at least 0 (--set engine.workers)",
    "algorithm={name='fedavg',mu=1}": "the algorithm 'fedavg' has no setting 'mu' (--set algorithm.mu); algorithms with it: "
    "'fedprox', 'moon', 'feddane'; add --set algorithm.name=fedprox",
    "data.partition.alpha=1": "the partition 'iid' has no setting 'alpha' (--set data.partition.alpha); "
    "partitions with it: 'quantity', "
    "'dirichlet', 'dirichlet-classwise', 'pachinko', 'lda-multilabel'; add --set data.partition.name=quantity",
    "engine.group=4": "the engine 'default' has no setting 'group' (--set engine.group); engines with it: "
    "'vectorized', 'processes', 'ray'; add --set engine.name=vectorized",
    "engine.device=gpu": "'device' is 'gpu', but must be 'auto', 'cpu', 'cuda', or 'cuda:' and a number, e.g. 'cuda:1' (--set engine.device)",
    "lr=0.1": "unknown setting 'lr' (--set lr); did you mean 'local.lr'",
    "batch_size=3": "unknown setting 'batch_size' (--set batch_size); did you mean 'local.batch_size' or "
    "'evaluation.batch_size'",
    "local.rounds=3": "unknown setting 'rounds' (--set local.rounds); did you mean 'rounds' outside of "
    "any table",
    "record.rounds=3": "unknown setting 'rounds' (--set record.rounds); did you mean 'record.local_models.rounds' or "
    "'record.updates.rounds'",
    "algorithm.nam=fedprox": "the table [algorithm] has no 'name', but 'nam' (--set algorithm.nam)",
    "model.nam=mlp": "the model 'linear' has no setting 'nam' (--set model.nam); did you mean 'name'",
    "rounds=3\nseed=4": "'rounds=3\\nseed=4' has more than one line (--set); give each setting a --set of its own, e.g. "
    "--set rounds=3 --set seed=4",
    "rounds=1e308": "'rounds' is 1e+308, but must be a whole number of at most 9223372036854775807 (--set rounds)",
    f"rounds={2**70}": f"'rounds' is {2**70}, but must be at most 9223372036854775807 (--set rounds)",
    f"rounds={10**400}": f"'rounds' is 1{'0' * 76}..., but must be at most 9223372036854775807 (--set rounds)",
    f"rounds={'9' * 5000}": "a number has more than 4300 digits (--set rounds); use a smaller one",
    f"local.epochs={2**70}": f"'epochs' is {2**70}, but must be at most 9223372036854775807 (--set local.epochs)",
    "local.lr=1e308": "'lr' is 1e+308, but must be at most 3.4e+38, the largest 32-bit float (--set local.lr)",
    f"select={{name='fixed',clients=[{2**70}]}}": f"'clients' is {2**70}, but must be at most 9223372036854775807 "
    "(--set select.clients)",
    f"rounds={'[' * 3000}{']' * 3000}": "tables or lists are nested more than 32 deep (--set rounds); the page on "
    "settings lists what each table contains",
    f"{'a.' * 100}b=1": f"tables or lists are nested more than 32 deep (--set {('a.' * 100)[:77]}...); the page on "
    "settings lists what each table contains",
    "name=a/b": "the name 'a/b' cannot be a directory's name; choose a short name without path separators, or name the "
    "directory with --out",
    "local.lr": "'local.lr' is not key=value (--set); write e.g. --set local.lr=0.1",
    "=3": "'=3' is not key=value (--set); write e.g. --set local.lr=0.1",
    "rounds.x=3": "'rounds' is a value, not a table, so it has no settings (--set rounds.x=3)",
}

OWN_FILES = {
    "own.py:goood": "own.py does not define 'goood' (--set algorithm.name); did you mean 'good'",
    "gone.py:f": "the file gone.py does not exist (--set algorithm.name); give its path, relative to the current directory",
    "lost.py:f": "importing lost.py failed: ModuleNotFoundError: No module named 'nowhere_at_all' (--set algorithm.name)",
    "typo.py:f": "importing typo.py failed: SyntaxError: invalid syntax (typo.py, line 1) (--set algorithm.name)",
    "nomodule.x:f": "importing nomodule.x failed: ModuleNotFoundError: No module named 'nomodule' (--set algorithm.name)",
    "own.py:word": "'own.py:word' is of type str, but must be a function that makes the",
    "own.py:bare": "the settings of 'own.py:bare' cannot be read from its signature: TypeError: the parameter 'mu' has no type (--set algorithm.name); "
    "a setting is a keyword-only parameter with a type: def make(parts, *, mu: float = 0.1)",
    "own.py:forgetful": "the algorithm 'own.py:forgetful' returned None (--set algorithm.name); "
    "end it with: return the algorithm",
    "own.py:broken": "the algorithm 'own.py:broken' failed: ZeroDivisionError: division by zero (own.py, line 13) "
    "(--set algorithm.name)",
    "own.py:narrow": "the algorithm 'own.py:narrow' (own.py, line 15) takes (), and fedlens calls it with (parts), and with "
    "settings by keyword (--set algorithm.name); write: def narrow(parts, *, setting: float = 0.1)",
    "own.py:wrong": "the algorithm 'own.py:wrong' returned a dict, which has no 'ops' (--set algorithm.name)",
}


@pytest.mark.parametrize("change", [*UNKNOWN, *VALUES])
def test_a_wrong_setting(change: str) -> None:
    said = refused(*settings(change))
    wanted = (UNKNOWN | VALUES)[change]
    assert said == wanted or (wanted.endswith(" ") and said.startswith(wanted))


@pytest.mark.parametrize("name", OWN_FILES)
def test_a_file_of_the_users_own(name: str) -> None:
    assert refused(*settings(f"algorithm={name}")).startswith(OWN_FILES[name])


@pytest.mark.parametrize(
    "slot", ["select", "client", "aggregate", "server", "model", "data.dataset", "data.partition", "engine"]
)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("forgetful", "returned None (--set {slot}.name); end it with: return the "),
        ("broken", "failed: ZeroDivisionError: division by zero (own.py, line 13) (--set {slot}.name)"),
        ("wrong", "returned a dict, which has no '"),
    ],
)
def test_every_slot_says_when_a_users_own_function_is_wrong(slot: str, name: str, said: str) -> None:
    assert f"'own.py:{name}' {said.format(slot=slot)}" in refused(*settings(f"{slot}=own.py:{name}"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            ["local.epochs=1", "local.steps=1"],
            "epochs and steps are both set; set only one of them (base.toml, line 12: local, with --set local.epochs)",
        ),
        (
            ["select.clients_per_round=1", "select.fraction=0.5"],
            "clients_per_round and fraction are both set (--set select.clients_per_round); set only one of them",
        ),
        (
            ["algorithm=centralized", "select.clients_per_round=2"],
            "'centralized' does not use the table [select] (--set select.clients_per_round); remove it; of the "
            "components it uses none",
        ),
        (
            ["algorithm=local-only", "server.lr=0.5"],
            "'local-only' does not use the table [server] (--set server.lr); remove it; of the components it uses "
            "[select], [client]",
        ),
        (
            ["algorithm=fedavgm", "algorithm.momentum=1"],
            "'momentum' is 1, but must be less than 1 (--set algorithm.momentum)",
        ),
        (
            ["algorithm=own.py:good", "algorithm.nu=1"],
            "the algorithm 'own.py:good' has no setting 'nu' (--set algorithm.nu); known: mu",
        ),
        (
            ["model.name=small-cnn", "model.wdth=3"],
            "the model 'small-cnn' has no setting 'wdth' (--set model.wdth); did you mean 'width'",
        ),
        (
            ["data.partition.name=dirichlet", "data.partition.clients=5"],
            "the setting 'alpha' is missing (base.toml, line 7: data.partition.alpha); "
            "add it there, or pass --set data.partition.alpha=VALUE",
        ),
        (
            ["model.name=mcmahan-cnn", "data.dataset={name='synthetic',shape=[1,2,2]}"],
            "the model 'mcmahan-cnn' needs images of at least 4x4, but they are 2x2 (--set model.name); take 'linear' or 'mlp'",
        ),
        (
            ["engine.name=processes", "engine.workers=-1"],
            "'workers' is -1, but must be at least 0 (--set engine.workers)",
        ),
    ],
)
def test_settings_that_do_not_go_together(changes: list[str], said: str) -> None:
    assert refused(*settings(*changes)) == said


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("lr = 0.1", "lr = 0", "'lr' is 0, but must be greater than 0 (my.toml, line 13: local.lr)"),
        ("lr = 0.1", "rate = 0.1", "unknown setting 'rate' (my.toml, line 13: local.rate); known: "),
        (
            "lr = 0.1",
            "",
            "the setting 'lr' is missing (my.toml, line 12: local.lr); add it there, or pass --set local.lr=VALUE",
        ),
        (
            "rounds = 2",
            "round = 2",
            "unknown setting 'round' (my.toml, line 3: round); did you mean 'rounds'",
        ),
        (
            "rounds = 2",
            "",
            "the setting 'rounds' is missing (my.toml: rounds); add it there, or pass --set rounds=VALUE",
        ),
        (
            "[model]",
            "[modle]",
            "unknown setting 'modle' (my.toml, line 9: modle); did you mean 'model'",
        ),
        (
            '"iid"',
            '"idd"',
            "unknown partition 'idd' (my.toml, line 7: data.partition.name); did you mean 'iid'",
        ),
        (
            "clients = 4",
            "clients = -4",
            "'clients' is -4, but must be at least 1 (my.toml, line 7: data.partition.clients)",
        ),
        (
            "clients = 4",
            "clients = 4000",
            "4000 clients are more than the 1437 examples (my.toml, line 7: data.partition.clients); set clients to at most",
        ),
        ('name = "linear"', "", "the table [model] has no 'name' (my.toml, line 9: model)"),
        ("[local]", "[local", "the file is not valid TOML: "),
        (
            "rounds = 2",
            "rounds = 2\nrounds = 3",
            "the file is not valid TOML: Cannot overwrite a value (at line 4, column 11) (my.toml)",
        ),
        ("rounds = 2", "rounds", "the file is not valid TOML: "),
    ],
)
def test_a_wrong_file_names_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, said: str
) -> None:
    assert old in BASE
    (tmp_path / "my.toml").write_text(BASE.replace(old, new, 1))
    monkeypatch.chdir(tmp_path)
    assert refused("my.toml").startswith(said)
    assert [path.name for path in tmp_path.iterdir()] == ["my.toml"]


def test_what_is_no_recipe_and_no_file(folder: Path) -> None:
    assert refused("digts") == "unknown recipe 'digts'; did you mean 'digits'"
    assert refused("nowhere.toml").startswith(
        "the file nowhere.toml does not exist; pass the path of a TOML file, or a recipe"
    )
    assert refused("none") == "none is a directory, not a recipe or a file; name a TOML file in it"
    assert "the file is not valid TOML: 'utf-8' codec can't decode" in _of_bytes(folder, b"\xff\xfe")


def _of_bytes(folder: Path, content: bytes) -> str:
    path = folder / "binary.toml"
    path.write_bytes(content)
    try:
        return refused("binary.toml")
    finally:
        path.unlink()


@pytest.mark.parametrize("name", ["cifar10", "mnist", "fashion-mnist", "cifar100"])
def test_data_that_are_not_there(folder: Path, name: str) -> None:
    said = refused(*settings(f"data.dataset={name}"))
    assert said.startswith(f"{CATALOGUE[name].title} not found in {folder / 'none'}: looked for ")
    assert "run again with --download to fetch them, or put the files there" in said
    assert "--data-dir or the environment variable FEDLENS_DATA" in said


def test_the_settings_of_what_was_named_before_do_not_get_in_the_way(folder: Path, tmp_path: Path) -> None:
    """A recipe's `classes_per_client` is not a fault of somebody who wants another partition."""
    answer = CliRunner().invoke(
        app,
        [
            "run",
            "digits",
            "--rounds",
            "1",
            "--set",
            "data.partition.name=iid",
            "--out",
            str(tmp_path / "run"),
            "--quiet",
        ],
    )
    assert answer.exit_code == 0, answer.stderr
    text = (tmp_path / "run/config.toml").read_text()
    assert "classes_per_client" not in text
    assert "clients = 20" in text
    said = refused(
        "digits", "--set", "data.partition.name=iid", "--set", "data.partition.classes_per_client=1"
    )
    assert (
        said
        == "the partition 'iid' has no setting 'classes_per_client' (--set data.partition.classes_per_client); partitions with it: 'shards'; add --set data.partition.name=shards"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["base.toml", "--set", "local.lrr=1", "--engine", "processes"],
            "error: unknown setting 'lrr'",
        ),
        (
            ["base.toml", "--set", "algorithm=own.py:broken", "--engine", "processes"],
            "error: the algorithm 'own.py:broken' failed",
        ),
    ],
)
def test_real_processes(folder: Path, arguments: list[str], said: str) -> None:
    """Also where the workers had begun to start."""
    with lives(folder) as play:
        (ended,) = play([{"args": ["run", *arguments, "--json"]}])
    assert (ended["code"], json.loads(ended["out"])["status"]) == (2, "error")
    assert ended["err"].replace(f"{folder}/own.py", "own.py").startswith(said)
    assert ended["err"].count("\n") == 1


def test_json_has_standard_output_to_itself(folder: Path, tmp_path: Path) -> None:
    """Whatever a user's own operation prints, here and in workers, on the way."""
    (tmp_path / "loud.py").write_text(
        "import os\nfrom fedlens.algorithms.averaging import averaging\nfrom fedlens.local.rules import ClientRule\n"
        "def finish(parameters, context):\n    print('printed')\n    os.write(1, b'written\\n')\n    return {}, None\n"
        "def loud(parts):\n    print('built')\n    return averaging(parts, client=ClientRule(finish=finish))\n"
    )
    (tmp_path / "base.toml").write_text(BASE)
    loud = ["run", "base.toml", "--set", "algorithm=loud.py:loud", "--json"]
    with lives(tmp_path) as play:
        ends = play([{"args": [*loud, "--engine", one, "--out", one]} for one in ("inline", "processes")])
    for ended in ends:
        said = ended["err"]
        assert ended["code"] == 0, said
        assert json.loads(ended["out"])["status"] == "finished"
        assert (said.count("printed"), said.count("written"), said.count("built")) == (8, 8, 1)


@pytest.mark.parametrize(
    "text", [f"x = {'[' * 3000}{']' * 3000}", f"a{'.a' * 3000} = 1", f"x = {'{a=' * 400}1{'}' * 400}"]
)
def test_a_file_that_is_nested_too_deeply_is_one_sentence(here: Path, text: str) -> None:
    file = here / "typo.py"  # which is there anyway: nothing may be left
    before = file.read_text()
    file.write_text(text)
    try:
        said = refused(str(file))
    finally:
        file.write_text(before)
    assert said.startswith(f"tables or lists are nested more than 32 deep ({file})")


def test_an_option_that_is_a_setting_is_answered_with_set() -> None:
    for arguments, wanted in {
        ("--lr", "0.1"): "--lr; use --set local.lr=0.1",
        ("--lr=0.1",): "--lr; use --set local.lr=0.1",
        ("--batch-size", "8"): "--batch-size; use --set local.batch_size=8 or --set evaluation.batch_size=8",
        ("--alpha",): "--alpha; use --set data.partition.alpha=VALUE",
    }.items():
        assert refused("base.toml", *arguments) == f"no such option: {wanted}"
    assert "No such option: --colour" in CliRunner().invoke(app, ["run", "base.toml", "--colour"]).output


def test_nobody_is_sent_to_edit_an_installed_recipe() -> None:
    said = refused("digits", "--set", "data.partition.name=dirichlet")
    assert said == (
        "the setting 'alpha' is missing (recipe digits, line 12: data.partition.alpha); "
        "add --set data.partition.alpha=VALUE, or copy the recipe and edit it: fedlens show digits > my.toml"
    )
