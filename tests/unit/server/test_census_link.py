"""Which sites an engine sees, and what the others are told."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedlens.base.errors import RunFailed
from fedlens.core.wire.census import ChannelSums, CountedClient, SiteCensus
from fedlens.core.wire.message import Caps, Message, read_payload, seal
from fedlens.core.wire.terms import ExperimentTerms
from fedlens.data.partition.roster import Roster
from fedlens.engines.links.link import Arrived, Link
from fedlens.engines.network import Waits
from fedlens.files import jsonl
from fedlens.files.chained_log import ChainedLog, read_chained
from fedlens.identity.authority import day
from fedlens.identity.federation_folder import FederationFolder
from fedlens.identity.site_keys import SiteKeys
from fedlens.server import census_link
from fedlens.server.census_link import CensusLink, RoundDropped
from fedlens.server.event_log import EventLog
from fedlens.server.serve_record import ServeRecord
from tests.link_kit import Federation
from tests.unit.identity.federation_kit import NOW

WAITS = Waits(min_sites=2, patience=100.0)


class FakeLink(Link):
    """A link whose sites say what a test puts in `queue`. A clock moves on while it waits."""

    def __init__(self) -> None:
        self.now, self.queue = 1000.0, list[Arrived]()
        self.told: dict[str, list[Message]] = {}
        self.bodies: dict[str, bytes] = {}
        self.seen: dict[str, float] = {}
        self.at: dict[float, Any] = {}

    def online(self) -> Mapping[str, float]:
        return self.seen

    def send(self, site: str, message: Message, blobs: Mapping[bytes, bytes], /) -> None:
        if message.purpose == "experiment":
            self.told.setdefault(site, []).append(message)
            self.bodies[site] = blobs[message.fields.payload]

    def collect(self, seconds: float, waiting: Collection[bytes], /) -> list[Arrived]:
        self.now += seconds
        for moment in [moment for moment in self.at if moment <= self.now]:
            self.at.pop(moment)()
        arrived, self.queue = self.queue, []
        return arrived

    def close(self) -> None:
        raise AssertionError("the link stays open")


class Run:
    """One start of a run of sites `names`, which are accepted."""

    def __init__(
        self,
        folder: Path,
        *names: str,
        roster: Roster | None = None,
        channels: int | None = None,
        pixels: int | None = None,
        clock: Callable[[], float] = lambda: NOW,
    ) -> None:
        self.federation = Federation(folder, clock=clock)
        self.federation.registry = FederationFolder(self.federation.registry.folder, clock=clock)
        self.keys = {name: self.federation.site(name) for name in names}
        self.record = replace(ServeRecord.new({}, self.federation.registry.root, "seed = 1\n"), attempt=2)
        self.link, self.path = FakeLink(), folder / "serve.log.jsonl"
        self.sites = CensusLink(
            self.link, self.federation.registry, self.federation.key, self.record, EventLog(self.path), channels,
            roster, clock=lambda: self.link.now, pixels=pixels,
        )  # fmt: skip
        self.sites.collect(0, ())

    def accept(self, name: str) -> None:
        """A site joins and is accepted."""
        self.keys[name] = self.federation.site(name)
        self.sites.collect(0, ())

    def census(self, name: str, examples: int = 10, answers: int = -1, **changes: Any) -> None:
        """A site answers its last message with a census, or another one."""
        told, counted = self.link.told[name][answers], changes.pop("clients", [CountedClient(name, examples)])
        contract, sums = changes.pop("contract", self.record.digest), changes.pop("sums", None)
        census = SiteCensus(name, counted, contract=contract, sums=sums)
        details = {**census.to_plain(), "log_lines": 0, **changes.pop("details", {})}
        fields = told.fields._replace(direction="answer", ask=told.digest)._replace(**changes)
        message = seal(self.keys[name].identity(), "census", fields, details, b"")
        self.link.queue.append(Arrived(name, message, io.BytesIO(message.head)))
        self.link.seen[name] = 1.0
        assert not self.sites.collect(0, ())  # the engine never sees it

    def ask(self, name: str, round: int) -> Message:
        """An ask of a round goes to a site."""
        fields = self.link.told[name][-1].fields._replace(round=round, operation="train")
        ask = seal(self.federation.key, "ask", fields, {"seen": self.sites.post.seen(name)}, b"")
        self.sites.send(name, ask, {fields.payload: b""})
        return ask

    def answer(
        self, name: str, round: int, log: tuple[int, bytes] = (0, bytes(32)), **details: Any
    ) -> list[Arrived]:
        """A site answers an ask of a round, with this state of its log."""
        return self.answered(name, self.ask(name, round), log, **details)

    def answered(self, name: str, ask: Message, log: tuple[int, bytes], **details: Any) -> list[Arrived]:
        fields = ask.fields._replace(ask=ask.digest, direction="answer", head=log[1])
        message = seal(self.keys[name].identity(), "answer", fields, {"log_lines": log[0], **details}, b"")
        self.link.queue.append(Arrived(name, message, io.BytesIO(message.head)))
        return self.sites.collect(0, self.sites._asked.keys())

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in jsonl.read(self.path) if event["event"] == kind]


def roster_of(run: Run, *names: str) -> Roster:
    return Roster.of(
        SiteCensus(name, [CountedClient(name, 10)], contract=run.record.digest) for name in names
    )


def test_a_site_is_there_from_its_census_on(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b")
    run.link.seen = {"a": 1.0, "b": 2.0}
    assert not run.sites.online()
    run.census("a")
    assert run.sites.online() == {"a": 1.0}
    assert [event["site"] for event in run.events("census")] == ["a"]


def test_a_site_that_has_left_is_away_and_named_once_until_it_comes_back(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b", "c")
    answers = ChainedLog(tmp_path / "answers.jsonl")
    run.sites._answers = answers
    for name in "abc":
        run.census(name)
    run.federation.registry.note_left("c", NOW)
    run.sites.collect(0, ())
    assert run.sites.online().keys() == {"a", "b"}
    assert set(run.sites.gather(replace(WAITS, patience=0.0), None).sites) == {"a", "b"}
    (row,) = [row for row in run.sites.rows(60.0) if row.name == "c"]
    assert (row.state, row.note) == ("late", f"left on {day(NOW)}")
    for _ in range(2):
        run.federation.registry.note_left("c", NOW + 60)  # the first time stays
        run.sites._read_at = None
        run.sites.collect(0, ())
        run.sites._settle()
    assert [(event["site"], event["what"]) for event in run.events("left")] == [
        ("c", f"it said so on {day(NOW)}, and is not asked")
    ]
    lines = [line for line, _, _ in read_chained(answers.path) if line["kind"] == "left"]
    assert [(line["site"], line["on"]) for line in lines] == [("c", day(NOW))]
    run.federation.registry.note_left("c", 0.0)
    run.sites.collect(0, ())
    assert run.sites.online().keys() == {"a", "b", "c"}
    answers.close()


def test_a_message_of_an_earlier_start_counts_for_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    run.census("a", attempt=1)
    run.census("a", run="another")
    run.census("a", ask=bytes(32))
    assert not run.sites.online()
    assert not run.events("refused")
    run.census("a")
    assert run.sites.online()


def test_what_a_site_is_told(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b")
    first = run.link.told["a"][-1]
    assert (first.purpose, first.fields.run, first.fields.attempt) == ("experiment", run.record.run, 2)
    assert first.details["settings"] == "seed = 1\n"
    assert first.details["contract"] == run.record.digest
    assert first.details["rows"] is first.details["refused"] is None
    assert read_payload(run.link.bodies["a"], Caps(1000)) == {}
    run.sites.freeze(roster_of(run, "a", "b"))
    last, body = run.link.told["b"][-1], read_payload(run.link.bodies["b"], Caps(1000))
    assert last.details["rows"] == {"b": 1}
    assert body["examples"].tolist() == [10, 10]
    assert (body["held_out"].tolist(), body["mean"], body["std"], body["images"]) == ([0, 0], None, None, 0)


def test_a_site_without_a_row_is_told_so_whenever_it_came(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b", "c")
    for name in "abc":
        run.census(name)
    run.sites.freeze(roster_of(run, "a", "b"))  # c came with the last census
    run.accept("d")
    assert run.link.told["d"][-1].details["refused"] == "roster"  # before it has sent one
    run.census("d")
    for name in "cd":
        details = run.link.told[name][-1].details
        assert (details["rows"], details["refused"]) == ({}, "roster")
    assert run.sites.online().keys() == {"a", "b"}
    states = {row.name: (row.state, row.note) for row in run.sites.rows(60)}
    assert states == {
        "a": ("online", ""), "b": ("online", ""), "c": ("refused", "roster"), "d": ("refused", "roster"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("contract", {"contract": "ab" * 32}),
        ("examples", {"examples": 11}),
        ("clients", {"clients": [CountedClient("a/x", 1)]}),
    ],
)
def test_a_site_comes_back_with_what_it_had(reason: str, changes: dict[str, Any], tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b")
    run.sites.freeze(roster_of(run, "a", "b"))
    run.census("a", **changes)
    assert run.link.told["a"][-1].details["refused"] == reason
    assert run.link.told["a"][-1].details["rows"] == {}
    assert not run.sites.online()
    count = len(run.link.told["a"])
    run.census("a", **changes)  # a site sends it again when it is told something new
    assert len(run.link.told["a"]) == count
    run.census("a", examples=9)  # less is fine
    assert run.link.told["a"][-1].details["rows"] == {"a": 0}
    assert run.sites.online()


def test_sums_are_given_where_they_are_asked_for(tmp_path: Path) -> None:
    sums = ChannelSums(1, 10, (2.0,), (1.0,))
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    given, summed = Run(tmp_path / "one", "a"), Run(tmp_path / "two", "a", channels=1, pixels=10)
    given.census("a", sums=sums)
    summed.census("a")
    for run in (given, summed):
        assert run.link.told["a"][-1].details["refused"] == "sums"
    summed.census("a", sums=sums)
    assert summed.sites.online()
    for lie in (ChannelSums(1, 10**15, (2.0,), (1.0,)), ChannelSums(11, 110, (2.0,), (1.0,))):
        summed.census("a", sums=lie)  # more than its images have, so that it would decide the mean of all
        assert summed.link.told["a"][-1].details["refused"] == "sums"


def test_a_census_that_is_none_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    run.census("a", clients=[CountedClient("b", 1)])
    assert run.link.told["a"][-1].details["refused"] == "census"
    assert "census of 'a'" in run.events("refused")[0]["what"]


def test_the_roster_is_complete_when_all_accepted_sites_have_answered(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b")
    run.link.at = {
        1003.0: lambda: run.census("a"),
        1005.0: lambda: run.accept("c"),
        1006.0: lambda: (run.census("a"), run.census("b")),  # the terms have c
        1009.0: lambda: run.federation.registry.revoke("c"),
    }
    roster = run.sites.gather(WAITS, None)
    assert roster.sites == ("a", "b")
    assert 1009 <= run.link.now < 1012


def test_a_site_that_is_accepted_while_the_others_answer_is_waited_for(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b")

    def late() -> None:
        run.census("a")
        run.census("b")
        run.keys["c"] = run.federation.site("c")  # after the look of this step at the federation's folder

    run.link.at = {1003.0: late, 1006.0: lambda: [run.census(name) for name in "abc"]}
    assert run.sites.gather(WAITS, None).sites == ("a", "b", "c")
    assert run.link.now < 1009


def test_a_number_of_sites_is_enough(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b", "c")
    run.link.at = {1003.0: lambda: run.census("a"), 1005.0: lambda: run.census("c")}
    assert run.sites.gather(WAITS, 2).sites == ("a", "c")


def test_after_patience_those_that_came_are_enough_unless_more_are_asked_for(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b", "c")
    run.census("a")
    run.census("c")
    assert run.sites.gather(WAITS, None).sites == ("a", "c")
    assert run.link.now >= 1100
    with pytest.raises(RunFailed, match="2 of 3 accepted sites have answered, and the run needs 3"):
        run.sites.gather(WAITS, 3)
    with pytest.raises(RunFailed, match="needs 4"):
        run.sites.gather(replace(WAITS, min_sites=4), None)


def test_a_resumed_run_waits_for_its_sites_a_while(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b", "c")
    run.sites.freeze(roster_of(run, "a", "b"))
    run.link.at = {1003.0: lambda: run.census("a"), 1005.0: lambda: run.census("b", examples=99)}
    run.sites.wait_for_return(60)
    assert 1005 <= run.link.now < 1008  # one that is refused does not come, and c has no part
    (tmp_path / "again").mkdir()
    other = Run(tmp_path / "again", "a", "b")
    other.sites.freeze(roster_of(other, "a", "b"))
    other.sites.wait_for_return(60)
    assert other.link.now >= 1060


def test_a_suspended_site_is_not_there_until_it_is_accepted_again(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    run.census("a")
    registry = run.federation.registry
    registry.suspend("a", "two addresses")
    run.sites.collect(0, ())
    assert not run.sites.online()
    registry.accept("a", registry.site("a").fingerprint)
    run.sites.collect(0, ())
    assert run.sites.online()
    assert len(run.link.told["a"]) == 1


def test_a_new_machine_tells_its_census_anew(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    run.census("a")
    registry = run.federation.registry
    invitation = registry.invite("a", replaces=True)
    run.sites.collect(0, ())
    assert not run.sites.online()
    keys = run.keys["a"] = SiteKeys.join(tmp_path / "new", invitation)
    keys.install(registry.enrol(keys.enrolment(invitation), "127.0.0.1"), run.federation.clock())
    registry.accept("a", keys.identity().fingerprint)
    run.sites.collect(0, ())
    assert not run.sites.online()
    run.census("a")
    assert run.sites.online()


def test_the_round_of_a_dropped_site_is_repeated_and_no_other(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b")
    run.census("a")
    run.census("b")
    assert len(run.answer("a", 1, outcome="reply")) == 1
    run.answer("b", 2, outcome="reply")
    run.federation.registry.revoke("a", drop=True)
    run.sites.collect(0, ())  # its answers are of an earlier round
    (tmp_path / "again").mkdir()
    other = Run(tmp_path / "again", "a", "b")
    other.census("a")
    other.answer("a", 1, outcome="reply")
    other.federation.registry.revoke("a")  # without --drop they stay
    other.sites.collect(0, ())
    (tmp_path / "third").mkdir()
    third = Run(tmp_path / "third", "a", "b")
    third.census("a")
    third.answer("a", 1, outcome="reply")
    third.federation.registry.revoke("a", drop=True)
    with pytest.raises(RoundDropped, match="round 1 is repeated without 'a'"):
        third.sites.collect(0, ())
    assert third.events("dropped")[0]["round"] == 1


def test_a_failure_is_logged_by_a_reason_of_the_list(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    run.census("a")
    run.answer("a", 3, outcome="failure", reason="memory")
    run.answer("a", 3, outcome="failure", reason="scan of Mr X")
    assert [event["reason"] for event in run.events("failed")] == ["memory", "another"]
    assert dict(run.sites.failures) == {("a", "memory"): 1, ("a", "another"): 1}


def test_a_silent_site_is_late(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b")
    run.census("a")
    run.link.seen["a"] = 61.0
    rows = {row.name: row for row in run.sites.rows(60)}
    assert (rows["a"].state, rows["a"].clients, rows["b"].state, rows["b"].ago) == (
        "late",
        1,
        "expected",
        None,
    )


@pytest.mark.parametrize(
    "details",
    [
        {"clients": 5},
        {"clients": [["a", 2**40, 0]]},
        {"clients": [["a", 2**26, 0], ["a/b", 1, 0]]},
        {"sums": [1, 10, [10**400], [1]]},
        {"sums": [1, 10**400, [1.0], [1.0]]},
    ],
    ids=["number", "many", "many-in-all", "huge-sum", "huge-pixels"],
)
def test_no_census_of_a_site_ends_the_run(details: dict[str, Any], tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b", channels=1, pixels=10)
    run.census("a", details=details)
    assert run.link.told["a"][-1].details["refused"] == "census"
    run.census("b", sums=ChannelSums(1, 10, (2.0,), (1.0,)))
    assert run.sites.online().keys() == {"b"}


def peers_told(run: Run, name: str) -> set[str]:
    """The sites in the terms of the last message to a site, whose keys are those that joined."""
    terms = ExperimentTerms.from_plain(run.link.told[name][-1].details["terms"])
    assert terms.peers == {each: run.keys[each].identity().public for each in terms.peers}
    return set(terms.peers)


def test_all_sites_are_told_the_peers_and_again_when_one_is_new(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b")
    assert peers_told(run, "a") == peers_told(run, "b") == {"a", "b"}
    run.census("a")
    run.accept("c")
    assert all(peers_told(run, name) == {"a", "b", "c"} for name in "abc")
    assert not run.sites.online()  # it approved other peers
    run.census("a", answers=-2)  # of the terms before
    assert not run.sites.online()
    run.census("a")
    assert run.sites.online()


def test_a_peer_that_leaves_asks_for_no_new_approval(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b", "c")
    run.census("a")
    before = len(run.link.told["a"])
    run.federation.registry.revoke("c")
    run.sites.collect(0, ())
    assert run.sites.online()
    assert len(run.link.told["a"]) == before


def test_the_peers_of_a_frozen_run_are_those_of_its_roster(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b", "late")
    run.census("a")
    run.census("b")
    run.sites.freeze(roster_of(run, "a", "b"))
    assert peers_told(run, "a") == {"a", "b"}
    run.accept("later")
    assert peers_told(run, "later") == peers_told(run, "a") == {"a", "b"}
    run.federation.registry.revoke("b")
    resumed = Run.__new__(Run)
    resumed.__dict__ = run.__dict__ | {"link": FakeLink()}
    resumed.sites = CensusLink(
        resumed.link, run.federation.registry, run.federation.key, run.record, EventLog(run.path), None,
        roster_of(run, "a", "b"), clock=lambda: 0.0,
    )  # fmt: skip
    resumed.sites.collect(0, ())
    assert peers_told(resumed, "a") == {"a"}
    owners = [
        read_payload(link.bodies["a"], Caps(1000))["owners"].tolist() for link in (run.link, resumed.link)
    ]
    assert owners == [[0, 1], [0, -1]]


def test_a_site_whose_log_goes_back_is_suspended_until_it_is_accepted(tmp_path: Path) -> None:
    now = [NOW]
    run = Run(tmp_path, "a", "b", clock=lambda: now[0])
    run.census("a")
    for lines, head in ((4, b"4" * 32), (7, b"7" * 32), (7, b"7" * 32)):
        assert len(run.answer("a", 1, (lines, head), outcome="reply")) == 1
    run.sites.close()
    again = CensusLink(
        run.link, run.federation.registry, run.federation.key, run.record, EventLog(run.path),
        clock=lambda: run.link.now,
    )  # fmt: skip
    run.sites = again  # another start of the server, or another run
    run.sites.collect(0, ())
    assert run.link.told["a"][-1].details["seen"] == [7, (b"7" * 32).hex()]
    assert not run.answer("a", 2, (6, b"6" * 32), outcome="reply")
    record = run.federation.registry.site("a")
    assert (record.state, record.reason) == ("suspended", "its log has 6 lines, and had 7 before")
    assert [event["what"] for event in run.events("suspended")] == [record.reason]
    now[0] += 60
    run.federation.registry.accept("a", record.fingerprint)
    run.sites.collect(0, ())
    assert run.link.told["a"][-1].details["seen"] is None  # the next one is taken as it is
    run.census("a", details={"log_lines": 6})
    assert len(run.answer("a", 3, (6, bytes(32)), outcome="reply")) == 1
    assert not run.answer("a", 3, (6, b"x" * 32), outcome="reply")
    assert run.federation.registry.site("a").reason == "its log was changed up to line 6"


def test_an_answer_to_an_earlier_ask_may_come_after_a_later_one(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b")
    run.census("a")
    first = run.ask("a", 1)
    assert len(run.answer("a", 1, (9, b"9" * 32), outcome="reply")) == 1
    assert len(run.answered("a", first, (8, b"8" * 32), outcome="reply")) == 1
    assert run.federation.registry.site("a").state == "accepted"


@pytest.mark.parametrize("lines", [None, -1, True, "7", 2**60])
def test_a_site_that_hides_its_log_is_suspended(tmp_path: Path, lines: Any) -> None:
    run = Run(tmp_path, "a")
    run.census("a", details={"log_lines": lines})
    assert not run.sites.online()
    assert run.federation.registry.site("a").reason == "its message has no state of its log"


def test_a_run_ends_after_its_last_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, "a")
    run.sites = CensusLink(
        run.link, run.federation.registry, run.federation.key,
        replace(run.record, until="2099-01-31", agreement="0a" * 32, keep_days=90), EventLog(run.path),
        clock=lambda: 0.0,
    )  # fmt: skip
    monkeypatch.setattr(census_link, "time", lambda: 4073587200.0 - 1)
    run.sites.collect(0, ())
    terms = ExperimentTerms.from_plain(run.link.told["a"][-1].details["terms"])
    assert (terms.until, terms.agreement, terms.keep_days) == ("2099-01-31", "0a" * 32, 90)
    monkeypatch.setattr(census_link, "time", lambda: 4073587200.0)  # 2099-02-01, UTC
    with pytest.raises(RunFailed, match=r"the last day of the run, 2099-01-31 \(UTC\), is over"):
        run.sites.collect(0, ())
