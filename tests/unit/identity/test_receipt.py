"""The receipt of a withdrawal holds as the server has signed it, for one site of one federation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedlens.base.errors import IdentityError
from fedlens.core.wire.terms import ExperimentTerms
from fedlens.identity.authority import DAY, certificates, pem
from fedlens.identity.federation_folder import FederationFolder
from fedlens.identity.keys import KeyPair
from fedlens.identity.plain_message import read_message, write_message
from fedlens.identity.receipt import _KINDS, read_receipt, write_receipt
from fedlens.identity.signing import sign
from fedlens.identity.site_keys import SiteKeys
from fedlens.site.approvals import Approvals
from fedlens.site.contract import read_contract, site_part
from fedlens.site.review import Review
from tests.unit.cli.commands import ran, refused
from tests.unit.identity.federation_kit import NOW, ROOT, at, federation_in, forged, issuer_of, joined
from tests.unit.site.site_kit import plan_at_server, write_site
from tests.unit.site.test_approvals import SETTINGS

TEXT = "ward-a is withdrawn from all runs of hospitals\n" + 500 * "/runs/wards/1: in rounds 0 to 20\n"


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> FederationFolder:
    return federation_in(tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="module")
def keys(registry: FederationFolder, tmp_path_factory: pytest.TempPathFactory) -> SiteKeys:
    return joined(registry, "ward-a", tmp_path_factory.mktemp("site"))


def kept(folder: Path, content: bytes) -> Path:
    (path := folder / "receipt.json").write_bytes(content)
    return path


def test_a_receipt_holds_after_its_certificate_and_after_new_keys_of_the_server(tmp_path: Path) -> None:
    registry = federation_in(tmp_path)
    keys = joined(registry, "ward-a", tmp_path)
    content = write_receipt(registry, "ward-a", TEXT, NOW + 0.5)
    assert len(content) > 16_384
    later = at(NOW + 200 * DAY, registry)
    later.rotate(ROOT)
    assert read_receipt(kept(tmp_path, content), keys.root, keys.name) == (TEXT, int(NOW), "hospitals")
    content = write_receipt(later, "ward-a", TEXT, NOW + 200 * DAY)
    assert read_receipt(kept(tmp_path, content), keys.root, keys.name) == (
        TEXT,
        int(NOW + 200 * DAY),
        "hospitals",
    )


def test_the_receipt_of_another_site_or_federation_is_refused(
    registry: FederationFolder, keys: SiteKeys, tmp_path: Path
) -> None:
    other = FederationFolder.create(tmp_path / "other" / "hospitals", ("127.0.0.1", 443), ROOT)
    pretended = signed(registry, other.identity(), pem(certificates(other.folder / "server.pem")))
    about = {"root": hashlib.sha256(registry.root).digest(), "site": "ward-a", "time": int(NOW), "text": TEXT}
    for content, said in (
        (write_receipt(registry, "ward-b", TEXT, NOW), "it is for another site than ward-a"),
        (write_receipt(other, "ward-a", TEXT, NOW), "of another federation than hospitals"),
        (write_message({**about, **pretended}), "has not signed it"),
    ):
        with pytest.raises(IdentityError, match=said):
            read_receipt(kept(tmp_path, content), keys.root, keys.name)


def by_a_site(registry: FederationFolder, folder: Path) -> dict[str, Any]:
    """A receipt that another site has signed with its own certificate."""
    own = joined(registry, "ward-b", folder)
    return signed(registry, own.identity(), pem(certificates(own.folder / "tls.pem")))


def by_a_stranger(registry: FederationFolder, folder: Path) -> dict[str, Any]:
    """A receipt with a certificate of another root, below the issuer of the server."""
    key = KeyPair.make()
    path, _ = forged(folder, (KeyPair.make(), issuer_of(registry)[1]), "server", identity=key.public)
    return signed(registry, key, pem(certificates(path)))


def signed(registry: FederationFolder, key: KeyPair, chain: bytes) -> dict[str, Any]:
    root = hashlib.sha256(registry.root).digest()
    return {"chain": chain, "signature": sign(key, "withdrawn", [root, "ward-a", int(NOW), TEXT])}


@pytest.mark.parametrize(
    "change",
    [
        lambda registry, folder: {"text": TEXT.replace("20", "21", 1)},
        lambda registry, folder: {"time": int(NOW) + 1},
        lambda registry, folder: {"time": -1},
        lambda registry, folder: {"time": 2**60},
        lambda registry, folder: {"chain": b""},
        lambda registry, folder: {"chain": pem(certificates(registry.folder / "server.pem")[:1])},
        lambda registry, folder: signed(registry, KeyPair.make(), pem(certificates(registry.folder / "server.pem"))),
        by_a_site,
        by_a_stranger,
    ],
)  # fmt: skip
def test_a_receipt_that_was_changed_or_that_another_has_signed_is_refused(
    registry: FederationFolder, keys: SiteKeys, tmp_path: Path, change: Callable[..., dict[str, Any]]
) -> None:
    values = read_message(write_receipt(registry, "ward-a", TEXT, NOW), _KINDS, "it", 2**20)
    path = kept(tmp_path, write_message({**values, **change(registry, tmp_path)}))
    with pytest.raises(IdentityError, match="has not signed it, or it was changed"):
        read_receipt(path, keys.root, keys.name)


@pytest.mark.parametrize("content", [b"{}", b"\xff", b" " * (2**20 + 1), json.dumps({"text": []}).encode()])
def test_what_is_no_receipt_is_a_sentence(keys: SiteKeys, tmp_path: Path, content: bytes) -> None:
    with pytest.raises(IdentityError, match="the receipt is damaged"):
        read_receipt(kept(tmp_path, content), keys.root, keys.name)
    with pytest.raises(IdentityError, match="it cannot be read: No such file"):
        read_receipt(tmp_path / "none.json", keys.root, keys.name)


def test_an_exported_proposal_is_enough_to_check_a_receipt(
    registry: FederationFolder, keys: SiteKeys, tmp_path: Path
) -> None:
    settings, proposal = write_site(tmp_path), tmp_path / "proposal.json"
    contract = read_contract(site_part(plan_at_server(SETTINGS).config), settings)
    approvals = Approvals(tmp_path, settings, keys.root, keys.name, b"")
    proposal.write_bytes(Review(contract, ExperimentTerms(), "run-1", approvals).export())
    path = kept(tmp_path, write_receipt(registry, "ward-a", TEXT, NOW))
    given = ("site", "receipt", path, "--proposal", proposal)
    shown = ran(*given)
    assert shown.startswith("signed by the server of hospitals for ward-a, on 20")
    assert f", by the root certificate in {proposal}:\n    ward-a is withdrawn" in shown
    assert "--proposal and --folder exclude one another" in refused(*given, "--folder", "fedlens-site")
    kept(tmp_path, write_receipt(registry, "ward-b", TEXT, NOW))
    assert "it is for another site than ward-a" in refused(*given)
    proposal.write_text("{}")
    assert f"{proposal} is no exported experiment" in refused(*given)
