"""Settings of discovery: where processes register, and find each other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs

from dynamo_trio.config.names import UrlsRule
from dynamo_trio.config.option import Group, option, optional
from dynamo_trio.config.rules import Choice, FilePath, Integer, Secret, Text

if TYPE_CHECKING:
    from collections.abc import Mapping

DiscoveryBackend = Literal["etcd", "file", "mem"]


def default_file_kv(environ: Mapping[str, str]) -> Path:
    """Where Dynamo keeps the store of its file backend."""
    return Path(environ.get("TMPDIR") or "/tmp", "dynamo_store_kv")


@attrs.frozen(kw_only=True, slots=False)
class DiscoveryTable:
    """The store, and the way to it."""

    discovery_backend: DiscoveryBackend = option(
        "etcd",
        Choice[DiscoveryBackend](
            ("etcd", "file", "mem"),
            refused={
                "kubernetes": "discovery through Kubernetes is not there yet; etcd and file are"
            },
        ),
        group=Group.DISCOVERY,
        env="DYN_DISCOVERY_BACKEND",
        help="The store in which processes find each other: etcd, a folder that they share, or"
        " the process's own memory, which nobody else sees.",
    )
    file_kv: Path = option(
        default_file_kv(os.environ),
        FilePath(metavar="FOLDER"),
        group=Group.DISCOVERY,
        env="DYN_FILE_KV",
        derive=default_file_kv,
        derived_text="dynamo_store_kv in TMPDIR, or in /tmp",
        help="Folder of the file backend.",
    )
    etcd_endpoints: tuple[str, ...] = option(
        ("http://localhost:2379",),
        UrlsRule(),
        group=Group.DISCOVERY,
        env="ETCD_ENDPOINTS",
        help="Members of the etcd cluster, tried in turn.",
    )
    etcd_lease_ttl: int = option(
        10,
        Integer(2, 86_400, unit="s"),
        group=Group.DISCOVERY,
        env="ETCD_LEASE_TTL",
        help="Time after which the registrations of a process that is dead or cut off expire.",
    )
    etcd_username: str | None = optional(
        Text(metavar="NAME"),
        group=Group.DISCOVERY,
        env="ETCD_AUTH_USERNAME",
        help="User of the etcd cluster, with ETCD_AUTH_PASSWORD.",
    )
    etcd_password: str | None = optional(
        Secret(),
        group=Group.DISCOVERY,
        env="ETCD_AUTH_PASSWORD",
        help="Password of that user. Prefer the variable: a command line can be read by others.",
    )
    etcd_ca: Path | None = optional(
        FilePath(metavar="FILE.pem"),
        group=Group.DISCOVERY,
        env="ETCD_AUTH_CA",
        help="Certificates that an https etcd endpoint is checked against; without it, the"
        " system's.",
    )
    etcd_client_cert: Path | None = optional(
        FilePath(metavar="FILE.pem"),
        group=Group.DISCOVERY,
        env="ETCD_AUTH_CLIENT_CERT",
        help="Certificate that this process shows to etcd, with ETCD_AUTH_CLIENT_KEY.",
    )
    etcd_client_key: Path | None = optional(
        FilePath(metavar="FILE.pem"),
        group=Group.DISCOVERY,
        env="ETCD_AUTH_CLIENT_KEY",
        help="Private key of that certificate.",
    )
