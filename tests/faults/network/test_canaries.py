"""Marked bytes at sites: none of them leaves, and no process of a federation unpickles.

The test finds bytes that were copied. It says nothing about what can be computed from an update.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedlens.core import tensorfile
from tests.faults.network.real_federation import SETTINGS, SITES, RealFederation

pytestmark = pytest.mark.xdist_group("processes of a federation")  # one process forks those of all tests
LABEL, PREFIX = "canary-label-7f3a", "canary-91be-"
KEPT_LAYERS = {  # whose states are numbers that stay at the sites
    "rounds": 2,
    "algorithm": "fedbn",
    "model": {"name": "small-cnn", "width": 4, "norm": "batch"},
    "data": {**SETTINGS["data"], "validation": 0.25, "validation_from": "client"},
    "evaluation": {"clients": "all"},
}


def marks(federation: RealFederation) -> Iterator[tuple[str, bytes]]:
    """What must not leave a site, in the forms in which a program could copy it."""
    yield from (("a label", LABEL.encode()), ("a file name or a value of a column", PREFIX.encode()))
    for site in SITES:
        folder = federation.folder / site
        yield f"the path of {site}", str(folder).encode()
        for path in sorted((folder / "keys").glob("*.pem")):
            lines = path.read_text().split("-----BEGIN PRIVATE KEY-----\n")[1:]
            yield from ((f"{path.name} of {site}", text.split("\n")[0].encode()) for text in lines)
        for path in sorted((folder / "scans").glob("*.png")):
            image = np.asarray(Image.open(path))
            yield f"the file {path.name} of {site}", path.read_bytes()
            for row in image[::3]:
                scaled = row.astype(np.float32) / 255
                yield f"pixels of {path.name}", row.tobytes()
                yield f"scaled pixels of {path.name}", scaled.tobytes()
                yield f"normalized pixels of {path.name}", ((scaled - 0.3) / np.float32(0.4)).tobytes()
        yield f"the key of {site} for handles", (folder / "states" / "handles.key").read_bytes()
        for path in sorted((folder / "states").glob("*.safetensors")):
            for name, tensor in tensorfile.read(path).tensors.items():
                if tensor.is_floating_point() and tensor.unique().numel() > 3:
                    yield f"the state {name} of {site}", tensor.numpy().tobytes()
    yield from (("the secret of an invitation", secret) for secret in federation.secrets)


def test_no_marked_byte_leaves_a_site_and_nobody_unpickles(tmp_path: Path) -> None:
    federation = RealFederation(tmp_path, KEPT_LAYERS, labels={"7": LABEL}, prefix=PREFIX)
    with federation.ending():
        federation.serve(unpickled=str(tmp_path / "unpickled"))
        for site in SITES:
            federation.start(site, sent=str(tmp_path / f"{site}.sent"), unpickled=str(tmp_path / "unpickled"))
        assert not federation.finish()
    sent = b"".join((tmp_path / f"{site}.sent").read_bytes() for site in SITES)
    kept = {
        path: path.read_bytes()
        for top in ("hospitals", "run")
        for path in (tmp_path / top).rglob("*")
        if path.is_file()
    }
    assert sent.count(b"PUT /answer/") >= 2 * len(SITES)
    looked_for = [*marks(federation)]
    assert sum("the state" in what for what, _ in looked_for) >= 2 * len(SITES)
    found = [what for what, mark in looked_for if mark in sent or any(mark in each for each in kept.values())]
    assert not found
    assert (tmp_path / "unpickled").read_text() == ""
