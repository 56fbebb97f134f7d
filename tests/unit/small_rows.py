"""Files of rows as users have them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def write(path: Path, rows: Sequence[Any]) -> Path:
    """Put ``rows`` into ``path``, as jsonl, one list (json) or parquet by its suffix; returns ``path``."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(rows), indent=1))
    else:
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path
