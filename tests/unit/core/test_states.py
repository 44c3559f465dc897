"""The states of clients: what is in memory, what is put away, and what stood at an earlier moment."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from fedlens.core.protocol import ClientStates as ByProtocol
from fedlens.core.states import ClientStates, Saved, rows


class Shelf:
    """A store in memory that writes down what is asked of it; equal states have one key."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.done: list[str] = []
        self.full: BaseException | None = None

    def put(self, payload: Any) -> str:
        if self.full is not None:
            raise self.full
        key = f"key of {payload['b'].decode()}"
        self.kept[key] = payload
        self.done.append(f"put {payload['b'].decode()}")
        return key

    def get(self, key: str) -> Any:
        self.done.append(f"get {key[7:]}")
        return self.kept[key]

    def drop(self, key: str) -> None:
        self.done.append(f"drop {key[7:]}")
        del self.kept[key]


def state(text: str) -> dict[str, bytes]:
    """Of as many bytes as the text is long."""
    return {"b": text.encode()}


def filled(memory: int, *texts: str) -> tuple[ClientStates, Shelf]:
    """Client k has committed the k-th text."""
    shelf = Shelf()
    states = ClientStates(shelf, memory)
    for client, text in enumerate(texts):
        states.commit(client, state(text))
    return states, shelf


def test_client_states_are_replaced_never_changed() -> None:
    assert ByProtocol is ClientStates
    states = ClientStates()
    assert states.get(3) == {}
    states.commit(3, {"n": 1})
    states.commit("@train", {"m": 2})
    snapshot = states.snapshot()
    states.commit(3, {"n": 5})
    states.commit(4, {})
    assert snapshot == {3: {"n": 1}, "@train": {"m": 2}}
    states.restore(snapshot)
    assert states.get(3) == {"n": 1}
    assert states.get(4) == {}
    assert states.used == 0  # without a store nobody counts


def test_beyond_the_budget_the_least_recently_used_go_first() -> None:
    states, shelf = filled(12, "aaaa", "bbbb", "cccc")
    assert (states.used, shelf.done) == (12, [])
    assert states.get(0) == state("aaaa")
    states.commit(3, state("dd"))
    assert (states.used, shelf.done) == (10, ["put bbbb"])
    assert states.get(1) == state("bbbb")
    assert (states.used, shelf.done[1:]) == (10, ["get bbbb", "put cccc"])
    assert [states.get(client)["b"] for client in range(4)] == [b"aaaa", b"bbbb", b"cccc", b"dd"]
    assert states.used <= 12


def test_what_was_put_away_once_is_not_put_away_again() -> None:
    states, shelf = filled(4, "aaaa", "bbbb")
    for client in (0, 1, 0, 1):
        assert states.get(client)["b"] == [b"aaaa", b"bbbb"][client]
    assert sorted(shelf.done) == ["get aaaa", "get aaaa", "get bbbb", "get bbbb", "put aaaa", "put bbbb"]


def test_one_that_does_not_fit_at_all_is_put_away_at_once() -> None:
    states, shelf = filled(3, "aaaa", "b")
    assert (states.used, shelf.done) == (1, ["put aaaa"])
    assert states.get(0) == state("aaaa")
    assert states.used == 0  # making room for it took the other along, and did not help
    assert states.get(1) == state("b")


def test_states_of_no_size_are_never_put_away() -> None:
    shelf = Shelf()
    states = ClientStates(shelf, 1)
    states.commit(0, {"note": "no tensor, no bytes"})
    states.commit(1, {})
    states.commit(2, state("aa"))
    assert (states.get(0), states.get(1), shelf.done) == ({"note": "no tensor, no bytes"}, {}, ["put aa"])


def test_the_store_is_told_when_nobody_has_a_state_any_more() -> None:
    states, shelf = filled(0, "a", "a", "b")
    assert sorted(shelf.kept) == ["key of a", "key of b"]
    assert states.keys == {"key of a", "key of b"}
    states.commit(0, state("c"))
    assert "drop a" not in shelf.done
    states.commit(1, state("c"))
    assert shelf.done[-1] == "drop a"
    assert states.keys == {"key of b", "key of c"}


def test_a_hold_reads_what_was_there_whatever_is_committed() -> None:
    states, shelf = filled(0, "a")
    held, nothing = states.hold(0), states.hold(7)
    states.commit(0, state("b"))
    states.commit(7, state("c"))
    assert (states.read(held), states.read(nothing)) == (state("a"), {})
    assert "drop a" not in shelf.done
    states.release(held)
    states.release(nothing)
    assert shelf.done[-1] == "drop a"
    assert states.snapshot() == {0: state("b"), 7: state("c")}


@pytest.mark.parametrize("memory", [0, 2, 100])
def test_a_mark_knows_what_stood_when_it_was_made(memory: int) -> None:
    states, shelf = filled(memory, "a", "b", "c")
    early = states.mark()
    states.commit(0, state("d"))
    late = states.mark()
    states.commit(0, state("e"))
    states.commit(1, state("f"))
    states.commit(9, state("g"))
    assert contents(early.saved(), shelf) == {0: "a", 1: "b", 2: "c"}
    assert contents(late.saved(), shelf) == {0: "d", 1: "b", 2: "c"}
    assert contents(states.mark().saved(), shelf) == {0: "e", 1: "f", 2: "c", 9: "g"}
    states.keep(late)
    assert contents(late.saved(), shelf) == {0: "d", 1: "b", 2: "c"}
    assert "key of a" not in shelf.kept
    with pytest.raises(ValueError, match="the mark was released"):
        early.saved()
    states.keep()
    assert set(shelf.kept) <= {"key of e", "key of f", "key of c", "key of g"}


def contents(saved: Saved, shelf: Shelf) -> dict[Any, str]:
    assert not (saved.states and saved.keys)
    found = dict(saved.states) or {client: shelf.kept[key] for client, key in saved.keys.items()}
    return {client: payload["b"].decode() for client, payload in found.items()}


def test_what_is_saved_are_the_states_while_they_fit_and_else_keys_of_which_only_new_ones_are_put() -> None:
    states, shelf = filled(6, "aa", "bb", "cc")
    assert states.mark().saved() == Saved({k: state(text) for k, text in enumerate(["aa", "bb", "cc"])})
    assert shelf.done == []
    states.commit(3, state("dd"))
    keys = {k: f"key of {text}" for k, text in enumerate(["aa", "bb", "cc", "dd"])}
    assert states.mark().saved() == Saved(keys=keys)
    assert shelf.done == [f"put {text}" for text in ("aa", "bb", "cc", "dd")]
    states.commit(1, state("ee"))
    assert states.mark().saved() == Saved(keys=keys | {1: "key of ee"})
    assert shelf.done[4:] == ["put ee"]


def test_what_was_saved_is_restored_by_key_and_read_when_it_is_wanted() -> None:
    states, shelf = filled(4, "aa", "bb", "cc")
    saved = states.mark().saved()
    shelf.done.clear()
    again = ClientStates(shelf, 4)
    again.restore(saved)
    assert (again.used, shelf.done, again.keys) == (0, [], set(saved.keys.values()))
    assert again.get(1) == state("bb")
    assert (again.used, shelf.done) == (2, ["get bb"])
    assert again.mark().saved() == saved
    with pytest.raises(ValueError, match="without that store"):
        ClientStates().restore(saved)


def test_restoring_keeps_the_budget_and_the_marks() -> None:
    states, shelf = filled(4, "aa", "bb")
    mark = states.mark()
    states.restore({1: state("xxx"), 5: state("yyy")})
    assert states.used == 3
    assert states.snapshot() == {1: state("xxx"), 5: state("yyy")}
    assert contents(mark.saved(), shelf) == {0: "aa", 1: "bb"}
    states.restore({})
    assert states.snapshot() == {}


def test_staged_states_count_and_are_committed_together() -> None:
    states, shelf = filled(4, "aa", "bb")
    staging = states.staging()
    staging.put(1, state("cc"))
    staging.put(0, state("dd"))
    staging.put(1, state("ee"))
    assert states.used == 4
    assert [states.get(client) for client in (0, 1)] == [state("aa"), state("bb")]
    staging.commit()
    staging.commit()  # there is nothing left
    assert states.snapshot() == {0: state("dd"), 1: state("ee")}
    assert "key of cc" not in shelf.kept
    assert "key of aa" not in shelf.kept


@pytest.mark.parametrize("fault", [OSError("full"), KeyboardInterrupt()])
def test_a_store_that_refuses_loses_nothing_that_stood(fault: BaseException) -> None:
    states, shelf = filled(4, "aa", "bb")
    mark = states.mark()
    shelf.full = fault
    with pytest.raises(type(fault)):
        states.commit(0, state("cc"))
    with pytest.raises(type(fault)):
        states.staging().put(1, state("dd"))
    shelf.full = None
    assert contents(mark.saved(), shelf) == {0: "aa", 1: "bb"}


def test_tensors_are_laid_out_as_they_come_back_from_a_file() -> None:
    plain = {"w": [torch.ones(2, 3)], "n": (1, None, "x")}
    assert rows(plain) is plain
    turned = torch.arange(6.0).reshape(2, 3).T
    states = ClientStates()
    states.commit(0, {"w": turned, "rest": (turned, [turned], 3)})
    found = states.get(0)
    for tensor in (found["w"], found["rest"][0], found["rest"][1][0]):
        assert tensor.stride() == (2, 1)
        assert torch.equal(tensor, turned)
    assert isinstance(found["rest"], tuple)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_done_it_is_as_if_all_had_stayed_in_memory(seed: int) -> None:
    """Against a dictionary that is copied whenever a mark is made; and no more lies in the store than somebody has."""
    draw = random.Random(seed)
    shelf = Shelf()
    memory = draw.choice([0, 5, 20])
    states = ClientStates(shelf, memory)
    model: dict[int, str] = {}
    marks: list[tuple[Any, dict[int, str]]] = []
    holds: list[tuple[Any, str | None]] = []
    for _ in range(400):
        client = draw.randrange(8)
        match draw.randrange(10):
            case 0 | 1 | 2:
                model[client] = draw.choice("abcdefgh") * draw.randint(1, 6)
                states.commit(client, state(model[client]))
            case 3:
                staging = states.staging()
                for client in draw.choices(range(8), k=4):
                    model[client] = draw.choice("abcdefgh") * draw.randint(1, 6)
                    staging.put(client, state(model[client]))
                staging.commit()
            case 4:
                assert states.get(client) == (state(model[client]) if client in model else {})
            case 5:
                marks.append((states.mark(), dict(model)))
                marks = draw.sample(marks, min(2, len(marks)))
                states.keep(*(mark for mark, _ in marks))
            case 6:
                holds.append((states.hold(client), model.get(client)))
            case 7 if holds:
                held, text = holds.pop(draw.randrange(len(holds)))
                assert states.read(held) == ({} if text is None else state(text))
                states.release(held)
            case 8 if draw.random() < 0.2:
                for mark, then in marks:
                    assert contents(mark.saved(), shelf) == then
            case 9 if marks:
                mark, then = draw.choice(marks)
                states.rewind(mark)
                model = dict(then)
        assert states.used <= memory
        assert states.keys == set(shelf.kept)
        everywhere = [
            *model.values(),
            *(t for _, then in marks for t in then.values()),
            *(t for _, t in holds),
        ]
        assert {key[7:] for key in shelf.kept} <= set(everywhere)
    assert states.snapshot() == {client: state(text) for client, text in model.items()}


def test_a_round_costs_what_it_changes_and_not_what_there_is() -> None:
    def rounds(clients: int) -> float:
        states = ClientStates(Shelf(), 1 << 30)
        states.restore({client: {"n": client, "b": b"x"} for client in range(clients)})
        began = time.process_time()
        for round in range(200):
            mark = states.mark()
            for client in range(5):
                states.get(client)
                states.commit(client, {"n": round, "b": b"x"})
            states.keep(mark)
        return time.process_time() - began

    few, many = rounds(10), rounds(100_000)
    assert (
        many < 10 * few + 0.1
    )  # copying a hundred thousand references two hundred times takes half a second
