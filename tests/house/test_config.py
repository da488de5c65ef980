"""Configuration: one table, flag over variable over default, and no bad value gets through."""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

import pytest
from attrs.exceptions import FrozenInstanceError
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.config import Config, Group, LogFilter, ProgramSpec, SimFault, effective, later
from dynamo_trio.config.option import AnyOption, flag_of, options_of
from dynamo_trio.config.programs import FRONTEND, LIBRARY, PROGRAMS, WORKER
from dynamo_trio.config.rules import MAX_SECONDS, Boolean, Choice, Integer, Seconds
from dynamo_trio.config.show import markdown
from dynamo_trio.engines.faults import Fault
from dynamo_trio.errors import ConfigError
from dynamo_trio.wire.names import EndpointId

OPTIONS = options_of(Config)
NUMERIC = {n: o for n, o in OPTIONS.items() if isinstance(o.rule, Seconds | Integer)}
CHOICES = {n: o for n, o in OPTIONS.items() if isinstance(o.rule, Choice | Boolean)}


def load(*argv: str, **environ: str) -> Config:
    return Config.from_args_and_env(argv, environ)


def problem_of(*argv: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv, **environ)
    assert caught.value.exit_code == 64
    return str(caught.value)


# --- the table ---------------------------------------------------------------------------


def test_every_variable_has_a_flag_of_the_same_meaning() -> None:
    for name, option in OPTIONS.items():
        if option.env is None:
            assert option.flag == "--" + name.replace("_", "-")
            continue
        stem = option.flag.removeprefix("--").replace("-", "_").upper()
        # Etcd's variables have no DYN_; Dynamo's flag for one time leaves out its unit.
        assert option.env in {f"DYN_{stem}", f"DYN_TRIO_{stem}", stem, f"DYN_{stem}_SECS"}


def test_names_are_unique() -> None:
    flags = [o.flag for o in OPTIONS.values()]
    envs = [o.env for o in OPTIONS.values() if o.env]
    assert len(set(flags)) == len(flags)
    assert len(set(envs)) == len(envs)


def test_structured_values_survive_the_way_through_text() -> None:
    config = load("--endpoint", "a.b.c", "--log", "info,h2=debug")
    assert OPTIONS["endpoint"].show(config.endpoint) == "dyn://a.b.c"
    assert OPTIONS["log"].show(config.log) == "info,h2=debug"
    for name in ("endpoint", "log"):
        value = getattr(config, name)
        assert OPTIONS[name].rule.parse(OPTIONS[name].rule.show(value)) == value


@pytest.mark.parametrize("name", OPTIONS)
def test_a_default_obeys_its_own_rule_and_survives_the_way_through_text(name: str) -> None:
    option = OPTIONS[name]
    value = option.initial({"HOME": "/home/someone"})
    if value is None:
        assert option.default is None
        return
    option.rule.check(value)
    assert option.rule.parse(option.rule.show(value)) == value


def test_a_config_made_in_code_equals_one_made_from_nothing() -> None:
    assert Config(cache_dir=Path("c")) == load("--cache-dir", "c")


def test_the_object_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        load().grace = 1.0  # type: ignore[misc]  # the point of the test


# --- precedence ----------------------------------------------------------------------------


def test_flag_wins_over_variable_and_variable_over_default() -> None:
    assert load().http_port == 8000
    assert load(DYN_HTTP_PORT="8001").http_port == 8001
    config = load("--http-port", "8002", DYN_HTTP_PORT="8001", DYN_LOG="debug")
    assert config.http_port == 8002
    assert config.sources == {"http_port": "--http-port", "log": "DYN_LOG"}


def test_the_last_of_a_repeated_flag_counts() -> None:
    assert load("--http-port=1", "--http-port=2").http_port == 2


def test_groups_that_a_program_does_not_take_are_neither_read_nor_flags() -> None:
    config = Config.from_args_and_env([], {"DYN_HTTP_PORT": "x"}, groups=[Group.ENGINE])
    assert config.http_port == 8000
    with pytest.raises(ConfigError, match="--http-port: no such flag"):
        Config.from_args_and_env(["--http-port", "1"], {}, groups=[Group.ENGINE])


def test_the_process_itself_is_the_default_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["prog", "--itl-ms", "3"])
    monkeypatch.setenv("DYN_HTTP_PORT", "81")
    config = Config.from_args_and_env()
    assert (config.itl_ms, config.http_port) == (3.0, 81)


# --- bad values ----------------------------------------------------------------------------


def assert_finite_and_in_range(option: AnyOption, value: object) -> None:
    assert isinstance(value, int | float)
    assert math.isfinite(value)
    assert isinstance(option.rule, Seconds | Integer)
    assert option.rule.minimum <= value <= option.rule.maximum


texts = st.one_of(
    st.text(max_size=30),
    st.floats().map(repr),
    st.integers().map(str),
    st.from_regex(r"[-+ ]?[0-9_]{0,25}\.?[0-9]{0,4}([eE][-+]?[0-9]{1,4})? ?", fullmatch=True),
    st.sampled_from(["", " ", "nan", "-inf", "1_0", "٣", "0x10", "-0", "1e999", "5s", "9" * 5000]),
)


@given(name=st.sampled_from(sorted(NUMERIC)), text=texts)
def test_any_text_for_a_number_is_a_number_in_range_or_a_config_error(name: str, text: str) -> None:
    option = NUMERIC[name]
    assert option.env is not None
    shown = text if len(text) <= 200 else text[:199] + "…"
    message = None
    try:
        config = Config.from_args_and_env([], {option.env: text})
    except ConfigError as error:
        message = str(error)
    if message is None:
        assert_finite_and_in_range(option, getattr(config, name))
    elif message != f"{option.env}={shown!r}: must be {option.rule.text}":
        assert name == "http_body_total_mb"
        assert message.startswith(f"{option.env}={int(text)}: must be at least DYN_HTTP_BODY_LIMIT")


def test_the_room_for_all_bodies_is_room_for_one() -> None:
    assert load(DYN_HTTP_BODY_LIMIT_MB="2000").body_total == 2000 * 2**20
    assert load(DYN_HTTP_BODY_LIMIT_MB="2").body_total == 1024 * 2**20
    wrong = problem_of("--http-body-total-mb=7", DYN_HTTP_BODY_LIMIT_MB="8")
    assert wrong.startswith("--http-body-total-mb=7: must be at least DYN_HTTP_BODY_LIMIT_MB (8)")


@pytest.mark.parametrize("name", NUMERIC)
@pytest.mark.parametrize("text", ["", "abc", "nan", "inf", "-inf", "-1", "1_0", "1e999"])
def test_what_is_never_a_number_of_any_setting(name: str, text: str) -> None:
    option = NUMERIC[name]
    by_flag = problem_of(f"{option.flag}={text}")
    assert by_flag == f"{option.flag}={text!r}: must be {option.rule.text}"
    assert problem_of(**{str(option.env): text}).startswith(f"{option.env}={text!r}: must be ")


@pytest.mark.parametrize("name", CHOICES)
def test_an_unknown_word_is_refused_with_the_words_that_are_known(name: str) -> None:
    option = CHOICES[name]
    for text in ("", "perhaps"):
        message = problem_of(f"{option.flag}={text}")
        assert message == f"{option.flag}={text!r}: must be {option.rule.text}"


def test_times_reach_ten_years_and_no_further() -> None:
    assert load(DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="315360000").grace == MAX_SECONDS
    problem_of(DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="315360001")
    assert math.copysign(1, load(DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="-0").grace) == 1


def test_a_termination_grace_period_below_five_seconds_cannot_work() -> None:
    assert load(DYN_TRIO_TERMINATION_GRACE_PERIOD_SECS="5").termination_grace == 5
    message = problem_of(DYN_TRIO_TERMINATION_GRACE_PERIOD_SECS="4.9")
    assert message.startswith("DYN_TRIO_TERMINATION_GRACE_PERIOD_SECS='4.9': must be a number")


@pytest.mark.parametrize("port", ["65536", "-1", "80.0"])
def test_a_port_is_a_port(port: str) -> None:
    assert "a whole number from 0 to 65535" in problem_of(DYN_HTTP_PORT=port)


def test_all_that_is_wrong_is_told_at_once() -> None:
    message = problem_of(
        "--http-prt", "1", "--itl-ms=x", DYN_HTTP_PORT="y", DYN_TRIO_DRAIN_POLICY="z"
    )
    assert message.splitlines() == [
        "4 settings are wrong:",
        "  --http-prt: no such flag (did you mean --http-port?)",
        "  DYN_HTTP_PORT='y': must be a whole number from 0 to 65535",
        "  DYN_TRIO_DRAIN_POLICY='z': must be one of auto, finish, migrate",
        "  --itl-ms='x': must be a number of milliseconds from 0 to 315360000000",
    ]


def test_a_flag_is_never_abbreviated() -> None:
    assert "--http-por: no such flag (did you mean --http-port?)" in problem_of("--http-por", "1")


def test_a_flag_without_its_value_is_a_config_error() -> None:
    assert problem_of("--http-port") == "argument --http-port: expected one argument"


def test_a_value_from_code_obeys_the_same_rule() -> None:
    with pytest.raises(ValueError, match="drain_policy='x': must be one of"):
        Config(drain_policy="x")  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(ValueError, match=r"grace=nan: must be a number of seconds from 0"):
        Config(grace=math.nan)
    with pytest.raises(ValueError, match="http_port=None: must be"):
        Config(http_port=None)  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(ValueError, match="grace='5': must be"):
        Config(grace="5")  # type: ignore[arg-type]  # the point of the test


# --- single kinds of value ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *(("1", True), ("yes", True), ("On", True), ("TRUE", True)),
        *(("0", False), ("no", False), ("off", False), ("False", False)),
    ],
)
def test_yes_and_no_have_many_spellings(word: str, value: bool) -> None:
    assert load(DYN_LOGGING_JSONL=word).log_jsonl is value
    assert load("--logging-jsonl", word).log_jsonl is value


def test_the_body_limit_is_in_mebibytes() -> None:
    assert load(DYN_HTTP_BODY_LIMIT_MB="2").body_limit == 2 * 1024 * 1024


def test_a_switch_alone_means_yes() -> None:
    assert load("--logging-jsonl").log_jsonl is True


def test_empty_text_means_not_set_where_text_may_be_absent() -> None:
    assert load(DYN_TRIO_SHUTDOWN_REPORT="", DYN_MODEL_NAME=" ").shutdown_report is None
    assert "DYN_HTTP_HOST=''" in problem_of(DYN_HTTP_HOST="")
    assert load("--model-name", "").model_name is None


@pytest.mark.parametrize("text", ["", " "])
def test_a_flag_that_has_no_variable_is_never_empty(text: str) -> None:
    assert problem_of("--ask", text) == f"--ask={text!r}: must be text that is not empty"
    assert load("--ask", "Why?").ask == "Why?"


def test_an_endpoint_has_three_parts() -> None:
    assert load().endpoint_name == EndpointId("dynamo", "backend", "generate")
    assert load(DYN_NAMESPACE="a").endpoint_name == EndpointId("a", "backend", "generate")
    assert load(DYN_ENDPOINT="dyn://x.y.z").endpoint_name == EndpointId("x", "y", "z")
    assert load(DYN_ENDPOINT="x.y.z").endpoint_name == EndpointId("x", "y", "z")
    for bad in ("", "x.y", "dyn://x.y.z.w", "x..z", "a/b.c.d"):
        assert "NAMESPACE.COMPONENT.ENDPOINT" in problem_of(DYN_ENDPOINT=bad)


def test_a_namespace_is_one_part_of_a_name() -> None:
    for bad in ("", "a.b", "a b", "ä"):
        assert "letters, digits, '-' and '_'" in problem_of(DYN_NAMESPACE=bad)


def test_a_path_where_one_must_stand_is_not_empty() -> None:
    assert problem_of(DYN_TRIO_CACHE_DIR="") == "DYN_TRIO_CACHE_DIR='': must be a path"


def test_the_log_filter_takes_single_loggers() -> None:
    assert load(DYN_LOG="WARN").log == LogFilter("warn")
    expected = LogFilter("info", (("dynamo_trio.frontend", "debug"), ("h2", "error")))
    assert load(DYN_LOG="info,dynamo_trio::frontend=debug, h2=error").log == expected
    assert load(DYN_LOG="h2=error").log == LogFilter("info", (("h2", "error"),))
    for bad in ("", "loud", "info,=debug", "info,x=loud", "info,"):
        problem_of(DYN_LOG=bad)


def test_no_color_is_heard_and_can_be_overruled() -> None:
    assert not load().no_color
    assert not load(NO_COLOR="").no_color
    assert load(NO_COLOR="1").no_color
    assert not load(NO_COLOR="1", DYN_SDK_DISABLE_ANSI_LOGGING="0").no_color


def test_the_cache_follows_xdg() -> None:
    assert load(HOME="/h").cache_dir == Path("/h/.cache/dynamo_trio")
    assert load(HOME="/h", XDG_CACHE_HOME="/x").cache_dir == Path("/x/dynamo_trio")
    assert load(XDG_CACHE_HOME="/x", DYN_TRIO_CACHE_DIR="/c").cache_dir == Path("/c")


def test_every_fault_of_the_simulated_core_can_be_asked_for() -> None:
    assert set(get_args(SimFault)) == {fault.value for fault in Fault}
    assert load("--sim-fault", "die").sim_fault == "die"
    assert load().sim_fault is None


# --- the network --------------------------------------------------------------------------------


def test_dynamos_names_for_discovery_and_planes() -> None:
    config = load()
    assert config.discovery_backend == "etcd"
    assert config.etcd_endpoints == ("http://localhost:2379",)
    assert (config.request_plane, config.event_plane) == ("tcp", "zmq")
    assert config.request_plane_codec == "msgpack"
    assert load("--discovery-backend", "file").discovery_backend == "file"
    assert load(DYN_FILE_KV="/x").file_kv == Path("/x")
    assert load(TMPDIR="/t").file_kv == Path("/t/dynamo_store_kv")


def test_the_plane_of_our_own_is_chosen_beside_dynamos() -> None:
    config = load(DYN_REQUEST_PLANE="tcp")
    assert (config.mux, config.mux_port, config.heartbeat) == ("auto", 0, 1.0)
    config = load("--mux", "only", "--mux-port", "7", DYN_TRIO_HEARTBEAT_SECS="0.5")
    assert (config.mux, config.mux_port, config.heartbeat) == ("only", 7, 0.5)
    assert load(DYN_TRIO_MUX="OFF", DYN_TRIO_MUX_PORT="9").mux == "off"
    assert "must be one of auto, off, only" in problem_of(DYN_TRIO_MUX="tcp")
    for bad in ("0", "-1", "nan", "inf", ""):
        assert "must be a number of seconds from 0.05 to " in problem_of(
            DYN_TRIO_HEARTBEAT_SECS=bad
        )


def test_etcd_has_several_endpoints() -> None:
    config = load(ETCD_ENDPOINTS="http://a:2379, https://b,c:1/,[::1]:2379")
    expected = ("http://a:2379", "https://b", "http://c:1", "http://[::1]:2379")
    assert config.etcd_endpoints == expected
    for bad in ("", "a,,b", "ftp://a", "http://a/path", "http://u:p@a", "a b"):
        assert "one or more of http://HOST:PORT" in problem_of(ETCD_ENDPOINTS=bad)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("DYN_DISCOVERY_BACKEND", "kubernetes", "not there yet; etcd and file are"),
        ("DYN_REQUEST_PLANE", "nats", "NATS is not offered; the request plane is tcp"),
        ("DYN_REQUEST_PLANE", "http", "HTTP is not offered"),
        ("DYN_EVENT_PLANE", "NATS", "NATS is not offered; the event plane is zmq"),
        ("DYN_ROUTER_MODE", "kv", "KV routing is not there yet; round-robin and random are"),
        ("DYN_ROUTER_MODE", "power-of-two", "is not there yet; round-robin and random are"),
        ("DYN_ROUTER_MODE", "direct", "is not there yet"),
        ("DYN_ROUTER_MODE", "least-loaded", "is not there yet"),
        ("DYN_ROUTER_MODE", "device-aware-weighted", "is not there yet"),
    ],
)
def test_what_dynamo_has_and_is_not_here_is_said_so(variable: str, value: str, words: str) -> None:
    message = problem_of(**{variable: value})
    assert message.startswith(f"{variable}={value!r}: ")
    assert words in message
    assert "must be" not in message


def test_the_words_of_endpoint_types() -> None:
    assert load().endpoint_types == ("chat", "completions")
    assert load("--endpoint-types", "completions, Chat").endpoint_types == ("chat", "completions")
    assert load("--endpoint-types", "completions").endpoint_types == ("completions",)
    for bad in ("", ",", "chat,", "embeddings"):
        assert "one or more of chat, completions" in problem_of(DYN_ENDPOINT_TYPES=bad)


def test_the_status_port_may_be_off_or_any() -> None:
    assert load().system_port == -1
    assert load(DYN_SYSTEM_PORT="0").system_port == 0
    for bad in ("", "-2", "65536", "8.0", "off"):
        assert "a port from 0 to 65535, or -1 for none" in problem_of(DYN_SYSTEM_PORT=bad)


def test_a_path_of_the_status_server_is_one() -> None:
    assert load(DYN_SYSTEM_LIVE_PATH="/a/b").system_live_path == "/a/b"
    for bad in ("", "live", "/a b", "/a?b"):
        assert "a path that begins with '/'" in problem_of(DYN_SYSTEM_HEALTH_PATH=bad)


def test_health_and_life_are_two_questions() -> None:
    assert "they must differ" in problem_of(DYN_SYSTEM_LIVE_PATH="/health")
    assert load(DYN_SYSTEM_LIVE_PATH="/health", DYN_SYSTEM_HEALTH_PATH="/x").warnings == ()


def test_a_password_is_shown_nowhere() -> None:
    config = load(ETCD_AUTH_USERNAME="root", ETCD_AUTH_PASSWORD="s3cret")
    assert config.etcd_password == "s3cret"
    assert "s3cret" not in effective(config) + repr(config)
    assert "(not shown)" in effective(config)
    assert problem_of(ETCD_AUTH_USERNAME="root", ETCD_AUTH_PASSWORD="s3cret\n\0") == (
        "ETCD_AUTH_PASSWORD: must be text that is not empty, or empty for none"
    )
    with pytest.raises(ValueError, match=r"^etcd_password: must be"):
        Config(etcd_password="s3cret\0")


@pytest.mark.parametrize(
    ("present", "needed"),
    [
        ("ETCD_AUTH_USERNAME", "ETCD_AUTH_PASSWORD"),
        ("ETCD_AUTH_PASSWORD", "ETCD_AUTH_USERNAME"),
        ("ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY"),
        ("DYN_TCP_TLS_CERT_PATH", "DYN_TCP_TLS_KEY_PATH"),
        ("DYN_TCP_TLS_KEY_PATH", "DYN_TCP_TLS_CERT_PATH"),
        ("DYN_TCP_TLS_CLIENT_CA_CERT_PATH", "DYN_TCP_TLS_CERT_PATH"),
        ("DYN_TCP_TLS_CLIENT_CERT_PATH", "DYN_TCP_TLS_CLIENT_KEY_PATH"),
    ],
)
def test_one_setting_needs_another(present: str, needed: str) -> None:
    assert problem_of(**{present: "x"}) == f"{present}: needs {needed} ({flag_of(needed)}) too"


def test_a_migration_limit_has_no_effect_yet_and_says_so() -> None:
    assert load("--migration-limit", "0").warnings == ()
    (warning,) = load("--migration-limit", "3").warnings
    assert warning.startswith("--migration-limit=3: migration is not there yet")


# --- programs ------------------------------------------------------------------------------------


def test_what_dynamo_obeys_and_is_not_there_yet_is_a_warning() -> None:
    environ = {
        "DYN_STABLE_ROUTING_ID": "true",
        "DYN_NAMESPACE_PREFIX": "mine",
        "DYN_ROUTER_TEMPERATURE": "0.5",
        "DYN_ROUTER_MODE": "random",
        "DYN_KSERVE_GRPC_SERVER": "false",
    }

    def told(program: ProgramSpec) -> list[str]:
        config = Config.from_args_and_env((), environ, groups=program.groups)
        return [
            warning.partition(": not there yet; it is ignored")[0] for warning in config.warnings
        ]

    assert told(FRONTEND) == ["DYN_NAMESPACE_PREFIX", "DYN_ROUTER_TEMPERATURE"]
    assert told(WORKER) == told(LIBRARY) == ["DYN_STABLE_ROUTING_ID"]


@pytest.mark.parametrize(
    "flag",
    ["--namespace-prefix", "--kv-cache-block-size", "--router-temperature"],
)
def test_a_flag_that_is_not_there_yet_is_one_problem(flag: str) -> None:
    assert problem_of(flag, "5") == f"{flag}: not there yet"
    assert problem_of(f"{flag}=5") == f"{flag}: not there yet"


def test_an_unknown_flag_and_its_value_are_one_problem() -> None:
    assert problem_of("--no-such", "5") == "--no-such: no such flag"
    assert problem_of("--no-such", "-1") == "--no-such: no such flag"
    words = problem_of("--no-such", "5", "6", "--more")
    assert words.splitlines()[0] == "3 settings are wrong:"
    assert "'6': no argument stands alone here" in words


def test_nothing_that_is_there_counts_as_later() -> None:
    assert not later.VARIABLES.keys() & {option.env for option in OPTIONS.values()}
    assert not later.FLAGS & {option.flag for option in OPTIONS.values()}


def test_a_program_takes_the_groups_that_concern_it() -> None:
    taken = {program.module: program.groups for program in PROGRAMS}
    network = {Group.DISCOVERY, Group.REQUEST_PLANE, Group.TLS}
    assert taken["dynamo_trio"].isdisjoint({*network, Group.STATUS, Group.SERVE, Group.ROUTING})
    assert taken["dynamo_trio.worker"] >= {*network, Group.STATUS, Group.SERVE, Group.SIM}
    assert taken["dynamo_trio.worker"].isdisjoint({Group.HTTP, Group.ASK, Group.ROUTING})
    assert taken["dynamo_trio.frontend"] >= {*network, Group.HTTP, Group.ROUTING}
    assert taken["dynamo_trio.frontend"].isdisjoint({Group.ENGINE, Group.STATUS, Group.ASK})
    assert set().union(*taken.values()) == set(Group)


def test_a_frontend_listens_for_others(capsys: pytest.CaptureFixture[str]) -> None:
    def read(*argv: str, **environ: str) -> Config:
        groups, defaults = FRONTEND.groups, FRONTEND.defaults
        return Config.from_args_and_env(argv, environ, groups=groups, defaults=defaults)

    assert load().http_host == "127.0.0.1"
    assert read().http_host == "0.0.0.0"
    assert read(DYN_HTTP_HOST="::1").http_host == "::1"
    with pytest.raises(SystemExit):
        read("--help")
    assert "default: 0.0.0.0; variable: DYN_HTTP_HOST" in " ".join(capsys.readouterr().out.split())


# --- budgets ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "worker", "frontend", "standalone"),
    [
        ({}, None, None, None),
        ({"DYN_TRIO_TERMINATION_GRACE_PERIOD_SECS": "60"}, 57, 57, 57),
        ({"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "30"}, 35, 30, 30),
        (
            {
                "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "30",
                "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "2",
                "DYN_TRIO_TERMINATION_GRACE_PERIOD_SECS": "60",
            },
            32,
            30,
            30,
        ),
        (
            {
                "DYN_WORKER_SHUTDOWN_TOTAL_TIMEOUT_SECS": "0",
                "DYN_TRIO_TERMINATION_GRACE_PERIOD_SECS": "60",
            },
            0,
            57,
            0,
        ),
        (
            {
                "DYN_WORKER_SHUTDOWN_TOTAL_TIMEOUT_SECS": "20",
                "DYN_TRIO_FRONTEND_SHUTDOWN_TOTAL_TIMEOUT_SECS": "10",
            },
            20,
            10,
            10,
        ),
    ],
)
def test_the_total_comes_from_the_first_that_is_set(
    environ: dict[str, str], worker: float | None, frontend: float | None, standalone: float | None
) -> None:
    config = load(**environ)
    assert config.worker_budget == worker
    assert config.frontend_budget == frontend
    assert config.standalone_budget == standalone


# --- what a person sees --------------------------------------------------------------------------


def test_help_tells_default_unit_and_variable_of_every_setting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--help")
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for option in OPTIONS.values():
        variable = f"; variable: {option.env}" if option.env else ""
        assert f"{option.flag} " in shown
        assert f"default: {option.default_text}{variable})" in shown
    assert "default: 5 s; variable: DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS" in shown


def test_print_config_tells_each_value_and_its_source() -> None:
    config = load("--print-config", "--http-port", "1", DYN_LOG="debug")
    only_logging = effective(config, groups=[Group.LOG])
    assert only_logging.startswith("# Logging\nDYN_LOG ")
    rows = [line.split() for line in effective(config).splitlines() if line[:1] not in ("", "#")]
    assert config.print_config
    assert len(rows) == len(OPTIONS) - 1
    assert "--print-config" not in [row[0] for row in rows]
    assert ["DYN_HTTP_PORT", "1", "--http-port"] in rows
    assert ["DYN_LOG", "debug", "DYN_LOG"] in rows
    assert ["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "5", "s", "default"] in rows


def test_print_config_keeps_its_columns_however_long_a_value_is() -> None:
    lines = effective(load("--model-path", "/a/" + "long/" * 30)).splitlines()
    columns = {line.rindex(" ") for line in lines if line[:1] not in ("", "#")}
    assert len(columns) == 1


def test_a_likely_slip_in_a_variable_of_ours_is_a_warning() -> None:
    config = load(DYN_TRIO_GRACE_MOD="fixed", DYN_TRIO_TEST_NO_SKIP="1", DYN_OTHER="1")
    expected = "DYN_TRIO_GRACE_MOD: no such variable (did you mean DYN_TRIO_GRACE_MODE?)"
    assert config.warnings == (f"{expected}; it is ignored",)


def test_the_reference_tables_hold_every_setting() -> None:
    text = markdown()
    for option in OPTIONS.values():
        assert f"`{option.flag}`" in text
    assert "127.0.0.1; `python -m dynamo_trio.frontend`: 0.0.0.0" in text
    assert "Taken by `python -m dynamo_trio`, `python -m dynamo_trio.worker`." in text
    assert all(line.count(" | ") == 4 for line in text.splitlines() if line.startswith("| `"))
