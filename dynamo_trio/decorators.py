"""The decorators of ``dynamo.runtime``, for programs that are ported from it."""

from __future__ import annotations

import inspect
from contextlib import aclosing
from functools import wraps
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_trio.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from dynamo_trio.endpoint import Handler


def dynamo_endpoint(request_model: type, response_model: type) -> Callable[[Handler], Handler]:
    """Give the handler its request as a ``request_model``.

    That is a class of attrs, msgspec, dataclasses or pydantic; ``str`` and other plain types are
    handed on as they came. Works on ``(request)``, ``(request, context)`` and methods. A request
    that does not fit raises :exc:`~dynamo_trio.errors.InvalidArgument` at the client.
    ``response_model`` is for the reader only, as in Dynamo. Code that is not ported has it
    simpler with ``serving(handler, request_type=...)``.
    """
    del response_model
    convert = _converter(request_model)

    def decorate(handler: Handler) -> Handler:
        before = int(next(iter(inspect.signature(handler).parameters)) == "self")

        @wraps(handler)
        async def parsed(*args: Any) -> AsyncGenerator[Any, None]:
            rest = args[before + 1 :]
            async with aclosing(handler(*args[:before], convert(args[before]), *rest)) as items:
                async for item in items:
                    yield item

        return parsed

    return decorate


def _converter(model: type) -> Callable[[object], object]:
    validate = getattr(model, "model_validate", None)  # pydantic's
    if validate is None:
        return lambda value: _convert(value, model)
    return lambda value: _validated(validate, value)


def _convert(value: object, model: type) -> object:
    try:
        return msgspec.convert(value, model)
    except msgspec.ValidationError as exc:
        raise InvalidArgument(f"the request is no {model.__name__}: {exc}") from None


def _validated(validate: Callable[[object], object], value: object) -> object:
    try:
        return validate(value)
    except ValueError as exc:  # pydantic's ValidationError is one
        raise InvalidArgument(f"the request is not valid: {exc}") from None
