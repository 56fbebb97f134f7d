"""One thread for torch in this process too: on models as tiny as these a second one does nothing but wait."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
