"""Which path leads to what: the table of a frontend's HTTP routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.config.checks import BUSY_THRESHOLD, REALTIME
from dynamo_trio.errors import MethodNotAllowed, NotSupported, RouteNotFound, UpgradeRequired
from dynamo_trio.frontend import metrics
from dynamo_trio.frontend.busy_threshold import change_thresholds, show_thresholds
from dynamo_trio.frontend.generate import Kind, generate
from dynamo_trio.frontend.health import LIVE, health
from dynamo_trio.frontend.state import Frontend, HttpCall
from dynamo_trio.http.respond import send_bytes, send_json
from dynamo_trio.wire.openai.response import ModelEntry, model_entry, models_list

if TYPE_CHECKING:
    from dynamo_trio.frontend.catalog import ServedModel
    from dynamo_trio.frontend.paths import Paths

Route = Callable[[Frontend, HttpCall], Awaitable[None]]
#: HTTP method -> what serves it. GET serves HEAD, too.
Methods = Mapping[str, Route]

#: Characters of a path that an error repeats.
SHOWN = 200


@attrs.frozen(eq=False)
class Routes:
    """The routes of one frontend, at the paths that its settings name."""

    paths: Paths
    _table: dict[str, Methods] = attrs.field(init=False)
    #: Path -> Dynamo's metric label "endpoint".
    _counted: dict[str, str] = attrs.field(init=False)

    @_table.default
    def _table_default(self) -> dict[str, Methods]:
        return {
            self.paths.health: {"GET": _health},
            self.paths.live: {"GET": _live},
            self.paths.metrics: {"GET": _metrics},
            self.paths.models: {"GET": _models},
            self.paths.chat: {"POST": partial(generate, Kind.CHAT)},
            self.paths.completions: {"POST": partial(generate, Kind.COMPLETION)},
            BUSY_THRESHOLD: {"GET": show_thresholds, "POST": change_thresholds},
        }

    @_counted.default
    def _counted_default(self) -> dict[str, str]:
        return {
            self.paths.chat: Kind.CHAT.label,
            self.paths.completions: Kind.COMPLETION.label,
        }

    def label(self, path: str) -> str:
        """Dynamo's metric label "endpoint"; empty for what is not counted."""
        return self._counted.get(path, "")

    def methods(self, path: str) -> Methods | None:
        """What there is at this path, if anything."""
        found = self._table.get(path)
        if found is None and self.paths.model_name(path) is not None:
            return {"GET": _model}
        return found

    def find(self, method: str, path: str) -> Route:
        """What serves this request.

        Raises:
            RouteNotFound, UpgradeRequired, NotSupported, MethodNotAllowed: nothing does.
        """
        methods, shown = self.methods(path), path[:SHOWN]
        if path == REALTIME:
            raise UpgradeRequired(f"{shown} is for WebSockets.")
        if methods is None and self.paths.is_later(path):
            raise NotSupported(f"{shown} is not supported here yet.")
        if methods is None:
            raise RouteNotFound(f"There is no {method[:SHOWN]} {shown} here.")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = ", ".join(methods)
            raise MethodNotAllowed(
                f"{shown} takes {allowed}, not {method[:SHOWN]}.", methods=tuple(methods)
            )
        return route


# --- routes -----------------------------------------------------------------------------


async def _health(frontend: Frontend, call: HttpCall) -> None:
    instances = [
        instance for model in frontend.catalog.models() for instance in model.client.instances()
    ]
    status, body = health(frontend.stage, instances)
    await send_json(call.scope, call.send, status, body, limits=frontend.limits)


async def _live(frontend: Frontend, call: HttpCall) -> None:
    await send_json(call.scope, call.send, 200, LIVE, limits=frontend.limits)


async def _metrics(frontend: Frontend, call: HttpCall) -> None:
    text = frontend.metrics.exposition()
    await send_bytes(call.scope, call.send, 200, text, metrics.CONTENT_TYPE)


async def _models(frontend: Frontend, call: HttpCall) -> None:
    body = models_list([_entry(model) for model in frontend.catalog.models()])
    headers = call.response_headers()
    await send_json(call.scope, call.send, 200, body, headers, limits=frontend.limits)


async def _model(frontend: Frontend, call: HttpCall) -> None:
    name = frontend.paths.model_name(call.scope["path"]) or ""
    body = model_entry(_entry(frontend.find(name)))
    headers = call.response_headers()
    await send_json(call.scope, call.send, 200, body, headers, limits=frontend.limits)


def _entry(model: ServedModel) -> ModelEntry:
    return ModelEntry(model.name, model.created, model.context_length or None)
