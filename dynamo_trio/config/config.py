"""The configuration of a process: one frozen object, checked once, made from flags and variables.

The settings themselves stand in :mod:`dynamo_trio.config.tables`. Names that begin with
``DYN_TRIO_`` are ours, every other one is NVIDIA Dynamo's and means what it means there. Nothing
else in the package reads the environment.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

import attrs

from dynamo_trio.config import checks, later, load
from dynamo_trio.config.option import Group, options_of
from dynamo_trio.config.tables.access import AccessTable
from dynamo_trio.config.tables.admission import AdmissionTable
from dynamo_trio.config.tables.canary import CanaryTable
from dynamo_trio.config.tables.discovery import DiscoveryTable
from dynamo_trio.config.tables.front import FrontTable
from dynamo_trio.config.tables.http import HttpServerTable
from dynamo_trio.config.tables.model import ModelTable
from dynamo_trio.config.tables.observe import ObserveTable
from dynamo_trio.config.tables.program import AskTable, ProgramTable
from dynamo_trio.config.tables.request_plane import RequestPlaneTable
from dynamo_trio.config.tables.status import StatusTable
from dynamo_trio.config.tables.stop import KILL_MARGIN, StopTable
from dynamo_trio.wire.names import EndpointId

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

DEFAULT_NAMESPACE = "dynamo"


@attrs.frozen(kw_only=True, slots=False)
class Config(
    ObserveTable,
    ProgramTable,
    AskTable,
    FrontTable,
    HttpServerTable,
    AccessTable,
    AdmissionTable,
    DiscoveryTable,
    RequestPlaneTable,
    StatusTable,
    CanaryTable,
    StopTable,
    ModelTable,
):
    """All settings of a process. Times are seconds, floats; 0 means at once; None means not set.

    Raises ValueError when a field breaks its rule; :meth:`from_args_and_env` raises
    :exc:`~dynamo_trio.errors.ConfigError` instead and names the flag or variable.
    """

    #: Field name -> the flag or variable that it came from; a field with its default is absent.
    sources: Mapping[str, str] = attrs.field(
        factory=lambda: MappingProxyType({}), eq=False, repr=False
    )
    #: What is odd but no error, to be logged once logging stands.
    warnings: tuple[str, ...] = attrs.field(default=(), eq=False, repr=False)

    @classmethod
    def report_path(cls, environ: Mapping[str, str] | None = None) -> Path | None:
        """``DYN_TRIO_SHUTDOWN_REPORT`` alone: where to report that other settings are wrong."""
        environ = os.environ if environ is None else environ
        option = options_of(cls)["shutdown_report"]
        text = environ.get(option.env or "")
        return Path(text) if text else None

    @classmethod
    def from_args_and_env(
        cls,
        argv: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
        *,
        groups: Collection[Group] = tuple(Group),
        prog: str = "python -m dynamo_trio",
        description: str = "",
        defaults: Mapping[str, object] = MappingProxyType({}),
    ) -> Self:
        """Read flags and variables of ``groups``; a flag wins over its variable.

        ``argv`` and ``environ`` are the process's own by default; ``defaults`` are those in
        which a program differs, by field. Raises ConfigError that names all that is wrong: each
        flag or variable, its value and its rule. ``--help`` and ``--version`` print and raise
        SystemExit(0).
        """
        argv = sys.argv[1:] if argv is None else argv
        environ = os.environ if environ is None else environ
        options = {
            name: attrs.evolve(o, default=defaults[name]) if name in defaults else o
            for name, o in options_of(cls).items()
        }
        chosen = {name: o for name, o in options.items() if o.group in groups}
        reading = load.read(chosen, argv, environ, prog=prog, description=description)
        reading.problems.extend(checks.contradictions(reading.values, options))
        reading.problems.extend(checks.colliding(reading.values, options))
        reading.problems.extend(checks.too_small(reading.values, reading.sources))
        reading.raise_problems()
        rest = {n: o.initial(environ) for n, o in options.items() if n not in chosen}
        return cls(
            **reading.values,  # type: ignore[arg-type]  # the rules made and checked them
            **rest,  # type: ignore[arg-type]  # defaults of the table above
            sources=MappingProxyType(reading.sources),
            warnings=(
                *load.unknown_variables(environ, options),
                *later.warnings(environ, groups, {o.env for o in options.values()}),
                *checks.overruled(reading.values, reading.sources),
                *checks.without_effect(reading.values, reading.sources),
            ),
        )

    @property
    def endpoint_name(self) -> EndpointId:
        """The worker's endpoint in full."""
        return self.endpoint or EndpointId(
            self.namespace or DEFAULT_NAMESPACE, "backend", "generate"
        )

    @property
    def body_limit(self) -> int:
        """Largest request body in bytes."""
        return self.body_limit_mb * 1024 * 1024

    @property
    def body_total(self) -> int:
        """All request bodies that are being read at once, in bytes; one always has room."""
        return max(self.http_body_total_mb, self.body_limit_mb) * 1024 * 1024

    @property
    def worker_budget(self) -> float | None:
        """All of a worker's stop, in seconds from the signal; None without a limit."""
        if self.worker_total is not None:
            return self.worker_total
        return self._common_budget(self.grace)

    @property
    def frontend_budget(self) -> float | None:
        """All of a frontend's stop, in seconds from the signal; None without a limit."""
        if self.frontend_total is not None:
            return self.frontend_total
        return self._common_budget(0.0)

    @property
    def standalone_budget(self) -> float | None:
        """All of the stop when frontend and worker are one process, which has no grace period."""
        totals = [t for t in (self.frontend_total, self.worker_total) if t is not None]
        return min(totals) if totals else self._common_budget(0.0)

    def _common_budget(self, grace: float) -> float | None:
        if self.graceful_total is not None:
            return self.graceful_total + grace
        if self.termination_grace is not None:
            return self.termination_grace - KILL_MARGIN
        return None
