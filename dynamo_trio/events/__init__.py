"""The event plane: how events travel. What they say is :mod:`dynamo_trio.kv`'s.

The planes are imported when they are first used: ZeroMQ takes its time.
"""

from dynamo_trio.events.abc import EventPlane as EventPlane
from dynamo_trio.events.abc import Inlet as Inlet
from dynamo_trio.events.abc import Outlet as Outlet
from dynamo_trio.events.memory import MemoryEvents as MemoryEvents
