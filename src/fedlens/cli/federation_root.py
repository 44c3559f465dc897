"""The root of a federation and the issuers that it signs: `fedlens federation sign`, `install` and `rotate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedlens.cli.display.output import reported, say
from fedlens.cli.options import Debug, Federation
from fedlens.cli.passphrases import PassphraseFile, RootPassphraseFile, key_passphrase, root_passphrase

if TYPE_CHECKING:
    from fedlens.identity.federation_folder import FederationFolder


def sign(
    request: Annotated[Path, typer.Argument(metavar="REQUEST", help="The file that create or rotate wrote.")],
    root: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder of the root; the first request makes it.")
    ],
    root_passphrase_file: RootPassphraseFile = None,
    debug: Debug = False,
) -> None:
    """Sign a server's request with the root, on the machine that keeps the root.

    Beside the request a file `.issuer` is written, to carry back to the server. Neither is a secret.
    """
    with reported(debug):
        from time import time

        from fedlens.base.errors import IdentityError
        from fedlens.base.shell_command import shell_command
        from fedlens.identity.authority import ISSUER_REQUEST, make_root, request_words, sign_issuer
        from fedlens.identity.plain_message import read_message
        from fedlens.identity.private_files import write_private

        content = _content(request)
        values = read_message(content, ISSUER_REQUEST, str(request))
        say(f"words of the request: {request_words(content)}")
        first = not (root / "root.pem").exists()
        if first and values["above"] > 0:
            what = f"{root} has no root, and the server has issuer {values['above']} of one"
            raise IdentityError(what, hint="name the folder of the root with --root")
        passphrase = root_passphrase(f"a passphrase for the root in {root}", root_passphrase_file, new=first)
        if first:
            make_root(root, values["federation"], passphrase, time())
            say(f"made the root of {values['federation']}: {root}")
        answer = request.with_suffix(".issuer")
        write_private(answer, sign_issuer(root, content, passphrase, time()))
        command = shell_command("federation", "install", values["federation"], answer.name)
        say(
            f"signed: {answer}",
            f"next: compare the words, carry the file to the server, and there: {command}",
        )


def install(
    folder: Federation,
    issuer: Annotated[Path, typer.Argument(metavar="FILE", help="The file that sign wrote.")],
    passphrase_file: PassphraseFile = None,
    debug: Debug = False,
) -> None:
    """Install the issuer that the root signed on its machine, with new keys of the server."""
    with reported(debug):
        from fedlens.base.errors import IdentityError
        from fedlens.base.shell_command import quoted_command
        from fedlens.identity.federation_folder import FederationFolder

        waiting = folder / "issuer.next.pem"
        if not waiting.exists():
            hint = f"make a request with {quoted_command('federation', 'rotate', folder)}"
            raise IdentityError(f"{folder} waits for no issuer", hint=hint)
        federation = FederationFolder(folder, key_passphrase(waiting, passphrase_file))
        federation.install_issuer(_content(issuer))
        _say_issuer(federation)


def rotate(
    folder: Federation,
    passphrase_file: PassphraseFile = None,
    root_passphrase_file: RootPassphraseFile = None,
    debug: Debug = False,
) -> None:
    """Replace the issuer and the keys of the server; needs the root, or writes a request for it.

    Do it when a warning says so, at least every two years, and at once when the server's folder may have been copied.
    """
    with reported(debug):
        from fedlens.identity.federation_folder import FederationFolder

        federation = FederationFolder(folder)
        number, _ = federation.issuer()
        key = folder / ("identity.pem" if number else "issuer.next.pem")
        federation = FederationFolder(folder, key_passphrase(key, passphrase_file))
        if not (folder / "root" / "root.pem").exists():
            write_request(federation)
            return
        federation.rotate(root_passphrase("the passphrase of the root", root_passphrase_file))
        _say_issuer(federation)


def write_request(federation: FederationFolder) -> None:
    """Write a request for an issuer beside the folder of the federation, and say where to carry it."""
    from fedlens.base.shell_command import shell_command
    from fedlens.identity.authority import request_words
    from fedlens.identity.private_files import write_private

    folder, request = federation.folder, federation.request_issuer()
    path = folder.with_name(f"{folder.name}.request")
    write_private(path, request)
    say(
        f"wrote: {path}",
        f"words of the request: {request_words(request)}",
        f"1. Carry {path.name} to the machine that keeps the root.",
        f"2. There: {shell_command('federation', 'sign', path.name, root=f'{federation.name}-root')}",
        f"3. Compare its words of the request with those above, and carry {path.stem}.issuer back.",
        f"4. Here: {shell_command('federation', 'install', folder, path.with_suffix('.issuer'))}",
    )


def _say_issuer(federation: FederationFolder) -> None:
    from fedlens.identity.authority import day

    number, ends = federation.issuer()
    say(f"{federation.name} has issuer {number} until {day(ends)}, and a new key of its server")
    if number > 1:
        say("Sites refuse the old one once each has connected. Restart 'fedlens serve' if it is running.")


def _content(path: Path) -> bytes:
    """A small file that was carried here. Raises `IdentityError` if it cannot be read."""
    from fedlens.base.errors import IdentityError
    from fedlens.files.regular_file import open_regular
    from fedlens.identity.plain_message import LARGEST_MESSAGE

    try:
        with open_regular(path) as file:
            return file.read(LARGEST_MESSAGE + 1)
    except OSError as error:
        raise IdentityError(f"it cannot be read: {error.strerror}", where=str(path)) from None
