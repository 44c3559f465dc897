"""The lists of docs/settings.md and the pages in docs/settings, from the schema and the registries.

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
TABLE = re.compile(r"(<!-- table: (\S+) -->\n)(?:[|-].*\n)*")


def rendered(page: str) -> str:
    """The page with every list that follows a `<!-- table: NAME -->` written anew."""
    made = tables()
    return TABLE.sub(lambda match: match[1] + "".join(f"- {row}\n" for row in made[match[2]]), page)


def tables() -> dict[str, list[str]]:
    """Every list of the pages by its name: `top`, or the table of the TOML file that it is about."""
    made = {"top": _fields(Config, skip={*REGISTRIES, "data", "seeds"})}
    made["evaluation.neighbours"] = _fields(Neighbours, skip=())
    made["data.parties"] = _fields(PartySettings, skip=())
    for name, table in (
        ("data", SiteData),
        ("allow", SiteAllow),
        ("compute", SiteCompute),
        ("keep", SiteKeep),
    ):
        made[f"site.{name}"] = _fields(table, skip=())
    made["privacy"] = _fields(PrivacySettings, skip=())
    made["model.any"] = _fields(Preparation, skip=())
    for name, field in Config.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            made[name] = _fields(kind, skip=REGISTRIES if name == "data" else ())
    made |= {name: [*_rows(name, registry)] for name, registry in REGISTRIES.items()}
    return made


def _rows(table: str, registry: Registry) -> Iterator[str]:
    """The components of a registry: those with the same text share a row, and the first row has the settings of two or
    more. Other pages say what each model and algorithm is."""
    models = {name: settings_model(registry.find(name)) for name, _ in registry.rows()}
    if table == "algorithm":
        for name, model in models.items():
            fields = ", ".join(f"`{field}`" for field in model.model_fields)
            yield f"[`{name}`](../algorithms/{name}.md){': ' if fields else ''}{fields}"
        return
    texts = Counter(
        (name, field.description or "")
        for model in models.values()
        for name, field in model.model_fields.items()
    )
    common = {name: text for (name, text), times in reversed(texts.most_common()) if times >= 2}
    if common:
        described = (f"`{name}`: {_escaped(text)}" for name, text in reversed(common.items()))
        yield f"*settings of two or more*<br>{'<br>'.join(described)}"
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, summary in registry.rows():
        same = re.sub(r"most [\d,]+", "most N", summary)  # the S2 cells of iNaturalist differ in this number
        text = (*([] if table == "model" else [same]), *_settings(models[name], common))
        rows.setdefault(text, []).append(f"**`{name}`**")
    for text, names in rows.items():
        yield f"{', '.join(names)}{': ' if text else ''}{'<br>'.join(text)}"


def _fields(model: type[BaseModel], skip: Container[str]) -> list[str]:
    return [
        f"{f'`{name}`' if model is Seeds else _shown(name, field)}: {field.description}"  # those derive from `seed`
        for name, field in model.model_fields.items()
        if name not in skip and field.description
    ]


def _settings(model: type[BaseModel], common: Mapping[str, str]) -> Iterator[str]:
    """The lines of a row: the settings that the first row describes, then each other one with its text."""
    fields = model.model_fields.items()
    once = [name for name, field in fields if common.get(name) == field.description]
    if once:
        yield ", ".join(_shown(name, model.model_fields[name]) for name in once)
    for name, field in fields:
        if name not in once:
            yield f"{_shown(name, field)}: {_escaped(field.description or '')}"


def _shown(name: str, field: Any) -> str:
    """A setting with its default."""
    return f"`{name}`" + (f" ({default})" if (default := _default(field)) else "")


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
