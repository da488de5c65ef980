"""Settings of Dynamo 1.5.1 that change what it does, and that nothing here obeys yet.

Who sets one is told, so that nobody takes a default for what was asked for: a variable is a
warning, since it may be there for other processes of a fleet, and a flag is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dynamo_trio.config.option import Group, flag_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

_FRONTEND: Final = """
    DYN_CHAT_PROCESSOR DYN_ENABLE_ANTHROPIC_API
    DYN_ENABLE_STREAMING_REASONING_DISPATCH DYN_ENABLE_STREAMING_TOOL_DISPATCH
    DYN_ENFORCE_DISAGG DYN_FRONTEND_ROUTE_EXTENSIONS DYN_GRPC_METRICS_PORT
    DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS
    DYN_HTTP_SVC_ANTHROPIC_PATH DYN_HTTP_SVC_BATCHES_PATH DYN_HTTP_SVC_CLASSIFY_PATH
    DYN_HTTP_SVC_EMB_PATH DYN_HTTP_SVC_FILES_PATH DYN_HTTP_SVC_POOLING_PATH
    DYN_HTTP_SVC_RESPONSES_PATH DYN_KSERVE_GRPC_SERVER DYN_KV_CACHE_BLOCK_SIZE
    DYN_METRICS_EMBEDDING_LATENCY_COUNT DYN_METRICS_EMBEDDING_LATENCY_MAX
    DYN_METRICS_EMBEDDING_LATENCY_MIN
    DYN_METRICS_INPUT_SEQUENCE_COUNT DYN_METRICS_INPUT_SEQUENCE_MAX DYN_METRICS_INPUT_SEQUENCE_MIN
    DYN_METRICS_ITL_COUNT DYN_METRICS_ITL_MAX DYN_METRICS_ITL_MIN
    DYN_METRICS_OUTPUT_SEQUENCE_COUNT DYN_METRICS_OUTPUT_SEQUENCE_MAX
    DYN_METRICS_OUTPUT_SEQUENCE_MIN
    DYN_METRICS_REQUEST_DURATION_COUNT DYN_METRICS_REQUEST_DURATION_MAX
    DYN_METRICS_REQUEST_DURATION_MIN
    DYN_METRICS_TTFT_COUNT DYN_METRICS_TTFT_MAX DYN_METRICS_TTFT_MIN
    DYN_MIGRATION_MAX_SEQ_LEN DYN_NAMESPACE_PREFIX DYN_REASONING_FIELD_NAME
    DYN_SERVE_INDEXER DYN_STRIP_ANTHROPIC_PREAMBLE
    DYN_TOKENIZER DYN_TRUST_REMOTE_CODE DYN_USE_REMOTE_INDEXER
"""
_WORKER: Final = """
    DYN_CONNECTOR DYN_CUSTOM_JINJA_TEMPLATE DYN_DISAGGREGATION_MODE
    DYN_KV_STATE_ENDPOINT
    DYN_NAMESPACE_WORKER_SUFFIX DYN_OUTPUT_MODALITIES DYN_PREFILL_DRAIN_TIMEOUT_S
    DYN_REASONING_PARSER DYN_STABLE_ROUTING_ID DYN_TCP_WORKER_POOL_SIZE DYN_TCP_WORK_QUEUE_SIZE
    DYN_TOOL_CALL_PARSER
"""
_EVERYWHERE: Final = "DYN_LOGGING_CONFIG_PATH DYN_REQUEST_TRACE_SINKS DYN_AUDIT_SINKS"

#: Variable -> a program that takes this group would obey it.
VARIABLES: Final[Mapping[str, Group]] = {
    **dict.fromkeys(_FRONTEND.split(), Group.HTTP),
    **dict.fromkeys(_WORKER.split(), Group.STATUS),
    **dict.fromkeys(_EVERYWHERE.split(), Group.LOG),
}
#: Variables that begin so, but for those that are obeyed: settings of KV routing.
ROUTER: Final = "DYN_ROUTER_"
FLAGS: Final = frozenset(
    {
        *(flag_of(name) for name in VARIABLES),
        *("--dump-config-to", "--dyn-chat-processor", "--dyn-reasoning-parser"),
        *("--dyn-tool-call-parser", "--frontend-route-extension", "--interactive"),
    }
)
#: What asks for nothing.
_OFF: Final = frozenset({"", "0", "false", "no", "off", "none"})


def is_later(flag: str) -> bool:
    """Is it a flag of Dynamo that is not there yet?"""
    return flag in FLAGS or flag.startswith(flag_of(ROUTER))


def warnings(
    environ: Mapping[str, str], groups: Collection[Group], known: Collection[str | None]
) -> Iterator[str]:
    """A warning for each variable that a program with ``groups`` should obey, and does not."""
    for name in sorted(environ):
        group = Group.ROUTING if name.startswith(ROUTER) else VARIABLES.get(name)
        if group in groups and name not in known and environ[name].strip().lower() not in _OFF:
            yield f"{name}: not there yet; it is ignored"
