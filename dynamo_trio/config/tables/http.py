"""Settings of the HTTP server below the front: TLS, and what all clients together may hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from dynamo_trio.config.option import Group, option, optional
from dynamo_trio.config.rules import FilePath, Integer

if TYPE_CHECKING:
    from pathlib import Path

_PEM = FilePath(metavar="FILE.pem")


@attrs.frozen
class DescriptorsRule:
    """How many file descriptors to ask for, read as Dynamo reads it: any text is allowed."""

    text: str = "a whole number; 0, a negative one and what is no number leave the limit alone"
    unit: str = ""
    metavar: str = "N"

    def parse(self, text: str) -> int:
        try:
            return max(0, int(text))
        except ValueError:
            return 0

    def check(self, value: int) -> None:
        if value < 0:
            raise ValueError(value)

    def show(self, value: int) -> str:
        return str(value)


@attrs.frozen(kw_only=True, slots=False)
class HttpServerTable:
    """The HTTP server."""

    http_tls_cert: Path | None = optional(
        _PEM,
        group=Group.HTTP,
        env="DYN_TLS_CERT_PATH",
        help="Certificate of the HTTP port, with those of its authorities behind it; the port then"
        " speaks HTTPS, and nothing else.",
    )
    http_tls_key: Path | None = optional(
        _PEM,
        group=Group.HTTP,
        env="DYN_TLS_KEY_PATH",
        help="Private key of that certificate, without a password.",
    )
    http_body_total_mb: int = option(
        1024,
        Integer(1, 100_000_000, unit="MiB", metavar="MIB"),
        group=Group.HTTP,
        env="DYN_TRIO_HTTP_BODY_TOTAL_MB",
        help="All request bodies that are being read at once, but for the first 64 KiB of each"
        " connection; one for which there is no room is answered with 503. By default at least"
        " DYN_HTTP_BODY_LIMIT_MB.",
    )
    frontend_fd_limit: int | None = optional(
        DescriptorsRule(),
        group=Group.HTTP,
        env="DYN_FRONTEND_FD_LIMIT_TARGET",
        help="File descriptors to ask the system for, if it allows so few; without it, all that"
        " the hard limit allows. Each connection needs one, and each request on the tcp plane a"
        " second.",
    )
