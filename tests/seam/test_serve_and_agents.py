"""`serve` and the agents of three sites over TLS, from files on disk: the bits of a simulation over the same data."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from fedlens import Experiment
from fedlens.base.errors import DataError
from fedlens.data.datasets.digits import digits
from fedlens.data.partition.partition import Partition
from fedlens.files.chained_log import read_chained
from fedlens.identity.federation_folder import FederationFolder
from fedlens.identity.site_heads import SiteHeads
from fedlens.identity.site_keys import SiteKeys
from fedlens.server.serve import Served, serve
from fedlens.site.answers_log import AnswersLog
from fedlens.site.log_export import AskedLog
from fedlens.site.start import agent_of
from tests.link_kit import within
from tests.seam.test_sites import lines
from tests.unit.identity.federation_kit import HOST, NOW, federation_in
from tests.unit.server.serve_kit import Followed
from tests.unit.site.approval_kit import approve_run
from tests.unit.site.site_kit import write_images, write_site
from tests.unit.site.test_workplace import ALGORITHMS, COMMON, SITES, SPLIT, at_sites

OWNERS = np.random.default_rng(0).integers(0, len(SITES), 1437)


class Wards:
    """A server's folder, and three sites that join as soon as a server listens."""

    def __init__(self, folder: Path, algorithm: str, **more: Any) -> None:
        self.folder, self.progress = folder, Followed()
        self.registry: FederationFolder = federation_in(folder)
        self.more = {"algorithm": algorithm, "rounds": 3, **ALGORITHMS.get(algorithm, {}), **more}
        self.settings = at_sites(checkpoint={"seconds": 0}, **self.more)
        self.settings["engine"] = {**self.settings["engine"], "patience": 120.0, "lost": 120.0}
        self.lines: list[str] = []
        train = digits(Path(), False, 0).train
        for k, name in enumerate(SITES):
            labels = [str(t) for t in train.targets[k == OWNERS]]
            write_images(folder / name / "scans", train.inputs[k == OWNERS, 0], labels)
            write_site(folder / name).path.parent.chmod(0o700)
        (folder / "experiment.toml").write_text(tomli_w.dumps(self.settings))
        self.invitations = {name: self.registry.invite(name) for name in SITES}
        self.port = 0
        self.again = asyncio.Event()

    def join(self) -> None:
        for name, invitation in self.invitations.items():
            keys = SiteKeys.join(self.folder / name / "keys", replace(invitation, port=self.port))
            keys.install(self.registry.enrol(keys.enrolment(invitation), HOST), NOW)
            self.registry.accept(name, keys.identity().fingerprint)
        approve_run(
            self.folder / "experiment.toml",
            self.folder / "run",
            self.registry,
            [self.folder / name for name in SITES],
        )

    def serve(self) -> Path:
        served = Served(
            str(self.folder / "experiment.toml"), self.registry.folder, bind=f"127.0.0.1:{self.port}",
            out=self.folder / "run", report=False,
        )  # fmt: skip
        return Path(serve(served, self.progress).directory)

    async def agents(self) -> None:
        """Works until the run has finished; begins anew, with new agents, whenever `again` is set."""
        self.loop = asyncio.get_running_loop()
        if not self.port:
            self.port = await asyncio.to_thread(self.progress.port.get)
            self.join()
        while True:
            made = [agent_of(self.folder / name, self.lines.append, once=True) for name in SITES]
            tasks = [asyncio.create_task(agent.run()) for agent in made]
            again = asyncio.create_task(self.again.wait())
            everybody = asyncio.gather(*tasks)
            await asyncio.wait([everybody, again], return_when=asyncio.FIRST_COMPLETED)
            if not self.again.is_set():
                await everybody
                again.cancel()
                return
            self.again.clear()
            everybody.cancel()
            with suppress(asyncio.CancelledError):
                await everybody
            await asyncio.gather(*tasks, return_exceptions=True)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        failures: list[BaseException] = []

        def run() -> None:
            try:
                within(self.agents, 300)
            except BaseException as error:
                error.add_note("\n".join([*self.lines, *map(str, self.progress.rows)]))
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        yield
        thread.join()
        if failures:
            raise failures[0]

    def expected(self) -> Path:
        """The run directory of a simulation over the same data."""
        Partition.of_owners(OWNERS, SITES, dataset="digits").save(self.folder / "split.npz")
        split = {"name": "file", "path": str(self.folder / "split.npz")}
        data = {"dataset": "digits", "partition": split, **SPLIT}
        simulation = {**COMMON, **self.more, "data": data, "engine": "inline"}
        return Path(Experiment(**simulation).run(self.folder / "here", report=False).directory)


def same(one: Path, other: Path) -> None:
    assert lines(one) == lines(other)
    first, second = (load_file(path / "model.safetensors") for path in (one, other))
    assert all(torch.equal(first[leaf], second[leaf]) for leaf in second)


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedbn", "moon", "feddyn", "feddane"])
def test_a_run_at_sites_has_the_bits_of_a_simulation(algorithm: str, tmp_path: Path) -> None:
    wards = Wards(tmp_path, algorithm)
    with wards.at_work():
        found = wards.serve()
    same(found, wards.expected())
    log = [json.loads(line) for line in (tmp_path / "a" / "log" / "asked.jsonl").read_text().splitlines()]
    asked = [line for line in log if "kind" not in line]
    assert {line["decision"] for line in asked} == {"answered"}
    assert {line["operation"] for line in asked} >= {"train"}


def test_a_secure_sum_at_sites_is_that_without_masks_and_its_list_is_signed(tmp_path: Path) -> None:
    sums = {"name": "secagg", "bits": 20, "range": 64.0}
    wards = Wards(tmp_path, "fedavg", aggregate=sums, evaluation={"clients": "none"})
    with wards.at_work():
        found = wards.serve()
    wards.more["aggregate"] = {**sums, "name": "quantized"}
    plain = wards.expected()
    first, second = (load_file(path / "model.safetensors") for path in (found, plain))
    assert all(torch.equal(first[leaf], second[leaf]) for leaf in second)
    log = [json.loads(line) for line in (tmp_path / "a" / "log" / "asked.jsonl").read_text().splitlines()]
    asked = [(line["operation"], line["decision"]) for line in log if "kind" not in line]
    steps = ("keys", "shares", "train", "agree", "unmask")
    assert asked == [(step, "answered") for _ in range(3) for step in steps]
    told = json.loads((found / "summary.json").read_text())["disclosures"]
    assert any("Sites sign their keys and the list of who is in a sum" in line for line in told)


def test_a_run_goes_on_when_agents_and_server_begin_anew(tmp_path: Path) -> None:
    wards = Wards(tmp_path, "scaffold")

    def after(round: int) -> None:
        if round == 1:
            wards.loop.call_soon_threadsafe(wards.again.set)
        if round == 2:
            raise KeyboardInterrupt

    wards.progress.each_round = after
    with wards.at_work():
        with pytest.raises(KeyboardInterrupt):
            wards.serve()
        wards.progress.each_round = lambda round: None
        found = wards.serve()
    same(found, wards.expected())
    logs_fit(wards, found)


def logs_fit(wards: Wards, run: Path) -> None:
    """Both sides have the same of each answer that counts, and the server knows the end of each site's log."""
    answers = list(read_chained(run / "answers.jsonl"))
    heads = {bytes(32).hex(), *(head.hex() for _, head, _ in answers)}
    taken = {values["answer"]: values for values, _, _ in answers if values.get("decision") == "taken"}
    seen = SiteHeads(wards.registry.folder)
    for name in SITES:
        log = AskedLog.read(wards.folder / name)
        own = {line["answer"]: line for line in log.asks}
        theirs = {answer: line for answer, line in taken.items() if line["site"] == name}
        assert theirs.keys() <= own.keys()
        assert {line["decision"] for line in own.values()} == {"answered"}
        for answer, line in theirs.items():
            for fact in ("ask", "payload", "bytes", "fields", "operation", "round", "client"):
                assert own[answer][fact] == line[fact], fact
        assert {line["server_head"] for line in log.asks} <= heads
        assert {line["approved"] for line in log.asks} == {name}
        assert not log.server_went_back()
        kinds = Counter(line["kind"] for line in log.told if "kind" in line)
        assert (kinds["certificate"], kinds["experiment"], kinds["census"]) == (2, 1, 1)
        state = seen.seen(wards.registry.site(name))
        path = wards.folder / name / "log" / "asked.jsonl"
        whole = path.read_bytes().splitlines(keepends=True)
        for kept, fits in ((whole, True), (whole[:-3], False)):  # a backup
            path.write_bytes(b"".join(kept))
            asked = AnswersLog(path.parent, wards.folder / name / "work")
            with nullcontext() if fits else pytest.raises(DataError, match="what the server saw"):
                asked.check_seen(json.loads(json.dumps(state)))
            asked.close()
