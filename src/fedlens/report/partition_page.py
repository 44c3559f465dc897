"""A partition on a page of its own that opens offline."""

from __future__ import annotations

from html import escape
from pathlib import Path

from fedlens.data.partition.partition import Partition
from fedlens.experiment.atomic_files import write_atomically
from fedlens.report import templates as parts
from fedlens.report.format import many
from fedlens.report.partition import partition_section
from fedlens.report.partition_statistics import numbers, recipe_name, said


def write_page(partition: Partition, path: Path) -> Path:
    """Writes the page of a partition, and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render(partition).encode())
    return path


def render(partition: Partition) -> str:
    """The page of a partition, as text."""
    name, dataset = recipe_name(partition), partition.dataset or "a dataset"
    head = (
        f"<header><h1>{escape(dataset)}</h1><p>scattered over <b>{many(len(partition), 'client')}</b> by "
        f"<b>{escape(name)}</b></p></header>"
    )
    pair = parts.card(parts.lines(numbers(partition)), "In numbers") + _recipe(partition)
    body = f'{head}{partition_section(partition)}<div class="pair">{pair}</div>'
    foot = "<footer>Made by fedlens from a saved partition; opens offline.</footer>"
    return parts.document(f"{dataset} by {name} · fedlens", "fedlens", partition.digest[:16], body + foot)


def _recipe(partition: Partition) -> str:
    settings = [(key, said(value)) for key, value in partition.spec.items()]
    body = parts.lines(settings) if settings else '<p class="lead">The file does not say.</p>'
    body += f'<p class="lead next">Digest: <code>{escape(partition.digest)}</code></p>'
    return parts.card(body, "How it was made")
