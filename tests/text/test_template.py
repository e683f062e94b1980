"""Chat templates: what they may do, and what a bad one costs."""

from __future__ import annotations

import time
from datetime import datetime

import pytest

from agentkv.errors import ChatTemplateError
from agentkv.messages import Message
from agentkv.text.budget import MAX_SECONDS
from agentkv.text.template import ChatTemplate

NOW = datetime(2024, 7, 26)
MESSAGES = (Message("system", "Be brief."), Message("user", "Hi \n"))


def render(source: str) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(
        MESSAGES, add_generation_prompt=True, now=NOW
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{% endfor %}",
            "<s>[system][user]",
        ),
        ("{{ messages[1].content | trim ~ '!' }}", "Hi!"),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{{ messages[0] | tojson }}", '{"role": "system", "content": "Be brief."}'),
        ("{% for m in messages %}{% if loop.last %}{% break %}{% endif %}x{% endfor %}", "x"),
        ("{% generation %}{{ messages | length }}{% endgeneration %}", "2"),
        (
            (
                "{% set ns = namespace(n=0) %}{% for m in messages %}"
                "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
            ),
            "2",
        ),
        (
            (
                "{{ messages | selectattr('role', 'equalto', 'user')"
                " | map(attribute='role') | join(',') }}"
            ),
            "user",
        ),
        ("{% macro f(a) %}<{{ a }}>{% endmacro %}{{ f('x') ~ f('y') }}", "<x><y>"),
        ("{{ messages[::-1][0].content.strip().split('i')[0] }}", "H"),
        ("{{ (messages + [{'role': 'x'}])[2].role }}", "x"),
        ("{{ '%s-%d' % ('a', 3) }}{{ '{}'.format(7) }}{{ 3 * 'ab' }}", "a-37ababab"),
        ("{{ tools is none }}{{ unknown is defined }}", "TrueFalse"),
    ],
)
def test_templates_may_do_what_models_ask_of_them(source: str, expected: str) -> None:
    assert render(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include 'file' %}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content + 'x' }}",
        "{% for m in messages %}",
        "{{ nofilter | nofilter }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ namespace(_x=1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_a_template_may_not_do_is_a_template_error(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ [0] * 10**9 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'a'.center(10**9) }}",
        "{{ 'a' | center(10**9) }}",
        "{{ 'a\\nb' | indent(10**9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**9) }}",
        "{{ (1).to_bytes(10**9, 'big') }}",
        "{{ range(10**9) | list }}",
        "{{ 5.5 | round(10**9, 'ceil') }}",
        "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
        "{{ ('b' * 100000).join(range(100000) | map('string')) }}",
        (
            "{% set ns = namespace(x='a') %}"
            "{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
        ),
        (
            "{% set ns = namespace(x='a') %}"
            "{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
        ),
        (
            "{% set ns = namespace(x=[1]) %}"
            "{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}"
        ),
        (
            "{% set ns = namespace(x=7) %}"
            "{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}"
        ),
        "{% set a = 'x' * 100000 %}{% for i in range(100000) %}{{ a }}{% endfor %}",
    ],
)
def test_a_template_that_grows_without_bound_is_stopped_at_once(source: str) -> None:
    before = time.thread_time()
    with pytest.raises(ChatTemplateError):
        render(source)
    assert time.thread_time() - before < 5 * MAX_SECONDS


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    ],
)
def test_a_template_that_never_ends_is_stopped(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentkv.text.budget.MAX_SECONDS", 0.2)
    before = time.thread_time()
    with pytest.raises(ChatTemplateError, match=r"more than"):
        render(source)
    assert time.thread_time() - before < 4


def test_reserved_variables_are_refused() -> None:
    with pytest.raises(ChatTemplateError, match="messages"):
        ChatTemplate("", {"messages": []})


def test_a_large_conversation_stays_within_the_budget() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role ~ m.content | trim }}{% endfor %}")
    messages = [Message("user", "x" * 1000)] * 2000
    text = template.render(messages, add_generation_prompt=False, now=NOW)
    assert len(text) == 2000 * 1004


def test_errors_show_what_the_template_says_but_never_a_message() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError) as caught:
        render("{{ raise_exception('bad: ' + messages[0].content) }}")
    assert "brief" not in str(caught.value)
    assert caught.value.__cause__ is None
