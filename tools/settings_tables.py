"""The tables of docs/settings.md, read off the schema and the registries.

`python -m tools.settings_tables` writes them anew; test_docs.py says when that is needed.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from fedlens.aggregate.mean import AGGREGATES
from fedlens.aggregate.server_steps import SERVERS
from fedlens.algorithms.client_sampling import SELECTS
from fedlens.algorithms.registry import ALGORITHMS, RULES
from fedlens.base.registry import Registry, settings_model
from fedlens.data.augmentation.augment import AUGMENTS
from fedlens.data.datasets.registry import DATASETS
from fedlens.data.partition.registry import PARTITIONS
from fedlens.engines.registry import ENGINES
from fedlens.models.prepare import Preparation
from fedlens.models.registry import MODELS
from fedlens.privacy.settings import PrivacySettings
from fedlens.settings.config import Config, Neighbours, Seeds
from fedlens.settings.party_settings import PartySettings
from fedlens.site.settings import SiteAllow
from fedlens.tasks.registry import TASKS

REGISTRIES: dict[str, Registry] = {
    "data.augment": AUGMENTS,
    "data.dataset": DATASETS,
    "data.partition": PARTITIONS,
    "model": MODELS,
    "select": SELECTS,
    "algorithm": ALGORITHMS,
    "client": RULES,
    "aggregate": AGGREGATES,
    "server": SERVERS,
    "engine": ENGINES,
    "task": TASKS,
}


PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
SHORT = ("| setting | default | |", "|---|---|---|")
LONG = ("| name | what it is | its settings |", "|---|---|---|")
TABLE = re.compile(r"(<!-- table: (\S+) -->\n)(?:\|.*\n)*")


def rendered(page: str) -> str:
    """The page with every table that follows a `<!-- table: NAME -->` written anew."""
    made = tables()
    return TABLE.sub(lambda match: match[1] + "".join(f"{row}\n" for row in made[match[2]]), page)


def tables() -> dict[str, list[str]]:
    """Every table of the page by its name: `top`, or the table of the TOML file that it is about."""
    made = {"top": [*SHORT, *_fields(Config, skip={*REGISTRIES, "data", "seeds"})]}
    made["evaluation.neighbours"] = [*SHORT, *_fields(Neighbours, skip=())]
    made["data.parties"] = [*SHORT, *_fields(PartySettings, skip=())]
    made["allow"] = [*SHORT, *_fields(SiteAllow, skip=())]
    made["privacy"] = [*SHORT, *_fields(PrivacySettings, skip=())]
    made["model.any"] = [*SHORT, *_fields(Preparation, skip=())]
    for name, field in Config.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            made[name] = [*SHORT, *_fields(kind, skip=REGISTRIES if name == "data" else ())]
    for name, registry in REGISTRIES.items():
        found = {row: settings_model(registry.find(row)) for row, _ in registry.rows()}
        made[name] = [*LONG]
        for row, summary in registry.rows():
            made[name].append(f"| `{row}` | {summary} | {'<br>'.join(_settings(found[row]))} |")
    return made


def _fields(model: type[BaseModel], skip: Container[str]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if name not in skip and field.description:
            default = "from `seed`" if model is Seeds else _default(field) or "none"
            yield f"| `{name}` | {default} | {field.description} |"


def _settings(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        default = _default(field)
        # "[a][b]" would be a link to b.
        text = (field.description or "").replace("][", r"]\[")
        yield f"`{name}`" + (f" ({default})" if default else "") + f": {text}"


def _default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "needed"
    if field.default is None:
        return ""
    if isinstance(field.default, BaseModel):
        return f'`{{ name = "{field.default.name}" }}`'
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{str(value).lower() if isinstance(value, bool) else repr(value)}`".replace("'", '"')


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
