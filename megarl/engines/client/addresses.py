"""Address of a job's weight link, which the supervisor gives to every process of the job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megarl.core.errors import ConfigError
from megarl.engines.client.auth import KEY_VARIABLE


@dataclass(frozen=True)
class JobAddresses:
    link_host: str
    link_port: int
    """TCP store of the weight link; trainer rank 0 listens there."""
    key: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> JobAddresses:
        """Read MEGARL_LINK (host:port) and MEGARL_JOB_KEY.

        Raises:
            ConfigError: one of them is missing.
        """
        missing = [name for name in ("MEGARL_LINK", KEY_VARIABLE) if not environment.get(name)]
        if missing:
            raise ConfigError(f"{', '.join(missing)} not in the environment: this process is started by `megarl train`")
        host, _, port = environment["MEGARL_LINK"].rpartition(":")
        return cls(host, int(port), environment[KEY_VARIABLE])
