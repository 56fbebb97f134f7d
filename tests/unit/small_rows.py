"""Files of rows as users have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Put ``rows`` into ``path``, as jsonl or parquet by its suffix; returns ``path``."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path
