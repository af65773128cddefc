"""The page on models is made from results of the templates and the messages that the tests have."""

from __future__ import annotations

from bench.answers.page import PAGE, models_page
from bench.answers.results import saved_results
from tests.backends.llama.test_template_forms import templates
from tests.sessions.answers.answer_messages import MESSAGES
from tests.sessions.answers.test_round_trip import EXCEPTIONS
from tests.sessions.history.test_stateless_loops import OTHERWISE
from tools.build_engine import pinned_version


def test_the_page_has_the_results() -> None:
    assert PAGE.read_text() == models_page(), "run `make docs`"


def test_the_results_are_those_of_the_tests() -> None:
    results = saved_results()
    facts = [row.facts for row in results.rows]

    assert results.engine == pinned_version(), "run `make answers`"
    assert [each.template for each in facts] == [path.stem for path in templates()]
    assert max(each.messages for each in facts) == len(MESSAGES)
    assert {each.template: each.exceptions for each in facts if each.exceptions} == EXCEPTIONS
    assert {each.template: each.why_again for each in facts if each.why_again} == OTHERWISE
    assert all(each.again[0] == 0 for each in facts if each.template not in OTHERWISE)


def test_every_difference_has_a_reason() -> None:
    differences = [d for row in saved_results().rows for d in row.comparison.differences]

    assert differences and all(each.why for each in differences)
    assert not [each for each in differences if each.right == "llama-server"]
