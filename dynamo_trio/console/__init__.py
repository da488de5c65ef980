"""What a person sees: logs, progress, the start banner, what is still running."""

from dynamo_trio.console.banner import Banner as Banner
from dynamo_trio.console.banner import bound_to as bound_to
from dynamo_trio.console.banner import curl_line as curl_line
from dynamo_trio.console.banner import url_of as url_of
from dynamo_trio.console.inflight import InFlight as InFlight
from dynamo_trio.console.inflight import describe_inflight as describe_inflight
from dynamo_trio.console.logs import configure_logging as configure_logging
from dynamo_trio.console.logs import request_id as request_id
from dynamo_trio.console.progress import Progress as Progress
from dynamo_trio.console.progress import progress as progress
from dynamo_trio.console.stop_line import StopLine as StopLine
from dynamo_trio.console.terminal import Terminal as Terminal

__all__ = [
    "Banner",
    "InFlight",
    "Progress",
    "StopLine",
    "Terminal",
    "bound_to",
    "configure_logging",
    "curl_line",
    "describe_inflight",
    "progress",
    "request_id",
    "url_of",
]
