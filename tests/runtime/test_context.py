"""What a context is made from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dynamo_trio import Context, open_runtime
from dynamo_trio.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


def test_without_an_id_it_gets_one() -> None:
    ids = {Context().id(), Context(None).id(), Context(id=None, metadata=None).id()}
    assert len(ids) == 3
    assert all(len(text) == 36 for text in ids)
    assert Context("a").id() == "a"


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, {"a": None}, [("a", "b")], "ab"])
def test_metadata_that_is_not_text(metadata: Any) -> None:
    with pytest.raises(InvalidArgument, match="metadata must be a mapping of text to text"):
        Context("a", metadata)


def test_an_id_that_is_not_text() -> None:
    number: Any = 5
    with pytest.raises(InvalidArgument, match="id must be text or None, not int"):
        Context(number)


def test_metadata_is_copied_and_cannot_be_changed() -> None:
    given = {"a": "b"}
    context: Any = Context("a", given)
    given["a"] = "c"
    assert context.metadata == context.child().metadata == {"a": "b"}
    with pytest.raises(TypeError):
        context.metadata["a"] = "c"


async def test_a_handler_reads_the_metadata_of_its_client() -> None:
    async def changing(request: object, context: Context) -> AsyncGenerator[object, None]:
        yield dict(context.metadata)
        seen: Any = context.metadata
        with pytest.raises(TypeError):
            seen["tenant"] = "other"

    async with open_runtime() as runtime:
        endpoint = runtime.endpoint("t.b.generate")
        async with endpoint.serving(changing), endpoint.client() as client:
            await client.wait_for_instances()
            async with client.generate(None, Context(None, {"tenant": "one"})) as stream:
                assert [item async for item in stream] == [{"tenant": "one"}]
