"""The stop of a process: phases, deadlines, admissions, and the report about them.

The only package that knows a shutdown deadline. It does no I/O and knows no signal;
:mod:`dynamo_trio.process` brings those.
"""

from __future__ import annotations

from dynamo_trio.lifecycle.admission import Admission as Admission
from dynamo_trio.lifecycle.admission import CutReason as CutReason
from dynamo_trio.lifecycle.admission import Gate as Gate
from dynamo_trio.lifecycle.admission import GateStage as GateStage
from dynamo_trio.lifecycle.admission import Outcome as Outcome
from dynamo_trio.lifecycle.hooks import Hook as Hook
from dynamo_trio.lifecycle.hooks import Hooks as Hooks
from dynamo_trio.lifecycle.hooks import Settable as Settable
from dynamo_trio.lifecycle.journal import Stage as Stage
from dynamo_trio.lifecycle.lifecycle import Lifecycle as Lifecycle
from dynamo_trio.lifecycle.phases import MOVES as MOVES
from dynamo_trio.lifecycle.phases import Ending as Ending
from dynamo_trio.lifecycle.phases import Move as Move
from dynamo_trio.lifecycle.phases import Phase as Phase
from dynamo_trio.lifecycle.phases import diagram as diagram
from dynamo_trio.lifecycle.prospects import Peer as Peer
from dynamo_trio.lifecycle.prospects import Prospects as Prospects
from dynamo_trio.lifecycle.report import ShutdownReport as ShutdownReport
from dynamo_trio.lifecycle.reversible import DrainState as DrainState
from dynamo_trio.lifecycle.reversible import ReversibleDrain as ReversibleDrain
from dynamo_trio.lifecycle.timetable import DrainPolicy as DrainPolicy
from dynamo_trio.lifecycle.timetable import GraceMode as GraceMode
from dynamo_trio.lifecycle.timetable import Timetable as Timetable

__all__ = [
    "MOVES",
    "Admission",
    "CutReason",
    "DrainPolicy",
    "DrainState",
    "Ending",
    "Gate",
    "GateStage",
    "GraceMode",
    "Hook",
    "Hooks",
    "Lifecycle",
    "Move",
    "Outcome",
    "Peer",
    "Phase",
    "Prospects",
    "ReversibleDrain",
    "ShutdownReport",
    "Stage",
    "Timetable",
    "diagram",
]
