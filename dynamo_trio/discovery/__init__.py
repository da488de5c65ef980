"""How processes find each other: records, the interface, and the backends behind it."""

from dynamo_trio.discovery.abc import Change as Change
from dynamo_trio.discovery.abc import Discovery as Discovery
from dynamo_trio.discovery.abc import Put as Put
from dynamo_trio.discovery.abc import Removed as Removed
from dynamo_trio.discovery.abc import Watch as Watch
from dynamo_trio.discovery.file import FileSettings as FileSettings
from dynamo_trio.discovery.file import open_file_discovery as open_file_discovery
from dynamo_trio.discovery.memory import MemoryDiscovery as MemoryDiscovery
from dynamo_trio.discovery.records import EventChannel as EventChannel
from dynamo_trio.discovery.records import EventSource as EventSource
from dynamo_trio.discovery.records import Instance as Instance
from dynamo_trio.discovery.records import ModelCard as ModelCard
from dynamo_trio.discovery.records import Record as Record
from dynamo_trio.wire.names import EndpointId as EndpointId
