"""Trees: what has to be true of the pure operations on them, whatever the leaves."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedlens.core.tree import (
    Leaf,
    add,
    all_finite,
    count,
    digest,
    map_tree,
    norm,
    part,
    scale,
    select,
    subtract,
    zeros_like,
)

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
VALUES = st.floats(-1e6, 1e6, width=32)
FLOATS = st.sampled_from([torch.float32, torch.float64])
DTYPES = st.sampled_from(
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
)
NAMES = st.text("abc.0_", min_size=1, max_size=6)
ROLES = st.sampled_from(["weight", "buffer", "counter", "head", "arch"])


@st.composite
def trees(draw: st.DrawFn, many: int = 1) -> list[dict[str, Tensor]]:
    """Some trees of the same names, shapes and dtypes."""
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    kinds = {name: (draw(SHAPES), draw(FLOATS)) for name in names}
    return [{name: _tensor(draw, *kind) for name, kind in kinds.items()} for _ in range(many)]


def _tensor(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = math.prod(shape)
    values = draw(st.lists(VALUES, min_size=size, max_size=size))
    return torch.tensor(values, dtype=dtype).reshape(shape)


def copy(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tree.items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    same_kind = all((a[n].dtype, a[n].shape) == (b[n].dtype, b[n].shape) for n in a)
    return list(a) == list(b) and same_kind and all(torch.equal(a[n], b[n]) for n in a)


@given(trees(2), VALUES)
def test_arithmetic_is_leaf_by_leaf_new_and_leaves_its_inputs_alone(pair, factor: float) -> None:
    a, b = pair
    before = copy(a), copy(b)
    assert equal(add(a, b, factor), {n: a[n] + factor * b[n] for n in a}) or all(
        torch.allclose(add(a, b, factor)[n], torch.add(a[n], b[n], alpha=factor)) for n in a
    )
    assert equal(subtract(a, b), {n: a[n] - b[n] for n in a})
    assert equal(scale(a, factor), {n: a[n] * factor for n in a})
    assert equal(zeros_like(a), {n: torch.zeros(a[n].shape, dtype=a[n].dtype) for n in a})
    for made in (add(a, b), subtract(a, b), scale(a, 1.0), map_tree(torch.add, a, b)):
        for value in made.values():
            value.fill_(7.0)
    assert (equal(a, before[0]), equal(b, before[1])) == (True, True)


@given(trees(2))
def test_adding_and_taking_away_are_inverse(pair) -> None:
    a, b = pair
    zero = subtract(a, a)
    assert equal(zero, zeros_like(a))
    assert equal(add(a, zeros_like(a)), a)
    assert equal(add(a, b), add(b, a))
    assert equal(subtract(a, b), add(a, b, scale=-1.0))


@given(trees())
def test_the_norm_is_that_of_all_values_in_one_row(single) -> None:
    (tree,) = single
    row = torch.cat([value.double().flatten() for value in tree.values()])
    expected = float((row**2).sum().sqrt())
    assert math.isclose(float(norm(tree)), expected, rel_tol=1e-6, abs_tol=1e-30)


@given(trees(), st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_one_bad_value_anywhere_is_found(single, bad: float, data: st.DataObject) -> None:
    (tree,) = single
    assert all_finite(list(tree.values()))
    filled = [name for name, value in tree.items() if value.numel()]
    if filled:
        name = data.draw(st.sampled_from(filled))
        place = data.draw(st.integers(0, tree[name].numel() - 1))
        tree[name].view(-1)[place] = bad
        assert not all_finite(list(tree.values()))


@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=4))
def test_the_largest_finite_values_are_finite(kinds) -> None:
    info = {d: (torch.finfo(d) if d.is_floating_point else torch.iinfo(d)) for _, d in kinds}
    assert all_finite([torch.full(shape, info[d].max, dtype=d) for shape, d in kinds])


@given(trees(), st.randoms(use_true_random=False), st.data())
def test_the_digest_tells_every_difference_and_no_order(single, random, data: st.DataObject) -> None:
    (tree,) = single
    names = list(tree)
    random.shuffle(names)
    assert digest({name: tree[name].clone() for name in names}) == digest(tree)
    name = data.draw(st.sampled_from(names))
    changed = [
        {("~" + n if n == name else n): v for n, v in tree.items()},
        {n: v.unsqueeze(0) if n == name else v for n, v in tree.items()},
        {n: v.to(torch.int64) if n == name else v for n, v in tree.items()},
        {n: v for n, v in tree.items() if n != name},
    ]
    if tree[name].numel():
        place = data.draw(st.integers(0, tree[name].numel() - 1))
        flipped = tree[name].clone()
        flipped.view(-1).view(torch.uint8)[place * tree[name].element_size()] ^= 1
        changed.append({**tree, name: flipped})
    digests = {digest(other) for other in changed} | {digest(tree)}
    assert len(digests) == len(changed) + 1


@given(trees())
def test_the_digest_does_not_depend_on_how_the_memory_lies(single) -> None:
    (tree,) = single
    apart = {
        n: torch.stack([v, v], dim=-1)[..., 0] if v.ndim else v.clone().requires_grad_()
        for n, v in tree.items()
    }
    assert digest(apart) == digest(tree)


SPECS = st.dictionaries(
    NAMES,
    st.builds(Leaf, ROLES, SHAPES, DTYPES, st.booleans()),
    max_size=6,
)


@given(SPECS)
def test_the_parts_of_a_spec_are_disjoint_complete_and_in_order(spec) -> None:
    roles = ("weight", "buffer", "counter", "head", "arch")
    pieces = [part(spec, role, trainable=t) for role in roles for t in (True, False)]
    assert sorted(n for piece in pieces for n in piece) == sorted(spec)
    assert part(spec, *roles) == list(spec)
    assert all(piece == [n for n in spec if n in piece] for piece in pieces)
    model = [leaf for leaf in spec.values() if leaf.role not in ("buffer", "counter")]
    assert count(spec) == sum(math.prod(leaf.shape) for leaf in model)


@given(trees(), st.data())
def test_selecting_gives_the_same_tensors_in_the_order_asked(single, data: st.DataObject) -> None:
    (tree,) = single
    names = data.draw(st.lists(st.sampled_from(list(tree)), unique=True))
    taken = select(tree, names)
    assert list(taken) == names
    assert all(taken[name] is tree[name] for name in names)
