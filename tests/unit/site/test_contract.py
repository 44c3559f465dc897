"""No name in an experiment runs code at a site, and no path or URL in it is opened."""

from __future__ import annotations

import hashlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import fedlens
from fedlens.aggregate.mean import AGGREGATES
from fedlens.analyses.registry import ANALYSES
from fedlens.base.errors import ConfigError
from fedlens.base.parse_text import parse_toml
from fedlens.base.registry import Registry, own_names, settings_model
from fedlens.data.datasets.registry import DATASETS
from fedlens.data.partition.registry import PARTITIONS
from fedlens.engines.registry import ENGINES
from fedlens.models.prepare import Preparation
from fedlens.models.registry import MODELS
from fedlens.settings.config import Config
from fedlens.settings.plan import OBSERVERS
from fedlens.site.contract import INNER, NAMED, Contract, read_contract, site_part
from fedlens.site.settings import SiteSettings
from tests.unit.site.site_kit import plan_at_server, write_site

SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "model": "mlp",
    "local": {"lr": 0.1, "steps": 2},
    "data": {
        "dataset": {"name": "sites", "classes": ["a", "b"], "input_shape": [1, 8, 8]},
        "augment": ["flip"],
    },
    "client": {"name": "proximal", "mu": 0.1},
    "evaluation": {"clients": "all"},
}
PLUGIN, MODULE, CODE = "foreign-thing", "foreign_module", "foreign_file.py"
AT_THE_SERVER = {
    "data.partition": PARTITIONS,
    "engine": ENGINES,
    "observe": OBSERVERS,
    "evaluation.neighbours.dataset": DATASETS,
    "data.dataset": DATASETS,
    "data.dataset.test": DATASETS,
}
"""The settings that name things of these tables, and that no site gets, but for the dataset 'sites'."""


@pytest.fixture(scope="module")
def text() -> str:
    return site_part(plan_at_server(SETTINGS).config)


@pytest.fixture
def site(tmp_path: Path) -> SiteSettings:
    return write_site(tmp_path / "site")


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of code that would note that it ran: a module, a file, and what a package offers under each kind."""
    folder = tmp_path / "foreign"
    about = folder / "foreign-1.dist-info"
    about.mkdir(parents=True)
    for name in (f"{MODULE}.py", CODE):
        (folder / name).write_text("raise SystemExit('foreign code ran')\n")
    groups = [f"[fedlens.{registry.kind}s]\n{PLUGIN} = {MODULE}:make\n" for registry in registries()]
    (about / "entry_points.txt").write_text("\n".join(groups))
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    code = [f"{MODULE}:make", f"{folder / CODE}:make", f"{CODE}:make", "subprocess:getoutput", PLUGIN]
    assert [name for name, _ in MODELS.rows() if name == PLUGIN]  # it is there for whoever looks
    return code


PLACES = (
    "/etc/passwd",
    "../x.npz",
    "~/x",
    "https://x.org/w.pth",
    "hub:x/y",
    "run:runs/a",
    "w.pth",
    ".hidden",
    "x\\y",
)


@pytest.mark.parametrize("place", ["model", "client"])
def test_a_base_at_any_depth_is_a_model_that_is_named(text: str, site: SiteSettings, place: str) -> None:
    def settings(name: str) -> str:
        model: Any = {"name": name}
        for _ in range(3):
            model = {"name": "projection", "base": model}
        changed = {"model": model} if place == "model" else {"algorithm": {"name": "fedgkt", "client": model}}
        return tomli_w.dumps({**parse_toml(text), **changed})

    assert "small-cnn" in read_contract(settings("small-cnn"), site).names(MODELS)
    with pytest.raises(ConfigError, match="the model 'subprocess' is not fedlens's own"):
        read_contract(settings("subprocess"), site)


def registries() -> list[Registry]:
    """Every table of names in fedlens."""
    found: dict[int, Registry] = {}
    for module in pkgutil.walk_packages(fedlens.__path__, "fedlens."):
        if not module.name.endswith(("__main__", "_main", "forkserver")):
            for value in vars(import_module(module.name)).values():
                if isinstance(value, Registry):
                    found[id(value)] = value
    return list(found.values())


_heard: list[tuple[str, Any]] = []
_listening = False


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _listening and event.partition(".")[0] in (
        "import",
        "open",
        "exec",
        "subprocess",
        "os",
        "socket",
        "pickle",
    ):
        _heard.append((event, arguments[:1]))


sys.addaudithook(_hear)


@contextmanager
def untouched() -> Iterator[None]:
    """Fails if the block imports, executes or opens anything."""
    global _listening
    before, _listening = set(sys.modules), True
    _heard.clear()
    try:
        yield
    finally:
        _listening = False
    assert _heard == []
    assert set(sys.modules) == before


def put(settings: dict[str, Any], key: str, value: Any) -> str:
    """The text of the settings with this value at a dotted key."""
    changed: Any = parse_toml(tomli_w.dumps(settings))
    table = changed
    *above, last = key.split(".")
    for part in above:
        table = table.setdefault(part, {}) if isinstance(table, dict) else table[0]
    table[last] = value
    return tomli_w.dumps(changed)


def refused(text: str, site: SiteSettings) -> ConfigError:
    with untouched(), pytest.raises(ConfigError) as caught:
        read_contract(text, site)
    assert "experiment" in str(caught.value)
    return caught.value


def test_every_table_of_names_is_in_a_slot_that_is_checked() -> None:
    known = [*NAMED.values(), *AT_THE_SERVER.values(), ANALYSES]  # analyses read a finished run
    assert [registry.kind for registry in registries() if not any(registry is one for one in known)] == []


def test_foreign_code_is_refused_in_every_slot(text: str, site: SiteSettings, foreign: list[str]) -> None:
    settings = parse_toml(text)
    for key in (*NAMED, *AT_THE_SERVER):
        for name in (*foreign, *PLACES):
            listed = key in ("data.augment", "observe", "client")
            for value in ({"name": name}, name, *([[{"name": name}]] if listed else [])):
                refused(put(settings, key, value), site)


def test_foreign_code_and_places_are_refused_in_every_setting(
    text: str, site: SiteSettings, foreign: list[str]
) -> None:
    settings = parse_toml(text)
    for key, registry in {id(table): (key, table) for key, table in NAMED.items()}.values():
        for name in registry:
            for setting in settings_model(registry.find(name)).model_fields:
                refused(put(settings, key, {"name": name, setting: [{"deep": [foreign[0]]}]}), site)
    for setting in Preparation.model_fields:
        refused(put(settings, f"model.{setting}", [{"deep": [foreign[0]]}]), site)
    refused(put(settings, "model.weights", "weights"), site)  # a folder of the current one
    for name in PLACES:
        refused(put(settings, "model.weights", name), site)
        refused(put(settings, "local.lr_scale", {name: 1.0}), site)


def test_every_free_text_is_known_to_be_no_place() -> None:
    """A new setting that any text may fill: look whether it is opened or imported, and add it here or to `_PLACE`."""
    free = {
        (name, setting)
        for registry in {id(table): table for table in NAMED.values()}.values()
        for name in registry
        for setting, info in settings_model(registry.find(name)).model_fields.items()
        if any(word in str(info.annotation) for word in ("str", "Any", "Path", "Callable"))
        and "Literal" not in str(info.annotation)
    }
    layers = {("fedgkt", "cut"), ("splitfed", "cut"), ("split-relay", "cut")}
    models = set(INNER.items())
    words = {("fedir", "target"), ("reweighted", "target"), ("darts", "genotype")}
    words |= {(name, "range") for name in AGGREGATES if AGGREGATES.find(name)().blind}
    assert free - layers - models - words == set()
    assert [n for n, i in Preparation.model_fields.items() if "str" in str(i.annotation) and n != "norm"] == [
        "weights",
        "weights_sha256",
        "freeze",
    ]


def test_within_own_names_no_table_looks_elsewhere(foreign: list[str]) -> None:
    for registry in registries():
        for name in foreign:
            with own_names({}), untouched(), pytest.raises(ConfigError, match="not fedlens's own"):
                registry.find(name)


def test_a_model_within_a_model_is_fedlens_own_when_it_is_built(
    text: str, site: SiteSettings, foreign: list[str]
) -> None:
    base = {"name": "projection", "base": {"name": "projection", "base": "mlp"}}
    contract = read_contract(put(parse_toml(text), "model", base), site)
    with own_names({}), pytest.raises(ConfigError, match=f"'{PLUGIN}' is not fedlens's own"):
        contract.plan().chosen["model"].factory((1, 8, 8), 2, base={"name": "projection", "base": PLUGIN})
    assert MODULE not in sys.modules


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: put(s, "observe", ["a:b"]), "observe"),
        (lambda s: put(s, "record", {"clients": True}), "record"),
        (lambda s: put(s, "evaluation.train", True), "evaluation.train"),
        (lambda s: put(s, "data.dataset.path", "x"), "data.dataset.path"),
        (lambda s: put(s, "data.dataset.name", "digits"), "not 'sites'"),
        (lambda s: put(s, "data", 3), "must be a table"),
        (lambda s: "a = [" * 3000, "not readable"),
        (lambda s: f'name = "{"x" * 2**18}"', "longer than"),
        (lambda s: "rounds = \x1b[31m", "not readable"),
    ],
)
def test_a_text_that_is_no_part_for_sites_is_refused(
    change: Callable[[dict[str, Any]], str], message: str, text: str, site: SiteSettings
) -> None:
    error = refused(change(parse_toml(text)), site)
    assert message in str(error)
    assert str(error).isprintable()


def test_the_server_sends_what_a_site_reads(text: str, site: SiteSettings) -> None:
    contract = read_contract(text, site)
    assert contract.digest == hashlib.sha256(text.encode()).hexdigest()
    assert {"engine", "observe", "record", "checkpoint", "divergence"}.isdisjoint(contract.settings)
    with own_names({}):
        planned = contract.plan()
    at_server = plan_at_server(SETTINGS).config
    for table in (
        "model",
        "algorithm",
        "local",
        "client",
        "seeds",
        "select",
        "aggregate",
        "server",
        "privacy",
    ):
        assert getattr(planned.config, table) == getattr(at_server, table), table
    assert any("input_shape" in line for line in contract.lines())


def test_test_data_of_the_server_do_not_reach_a_site(site: SiteSettings) -> None:
    data = {**SETTINGS["data"], "dataset": {**SETTINGS["data"]["dataset"], "test": "digits"}}
    settings = {**SETTINGS, "data": data, "observe": []}
    assert "digits" not in site_part(plan_at_server({**settings, "name": "n"}).config)


def test_weights_that_no_site_can_open_are_refused_at_the_server() -> None:
    for weights in ("run:runs/a", "hub:a/b"):
        model = {"name": "mlp", "weights": weights}
        with pytest.raises(ConfigError, match="save the weights as a file"):
            site_part(Config.model_validate({**SETTINGS, "model": model, "data": SETTINGS["data"]}))


def file_and_line(folder: Path, name: str, content: bytes) -> dict[str, str]:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return {name: hashlib.sha256(content).hexdigest()}


def test_a_file_of_code_runs_only_as_it_was_approved(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    code = b"import torch\nfrom os import system\nRAN = True\n\n"
    code += b"def net(input_shape, classes):\n    return torch.nn.Flatten()\n"
    files = file_and_line(folder, "code/nets.py", code)
    site = write_site(folder, files=files)
    named = put(parse_toml(text), "model", {"name": "nets.py:net"})
    before = set(sys.modules)
    with untouched():
        contract = read_contract(named, site)
    assert f"# approved file: code/nets.py {files['code/nets.py']}" in contract.lines()
    with own_names(contract.code()):
        factory = contract.plan().chosen["model"].factory
    assert factory((1, 8, 8), 2).__class__.__name__ == "Flatten"
    # What the file imports is no factory: its settings would be the arguments.
    for other in ("system", "torch", "RAN"):
        named = put(parse_toml(text), "model", {"name": f"nets.py:{other}", "command": "reboot"})
        imported = read_contract(named, site)
        with own_names(imported.code()), pytest.raises(ConfigError, match=f"does not define '{other}'"):
            imported.plan()
    (folder / "code/nets.py").write_bytes(code.replace(b"RAN", b"EVIL"))
    with pytest.raises(ConfigError, match="another one is approved"):
        contract.code()
    (folder / "code/nets.py").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        contract.code()
    for name in ("other.py:net", "nets.py:net:x", "nets:net"):
        refused(put(parse_toml(text), "model", {"name": name}), site)
    for name in set(sys.modules) - before:
        assert "fedlens_user_" not in name


def test_weights_have_the_digest_that_the_site_approved(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    files = file_and_line(folder, "w.safetensors", b"x")
    contract = read_contract(
        put(parse_toml(text), "model.weights", "w.safetensors"), write_site(folder, files=files)
    )
    with own_names({}):
        model = contract.plan().config.model
    assert model["weights"] == str(folder / "w.safetensors")
    assert model["weights_sha256"] == files["w.safetensors"]
    other = put(parse_toml(text), "model", {**model, "weights": "w.safetensors", "weights_sha256": "0" * 64})
    contract = read_contract(other, write_site(folder, files=files))
    with own_names({}), pytest.raises(ConfigError, match="name different files"):
        contract.plan()


def test_a_terminal_sees_no_character_that_it_would_obey(text: str, site: SiteSettings) -> None:
    contract = read_contract(put(parse_toml(text), "name", "a\x1b[31mb\u202e"), site)
    assert isinstance(contract, Contract)
    assert all(line.isprintable() or not line for line in contract.lines())


def test_people_see_the_settings_and_no_text_that_only_looks_like_them(text: str, site: SiteSettings) -> None:
    disguised = "# rounds = 1\n" + put(parse_toml(text), "name", "a\nrounds = 1\n")
    lines = read_contract(disguised.replace('"a\\nrounds = 1\\n"', '"""a\nrounds = 1\n"""'), site).lines()
    assert not any(line.lstrip("# ").startswith("rounds = 1") for line in lines)
