"""What no single setting can say: which of them need each other, and which change nothing yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dynamo_trio.config.option import AnyOption

#: (field, what it is useless without).
NEEDS = (
    ("etcd_username", "etcd_password"),
    ("etcd_password", "etcd_username"),
    ("etcd_client_cert", "etcd_client_key"),
    ("etcd_client_key", "etcd_client_cert"),
    ("tcp_tls_cert", "tcp_tls_key"),
    ("tcp_tls_key", "tcp_tls_cert"),
    ("tcp_tls_client_ca", "tcp_tls_cert"),
    ("tcp_tls_client_cert", "tcp_tls_client_key"),
    ("tcp_tls_client_key", "tcp_tls_client_cert"),
)


def contradictions(values: Mapping[str, object], options: Mapping[str, AnyOption]) -> Iterator[str]:
    """What is wrong with values that are right one by one. A value that is missing was wrong."""
    for name, needed in NEEDS:
        if values.get(name) is not None and needed in values and values[needed] is None:
            yield f"{options[name].env}: needs {options[needed].env} ({options[needed].flag}) too"
    paths = [values.get(name) for name in ("system_health_path", "system_live_path")]
    if paths[0] is not None and paths[0] == paths[1]:
        yield (
            f"DYN_SYSTEM_HEALTH_PATH and DYN_SYSTEM_LIVE_PATH are both {paths[0]}:"
            " they must differ, for only one of them is 503 while the worker stops"
        )


def without_effect(values: Mapping[str, object], sources: Mapping[str, str]) -> Iterator[str]:
    """Warnings of settings that ask for what is not there yet."""
    if values.get("migration_limit"):
        yield (
            f"{sources['migration_limit']}={values['migration_limit']}: migration is not there yet;"
            " a request whose worker fails ends with an error"
        )
