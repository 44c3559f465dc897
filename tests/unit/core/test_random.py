"""Seeds, streams and secrets."""

import hashlib
import pickle

import cloudpickle
import pytest
import torch

from fedlens.core.random import Rng, Secrets, derive


def test_a_seed_is_the_same_on_every_machine_and_in_every_release() -> None:
    # A change here changes every published result: it would have to be on purpose.
    assert derive(0, "seeds", "partition") == 1183511335358366751
    assert derive(0, "round", 1) == 8767659340229167071
    text = "i0\x1fsop\x1fi1\x1fi0\x1fi2\x1fi7\x1fsbatches"
    hashed = hashlib.blake2b(text.encode(), digest_size=8).digest()
    assert Rng((0, "op", 1, 0, 2, 7)).seed("batches") == int.from_bytes(hashed, "little") >> 1


def test_every_part_counts_and_so_do_its_place_and_kind() -> None:
    keys = [(1, 2), (2, 1), (12,), ("1", 2), (1, "2"), ("12",), (1, 2, ""), (), ("",)]
    assert len({derive(*key) for key in keys}) == len(keys)
    assert all(0 <= derive(*key) < 2**63 for key in keys)


def test_many_places_have_many_seeds() -> None:
    seeds = {Rng((0, "op", r, 0, s, s)).seed("batches") for r in range(100) for s in range(100)}
    assert len(seeds) == 10_000


def test_a_place_has_no_state() -> None:
    rng = Rng((3,))
    assert torch.equal(torch.rand(4, generator=rng.torch("a")), torch.rand(4, generator=rng.torch("a")))
    assert not torch.equal(torch.rand(4, generator=rng.torch("a")), torch.rand(4, generator=rng.torch("b")))
    assert rng.numpy("a").random() == rng.numpy("a").random()
    assert rng.child("x", 1) == Rng((3, "x", 1))
    assert rng.child("x").seed("a") != rng.seed("a")


def test_drawing_leaves_the_global_stream_alone() -> None:
    before = torch.get_rng_state()
    torch.rand(3, generator=Rng((1,)).torch("a"))
    assert torch.equal(before, torch.get_rng_state())


def test_a_deployed_secret_is_entropy_and_stays() -> None:
    own, other = Secrets(), Secrets()
    assert own.token("mask") == own.token("mask")
    assert own.token("mask") != own.token("key")
    assert own.token("mask") != other.token("mask")
    assert (len(own.token("mask")), len(own.token("mask", 5))) == (32, 5)


def test_a_simulated_secret_is_repeatable_and_each_clients_own() -> None:
    assert Secrets((0, 1)).token("mask") == Secrets((0, 1)).token("mask")
    tokens = {Secrets(key).token(name) for key in ((0, 1), (0, 2), (1, 1)) for name in ("mask", "key")}
    assert len(tokens) == 6


@pytest.mark.parametrize("dump", [pickle.dumps, cloudpickle.dumps])
@pytest.mark.parametrize("simulation", [None, (0, 1)])
def test_a_secret_cannot_leave_and_does_not_show(dump, simulation) -> None:
    own = Secrets(simulation)
    own.token("mask")
    with pytest.raises(TypeError, match="never leave"):
        dump({"reply": own})
    assert repr(own) == "Secrets(...)"
