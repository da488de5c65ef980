"""The programs, and the settings that each of them takes."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from attrs import frozen

from dynamo_trio.config.config import Config
from dynamo_trio.config.option import Group

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_EVERYWHERE = (Group.PROGRAM, Group.STOP, Group.LOG)
_NETWORK = (Group.DISCOVERY, Group.REQUEST_PLANE, Group.TLS)
_WORKER = (Group.STOP_WORKER, Group.MODEL, Group.ENDPOINT, Group.ENGINE, Group.SIM)
_SERVES = (Group.SERVE, Group.STATUS, Group.CANARY)
_FRONTEND = (Group.HTTP, Group.STOP_FRONTEND)


@frozen(kw_only=True)
class ProgramSpec:
    """One ``python -m`` program."""

    #: What stands behind ``python -m``.
    module: str
    description: str
    groups: frozenset[Group]
    #: Field -> default, where it differs from that of the table.
    defaults: Mapping[str, object] = MappingProxyType({})

    @property
    def command(self) -> str:
        return f"python -m {self.module}"

    def read_config(self, argv: Sequence[str] | None = None) -> Config:
        """The configuration, from this process's variables and flags, or those in ``argv``.

        Raises:
            ConfigError: as :meth:`Config.from_args_and_env`.
        """
        return Config.from_args_and_env(
            argv,
            groups=self.groups,
            prog=self.command,
            description=self.description,
            defaults=self.defaults,
        )


STANDALONE = ProgramSpec(
    module="dynamo_trio",
    description="Serve a model with an OpenAI-compatible HTTP frontend, router and worker in one"
    " process.",
    groups=frozenset({*_EVERYWHERE, Group.ASK, *_FRONTEND, *_WORKER}),
)
FRONTEND = ProgramSpec(
    module="dynamo_trio.frontend",
    description="An OpenAI-compatible HTTP frontend for the workers that discovery shows.",
    groups=frozenset({*_EVERYWHERE, *_NETWORK, *_FRONTEND, Group.ROUTING, Group.MODEL}),
    # As in Dynamo: a frontend is there for others.
    defaults=MappingProxyType({"http_host": "0.0.0.0"}),
)
WORKER = ProgramSpec(
    module="dynamo_trio.worker",
    description="Serve a model to the frontends that discovery shows it to, Dynamo's among them.",
    groups=frozenset({*_EVERYWHERE, *_NETWORK, *_WORKER, *_SERVES}),
)
#: A program of somebody else's that serves endpoints.
LIBRARY = ProgramSpec(
    module="dynamo_trio.worker",
    description="",
    groups=frozenset({Group.STOP, Group.STOP_WORKER, *_NETWORK, *_SERVES, Group.LOG}),
)
PROGRAMS = (STANDALONE, FRONTEND, WORKER)
