"""What no single setting can say: which of them need each other, and which change nothing yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dynamo_trio.config.option import AnyOption

#: Paths of the frontend that cannot be moved.
REALTIME, BUSY_THRESHOLD = "/v1/realtime", "/busy_threshold"
#: Fields with paths that can, and the one below which every path is a model.
MOVABLE = (
    *("chat_path", "completions_path", "models_path"),
    *("metrics_path", "health_path", "live_path"),
)
MODELS = "models_path"

#: (field, what it is useless without).
NEEDS = (
    ("etcd_username", "etcd_password"),
    ("etcd_password", "etcd_username"),
    ("etcd_client_cert", "etcd_client_key"),
    ("etcd_client_key", "etcd_client_cert"),
    ("http_tls_cert", "http_tls_key"),
    ("http_tls_key", "http_tls_cert"),
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


def colliding(values: Mapping[str, object], options: Mapping[str, AnyOption]) -> Iterator[str]:
    """Paths of the frontend that are taken already."""
    taken = {REALTIME: "is there", BUSY_THRESHOLD: "is there"}
    moved = {name: path for name in MOVABLE if isinstance(path := values.get(name), str)}
    for name, path in moved.items():
        if path in taken:
            yield f"{options[name].env}={path!r}: must be a path of its own: this one {taken[path]}"
        taken.setdefault(path, f"is that of {options[name].env}")
    for path, what in taken.items():
        if MODELS in moved and path.startswith(f"{moved[MODELS]}/"):
            yield (
                f"{options[MODELS].env}={moved[MODELS]!r}: must be no part of another path, since"
                f" every path below it is a model's; {path} {what}"
            )


def too_small(values: Mapping[str, object], sources: Mapping[str, str]) -> Iterator[str]:
    """A limit of all that was set below the limit of one; the default is raised to that."""
    one, every = values.get("body_limit_mb"), values.get("http_body_total_mb")
    source = sources.get("http_body_total_mb")
    if source is not None and isinstance(one, int) and isinstance(every, int) and every < one:
        yield (
            f"{source}={every}: must be at least DYN_HTTP_BODY_LIMIT_MB ({one}),"
            " or a body of that size never has room"
        )


def overruled(values: Mapping[str, object], sources: Mapping[str, str]) -> Iterator[str]:
    """Warnings of limits that another one cuts short. 0 is no limit."""
    step, check = values.get("step_limit"), values.get("health_limit")
    if not {"step_limit", "health_limit"} <= sources.keys() or not values.get("health_interval"):
        return  # a check that has no limit of its own allows what a step may take
    if isinstance(step, float) and isinstance(check, float) and check and not 0 < step <= check:
        yield (
            f"{sources['step_limit']}={step:g}: an engine step that takes longer than"
            f" DYN_ENGINE_HEALTH_CHECK_TIMEOUT ({check:g} s) fails the health check before"
        )


def without_effect(values: Mapping[str, object], sources: Mapping[str, str]) -> Iterator[str]:
    """Warnings of settings that ask for what is not there yet."""
    if values.get("migration_limit"):
        yield (
            f"{sources['migration_limit']}={values['migration_limit']}: migration is not there yet;"
            " a request whose worker fails ends with an error"
        )
