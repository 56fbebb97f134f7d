"""The SQL store: the only state shared by explorer and trainer."""

from megarl.buffer.store.claims import Claim, EndedGroup
from megarl.buffer.store.database import OWN_SERVER, VARIABLE, check_url, sqlite_file
from megarl.buffer.store.engines import EngineRoom
from megarl.buffer.store.experts import ExpertExperience, ImportedSource
from megarl.buffer.store.journal import NOTHING_USED, Used
from megarl.buffer.store.late import AwaitingReward, GivenReward, Rewarded
from megarl.buffer.store.pacing import UnusedGroup, UsedGroup
from megarl.buffer.store.selection import Glance, Selection, StoredGroup
from megarl.buffer.store.store import Store

__all__ = [
    "AwaitingReward",
    "NOTHING_USED",
    "OWN_SERVER",
    "VARIABLE",
    "Claim",
    "EndedGroup",
    "EngineRoom",
    "ExpertExperience",
    "GivenReward",
    "Glance",
    "ImportedSource",
    "Rewarded",
    "Selection",
    "Store",
    "StoredGroup",
    "UnusedGroup",
    "Used",
    "UsedGroup",
    "check_url",
    "sqlite_file",
]
