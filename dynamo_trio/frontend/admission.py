"""Where a request is admitted: the gate of the drain, the limits, and who is busy.

What is refused here has cost nothing yet: its prompt is not even tokenised. A request of any
kind goes through :func:`admit`, so that all of them count together.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.console.logs import request_id
from dynamo_trio.errors import Overloaded
from dynamo_trio.frontend.placement import Placement
from dynamo_trio.frontend.trace import note_outcome

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from dynamo_trio.frontend.keeper import ServedModel
    from dynamo_trio.frontend.metrics import Counted, RequestRecord
    from dynamo_trio.frontend.state import Frontend
    from dynamo_trio.lifecycle import Admission
    from dynamo_trio.plane import RequestHead


@attrs.define(eq=False)
class Slots:
    """Requests that may run at once; one more is refused, none waits."""

    #: Of all models together (``DYN_TRIO_MAX_CONCURRENT_REQUESTS``).
    most: float = math.inf
    #: Of each model (``DYN_TRIO_MAX_CONCURRENT_REQUESTS_PER_MODEL``).
    most_per_model: float = math.inf
    #: Requests that run now, by model. Invariant: no entry is 0.
    running: Counter[str] = attrs.field(factory=Counter)
    _total: int = 0

    def check(self, model: str) -> None:
        """Refuse a request that there is no room for.

        Raises:
            Overloaded: as many run as may.
        """
        if self._total >= self.most:
            raise Overloaded(f"The server is full (requests at once: {self.most:g}).")
        if self.running[model] >= self.most_per_model:
            limit = f"requests at once: {self.most_per_model:g}"
            raise Overloaded(f"The server is full for this model ({limit}).")

    def take(self, model: str) -> None:
        """Count a request in."""
        self._total += 1
        self.running[model] += 1

    def give_back(self, model: str) -> None:
        """It has ended."""
        self._total -= 1
        self.running[model] -= 1
        if not self.running[model]:
            del self.running[model]


@attrs.frozen(eq=False)
class Admitted:
    """A request that was admitted."""

    frontend: Frontend
    model: ServedModel
    admission: Admission
    record: RequestRecord

    def place(self, head: RequestHead, deadline: float | None = None) -> Placement:
        """What sends it to workers, under the request id of ``head``, one after the other.

        They are told of ``deadline``, on Trio's clock; None: of that of the cancel scopes around.
        The current task's log lines carry that id from now on, as those of the workers do.
        """
        request_id.set(head.request_id)
        return Placement(self.frontend, self.model, head, deadline)


def admit(
    frontend: Frontend,
    model: ServedModel,
    *,
    endpoint: str,
    request_type: str,
    request_id: str,
    deadline: float = math.inf,
) -> Admitting:
    """Count one request in while the block runs, its farewell included.

    Args:
        endpoint: Dynamo's metric label, and the name in the shutdown report.
        request_type: Dynamo's metric label, ``stream`` or ``unary``.
        request_id: the name in the shutdown report, behind ``endpoint``.
        deadline: when it is cut, on Trio's clock.

    Raises:
        Draining: on entering: the process takes no new requests.
        Overloaded: the same: a limit is reached, or every worker of the model is busy.
    """
    return Admitting(
        frontend,
        model,
        frontend.lifecycle.http.admit(f"{endpoint} {request_id}"),
        frontend.metrics.request(model.name, endpoint, request_type),
        deadline,
    )


@attrs.define(eq=False)
class Admitting:
    """See :func:`admit`. A class, and no generator, since it is for every request."""

    _frontend: Frontend
    _model: ServedModel
    _inside: AbstractContextManager[Admission, None]
    _counted: Counted
    _deadline: float
    _record: RequestRecord = attrs.field(init=False)

    def __enter__(self) -> Admitted:
        frontend, model = self._frontend, self._model
        if frontend.lifecycle.http.is_open:  # else the gate says why not
            frontend.slots.check(model.name)
            frontend.busy.check(model)
        admission = self._inside.__enter__()
        # None of these raises, so everything that is entered here is left below.
        frontend.slots.take(model.name)
        self._record = self._counted.__enter__()
        admission.end_at(self._deadline)
        return Admitted(frontend, model, admission, self._record)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            note_outcome(self._record)
            self._counted.__exit__(kind, value, trace)
        finally:
            self._frontend.slots.give_back(self._model.name)
            self._inside.__exit__(kind, value, trace)
