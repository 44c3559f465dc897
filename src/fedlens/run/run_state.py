"""The state of a run between two rounds, as a checkpoint holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedlens.base.errors import RunDirectoryError
from fedlens.base.signatures import offered
from fedlens.core.protocol import ClientId, ModelSpec, Payload, State
from fedlens.core.schema import nbytes
from fedlens.core.states import Mark, Saved
from fedlens.core.traffic import Traffic
from fedlens.core.tree import HEAVY, Tree
from fedlens.run.build import Built
from fedlens.run.state_files import is_key

_METRICS = "metrics.jsonl"  # whose lines of the round are `RunState.line`


@dataclass
class RunState:
    """The state of a run, as a checkpoint holds it. Its trees are never changed in place."""

    round: int
    state: State
    clients: Mark | Saved
    line: dict[str, Any]  # the round's line of metrics.jsonl
    # The round's lines by file, which may not be in the files yet; and what observers keep, by `Observer.part_name`.
    rows: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    parts: Mapping[str, Payload] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    failures: dict[str, Counter[str]] = field(default_factory=dict)
    digests: Mapping[str, Any] = field(default_factory=dict)  # of the lines before this round, by file
    norms: dict[str, Any] = field(default_factory=dict)  # of the replies so far; see `NormBounds`
    traffic: Mapping[str, Any] = field(default_factory=dict)  # see `Traffic`
    cpu_seconds: float = 0.0  # processor time of this process in all rounds so far
    skipped: int = 0  # skipped rounds in a row, up to this one

    def payload(self) -> dict[str, Any]:
        """The payload of a checkpoint. Client states that belong in files are written first."""
        clients = self.clients.saved()
        return {
            "round": self.round,
            "state": self.state,
            "clients": {str(client): state for client, state in clients.states.items()},
            "client_files": {str(client): key for client, key in clients.keys.items()},
            "line": self.line,
            "rows": {file: rows for file, rows in self.rows.items() if file != _METRICS},
            "parts": self.parts,
            "best": self.best,
            "failures": {client: dict(reasons) for client, reasons in self.failures.items()},
            "norms": self.norms,
            "traffic": self.traffic,
            "cpu_seconds": self.cpu_seconds,
            "skipped": self.skipped,
        }

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> RunState:
        """The state in a checkpoint's payload. Raises `RunDirectoryError` if it is not that of a run."""
        try:
            fields = _without_older_keys({**{"client_files": {}}, **payload})
            states, keys = _by_client(fields.pop("clients")), _by_client(fields.pop("client_files"))
            failures = {client: Counter(reasons) for client, reasons in payload["failures"].items()}
            rows = {_METRICS: [fields["line"]], **fields["rows"]}
            run_state = cls(**{**fields, "clients": Saved(states, keys), "failures": failures, "rows": rows})
            right = (
                isinstance(run_state.round, int)
                and isinstance(run_state.state, Mapping)
                and run_state.line["round"] == run_state.round
                and all(isinstance(row, Mapping) for rows in run_state.rows.values() for row in rows)
                and isinstance(run_state.parts, Mapping)
                and Traffic.of(run_state.traffic) is not None
                and isinstance(run_state.cpu_seconds, int | float)
                and isinstance(run_state.skipped, int)
                and (run_state.best is None or isinstance(run_state.best["round"], int))
                and all(map(is_key, keys.values()))
                and all(isinstance(state, Mapping) for state in states.values())
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            right = False
        if not right:  # its checksum fits: it was not written by this version, or not by fedlens
            raise RunDirectoryError("the checkpoint does not hold the state of a run", hint="start a new run")
        return run_state


def placed(built: Built, state: State) -> State:
    """The state with its model where the engine sends it from, so that the model is not in memory twice."""
    state = built.on_device(state)
    if nbytes(state) < HEAVY:
        return state
    spec, tree = built.algorithm.model(state)
    model = spec.sent(tree)
    moved = built.engine.place(model)
    tensors = {id(model[name]): moved[name] for name in model if moved[name] is not model[name]}
    return replace_tensors(state, tensors) if tensors else state


def fix_again(model: ModelSpec, tree: Tree) -> None:
    """Takes the leaves that never change from a checkpoint: a file of weights may be another one by now."""
    for name in model.fixed:
        model.fixed[name] = tree[name]


def replace_tensors(value: Any, tensors: Mapping[int, Tensor]) -> Any:
    """The same payload with other tensors, by the id of those that they replace.

    A mapping, list or tuple in which nothing is replaced stays the object that it is.
    """
    if isinstance(value, Mapping):
        before = dict(value)
        after = {name: replace_tensors(item, tensors) for name, item in before.items()}
        return after if any(after[name] is not item for name, item in before.items()) else value
    if isinstance(value, list | tuple):
        items = [replace_tensors(item, tensors) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, list):
            return items
        kind: Any = type(value)
        return kind._make(items) if offered(value, ["_make"]) else tuple(items)
    return tensors.get(id(value), value)


def _without_older_keys(fields: dict[str, Any]) -> dict[str, Any]:
    """A payload with `rows` by file, and with `parts`, which older versions saved under keys of their own."""
    if "parts" in fields:
        return fields
    parts = {"divergence": fields.pop("divergence", None), "clients": fields.pop("measured", None)}
    return {
        **fields,
        "rows": {"clients.jsonl": fields["rows"]},
        "parts": {name: part for name, part in parts.items() if part is not None},
    }


def _by_client(by_name: Mapping[str, Any]) -> dict[ClientId, Any]:
    return {name if name.startswith("@") else int(name): value for name, value in by_name.items()}
