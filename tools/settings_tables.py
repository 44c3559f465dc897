"""The tables of docs/settings.md and the pages in docs/settings, from the schema and the registries.

`python -m tools.settings_tables` writes them anew; test_docs.py says when that is needed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping
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
from fedlens.site.settings import SiteAllow, SiteCompute, SiteData, SiteKeep
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


DOCS = Path(__file__).parents[1] / "docs"
PAGES = [DOCS / "settings.md", *sorted((DOCS / "settings").glob("*.md"))]
SHORT = ("| setting | default | |", "|---|---|---|")
LONG = ("| name | what it is | its settings |", "|---|---|---|")
TABLE = re.compile(r"(<!-- table: (\S+) -->\n)(?:\|.*\n)*")


def rendered(page: str) -> str:
    """The page with every table that follows a `<!-- table: NAME -->` written anew."""
    made = tables()
    return TABLE.sub(lambda match: match[1] + "".join(f"{row}\n" for row in made[match[2]]), page)


def tables() -> dict[str, list[str]]:
    """Every table of the pages by its name: `top`, or the table of the TOML file that it is about."""
    made = {"top": [*SHORT, *_fields(Config, skip={*REGISTRIES, "data", "seeds"})]}
    made["evaluation.neighbours"] = [*SHORT, *_fields(Neighbours, skip=())]
    made["data.parties"] = [*SHORT, *_fields(PartySettings, skip=())]
    for name, table in (
        ("data", SiteData),
        ("allow", SiteAllow),
        ("compute", SiteCompute),
        ("keep", SiteKeep),
    ):
        made[f"site.{name}"] = [*SHORT, *_fields(table, skip=())]
    made["privacy"] = [*SHORT, *_fields(PrivacySettings, skip=())]
    made["model.any"] = [*SHORT, *_fields(Preparation, skip=())]
    for name, field in Config.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            made[name] = [*SHORT, *_fields(kind, skip=REGISTRIES if name == "data" else ())]
    for name, registry in REGISTRIES.items():
        made[name] = [*LONG, *(_linked(registry) if name == "algorithm" else _rows(registry))]
    return made


def _linked(registry: Registry) -> Iterator[str]:
    """The algorithms, each with a link to the page that describes its settings."""
    for name, summary in registry.rows():
        fields = settings_model(registry.find(name)).model_fields
        yield f"| [`{name}`](../algorithms/{name}.md) | {summary} | {', '.join(f'`{field}`' for field in fields)} |"


def _rows(registry: Registry) -> Iterator[str]:
    """The rows of a registry; a setting that three or more have is described once, in the first row."""
    models = {name: settings_model(registry.find(name)) for name, _ in registry.rows()}
    texts = Counter(
        (name, field.description or "")
        for model in models.values()
        for name, field in model.model_fields.items()
    )
    common = {name: text for (name, text), times in reversed(texts.most_common()) if times >= 3}
    if common:
        described = "<br>".join(f"`{name}`: {_escaped(text)}" for name, text in reversed(common.items()))
        yield f"| *several* | settings of three or more | {described} |"
    for name, summary in registry.rows():
        yield f"| `{name}` | {summary} | {'<br>'.join(_settings(models[name], common))} |"


def _fields(model: type[BaseModel], skip: Container[str]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if name not in skip and field.description:
            default = "from `seed`" if model is Seeds else _default(field) or "none"
            yield f"| `{name}` | {default} | {field.description} |"


def _settings(model: type[BaseModel], common: Mapping[str, str]) -> Iterator[str]:
    """The lines of a row: the settings that the first row describes, then each other one with its text."""
    shown = {
        name: f"`{name}`" + (f" ({_default(field)})" if _default(field) else "")
        for name, field in model.model_fields.items()
    }
    fields = model.model_fields.items()
    once = [name for name, field in fields if common.get(name) == field.description]
    if once:
        yield ", ".join(shown[name] for name in once)
    for name, field in fields:
        if name not in once:
            yield f"{shown[name]}: {_escaped(field.description or '')}"


def _escaped(text: str) -> str:
    return text.replace("][", r"]\[")  # "[a][b]" would be a link to b


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
    for path in PAGES:
        path.write_text(rendered(path.read_text(encoding="utf-8")), encoding="utf-8")
