"""docs/examples/dossier.html: the dossier of the page "From a study to your sites", with its three sites accepted.

`python -m tools.sample_dossier` writes it anew; test_your_sites.py says when that is needed. Each time it
makes keys, and exchanges their words for those of the page: a reader can compare them with its other outputs.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from pathlib import Path

from fedlens.core.wire.terms import ExperimentTerms
from fedlens.identity.federation_folder import FederationFolder
from fedlens.identity.site_keys import SiteKeys
from fedlens.server.dossier import write_dossier
from fedlens.settings.config_source import read_source
from tools.sites_page import AGREEMENT, DOCS, PAGE, PORT, PURPOSE, ROOT, UNTIL

DOSSIER = DOCS / "examples" / "dossier.html"
_SITE = re.compile(r"^    (ward-\w) +(\w+(?: \w+){7})$", re.MULTILINE)


def made(folder: Path) -> str:
    """The page, from a federation that is made in an empty folder."""
    federation = FederationFolder.create(folder / "hospitals", ("localhost", PORT), ROOT.encode())
    shown = dict(_SITE.findall(PAGE.read_text(encoding="utf-8")))
    for name in shown:
        invitation = federation.invite(name)
        keys = SiteKeys.join(folder / name, invitation)
        federation.enrol(keys.enrolment(invitation), "127.0.0.1")
        federation.accept(name, keys.identity().fingerprint)
    experiment = read_source(str(DOCS / "examples" / "hospitals.toml"))
    terms = ExperimentTerms(UNTIL, hashlib.sha256(AGREEMENT.encode()).hexdigest())
    _, page = write_dossier(folder / "dossier", federation, experiment, PURPOSE, terms=terms)
    text = page.read_text(encoding="utf-8")
    for site in federation.sites():
        text = text.replace(federation.words(site), shown[site.name])
    return text


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        DOSSIER.write_text(made(Path(folder)), encoding="utf-8")
