"""The logs of a site's clients: encrypted, per run, and the models of opened sums over all runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fedlens.core.protocol import Outcome, Program
from fedlens.core.schema import Schema
from fedlens.core.wire.message import write_payload
from fedlens.core.wire.plain_schema import to_plain
from fedlens.identity.file_cipher import FileCipher
from fedlens.identity.keys import KeyPair
from fedlens.site.answering import Answering
from fedlens.site.answers_log import AnswersLog
from fedlens.site.client_logs import ClientLogs, logs_of_run
from fedlens.site.kept_states import KeptStates, StateLost
from fedlens.site.retention import purge_site
from fedlens.site.site_log import SiteLog
from tests.unit.site.ask_kit import OpenedProgram, answer_of, ask_of
from tests.unit.site.test_agent import Nothing

KEY = KeyPair.make()


def logs_in(folder: Path, key: KeyPair = KEY) -> ClientLogs:
    return ClientLogs(folder / "client-logs", FileCipher(key))


def log(run: str, *models: bytes, **entry: Any) -> dict[str, Any]:
    return {"runs": {run: entry}, "models": list(models)}


def test_a_log_is_there_after_a_restart_and_models_in_every_run(tmp_path: Path) -> None:
    logs = logs_in(tmp_path)
    assert logs.get("a", "w") == {"runs": {}, "models": []}
    logs.put("a", "w", log("a", b"model 1", step="unmasked", answer=b"shares"))
    logs.put("b", "w", log("b", b"model 1", b"model 2", step="keys"))
    again = logs_in(tmp_path)
    assert again.get("a", "w") == log("a", b"model 1", b"model 2", step="unmasked", answer=b"shares")
    assert again.get("b", "w")["runs"] == {"b": {"step": "keys"}}
    assert again.get("c", "w") == {"runs": {}, "models": [b"model 1", b"model 2"]}
    assert again.get("a", "other") == {"runs": {}, "models": []}


def test_files_are_encrypted_and_private_whatever_the_names(tmp_path: Path) -> None:
    run, client = "../../run", "../ward"
    logs = logs_in(tmp_path)
    logs.put(run, client, log(run, b"model 1", answer=b"the shares"))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(path.parent.parent for path in files) == [tmp_path / "client-logs"] * 2
    for path in files:
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert not any(word in path.read_bytes() for word in (b"model", b"shares", b"ward", b"answer"))
    assert len(list(logs_of_run(tmp_path, run).iterdir())) == 1


@pytest.mark.parametrize("damage", ["changed", "cut", "another client's", "another run's", "another key's"])
def test_a_log_that_is_not_the_clients_own_is_refused(damage: str, tmp_path: Path) -> None:
    logs = logs_in(tmp_path)
    for run in ("a", "b"):
        for client in ("w", "v"):
            logs.put(run, client, log(run, step="keys"))
    (path,) = set(logs_of_run(tmp_path, "a").iterdir()) - {logs._path(logs_of_run(tmp_path, "a"), "v")}
    content = path.read_bytes()
    replaced = {
        "changed": content[:-1] + bytes([content[-1] ^ 1]),
        "cut": content[:5],
        "another client's": logs._path(logs_of_run(tmp_path, "a"), "v").read_bytes(),
        "another run's": logs._path(logs_of_run(tmp_path, "b"), "w").read_bytes(),
    }
    path.write_bytes(replaced.get(damage, content))
    again = logs_in(tmp_path, KeyPair.make() if damage == "another key's" else KEY)
    with pytest.raises(StateLost, match="the log of 'w' cannot be read"):
        again.get("a", "w")


def test_a_run_is_purged_and_the_models_of_its_sums_stay(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir(mode=0o700)
    logs, asked = logs_in(folder), AnswersLog(folder / "log", folder / "work", lambda: 1000.0)
    asked.note(ask := ask_of(), answer_of(ask))
    asked.close()
    for run in ("run", "other"):
        logs.put(run, "a", log(run, b"model 1", step="unmasked"))
    assert purge_site(folder, 30, 2000.0, "run") == {"run": {"client-logs": 1}}
    assert logs.get("run", "a") == {"runs": {}, "models": [b"model 1"]}
    assert logs.get("other", "a") == log("other", b"model 1", step="unmasked")


def test_an_answer_goes_once_its_round_is_saved_and_is_refused_then(tmp_path: Path) -> None:
    logs = logs_in(tmp_path)
    for client, round in (("v", 2), ("w", 3)):
        attempt = {"round": round}
        logs.put(
            "a", client, log("a", b"m", step="unmasked", attempt=attempt, asked=b"digest", answer=b"shares")
        )
    logs._path(logs_of_run(tmp_path, "a"), "damaged").write_bytes(b"x")
    clients = ("v", "damaged", "w", "never asked")
    for before, kept in ((2, ["v", "w"]), (3, ["w"]), (math.inf, [])):
        logs.acknowledge("a", clients, before)
        entries = {client: logs.get("a", client)["runs"]["a"] for client in "vw"}
        assert [client for client, entry in entries.items() if "answer" in entry] == kept
    assert entries["w"] == {"step": "unmasked", "attempt": {"round": 3}, "asked": b"digest"}
    assert logs.get("a", "w")["models"] == [b"m"]


def test_a_log_of_another_run_is_refused(tmp_path: Path) -> None:
    logs = logs_in(tmp_path)
    with pytest.raises(StateLost, match="another run"):
        logs.put("a", "w", log("b", step="keys"))
    assert logs.get("a", "w") == {"runs": {}, "models": []}


def test_the_server_neither_sends_a_log_nor_gets_one(tmp_path: Path) -> None:
    """The log of the site reaches the operation; one that the ask holds is refused, and none is in the answer."""
    seen: list[Any] = []

    def operation(payload: Any, client: Any, rng: Any) -> Outcome:
        seen.append(payload["log"])
        return Outcome({"sum": 1.0, "log": log("run", b"model 1", step=str(len(seen)))})

    folder = tmp_path / "site"
    folder.mkdir(mode=0o700)
    logs, kept = logs_in(folder), AnswersLog(folder / "log", folder / "work", cipher=FileCipher(KEY))
    answering = Answering(KEY, kept, KeptStates(folder / "states"), logs, SiteLog(folder / "log"), print)
    program = Program({"train": operation}, Nothing(), 0)
    opened = OpenedProgram(program, {"a": 0}, {0: (10, 4)}, lambda op: Schema({}, log=True))

    def answered(slot: int, **payload: Any) -> tuple[str, bytes]:
        body = write_payload(payload)
        # A server that accepts any payload does not get the log either.
        ask = ask_of(body, details={"expect": to_plain(Schema())}, slot=slot)
        content, outcome = answering.answered(opened, ask, [body])
        return outcome, bytes(content)

    for slot in (0, 1):
        outcome, content = answered(slot)
        assert outcome == "reply"
        assert b"sum" in content
        assert b"model 1" not in content
        assert b"step" not in content
        (body,) = (folder / "work").iterdir()  # what is kept until the server has it
        assert b"sum" not in body.read_bytes()
        again = ask_of(write_payload({}), details={"expect": to_plain(Schema())}, slot=slot)
        assert bytes(kept.find(again) or b"") == content
        kept.acknowledge([])
        assert not list((folder / "work").iterdir())
    assert seen == [{"runs": {}, "models": []}, log("run", b"model 1", step="1")]
    assert answered(2, log={"runs": {}})[0] == "refused"
    assert len(seen) == 2
    assert logs.get("run", "a") == log("run", b"model 1", step="2")
    for round in (1, 2):  # an ask of a later round says that the server has saved the one before
        logs.put("run", "a", log("run", b"model 1", attempt={"round": 1}, answer=b"shares"))
        ask = ask_of(
            body := write_payload({}), details={"expect": to_plain(Schema())}, attempt=2, round=round
        )
        assert answering.answered(opened, ask, [body])[1] == "reply"
        assert ("answer" in seen[-1]["runs"]["run"]) is (round == 1)
    kept.close()
