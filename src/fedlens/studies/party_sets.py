"""The runs of vertical learning that tell what each party's features add, for `fedlens.cost`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from fedlens.run.session import Session
from fedlens.settings.config import Config, read_config
from fedlens.settings.config_source import Source

POOLED = "pooled"


def party_work(source: Source, root: Path, download: bool, session: Session) -> dict[str, Any]:
    """Which parties train together, by role: the label party alone, each set with it, and all on pooled pixels.

    Keys: `roles`, each in words; `alone` and `all`, two of them; `sets`, the parties of each; `pooled`, the number of
    examples that all parties hold, where their inputs are windows of one image. Of more than four parties, the sets
    are one more, all but one, and all.
    """
    from fedlens.run.build import build
    from fedlens.settings.plan import plan

    built = build(plan(read_config(source.values, source.locate), source), root, download, session=session)
    built.engine.close()
    facts, partition = built.federation.parties, built.partition
    assert facts is not None
    own, taking = facts.labels_at, list(built.algorithm.candidates(built.federation))
    others = [party for party in taking if party != own]
    sizes = range(len(others) + 1) if len(others) <= 3 else (0, 1, len(others) - 1, len(others))
    sets = [sorted([own, *chosen]) for size in sizes for chosen in combinations(others, size)]
    roles = {
        _role(parties): ("party " if len(parties) == 1 else "parties ")
        + ", ".join(facts.names[party] for party in parties)
        for parties in sets
    }
    roles[_role(sets[0])] += ", which has the labels"
    found = {"roles": roles, "alone": _role(sets[0]), "all": _role(taking), "sets": sets, "pooled": None}
    if facts.windows is None or len(taking) < len(facts.names):
        return found
    pooled = int(partition.trained_sizes(taking)[0])
    return {**found, "roles": {**roles, POOLED: "all, as whole images in one place"}, "pooled": pooled}


def _role(parties: Sequence[int]) -> str:
    return "parties-" + "-".join(map(str, parties))


def party_settings(
    settings: Mapping[str, Any], config: Config, work: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The role and the settings of each run: with `algorithm.parties`, and centralized on as many whole images."""
    for parties in work["sets"]:
        role, algorithm = _role(parties), {**config.algorithm, "parties": parties}
        yield role, {**settings, "name": f"{config.name}-{role}", "algorithm": algorithm}
    if work["pooled"] is not None:
        iid = {"name": "iid", "clients": 1, "sizes": [work["pooled"]]}
        data = {**{k: v for k, v in settings["data"].items() if k != "parties"}, "partition": iid}
        more = {"name": f"{config.name}-{POOLED}", "data": data, "algorithm": {"name": "centralized"}}
        yield POOLED, {**settings, **more}
