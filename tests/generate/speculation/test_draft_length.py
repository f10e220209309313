"""The number of drafted tokens follows their acceptance and the measured times of calls."""

import pytest

from hf_cpu_accel.generate.speculation.draft import SIZES, DraftLength, common_length, expected_tokens


def measured(costs, *, most=SIZES[-1], is_free=True):
    lengths = DraftLength(most, is_free=is_free)
    for drafted, seconds in costs.items():
        lengths.measured(drafted, seconds)
    return lengths


CHEAP = {0: 1.0, 1: 1.1, 3: 1.2, 7: 1.3, 15: 1.6}
DEAR = {0: 1.0, 1: 2.0, 3: 4.0, 7: 8.0, 15: 16.0}


def test_drafts_that_are_accepted_become_long():
    lengths = measured(CHEAP)
    for _ in range(50):
        lengths.observe(3, 15, 15)
    assert lengths.choose(3, 100) == 15
    assert lengths.choose(3, 9) == 7
    assert lengths.choose(3, 0) == 0


def test_drafts_that_are_rejected_end():
    lengths = measured(CHEAP)
    for _ in range(200):
        lengths.observe(2, 1, 0)
    assert lengths.choose(2, 100) == 0


def test_nothing_is_drafted_where_each_row_costs_as_much_as_a_call():
    lengths = measured(DEAR)
    for _ in range(50):
        lengths.observe(4, 15, 15)
    assert lengths.choose(4, 100) == 0


def test_confidences_are_apart():
    lengths = measured(CHEAP)
    for _ in range(100):
        lengths.observe(1, 1, 0)
        lengths.observe(4, 15, 15)
    assert (lengths.choose(1, 100), lengths.choose(4, 100)) == (0, 15)
    assert lengths.choose(0, 100) == 0


def test_more_than_was_asked_for_is_not_drafted():
    lengths = measured(CHEAP, most=5)
    for _ in range(50):
        lengths.observe(4, 5, 5)
    assert lengths.choose(4, 100) == 5


def test_what_no_longer_holds_is_forgotten():
    lengths = measured(CHEAP)
    for _ in range(100):
        lengths.observe(3, 15, 15)
    for _ in range(100):
        lengths.observe(3, 15, 0)
    assert lengths.choose(3, 100) == 0


def test_a_draft_model_is_tried_again():
    lengths = measured(CHEAP, is_free=False)
    for _ in range(100):
        lengths.observe(3, 1, 0)
    chosen = [lengths.choose(3, 100) for _ in range(100)]
    assert 2 <= sum(map(bool, chosen)) <= 4


def test_drafts_of_a_slow_model_do_not_pay():
    lengths = measured(CHEAP, is_free=False)
    lengths.measured_draft(1, 0.9)
    for _ in range(50):
        lengths.observe(3, 15, 15)
    assert lengths.choose(3, 100) == 0


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9, 1.0])
def test_the_mean_number_of_tokens(acceptance):
    assert expected_tokens(acceptance, 3) == pytest.approx(sum(acceptance**k for k in range(4)))


def test_common_length():
    assert [common_length([1, 2, 3], other) for other in ([], [1, 2], [1, 5], [1, 2, 3, 4])] == [0, 2, 1, 3]
