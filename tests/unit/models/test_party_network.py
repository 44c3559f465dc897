"""The network of all parties: on whole images, or on the images of each party."""

from __future__ import annotations

import pytest
import torch

from fedlens.base.errors import ConfigError
from fedlens.models.party_network import PartyNetwork, party_network

SHAPES = [(1, 2, 2), (3, 2, 4)]


def network(**more: object) -> PartyNetwork:
    settings = {"bottom": {"name": "linear"}, "shapes": SHAPES, "windows": None, "width": 3, "join": "sum"}
    return party_network((3, 2, 4), 3, **{**settings, **more})


def test_windows_of_an_image_give_what_their_pixels_give_each_party() -> None:
    windows = [(0, 0, 2, 2), (0, 2, 2, 2)]
    cut = network(shapes=[(3, 2, 2)] * 2, windows=windows)
    own = network(shapes=[(3, 2, 2)] * 2)
    own.load_state_dict(cut.state_dict())
    images = torch.arange(48.0).reshape(2, 3, 2, 4) / 48
    assert torch.equal(cut(images), own([images[..., :2], images[..., 2:]]))


def test_one_image_is_refused_where_each_party_has_images_of_its_own() -> None:
    assert network()([torch.ones(2, *shape) for shape in SHAPES]).shape == (2, 3)
    with pytest.raises(
        ConfigError, match=r"the parties have images of their own.*a list with the images of each"
    ):
        network()(torch.ones(2, 3, 2, 4))
