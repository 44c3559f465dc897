"""`fedlens site`: a site of a federation; its data stay on its machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlens.cli.display.output import print_columns, reported, say
from fedlens.cli.options import Debug, Json
from fedlens.cli.passphrases import PassphraseFile, key_passphrase, new_passphrase
from fedlens.cli.site_log import log, show
from fedlens.cli.site_review import SITE_FOLDER as _FOLDER
from fedlens.cli.site_review import SiteFolder as Folder
from fedlens.cli.site_review import decide, review
from fedlens.cli.site_review import joined_folder as _inside

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fedlens.identity.invitation import Invitation
    from fedlens.identity.site_keys import SiteKeys
    from fedlens.site.network_check import Step


_ENDING = (
    14 * 86_400.0
)  # seconds; a site renews its certificate in the last 30 days, so less is left only where that fails


def join(
    invitation: Annotated[
        Path,
        typer.Argument(metavar="INVITATION", help="The file of the invitation, or - for standard input."),
    ],
    data: Annotated[
        Path,
        typer.Option(metavar="DIR", help="The folder of your data, for site.toml. Nothing of it is sent."),
    ],
    folder: Folder = _FOLDER,
    encrypt: Annotated[
        bool, typer.Option("--encrypt", help="Encrypt the keys with a passphrase, which is asked for.")
    ] = False,
    passphrase_file: PassphraseFile = None,
    debug: Debug = False,
) -> None:
    """Join a federation: make keys, get a certificate, and write a site.toml for the data.

    The server must be running. Then the operator calls you, and you read the eight words aloud.
    """
    with reported(debug):
        from fedlens.base.shell_command import shell_command
        from fedlens.site.join import join
        from fedlens.site.settings import SITE_FILE

        read = _invitation(invitation)
        made = folder / "keys" / "identity.pem"
        if made.exists():
            passphrase = key_passphrase(made, passphrase_file)
        else:
            passphrase = new_passphrase(folder, encrypt, passphrase_file)
        keys, state = join(folder, read, data, passphrase)
        own = None if folder == _FOLDER else folder
        say(
            f"{keys.name} has joined {keys.federation} at {keys.host}:{keys.port}; its state there: {state}",
            "",
            f"    {keys.words()}",
            "",
            "Read these eight words to the operator of the server on the telephone, to a person whose voice you know. "
            "Without this call the server could be somebody else's.",
            f"Look at {folder / SITE_FILE}, then: {shell_command('site', 'check', folder=own)}",
        )
        if str(invitation) != "-":
            say(f"Delete {invitation}: it has been used.")


def check(
    network: Annotated[
        bool, typer.Option("--network", help="Check the way to the server, and not the data.")
    ] = False,
    folder: Folder = _FOLDER,
    passphrase_file: PassphraseFile = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check site.toml, the data and the approved experiments, or the way to the server; exit code 1 if a step fails.

    Each step is a line. Nothing of the data is sent.
    """
    with reported(debug, as_json) as output:
        steps = []
        for step in _steps(folder, network, passphrase_file):
            steps.append(vars(step))
            if not as_json:
                mark = "note  " if step.ok is None else "ok    " if step.ok else "FAILED"
                say(f"{mark}  {step.name}: {step.what}")
                if step.hint:
                    say(f"        {step.hint}.")
        good = all(step["ok"] is not False for step in steps)
        if as_json:
            output.json({"ok": good, "steps": steps})
        if not good:
            raise typer.Exit(1)


def _steps(folder: Path, network: bool, passphrase_file: Path | None) -> Iterator[Step]:
    from fedlens.identity.site_keys import SiteKeys

    if network:
        from fedlens.site.network_check import check_network

        return check_network(*_keys(folder, passphrase_file))
    from fedlens.site.data_check import check_data

    return check_data(folder, SiteKeys(_inside(folder)).name)


def start(
    once: Annotated[bool, typer.Option("--once", help="End when the run has ended.")] = False,
    folder: Folder = _FOLDER,
    passphrase_file: PassphraseFile = None,
    debug: Debug = False,
) -> None:
    """Compute what the server asks for, for weeks, and only of experiments that were approved; Ctrl-C ends it.

    It may be stopped and started at any time: what was answered is kept, and what was not is asked again.
    """
    with reported(debug):
        from datetime import datetime

        from fedlens.cli.display.output import flush_output
        from fedlens.site.settings import SITE_FILE, SiteSettings
        from fedlens.site.start import agent_of, work

        _, passphrase = _keys(folder, passphrase_file)

        def tell(line: str) -> None:
            say(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {line}")
            flush_output()  # of a service, standard output is a pipe

        settings = SiteSettings.read(
            folder / SITE_FILE
        )  # before the agent, which would not see a change between
        if work(agent_of(folder, tell, once=once, passphrase=passphrase), folder, settings):
            tell("this site has left the federation: nothing is computed any more")


def leave(
    undo: Annotated[
        bool, typer.Option("--undo", help="Take it back: 'fedlens site start' may run again.")
    ] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Do not tell the server.")] = False,
    folder: Folder = _FOLDER,
    passphrase_file: PassphraseFile = None,
    debug: Debug = False,
) -> None:
    """Leave the federation: a running 'fedlens site start' ends at once, and none starts any more.

    Then the server is told, which needs the passphrase of encrypted keys; an empty one does not tell it. Leaving
    succeeds without the server too (exit code 0): a line says whether the server knows. Again, the server is told
    again. Nothing is deleted, here or there.
    """
    with reported(debug):
        from functools import partial

        from fedlens.base.errors import ConfigError
        from fedlens.base.shell_command import quoted_command, shell_command
        from fedlens.identity.site_keys import SiteKeys
        from fedlens.site.leave import come_back, leave, left_on, tell_server

        keys = SiteKeys(_inside(folder))
        if undo + offline + (passphrase_file is not None) > 1:
            what = "--undo, --offline and --passphrase-file exclude one another"
            raise ConfigError(what, hint="give one")
        if undo:
            come_back(folder)
            say(
                f"{keys.name} has not left {keys.federation} any more: 'fedlens site start' may run",
                "Whether the server still accepts it says 'fedlens site check --network'.",
            )
            return
        purge_hint = quoted_command("site", "purge", "RUN", folder=None if folder == _FOLDER else folder)
        since = left_on(folder)
        leave(folder)  # again too: a process may still compute after a first call that was stopped
        when = keys.federation if since is None else f"{keys.federation} already, on {since}"
        say(f"{keys.name} has left {when}: no process computes here, and 'fedlens site start' is refused")
        passphrase = partial(key_passphrase, keys.folder / "identity.pem", passphrase_file)
        why = tell_server(folder, None if offline else passphrase)
        say(
            f"the server was not told ({why}): call the operator" if why else "the server knows",
            "The operator deletes what the server has: "
            f"{shell_command('federation', 'withdraw', keys.federation, keys.name)}",
            f"Still to do here: {purge_hint}, the service, the folder but log/, and backups: see step 8 of 'From a "
            "study to your sites' (docs/from-a-study-to-your-sites.md) and 'Leaving' in the sheet for IT "
            "(docs/sheet-for-it.md).",
        )


def purge(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="The whole name of the run.")] = None,
    due: Annotated[
        bool,
        typer.Option("--due", help="Purge all runs that asked for the last time more than keep.days ago."),
    ] = False,
    folder: Folder = _FOLDER,
    debug: Debug = False,
) -> None:
    """Remove what a run has left here: states and stored answers. Its lines of the log stay, and approvals.

    Of a method without states, such as FedAvg, only stored answers are here, if any. 'fedlens site start' does it once
    a day for what is due. A run that was purged cannot go on with clients that keep a state.
    """
    with reported(debug):
        from time import time

        from fedlens.base.errors import ConfigError
        from fedlens.base.format import many
        from fedlens.site.retention import purge_site, runs_in_log
        from fedlens.site.settings import SITE_FILE, SiteSettings

        days, runs = SiteSettings.read(folder / SITE_FILE).keep.days, runs_in_log(folder)
        if due == (run is not None):
            raise ConfigError("purge needs a run or --due, and not both", hint=f"runs: {', '.join(runs)}")
        if run is not None and run not in runs:
            what, hint = (
                f"the log of this site names no run {run!r}",
                f"give a whole name of: {', '.join(runs)}",
            )
            raise ConfigError(what, where=str(folder / "log"), hint=hint)
        gone = purge_site(folder, days, time(), run)
        for each, folders in gone.items():
            removed = ", ".join(f"{name} ({many(files, 'file')})" for name, files in folders.items())
            say(
                f"removed of {each}: {removed or 'nothing: no state and no stored answer of it is here'}",
                f"    stays: its {many(runs[each].lines, 'line')} of the log, and one on this; approvals and names of "
                "counted and of excluded images (approved/)",
            )
        if not gone:
            say(
                f"nothing is due: no run asked for the last time more than {days} days ago and left files here"
            )


def receipt(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What 'fedlens federation withdraw' wrote.")],
    proposal: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="In place of the folder: what 'site review --export' wrote."),
    ] = None,
    folder: Folder = _FOLDER,
    debug: Debug = False,
) -> None:
    """Show the receipt of a withdrawal, if the server of this federation has signed it for this site."""
    with reported(debug):
        from fedlens.base.errors import ConfigError
        from fedlens.base.printable import printable
        from fedlens.identity.authority import day
        from fedlens.identity.receipt import read_receipt
        from fedlens.identity.site_keys import SiteKeys

        if proposal is None:
            hint = "name the folder with --folder, or with --proposal an export of 'fedlens site review'"
            keys = SiteKeys(_inside(folder, hint))
            root, name, source = keys.root, keys.name, folder
        else:
            from fedlens.site.review import Review

            given = context.get_parameter_source("folder")
            if given is not None and given.name == "COMMANDLINE":
                raise ConfigError("--proposal and --folder exclude one another", hint="give one")
            known = Review.read(proposal).approvals
            root, name, source = known.root, known.site, proposal
        text, time, federation = read_receipt(file, root, name)
        say(
            f"signed by the server of {federation} for {name}, on {day(time)}, and not changed since, by the root "
            f"certificate in {source}:",
            *(f"    {line}" for line in printable(text).splitlines()),
        )


def status(
    check: Annotated[
        bool, typer.Option("--check", help="End with exit code 1 if a person is needed, for monitoring.")
    ] = False,
    folder: Folder = _FOLDER,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the site's name, words, certificate, experiments, last contact and what start waits for; asks nobody.

    A person is needed where 'fedlens site start' does not run or waits for one, or had no contact with the server for
    an hour, unless the server refuses connections, as between two runs; or where the certificate ends within 14 days.
    """
    with reported(debug, as_json) as output:
        facts = _facts(folder)
        if as_json:
            output.json(facts)
        else:
            states = facts["experiments"]
            shown = [(key, str(value)) for key, value in facts.items() if value and value is not states]
            print_columns(shown)
            lines = [f"experiment {name}: {state}" for name, state in states.items()]
            say(*(lines or ["nobody has decided on an experiment"]))
        if check and facts["alarm"]:
            raise typer.Exit(1)


def _facts(folder: Path) -> dict[str, Any]:
    """What `status` shows. Nothing that an approved experiment names is opened."""
    from time import time

    from fedlens.base.errors import IdentityError
    from fedlens.identity.authority import day
    from fedlens.identity.site_keys import SiteKeys
    from fedlens.site.leave import left_on
    from fedlens.site.site_log import SiteState

    keys, now, ending = SiteKeys(_inside(folder)), time(), ""
    try:
        own = keys.certificate()
        certificate, words = f"valid until {day(own.not_after)}", keys.words()
        if own.not_after.timestamp() - now < _ENDING:
            ending = f"the certificate is {certificate}: ask the operator to run the server, which renews it"
    except IdentityError as error:
        certificate, words, ending = str(error), "", str(error)
    state, left = SiteState.read(folder), left_on(folder)
    return {
        "site": keys.name,
        "federation": keys.federation,
        "server": f"{keys.host}:{keys.port}",
        "words": words,
        "certificate": certificate,
        "left": f"on {left}" if left else "",
        "acceptance": ""
        if left
        else "accepted at the last contact"
        if state.contact and not state.ended
        else "see: fedlens site check --network",
        "last contact": day(state.contact) if state.contact else "none",
        "waits for": state.waits,
        "no contact": state.trouble,
        "alarm": "" if left else state.needs(now) or ending,
        "experiments": _experiments(folder, left),
    }


def _experiments(folder: Path, left: str | None) -> dict[str, str]:
    """The state of each experiment that somebody at the site has decided on; `left` is when the site left."""
    from time import time

    from fedlens.base.parse_text import parse_toml
    from fedlens.base.printable import printable
    from fedlens.identity.private_files import read_private

    if not (notes := sorted((folder / "approved").glob("*.toml"))):
        return {}
    from fedlens.site.approvals import Approvals
    from fedlens.site.settings import SITE_FILE, SiteSettings

    approvals, states = Approvals.of(folder, SiteSettings.read(folder / SITE_FILE)), dict[str, str]()
    for path in notes:
        name = parse_toml(read_private(path)).get("name")
        missing = (
            f"not computed: this site left on {left}" if left else approvals.last_missing(path.stem, time())
        )
        states[f"{path.stem[:12]} ({printable(str(name), line_feeds=False)})"] = missing or "approved"
    return states


def _keys(folder: Path, passphrase_file: Path | None) -> tuple[SiteKeys, bytes | None]:
    """The keys of a site and their passphrase."""
    from fedlens.identity.site_keys import SiteKeys

    inside = _inside(folder)
    passphrase = key_passphrase(inside / "identity.pem", passphrase_file)
    return SiteKeys(inside, passphrase), passphrase


def _invitation(path: Path) -> Invitation:
    """The invitation in a file, on standard input, or typed at the terminal. Raises `IdentityError`."""
    from getpass import getpass
    from time import time

    from fedlens.base.errors import IdentityError
    from fedlens.files.regular_file import open_regular
    from fedlens.identity.invitation import Invitation
    from fedlens.identity.plain_message import LARGEST_MESSAGE

    if str(path).startswith("{"):
        what = "an invitation on the command line can be read by every user of this machine"
        raise IdentityError(what, hint="ask for a new one, and give its file, or - to type it")
    if str(path) == "-":
        if sys.stdin.isatty():
            return Invitation.read(getpass("the invitation, one line: "), time())
        return Invitation.read(sys.stdin.buffer.read(LARGEST_MESSAGE + 1), time())
    try:
        with open_regular(path) as file:
            return Invitation.read(file.read(LARGEST_MESSAGE + 1), time())
    except OSError as error:
        raise IdentityError(f"it cannot be read: {error.strerror}", where=str(path)) from None


site = typer.Typer(
    name="site",
    help="Take part in a federation: join it, approve experiments, and compute them where the data are.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
site.command("join")(join)
site.command("check")(check)
site.command("status")(status)
site.command("review")(review)
site.command("decide")(decide)
site.command("start")(start)
site.command("purge")(purge)
site.command("leave")(leave)
site.command("receipt")(receipt)
site.command("log")(log)
site.command("show")(show)
