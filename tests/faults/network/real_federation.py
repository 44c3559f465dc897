"""A federation whose server and sites are processes of `fedlens`, over drawn images in folders."""

from __future__ import annotations

import atexit
import functools
import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedlens.identity.federation_folder import FederationFolder
from fedlens.identity.private_files import private_folder
from fedlens.identity.site_keys import SiteKeys
from tests.faults.run_kit import environment
from tests.unit.identity.federation_kit import HOST, ROOT
from tests.unit.site.approval_kit import approve_run
from tests.unit.site.site_kit import write_images, write_site

SITES = ("ward-a", "ward-b", "ward-c")
EXAMPLES = 24
SETTINGS: dict[str, Any] = {
    "rounds": 4,
    "seed": 3,
    "algorithm": "scaffold",
    "model": "mlp",
    "local": {"lr": 0.1, "steps": 2, "batch_size": 8},
    "data": {
        "dataset": {
            "name": "sites",
            "classes": [str(digit) for digit in range(10)],
            "input_shape": [1, 8, 8],
            "mean": [0.3],
            "std": [0.4],
            "test": "digits",
        }
    },
    "engine": {"name": "network", "min_sites": len(SITES), "lost": 600.0},
    "checkpoint": {"seconds": 0},
}


class Processes:
    """See `tests.faults.network.processes`."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.faults.network.processes"]
        self._process = subprocess.Popen(
            command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self._process.communicate)
        self.port = int(self.order(listen=True))

    def order(self, **order: Any) -> Any:
        """Gives an order, and returns the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


processes = functools.cache(Processes)


def until(happened: Callable[[], object], seconds: float = 300) -> None:
    """Waits for something."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)


class RealFederation:
    """Folders of a server and of sites that have joined and approved an experiment, and their processes.

    Args:
        folder: an empty folder.
        settings: of the experiment, in place of those of `SETTINGS`.
        labels: local names of classes, by class.
        prefix: begins the names of all images, and the values of a column of the table.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any] = {},
        labels: Mapping[str, str] = {},
        prefix: str = "",
    ) -> None:
        self.folder, self.processes, self.run = folder, processes(), folder / "run"
        federation = FederationFolder.create(folder / "hospitals", (HOST, self.processes.port), ROOT)
        values = {**SETTINGS, **settings}
        (folder / "experiment.toml").write_text(tomli_w.dumps(values))
        rng = np.random.default_rng(0)
        self.secrets: list[bytes] = []
        for name in SITES:
            invitation, site = federation.invite(name), private_folder(folder / name)
            keys = SiteKeys.join(site / "keys", invitation)
            keys.install(federation.enrol(keys.enrolment(invitation), HOST), time.time())
            federation.accept(name, keys.identity().fingerprint)
            images = rng.integers(0, 256, (EXAMPLES, 8, 8), np.uint8)
            classes = [str(number % 10) for number in range(EXAMPLES)]
            patients = {"patient": [f"{prefix}patient"] * EXAMPLES}
            write_images(site / "scans", images, [labels.get(each, each) for each in classes], patients)
            for path in [*(site / "scans").glob("*.png")]:
                path.rename(path.with_name(prefix + path.name))
            table = site / "scans" / "scans.csv"
            table.write_text(re.sub(r"^(?=\w+\.png)", prefix, table.read_text(), flags=re.M))
            local = {own: each for each, own in labels.items()}
            write_site(site, {"labels": local})
            self.secrets.append(invitation.secret)
        approve_run(folder / "experiment.toml", self.run, federation, [folder / name for name in SITES])

    def serve(self, **how: Any) -> None:
        """Starts the server, or starts it again."""
        args = ["serve", "experiment.toml", "--federation", "hospitals", "--out", "run", "--no-report"]
        self.processes.order(start="server", args=args, cwd=str(self.folder), fetch=True, **how)

    def start(self, site: str, **how: Any) -> None:
        """Starts the process of a site, or starts it again."""
        args = ["site", "start", "--folder", site, "--once"]
        self.processes.order(start=site, args=args, cwd=str(self.folder), **how)

    def code(self, name: str) -> int | None:
        """How a process ended; None while it runs."""
        code: int | None = self.processes.order(poll=name)["code"]
        return code

    def said(self, name: str) -> str:
        """What a process said in all its lives."""
        return str(self.processes.order(poll=name)["said"])

    def kill(self, name: str) -> None:
        """Kills a process."""
        self.processes.order(kill=name)

    def rounds(self) -> int:
        """How many rounds are written down."""
        path = self.run / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def finish(self, again: int = 0) -> Counter[str]:
        """Waits for the end of all processes, and starts those again that were killed; how often each was.

        With `again`, the second life of the server ends at so many steps of writing, and all sites are killed with it.
        """
        kills, names = Counter[str](), ("server", *SITES)

        def ended() -> bool:
            ends = {name: self.code(name) for name in names}
            told = "\n".join([str(ends), *map(self.said, names)])
            assert {None, 0, -signal.SIGKILL}.issuperset(ends.values()), told
            for name in [name for name in names if ends[name] == -signal.SIGKILL]:
                if ends["server"] != 0:  # else the run is over, and a site would wait for the next one
                    kills[name] += 1
                    ends[name] = None
                    if name != "server":
                        self.start(name)
                        continue
                    if again and kills[name] == 2:
                        for site in SITES:
                            self.kill(site)
                    self.serve(call=again if kills[name] == 1 else 0)
            return all(ends[name] == 0 or (kills[name] and ends["server"] == 0) for name in names)

        until(ended)
        return kills

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Kills what still runs after the block."""
        try:
            yield
        finally:
            for name in ("server", *SITES):
                if self.code(name) is None:
                    self.kill(name)
