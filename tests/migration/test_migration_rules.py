"""The rules of migration, one by one: what may move, how often, as what, and what is counted."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from msgspec import structs

import dynamo_trio.migration
from dynamo_trio import errors
from dynamo_trio.engines.registry import KINDS
from dynamo_trio.errors import (
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoException,
    EngineShutdown,
    InvalidArgument,
    LocalProtocolError,
    NotReplayable,
    NoWorker,
    Overloaded,
    StreamIncomplete,
    Unanswered,
    Unknown,
    UnreadableItem,
)
from dynamo_trio.migration import (
    DECLARED,
    OTHERS,
    Decision,
    Done,
    End,
    GoOn,
    Migration,
    MigrationLimits,
    MoveKind,
    MoveOutcome,
    Reason,
    Replay,
    is_planned,
    may_move,
    needs,
)
from dynamo_trio.wire.llm import (
    CompletionUsage,
    FinishError,
    LLMEngineOutput,
    OutputOptions,
    PreprocessedRequest,
    PromptTokensDetails,
    Routing,
    SamplingOptions,
    StopConditions,
)
from tests.migration.simulated import EVERYTHING

PROMPT = [1, 2, 3]
REQUEST = PreprocessedRequest(
    model="m",
    token_ids=PROMPT,
    stop_conditions=StopConditions(max_tokens=10, min_tokens=4, stop_token_ids_hidden=[99]),
    annotations=["a"],
    mdc_sum="abc",
    routing=Routing(priority=3),
)


def failing(
    request: PreprocessedRequest = REQUEST,
    tokens: int = 0,
    *,
    limit: int = 0,
    max_seq_len: int | None = None,
    touched: bool | None = None,
    declared: frozenset[Replay] = EVERYTHING,
) -> Migration:
    """A request that runs at instance 0, with so many tokens there, and fails in a moment."""
    machine = Migration(request, MigrationLimits(limit, max_seq_len), declared)
    machine.asks(0)
    machine.take(range(10, 10 + tokens))
    if tokens if touched is None else touched:
        machine.touch()
    return machine


def end_of(decision: Decision) -> End:
    assert isinstance(decision, End)
    return decision


def going_on(decision: Decision) -> GoOn:
    assert isinstance(decision, GoOn)
    return decision


def sampling(**options: object) -> PreprocessedRequest:
    return structs.replace(REQUEST, sampling_options=SamplingOptions(**options))  # type: ignore[arg-type]  # by name


# --- what the next worker gets -------------------------------------------------------------------


def test_the_next_worker_gets_the_delivered_tokens_and_nothing_else_is_changed() -> None:
    decision = going_on(failing(tokens=3, limit=1).ended(Disconnected()))
    (part,) = decision.parts
    assert part.request == structs.replace(
        REQUEST,
        token_ids=[*PROMPT, 10, 11, 12],
        stop_conditions=StopConditions(max_tokens=7, min_tokens=1, stop_token_ids_hidden=[99]),
    )
    assert decision.without == {0}
    assert not decision.afresh
    assert REQUEST.token_ids == PROMPT == [1, 2, 3]


def test_counts_do_not_fall_below_nothing_and_none_stays_none() -> None:
    (part,) = going_on(failing(tokens=6, limit=1).ended(Disconnected())).parts
    assert part.request.stop_conditions.min_tokens == 0
    free = structs.replace(REQUEST, stop_conditions=StopConditions())
    (part,) = going_on(failing(free, 6, limit=1).ended(Disconnected())).parts
    assert part.request.stop_conditions == StopConditions()


def test_all_that_moves_is_counted_from_the_first_worker_on() -> None:
    machine = failing(tokens=2, limit=5)
    machine.ended(Disconnected())
    machine.asks(1)
    machine.take([20])
    (part,) = going_on(machine.ended(Disconnected())).parts
    assert part.request.token_ids == [*PROMPT, 10, 11, 20]
    assert part.request.stop_conditions.max_tokens == 7


def test_each_choice_that_is_not_over_goes_on_as_a_request_of_its_own() -> None:
    machine = Migration(sampling(n=3, best_of=3, seed=7), MigrationLimits(1), EVERYTHING)
    machine.asks(0)
    machine.touch()
    machine.take([10], 0)
    machine.take([20, 21], 1)
    machine.finish(1)
    first, third = going_on(machine.ended(Disconnected())).parts
    assert (first.index, first.request.token_ids) == (0, [*PROMPT, 10])
    assert (third.index, third.request.token_ids) == (2, PROMPT)
    assert first.request.sampling_options == SamplingOptions(n=1, seed=7)
    assert third.request.sampling_options == SamplingOptions(n=1, seed=9)
    machine.asks(1)
    machine.finish(0)
    machine.finish(2)
    assert isinstance(machine.ended(None), Done)


def test_without_a_seed_no_choice_gets_one() -> None:
    machine = failing(sampling(n=2), 1, limit=1)
    assert all(
        part.request.sampling_options.seed is None
        for part in going_on(machine.ended(Disconnected())).parts
    )


def test_an_item_of_the_next_worker_reads_as_one_of_the_first() -> None:
    machine = failing(limit=1)
    machine.touch()
    machine.carry(LLMEngineOutput(token_ids=[5, 6], cum_log_probs=-1.0))
    machine.ended(Disconnected())
    machine.asks(1)
    usage = CompletionUsage(
        prompt_tokens=5,
        completion_tokens=1,
        total_tokens=6,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=5),
    )
    item = LLMEngineOutput(token_ids=[7], index=0, cum_log_probs=-0.5, completion_usage=usage)
    assert machine.carry(item, 0) == LLMEngineOutput(
        token_ids=[7],
        index=0,
        cum_log_probs=-1.5,
        completion_usage=CompletionUsage(
            prompt_tokens=3,
            completion_tokens=3,
            total_tokens=6,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=3),
        ),
    )


def test_an_item_of_the_first_worker_is_left_alone() -> None:
    item = LLMEngineOutput(token_ids=[5], completion_usage=None)
    assert failing().carry(item) is item


def test_usage_without_details_is_told_without() -> None:
    machine = failing(tokens=1, limit=1)
    machine.ended(Disconnected())
    machine.asks(1)
    usage = CompletionUsage(prompt_tokens=4, completion_tokens=1, total_tokens=5)
    carried = machine.carry(LLMEngineOutput(token_ids=[7], completion_usage=usage), 0)
    assert carried.completion_usage == CompletionUsage(
        prompt_tokens=3, completion_tokens=2, total_tokens=5
    )


@pytest.mark.parametrize("index", [-1, 1])
def test_a_choice_that_nobody_asked_for_is_an_unreadable_item(index: int) -> None:
    with pytest.raises(UnreadableItem):
        failing().take([1], index)


# --- when there is nothing left to ask for -------------------------------------------------------


@pytest.mark.parametrize("error", [None, Disconnected(), Cancelled(), Unknown()])
def test_an_answer_that_is_there_is_done_however_its_stream_ends(
    error: DynamoException | None,
) -> None:
    full = failing(tokens=10)
    assert isinstance(full.ended(error), Done)
    told = failing(tokens=1)
    told.carry(LLMEngineOutput(token_ids=[], finish_reason="cancelled"))
    assert isinstance(told.ended(error), Done)
    ended_by_token = failing(tokens=4)
    ended_by_token.take([99])
    assert isinstance(ended_by_token.ended(error), Done)


def test_a_token_that_came_too_early_to_end_the_answer_does_not() -> None:
    machine = failing(tokens=2, limit=1)
    machine.take([99])
    assert isinstance(machine.ended(Disconnected()), GoOn)
    ignored = structs.replace(
        REQUEST, stop_conditions=StopConditions(ignore_eos=True, stop_token_ids_hidden=[99])
    )
    machine = failing(ignored, limit=1)
    machine.take([99])
    assert isinstance(machine.ended(Disconnected()), GoOn)


def test_what_comes_behind_the_end_is_no_part_of_the_answer() -> None:
    machine = Migration(sampling(n=2), MigrationLimits(1), EVERYTHING)
    machine.asks(0)
    machine.finish(0)
    machine.take([5], 0)
    machine.touch()
    assert going_on(machine.ended(Disconnected())).move.tokens_completed == 0


def test_a_stream_that_is_said_to_be_whole_and_is_not_is_incomplete() -> None:
    end = end_of(failing(tokens=3).ended(None))
    assert isinstance(end.error, StreamIncomplete)
    assert going_on(failing(tokens=3, limit=1).ended(None)).move.reason == "stream_incomplete"


def test_a_finish_reason_that_is_an_error_is_no_end() -> None:
    machine = failing(tokens=3, limit=1)
    machine.carry(LLMEngineOutput(token_ids=[], finish_reason=FinishError("x")))
    assert end_of(machine.ended(Unknown("x"))).why is Reason.NOT_MIGRATABLE


# --- which failures ------------------------------------------------------------------------------


def caused(error: DynamoException, *causes: BaseException) -> DynamoException:
    at: BaseException = error
    for cause in causes:
        at.__cause__ = cause
        at = cause
    return error


FIXED = {"RequestCut", "Unknown", "InvalidArgument", "Cancelled", "NoWorker", "Unanswered"}


def test_the_class_says_whether_a_failure_moves() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type)]
    for kind in [k for k in kinds if issubclass(k, DynamoException)]:
        assert may_move(kind("why")) == kind.migratable
    moving = {k.__name__ for k in kinds if issubclass(k, DynamoException) and k.migratable}
    # Dynamo 1.5.1's list, by our names.
    assert moving >= {
        *("CannotConnect", "Disconnected", "ConnectionTimeout", "ResponseTimeout"),
        *("EngineShutdown", "StreamIncomplete", "Overloaded"),
    }
    assert not moving & FIXED


def test_a_migratable_cause_counts_anywhere_in_the_chain() -> None:
    assert may_move(caused(Unknown(), ValueError(), Disconnected()))
    assert may_move(caused(Unknown(), ExceptionGroup("", [ValueError(), ConnectionTimeout()])))
    assert not may_move(caused(Unknown(), ValueError()))


@pytest.mark.parametrize("kind", [Cancelled, NoWorker, UnreadableItem])
def test_some_causes_forbid_it_anywhere_in_the_chain(kind: type[DynamoException]) -> None:
    assert not may_move(caused(Disconnected(), kind("why")))
    assert not may_move(caused(kind("why"), CannotConnect()))
    assert not may_move(caused(Disconnected(), ExceptionGroup("", [ValueError(), kind("why")])))


def test_a_circle_of_causes_has_an_end() -> None:
    error, cause = Unknown(), Disconnected()
    error.__cause__, cause.__cause__ = cause, error
    assert may_move(error)


def test_what_was_merely_handled_at_the_time_does_not_count() -> None:
    error = Disconnected()
    error.__context__ = Cancelled()
    assert may_move(error)


@pytest.mark.parametrize("name", ["backend_instance_id", "prefill_worker_id", "decode_worker_id"])
@pytest.mark.parametrize("planned", [False, True])
def test_a_request_for_one_worker_goes_to_no_other(name: str, *, planned: bool) -> None:
    pinned = structs.replace(REQUEST, routing=structs.replace(Routing(), **{name: 5}))
    for tokens in (0, 2):
        end = end_of(failing(pinned, tokens, limit=9).ended(EngineShutdown(planned=planned)))
        assert end.why is Reason.PINNED
    free = structs.replace(REQUEST, routing=None)
    assert isinstance(failing(free, limit=9).ended(Disconnected()), GoOn)


def test_a_request_that_is_stopped_ends_where_it_is() -> None:
    machine = failing(tokens=2, limit=9)
    machine.ended(Disconnected())
    machine.asks(1)
    machine.stop()
    failure = EngineShutdown(planned=True)
    end = end_of(machine.ended(failure))
    assert isinstance(end.error, Cancelled)
    assert (end.why, end.cause, end.error.__cause__) == (Reason.STOPPED, failure, failure)
    assert machine.moves[0].outcome is MoveOutcome.CANCELLED


def test_a_request_that_is_stopped_on_the_way_goes_no_further() -> None:
    machine = failing(tokens=2, limit=9)
    machine.ended(Disconnected())
    machine.stop()
    end = machine.nobody(NoWorker())
    assert (end.why, type(end.error)) == (Reason.STOPPED, Cancelled)


# --- how often -----------------------------------------------------------------------------------


def moves_until_the_end(machine: Migration, *, planned: bool = False) -> int:
    """It fails at one instance after the other; how many were asked after the first?"""
    for instance in range(1, 50):
        if isinstance(machine.ended(EngineShutdown(planned=planned)), End):
            return instance - 1
        machine.asks(instance)
    return 50


@pytest.mark.parametrize("limit", [0, 1, 2, 5])
def test_an_answer_that_has_begun_moves_as_often_as_the_limit_says(limit: int) -> None:
    assert moves_until_the_end(failing(tokens=1, limit=limit)) == limit


@pytest.mark.parametrize("limit", [0, 3, 5])
def test_what_nobody_has_seen_is_retried_at_three_others_at_least(limit: int) -> None:
    assert moves_until_the_end(failing(limit=limit)) == max(limit, OTHERS)
    assert moves_until_the_end(failing(tokens=4, touched=False, limit=limit)) == max(limit, 3)


def test_failures_before_and_behind_the_first_token_share_the_budget() -> None:
    machine = failing(limit=2)
    machine.ended(CannotConnect())
    machine.asks(1)
    machine.take([5])
    machine.touch()
    assert isinstance(machine.ended(Disconnected()), GoOn)
    machine.asks(2)
    assert end_of(machine.ended(Overloaded())).why is Reason.EXHAUSTED


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_planned_hand_over_spends_nothing_and_has_no_limit(tokens: int) -> None:
    assert moves_until_the_end(failing(tokens=tokens, max_seq_len=1), planned=True) == 50
    assert is_planned(caused(Unknown(), EngineShutdown(planned=True)))


def test_a_planned_hand_over_leaves_the_budget_to_failures() -> None:
    machine = failing(tokens=1, limit=1)
    for instance in (1, 2, 3):
        assert isinstance(machine.ended(EngineShutdown(planned=True)), GoOn)
        machine.asks(instance)
    assert isinstance(machine.ended(Disconnected()), GoOn)
    machine.asks(4)
    assert isinstance(machine.ended(Disconnected()), End)


@pytest.mark.parametrize(
    ("tokens", "max_seq_len", "why"),
    [(4, 7, None), (4, 6, Reason.MAX_SEQ_LEN), (1, 3, Reason.MAX_SEQ_LEN), (1, 2, "prompt")],
)
def test_strictly_more_tokens_than_the_limit_do_not_move(
    tokens: int, max_seq_len: int, why: Reason | str | None
) -> None:
    machine = failing(tokens=tokens, limit=9, max_seq_len=max_seq_len)
    assert machine.max_seq_len_exceeded == (why is not None)
    decision = machine.ended(Disconnected())
    if why is None:
        assert isinstance(decision, GoOn)
    else:
        assert end_of(decision).why is Reason.MAX_SEQ_LEN


def test_a_prompt_as_long_as_the_limit_may_still_be_sent_elsewhere() -> None:
    at_limit = failing(limit=9, max_seq_len=3)
    assert not at_limit.max_seq_len_exceeded
    assert moves_until_the_end(at_limit) == 9
    above = failing(limit=9, max_seq_len=2)
    assert above.max_seq_len_exceeded
    assert moves_until_the_end(above) == OTHERS  # nothing was seen of it


def test_with_several_choices_the_longest_counts() -> None:
    machine = Migration(sampling(n=2), MigrationLimits(9, 5), EVERYTHING)
    machine.asks(0)
    machine.take([5, 6], 0)
    machine.take([7, 8], 1)
    assert not machine.max_seq_len_exceeded
    machine.take([9], 1)
    assert machine.max_seq_len_exceeded


def test_where_nothing_moves_at_all_the_length_is_not_the_reason() -> None:
    assert end_of(failing(tokens=1, max_seq_len=1).ended(Disconnected())).why is Reason.EXHAUSTED


def test_no_instance_is_asked_twice() -> None:
    machine = failing(limit=9)
    decision = going_on(machine.ended(Disconnected()))
    assert decision.without == {0}
    with pytest.raises(LocalProtocolError, match="had this request before"):
        machine.asks(0)
    machine.asks(1)
    assert going_on(machine.ended(Disconnected())).without == {0, 1}


def test_nobody_left_ends_it_with_the_failure_that_led_there() -> None:
    machine = failing(tokens=2, limit=9)
    failure = Disconnected("gone")
    machine.ended(failure)
    end = machine.nobody(NoWorker())
    assert end == End(failure, Reason.NO_WORKER, 0, 2, failure)


def test_nobody_there_from_the_beginning_is_told_as_it_is() -> None:
    error = NoWorker()
    assert Migration(REQUEST, MigrationLimits()).nobody(error) == End(
        error, Reason.NO_WORKER, None, 0, None
    )


# --- what its caller is told ---------------------------------------------------------------------


def test_the_end_says_who_had_it_and_how_much_was_delivered() -> None:
    failure = Disconnected("gone")
    assert failing(tokens=2).ended(failure) == End(failure, Reason.EXHAUSTED, 0, 2, failure)


@pytest.mark.parametrize("failure", [Disconnected("gone"), Overloaded("full"), CannotConnect("no")])
def test_of_what_nobody_has_seen_the_client_learns_that_it_may_send_it_again(
    failure: DynamoException,
) -> None:
    machine = failing(tokens=2, touched=False)
    for instance in range(1, OTHERS + 1):
        machine.ended(Disconnected())
        machine.asks(instance)
    end = end_of(machine.ended(failure))
    assert (end.tokens_delivered, end.cause) == (0, failure)
    assert end.error.retry
    if isinstance(failure, Disconnected):
        assert isinstance(end.error, Unanswered)
        assert end.error.__cause__ is failure
    else:
        assert end.error is failure


def test_a_failure_that_is_the_requests_own_is_told_as_it_is() -> None:
    failure = InvalidArgument("no")
    assert end_of(failing(limit=3).ended(failure)).error is failure


# --- what can be replayed ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "needed"),
    [
        (REQUEST, set()),
        (sampling(presence_penalty=0.0, repetition_penalty=1.0, n=1, best_of=1), set()),
        (sampling(presence_penalty=0.5), {Replay.PENALTIES}),
        (sampling(frequency_penalty=0.5), {Replay.PENALTIES}),
        (sampling(repetition_penalty=1.1), {Replay.PENALTIES}),
        (sampling(guided_decoding={"json": {}}), {Replay.GUIDED_DECODING}),
        (sampling(n=2), {Replay.CHOICES}),
        (sampling(best_of=2), {Replay.RANKING}),
        (sampling(use_beam_search=True), {Replay.RANKING}),
        (sampling(seed=0), {Replay.SEED}),
        (sampling(seed=1, temperature=0.0), set()),
        (structs.replace(REQUEST, output_options=OutputOptions(logprobs=0)), {Replay.LOGPROBS}),
        (
            structs.replace(REQUEST, output_options=OutputOptions(prompt_logprobs=1)),
            {Replay.LOGPROBS},
        ),
        (
            structs.replace(REQUEST, stop_conditions=StopConditions(stop=["a"])),
            {Replay.STOP_STRINGS},
        ),
        (
            structs.replace(REQUEST, stop_conditions=StopConditions(max_thinking_tokens=3)),
            {Replay.THINKING},
        ),
    ],
)
def test_what_a_request_needs_of_an_engine(
    request_: PreprocessedRequest, needed: set[Replay]
) -> None:
    assert needs(request_) == needed
    for declared in (frozenset(needed), frozenset[Replay]()):
        machine = failing(request_, 2, limit=1, declared=declared)
        decision = machine.ended(Disconnected("gone"))
        assert isinstance(decision, GoOn) == (needed <= declared)


@pytest.mark.parametrize("planned", [False, True])
def test_what_cannot_be_replayed_is_refused_by_name(*, planned: bool) -> None:
    request = sampling(guided_decoding={"json": {}}, seed=3, frequency_penalty=1.0)
    failure = EngineShutdown(planned=planned)
    end = end_of(failing(request, 2, limit=1, declared=frozenset({Replay.SEED})).ended(failure))
    assert isinstance(end.error, NotReplayable)
    assert "(guided_decoding, penalties)" in end.error.message
    assert (end.error.__cause__, end.cause) == (failure, failure)
    assert (end.why, end.instance, end.tokens_delivered) == (Reason.NOT_REPLAYABLE, 0, 2)


def test_where_there_is_nothing_to_replay_nothing_is_needed() -> None:
    request = sampling(guided_decoding={"json": {}})
    decision = going_on(failing(request, declared=frozenset()).ended(Disconnected()))
    assert decision.parts[0].request == request
    seen = failing(request, touched=True, limit=1, declared=frozenset())
    assert going_on(seen.ended(Disconnected())).afresh is False


def test_text_without_tokens_cannot_be_replayed_by_anybody() -> None:
    machine = failing(limit=1)
    machine.carry(LLMEngineOutput(token_ids=[], text="Hello"))
    machine.touch()
    assert end_of(machine.ended(Disconnected())).why is Reason.NOT_REPLAYABLE


def test_text_that_was_thrown_away_is_forgotten() -> None:
    machine = failing(limit=5)
    machine.carry(LLMEngineOutput(token_ids=[], text="Hello"))
    assert going_on(machine.ended(Disconnected())).afresh
    machine.asks(1)
    machine.carry(LLMEngineOutput(token_ids=[5]))
    machine.touch()
    assert going_on(machine.ended(Disconnected())).parts[0].request.token_ids == [*PROMPT, 5]


def test_every_engine_of_ours_declares_something() -> None:
    assert DECLARED.keys() == set(KINDS)
    assert all(Replay.STOP_STRINGS in declared for declared in DECLARED.values())


# --- what is counted -----------------------------------------------------------------------------


def test_a_move_says_what_metrics_and_the_log_need() -> None:
    machine = failing(tokens=3, limit=2)
    move = going_on(machine.ended(ConnectionTimeout())).move
    assert machine.moves == [move]
    assert (move.kind, move.reason, move.planned) == (MoveKind.ONGOING_REQUEST, "timeout", False)
    assert (move.attempt, move.from_instance, move.tokens_completed) == (1, 0, 3)
    assert (move.to_instance, move.outcome) == (None, None)
    machine.asks(7)
    assert (move.to_instance, move.outcome) == (7, None)
    machine.take([])
    assert move.outcome is None
    machine.take([5])
    assert move.outcome is MoveOutcome.SUCCESS


def test_what_its_client_has_not_seen_moves_as_a_new_request() -> None:
    machine = failing(tokens=3, touched=False)
    assert going_on(machine.ended(Disconnected())).move.kind is MoveKind.NEW_REQUEST


def test_success_and_failure_are_counted_apart_and_the_impossible_not_at_all() -> None:
    machine = failing(tokens=1, limit=2)
    for instance in (1, 2):
        machine.ended(Disconnected())
        machine.asks(instance)
    machine.take([5])
    assert isinstance(machine.ended(Disconnected()), End)
    outcomes = [move.outcome for move in machine.moves]
    assert outcomes == [MoveOutcome.FAILURE, MoveOutcome.SUCCESS]


def test_a_worker_that_only_says_the_end_has_taken_it_over() -> None:
    machine = failing(tokens=1, limit=1)
    machine.ended(Disconnected())
    machine.asks(1)
    machine.carry(LLMEngineOutput(token_ids=[], finish_reason="stop"))
    assert isinstance(machine.ended(None), Done)
    assert machine.moves[0].outcome is MoveOutcome.SUCCESS


def test_where_nobody_is_left_the_move_has_failed() -> None:
    machine = failing(tokens=1, limit=1)
    machine.ended(Disconnected())
    machine.nobody(NoWorker())
    assert machine.moves[0].outcome is MoveOutcome.FAILURE


# --- the machine itself --------------------------------------------------------------------------


def test_it_ends_once_and_takes_nothing_more() -> None:
    over = failing(tokens=2)
    over.ended(Disconnected())
    waiting = failing()
    waiting.ended(Disconnected())
    for machine in (over, waiting):
        with pytest.raises(LocalProtocolError):
            machine.ended(None)
        with pytest.raises(LocalProtocolError):
            machine.take([1])
        with pytest.raises(LocalProtocolError):
            machine.finish()
    with pytest.raises(LocalProtocolError, match="OVER"):
        over.asks(3)
    with pytest.raises(LocalProtocolError):
        over.nobody(NoWorker())


def test_it_knows_no_trio_and_no_clock() -> None:
    folder = Path(dynamo_trio.migration.__file__).parent
    allowed = {"__future__", "typing", "enum", "array", "collections", "attrs", "msgspec"}
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] in allowed | {"dynamo_trio"}
                if (node.module or "").startswith("dynamo_trio"):
                    assert (node.module or "").split(".")[1] in {"migration", "errors", "wire"}
            elif isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= allowed
