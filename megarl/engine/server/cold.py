"""Begin with published weights in place of the model's files, for the check of ``sync.cold_interval``."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from megarl.engine.client.names import COLD, COLD_MARK


def take_weights(arguments: Namespace) -> None:
    """Have vLLM load the model from the folder that ``COLD`` names, where it is marked."""
    folder = Path(os.environ.get(COLD, ""))
    if COLD in os.environ and (folder / COLD_MARK).is_file():
        arguments.model, arguments.load_format = str(folder), "auto"
