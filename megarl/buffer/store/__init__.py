"""The SQL store: the only state shared by explorer and trainer."""

from megarl.buffer.store.claims import Claim, EndedGroup
from megarl.buffer.store.codec import OutlineRow, is_outline, with_arrays
from megarl.buffer.store.database import OWN_SERVER, VARIABLE, check_url, sqlite_file
from megarl.buffer.store.engines import EngineRoom
from megarl.buffer.store.experts import ExpertExperience, ImportedSource
from megarl.buffer.store.groups import PART_BYTES, outlines_of
from megarl.buffer.store.journal import NOTHING_USED, UnusedGroup, Used, UsedGroup
from megarl.buffer.store.late import AwaitingReward, GivenReward, Rewarded
from megarl.buffer.store.selection import Glance, GroupPlace, NewestGroups, Selection, StoredGroup
from megarl.buffer.store.store import Store

__all__ = [
    "AwaitingReward",
    "NOTHING_USED",
    "OWN_SERVER",
    "PART_BYTES",
    "VARIABLE",
    "Claim",
    "EndedGroup",
    "EngineRoom",
    "ExpertExperience",
    "GivenReward",
    "Glance",
    "GroupPlace",
    "ImportedSource",
    "NewestGroups",
    "OutlineRow",
    "Rewarded",
    "Selection",
    "Store",
    "StoredGroup",
    "UnusedGroup",
    "Used",
    "UsedGroup",
    "check_url",
    "is_outline",
    "outlines_of",
    "sqlite_file",
    "with_arrays",
]
