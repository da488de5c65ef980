"""The waiting line against the plain list that it stands for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.engines import Request
from dynamo_trio.engines.waiting import WaitingLine

operations = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 3)),
        st.tuples(st.just("pop"), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 30)),
    ),
    max_size=60,
)


@given(operations)
def test_it_serves_by_priority_then_arrival_whoever_leaves(
    operations: list[tuple[str, int]],
) -> None:
    line = WaitingLine()
    model: list[Request] = []
    for number, (operation, value) in enumerate(operations):
        if operation == "push":
            request = Request(request_id=str(number % 20), token_ids=(1,), priority=value)
            if any(other.request_id == request.request_id for other in model):
                continue
            line.push(request)
            model.append(request)
            model.sort(key=lambda request: request.priority)
        elif operation == "pop" and model:
            assert line.pop() is model.pop(0)
        elif operation == "remove":
            waits = [request for request in model if request.request_id == str(value)]
            assert line.remove(str(value)) == bool(waits)
            model = [request for request in model if request not in waits]
        assert len(line) == len(model)
        assert line.peek() is (model[0] if model else None)


def test_nobody_can_be_taken_from_an_empty_line() -> None:
    with pytest.raises(IndexError):
        WaitingLine().pop()
