"""A template from a model folder is foreign code: it can neither reach Python nor run for ever."""

import time

import jinja2
import pytest
from jinja2.exceptions import SecurityError

from server.text.sandbox import MAX_RENDERED_CHARS, RenderLimit, compile_template, render_template

LIMIT_S = 0.2


def render(source: str, **variables: object) -> str:
    return render_template(compile_template(source), variables, LIMIT_S)


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% set c = b %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}x{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for x in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
    ],
    ids=["loops", "filtered loops", "macros", "recursive loops"],
)
def test_endless_template_ends_at_its_limit(source: str) -> None:
    began = time.thread_time()
    with pytest.raises(RenderLimit, match="too long"):
        render(source)
    assert time.thread_time() - began < 5 * LIMIT_S


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 9 * [1] }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set s = 'ab' * 1000000 %}{% for i in range(99) %}{{ s }}{% endfor %}",
    ],
)
def test_template_cannot_fill_the_memory(source: str) -> None:
    with pytest.raises(RenderLimit, match="it makes"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ ''['__class__'] }}{{ (''|attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ strftime_now.__code__.co_code }}",
        "{{ self.__class__.__mro__ }}",
    ],
)
def test_template_cannot_reach_python(source: str) -> None:
    with pytest.raises(SecurityError):
        render(source, messages=[])


def test_pythons_attributes_have_no_value() -> None:
    assert render("{{ raise_exception.__globals__ }}{{ strftime_now.__code__ }}{{ ''.__class__ }}") == ""


def test_files_cannot_be_included() -> None:
    with pytest.raises(TypeError, match="no loader"):
        render("{% include '/etc/passwd' %}")


def test_limits_leave_results_alone() -> None:
    source = "{{ 2 ** 3 * 4 }} {{ 'ab' * 2 + 'c' }} {{ [1] + [2] }} {{ 2.5 * 2 }} {{ 1 ~ 'x' ~ none }} {{ 2 * 'z' }}"
    assert render(source) == "32 ababc [1, 2] 5.0 1xNone zz"
    assert render("{{ dict.fromkeys(['a'], 1) }}") == "{'a': 1}"
    assert len(render("{{ text }}", text="a" * MAX_RENDERED_CHARS)) == MAX_RENDERED_CHARS


def test_loops_keep_their_variables() -> None:
    source = (
        "{% for x in items %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% else %}none{% endfor %}"
    )
    assert render(source, items=[7, 8]) == "1/2,2/2"
    assert render(source, items=[]) == render(source) == "none"


def test_syntax_error_is_raised_with_its_line() -> None:
    with pytest.raises(jinja2.TemplateSyntaxError) as found:
        compile_template("a\n{% endfor %}")
    assert found.value.lineno == 2
