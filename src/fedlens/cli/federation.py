"""`fedlens federation`: who belongs to a federation of real sites, for the operator of its server."""

from __future__ import annotations

import os
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlens.cli.display.output import complain, print_columns, reported, say
from fedlens.cli.dossier import dossier
from fedlens.cli.federation_root import install, rotate, sign, write_request
from fedlens.cli.options import Debug, Federation, Json
from fedlens.cli.passphrases import (
    PassphraseFile,
    RootPassphraseFile,
    key_passphrase,
    new_passphrase,
    root_passphrase,
)

if TYPE_CHECKING:
    from fedlens.identity.federation_folder import FederationFolder, SiteRecord
    from fedlens.server.withdraw import Withdrawal

SiteName = Annotated[str, typer.Argument(metavar="SITE", help="The name of the site.")]
Encrypt = Annotated[
    bool, typer.Option("--encrypt", help="Encrypt the keys with a passphrase, which is asked for.")
]
_ALARMS = 10  # of the latest that are shown as text


def create(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FEDERATION", help="A new folder, whose name becomes that of the federation."),
    ],
    host: Annotated[
        str, typer.Option(metavar="HOST", help="The host name or address at which sites reach the server.")
    ],
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port at which sites reach it.")] = 443,
    offline: Annotated[
        bool,
        typer.Option("--offline", help="Make the root on another machine, with a request to carry there."),
    ] = False,
    encrypt: Encrypt = False,
    passphrase_file: PassphraseFile = None,
    root_passphrase_file: RootPassphraseFile = None,
    debug: Debug = False,
) -> None:
    """Make a federation: a root, an issuer that lasts two years, and the keys of its server."""
    with reported(debug):
        from fedlens.base.errors import ConfigError, IdentityError
        from fedlens.base.shell_command import shell_command
        from fedlens.identity.federation_folder import FederationFolder

        if offline and root_passphrase_file is not None:
            raise ConfigError("--offline makes no root here", hint="leave out --root-passphrase-file")
        if folder.exists():
            raise IdentityError(f"{folder} exists already", hint="take another name")
        root = None
        if not offline:
            root = root_passphrase(f"a passphrase for the root of {folder.name}", root_passphrase_file, True)
        keys = new_passphrase(folder, encrypt, passphrase_file)
        made = FederationFolder.create(folder, (host, port), root, keys)
        if offline:
            write_request(made)
            return
        say(
            f"made: {folder}, whose sites call {made.host}:{made.port}",
            f"Move {folder / 'root'} to a place without a network, or keep its passphrase away from this machine: who "
            "has both can make a server that every site accepts. The root is needed again in two years, to rotate.",
            f"next: {shell_command('federation', 'invite', folder, 'SITE', out='SITE.invitation')}",
        )


def invite(
    folder: Federation,
    site: SiteName,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Invite a new machine under a name that is taken: its old key is revoked at once.",
        ),
    ] = False,
    same_key: Annotated[
        bool,
        typer.Option("--same-key", help="Invite a site whose certificate has expired: its key stays valid."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write it to a new file, which only you can read."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write an invitation: `fedlens federation invite hospitals ward-a --out ward-a.invitation`.

    It is a secret, works once, and for 72 hours. Bring it to the site as you would bring a password. Without --out it
    goes to standard output; if that is a file, only you can read it from then on.
    """
    with reported(debug):
        from fedlens.base.errors import ConfigError
        from fedlens.identity.authority import day
        from fedlens.identity.private_files import write_private

        if replace and same_key:
            raise ConfigError("--replace and --same-key contradict each other", hint="leave out one of them")
        if out is not None and (out.exists() or not out.parent.is_dir()):
            what = f"{out} exists already" if out.exists() else f"{out.parent} is no folder"
            raise ConfigError(what, where="--out", hint="name a new file in a folder that exists")
        federation = _open(folder)
        invitation = federation.invite(site, replaces=replace, same_key=same_key)
        if out is not None:
            write_private(out, f"{invitation.text()}\n".encode())
            say(f"written: {out}, which is a secret: bring it to {site} as you would bring a password")
        else:
            _hide_output()
            say(invitation.text())
        complain("note", f"valid until {day(invitation.expires)}; {federation.host}:{federation.port} answers it "
                 "while the server runs")  # fmt: skip


def accept(
    folder: Federation,
    site: SiteName,
    fingerprint: Annotated[
        str | None,
        typer.Option(
            metavar="WORDS", help="The eight words that the site has read to you; by default asked for."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Accept a site that has joined, or was suspended, after comparing its eight words.

    Call somebody at the site whose voice you know, have the words of 'fedlens site status' read to you, and type them;
    the first four letters of each are enough. Without this call whoever had the invitation is the site.
    """
    with reported(debug):
        from fedlens.base.errors import IdentityError
        from fedlens.base.shell_command import quoted_command
        from fedlens.identity.authority import day
        from fedlens.identity.fingerprint import same_words

        federation = _open(folder)
        invited = federation.invited()
        if site in invited and site not in [each.name for each in federation.sites()]:
            what = f"{site} has not joined yet; its invitation is open until {day(invited[site])}"
            raise IdentityError(what, hint="at the site, run 'fedlens site join'")
        record = federation.site(site)
        if record.reason:
            complain("warning", f"{site} was suspended: {record.reason}")
        given = _asked(site) if fingerprint is None else fingerprint
        if not same_words(given, federation.words(record)):
            revoke = quoted_command("federation", "revoke", folder, site)
            what = f"these are not the eight words of the key that joined as {site}"
            hint = f"have them read again; if they differ, somebody else joined: {revoke}, and invite again"
            raise IdentityError(what, hint=hint)
        federation.accept(site, record.fingerprint)
        say(f"{site} is accepted: it may see experiments, and takes part in those that its people approve")


def revoke(
    folder: Federation,
    site: SiteName,
    drop: Annotated[
        bool,
        typer.Option(
            "--drop", help="If the site has answered in the round under way, repeat it without them."
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Revoke all keys of a site, and its invitation; open connections end within seconds.

    Answers of complete rounds stay in the model, and without --drop those of the round under way.
    """
    with reported(debug):
        from fedlens.base.shell_command import shell_command

        _open(folder).revoke(site, drop)
        again = shell_command("federation", "invite", folder, site, replace=True, out=f"{site}.invitation")
        say(f"{site} is revoked; a new key joins with: {again}")


def withdraw(
    folder: Federation,
    site: SiteName,
    runs: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Look here too, for run directories that were moved or copied."),
    ] = None,
    passphrase_file: PassphraseFile = None,
    debug: Debug = False,
) -> None:
    """Revoke a site, delete what the server has of it in all runs, and name the rounds and models that it is in.

    Recordings of its rounds, checkpoints from its first round on, states and journals go, in the runs that the
    federation has served. A model cannot forget: see 'fedlens serve --without'. SITE-withdrawn.json is the receipt,
    signed by the server, which the site checks with 'fedlens site receipt'.
    """
    with reported(debug):
        from fedlens.base.errors import RunDirectoryError
        from fedlens.base.shell_command import shell_command
        from fedlens.identity.authority import day
        from fedlens.identity.federation_folder import FederationFolder
        from fedlens.identity.private_files import write_private
        from fedlens.identity.receipt import write_receipt
        from fedlens.server.serve_record import ServeRecord
        from fedlens.server.withdraw import has_site, served_runs, withdraw

        _open(folder)
        federation = FederationFolder(folder, key_passphrase(folder / "identity.pem", passphrase_file))
        federation.identity()  # a wrong passphrase ends it before anything is deleted
        federation.revoke(site)
        lines = [f"{site} is revoked"]
        say(*lines)
        found, moved = served_runs(federation.folder, federation.root, runs or ())
        busy = record = None
        for run in (each for each in found if has_site(each, site)):
            record = ServeRecord.read(run)
            try:
                lines += (done := _withdrawn(withdraw(run, site)))
                say(*done)
            except RunDirectoryError as error:
                hint = "stop its server, and withdraw again"
                busy = RunDirectoryError(f"{site} is NOT withdrawn from {run.path}: {error.what}", hint=hint)
        for path in moved:
            lines.append(f"not found, so nothing is deleted there: {path}")
            complain("warning", f"{path} is not there any more: name the folder of each copy with --runs")
        if busy is not None:
            raise busy
        until, agreement = (record.until, record.agreement and "AGREEMENT") if record else (None, None)
        again = shell_command(
            "serve", "FILE", federation=folder, until=until, agreement=agreement, without=site
        )
        lines.append(f"{site} is withdrawn from all runs of {federation.name}; now it is {day(time.time())}")
        receipt = Path(f"{site}-withdrawn.json")
        write_private(receipt, write_receipt(federation, site, "\n".join(lines), time.time()))
        say(
            lines[-1],
            f"written: {receipt}, signed; at the site: {shell_command('site', 'receipt', receipt)}",
            f"Its name and its numbers stay in rosters, logs, results and pages. A model without it: {again}",
        )


def _withdrawn(done: Withdrawal) -> list[str]:
    """What was deleted in a run, and what the site is in, as lines."""
    if done.rounds is None:
        rounds = "in rounds that no log names, so in any"
    else:
        rounds = f"in rounds {done.spans}" if done.rounds else "in no round"
    models = f"; models: {', '.join(done.models)}" if done.models else "; in no finished model"
    moments = "; its images are in the mean and deviation of the run" if done.moments else ""
    return [
        f"{done.run}: {rounds}{models}{moments}",
        f"    deleted: {done.removed}",
        *([f"    in its answers.jsonl: {done.removed.logged}"] if done.removed.logged else ()),
    ]


def list_sites(folder: Federation, as_json: Json = False, debug: Debug = False) -> None:
    """List the sites, invitations and alarms of a federation, and what to do soon."""
    with reported(debug, as_json) as output:
        from fedlens.identity.authority import day

        federation = _open(folder)
        number, ends = federation.issuer()
        sites = [_plain(federation, record) for record in federation.sites()]
        invited, alarms = federation.invited(), federation.alarms()
        if as_json:
            output.json(
                {
                    **{"federation": federation.name, "host": federation.host, "port": federation.port},
                    **{"issuer": number, "issuer_ends": ends, "sites": sites, "invitations": invited},
                    **{"alarms": alarms, "warnings": federation.warnings()},
                }
            )
            return
        until = f"issuer {number} ends {day(ends)}" if number else "it waits for its root"
        say(f"{federation.name}: sites call {federation.host}:{federation.port}; {until}")
        rows = [
            *([s["name"], _state(s), day(s["since"]), day(s["ends"]), s["words"]] for s in sites),
            *([name, f"invitation until {day(end)}", "", "", ""] for name, end in sorted(invited.items())),
        ]
        if rows:
            print_columns(rows, ["site", "state", "since", "certificate ends", "eight words"])
        for alarm in alarms[-_ALARMS:]:
            say(f"alarm: {day(alarm['time'])}, {alarm['site']}: {alarm['what']}")


def retention(
    folder: Federation,
    days: Annotated[
        int | None,
        typer.Argument(min=1, max=36_500, metavar="DAYS", help="The days; without them they are shown."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Set for how many days after its last event the server keeps a run's checkpoints, states, recordings and journal.

    'fedlens serve' purges what is due while it runs, and 'fedlens purge --federation DIR' at any time. Sites approve
    the days: a run is never kept for more than it was served with, and approvals lapse if the next start has more.
    """
    with reported(debug):
        from fedlens.server.retention import ServedRuns

        kept = ServedRuns(_open(folder).folder)
        if days is not None:
            kept.keep(days)
        say(f"{folder.name} keeps runs for {kept.days} days; it has served {len(kept.paths)}")


def _open(folder: Path) -> FederationFolder:
    """The federation, after a warning of what its operator must do soon."""
    from fedlens.identity.federation_folder import FederationFolder

    federation = FederationFolder(folder)
    for sentence in federation.warnings():
        complain("warning", f"{sentence}.")
    return federation


def _state(site: dict[str, Any]) -> str:
    from fedlens.identity.authority import day

    return f"{site['state']}, left on {day(site['left'])}" if site["left"] else str(site["state"])


def _plain(federation: FederationFolder, record: SiteRecord) -> dict[str, Any]:
    """What `list` shows of a site."""
    from fedlens.identity.authority import not_after, read_chain

    chains = [read_chain(each["chain"].encode(), "a certificate") for each in record.certificates]
    shown = {key: vars(record)[key] for key in ("name", "state", "since", "reason", "left")}
    ends = max((not_after(chain[0]) for chain in chains), default=record.since)
    return {**shown, "ends": ends, "words": federation.words(record), "key": record.fingerprint.hex()}


def _hide_output() -> None:
    """Makes the file that standard output leads to, if it is one, readable for its owner alone."""
    with suppress(OSError, ValueError):
        if stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode):
            os.fchmod(sys.stdout.fileno(), 0o600)


def _asked(site: str) -> str:
    sys.stderr.write(f"the eight words that {site} reads to you: ")
    sys.stderr.flush()
    return sys.stdin.readline()


federation = typer.Typer(
    name="federation",
    help="Make a federation of real sites; invite, accept and revoke its sites.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
federation.command("create")(create)
federation.command("sign")(sign)
federation.command("install")(install)
federation.command("invite")(invite)
federation.command("accept")(accept)
federation.command("list")(list_sites)
federation.command("revoke")(revoke)
federation.command("withdraw")(withdraw)
federation.command("rotate")(rotate)
federation.command("retention")(retention)
federation.command("dossier")(dossier)
