"""Writes Parquet files as `datasets` does: images as structs of bytes and path, names of classes in the schema."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from tests.unit.data.pictures import pixels

LABEL = {"names": ["cat", "dog"], "_type": "ClassLabel"}


def png(seed: int) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels(seed)).save(content, "PNG")
    return content.getvalue()


def write_table(
    path: Path,
    labels: Sequence[int | str | None],
    first: int = 0,
    images: Sequence[bytes | None] | None = None,
    features: Mapping[str, Any] | None = None,
    **columns: Sequence[Any],
) -> Path:
    """Random pictures of the seeds from `first` on, or `images`, with these labels and other columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    contents = [png(first + at) for at in range(len(labels))] if images is None else images
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    cells = [None if content is None else {"bytes": content, "path": None} for content in contents]
    table = pa.table({"image": pa.array(cells, kind), "label": pa.array(list(labels)), **columns})
    known = {"image": {"_type": "Image"}, "label": LABEL} if features is None else features
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"huggingface": json.dumps({"info": {"features": known}})}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return path
