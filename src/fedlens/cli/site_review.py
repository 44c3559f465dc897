"""`fedlens site review` and `decide`: read an experiment, and decide on it at the site or on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlens.cli.display.output import complain, reported, say
from fedlens.cli.options import Debug, Json
from fedlens.cli.passphrases import PassphraseFile, key_passphrase, new_passphrase

if TYPE_CHECKING:
    from fedlens.site.review import Review

SiteFolder = Annotated[
    Path,
    typer.Option(
        "--folder", metavar="DIR", help="The folder of the site: keys, site.toml, and what it has approved."
    ),
]
Approve = Annotated[
    str | None,
    typer.Option(
        metavar="DIGEST", help="Approve the experiment with this digest, or its first 12 digits or more."
    ),
]
Reject = Annotated[str | None, typer.Option(metavar="REASON", help="Reject it, with a reason.")]
SITE_FOLDER = Path("fedlens-site")


def review(
    approve: Approve = None,
    reject: Reject = None,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it for 'fedlens site decide' elsewhere.")
    ] = None,
    decision: Annotated[
        Path | None, typer.Option("--import", metavar="FILE", help="Keep a decision made elsewhere.")
    ] = None,
    folder: SiteFolder = SITE_FOLDER,
    passphrase_file: PassphraseFile = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the experiment that the server proposes, as text; nothing that it names is opened or imported.

    The server has to run, except for --import of a rejection.
    The site computes it only after --approve with its digest. Another setting, run, site or end date needs another
    approval. The exit code is 0 also for one that waits or that site.toml refuses: --json has "missing".
    """
    with reported(debug, as_json) as output:
        from fedlens.base.errors import ConfigError
        from fedlens.base.shell_command import shell_command
        from fedlens.identity.private_files import write_private
        from fedlens.identity.site_keys import SiteKeys
        from fedlens.site.leave import left_on
        from fedlens.site.proposed_experiment import proposed_experiment

        keys = SiteKeys(joined_folder(folder))
        _check_choice(approve, reject, export, decision)
        if decision is not None and (rejected := _rejected_elsewhere(folder, decision)) is not None:
            output.json({"experiment": None, "approved": False, "missing": rejected[0]}) if as_json else say(
                *rejected
            )
            return
        passphrase = key_passphrase(keys.folder / "identity.pem", passphrase_file)
        proposed = proposed_experiment(folder, passphrase, say=lambda trouble: complain("note", trouble))
        if proposed is None and (approve or reject or export or decision):
            raise ConfigError(
                "the server has no experiment for this site now", hint="wait until it proposes one"
            )
        done = list[str]()
        decided = None if proposed is None or decision is None else proposed.decision_in(decision)
        if proposed is not None and (approve is not None or reject is not None):
            _check_digest(approve, proposed, "fedlens site review")
            decided = proposed.decide(SiteKeys(keys.folder, passphrase).identity(), reject)
        if proposed is not None and decided is not None:
            replaced = proposed.approvals.replaces(decided)
            proposed.keep(decided)
            what = "approval" if decided.approves else "rejection"
            done = [f"kept: the {what} of {proposed.contract.digest}", *([replaced] if replaced else [])]
        elif proposed is not None and export is not None:
            write_private(export, proposed.export())
            done = [f"written: {export}; decide on it with: {shell_command('site', 'decide', export)}"]
        missing = None if proposed is None else proposed.missing()
        state = missing or "approved: 'fedlens site start' computes it"
        if (since := left_on(folder)) is not None:
            state = (
                f"this site left the federation on {since}: 'fedlens site leave --undo' comes before all else"
            )
        if as_json:
            shown = None if proposed is None else proposed.to_plain()
            output.json(
                {"experiment": shown, "approved": shown is not None and not missing, "missing": missing}
            )
        elif proposed is None:
            say("the server has no experiment for this site now")
        elif done:
            say(state, *done)
        else:
            own = None if folder == SITE_FOLDER else folder
            command = shell_command("site", "review", approve=proposed.contract.digest[:12], folder=own)
            say(state, "", *proposed.lines(), *(_last_lines(proposed, command) if missing else ()))


def decide(
    experiment: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="What --export of 'fedlens site review' wrote.")
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(metavar="KEY", help="The file of your private key, which stays on this machine."),
    ] = None,
    new_key: Annotated[
        bool, typer.Option("--new-key", help="Make the key, and print its line for site.toml.")
    ] = False,
    approve: Approve = None,
    reject: Reject = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the signed decision.")
    ] = None,
    passphrase_file: PassphraseFile = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Decide on an experiment of a site on your own machine, with your own key; needs no network.

    The site takes the decision with --import of 'fedlens site review' if its site.toml names your key as a reviewer.
    """
    with reported(debug, as_json) as output:
        import hashlib

        from fedlens.base.errors import ConfigError
        from fedlens.base.shell_command import shell_command
        from fedlens.files.atomic_files import write_atomically
        from fedlens.identity.keys import KeyPair
        from fedlens.site.review import Review

        if new_key:
            if key is None or key.exists() or experiment is not None:
                raise ConfigError(
                    "--new-key makes a key in a new file", hint="name it with --key, and nothing else"
                )
            line, *about = _made_key(key, passphrase_file)
            output.json({"reviewer": line}) if as_json else say(
                f"for [reviewers] of site.toml: {line}", *about
            )
            return
        if experiment is None:
            raise ConfigError(
                "no experiment is given", hint="name what --export of 'fedlens site review' wrote"
            )
        proposed = Review.read(experiment)
        _check_choice(approve, reject)
        if approve is None and reject is None:
            again = shell_command(
                "site",
                "decide",
                experiment,
                approve=proposed.contract.digest[:12],
                key=key or "KEY.pem",
                out="decision.json",
            )
            output.json(proposed.to_plain()) if as_json else say(
                *proposed.lines(), *_last_lines(proposed, again)
            )
            return
        if key is None or out is None:
            raise ConfigError("a decision needs a key and a file", hint="give --key KEY.pem and --out FILE")
        _check_digest(approve, proposed, shell_command("site", "decide", experiment))
        own = KeyPair.read(key, key_passphrase(key, passphrase_file))
        write_atomically(out, (content := proposed.decide(own, reject).to_bytes()))
        taken: dict[str, Any] = {"import": out.name}
        say(
            f"written: {out}; at the site: {shell_command('site', 'review', **taken)}",
            "keep it: the export of the site's log names its SHA-256 as decision: "
            + hashlib.sha256(content).hexdigest(),
        )


def _last_lines(proposed: Review, command: str) -> list[str]:
    """How to approve an experiment, or that it cannot be approved."""
    if proposed.refused:
        return ["it cannot be approved: reject it, or change the lines of [allow] that refuse it"]
    return ["", f"to approve it: {command}"]


def _rejected_elsewhere(folder: Path, path: Path) -> list[str] | None:
    """Keeps the decision in a file if it is a rejection, and says so; None for an approval. Needs no server."""
    from time import time

    from fedlens.site.approvals import Approvals
    from fedlens.site.review import Review
    from fedlens.site.settings import SITE_FILE, SiteSettings

    decision = Review.decision_in(path)
    if decision.approves:
        return None
    approvals = Approvals.of(folder, SiteSettings.read(folder / SITE_FILE))
    approvals.keep_rejection(decision)
    experiment = decision.matter.experiment
    return [approvals.last_missing(experiment, time()) or "", f"kept: the rejection of {experiment}"]


def _made_key(key: Path, passphrase_file: Path | None) -> list[str]:
    """Makes the key of a reviewer; its line for site.toml, where it lies, and what a stolen one allows."""
    import base64

    from fedlens.identity.keys import KeyPair
    from fedlens.identity.private_files import write_private
    from fedlens.site.approvals import reviewer_number

    made, passphrase = KeyPair.make(), new_passphrase(key, False, passphrase_file)
    write_private(key, made.pem(passphrase))
    locked = "encrypted" if passphrase else "not encrypted: --passphrase-file makes an encrypted one"
    return [
        f'{key.stem} = "{base64.b64encode(made.public).decode()}"',
        f"{key} is the private key, of mode 0600, {locked}.",
        f"The log of the site names it as reviewer {reviewer_number(made.public)}.",
        f"Who steals it can approve as {key.stem}: then remove the line from [reviewers] at the site.",
    ]


def _check_choice(*given: object) -> None:
    """Raises `ConfigError` for two options of which a command takes one."""
    from fedlens.base.errors import ConfigError

    if sum(each is not None for each in given) > 1:
        raise ConfigError("--approve, --reject, --export and --import exclude one another", hint="give one")


def _check_digest(approve: str | None, proposed: Review, read: str) -> None:
    """Raises `ConfigError` if another experiment is proposed than the one that was read with the command `read`."""
    from fedlens.base.errors import ConfigError

    if approve is not None and (
        len(approve) < 12 or not proposed.contract.digest.startswith(approve.lower())
    ):
        what = f"no experiment {approve} is proposed"
        raise ConfigError(what, hint=f"read what is proposed with: {read}")


def joined_folder(
    folder: Path, hint: str = "run 'fedlens site join' first, or name the folder with --folder"
) -> Path:
    """The folder of the keys in that of a site. Raises `IdentityError` with the hint before the site has joined."""
    from fedlens.base.errors import IdentityError

    if not (folder / "keys").is_dir():
        raise IdentityError(f"{folder} is not the folder of a site", hint=hint)
    return folder / "keys"
