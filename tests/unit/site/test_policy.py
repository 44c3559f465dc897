"""Each line of `[allow]` refuses before anything is read or runs, and lets pass what is just allowed."""

from __future__ import annotations

import hashlib
import io
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import pytest
import tomli_w

from fedlens import Experiment
from fedlens.aggregate.mean import Mean
from fedlens.aggregate.secure.blind_sum import BlindSum
from fedlens.aggregate.secure.encoded_train import EncodedTrain
from fedlens.aggregate.secure.quantized import Quantized
from fedlens.aggregate.secure.secagg import SecAgg
from fedlens.aggregate.secure.secagg_client import MaskedTrain, RoundKeys
from fedlens.algorithms.client_evaluation import EvaluateOwn
from fedlens.base.errors import ConfigError
from fedlens.base.parse_text import parse_toml
from fedlens.core.engine_base import EngineBase
from fedlens.core.protocol import Ask, Client, ClientDataSource, Outcome, Payload
from fedlens.core.random import Rng
from fedlens.core.types import ClientId
from fedlens.core.wire.census import CountedClient, SiteCensus
from fedlens.core.wire.message import Message, read, write_payload
from fedlens.core.wire.plain_schema import to_plain
from fedlens.core.wire.terms import ExperimentTerms
from fedlens.data.client_datasets import ClientDatasets
from fedlens.data.partition.roster import Roster
from fedlens.engines.inline import inline
from fedlens.identity.file_cipher import FileCipher
from fedlens.privacy.accounting import by_client
from fedlens.run.build import build
from fedlens.run.round_context import round_context
from fedlens.site.answering import Answering
from fedlens.site.answers_log import AnswersLog
from fedlens.site.client_logs import ClientLogs
from fedlens.site.contract import INNER, read_contract, site_part
from fedlens.site.data_check import check_data
from fedlens.site.kept_states import KeptStates
from fedlens.site.local_data import LocalData
from fedlens.site.operation_thread import time_limit
from fedlens.site.policy import RULES, refusals, refused, release_of, work_of
from fedlens.site.settings import SITE_FILE, SiteAllow, SiteSettings
from fedlens.site.site_log import SiteLog
from fedlens.site.workplace import Proposal, Workplace
from fedlens.tasks.classification import Classification
from fedlens.tasks.detection import Detection
from tests.unit.engines.loopback import Site
from tests.unit.site.ask_kit import SITE, ask_of
from tests.unit.site.site_kit import RUN, opened, plan_at_server, write_images, write_site
from tests.unit.site.test_workplace import Connected

IMAGES = 30
NAMES = ("a", "b")
FORM = {"name": "sites", "classes": [str(k) for k in range(10)], "input_shape": [1, 8, 8]}
GIVEN = {**FORM, "mean": [0.5], "std": [0.25]}
PLAIN: Mapping[str, Any] = {
    "rounds": 2,
    "data": {"dataset": GIVEN, "validation": 0.2, "validation_from": "client"},
    "model": "mlp",
    "local": {"lr": 0.1, "steps": 3, "batch_size": 8},
    "evaluation": {"clients": "all"},
    "engine": {"name": "network", "max_share": 1.0},
}
SECURE: Mapping[str, Any] = {
    "data": {"dataset": {**GIVEN, "test": "digits"}},
    "aggregate": {"name": "secagg"},
    "evaluation": {"clients": "none"},
}


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that both sites have."""
    drawn = np.random.default_rng(0).integers(0, 256, (IMAGES, 8, 8)).astype(np.uint8)
    labels, patients = (
        [str(i % 10) for i in range(IMAGES)],
        [f"p{max(0, i - 13) // 2}" for i in range(IMAGES)],
    )
    write_images(folder := tmp_path_factory.mktemp("scans"), drawn, labels, {"patient": patients})
    return folder


@pytest.fixture
def folders(scans: Path, tmp_path: Path) -> dict[str, Path]:
    """The folders of two sites."""
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "scans").symlink_to(scans)
    return {name: tmp_path / name for name in NAMES}


def named_line(folder: Path, line: str) -> str:
    """A pattern of the end of a sentence: the line of `[allow]`, its value, and where it is in the file."""
    lines = (folder / SITE_FILE).read_text().splitlines()
    at = next(i for i, each in enumerate(lines) if each.startswith(f"{line} = "))
    return rf"not allowed: \[allow\] {line} = .*, in {re.escape(str(folder / SITE_FILE))}, line {at + 1}"


@pytest.fixture
def canary(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it: whoever reads data of a site from then on fails the test."""

    def set() -> None:
        def read(*given: Any, **more: Any) -> NoReturn:
            pytest.fail("data of the site were read")

        monkeypatch.setattr(LocalData, "open", read)
        monkeypatch.setattr(ClientDatasets, "data_of", read)

    return set


# -- experiments ------------------------------------------------------------------------------------------------------

NETWORKS = {"model": {"name": "small-cnn", "norm": "none"}}
GKT = {
    **NETWORKS,
    "algorithm": {"name": "fedgkt", "client": {"name": "small-cnn", "norm": "none"}, "cut": "0"},
}
EXAMPLE = {"unit": "example", "clip": 1.0, "noise_multiplier": 4.0, "delta": 0.1}
NOISED: Mapping[str, Any] = {
    "data": {"dataset": {**GIVEN, "test": "digits"}, "normalize": "unit"},
    "evaluation": {"clients": "none"},
    "privacy": EXAMPLE,
}
EPOCHS = {"local": {"lr": 0.1, "epochs": 4, "batch_size": 8}}
EXPERIMENTS: list[tuple[str, Any, Any, Mapping[str, Any]]] = [
    # the line, a value that refuses, one that allows, and the experiment
    ("algorithms", ["fedprox"], ["fedavg"], {}),
    ("algorithms", [], ["fedprox", "fedavg"], {}),
    ("models", ["linear"], ["mlp"], {}),
    ("models", ["other"], ["small-cnn"], GKT),
    ("max_rounds", 1, 2, {}),
    ("max_epochs", 3, 4, EPOCHS),
    ("max_epochs", 4, 5, {"algorithm": {"name": "finetune", "epochs": 5}}),
    ("min_steps", 4, 3, {}),
    ("min_batch", 9, 8, {}),
    ("secure_sum", "only", "any", {}),
    ("secure_sum", "only", "any", {**SECURE, "aggregate": {"name": "quantized"}}),
    ("secure_sum", "only", "any", {**SECURE, "data": {"dataset": {**FORM, "test": "digits"}}}),
    ("pixel_sums", False, True, {"data": {"dataset": FORM}}),
    ("max_epsilon", 1.0, None, {}),
    ("max_epsilon", 1.0, None, {**NOISED, "privacy": {**EXAMPLE, "noise": "seeded"}}),
    ("max_epsilon", 1.0, None, {**NOISED, "privacy": {**EXAMPLE, "unit": "client"}}),
    ("max_epsilon", 1.0, None, {**NOISED, "data": {"dataset": {**FORM, "test": "digits"}}}),
]


@pytest.mark.parametrize(("line", "wrong", "right", "changes"), EXPERIMENTS, ids=str)
def test_an_experiment_beyond_a_line_is_refused_before_data_are_read(
    line: str,
    wrong: Any,
    right: Any,
    changes: Mapping[str, Any],
    folders: dict[str, Path],
    canary: Callable[[], None],
) -> None:
    canary()
    text, folder = site_part(plan_at_server({**PLAIN, **changes}).config), folders["a"]
    settings = write_site(folder, allow={line: wrong})
    with pytest.raises(ConfigError, match=named_line(folder, line)):
        Proposal.read(text, settings, "a", folder, RUN, ExperimentTerms(), SITE)
    (sentence,) = refusals(read_contract(text, settings), settings)
    assert re.search(named_line(folder, line), sentence)
    settings = write_site(folder, allow={} if right is None else {line: right})
    assert Proposal.read(text, settings, "a", folder, RUN, ExperimentTerms(), SITE).digest
    assert refusals(read_contract(text, settings), settings) == []


def test_a_secure_sum_that_sums_no_images_passes(
    folders: dict[str, Path], canary: Callable[[], None]
) -> None:
    canary()
    text = site_part(plan_at_server({**PLAIN, **SECURE}).config)
    settings = write_site(folders["a"], allow={"secure_sum": "only"})
    assert refusals(read_contract(text, settings), settings) == []


def test_the_model_in_a_model_is_named_too(folders: dict[str, Path]) -> None:
    text = site_part(plan_at_server(PLAIN).config)
    settings = write_site(folders["a"], allow={"models": ["mlp"]})
    contract = read_contract(text, settings)
    inner = {**contract.settings, "model": {"name": "mlp", "base": {"name": "linear"}}}
    assert "the model 'linear'" in refusals(replace(contract, settings=inner), settings)[0]


@pytest.mark.parametrize(
    ("table", "line", "said"),
    [
        ("allow", "max_epoch = 5", "did you mean 'max_epochs'."),
        ("allow", "zzz = 5", "known: algorithms, delta, max_epochs, "),
        ("keep", "zzz = 5", "known: days, sent."),
        ("compute", "thread = 5", "did you mean 'threads'."),
        ("data", "zzz = 5", "known: cache, clients, dataset, exclude, labels, persons."),
    ],
)
def test_a_misspelled_line_lists_the_lines_of_its_table(
    table: str, line: str, said: str, tmp_path: Path
) -> None:
    data = '[data]\ndataset = "digits"\n'
    path = tmp_path / "site.toml"
    path.write_text(f"{data}{line}\n" if table == "data" else f"{data}[{table}]\n{line}\n")
    with pytest.raises(ConfigError) as error:
        SiteSettings.read(path)
    key, number = line.partition(" ")[0], 3 if table == "data" else 4
    assert str(error.value).startswith(
        f"unknown setting '{key}' ({path}, line {number}: {table}.{key}); {said}"
    )


@pytest.mark.parametrize(
    ("allow", "said"),
    [
        ({"algorithms": ["fedagv"]}, "[allow] algorithms names 'fedagv', which fedlens does not have"),
        ({"models": ["mlp", "smal-cnn"]}, "did you mean 'small-cnn'"),
        ({"reviewers": 2}, "[allow] reviewers = 2, and [reviewers] names 0 besides this site"),
    ],
)
def test_a_check_names_what_can_never_be_approved(
    allow: Mapping[str, Any], said: str, tmp_path: Path
) -> None:
    write_site(tmp_path, allow=allow)
    (step,) = check_data(tmp_path, "a")
    assert step.ok is False
    assert said in f"{step.what} {step.hint}"
    write_site(tmp_path, allow={"algorithms": ["fedavg", "own.py:rule"], "models": ["small-cnn"]})
    assert next(iter(check_data(tmp_path, "a"))).ok


@pytest.mark.parametrize(
    ("changes", "inner"),
    [
        ({"model": "projection"}, "model"),
        ({"model": {"name": "projection", "base": "projection"}}, "model.base"),
        (GKT, "algorithm"),
    ],
)
@pytest.mark.parametrize("how", ["named", "a table", "left out", "a name alone"])
def test_a_model_in_any_setting_is_named_also_by_default(
    changes: Mapping[str, Any], inner: str, how: str, folders: dict[str, Path]
) -> None:
    """`fedlens.site.contract.INNER` has all of these settings: `test_every_free_text_is_known_to_be_no_place`."""
    sent = parse_toml(site_part(plan_at_server({**PLAIN, **changes}).config))
    settings = write_site(folders["a"], allow={"models": ["projection", "small-cnn", "gkt-resnet8"]})
    assert refusals(read_contract(tomli_w.dumps(sent), settings), settings) == []
    *above, last = inner.split(".")
    outer = sent
    for name in above:
        outer = outer[name]
    table = outer[last]
    setting = INNER[table["name"]]
    if how in ("named", "a table"):
        table[setting] = "linear" if how == "named" else {"name": "linear"}
        (sentence,) = refusals(read_contract(tomli_w.dumps(sent), settings), settings)
        assert "the model 'linear'" in sentence
        return
    if how == "left out":
        del table[setting]
    else:
        outer[last] = table["name"]
    with pytest.raises(ConfigError, match=rf"'{table['name']}' names no model") as refused:
        read_contract(tomli_w.dumps(sent), settings)
    assert f"{inner}.{setting}" in str(refused.value)


def test_every_line_has_a_rule_or_a_reader() -> None:
    elsewhere = {"delta", "max_seconds", "min_examples", "min_cohort", "reviewers"}
    assert SiteAllow.model_fields.keys() == RULES.keys() | elsewhere


# -- operations -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Canary:
    """The data of a client, which has sizes, and fails the test if an example is read."""

    data: Any

    def __len__(self) -> int:
        return len(self.data)

    @property
    def validation(self) -> Canary | None:
        return None if self.data.validation is None else Canary(self.data.validation)

    def __getattr__(self, name: str) -> NoReturn:
        pytest.fail("an example was read")


@dataclass(frozen=True)
class Canaries(ClientDataSource):
    """The data of clients, each with a canary."""

    source: ClientDataSource

    def data_of(self, client: ClientId, /) -> Canary:
        return Canary(self.source.data_of(client))


@dataclass
class Answers:
    """A site that answers asks as its agent does.

    Attributes:
        started: the operations that were started.
        metrics: those of the last answer.
    """

    place: Workplace
    folder: Path
    canary: bool = False

    def __post_init__(self) -> None:
        self.started: list[str] = []
        self.log, notes = AnswersLog(self.folder / "log", self.folder / "work"), SiteLog(self.folder / "log")
        states, logs = KeptStates(self.folder / "states"), ClientLogs(self.folder / "logs", FileCipher(SITE))
        self.answering = Answering(SITE, self.log, states, logs, notes, print)
        counted = {name: self._counted(name, op) for name, op in self.place.program.ops.items()}
        data = self.place.program.data
        self.place.program = replace(
            self.place.program, ops=counted, data=Canaries(data) if self.canary else data
        )

    def _counted(self, name: str, op: Any) -> Any:
        def call(payload: Payload, client: Client, rng: Rng) -> Outcome:
            self.started.append(name)
            return op(payload, client, rng)  # type: ignore[no-any-return]

        return call

    def outcome(self, ask: Ask, slot: int = 0, **changes: Any) -> str:
        """ "reply", or the reason of a failure. `changes` are fields of the payload, or `shared` ones."""
        shared = write_payload({**ask.shared, **changes.pop("shared", {})})
        (row,) = self.place.rows.values()
        own = next(one.payload for one in ask.requests if one.client == row)
        body = write_payload({**own, **changes})
        details = {"expect": to_plain(ask.expect)}
        fields = {"client": "a", "operation": ask.op, "slot": slot}
        message = ask_of(body, hashlib.sha256(shared).digest(), details, **fields)
        sealed, outcome = self.answering.answered(self.place, message, [body, shared])
        self.metrics = read(io.BytesIO(sealed), SITE.public).details["metrics"]
        return outcome

    def said(self) -> str:
        return (self.folder / "log" / "site.jsonl").read_text()


@pytest.fixture
def answers(folders: dict[str, Path]) -> Iterator[Callable[..., tuple[Answers, dict[str, Ask]]]]:
    """Makes the site "a" with a line in `[allow]`, and what the server asks its client in round 1, by operation."""
    made: list[Answers] = []

    def make(
        changes: Mapping[str, Any], canary: bool = False, persons: bool = False, **allow: Any
    ) -> tuple[Answers, dict[str, Ask]]:
        write_site(folders["b"])
        write_site(
            folders["a"], {"persons": "patient"} if persons or "min_persons" in allow else {}, allow=allow
        )
        planned = plan_at_server({**PLAIN, **changes})
        roster, (place, _) = opened(planned, folders)
        server = build(planned, Path(), False, place.built.engine, roster=roster)
        context, algorithm = round_context(server, 1), server.algorithm
        state = algorithm.init(server.model, server.federation)
        asks = {}
        for steps in (algorithm.round(state, context), algorithm.evaluate(state, context)):
            ask = next(steps)
            if ask.op == "evaluate":  # of data that the server does not have
                with suppress(StopIteration):  # no client is asked
                    ask = steps.send(iter(()))
            asks[ask.op] = ask
        for one in made:
            one.log.close()
        made[:] = [Answers(place, folders["a"], canary)]
        return made[0], asks

    yield make
    for one in made:
        one.log.close()


TUNED = {"algorithm": {"name": "finetune"}, "local": {"lr": 0.1, "steps": 9, "batch_size": 8}}
OPERATIONS: list[tuple[str, Any, Any, str, Mapping[str, Any]]] = [
    ("operations", ["evaluate-own"], ["train"], "train", {}),
    ("operations", ["train"], ["evaluate-own"], "evaluate-own", {}),
    ("max_epochs", 2, 3, "train", {"local": {"lr": 0.1, "steps": 9, "batch_size": 8}}),
    ("max_epochs", 2, 3, "evaluate-own", TUNED),
    ("max_epochs", 1, 2, "train", {"local": {"lr": 0.1, "batch_size": 8, "examples": 48}}),
    ("min_steps", 4, 3, "train", {}),
    ("min_steps", 2, 1, "gradient", {"algorithm": "feddane"}),
    ("min_steps", 2, 1, "train", {"algorithm": "mimelite"}),
    ("min_batch", 25, 24, "train", {"local": {"lr": 0.1, "batch_size": "all"}}),
    ("min_batch", 25, 24, "train", {"local": {"lr": 0.1, "batch_size": 64}}),
    ("min_batch", 25, 24, "train", {"local": {"lr": 0.1, "batch_size": 32, "examples": 64}}),
    ("secure_sum", "only", "any", "train", {}),
    ("secure_sum", "only", "any", "evaluate-own", {}),
    ("report_metrics", False, "totals", "evaluate-own", {}),
    ("min_persons", 9, 8, "train", {}),  # of the 9 persons
    ("min_persons", 6, 5, "evaluate-own", {}),  # of 6 held-out images
]


IN_CI = (1, 3, 6, 8, 14, 15)


@pytest.mark.parametrize(
    ("line", "wrong", "right", "op", "changes"),
    [
        pytest.param(*case, marks=() if at in IN_CI else pytest.mark.nightly, id=f"{case[0]}-{at}")
        for at, case in enumerate(OPERATIONS)
    ],
)
def test_an_operation_beyond_a_line_never_starts(
    line: str,
    wrong: Any,
    right: Any,
    op: str,
    changes: Mapping[str, Any],
    answers: Callable[..., tuple[Answers, dict[str, Ask]]],
) -> None:
    site, asks = answers(changes, canary=True, **{line: wrong})
    assert site.outcome(asks[op]) == "policy"
    assert site.started == []
    assert re.search(
        named_line(site.folder, line).replace('"', '\\\\"'), json.loads(site.said().splitlines()[-1])["text"]
    )
    site, asks = answers(changes, **{line: right})
    assert site.outcome(asks[op], slot=1) == "reply"
    assert site.started == [op]


def test_noised_training_is_counted_over_all_runs_and_refused_beyond_max_epsilon(
    answers: Callable[..., tuple[Answers, dict[str, Ask]]],
) -> None:
    release = {
        "z": 4.0,
        "q": 8 / 30,
        "sampling": "poisson",
        "relation": "add-or-remove",
        "cohort": 8,
        "clients": 30,
    }
    spent = [by_client({"a": [{**release, "steps": 3}] * times}, 1e-5)["a"] for times in (2, 3)]
    site, asks = answers(
        NOISED, max_epsilon=spent[0] + 1e-6
    )  # at the delta of the site, not at 0.1 of the experiment
    assert site.outcome(asks["train"]) == "reply"
    assert site.metrics == {"examples": 24, "batches": 3}
    ledger = ClientLogs(site.folder / "logs", FileCipher(SITE))  # read anew, as after a restart
    ledger.released("another run", 1, "b", {**release, "steps": 3})

    def lost(payload: Payload, client: Client, rng: Rng) -> NoReturn:
        raise RuntimeError("there is no reply")

    site.place.program = replace(site.place.program, ops={"train": lost})
    assert site.outcome(asks["train"], slot=1) == "operation"
    assert [event["steps"] for event in ledger.releases("a")] == [3, 3]
    assert (site.folder / "privacy.jsonl").stat().st_mode & 0o777 == 0o600
    site, asks = answers(NOISED, canary=True, max_epsilon=spent[0] + 1e-6)
    assert site.outcome(asks["train"], slot=2) == "policy"
    assert site.started == []
    assert f"after which epsilon is {spent[1]:.3g} for one image" in site.said()
    assert len(ledger.releases("a")) == 2


def test_with_persons_max_epsilon_is_of_a_person_and_refuses_noise_that_hides_less(
    answers: Callable[..., tuple[Answers, dict[str, Ask]]],
) -> None:
    by_person = {**NOISED, "privacy": {**EXAMPLE, "column": "patient"}}
    site, asks = answers(by_person, persons=True, max_epsilon=100.0)
    contract, settings = site.place.local.contract, site.place.local.settings
    assert refusals(contract, settings) == []
    by_image = {**contract.settings, "privacy": EXAMPLE}
    for privacy in (EXAMPLE, {**EXAMPLE, "column": "scanner"}):
        by_image["privacy"] = privacy
        (sentence,) = refusals(replace(contract, settings=by_image), settings)
        assert sentence.startswith(
            "training without privacy.column = 'patient', whose noise hides no person, is not"
        )
    assert site.outcome(asks["train"]) == "reply"
    ledger = ClientLogs(site.folder / "logs", FileCipher(SITE))
    (release,) = ledger.releases("a")
    assert release["column"] == "patient"
    ledger.released("another run", 1, "a", {**release, "column": None})
    assert site.outcome(asks["train"], slot=1) == "policy"
    assert site.started == ["train"]
    assert "'train', after which epsilon is inf for one patient of the client, is not" in site.said()


def test_noised_training_in_a_secure_sum_counts_as_without(
    answers: Callable[..., tuple[Answers, dict[str, Ask]]],
) -> None:
    site, _ = answers(NOISED)
    train = site.place.built.algorithm.ops["train"]
    layout, terms = cast("Any", None), cast("Any", None)
    masked = MaskedTrain(EncodedTrain(cast("Any", train), layout), terms)
    assert release_of(masked, 30) == release_of(train, 30)
    assert work_of("train", masked, 30) == replace(work_of("train", train, 30), summed=True)
    assert work_of("keys", RoundKeys(terms)).epsilon == 0.0  # reads no image


@pytest.mark.parametrize("where", ["own", "shared"])
def test_the_work_that_the_server_asks_for_counts(
    where: str, answers: Callable[..., tuple[Answers, dict[str, Ask]]]
) -> None:
    local = {"lr": 0.1, "steps": 3, "batch_size": 8, "stragglers": 0.5}
    site, asks = answers({"local": local}, min_steps=3)
    asks["train"] = replace(
        asks["train"], requests=[replace(one, payload={}) for one in asks["train"].requests]
    )
    less = {"work": 2} if where == "own" else {"shared": {"work": 2}}
    assert site.outcome(asks["train"], **less) == "policy"
    assert site.started == []
    assert "'train' with 2 local steps" in site.said()
    assert site.outcome(asks["train"], slot=1) == "reply"


def test_images_that_are_left_out_count(answers: Callable[..., tuple[Answers, dict[str, Ask]]]) -> None:
    site, asks = answers({"local": {"lr": 0.1, "steps": 6, "batch_size": 8}}, max_epochs=2)
    assert site.outcome(asks["train"]) == "reply"
    site.place.examples = lambda row: (16, 6)  # type: ignore[method-assign]
    assert site.outcome(asks["train"], slot=1) == "policy"


def test_training_without_metrics_sends_none(answers: Callable[..., tuple[Answers, dict[str, Ask]]]) -> None:
    site, asks = answers({}, report_metrics=False)
    assert site.outcome(asks["train"]) == "reply"
    assert site.metrics == {}
    site, asks = answers({})
    assert site.outcome(asks["train"], slot=1) == "reply"
    assert site.metrics.keys() == {"loss", "examples", "batches"}


@pytest.mark.parametrize("changes", [{}, TUNED], ids=["as it is", "tuned"])
def test_an_evaluation_in_totals_has_no_part_by_class_bin_or_image(
    changes: Mapping[str, Any], answers: Callable[..., tuple[Answers, dict[str, Ask]]]
) -> None:
    site, asks = answers(changes, report_metrics="totals")
    assert site.outcome(asks["evaluate-own"]) == "reply"
    lines = map(json.loads, (site.folder / "log" / "asked.jsonl").read_text().splitlines())
    (line,) = (each for each in lines if each.get("kind") == "fields")
    parts = ("after", "before") if changes else ("after",)
    names = ("loss float64[]", *(f"{name} int64[]" for name in ("examples", "correct", "top5")))
    assert sorted(line["fields"]) == sorted(f"{part}.sums.{name}" for part in parts for name in names)
    assert site.outcome(asks["train"], slot=1) == "reply"
    assert site.metrics.keys() == {"loss", "examples", "batches"}


def test_an_evaluation_without_totals_is_refused_where_totals_alone_leave(folders: dict[str, Path]) -> None:
    settings = write_site(folders["a"], allow={"report_metrics": "totals"})
    works = [
        work_of("evaluate-own", EvaluateOwn(cast("Any", None), task, 8))
        for task in (Detection(), Classification())
    ]
    assert refused(works[1], settings) == []
    (sentence,) = refused(works[0], settings)
    assert sentence.startswith(
        "'evaluate-own', which sends no sums over all images, is not allowed: [allow] report_"
    )
    assert re.search(named_line(folders["a"], "report_metrics"), sentence)
    assert refused(works[0], write_site(folders["a"])) == []


class _Own:
    """An operation of a user's own."""

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        raise NotImplementedError


@pytest.mark.parametrize("line", ["max_epochs", "min_steps", "min_batch"])
def test_an_operation_that_is_not_fedlens_own_is_refused_where_training_has_limits(
    line: str, folders: dict[str, Path]
) -> None:
    work = work_of("train", _Own())
    assert refused(work, write_site(folders["a"], allow={line: 1}))[0].startswith(
        "'train', whose training does"
    )
    assert refused(work, write_site(folders["a"])) == []


@pytest.mark.parametrize(("aggregate", "passes"), [(SecAgg, True), (Quantized, False)])
def test_the_operations_of_a_secure_sum_pass_and_those_of_its_plain_twin_do_not(
    aggregate: type[BlindSum], passes: bool, folders: dict[str, Path]
) -> None:
    settings = write_site(folders["a"], allow={"secure_sum": "only"})
    roster = Roster.of([SiteCensus(name, [CountedClient(name, 20, 0)]) for name in "abcd"])
    server = build(plan_at_server(PLAIN), Path(), False, inline(device="cpu"), roster=roster)
    train = server.algorithm.ops["train"]
    ops = aggregate(Mean()).fitted(train, 4, server.federation).ops
    works = {op: work_of(op, made(train), 20) for op, made in ops.items()}
    assert "train" in works
    assert all((refused(work, settings) == []) == passes for work in works.values())
    limits = write_site(folders["a"], allow={"max_epochs": 1, "min_steps": 3, "min_batch": 8})
    assert all(refused(work, limits) == [] for work in works.values())
    trained = [work for work in works.values() if work.steps is not None]
    assert [(work.epochs, work.steps, work.batch) for work in trained] == [(1.0, 3, 8)]


def test_an_operation_that_takes_too_long_is_given_up(
    answers: Callable[..., tuple[Answers, dict[str, Ask]]],
) -> None:
    site, asks = answers({}, max_seconds=0.05)

    def endless(payload: Payload, client: Client, rng: Rng) -> NoReturn:
        while True:
            time.sleep(0.001)

    program = site.place.program
    site.place.program = replace(program, ops={"train": endless})
    assert site.outcome(asks["train"]) == "policy"
    assert re.search(named_line(site.folder, "max_seconds"), site.said())
    site.place.local = replace(site.place.local, settings=write_site(site.folder, allow={"max_seconds": 600}))
    site.place.program = program
    assert site.outcome(asks["train"], slot=1) == "reply"


@pytest.mark.parametrize("caught", [False, True])
def test_a_time_limit_ends_with_its_block(caught: bool) -> None:
    def endless() -> None:
        while True:
            time.sleep(0.001)

    catch = suppress(TimeoutError) if caught else nullcontext()
    with pytest.raises(TimeoutError), time_limit(0.01), catch:
        endless()
    for seconds in (None, 600.0):
        with time_limit(seconds):
            pass


# -- the run ----------------------------------------------------------------------------------------------------------


class Forbidding(Site):
    """A site that refuses evaluations."""

    def answer(self, ask: Message, blobs: Mapping[bytes, bytes]) -> tuple[Message, bytes]:
        if ask.fields.operation == "evaluate-own":
            return self.sealed(ask, {"outcome": "failure", "reason": "policy"}, b"")
        return super().answer(ask, blobs)


class Forbidden(Connected):
    """Connects an engine to sites of which some refuse evaluations."""

    which: Collection[str] = ()

    def __call__(self, engine: EngineBase) -> Roster:
        roster = super().__call__(engine)
        for name, site in engine._post.link.sites.items():  # type: ignore[attr-defined]
            if name in self.which:
                kind = type("Forbids", (Forbidding, type(site)), {"place": site.place})
                engine._post.link.sites[name] = kind(name, site.place.program, roster, takes=site.takes)  # type: ignore[attr-defined]
        return roster


@pytest.mark.report_page
@pytest.mark.parametrize("which", [NAMES, NAMES[:1]], ids=str)
def test_a_run_goes_on_without_evaluations_and_its_page_says_so(
    which: tuple[str, ...], folders: dict[str, Path], tmp_path: Path
) -> None:
    for folder in folders.values():
        write_site(folder)
    roster, places = opened(plan_at_server(PLAIN), folders)
    connect = Forbidden(roster, dict(zip(NAMES, places, strict=True)))
    connect.which = which
    result = Experiment(**PLAIN).run(tmp_path / "run", connect=connect)
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2]
    assert all(("clients_accuracy_mean" in line) == (len(which) == 1) for line in lines)
    assert [line["clients"] for line in lines] == [0, 2, 2]
    page = (result.directory / "report.html").read_text()
    said = {1: "1 client was not evaluated", 2: "2 clients were not evaluated"}[len(which)]
    assert f"{said}: the policy of the site does not allow it" in page
    assert "Sites that were not evaluated" in page
