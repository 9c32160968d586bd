"""scheduler.py: plans by hand, what the cache holds against what was committed, random workloads.

`Ledger` is a manager and a cache in one, made of lists of ids: a step writes the planned ids, and
`computed` is right exactly if the first `computed` of them are the request's committed tokens.
"""

import random

import pytest

from scheduler import Request, Scheduler


class Ledger:
    """Room for `slots` requests; chunks end at multiples of `every`; prompts match `prefix` ids."""

    def __init__(self, slots, every=10**9, prefix=0):
        self.slots, self.every, self.prefix = slots, every, prefix
        self.held = {}  # request -> ids in the cache
        self.forks = 0

    def door(self, request):
        pass

    def match(self, tokens, salt):
        return [], min(self.prefix, len(tokens) - 1)

    def limit(self, request, n):
        return min(n, self.every - request.computed % self.every)

    def grow(self, request, n):
        assert n > 0, "asked for room for nothing"
        ids = self.held.setdefault(request, request.tokens[: request.computed])
        assert len(self.held) <= self.slots, "more requests than slots"
        known = [*request.tokens, *request.draft][request.computed : request.computed + n]
        assert len(known) == n, f"{n} planned, {len(known)} known"
        ids[request.computed :] = known
        return True

    def fork(self, parent, child):
        assert child not in self.held
        self.forks += 1
        self.held[child] = list(self.held[parent])
        assert len(self.held) <= self.slots, "more requests than slots"

    def commit(self, request):
        assert request in self.held

    def release(self, request):
        self.held.pop(request, None)


def scheduler_of(*requests, budget=8, max_running=4, **ledger):
    scheduler = Scheduler(Ledger(max_running, **ledger), budget, max_running)
    for request in requests:
        scheduler.add(request)
    return scheduler


def prompt(id, length, **fields):
    return Request(id, [100 * id + i for i in range(length)], **fields)


def forked(scheduler, plan):
    """The plan with all samples of the prompts it completes, as the engine forks them."""
    whole = []
    for request, n in plan:
        whole.append((request, n))
        if n == request.behind:
            whole += [(scheduler.fork(request, i), n) for i in range(1, request.samples)]
    return whole


def advance(scheduler, outputs):
    """One step in which every sampled row yields id 7; requests end after `outputs` tokens."""
    plan = scheduler.plan()
    sizes = [(request.id, n) for request, n in plan]
    plan = forked(scheduler, plan)
    kept = []
    for request, n in plan:
        sampled = n == request.behind
        last = sampled and len(request.output) + 1 == outputs
        kept.append(([7] * sampled, "length" if last else None))
    scheduler.commit(plan, kept)
    scheduler.check()
    return sizes


# ---------------------------------------------------------------- by hand


def test_a_prompt_of_10_under_a_budget_of_8_takes_two_steps_then_one_token_a_step():
    request = Request(0, list(range(10)))
    scheduler = scheduler_of(request, budget=8)
    assert [advance(scheduler, 3) for _ in range(4)] == [[(0, 8)], [(0, 2)], [(0, 1)], [(0, 1)]]
    assert (request.tokens[10:], request.finish_reason) == ([7, 7, 7], "length")
    assert not scheduler.busy and scheduler.plan() == []


def test_one_row_yields_the_token_after_it_so_the_newest_token_is_not_computed():
    request = prompt(0, 5)
    scheduler = scheduler_of(request)
    assert request.behind == 5
    advance(scheduler, 9)
    assert (len(request.tokens), request.computed, request.behind) == (6, 5, 1)
    advance(scheduler, 9)
    assert (len(request.tokens), request.computed, request.behind) == (7, 6, 1)
    assert request.output == [7, 7]


def test_decodes_and_prompt_chunks_share_a_step():
    scheduler = scheduler_of(prompt(0, 3), prompt(1, 9), prompt(2, 1))
    steps = [advance(scheduler, 3) for _ in range(5)]
    assert steps == [
        [(0, 3), (1, 5)],
        [(0, 1), (1, 4), (2, 1)],
        [(0, 1), (1, 1), (2, 1)],
        [(1, 1), (2, 1)],
        [],
    ]


def test_three_samples_compute_their_prompt_once_and_then_run_side_by_side():
    first = prompt(0, 10, samples=3)
    scheduler = scheduler_of(first, budget=8)
    steps = [advance(scheduler, 3) for _ in range(4)]
    assert steps == [[(0, 8)], [(0, 2)], [(0, 1)] * 3, [(0, 1)] * 3]
    assert [request.index for request in first.family] == [0, 1, 2]
    assert all(request.output == [7, 7, 7] for request in first.family)
    assert first.finished and not scheduler.manager.held


def test_a_fork_shares_what_is_computed_and_nothing_that_grows_later():
    first = prompt(0, 4, samples=2, params="opaque", seed=9, stamps={"received": 1.0})
    scheduler = scheduler_of(first)
    plan = scheduler.plan()
    child = scheduler.fork(first, 1)
    assert (child.id, child.index, child.params, child.seed) == (0, 1, "opaque", 9)
    assert (first.samples, child.samples) == (1, 1)
    assert (child.tokens, child.computed, child.prompt_tokens) == (first.tokens, 0, 4)
    assert child.family is first.family == [first, child]
    assert scheduler.running == [first, child]
    scheduler.commit([*plan, (child, 4)], [([5], None), ([6], None)])
    first.stamps["scheduled"] = 2.0
    assert (first.output, child.output) == ([5], [6])
    assert (first.computed, child.computed) == (4, 4)
    assert child.stamps == {"received": 1.0}
    assert scheduler.manager.held == {first: [0, 1, 2, 3], child: [0, 1, 2, 3]}


def test_a_budget_smaller_than_the_samples_serves_the_first_of_them():
    scheduler = scheduler_of(prompt(0, 2, samples=3), budget=2)
    assert advance(scheduler, 3) == [(0, 2)]
    assert advance(scheduler, 3) == [(0, 1), (0, 1)]
    while scheduler.busy:
        assert len(advance(scheduler, 3)) <= 2


@pytest.mark.parametrize("ids, stay", [([50], 1), ([60, 51], 2), ([60, 61, 52], 3), ([], 1)])
def test_of_n_rows_k_of_them_drafts_n_minus_k_and_the_accepted_stay(ids, stay):
    """1 + 2 rows: of 3 rows, 2 of them drafts, 3 - 2 + max(len(ids) - 1, 0) stay."""
    request = prompt(0, 4)
    scheduler = scheduler_of(request)
    advance(scheduler, 9)
    request.draft = [60, 61]
    assert request.behind == 3
    plan = scheduler.plan()
    assert plan == [(request, 3)]
    scheduler.commit(plan, [(ids, None if ids else "error")])
    assert request.computed == 4 + stay
    assert request.draft == []
    assert request.tokens == [0, 1, 2, 3, 7, *ids]


def test_forced_ids_are_appended_and_computed_in_the_next_step():
    request = prompt(0, 4)
    scheduler = scheduler_of(request)
    advance(scheduler, 9)
    scheduler.extend(request, [8, 9])
    scheduler.check()
    assert (request.behind, request.output) == (3, [7, 8, 9])
    assert scheduler.plan() == [(request, 3)]
    scheduler.extend(request, [10], "stop")
    assert (request.output, request.finish_reason) == ([7, 8, 9, 10], "stop")
    assert not scheduler.busy and not scheduler.manager.held


def test_a_cached_prefix_is_not_computed_again():
    scheduler = scheduler_of(prompt(0, 10), prompt(1, 3), budget=4, prefix=6)
    assert [advance(scheduler, 2) for _ in range(2)] == [[(0, 4)], [(0, 1), (1, 1)]]


def test_a_chunk_ends_where_the_manager_wants_it_to():
    scheduler = scheduler_of(prompt(0, 10), budget=8, every=4)
    assert [advance(scheduler, 2) for _ in range(4)] == [[(0, 4)], [(0, 4)], [(0, 2)], [(0, 1)]]


def test_an_abort_ends_a_waiting_a_running_and_a_forked_request_at_once():
    running, waiting, last = prompt(0, 3, samples=3), prompt(1, 3), prompt(2, 3)
    scheduler = scheduler_of(running, waiting, last)
    advance(scheduler, 9)
    scheduler.abort(running.family[1])
    scheduler.abort(waiting)
    scheduler.check()
    assert running.family[1].finish_reason == waiting.finish_reason == "abort"
    assert set(scheduler.manager.held) == {running, running.family[2]}
    assert advance(scheduler, 9) == [(0, 1), (0, 1), (2, 3)]
    assert running.family[1].output == [7] and not running.finished
    scheduler.abort(running, "error")
    scheduler.abort(running.family[2])
    assert running.finish_reason == "error" and running.finished
    assert advance(scheduler, 9) == [(2, 1)]


def test_an_abort_of_an_ended_request_changes_nothing():
    request = prompt(0, 3)
    scheduler = scheduler_of(request)
    advance(scheduler, 1)
    scheduler.abort(request)
    assert request.finish_reason == "length"
    scheduler.check()


def test_a_request_aborted_while_its_step_ran_gets_nothing_from_it():
    first = prompt(0, 3, samples=2)
    scheduler = scheduler_of(first)
    plan = forked(scheduler, scheduler.plan())
    scheduler.abort(first)
    scheduler.commit(plan, [([7], None), ([8], None)])
    scheduler.check()
    assert (first.output, first.computed) == ([], 0)
    assert first.family[1].output == [8]
    assert list(scheduler.manager.held) == [first.family[1]]


# ---------------------------------------------------------------- against the reference


@pytest.mark.parametrize("budget", range(1, 17))
def test_any_budget_computes_the_same_tokens_as_one_big_step_each_of_them_once(budget):
    lengths, samples, outputs = [9, 1, 16, 5], [1, 3, 1, 2], 4
    requests = [prompt(i, n, samples=samples[i]) for i, n in enumerate(lengths)]
    scheduler = scheduler_of(*requests, budget=budget)
    planned = 0
    while scheduler.busy:
        sizes = advance(scheduler, outputs)
        assert 1 <= sum(n for _, n in sizes) <= budget
        planned += sum(n for _, n in sizes)
    for request, length, count in zip(requests, lengths, samples):
        assert len(request.family) == count
        for sample in request.family:
            assert sample.tokens == [*prompt(request.id, length).tokens, 7, 7, 7, 7]
    assert planned == sum(n + (outputs - 1) * count for n, count in zip(lengths, samples))


# ---------------------------------------------------------------- by property


class Workload:
    """Random requests, drafts, forced ids and aborts against one scheduler, checked every step."""

    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        self.budget, self.max_running = draw.randint(1, 16), draw.randint(1, 6)
        self.ledger = Ledger(
            self.max_running, draw.choice([10**9, 10**9, 1, 4]), draw.choice([0, 0, 3])
        )
        self.scheduler = Scheduler(self.ledger, self.budget, self.max_running)
        self.drafting, self.aborting = draw.random() < 0.5, draw.random() < 0.5
        self.requests, self.first_planned = [], []

    def arrive(self):
        draw = self.draw
        request = prompt(
            len(self.requests), draw.randint(1, 40), params=draw.randint(1, 12),
            samples=draw.choice([1, 1, draw.randint(1, self.max_running)]),
        )  # fmt: skip
        request.wanted = request.samples
        self.requests.append(request)
        self.scheduler.add(request)

    def maybe_abort(self):
        if self.aborting and self.requests and self.draw.random() < 0.06:
            family = self.draw.choice(self.requests[-5:]).family
            for request in self.draw.choice([family, [self.draw.choice(family)]]):
                self.scheduler.abort(request)

    def result(self, request, n):
        """The new ids of a planned request and why it ends, and how far `computed` must be."""
        if n < request.behind:
            drafts = max(request.computed + n - len(request.tokens), 0)
            assert drafts == len(request.draft) == 0, "drafts planned that cannot be verified"
            return ([], None), request.computed + n
        if self.draw.random() < 0.02:
            return ([], "error"), None
        accepted = self.draw.randint(0, len(request.draft))
        left = request.params - len(request.output)
        ids = [*request.draft[:accepted], self.draw.randint(1000, 2000)][:left]
        stay = n - len(request.draft) + len(ids) - 1
        return (ids, "length" if len(ids) == left else None), request.computed + stay

    def step(self):
        scheduler = self.scheduler
        for _ in range(self.draw.choice([0, 0, 0, 1, 3])):
            if len(self.requests) < 25:
                self.arrive()
        self.maybe_abort()
        scheduler.check()
        busy = scheduler.busy
        plan = scheduler.plan()
        scheduler.check()
        assert bool(plan) == busy, "every step plans something if there is something"
        assert sum(n for _, n in plan) <= self.budget and all(n >= 1 for _, n in plan)
        assert len({request for request, _ in plan}) == len(plan)
        for request, _ in plan:
            if request.id not in self.first_planned:
                self.first_planned.append(request.id)
        plan = forked(scheduler, plan)
        scheduler.check()
        results = [self.result(request, n) for request, n in plan]
        self.maybe_abort()
        scheduler.commit(plan, [kept for kept, _ in results])
        scheduler.check()
        for (request, _), (_, computed) in zip(plan, results):
            if request.finish_reason is None:
                assert request.computed == computed
        self.check_cache()
        self.propose()

    def check_cache(self):
        held = self.ledger.held
        assert set(held) <= set(self.scheduler.running)
        for request in self.scheduler.running:
            if request.computed > 0 and request in held:
                assert held[request][: request.computed] == request.tokens[: request.computed]
            assert request in held or request.output == []

    def propose(self):
        for request in list(self.scheduler.running):
            left = request.params - len(request.output)
            if request.output and left > 1 and self.draw.random() < 0.1:
                self.scheduler.extend(request, [5] * self.draw.randint(1, left - 1))
                left = request.params - len(request.output)
            if request.output and self.drafting and self.draw.random() < 0.7:
                count = self.draw.randint(0, 6)
                request.draft = [self.draw.randint(3000, 4000) for _ in range(count)]


@pytest.mark.parametrize("seed", range(120))
def test_random_workloads_end_in_order_within_budget_and_with_nothing_held(seed):
    load = Workload(seed)
    steps = 0
    while load.scheduler.busy or len(load.requests) < 25:
        load.step()
        steps += 1
        assert steps < 20_000, "some request never finishes"
    assert load.first_planned == sorted(load.first_planned), "somebody overtook"
    assert not load.ledger.held and not load.scheduler.running and not load.scheduler.waiting
    for request in load.requests:
        assert request.finished
        for sample in request.family:
            assert sample.finish_reason in ("length", "abort", "error")
            assert sample.finish_reason != "length" or len(sample.output) == sample.params
            expected = prompt(request.id, request.prompt_tokens).tokens
            assert sample.tokens[: sample.prompt_tokens] == expected
        if not load.aborting and all(sample.finish_reason == "length" for sample in request.family):
            assert len(request.family) == request.wanted


# ---------------------------------------------------------------- the door


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="no tokens"):
        scheduler_of(Request(0, []))


def test_more_samples_than_can_run_at_once_are_refused():
    with pytest.raises(ValueError, match="n = 5 .* max_running is 4"):
        scheduler_of(prompt(0, 3, samples=5), max_running=4)
    assert scheduler_of(prompt(0, 3, samples=4), max_running=4).busy


@pytest.mark.parametrize("budget, max_running", [(0, 1), (1, 0), (-1, 1)])
def test_a_budget_or_max_running_below_1_is_refused(budget, max_running):
    with pytest.raises(ValueError, match=f"budget {budget} and max_running {max_running}"):
        Scheduler(Ledger(1), budget, max_running)


def test_a_refused_request_leaves_the_scheduler_as_it_was():
    scheduler = scheduler_of()
    for bad in (Request(0, []), prompt(1, 2, samples=9)):
        with pytest.raises(ValueError):
            scheduler.add(bad)
    assert not scheduler.busy


def test_a_request_of_one_sample_cannot_fork():
    request = prompt(3, 2)
    scheduler = scheduler_of(request)
    scheduler.plan()
    with pytest.raises(AssertionError, match="request 3 has one sample"):
        scheduler.fork(request, 1)


def test_a_result_for_each_planned_request_is_needed():
    scheduler = scheduler_of(prompt(0, 2))
    with pytest.raises(AssertionError, match="1 planned, 0 results"):
        scheduler.commit(scheduler.plan(), [])


def test_a_step_that_can_plan_nothing_fails_instead_of_spinning():
    scheduler = scheduler_of(prompt(0, 2))
    scheduler.manager.grow = lambda request, n: False
    with pytest.raises(AssertionError, match="must plan something"):
        scheduler.plan()


def test_check_names_the_invariant_that_does_not_hold():
    for number, spoil in (
        (1, lambda s: s.waiting.reverse()),
        (2, lambda s: setattr(s.waiting[0], "computed", 1)),
        (2, lambda s: setattr(s.waiting[0], "slot", 0)),
        (2, lambda s: setattr(s.waiting[0], "tables", [[3]])),
        (3, lambda s: setattr(s.running[0], "computed", -1)),
        (3, lambda s: setattr(s.running[0], "computed", 99)),
        (5, lambda s: setattr(s.running[0], "samples", 9)),
        (1, lambda s: s.running.reverse()),
        (1, lambda s: setattr(s, "running", [s.running[0], s.waiting.pop()])),
    ):
        scheduler = scheduler_of(*(prompt(i, 2) for i in range(4)), max_running=2)
        scheduler.plan()
        scheduler.check()
        spoil(scheduler)
        with pytest.raises(AssertionError, match=f"^{number}: "):
            scheduler.check()


# ---------------------------------------------------------------- regressions


@pytest.mark.parametrize("behind, draft, budget", [(1, 4, 2), (1, 3, 1), (6, 2, 4), (6, 2, 7)])
def test_a_draft_that_does_not_fit_the_budget_moves_computed_forward_only(behind, draft, budget):
    """All drafts were subtracted from a step that carried only some of them: a budget of 2 and
    a draft of 4 moved `computed` from 2 to 0, below 0 for a short prompt."""
    request = prompt(0, 8)
    scheduler = scheduler_of(request, budget=budget)
    while request.behind > behind:
        scheduler.budget = min(budget, request.behind - behind) or 1
        advance(scheduler, 99)
    scheduler.budget = budget
    request.draft = list(range(900, 900 + draft))
    for _ in range(20):
        before = request.computed
        plan = scheduler.plan()
        sampled = plan[0][1] == request.behind
        accepted = request.draft[:1] if sampled else []
        scheduler.commit(plan, [([*accepted, 7] if sampled else [], None)])
        scheduler.check()
        assert request.computed > before
        known = scheduler.manager.held[request][: request.computed]
        assert known == request.tokens[: request.computed]
    assert len(request.output) > 10
