"""Chat templates: Hugging Face's dialect, and programs that mean harm."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.errors import InvalidArgument, LoadError
from dynamo_trio.wire.openai import meter
from dynamo_trio.wire.openai import template as templates
from dynamo_trio.wire.openai.meter import TooDear
from dynamo_trio.wire.openai.request import Message
from dynamo_trio.wire.openai.template import ChatTemplate

TURNS = [Message("system", "Be kind."), Message("user", "Hi", "eva")]

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def doubled(expression: str) -> str:
    """A template that doubles a value forty times, if it can, and shows how long it is."""
    return (
        "{% set ns = namespace(s='x') %}{% for i in range(40) %}"
        f"{{% set ns.s = {expression} %}}{{% endfor %}}{{{{ ns.s|string|length }}}}"
    )


#: Each takes a millisecond or so, and memory: many of them must not be had.
DEAR = [
    "range(99999) | list",
    "range(99999) | map('string') | join | length",
    "range(99999) | select('odd') | list | length",
    "range(99999) | sum",
    "range(99999) | max",
    "range(99999) | groupby('real')",
    "range(99999) | unique | list",
    "range(99999) | sort",
    "range(99999).index('x')",
    "99999.5 in range(99999)",
    "text.count('ababc')",
    "text.rfind('b' ~ text[9:])",
    "text.split(' ')",
    "text.splitlines()",
    "text | upper",
    "text | title",
    "text | urlencode",
    "text | wordcount",
    "text | reverse",
    "text | tojson",
    "text | escape | length",
    "text[1:] | length",
    "text == text[:-1] ~ 'b'",
    "'ab' in text",
    "text is upper",
    "text is eq(text[:-1] ~ 'b')",
    "['x', text, text[1:]] == ['x', text, text[2:]]",
]


def many(expression: str) -> str:
    loop = "{% for i in range(99999) %}{% for j in range(9) %}"
    return (
        f"{{% set text = 'a b' * 9999 %}}{loop}"
        f"{{% set x = ({expression}) %}}{{% endfor %}}{{% endfor %}}"
    )


def render(source: str, turns: list[Message] | None = None) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(turns or TURNS)


@pytest.fixture
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the bound, so that reaching it takes a tenth of the time."""
    monkeypatch.setattr(meter, "MAX_WORK", meter.MAX_WORK // 10)


def test_chatml() -> None:
    text = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert render(CHATML) == text + "<|im_start|>assistant\n"
    assert ChatTemplate(CHATML).render(TURNS, add_generation_prompt=False) == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{% if true %}\n  x\n  {% endif %}\n", "  x\n"),  # trim_blocks and lstrip_blocks
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}"
         "{% break %}{% endfor %}", "Hi"),
        ("{% generation %}a{{ messages|length }}{% endgeneration %}b", "a2b"),
        ("{{ messages[1]['name'] }}{{ messages[0].name is defined }}", "evaFalse"),
        ("{{ {'a': '<é>'}|tojson }}", '{"a": "<é>"}'),
        ("{{ [1]|tojson(indent=1) }}", "[\n 1\n]"),
        ("{% if tools is not none %}tools{% endif %}{% if documents %}d{% endif %}", ""),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
        ("{{ messages[0].content.split(' ')[1] | upper }}", "KIND."),
        ("{{ undefined_thing }}", ""),
        ("{{ 7 % 4 }}{{ 2 ** 10 }}{{ 'ab' * 3 }}{{ 2.0 ** 0.5 > 1 }}", "31024abababTrue"),
        ("{{ 6 * 7 }}{{ [1] * 2 }}{{ 1.5 * 2 }}", "42[1, 1]3.0"),
        ("{{ messages[1]['content']|replace('H', '{{ 1 }}') }}", "{{ 1 }}i"),
    ],
)  # fmt: skip
def test_the_dialect(source: str, text: str) -> None:
    assert render(source) == text


def test_the_date_comes_from_the_caller() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}", strftime_now=lambda form: f"<{form}>")
    assert template.render(TURNS) == "<%Y>"


def test_a_template_may_refuse() -> None:
    with pytest.raises(InvalidArgument) as exc:
        render("{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in exc.value.message
    assert exc.value.param == "messages"


CONTROLS = [*map(chr, range(32)), "\x7f", "\x85", "\x9b", "\u202e", "\u2028", "\ufeff", "\ud800"]


@pytest.mark.parametrize("control", CONTROLS, ids=ascii)
def test_what_a_template_says_steers_no_terminal(control: str) -> None:
    """Its own words, those that it quotes of a client, and those of one that is no Jinja."""
    said = [Message("user", f"my{control}role")]
    with pytest.raises(InvalidArgument) as exc:
        ChatTemplate("{{ raise_exception('bad: ' ~ messages[0].content) }}").render(said)
    assert exc.value.message.isprintable()
    assert re.search(r": bad: my[ ?]role$", exc.value.message)
    with pytest.raises(LoadError) as unusable:
        ChatTemplate(f"{{% {control}x {control} %}}")
    assert str(unusable.value).isprintable()


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * [1] }}",
        "{{ 10 ** 1000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content.x }}",
        "{{ messages[0].content + 1 }}",
        "{% include 'passwd' %}",
        "{% extends 'x' %}",
        "{{ strftime_now('%Y') }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ {1: messages.append} | tojson }}",
        # Bombs: none of them may cost more than a moment, or much memory.
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        doubled("ns.s ~ ns.s"),
        doubled("ns.s + ns.s"),
        doubled("[ns.s, ns.s]"),
        doubled("(ns.s, ns.s)"),
        doubled("{'a': ns.s, 'b': ns.s}"),
        doubled("dict(a=ns.s, b=ns.s)"),
        doubled("ns.s|replace('x', 'xx')"),
        doubled("ns.s.replace('x', 'xx')"),
        doubled("[ns.s, ns.s]|join"),
        doubled("ns.s.join([ns.s, ns.s])"),
        doubled("'{}{}'.format(ns.s, ns.s)"),
        doubled("'{a}{a}'.format_map({'a': ns.s})"),
        doubled("('\"' ~ ns.s)|tojson|tojson"),
        doubled("[ns.s] * 2"),
        doubled("([ns.s] + [ns.s])"),
        "{{ '{:>99999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 99999999) }}",
        "{{ '{0:>99999999}'.format_map({'0': 1}) }}",
        "{{ 'x'.ljust(99999999) }}",
        "{{ 'x' | center(99999999) }}",
        "{{ '%99999999d' | format(1) }}",
        "{{ 'a\nb' | indent(99999999) }}",
        "{{ messages | tojson(indent=99999999) }}",
        "{{ [0] | batch(99999999, 'x') | list }}",
        "{{ [[1], [2]] | sum(start=[]) }}",
        "{{ lipsum(n=99999) }}",
        "{{ namespace(a=1) }}",
        "{{ ('x' * 999999) | replace('x', 'y' * 99999) }}",
        "{{ (1).to_bytes(10 ** 9, 'big') }}",
        "{{ (1).bit_length() }}",
        "{{ dict.fromkeys(range(9), 1) }}",
        "{{ ('f' * 9999) | int(base=16) }}",
        "{{ 1.5 | round(10 ** 9, 'ceil') }}",
        "{{ strftime_now('%Y' * 9999) }}",
        "{% autoescape true %}{% endautoescape %}",
        "{% set ns = namespace(x='x' * 9) %}{% for i in range(40) %}"
        "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
        *(many(one) for one in DEAR),
    ],
)
def test_what_a_template_may_not_do(source: str, little_work: None) -> None:
    # Jinja may refuse while it compiles (constants) or while it renders.
    with pytest.raises((InvalidArgument, LoadError)) as exc:
        render(source)
    assert ".py" not in str(exc.value)
    assert "/" not in str(exc.value)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none ~ missing }}", "a1None"),
        ("{{ ['a', 1] }}{{ (1, 2) }}{{ {'a': [1]} }}", "['a', 1](1, 2){'a': [1]}"),
        ("{% for a, b in [(1, 2)] %}{{ a }}{{ b }}{% endfor %}", "12"),
        ("{{ ['a', 'b'] | join(', ') }}{{ '-'.join(['a', 'b']) }}", "a, ba-b"),
        ("{{ messages | join('|', attribute='role') }}", "user"),
        ("{{ 'aXbX' | replace('X', '.') }}{{ 'aXbX'.replace('X', '.', 1) }}", "a.b.a.bX"),
        ("{{ 'ab' | replace('', '-') }}", "-a-b-"),
        ("{{ '{} {:>3}|{a:.2f}'.format('x', 1, a=0.5) }}", "x   1|0.50"),
        ("{{ 'a\nb' | indent(2) }}{{ 'a\nb' | indent('> ', true) }}", "a\n  b> a\n> b"),
        ("{{ [1, 2.5] | sum }}{{ [{'n': 2}] | sum(attribute='n') }}", "3.52"),
        ("{{ {'b': 1, 'a': [1]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  1\n ]\n}'),
        ("{% macro m(x) %}<{{ x }}{{ caller() }}>{% endmacro %}"
         "{% call m(1) %}in{% endcall %}", "<1in>"),
        ("{% for i in [1] recursive %}{{ i }}{% endfor %}{% for i in [] %}{% else %}-{% endfor %}",
         "1-"),
        ("{{ messages[::-1] | map(attribute='role') | list }}", "['user']"),
        ("{% set x = [1] + [2] %}{{ x[-1] }}{{ 'a' + 'b' }}{{ 3 * 'x' }}{{ 2 ** 3 }}", "2abxxx8"),
    ],
)  # fmt: skip
def test_what_templates_do_stays_as_it_is(source: str, text: str) -> None:
    assert ChatTemplate(source).render([Message("user", "hi")]) == text


def test_a_long_conversation_takes_steps_enough() -> None:
    """Two loops over it, and a macro for each message."""
    source = (
        "{% macro m(x) %}{{ x.role }}{% endmacro %}"
        "{% for x in messages %}{% endfor %}{% for x in messages %}{{ m(x) }}{% endfor %}"
    )
    text = ChatTemplate(source).render([Message("user", "hi")] * 10_000)
    assert text == "user" * 10_000


@pytest.mark.parametrize("expression", DEAR)
def test_the_event_loop_does_not_wait_for_it(expression: str) -> None:
    """What is dear is given up, and is a thread's to do; there it is bounded, too."""
    template = ChatTemplate(many(expression), cpu_time=time.thread_time)
    with pytest.raises(TooDear):
        template.render(TURNS, inline=True)


@pytest.mark.parametrize(
    "body",
    [
        "x" * 200_000 + "{{ 1 }}",  # literals of the template
        "{% set a = i %}" * 300,
        "{% for j in range(99999) if false %}{% endfor %}",
        "{% block b scoped %}{% for j in range(999) %}{% endfor %}{% endblock %}",
    ],
)
def test_what_a_body_takes_counts_for_each_pass(body: str, little_work: None) -> None:
    with pytest.raises(InvalidArgument, match="so many steps"):
        render(f"{{% for i in range(99999) %}}{body}{{% endfor %}}")


def test_the_clock_has_the_last_word() -> None:
    clock = itertools.count(0.0, 9.0)
    template = ChatTemplate("{% for i in range(99999) %}{% endfor %}", cpu_time=clock.__next__)
    with pytest.raises(InvalidArgument, match="more than 10 seconds"):
        template.render(TURNS)


@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        "{% for m in messages %}{{ m.content | trim ~ eos_token }}{% endfor %}",
        "{% for m in messages %}{{ m.content.split('</think>')[-1].lstrip() }}{% endfor %}",
        "{% for m in messages %}{% if 'x' in m.content %}{{ m | tojson }}{% endif %}{% endfor %}",
        "{% set ns = namespace(s='') %}{% for m in messages %}"
        "{% set ns.s = ns.s ~ m.content %}{% endfor %}{{ ns.s }}",
    ],
)
def test_long_messages_are_not_the_templates_fault(source: str) -> None:
    """All bounds grow with what the client has sent."""
    text = render(source, [Message("user", "x y " * 750_000)] * 2)
    assert len(text) >= 6_000_000 - 4


def test_the_error_names_the_rule() -> None:
    with pytest.raises(InvalidArgument, match="may not do this: a repetition of more than 1000"):
        render("{{ 'a' * 10 ** 12 }}")
    with pytest.raises(InvalidArgument, match=r"may not do this: to_bytes\(\) of int"):
        render("{{ (1).to_bytes(10 ** 9) }}")


@pytest.mark.parametrize("turns", [1, 20])
def test_honest_templates_are_quick(turns: int) -> None:
    """By the units that they are charged for."""
    conversation = [Message("user", "word " * 10)] * turns
    assert ChatTemplate(CHATML).render(conversation, inline=True)


def test_the_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_OUTPUT", 100)
    with pytest.raises(InvalidArgument, match="a prompt of more than 100 characters"):
        render("{% for i in range(99) %}{{ i }} {% endfor %}")


@pytest.mark.parametrize("source", ["{% if %}", "{{", "{% nonsense %}", "{{ 1 | nofilter }}"])
def test_no_template_at_all(source: str) -> None:
    with pytest.raises(LoadError, match="template"):
        ChatTemplate(source)


@given(st.lists(st.builds(Message, st.just("user"), st.text()), max_size=4))
def test_content_is_never_taken_as_template(turns: list[Message]) -> None:
    text = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}").render(turns)
    assert text == "".join(f"[{turn.content}]" for turn in turns)


SOURCE = st.lists(
    st.sampled_from(
        ["{{", "}}", "{%", "%}", "for", "m", "in", "messages", "endfor", "if", "endif", " ", "'",
         "a", "+", "|", ".", "[0]", "content", "(", ")", "*", "9", "range", "set", "=", "not", "~"]
    )
).map("".join)  # fmt: skip


def outcome(source: str) -> str | Exception:
    try:
        return render(source)
    except (InvalidArgument, LoadError) as exc:
        return exc


@given(SOURCE)
def test_any_template_gives_text_or_a_typed_error(source: str) -> None:
    result = outcome(source)
    assert isinstance(result, str) or str(result)
