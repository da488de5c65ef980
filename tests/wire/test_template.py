"""Chat templates: Hugging Face's dialect, and programs that mean harm."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.errors import InvalidArgument, LoadError
from dynamo_trio.wire.openai import template as templates
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


def render(source: str, turns: list[Message] | None = None) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(turns or TURNS)


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
    ],
)
def test_what_a_template_may_not_do(source: str) -> None:
    # Jinja may refuse while it compiles (constants) or while it renders.
    with pytest.raises((InvalidArgument, LoadError)) as exc:
        render(source)
    assert ".py" not in str(exc.value)
    assert "/" not in str(exc.value)


def test_the_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_OUTPUT", 100)
    with pytest.raises(InvalidArgument, match="too long"):
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
