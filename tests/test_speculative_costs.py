"""speculative.py: what guesses are worth. How many to verify is a question of seconds only."""

import itertools
import math
import random

import pytest

import speculative
from speculative import Acceptance, Costs, Draft, Drafter, NGram, Speculation, Tally, choose


class Request:
    def __init__(self, tokens=()):
        self.tokens = list(tokens)


# ---------------------------------------------------------------- by hand


def test_a_step_between_two_measured_ones_takes_what_lies_between():
    costs = Costs({1: 10.0, 3: 14.0, 8: 19.0}, apart=0.5)
    assert [costs.step_s(n) for n in (1, 2, 3, 4, 8, 10)] == [10, 12, 14, 15, 19, 21]
    assert costs.step_s(3, 2) == 15


def test_of_one_measured_step_the_time_grows_with_the_rows():
    assert [Costs({4: 8.0}).step_s(n) for n in (1, 4, 8)] == [8, 8, 16]
    assert [Costs({4: 8.0, 5: 16.0}).step_s(n) for n in (1, 3, 6)] == [8, 8, 24], "never below 0"


def test_a_step_that_took_long_once_makes_no_larger_one_long():
    assert Costs({1: 10.0, 2: 90.0, 4: 13.0, 8: 20.0}).seconds == [10, 13, 13, 20]


def test_what_steps_take_corrects_what_they_are_thought_to_take():
    costs = Costs({1: 10.0, 2: 12.0})
    costs.saw(1, 0, 11.0)
    assert costs.off == pytest.approx([1.01, 1.0002])
    costs.saw(2, 1, 1000.0)  # something else ran: counts as twice
    assert costs.off == pytest.approx([1.01, 1.10018])
    assert costs.step_s(2, 1) == pytest.approx(12 * 1.10018)
    for _ in range(300):  # what no one verifies any more is thought of as of plain steps
        costs.saw(1, 0, 10.0)
    assert costs.off == pytest.approx([1, 1], abs=1e-3)


def test_the_example_of_choose():
    costs = Costs({1: 10.0, 2: 14.0, 3: 18.0})
    assert choose(costs, [[0.8, 0.3]], 1, 1) == ([1], (1.8, 14.0))


def test_guesses_that_cost_no_time_are_all_verified_and_dear_ones_never():
    flat, steep = Costs({1: 10.0, 99: 10.0}), Costs({1: 10.0, 99: 990.0})
    assert choose(flat, [[0.5, 0.25, 0.1]], 1, 1)[0] == [3]
    assert choose(steep, [[0.99, 0.98, 0.97]], 1, 1)[0] == [0]


def test_the_time_of_making_guesses_counts():
    costs, chances = Costs({1: 10.0, 3: 14.0}), [[0.8, 0.64]]
    assert choose(costs, chances, 1, 1)[0] == [2]
    assert choose(costs, chances, 1, 1, lambda n: 3.6 * n)[0] == [1]
    assert choose(costs, chances, 1, 1, lambda n: 9.0 * n)[0] == [0]
    assert choose(costs, chances, 1, 1, lambda n: 5.0 * (n > 0))[0] == [2], "all at once"


def test_a_gain_of_less_than_the_margin_is_none():
    costs = Costs({1: 100.0, 2: 100.0})
    assert choose(costs, [[0.019]], 1, 1)[0] == [0] and choose(costs, [[0.021]], 1, 1)[0] == [1]


def test_drafts_of_different_lengths_attend_apart_and_that_costs():
    """A third guess would be of a second length."""
    chances, points = [[0.9, 0.6], [0.5]], {2: 10.0, 9: 17.0}
    assert choose(Costs(points), chances, 2, 2) == ([2, 1], (4.0, 13.0))
    assert choose(Costs(points, apart=1.0), chances, 2, 2) == ([1, 1], (3.4, 13.0))
    assert choose(Costs(points, apart=9.0), chances, 2, 2)[0] == [0, 0]
    alike = choose(Costs({2: 10.0, 9: 10.0}, apart=1.0), [[0.9, 0.8]] * 2, 2, 2)
    assert alike == ([2, 2], (pytest.approx(5.4), 11.0)), "both of two: one length again"


def test_nobody_is_slowed_down_for_anothers_sake():
    """1.8 times as fast, and 1.4 times as slow: for one alone it pays, beside three it does not,
    though more tokens a second would come out; where all gain it does."""
    costs = Costs({1: 10.0, 2: 14.0, 3: 18.0, 4: 22.0, 5: 30.8, 6: 31.0, 8: 32.0})
    good, bad = [0.8], []
    assert choose(costs, [good], 1, 1)[0] == [1]
    assert choose(costs, [good, bad, bad, bad], 4, 4)[0] == [0, 0, 0, 0]
    assert choose(costs, [good] * 4, 4, 4)[0] == [1] * 4


def test_rates_are_of_each_place_and_begin_at_the_prior():
    acceptance = Acceptance(lambda kind: 0.5)
    assert acceptance.survival(0, 3) == [0.5, 0.25, 0.125]
    for _ in range(4):
        acceptance.count(0, 1, True)  # the first was right, the second wrong
    first, second = (4 + 4 * 0.5) / 8, (0 + 4 * 0.75) / 8
    expected = [first, first * second, first * second * second]
    assert acceptance.survival(0, 3) == pytest.approx(expected)
    assert acceptance.survival(1, 1) == [0.5], "of another kind nothing is known"


def test_rates_are_of_all_that_was_counted_up_to_now():
    """They are kept until more is counted, of their kind and for as many places as were asked."""
    draw, acceptance = random.Random(3), Acceptance(lambda kind: 0.3 + kind / 10)
    for _ in range(200):
        right = draw.randrange(6)
        acceptance.count(draw.randrange(3), right, draw.random() < 0.7, draw.choice("ab"))
        for kind in range(3):
            most, fresh = draw.randrange(8), Acceptance(acceptance.prior)
            fresh.tried, fresh.right = acceptance.tried, acceptance.right
            assert acceptance.rates(kind, most) == fresh.rates(kind, most)


def test_what_is_not_reached_counts_neither_way():
    acceptance = Acceptance()
    acceptance.count(0, 0, True)
    acceptance.count(0, 2, False)
    assert acceptance.tried == {(0, 0): 2, (0, 1): 1}
    assert acceptance.right == {(0, 0): 1, (0, 1): 1}


def test_a_request_has_luck_of_its_own():
    """0.5 is expected of all; of one that was wrong 8 times less, of one that was right more."""
    acceptance = Acceptance(lambda kind: 0.5)
    for _ in range(1000):
        acceptance.count(0, 1, False)
        acceptance.count(0, 0, True)
    for _ in range(8):
        acceptance.count(0, 0, True, "unlucky")
        acceptance.count(0, 1, False, "lucky")
    (rate,) = acceptance.rates(0, 1)
    assert acceptance.survival(0, 1) == [rate] == pytest.approx([0.5], abs=0.02)
    assert acceptance.survival(0, 1, "unlucky")[0] == pytest.approx(0.5 * 4 / 7, abs=0.05)
    assert acceptance.survival(0, 1, "lucky")[0] == pytest.approx(0.5 * 11 / 7, abs=0.05)
    acceptance.own["lucky"] = 30.0, 10.0
    assert acceptance.survival(0, 3, "lucky")[0] == 0.98, "never certain"
    for _ in range(60):  # it goes on with something else
        acceptance.count(0, 0, True, "lucky")
    assert acceptance.survival(0, 1, "lucky")[0] < 0.25


def test_old_rates_fade():
    acceptance = Acceptance()
    for _ in range(2000):
        acceptance.count(0, 1, False)
    assert acceptance.tried[0, 0] == pytest.approx(acceptance.MEMORY, rel=0.01)
    for _ in range(300):
        acceptance.count(0, 0, True)
    assert acceptance.survival(0, 1)[0] < 0.25


def test_a_tally_counts_rounds_places_and_tokens():
    tally = Tally()
    tally.add(3, 1, 2)
    tally.add(0, 0, 1)
    tally.add(2, 2, 3)
    assert (tally.rounds, tally.drafts, tally.guesses, tally.accepted, tally.tokens) == (
        3,
        2,
        5,
        3,
        6,
    )
    assert (tally.reached, tally.stayed, tally.a_round) == ([2, 2, 1], [2, 1, 0], 2)
    assert tally.usage == {"rounds": 3, "guesses": 5, "guesses_accepted": 3}


# ---------------------------------------------------------------- against trying all


@pytest.mark.parametrize("seed", range(30))
def test_no_other_counts_promise_to_be_faster(seed):
    draw = random.Random(seed)
    chances = []
    for _ in range(3):
        one = sorted((draw.random() for _ in range(draw.randrange(4))), reverse=True)
        chances.append(one)
    points, at = {}, 10.0
    for rows in range(3, 13):
        points[rows], at = at, at + draw.choice([0, 0, 1, 2, 8])
    costs = Costs(points)
    counts, (tokens, seconds) = choose(costs, chances, 3, 3)

    def speed(each) -> float:
        """Logarithm of how many times as fast a request gets on, summed over all."""
        gains = [math.log(1 + sum(one[:n])) for one, n in zip(chances, each)]
        return sum(gains) - 3 * math.log(costs.step_s(3 + sum(each)) / costs.step_s(3))

    assert tokens == pytest.approx(3 + sum(sum(one[:n]) for one, n in zip(chances, counts)))
    assert seconds == costs.step_s(3 + sum(counts))
    best = max(map(speed, itertools.product(*(range(len(one) + 1) for one in chances))))
    low = best <= 3 * math.log(speculative.MARGIN)
    assert counts == [0, 0, 0] if low else speed(counts) == pytest.approx(best)


class Coin(Drafter):
    """Guesses that are right as often as it is told, by place."""

    most = 4

    def __init__(self, rates):
        self.rates, self.asked = rates, []

    def propose(self, requests, counts, rows):
        self.asked.append(counts)
        return [Draft([0] * n) for n in counts]


def rounds(rates, costs, count, fixed=None, seed=0) -> Speculation:
    """`count` rounds of one request, steps taking just what they are thought to take."""
    draw, speculation = random.Random(seed), Speculation(Coin(rates), fixed=fixed)
    speculation.costs, request = costs, Request([0])
    for _ in range(count):
        (draft,) = speculation.propose([request], [99], 1, None)
        right = 0
        while right < len(draft.ids) and draw.random() < rates[right]:
            right += 1
        request.tokens += [0] * (right + 1)
        speculation.count(request, len(draft.ids), right, right + 1)
        speculation.draft_s = speculation.asking_s = 0.0
        took = costs._measured(1 + len(draft.ids), len(draft.ids) > 0)
        speculation.account(took, [len(draft.ids)])
        speculation.guess_s = 0.0
    return speculation


CPU = {1: 10.0, 2: 12.0, 3: 13.0, 4: 14.0, 5: 16.0}
RATES = {"good": [0.9, 0.9, 0.8, 0.8], "fair": [0.5, 0.4, 0.3, 0.2], "bad": [0.02] * 4}


@pytest.mark.parametrize("fixed", [None, 1, 4])
@pytest.mark.parametrize("name", RATES)
def test_what_is_expected_is_what_comes(name, fixed):
    tally = rounds(RATES[name], Costs(CPU), 1500, fixed).tally
    assert tally.speedup == pytest.approx(tally.expected_speedup, rel=0.04)
    if fixed:
        e, product = 1.0, 1.0
        for rate in RATES[name][:fixed]:
            product *= rate
            e += product
        assert tally.a_round == pytest.approx(e, rel=0.03)
        assert tally.speedup == pytest.approx(e * CPU[1] / CPU[1 + fixed], rel=0.03)
    elif name == "good":
        assert tally.speedup > 2
    else:  # the few probes cost next to nothing
        assert tally.speedup > 0.99


def test_as_many_guesses_as_are_best_are_chosen_and_asked_for():
    best = {}
    for name, rates in RATES.items():
        worth = [rounds(rates, Costs(CPU), 1500, n).tally.speedup for n in (1, 2, 3, 4)]
        best[name] = max(1.0, *worth)
        found = rounds(rates, Costs(CPU), 1500)
        assert found.tally.speedup == pytest.approx(best[name], rel=0.05)
    assert best["bad"] == 1 < best["fair"] < best["good"]


def test_a_drafter_that_does_not_pay_is_asked_now_and_then():
    """It may have come to be good: nobody would know."""
    rates = [0.0] * 4
    speculation = rounds(rates, Costs(CPU), 400)
    asked = len(speculation.drafter.asked)
    assert 4 <= asked <= 20 and speculation.tally.guesses <= 3 * 20
    assert all(counts == [1] for counts in speculation.drafter.asked[-3:])


def test_a_fixed_number_is_asked_for_in_every_round():
    speculation = rounds([0.0] * 4, Costs(CPU), 50, fixed=3)
    assert speculation.drafter.asked == [[3]] * 50


def test_no_more_is_asked_for_than_there_is_room():
    speculation = Speculation(Coin([1.0] * 4), fixed=4)
    requests = [Request([0]) for _ in range(3)]
    drafts = speculation.propose(requests, [2, 0, 9], 3, None)
    assert [len(draft.ids) for draft in drafts] == [2, 0, 4]
    assert speculation.drafter.asked == [[2, 4]] and set(speculation.drafts) == {
        requests[0], requests[2]
    }  # fmt: skip
    speculation.keep(requests[2:])
    assert set(speculation.drafts) == {requests[2]}


# ---------------------------------------------------------------- learning without verifying


def test_free_guesses_are_learnt_from_whether_they_were_verified_or_not():
    """Steps are so dear that nothing is verified; what came tells that the guesses are right."""
    speculation, request = Speculation(NGram()), Request([5, 6, 7, 8] * 3)
    speculation.costs = Costs({1: 1.0, 2: 99.0})
    counted = []
    speculation.acceptance.count = lambda *given: counted.append(given)
    for token in [5, 6, 7, 8] * 10:
        (draft,) = speculation.propose([request], [9], 1, None)
        assert draft.ids == []
        request.tokens.append(token)
    assert counted and all(not wrong and right == 9 for _, right, wrong, _ in counted)


def test_a_guess_that_did_not_come_is_counted_once_as_wrong():
    speculation, request = Speculation(NGram()), Request([5, 6, 7, 8, 5, 6])
    speculation.costs = Costs({1: 1.0, 2: 99.0})
    counted = []
    speculation.acceptance.count = lambda *given: counted.append(given)
    speculation.propose([request], [9], 1, None)  # 7, 8, 5, 6, ...
    for token in (7, 1, 2, 3):
        request.tokens.append(token)
        speculation.propose([request], [9], 1, None)
    assert [given[1:] for given in counted] == [(1, True, request)]


def test_where_nothing_is_alike_nothing_is_guessed_and_nothing_is_expected():
    speculation, request = Speculation(NGram()), Request([5, 6, 7, 8])
    speculation.costs = Costs({1: 1.0, 9: 1.0})
    (draft,) = speculation.propose([request], [9], 1, None)
    assert (draft.ids, draft.kind, speculation.expected) == ([], 0, (1.0, 1.0))
    assert speculation.acceptance.survival(0, 2) == [0.0, 0.0]


def test_what_a_request_that_ended_had_is_forgotten():
    speculation, request = Speculation(NGram()), Request([5, 6, 5, 6, 5])
    speculation.costs = Costs({1: 1.0, 9: 1.0})
    speculation.propose([request], [3], 1, None)
    assert speculation.watched and speculation.drafts and speculation.drafter.known
    speculation.acceptance.count(1, 1, True, request)
    speculation.keep([])
    assert not (speculation.watched or speculation.drafts or speculation.drafter.known)
    assert not speculation.acceptance.own


def test_the_lines_for_people():
    found = rounds([0.9] * 4, Costs({n: s / 1e3 for n, s in CPU.items()}), 200, fixed=4)
    first, second = found.lines()
    assert "of 800 accepted" in first and "tokens a round in 200 rounds" in first
    assert "times plain decoding: " in second
    assert "ms a token, by its own measure 10.0 without guesses; " in second
    times = found.tally.spent_s / found.tally.tokens
    assert f": {1e3 * times:.1f} ms a token" in second
    assert len(Speculation(Coin([])).lines()) == 1, "nothing has been measured"
    assert speculative.SIZES[0] == 1
    line = Costs({1: 0.01, 3: 0.0125, 4: 0.0135, 17: 0.03}).line()
    assert (
        line
        == "steps    ms by rows: 10.0 with 1, 13.5 with 4 (timed now, to know what guesses cost)"
    )
