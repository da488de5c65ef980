"""Names that travel: endpoints."""

from __future__ import annotations

import attrs

from dynamo_trio.errors import InvalidArgument

_SCHEME = "dyn://"


@attrs.frozen
class EndpointId:
    """``namespace.component.endpoint``, as Dynamo names an endpoint."""

    namespace: str
    component: str
    name: str

    @classmethod
    def parse(cls, text: str) -> EndpointId:
        """Read ``ns.comp.ep`` or ``dyn://ns.comp.ep``.

        Raises:
            InvalidArgument: the text has not three non-empty parts.
        """
        parts = text.removeprefix(_SCHEME).split(".")
        if len(parts) != 3 or not all(parts):
            raise InvalidArgument(
                f"endpoint {text!r} must be 'namespace.component.endpoint' "
                "(optionally with 'dyn://' before it)",
                param="endpoint",
            )
        return cls(*parts)

    def __str__(self) -> str:
        return f"{_SCHEME}{self.namespace}.{self.component}.{self.name}"

    @property
    def path(self) -> str:
        """The key below a discovery bucket."""
        return f"{self.namespace}/{self.component}/{self.name}"
