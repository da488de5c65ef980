"""What workers tell of their KV caches and their load, and what others know by that.

:func:`open_kv_publisher` and :func:`open_load_publisher` tell, for an engine of any kind;
:func:`publish_engine` does both for one of :mod:`dynamo_trio.engines`. :func:`follow_fleet`
listens. Messages, records and the query are Dynamo's, so either side may be NVIDIA's.
"""

from dynamo_trio.kv.engine import publish_engine as publish_engine
from dynamo_trio.kv.fleet import FollowSettings as FollowSettings
from dynamo_trio.kv.fleet import KvFleet as KvFleet
from dynamo_trio.kv.fleet import follow_fleet as follow_fleet
from dynamo_trio.kv.load import LoadPublisher as LoadPublisher
from dynamo_trio.kv.load import open_load_publisher as open_load_publisher
from dynamo_trio.kv.publisher import KvPublisher as KvPublisher
from dynamo_trio.kv.publisher import open_kv_publisher as open_kv_publisher
from dynamo_trio.wire.dynamo.kv_events import Block as Block
from dynamo_trio.wire.dynamo.kv_events import Cleared as Cleared
from dynamo_trio.wire.dynamo.kv_events import Removed as Removed
from dynamo_trio.wire.dynamo.kv_events import Stored as Stored
