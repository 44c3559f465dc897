"""Plays the page "From a study to your sites" with an operator and three sites, and prints commands and outputs.

    python -m tools.sites_page EMPTY_FOLDER > transcript.txt

Each person has a folder: `server`, `ward-a`, `ward-b`, `ward-c` and `officer`. The outputs of the page are those of one
transcript, cut with "..." where they are long.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "from-a-study-to-your-sites.md"
UNTIL = "2027-01-31"
AGREEMENT = "The agreement of the hospitals.\n"
PURPOSE = "Read handwritten digits."
TERMS = f"--until {UNTIL} --agreement agreement.pdf"
SITES = {"ward-a": "Bonn", "ward-b": "Celle", "ward-c": "Dessau"}
PORT = 8443
ROOT = "a long passphrase"
LONGEST = 300  # seconds that an output is waited for


class Play:
    """The folders of all persons, and what runs in them."""

    def __init__(self, root: Path, port: int) -> None:
        self.root, self.port = root, port
        self.running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}

    def __call__(self, person: str, command: str, *typed: str) -> str:
        """Runs a command at a terminal of its own, answers its questions, and prints what the terminal shows."""
        _say(f"[{person}] $ {command}")
        (folder := self.root / person).mkdir(exist_ok=True)
        words = shlex.split(command)
        words[:1] = {"fedlens": [sys.executable, "-m", "fedlens"], "python": [sys.executable]}.get(
            words[0], words[:1]
        )
        process, terminal = pty.fork()
        if process == 0:
            os.chdir(folder)
            os.execvpe(words[0], words, self._environment())
        answers, shown = list(typed), b""
        while part := _read(terminal):
            shown += part
            if answers and re.search(rb"(once more|of the root|root of \w+|reads to you): $", shown):
                time.sleep(0.2)  # getpass throws away what was typed before it asks
                os.write(terminal, answers.pop(0).encode() + b"\n")
        os.waitpid(process, 0)
        os.close(terminal)
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", shown.decode())
        _say(text)
        return text

    def begin(self, person: str, command: str) -> None:
        """Starts a command that runs on; ends the one of the person that still runs."""
        self.end(person)
        _say(f"[{person}] $ {command} &\n")
        output = self.root / person / f"{len(list(self.root.glob('*/*.out')))}.out"
        words = [sys.executable, "-m", "fedlens", *shlex.split(command)[1:]]
        with output.open("wb") as file:
            process = subprocess.Popen(
                words, cwd=self.root / person, env=self._environment(), stdout=file, stderr=subprocess.STDOUT
            )
        self.running[person] = process, output

    def wait(self, person: str, text: str) -> None:
        """Waits until what runs has printed a text."""
        process, output = self.running[person]
        until = time.monotonic() + LONGEST
        while text not in output.read_text():
            if time.monotonic() > until or (process.poll() is not None and text not in output.read_text()):
                raise SystemExit(f"{person} has not printed {text!r}:\n{output.read_text()}")
            time.sleep(0.2)

    def end(self, person: str) -> None:
        """Ends what runs, and prints what it has printed."""
        if person in self.running:
            process, output = self.running.pop(person)
            process.terminate()
            process.wait(60)
            _say(f"[{person}] printed:\n{output.read_text()}")

    def serve(self, more: str) -> None:
        """Serves an experiment, and waits until the server listens."""
        self.begin("server", f"fedlens serve {more}")
        self.wait("server", "listening")

    def approve(self, site: str) -> str:
        """Lets a site look, approve and start. Returns the first digits of the digest."""
        digest = _found(r"--approve (\w{12})", self(site, "fedlens site review"))
        self(site, f"fedlens site review --approve {digest}")
        return digest

    def _environment(self) -> Mapping[str, str]:
        own = {"COLUMNS": "200", "TERM": "xterm", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
        return {**os.environ, **own, "PYTHONPATH": str(DOCS.parent / "src")}


def play(root: Path, port: int) -> None:
    """All steps of the page."""
    do = Play(root, port)
    try:
        make_scans(do)
        one_to_four(do)
        five(do)
        six_and_seven(do)
        secure_sums(do)
        eight(do)
    finally:
        for person in list(do.running):
            do.end(person)


def make_scans(do: Play) -> None:
    """The images, with the commands of the page."""
    (do.root / "docs").symlink_to(DOCS)
    for line in re.findall(r"^\$ (python docs/examples/.+)$", PAGE.read_text(), flags=re.MULTILINE):
        do("", line)


def one_to_four(do: Play) -> None:
    """A federation, its dossier, a server, and sites that join and are accepted."""
    do("server", f"fedlens federation create hospitals --host localhost --port {do.port}", ROOT, ROOT)
    for site in SITES:
        do("server", f"fedlens federation invite hospitals {site} --out {site}.invitation")
        shutil.move(do.root / "server" / f"{site}.invitation", do.root / site)
    shutil.copy(DOCS / "examples" / "hospitals.toml", do.root / "server")
    (do.root / "server" / "agreement.pdf").write_text(AGREEMENT)
    dossier = f'fedlens federation dossier hospitals --experiment hospitals.toml --purpose "{PURPOSE}"'
    do("server", f"{dossier} {TERMS}")
    do.serve(f"hospitals.toml --federation hospitals {TERMS}")
    words = {}
    for site in SITES:
        joined = do(site, f"fedlens site join {site}.invitation --data scans")
        words[site] = _found(r"^    (\w+(?: \w+){7})$", joined)
    do("ward-a", "fedlens site check")
    do("ward-a", "fedlens site check --network")
    do("server", "fedlens federation list hospitals")
    for site in SITES:
        typed = " ".join(word[:4] for word in words[site].split())
        do("server", f"fedlens federation accept hospitals {site}", typed)


def five(do: Play) -> None:
    """Approvals, at ward-b by two reviewers, and the run."""
    digest = do.approve("ward-a")
    do("ward-a", "fedlens site check")
    do.begin("ward-a", "fedlens site start")
    secret = do.root / "officer" / "passphrase.txt"
    secret.parent.mkdir(exist_ok=True)
    secret.touch(0o600)
    secret.write_text(f"{ROOT}\n")
    own = f"--key officer.pem --passphrase-file {secret.name}"
    line = _found(r"(officer = .+)", do("officer", f"fedlens site decide --new-key {own}"))
    toml = do.root / "ward-b" / "fedlens-site" / "site.toml"
    text = toml.read_text().replace("\n[allow]", "\n[allow]\nreviewers = 2", 1)
    toml.write_text(f"{text}\n[reviewers]\n{line}\n")
    do("ward-b", "fedlens site check")
    do.approve("ward-b")
    do("ward-b", "fedlens site review --export proposal.json")
    shutil.move(do.root / "ward-b" / "proposal.json", do.root / "officer")
    do("officer", "fedlens site decide proposal.json")
    do("officer", f"fedlens site decide proposal.json --approve {digest} {own} --out decision.json")
    shutil.move(do.root / "officer" / "decision.json", do.root / "ward-b")
    do("ward-b", "fedlens site review --import decision.json")
    do.begin("ward-b", "fedlens site start")
    do.approve("ward-c")
    do.begin("ward-c", "fedlens site start")
    do.wait("server", "result page: ")
    do.end("server")
    for site in SITES:
        do.wait(site, "has finished; waiting")


def six_and_seven(do: Play) -> None:
    """The log of a site, the repeated run, new keys of the server."""
    (run,) = (do.root / "server" / "runs" / "hospitals").iterdir()
    do("ward-a", "fedlens site log")
    do("ward-a", "fedlens site log --export ward-a-log")
    do("ward-a", "fedlens site log --verify")
    do("", f"fedlens replay {run.relative_to(do.root)} --data .")
    do("server", f"fedlens report runs/hospitals/{run.name} --pseudonyms")
    do("server", "fedlens federation retention hospitals 90")
    do("server", "fedlens federation rotate hospitals", ROOT)


def secure_sums(do: Play) -> None:
    """The experiment with secure sums, at sites that allow nothing else, and what they review and log."""
    shutil.copy(DOCS / "examples" / "hospitals-secure.toml", do.root / "server")
    do("", "diff server/hospitals.toml server/hospitals-secure.toml")
    do.end("server")
    files = [do.root / site / "fedlens-site" / "site.toml" for site in SITES]
    before = [file.read_text().replace("\nreviewers = 2", "", 1) for file in files]
    for site, file, text in zip(SITES, files, before, strict=True):
        file.write_text(text.replace("\n# secure_sum", "\nsecure_sum", 1))
        do.begin(site, "fedlens site start")  # which reads site.toml when it starts
    do.serve(f"hospitals-secure.toml --federation hospitals {TERMS}")
    for site in SITES:
        do.approve(site)
    do.wait("server", "result page: ")
    do("ward-a", "fedlens site log --last 5")
    do.serve("hospitals.toml --federation hospitals --set seed=1")
    do("ward-a", "fedlens site review")  # refused
    for site, file, text in zip(SITES, files, before, strict=True):
        file.write_text(text)
        do.begin(site, "fedlens site start")


def eight(do: Play) -> None:
    """A site leaves, comes back, is revoked and withdrawn, and the others begin without it."""
    do("ward-c", "fedlens site leave")
    do("server", "fedlens federation list hospitals")
    do("ward-c", "fedlens site start")
    do("ward-c", "fedlens site leave --undo")
    do.begin("ward-c", "fedlens site start")
    do.wait("ward-c", "waits for")
    do("server", "fedlens federation revoke hospitals ward-c --drop")
    do.wait("ward-c", "revoked")
    do.end("server")
    do.end("ward-c")
    do("server", "fedlens federation withdraw hospitals ward-c")
    shutil.move(do.root / "server" / "ward-c-withdrawn.json", do.root / "ward-c")
    do("ward-c", "fedlens site receipt ward-c-withdrawn.json")
    do.serve(f"hospitals.toml --federation hospitals {TERMS} --without ward-c")
    for site in ("ward-a", "ward-b"):
        do.approve(site)
    do.wait("server", "result page: ")
    do.end("server")
    do.end("ward-a")
    run = _found(r"UTC  (\S+)", do("ward-a", "fedlens site log"))
    do("ward-a", f"fedlens site purge {run}")
    do("server", "fedlens purge --federation hospitals")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text, flags=re.MULTILINE)
    if found is None:
        raise SystemExit(f"no {pattern} in:\n{text}")
    return found[1]


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the last process of the terminal has ended
        return b""


if __name__ == "__main__":
    play(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else PORT)
