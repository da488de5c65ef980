"""Canary health checks: does an endpoint still answer?"""

from dynamo_trio.health.canary import Canary, CanarySettings, watched
from dynamo_trio.health.payload import HEALTH_CHECK_KEY, is_probe, marked, read_payload
from dynamo_trio.health.standing import Standing

__all__ = [
    "HEALTH_CHECK_KEY",
    "Canary",
    "CanarySettings",
    "Standing",
    "is_probe",
    "marked",
    "read_payload",
    "watched",
]
