"""Which decisions let a site compute an experiment: exactly what was approved, by those who may approve."""

from __future__ import annotations

import base64
import csv
import hashlib
import html
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedlens.base.errors import ConfigError, FedlensError, IdentityError
from fedlens.core.wire.terms import ExperimentTerms
from fedlens.identity.keys import KeyPair
from fedlens.identity.site_keys import SiteKeys
from fedlens.site import review as review_module
from fedlens.site.answers_log import AnswersLog
from fedlens.site.approvals import Approvals, Decision, matter_of
from fedlens.site.contract import Contract, read_contract, site_part
from fedlens.site.log_export import AskedLog
from fedlens.site.review import Review
from fedlens.site.settings import SITE_FILE, SiteSettings
from fedlens.site.workplace import Proposal
from tests.unit.identity.federation_kit import NOW, federation_in, joined
from tests.unit.site.site_kit import plan_at_server, write_site

SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "model": "mlp",
    "local": {"lr": 0.1, "steps": 2},
    "data": {"dataset": {"name": "sites", "classes": ["no", "yes"], "input_shape": [1, 8, 8]}},
}
OTHER, LATER, OFFICER = KeyPair.make(), KeyPair.make(), KeyPair.make()


@dataclass
class Site:
    """A site that reviews an experiment with one other site."""

    folder: Path
    keys: SiteKeys
    review: Review

    def decide(self, key: KeyPair | None = None, reason: str | None = None, after: float = 0.0) -> Path:
        """A decision, by the site itself if no key is given."""
        key = key or self.keys.identity()
        decision = Decision.make(key, self.review.matter, reason, NOW + after)
        return self.review.approvals.put(decision, self.review.contract)

    def missing(self, now: float = NOW, **changes: Any) -> str:
        """Why a proposal with these changes is not computed; empty if it is."""
        changed = replace(self.review, **changes)
        return changed.approvals.missing(changed.matter, now) or ""

    def terms(self, **changes: Any) -> ExperimentTerms:
        return replace(self.review.terms, **changes)

    def ask_for(self, reviewers: int, **keys: KeyPair) -> None:
        """Lets so many reviewers decide, which ends earlier approvals."""
        settings = replace(
            write_site(self.folder, allow={"reviewers": reviewers}),
            reviewers={name: key.public for name, key in keys.items()},
        )
        self.review = self.under(settings)

    def under(self, settings: SiteSettings) -> Review:
        """The same with another `site.toml`."""
        contract = replace(self.review.contract, site=settings)
        return replace(
            self.review, contract=contract, approvals=replace(self.review.approvals, settings=settings)
        )


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A site and a proposal to it that has an end date and an agreement."""
    keys = joined(
        federation_in(tmp_path), "keys", tmp_path
    )  # the folder of the keys has this name at every site
    settings = write_site(tmp_path)
    terms = ExperimentTerms("2099-01-31", "0a" * 32, {"keys": keys.identity().public, "ward-b": OTHER.public})
    contract = read_contract(site_part(plan_at_server(SETTINGS).config), settings)
    return Site(tmp_path, keys, Review(contract, terms, "run-1", Approvals.of(tmp_path, settings)))


def test_a_changed_site_file_ends_what_was_approved_until_the_site_starts_again(site: Site) -> None:
    """A limit that a person sets while the agent runs holds from the next answer on, and so does a broken file."""
    text = site_part(plan_at_server(SETTINGS).config)

    def proposed() -> Proposal:
        settings, own = SiteSettings.read(site.folder / SITE_FILE), site.keys.identity()
        return Proposal.read(text, settings, "keys", site.folder, "run-1", site.review.terms, own)

    site.decide()
    running = proposed()
    assert running.missing() is None
    before = (site.folder / SITE_FILE).read_text()
    for changed in (before.replace("[allow]", "[allow]\nmax_rounds = 5"), "not = [toml"):
        (site.folder / SITE_FILE).write_text(changed)
        assert running.missing() == f"{SITE_FILE} has changed: start the site again"
    (site.folder / SITE_FILE).write_text(f"# a comment\n{before}")  # whose digest the log would not have
    assert running.missing() == f"{SITE_FILE} has changed: start the site again"
    (site.folder / SITE_FILE).write_text(before)
    assert running.missing() is None
    (site.folder / SITE_FILE).write_text(before.replace("[allow]", "[allow]\nmax_rounds = 5"))
    look_again = "since the approval: allow.max_rounds; look again: fedlens site review"
    assert proposed().missing() == f"the rules of site.toml have changed {look_again}"  # after the next start
    site.review = site.under(SiteSettings.read(site.folder / SITE_FILE))
    site.decide()
    assert proposed().missing() is None


def test_an_approval_binds_the_rules_of_the_site(site: Site) -> None:
    """Each line of `[data]`, `[allow]` and `[reviewers]`, as it is written; not what changes no answer."""
    site.decide()

    def missing(more: str = "", **changes: Any) -> str:
        write_site(site.folder, **changes)
        with (path := site.folder / SITE_FILE).open("a") as file:
            file.write(more)
        changed = site.under(SiteSettings.read(path))
        said = changed.missing()
        assert changed.approvals.last_missing(changed.contract.digest, NOW) == said
        return said or ""

    officer = f'\n[reviewers]\nofficer = "{base64.b64encode(OFFICER.public).decode()}"\n'
    changed: Sequence[tuple[str, dict[str, Any]]] = (
        ("data.dataset", {"data": {"dataset": {"name": "image-folder", "path": "others", "table": "scans.csv"}}}),
        ("data.clients", {"data": {"clients": "patient"}}),
        ("data.labels", {"data": {"labels": {"no": ""}}}),
        ("data.exclude", {"data": {"exclude": "out.txt"}}),
        ("allow.min_examples", {"allow": {"min_examples": 2}}),  # also a stricter one
        ("allow.reviewers", {"allow": {"reviewers": 2}, "more": officer}),
        ("reviewers.officer", {"more": officer}),
        ("allow.max_epochs, allow.max_rounds, allow.max_seconds and 1 more", {
            "allow": {"max_epochs": 9, "max_rounds": 9, "max_seconds": 60, "min_steps": 1},
        }),
    )  # fmt: skip
    for lines, changes in changed:
        said = missing(**changes)
        assert said.startswith("the rules of site.toml have changed since the approval: "), lines
        assert lines in said
    same: Sequence[dict[str, Any]] = (
        {"data": {"dataset": {"table": "scans.csv", "path": "scans", "name": "image-folder"}, "cache": 3}},
        {"allow": {"min_cohort": 3}},  # the default
        {"more": "\n# a comment\n[keep]\ndays = 9\n"},
        {"files": {"mine.py": "0a" * 32}},
    )
    for changes in same:
        assert not missing(**changes), changes
    text = (site.folder / SITE_FILE).read_text()
    (site.folder / SITE_FILE).write_text(text.replace('"cpu"', '"cpu"\nthreads = 2'))
    assert site.under(SiteSettings.read(site.folder / SITE_FILE)).missing() is None


def test_an_approval_holds_for_what_it_names_until_its_last_day(site: Site) -> None:
    assert "waits for: fedlens site review" in site.missing()
    path = site.decide()
    assert path.stat().st_mode & 0o777 == 0o600
    assert not site.missing()
    assert not site.missing(4073587200 - 1)  # 2099-02-01, UTC
    assert "2099-01-31 (UTC), is over" in site.missing(4073587200)
    later = {**site.review.terms.peers, "ward-d": LATER.public}
    other = {**site.review.terms.peers, "ward-b": LATER.public}
    fewer = {"ward-b": OTHER.public}
    assert not site.missing(terms=site.terms(peers=fewer))  # one that leaves changes nothing
    assert not site.missing(terms=site.terms(keep_days=30))  # the server may keep less
    for changes, said in (
        ({"terms": site.terms(peers=later)}, "the sites have changed since the approval: ward-d is new; look again"),
        ({"terms": site.terms(peers=other)}, "ward-b has another key"),
        ({"terms": site.terms(until="2099-02-01")}, "the end date has changed since the approval, from 2099-01-31"),
        ({"terms": site.terms(until=None)}, "the end date has changed"),
        ({"terms": site.terms(agreement="0b" * 32)}, "the data use agreement has changed"),
        ({"terms": site.terms(agreement=None)}, "the data use agreement has changed"),
        ({"terms": site.terms(keep_days=366)}, "retention at the server has grown since the approval, from 365 to 366"),
        ({"run": "run-2"}, "another run"),
    ):  # fmt: skip
        assert said in site.missing(**changes), said
    for changed in ({"rounds": 3}, {"seed": 1}, {"local": {"lr": 0.2, "steps": 2}}):
        text = site_part(plan_at_server({**SETTINGS, **changed}).config)
        other_contract = read_contract(text, site.review.contract.site)
        assert "waits for" in site.missing(contract=other_contract)
    # The file of an approval in the folder of another experiment counts for nothing there.
    shutil.copytree(path.parent, path.parent.with_name(other_contract.digest))
    assert "the decision is on another experiment" in site.missing(contract=other_contract)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("keep_days", "it is no decision on an experiment, or it is damaged"),
        ("rules", "an older version of fedlens made it, which bound no rules of site.toml"),
    ],
)
def test_an_approval_of_an_older_version_does_not_count(site: Site, field: str, said: str) -> None:
    path = site.decide()
    content = json.loads(path.read_text())
    del content["matter"][field]
    path.write_text(json.dumps(content))
    assert said in site.missing()
    assert "delete the file, and decide again" in site.missing()
    site.decide()
    assert not site.missing()


def test_an_approval_binds_the_files_that_the_experiment_names(site: Site) -> None:
    text = tomli_w.dumps({**site.review.contract.settings, "model": {"name": "mine.py:net"}})

    def contract(digest: str, **more: str) -> Contract:
        return read_contract(text, write_site(site.folder, files={"mine.py": digest, **more}))

    site.review = replace(site.review, contract=contract("0a" * 32))
    assert site.review.matter.files == {"mine.py": "0a" * 32}
    site.decide()
    assert not site.missing(
        contract=contract("0a" * 32, **{"other.py": "0c" * 32})
    )  # it does not name this one
    changed = site.missing(contract=contract("0b" * 32))
    assert (
        changed == "the approved file mine.py has changed since the approval; look again: fedlens site review"
    )
    site.decide(reason="no")
    assert "was rejected" in site.missing(contract=contract("0b" * 32))


@pytest.mark.parametrize("files", [None, [], {"mine.py": 7}, {"mine.py": "0a"}])
def test_a_matter_without_digests_is_damaged(site: Site, files: Any) -> None:
    plain = {**asdict(site.review.matter), "files": {"mine.py": "0a" * 32}}
    assert matter_of(plain).files == {"mine.py": "0a" * 32}
    with pytest.raises(IdentityError, match="damaged"):
        matter_of({**plain, "files": files})
    with pytest.raises(IdentityError, match="damaged"):
        matter_of({**plain, "rules": files})


def test_a_new_approval_takes_the_place_of_one_that_lapsed(site: Site) -> None:
    site.decide()
    later = site.terms(peers={**site.review.terms.peers, "ward-d": LATER.public})
    site.review = replace(site.review, terms=later)
    assert "ward-d is new" in site.missing()
    site.decide()
    assert not site.missing()


def test_two_reviewers_are_two_keys(site: Site) -> None:
    site.ask_for(2, officer=OFFICER, again=OFFICER)
    path = site.decide()
    site.decide(after=1)
    shutil.copy(path, path.with_name("copy.json"))
    half = "1 of 2 approvals; waits for another reviewer (approved by keys)"
    assert site.missing() == half
    approvals, digest = site.review.approvals, site.review.contract.digest
    assert approvals.last_missing(digest, NOW) == half
    assert "waits for: fedlens site review" in str(approvals.last_missing("0a" * 32, NOW))
    path.with_name("copy.json").unlink()
    assert site.review.approvals.approvers(site.review.matter).keys() == {"keys"}  # who is named in the log
    site.decide(OFFICER)
    assert not site.missing()
    assert approvals.last_missing(digest, NOW) is None
    shutil.copytree(path.parent, path.parent.with_name("0b" * 32))
    assert "another experiment" in str(approvals.last_missing("0b" * 32, NOW))
    assert set(site.review.approvals.approvers(site.review.matter)) == {"keys", "officer"}
    assert not site.review.approvals.approvers(replace(site.review, run="run-2").matter)
    site.ask_for(2, officer=OFFICER)  # without a key that approved nothing
    assert "since the approval: reviewers.again; look again" in site.missing()
    site.ask_for(3, officer=OFFICER)
    site.decide()
    site.decide(OFFICER)
    impossible = "2 of 3 approvals; [allow] reviewers = 3, and [reviewers] names 1 besides this site"
    assert str(site.missing()).startswith(impossible)
    site.ask_for(3, officer=OFFICER, again=OFFICER)
    site.decide()
    site.decide(OFFICER)
    assert site.missing().startswith("2 of 3 approvals; waits for another reviewer (approved by ")
    site.ask_for(4, officer=OFFICER, again=OFFICER, more=OFFICER)
    site.decide()
    site.decide(OFFICER)
    assert site.missing().startswith("2 of 4 approvals; waits for 2 other reviewers (approved by ")
    site.review = replace(site.review, run="run-2")
    assert "another run" in site.missing()
    site.decide(after=2)
    assert site.missing().startswith(
        "1 of 4 approvals; waits for 3 other reviewers"
    )  # not of what has lapsed


def test_the_key_of_a_stranger_decides_nothing(site: Site) -> None:
    with pytest.raises(ConfigError, match="none of \\[reviewers\\]"):
        site.decide(OFFICER)
    site.ask_for(1, officer=OFFICER)
    site.decide(OFFICER)
    assert not site.missing()
    site.ask_for(1)  # the officer has left
    assert "do not count: the key" in site.missing()


@pytest.mark.parametrize(
    "edit",
    [
        lambda content: content.replace(b'"rounds": 2', b'"rounds": 9'),
        lambda content: content.replace(b"2099-01-31", b"2098-01-31"),
        lambda content: content.replace(b'"approves": true', b'"approves": false'),
        lambda content: content.replace(b'"time": ', b'"time": 1'),
        lambda content: content[:-20],
        lambda content: b"\xff" * 90,
        lambda content: b"[" * 10_000,
        lambda content: json.dumps({**json.loads(content), "reviewer": base64.b64encode(OTHER.public).decode()}),
    ],
)  # fmt: skip
def test_a_file_that_was_edited_or_signed_by_another_key_counts_for_nothing(
    site: Site, edit: Callable[[bytes], Any]
) -> None:
    path = site.decide()
    edited = edit(path.read_bytes())
    path.write_bytes(edited if isinstance(edited, bytes) else edited.encode())
    said = site.missing()
    assert said.startswith(
        f"the decisions on the experiment {site.review.contract.digest[:12]} do not count: "
    )
    assert path.name in said
    assert "delete the file, and decide again" in said


def test_a_file_that_others_can_write_or_a_link_counts_for_nothing(site: Site) -> None:
    path = site.decide()
    path.chmod(0o644)
    assert "open to other users" in site.missing()
    path.chmod(0o600)
    os.rename(path.parent.parent, site.folder / "elsewhere")
    path.parent.parent.symlink_to(site.folder / "elsewhere")
    with pytest.raises(FedlensError, match="link"):
        site.missing()


def test_a_rejection_counts_whatever_a_clock_says(site: Site) -> None:
    site.decide()
    assert not site.missing()
    site.decide(None, "no", after=-3600)
    assert "was rejected by" in site.missing()


@pytest.mark.parametrize("after", [-3600, 0, 3600])
def test_an_old_approval_does_not_come_back_after_a_rejection_whatever_the_clocks_say(
    site: Site, tmp_path: Path, after: float
) -> None:
    site.ask_for(1, officer=OFFICER)
    site.decide()
    approval, rejection = tmp_path / "approval.json", tmp_path / "rejection.json"
    why = "the \x1b[31mconsent does not\ncover it"
    for path, reason, when in ((approval, None, NOW), (rejection, why, NOW + after)):
        path.write_bytes(Decision.make(OFFICER, site.review.matter, reason, when).to_bytes())
        site.review.keep(site.review.decision_in(path))
    said = site.missing()
    assert said.endswith(r"was rejected by officer: the \x1b[31mconsent does not\ncover it")
    for path in site.folder.glob("approved/*/*.json"):
        if b"consent" in path.read_bytes():
            path.unlink()  # the log has it still
    unknown = Decision.make(OFFICER, site.review.matter, None, NOW)  # never seen here
    for older, match in (
        (site.review.decision_in(approval), "decided again"),
        (unknown, "not take that back"),
    ):
        with pytest.raises(ConfigError, match=match):
            site.review.keep(older)
    assert site.missing() == said
    assert site.review.approvals.last_missing(site.review.contract.digest, NOW) == said
    exported = tmp_path / "experiment.json"
    exported.write_bytes(site.review.export())  # names the rejection
    taken_back = tmp_path / "again.json"
    taken_back.write_bytes(Review.read(exported).decide(OFFICER, None).to_bytes())
    site.review.keep(site.review.decision_in(taken_back))
    assert not site.missing()
    site.decide(OFFICER, "again")
    for path in (approval, rejection, taken_back):  # the first rejection would let its approval follow
        with pytest.raises(ConfigError, match="officer has decided again since"):
            site.review.keep(site.review.decision_in(path))
    assert site.missing().endswith("rejected by officer: again")


def test_each_kept_decision_is_a_line_of_the_log_also_while_the_site_runs(site: Site) -> None:
    running = AnswersLog(site.folder / "log", site.folder / "work")
    running.event("left")
    site.decide()
    site.decide(None, "no, =1")
    running.event("returned")
    running.close()
    log = AskedLog.read(site.folder)  # which verifies the chain
    assert [line["kind"] for line in log.told] == ["left", "approved", "rejected", "returned"]
    path = next(site.folder.glob("approved/*/*.json"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    said = f"by keys, reason no, =1, decision {digest}, experiment {site.review.contract.digest}"
    assert log.rows()[2][1:7] == ["run-1", "", "rejected", "", "", f"{said[:43]} ..."]
    told = list(csv.DictReader(log.as_csv().splitlines()))[2]
    assert told["reason"].startswith(said)
    page = html.unescape(log.as_page("ward-a", "hospitals"))
    assert said in page
    assert f"by keys, decision {log.told[1]['decision']}" in page


def test_a_site_takes_its_own_rejection_back(site: Site) -> None:
    site.review.keep(site.review.decide(site.keys.identity(), "no"))
    assert "was rejected by" in site.missing()
    site.review.keep(site.review.decide(site.keys.identity(), None))
    assert not site.missing()


def test_a_decision_for_something_else_is_not_kept(site: Site, tmp_path: Path) -> None:
    site.ask_for(1, officer=OFFICER)
    (tmp_path / "twin").mkdir()
    matter = site.review.matter
    for changes in ({"site": "ward-b"}, {"root": "0c" * 32}, {"experiment": "0c" * 32}, {"rounds": 9}):
        for reason in (None, "no"):
            with pytest.raises(ConfigError, match="not on what is proposed here now"):
                site.review.keep(Decision.make(OFFICER, replace(matter, **changes), reason, NOW))
    for changes in ({"run": "run-2"}, {"until": None}, {"peers": {}}):
        with pytest.raises(ConfigError, match="not on what is proposed here now"):
            site.review.keep(Decision.make(OFFICER, replace(matter, **changes), None, NOW))
    assert not (site.folder / "approved").exists()


def test_a_rejection_from_elsewhere_needs_no_proposal(site: Site) -> None:
    site.ask_for(1, officer=OFFICER)
    approvals, matter = site.review.approvals, site.review.matter
    for changes in ({"site": "ward-b"}, {"root": "0c" * 32}):
        with pytest.raises(ConfigError, match="for another site or another federation"):
            approvals.keep_rejection(Decision.make(OFFICER, replace(matter, **changes), "no", NOW))
    with pytest.raises(ConfigError, match=r"none of \[reviewers\]"):
        approvals.keep_rejection(Decision.make(OTHER, matter, "no", NOW))
    assert not site.missing(contract=site.review.contract).startswith("the experiment was rejected")
    approvals.keep_rejection(Decision.make(OFFICER, replace(matter, run="run-2"), "no", NOW))
    assert site.missing().endswith("was rejected by officer: no")
    assert not list((site.folder / "approved").glob("*.toml"))


def test_an_experiment_is_decided_on_another_machine(site: Site, tmp_path: Path) -> None:
    site.ask_for(2, officer=OFFICER)
    site.decide()
    exported = tmp_path / "experiment.json"
    exported.write_bytes(site.review.export())
    there = Review.read(exported)
    assert there.matter == site.review.matter
    assert there.lines() == site.review.lines()
    (tmp_path / "decision.json").write_bytes(there.decide(OFFICER, None).to_bytes())
    site.review.keep(site.review.decision_in(tmp_path / "decision.json"))
    assert not site.missing()
    content = json.loads(exported.read_bytes())
    content["allow"]["min_examples"] = 9  # the officer is shown other rules than the site has
    exported.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"have changed since the approval: allow\.min_examples"):
        site.review.keep(Review.read(exported).decide(OFFICER, None))


@pytest.mark.parametrize(
    "changes",
    [
        {"site": "../ward\x1b[31m"},
        {"root": "MTIz"},
        {"terms": {**ExperimentTerms().to_plain(), "peers": dict.fromkeys(map(str, range(20_000)), "")}},
        {"settings": "\x1b[31m" * 10_000},
        {"settings": "x" * 2**23},
        {"allow": {"max_rounds": "\x1b[31m"}},
        {"files": {"../\x1b[31m": 7}},
        {"more": None, "run": 7},
    ],
)
def test_a_hostile_file_is_a_short_sentence(site: Site, tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "experiment.json"
    path.write_text(json.dumps({**json.loads(site.review.export()), **changes}))
    with pytest.raises(FedlensError) as caught:
        Review.read(path)
    assert len(str(caught.value)) < 700
    assert str(caught.value).replace("\n", "").isprintable()


def test_what_is_shown_has_no_character_that_a_terminal_obeys(site: Site) -> None:
    review = replace(site.review, run="run\x1b[31m\n\u202e")
    assert all(line.isprintable() for line in review.lines())
    shown = "\n".join(review.lines())
    kept = "answers: 365 days after the last event of the run; no program here"
    for each in ("last day: 2099-01-31", kept, "0a" * 32, "ward-b", review.contract.digest, "2 rounds"):
        assert each in shown
    assert len(review.to_plain()["peers"]["ward-b"].split()) == 8
    with pytest.raises(IdentityError):
        Decision.read(b"{}")


def test_a_person_sees_what_a_client_sends(site: Site) -> None:
    shown = site.review.to_plain()["leaves"]
    (train,) = [line for line in shown if line.startswith("train, ")]
    assert "weight number, metrics.batches number" in train
    census = shown[0]
    assert census.startswith("census before round 1, some ")
    assert "clients[1].examples number" in census
    assert ("sums.values number[" in census) == (" B, with sums of pixels: " in census)
    assert all(line in "\n".join(site.review.lines()) for line in shown)


def test_looking_opens_no_file_that_the_experiment_names(site: Site, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("raise SystemExit('it was imported')")
    os.mkfifo(tmp_path / "w.safetensors")  # who opens it waits for ever
    files = {
        name: hashlib.sha256((tmp_path / "nets.py").read_bytes()).hexdigest()
        for name in ("nets.py", "w.safetensors")
    }
    settings = write_site(tmp_path, files=files)
    for model in ({"name": "nets.py:net"}, {"name": "mlp", "weights": "w.safetensors"}):
        text = tomli_w.dumps({**site.review.contract.settings, "model": model})
        review = replace(site.review, contract=read_contract(text, settings))
        (named,) = [name for name in files if name in text]
        assert review.to_plain()["leaves"] == [f"not shown: the experiment uses {named}"]
        assert Review.read(exported(review, tmp_path)).lines() == review.lines()


def test_what_cannot_run_is_a_sentence(site: Site) -> None:
    text = tomli_w.dumps({**site.review.contract.settings, "model": {"name": "resnet18", "depth\x1b[31m": 3}})
    (line,) = replace(site.review, contract=read_contract(text, site.review.contract.site)).leaves()
    assert line.startswith("not shown: ")
    assert line.isprintable()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"name": "mlp", "hidden": [2**14] * 8}}, "the model is larger"),
        (
            {"model": {"name": "projection", "base": {"name": "mlp", "hidden": [2**14] * 8}}},
            "the model is larger",
        ),
        (
            {"data": {"dataset": {**SETTINGS["data"]["dataset"], "input_shape": [1, 2**14, 2**14]}}},
            "80 made-up images are larger",
        ),
    ],
)
def test_what_no_message_could_carry_is_not_built(
    site: Site, changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(*given: Any, **more: Any) -> None:
        pytest.fail("it was built")

    monkeypatch.setattr(review_module, "trial_round", built)
    text = tomli_w.dumps({**site.review.contract.settings, **changes})
    (line,) = replace(site.review, contract=read_contract(text, site.review.contract.site)).leaves()
    assert line.startswith("not shown: ")
    assert f"{said} than [compute] max_message" in line


def exported(review: Review, folder: Path) -> Path:
    path = folder / "experiment.json"
    path.write_bytes(review.export())
    return path


@pytest.mark.parametrize("reports", [True, "totals", False])
def test_a_review_shows_of_an_evaluation_what_the_site_sends(site: Site, reports: bool | str) -> None:
    held_out = {"data": {**SETTINGS["data"], "validation": 0.2, "validation_from": "client"}}
    text = site_part(plan_at_server({**SETTINGS, **held_out, "evaluation": {"clients": "all"}}).config)
    settings = write_site(site.folder, allow={"report_metrics": reports})
    lines = replace(site.review, contract=read_contract(text, settings)).leaves()
    (evaluated,) = (line for line in lines if "evaluate-own" in line)
    assert ("class_examples" in evaluated) == (reports is True)
    assert ("after.sums.correct" in evaluated) == (reports is not False)
    assert ("not allowed: [allow] report_metrics = false" in evaluated) == (reports is False)
    assert any("how much was right" in line for line in lines) == (reports is True)
    (trained,) = (line for line in lines if line.startswith("train, "))
    assert ("metrics." in trained) == (reports is not False)
    assert any(line.startswith("less than in the dossier: ") for line in lines) == (reports is not True)
