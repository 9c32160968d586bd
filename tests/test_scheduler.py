"""scheduler.py: plans by hand, a cache of lists against what was committed, random workloads.

`Ledger` is a manager and a cache in one, made of lists of ids: a step writes the planned ids into
blocks, and `computed` is right exactly if the first `computed` ids there are the request's
committed tokens. `oracle` stands for the model: the next token follows from all ids that it sees
there, so a request gets the tokens it gets alone only if its cache is right in every step.
"""

import random
import sys

import pytest

import scheduler as scheduling
from scheduler import Request, Scheduler


class Ledger:
    """`blocks` blocks of `size` ids; chunks end at multiples of `every`; with `reuse`, full blocks
    of committed ids are found again, also when nobody holds them any more."""

    def __init__(self, blocks=100, size=4, every=10**9, reuse=False):
        self.blocks, self.size, self.every, self.reuse = blocks, size, every, reuse
        self.cells = [[None] * size for _ in range(blocks)]
        self.known = {}  # (salt, all ids up to its end) -> block
        self.calls = []  # (verb, id)
        self.repair([])

    def _blocks(self, tokens):
        return -(-tokens // self.size)

    def _need(self, request, tokens):
        """At the end of a prompt each sample needs its own copy of the block that is not full."""
        blocks, full = self._blocks(tokens), len(request.tokens) // self.size
        extra = (request.samples - 1) * (blocks - full) if tokens >= len(request.tokens) else 0
        return blocks + extra

    def door(self, request):
        need = max(self._need(request, len(request.tokens)), self._blocks(request.most))
        if need > self.blocks:
            raise ValueError(f"{need} blocks needed, {self.blocks} are there")

    def match(self, tokens, salt):
        table = []
        for end in range(self.size, len(tokens) if self.reuse else 0, self.size):
            block = self.known.get((salt, *tokens[:end]))
            if block is None:
                break
            self._hold(block)
            table.append(block)
        return [table], len(table) * self.size

    def limit(self, request, n):
        return min(n, self.every - request.computed % self.every)

    def grow(self, request, n, ahead=0):
        assert n > 0, "asked for room for nothing"
        request.tables = request.tables or [[]]
        more = self._need(request, request.computed + max(n, ahead)) - len(request.tables[0])
        if more > len(self.free):
            return False
        request.tables[0] += [self._take() for _ in range(more)]
        return True

    def _hold(self, block):
        if self.holders[block] == 0:
            self.free.remove(block)
        self.holders[block] += 1

    def _take(self):
        block = self.free[0]
        self._hold(block)
        self.known = {key: other for key, other in self.known.items() if other != block}
        self.cells[block] = [None] * self.size
        return block

    def fork(self, parent, child):
        table, full = parent.tables[0], len(parent.tokens) // self.size
        own = [table.pop() for _ in range((len(table) - full) // parent.samples)]
        for mine, block in zip(own, table[full:]):
            self.cells[mine] = list(self.cells[block])
        for block in table[:full]:
            self._hold(block)
        child.tables = [table[:full] + own]

    def commit(self, request):
        self.calls.append(("commit", request.id))
        for end in range(self.size, request.computed + 1 if self.reuse else 0, self.size):
            block = request.tables[0][end // self.size - 1]
            self.known.setdefault((request.salt, *request.tokens[:end]), block)

    def forget(self, request):
        self.calls.append(("forget", request.id))
        held = [block for table in request.tables for block in table]
        self.known = {ids: block for ids, block in self.known.items() if block not in held}

    def release(self, request):
        self.calls.append(("release", request.id))
        for table in request.tables:
            while table:
                block = table.pop()
                self.holders[block] -= 1
                if self.holders[block] == 0:
                    self.free.append(block)
        request.tables = []

    def repair(self, running):
        self.known.clear()
        self.holders = self.count(running)
        self.free = [block for block, count in enumerate(self.holders) if count == 0]

    def count(self, running):
        held = [block for request in running for table in request.tables for block in table]
        return [held.count(block) for block in range(self.blocks)]

    def check_holders(self, running):
        assert self.holders == self.count(running), "a block is held by nobody who runs"
        free = [block for block, count in enumerate(self.holders) if count == 0]
        assert sorted(self.free) == free, "a block was lost, or is free twice"

    @property
    def held(self):
        return self.blocks - len(self.free)

    # ---- the tensors

    def write(self, plan):
        """The forward pass: what is planned leaves its trace."""
        for request, n in plan:
            ids = [*request.tokens, *request.draft]
            for place in range(request.computed, request.computed + n):
                block = request.tables[0][place // self.size]
                assert self.holders[block] == 1, f"block {block} is shared, and written"
                self.cells[block][place % self.size] = ids[place]

    def read(self, request, count):
        table, size = request.tables[0], self.size
        return [self.cells[table[i // size]][i % size] for i in range(count)]

    def check(self, running):
        self.check_holders(running)
        for request in running:
            seen = self.read(request, request.computed) if request.computed else []
            assert seen == request.tokens[: request.computed], f"the cache of {request.id} is wrong"


def scheduler_of(*requests, budget=8, max_running=4, policy="fcfs", static=False, **ledger):
    scheduler = Scheduler(Ledger(**ledger), budget, max_running, policy, static)
    for request in requests:
        scheduler.add(request)
    return scheduler


def prompt(id, length, **fields):
    """params: how many tokens it gets."""
    return Request(id, [100 * id + i for i in range(length)], **fields)


def forked(scheduler, plan):
    """The plan with all samples of the prompts it completes, as the engine forks them."""
    whole = []
    for request, n in plan:
        whole.append((request, n))
        if n == request.behind and request.finish_reason is None:
            whole += [(scheduler.fork(request, i), n) for i in range(1, request.samples)]
    return whole


def check(scheduler):
    scheduler.check()
    scheduler.manager.check(scheduler.running)


def advance(scheduler, outputs=99):
    """One step in which every sampled row yields id 7; requests end after `outputs` tokens."""
    plan = scheduler.plan()
    check(scheduler)
    sizes = [(request.id, n) for request, n in plan]
    scheduler.manager.write(plan)
    plan = forked(scheduler, plan)
    kept = []
    for request, n in plan:
        sampled = n == request.behind
        last = sampled and len(request.output) + 1 == (request.params or outputs)
        kept.append(([7] * sampled, "length" if last else None))
    scheduler.commit(plan, kept)
    check(scheduler)
    return sizes


def ids(requests):
    return [request.id for request in requests]


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
    advance(scheduler)
    assert (len(request.tokens), request.computed, request.behind) == (6, 5, 1)
    advance(scheduler)
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


def test_the_example_of_plan_a_decode_and_a_prompt_of_14_under_a_budget_of_8():
    scheduler = scheduler_of(prompt(0, 1))
    advance(scheduler)
    scheduler.add(prompt(1, 14))
    steps = [advance(scheduler) for _ in range(4)]
    assert steps == [[(0, 1), (1, 7)]] * 2 + [[(0, 1), (1, 1)]] * 2


def test_who_finishes_makes_room_for_the_next_in_the_very_next_step():
    scheduler = scheduler_of(prompt(0, 2, params=2), prompt(1, 2), prompt(2, 2), max_running=2)
    steps = [advance(scheduler) for _ in range(3)]
    assert steps == [[(0, 2), (1, 2)], [(0, 1), (1, 1)], [(1, 1), (2, 2)]]


def test_a_chunk_leaves_a_token_of_the_budget_to_everybody_who_runs_after_it():
    scheduler = scheduler_of(*(prompt(i, 1) for i in range(3)))
    advance(scheduler)
    scheduler.extend(scheduler.running[0], [5] * 12)
    steps = [advance(scheduler) for _ in range(4)]
    assert steps == [[(0, n), (1, 1), (2, 1)] for n in (6, 6, 1, 1)]


def test_decodes_do_not_stall_while_a_more_urgent_prompt_is_chunked():
    scheduler = scheduler_of(*(prompt(i, 1, priority=1) for i in range(3)), policy="priority")
    advance(scheduler)
    scheduler.add(prompt(3, 20))
    assert advance(scheduler) == [(0, 1), (1, 1), (2, 1), (3, 5)]
    steps = [advance(scheduler) for _ in range(3)]
    assert steps == [[(3, n), (0, 1), (1, 1), (2, 1)] for n in (5, 5, 5)]


def test_two_chunks_of_one_step_each_leave_a_token_to_the_others():
    scheduler = scheduler_of(*(prompt(i, 1) for i in range(4)))
    advance(scheduler)
    for i, more in ((0, 3), (2, 9)):
        scheduler.extend(scheduler.running[i], [5] * more)
    assert advance(scheduler) == [(0, 4), (1, 1), (2, 2), (3, 1)]
    assert advance(scheduler) == [(0, 1), (1, 1), (2, 5), (3, 1)]


def test_a_budget_smaller_than_the_number_running_serves_the_first_in_order():
    scheduler = scheduler_of(*(prompt(i, 1) for i in range(4)))
    advance(scheduler)
    scheduler.budget = 3
    scheduler.extend(scheduler.running[0], [5] * 4)
    steps = [advance(scheduler) for _ in range(2)]
    assert steps == [[(0, 1), (1, 1), (2, 1)]] * 2


def test_a_budget_smaller_than_the_samples_serves_the_first_of_them():
    scheduler = scheduler_of(prompt(0, 2, samples=3), budget=2)
    assert advance(scheduler, 3) == [(0, 2)]
    assert advance(scheduler, 3) == [(0, 1), (0, 1)]
    while scheduler.busy:
        assert len(advance(scheduler, 3)) <= 2


def test_three_samples_compute_their_prompt_once_and_then_run_side_by_side():
    first = prompt(0, 10, samples=3)
    scheduler = scheduler_of(first, budget=8)
    steps = [advance(scheduler, 3) for _ in range(4)]
    assert steps == [[(0, 8)], [(0, 2)], [(0, 1)] * 3, [(0, 1)] * 3]
    assert [request.index for request in first.family] == [0, 1, 2]
    assert all(request.output == [7, 7, 7] for request in first.family)
    assert first.finished and not scheduler.manager.held


def test_a_fork_shares_what_is_computed_and_nothing_that_grows_later():
    first = prompt(
        0, 6, samples=2, params="opaque", seed=9, stamps={"received": 1.0},
        priority=3, salt="mine", most=50,
    )  # fmt: skip
    scheduler = scheduler_of(first)
    plan = scheduler.plan()
    scheduler.manager.write(plan)
    first.reused = 4
    child = scheduler.fork(first, 1)
    assert (child.id, child.index, child.params, child.seed) == (0, 1, "opaque", 9)
    assert (child.priority, child.salt, child.most, child.reused) == (3, "mine", 50, 4)
    assert (first.samples, child.samples) == (1, 1)
    assert (child.tokens, child.computed, child.prompt_tokens) == (first.tokens, 0, 6)
    assert child.family is first.family == [first, child]
    assert scheduler.running == [first, child]
    scheduler.commit([*plan, (child, 6)], [([5], None), ([6], None)])
    first.stamps["scheduled"] = 2.0
    assert (first.output, child.output) == ([5], [6])
    assert (first.computed, child.computed) == (6, 6)
    assert child.stamps == {"received": 1.0}
    assert first.tables[0][0] == child.tables[0][0] and first.tables[0][1] != child.tables[0][1]
    check(scheduler)


def test_the_running_limit_counts_samples_that_have_not_forked_yet():
    first, second, third = prompt(0, 12, samples=3), prompt(1, 2, samples=2), prompt(2, 2)
    scheduler = scheduler_of(first, second, third, max_running=4)
    assert advance(scheduler, 2) == [(0, 8)]
    assert scheduler.blocked == "running limit"
    assert advance(scheduler, 2) == [(0, 4)]
    assert advance(scheduler, 2) == [(0, 1)] * 3
    assert (second.waits, third.waits) == ({"running limit": 3}, {})
    assert advance(scheduler, 2) == [(1, 2), (2, 2)]


@pytest.mark.parametrize("new, stay", [([50], 1), ([60, 51], 2), ([60, 61, 52], 3), ([], 1)])
def test_of_n_rows_k_of_them_drafts_n_minus_k_and_the_accepted_stay(new, stay):
    """1 + 2 rows: of 3 rows, 2 of them drafts, 3 - 2 + max(len(ids) - 1, 0) stay."""
    request = prompt(0, 4)
    scheduler = scheduler_of(request)
    advance(scheduler)
    request.draft = [60, 61]
    assert (request.missing, request.behind) == (1, 3)
    plan = scheduler.plan()
    assert plan == [(request, 3)]
    scheduler.commit(plan, [(new, None if new else "error")])
    assert request.computed == 4 + stay
    assert request.draft == []
    assert request.tokens == [0, 1, 2, 3, 7, *new]


def test_a_draft_is_cut_to_the_budget():
    request, other = prompt(0, 4), prompt(1, 1)
    scheduler = scheduler_of(request, other, budget=5)
    advance(scheduler)
    request.draft = [60, 61, 62, 63, 64]
    plan = scheduler.plan()
    assert plan == [(request, 4), (other, 1)]
    assert request.draft == [60, 61, 62]
    scheduler.commit(plan, [([60, 61, 62, 50], None), ([7], None)])
    assert (request.tokens[4:], request.computed) == ([7, 60, 61, 62, 50], 8)


def decoding(*lengths, blocks, **settings):
    """Requests with prompts so long, computed, and one token each to compute."""
    requests = [prompt(i, length) for i, length in enumerate(lengths)]
    scheduler = scheduler_of(*requests, blocks=blocks, size=4, **settings)
    while any(request.missing > 1 or not request.output for request in requests):
        advance(scheduler)
    return scheduler, requests


def test_a_draft_takes_nobodys_room():
    """One block is free. The second in order needs it for its token, so the first one's guesses
    must do without, although they come first; with two blocks both have what they need."""
    for blocks, planned, draft in ((3, 1, []), (4, 3, [60, 61])):
        scheduler, (first, second) = decoding(3, 4, blocks=blocks)
        first.draft = [60, 61]
        assert [len(request.tables[0]) for request in (first, second)] == [1, 1]
        plan = scheduler.plan()
        assert plan == [(first, planned), (second, 1)] and first.draft == draft
        assert scheduler.preempted == [] and len(second.tables[0]) == 2


def test_a_draft_waits_for_who_waits():
    """A request that can begin has its blocks before guesses have theirs."""
    scheduler, (first,) = decoding(3, blocks=2)
    other = prompt(1, 2)
    scheduler.add(other)
    first.draft = [60]
    assert scheduler.plan() == [(first, 1), (other, 2)] and first.draft == []


def test_drafts_are_cut_in_order_and_leave_a_token_to_everyone():
    scheduler, requests = decoding(2, 2, 2, blocks=9, budget=6)
    for request in requests:
        request.draft = [60, 61, 62]
    plan = scheduler.plan()
    assert plan == [(requests[0], 4), (requests[1], 1), (requests[2], 1)]
    assert [request.draft for request in requests] == [[60, 61, 62], [], []]


def test_repair_drops_drafts_that_may_be_half_made():
    scheduler, (first, second) = decoding(3, 4, blocks=9)
    first.draft = [60]
    scheduler.repair()
    assert first.draft == second.draft == [] and scheduler.running == [first, second]
    assert scheduler.plan() == [(first, 1), (second, 1)]


def test_a_step_that_does_not_reach_the_draft_drops_it():
    request = prompt(0, 4)
    scheduler = scheduler_of(request, budget=4)
    advance(scheduler)
    scheduler.extend(request, [5, 5, 5, 5, 5])
    request.draft = [60]
    assert scheduler.plan() == [(request, 4)] and request.draft == []


def test_forced_ids_are_appended_and_computed_in_the_next_step():
    request = prompt(0, 4)
    scheduler = scheduler_of(request)
    advance(scheduler)
    scheduler.extend(request, [8, 9])
    check(scheduler)
    assert (request.behind, request.output) == (3, [7, 8, 9])
    assert scheduler.plan() == [(request, 3)]
    scheduler.extend(request, [10], "stop")
    assert (request.output, request.finish_reason) == ([7, 8, 9, 10], "stop")
    assert not scheduler.busy and not scheduler.manager.held


def test_a_chunk_ends_where_the_manager_wants_it_to():
    scheduler = scheduler_of(prompt(0, 10), budget=8, every=4)
    assert [advance(scheduler, 2) for _ in range(4)] == [[(0, 4)], [(0, 4)], [(0, 2)], [(0, 1)]]


def test_a_cached_prefix_is_not_computed_again():
    first, second = Request(0, list(range(10))), Request(1, list(range(9)))
    scheduler = scheduler_of(first, second, budget=10, reuse=True)
    assert advance(scheduler, 2) == [(0, 10)]
    assert advance(scheduler, 2) == [(0, 1), (1, 1)]
    assert (first.reused, second.reused) == (0, 8)


def test_only_requests_of_the_same_salt_share_a_prefix():
    requests = [Request(i, list(range(10)), salt=salt) for i, salt in enumerate("aba")]
    scheduler = scheduler_of(*requests, reuse=True)
    while scheduler.busy:
        advance(scheduler, 1)
    assert [request.reused for request in requests] == [0, 0, 8]


def test_reused_counts_the_prompt_tokens_found_at_the_first_admission_only():
    """B finds its own prefix again after it was preempted: that saved nobody a prompt."""
    first, second = prompt(0, 8), prompt(1, 6)
    scheduler = scheduler_of(first, second, budget=20, blocks=4, reuse=True)
    advance(scheduler, 2)
    assert advance(scheduler, 2) == [(0, 1)] and scheduler.preempted == [second]
    assert advance(scheduler, 9) == [(1, 3)]  # of 7 tokens a block of 4 was still there
    assert (second.reused, second.preempted) == (0, 1)


# ---- the order


def test_the_first_of_the_queue_goes_first_and_whoever_cannot_run_stops_all_behind_it():
    scheduler = scheduler_of(prompt(0, 4), prompt(1, 40), prompt(2, 1), blocks=10)
    assert advance(scheduler) == [(0, 4)]
    assert (ids(scheduler.running), ids(scheduler.waiting)) == ([0], [1, 2])
    assert scheduler.blocked == "blocks"


def test_the_smaller_priority_number_is_admitted_first_and_equals_in_order_of_arrival():
    requests = [prompt(i, 2, priority=p) for i, p in enumerate((1, 0, 1, 0, -1))]
    scheduler = scheduler_of(*requests, max_running=1, policy="priority")
    assert [advance(scheduler, 1)[0][0] for _ in requests] == [4, 1, 3, 0, 2]


def test_first_come_first_served_ignores_priority():
    scheduler = scheduler_of(*(prompt(i, 2, priority=-i) for i in range(4)), max_running=1)
    assert [advance(scheduler, 1)[0][0] for _ in range(4)] == [0, 1, 2, 3]


def test_an_urgent_request_waits_for_a_place_and_evicts_nobody_to_get_one():
    low, high = prompt(0, 2, priority=5), prompt(1, 2, priority=0)
    scheduler = scheduler_of(low, max_running=1, policy="priority")
    advance(scheduler)
    scheduler.add(prompt(2, 2, priority=5))
    scheduler.add(high)
    assert advance(scheduler, 3) == advance(scheduler, 3) == [(0, 1)]
    assert (low.preempted, high.waits) == (0, {"running limit": 2})
    assert advance(scheduler, 3) == [(1, 2)]


def test_an_urgent_request_evicts_nobody_to_be_admitted_but_takes_blocks_once_it_runs():
    low, high = prompt(0, 6, priority=5), prompt(1, 8, priority=0)
    scheduler = scheduler_of(low, policy="priority", blocks=4, budget=20)
    advance(scheduler)
    scheduler.add(high)
    assert advance(scheduler) == [(0, 1), (1, 8)]
    assert advance(scheduler) == [(1, 1)]  # a ninth token: a third block
    assert scheduler.preempted == [low] and scheduler.waiting == [low]


def test_among_running_requests_the_least_urgent_and_then_the_youngest_is_preempted():
    for priorities, gone in (((1, 1, 1), 2), ((2, 1, 1), 0), ((1, 2, 2), 2), ((1, 2, 1), 1)):
        requests = [prompt(i, 4, priority=p) for i, p in enumerate(priorities)]
        scheduler = scheduler_of(*requests, policy="priority", blocks=5, budget=20)
        advance(scheduler)
        advance(scheduler)
        assert ids(scheduler.preempted) == [gone]


# ---- preemption


def test_a_request_that_needs_a_block_takes_those_of_the_last_in_order():
    """A's ninth token needs a third block of 4: B gives both of its own back, and A takes one."""
    first, second = prompt(0, 8), prompt(1, 6)
    scheduler = scheduler_of(first, second, budget=20, blocks=4)
    assert advance(scheduler) == [(0, 8), (1, 6)]
    assert advance(scheduler) == [(0, 1)]
    assert scheduler.preempted == [second]
    assert (second.tokens, second.preempted) == ([*range(100, 106), 7], 1)
    assert (second.computed, second.tables, second.finish_reason) == (0, [], None)
    assert (scheduler.manager.held, scheduler.waiting) == (3, [second])


def test_a_preempted_request_computes_its_output_again_like_a_prompt():
    first, second = prompt(0, 8, params=2), prompt(1, 6, params=4)
    scheduler = scheduler_of(first, second, budget=5, blocks=4)
    steps = [advance(scheduler) for _ in range(9)]
    assert steps == [
        [(0, 5)],
        [(0, 3), (1, 2)],
        [(0, 1)],  # takes B's blocks, and ends
        [(1, 5)],
        [(1, 1)],
        [(1, 1)],
        [(1, 1)],
        [(1, 1)],
        [],
    ]
    assert second.output == [7] * 4 and second.preempted == 1


def test_a_preempted_request_gets_no_token_twice():
    first, second = prompt(0, 8, params=2), prompt(1, 6, params=4)
    scheduler = scheduler_of(first, second, budget=20, blocks=4)
    steps = [advance(scheduler) for _ in range(6)]
    assert steps == [[(0, 8), (1, 6)], [(0, 1)], [(1, 7)], [(1, 1)], [(1, 1)], []]
    assert second.tokens == [*range(100, 106), 7, 7, 7, 7]


def test_nobody_is_admitted_in_a_step_that_preempted_and_who_was_preempted_resumes_first():
    first, second, third = prompt(0, 8), prompt(1, 6), prompt(2, 1)
    scheduler = scheduler_of(first, second, budget=20, blocks=4)
    advance(scheduler)
    scheduler.add(third)
    assert advance(scheduler) == [(0, 1)]
    assert scheduler.manager.held == 3  # one block is free, and one is all that C needs
    assert ids(scheduler.waiting) == [1, 2] and scheduler.blocked is None
    assert advance(scheduler, 3) == [(0, 1)]
    assert (second.waits, third.waits) == ({"blocks": 1}, {})
    assert advance(scheduler) == [(1, 7), (2, 1)]


def test_the_last_in_order_preempts_itself_when_its_own_next_token_has_no_block():
    first, second = prompt(0, 5), prompt(1, 8)
    scheduler = scheduler_of(first, second, budget=20, blocks=4)
    advance(scheduler)
    assert advance(scheduler, 3) == [(0, 1)]
    assert scheduler.preempted == scheduler.waiting == [second]
    assert scheduler.manager.held == 2
    assert advance(scheduler, 3) == [(0, 1)]
    assert second.waits == {"blocks": 1}
    assert advance(scheduler) == [(1, 9)]


def test_one_request_may_take_the_blocks_of_several():
    requests = [prompt(i, 4) for i in range(4)]
    scheduler = scheduler_of(*requests, budget=20, blocks=4)
    advance(scheduler)
    scheduler.extend(requests[0], [5] * 6)
    assert advance(scheduler) == [(0, 7)]
    assert ids(scheduler.preempted) == [3, 2, 1] and ids(scheduler.waiting) == [1, 2, 3]


def test_a_sample_is_preempted_alone_and_comes_back_as_the_sample_it_was():
    first = prompt(0, 6, samples=2)
    scheduler = scheduler_of(first, budget=20, blocks=4)
    advance(scheduler)
    child = first.family[1]
    scheduler.extend(first, [5] * 6)
    assert advance(scheduler) == [(0, 7)]
    assert scheduler.preempted == scheduler.waiting == [child]
    assert (child.index, child.samples, child.output) == (1, 1, [7])
    scheduler.abort(first)
    assert advance(scheduler) == [(0, 7)] and child.output == [7, 7]


def test_a_preempted_prompt_still_comes_out_as_all_its_samples():
    first, second = prompt(0, 4), prompt(1, 13, samples=3)
    scheduler = scheduler_of(first, second, budget=4, blocks=8)
    steps = [advance(scheduler) for _ in range(6)]
    assert steps == [[(0, 4)], *[[(0, 1), (1, 3)]] * 4, [(0, 1)]]
    assert scheduler.preempted == [second]
    assert (second.computed, second.samples, second.family) == (0, 3, [second])
    scheduler.abort(first)
    while scheduler.busy:
        advance(scheduler, 2)
    assert [sample.output for sample in second.family] == [[7, 7]] * 3


# ---- why the queue waits


def test_a_request_says_for_what_it_waited_and_for_how_many_steps():
    waits = {}
    for reason, limits in (
        ("budget", {"budget": 2}),
        ("running limit", {"max_running": 1}),
        ("blocks", {"blocks": 3}),
        ("batch", {"static": True}),
    ):
        scheduler = scheduler_of(prompt(0, 8, params=4), **{"budget": 20, **limits})
        advance(scheduler)
        second = prompt(1, 8)
        scheduler.add(second)
        scheduler.add(prompt(2, 8))
        while second not in scheduler.running and second.finish_reason is None:
            advance(scheduler)
            assert scheduler.blocked == reason or second in scheduler.running
        waits[reason] = second.waits
        assert scheduler.running[-1] is second or reason == "batch"
    assert waits == {
        "budget": {"budget": 3},
        "running limit": {"running limit": 3},
        "blocks": {"blocks": 3},
        "batch": {"batch": 3},
    }


def test_one_request_may_wait_for_one_thing_and_then_for_another():
    second = prompt(1, 6)
    scheduler = scheduler_of(prompt(0, 8, params=3), second, budget=4, blocks=3)
    for reason in ("budget", "budget", "blocks", "blocks", None):
        advance(scheduler)
        assert scheduler.blocked == reason
    assert second.waits == {"budget": 2, "blocks": 2}


def test_nobody_waits_for_anything_where_all_were_admitted():
    scheduler = scheduler_of(prompt(0, 2), prompt(1, 2))
    advance(scheduler)
    assert scheduler.blocked is None
    assert [request.waits for request in scheduler.running] == [{}, {}]


def test_who_is_refused_blocks_gives_back_the_prefix_it_had_found():
    """Else the prefix would be held for a request that waits, and nobody could take it."""
    first = Request(0, list(range(12)))
    scheduler = scheduler_of(first, budget=20, blocks=6, reuse=True)
    advance(scheduler)
    second = Request(1, [*range(8), *range(50, 60)])
    scheduler.add(second)
    advance(scheduler)
    assert scheduler.blocked == "blocks"
    assert (second.tables, second.computed, second.reused) == ([], 0, 0)
    assert ("release", 1) in scheduler.manager.calls


# ---- static batches


def test_static_nobody_is_admitted_before_the_whole_batch_has_ended():
    first, second, third = prompt(0, 2, params=2), prompt(1, 2, params=4), prompt(2, 2, params=1)
    scheduler = scheduler_of(first, second, static=True)
    advance(scheduler)
    scheduler.add(third)
    steps = [advance(scheduler) for _ in range(4)]
    assert steps == [[(0, 1), (1, 1)], [(1, 1)], [(1, 1)], [(2, 2)]]
    assert third.waits == {"batch": 3}


def test_static_a_batch_is_as_many_samples_as_may_run_and_the_rest_is_the_next():
    requests = [prompt(i, 1, params=1 + i % 2, samples=1 + (i == 1)) for i in range(4)]
    scheduler = scheduler_of(*requests, static=True, max_running=3)
    steps = [advance(scheduler) for _ in range(4)]
    assert steps == [[(0, 1), (1, 1)], [(1, 1), (1, 1)], [(2, 1), (3, 1)], [(3, 1)]]


def test_static_a_member_of_the_batch_that_had_no_budget_at_first_still_belongs_to_it():
    scheduler = scheduler_of(prompt(0, 6), prompt(1, 2), static=True, budget=4)
    steps = [advance(scheduler, 2) for _ in range(3)]
    assert steps == [[(0, 4)], [(0, 2), (1, 2)], [(0, 1), (1, 1)]]


def test_static_a_preempted_member_comes_back_and_others_do_not():
    first, second, third, late = prompt(0, 8), prompt(1, 1, params=3), prompt(2, 3), prompt(3, 1)
    scheduler = scheduler_of(first, second, third, static=True, budget=20, blocks=4)
    advance(scheduler)
    scheduler.add(late)
    assert advance(scheduler) == [(0, 1), (1, 1)]
    assert scheduler.preempted == [third]
    assert advance(scheduler) == [(0, 1), (1, 1)]
    assert advance(scheduler) == [(0, 1), (2, 4)]
    assert (third.waits, late.waits) == ({"blocks": 1}, {"batch": 1})


# ---- results, aborts, repair


def test_a_finished_request_is_committed_before_it_is_released():
    """What it filled in its last step is entered in the index while its tables still exist."""
    scheduler = scheduler_of(prompt(0, 4), reuse=True)
    advance(scheduler, 1)
    assert scheduler.manager.calls == [("commit", 0), ("release", 0)]
    assert list(scheduler.manager.known) == [(None, 0, 1, 2, 3)]


def test_what_failed_is_forgotten_and_not_for_others_to_find():
    request, other = prompt(0, 4), prompt(1, 4)
    scheduler = scheduler_of(request, other, reuse=True)
    plan = scheduler.plan()
    scheduler.manager.write(plan)
    scheduler.commit(plan, [([], "error"), ([7], None)])
    check(scheduler)
    assert scheduler.manager.calls == [
        ("commit", 0), ("forget", 0), ("release", 0), ("commit", 1)
    ]  # fmt: skip
    assert list(scheduler.manager.known) == [(None, 100, 101, 102, 103)]
    assert request.finish_reason == "error" and scheduler.running == [other]


def test_a_chunk_is_committed_like_a_whole_prompt():
    scheduler = scheduler_of(prompt(0, 10), budget=5, reuse=True)
    advance(scheduler)
    assert list(scheduler.manager.known) == [(None, 0, 1, 2, 3)]


def test_an_abort_ends_a_waiting_a_running_and_a_forked_request_at_once():
    running, waiting, last = prompt(0, 3, samples=3), prompt(1, 3), prompt(2, 3)
    scheduler = scheduler_of(running, waiting, last)
    advance(scheduler)
    scheduler.abort(running.family[1])
    scheduler.abort(waiting)
    check(scheduler)
    assert running.family[1].finish_reason == waiting.finish_reason == "abort"
    assert scheduler.manager.held == 2  # samples 0 and 2
    assert advance(scheduler) == [(0, 1), (0, 1), (2, 3)]
    assert running.family[1].output == [7] and not running.finished
    scheduler.abort(running, "error")
    scheduler.abort(running.family[2])
    assert running.finish_reason == "error" and running.finished
    assert advance(scheduler) == [(2, 1)]


def test_an_abort_ends_a_preempted_request_and_one_in_the_middle_of_its_prompt():
    first, second, third = prompt(0, 8), prompt(1, 6), prompt(2, 16)
    scheduler = scheduler_of(first, second, budget=20, blocks=4)
    advance(scheduler)
    advance(scheduler)
    assert scheduler.waiting == [second]
    scheduler.abort(second)
    scheduler.abort(first)
    check(scheduler)
    scheduler.budget = 5
    scheduler.add(third)
    advance(scheduler)
    assert third.computed == 5
    scheduler.abort(third)
    check(scheduler)
    assert not scheduler.busy and not scheduler.manager.held


def test_an_abort_of_an_ended_request_changes_nothing():
    request = prompt(0, 3)
    scheduler = scheduler_of(request)
    advance(scheduler, 1)
    scheduler.abort(request)
    assert request.finish_reason == "length"
    check(scheduler)


def test_a_request_aborted_while_its_step_ran_gets_nothing_from_it():
    first = prompt(0, 3, samples=2)
    scheduler = scheduler_of(first)
    plan = scheduler.plan()
    scheduler.manager.write(plan)
    plan = forked(scheduler, plan)
    scheduler.abort(first)
    scheduler.commit(plan, [([7], None), ([8], None)])
    check(scheduler)
    assert (first.output, first.computed) == ([], 0)
    assert first.family[1].output == [8]
    assert scheduler.running == [first.family[1]]


def test_repair_makes_a_whole_of_torn_lists():
    for tear in (
        lambda s: s.waiting.insert(0, s.running[0]),  # preempted by half
        lambda s: s.running.append(s.waiting[0]),  # admitted by half
        lambda s: s.running.append(s.running[0]),
        lambda s: s.waiting.append(s.waiting[0]),
        lambda s: setattr(s.waiting[0], "tables", [[s.manager.free.pop()]]),  # matched
        lambda s: s.manager.grow(s.waiting[0], 2),
        lambda s: (setattr(s.waiting[0], "computed", 2), setattr(s.waiting[0], "slot", 0)),
        lambda s: setattr(s.waiting[0], "draft", [1]),
        lambda s: setattr(s.running[0], "finish_reason", "abort"),  # ended by half
        lambda s: setattr(s.waiting[0], "finish_reason", "abort"),
        lambda s: s.arrived.append(s.waiting[1]),  # queued by half
        lambda s: s.manager.free.pop(),
        lambda s: s.manager.holders.__setitem__(s.running[0].tables[0][0], 2),
    ):
        scheduler = scheduler_of(*(prompt(i, 4) for i in range(4)), max_running=2)
        advance(scheduler)
        scheduler.max_running = 3
        requests = [*scheduler.running, *scheduler.waiting]
        tear(scheduler)
        scheduler.repair()
        check(scheduler)
        assert all(request.draft == [] for request in scheduler.waiting)
        members = {*scheduler.running, *scheduler.waiting}
        assert members == {request for request in requests if request.finish_reason is None}
        while scheduler.busy:
            advance(scheduler, 2)
        assert not scheduler.manager.held


def test_repair_of_what_is_whole_changes_nothing():
    scheduler = scheduler_of(*(prompt(i, 4) for i in range(4)), max_running=2)
    advance(scheduler)
    before = (ids(scheduler.running), ids(scheduler.waiting), scheduler.manager.held)
    scheduler.repair()
    check(scheduler)
    assert (ids(scheduler.running), ids(scheduler.waiting), scheduler.manager.held) == before
    assert [request.computed for request in scheduler.running] == [4, 4]


# ---------------------------------------------------------------- against the reference


def oracle(request, seen):
    """The token after `seen`: another one for each request, sample, and change of what is seen."""
    return hash((request.id, request.index, *seen)) % 900 + 100


def alone(request, count):
    """What a request has after `count` tokens when nobody else is there."""
    tokens = request.tokens[: request.prompt_tokens]
    for _ in range(count):
        tokens.append(oracle(request, tokens))
    return tokens


def result(ledger, request, n):
    """What the engine keeps: the drafted ids that the model draws as well, and one more."""
    if n < request.behind or request.finish_reason is not None:
        return [], None
    seen, new = ledger.read(request, request.computed + n), []
    known = len(seen) - len(request.draft)
    for draft in [*request.draft, None]:
        new.append(oracle(request, seen[: known + len(new)]))
        if new[-1] != draft:
            break
    left = request.params - len(request.output)
    return new[:left], "length" if len(new) >= left else None


def step(scheduler):
    """One step of the engine, without tensors."""
    plan = scheduler.plan()
    scheduler.manager.write(plan)
    plan = forked(scheduler, plan)
    scheduler.commit(plan, [result(scheduler.manager, request, n) for request, n in plan])
    check(scheduler)
    return plan


@pytest.mark.parametrize("budget", range(1, 17))
def test_any_budget_computes_the_same_tokens_as_one_big_step_each_of_them_once(budget):
    lengths, samples, outputs = [9, 1, 16, 5], [1, 3, 1, 2], 4
    requests = [prompt(i, n, samples=samples[i], params=4) for i, n in enumerate(lengths)]
    scheduler = scheduler_of(*requests, budget=budget)
    planned = 0
    while scheduler.busy:
        plan = step(scheduler)
        sizes = [n for request, n in plan if not request.index or len(request.output) > 1]
        assert 1 <= sum(sizes) <= budget
        planned += sum(sizes)
    for request, count in zip(requests, samples):
        assert len(request.family) == count
        assert all(sample.tokens == alone(sample, outputs) for sample in request.family)
    assert planned == sum(n + (outputs - 1) * count for n, count in zip(lengths, samples))


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("blocks", range(7, 14))
def test_any_pool_gives_the_tokens_that_every_request_has_alone(blocks, reuse):
    requests = [prompt(i, 3 + i, params=6, samples=1 + i % 2, most=13) for i in range(6)]
    scheduler = scheduler_of(*requests, max_running=9, blocks=blocks, reuse=reuse, size=2)
    while scheduler.busy:
        step(scheduler)
    for sample in (sample for request in requests for sample in request.family):
        assert (sample.tokens, sample.finish_reason) == (alone(sample, 6), "length")
    assert sum(request.preempted for request in requests) > 0


@pytest.mark.parametrize("steps", range(2, 17))
def test_a_request_preempted_after_any_step_gets_the_tokens_it_gets_undisturbed(steps):
    first, second = prompt(0, 3, params=20), prompt(1, 9, params=12)
    scheduler = scheduler_of(first, second, budget=3)
    for _ in range(steps):
        step(scheduler)
    grow = scheduler.manager.grow
    scheduler.manager.grow = lambda *request: bool(scheduler.preempted) and grow(*request)
    step(scheduler)
    assert scheduler.preempted == [second]
    scheduler.manager.grow = grow
    while scheduler.busy:
        step(scheduler)
    assert first.tokens == alone(first, 20) and second.tokens == alone(second, 12)


# ---------------------------------------------------------------- by property


class Workload:
    """Random requests, drafts, forced ids and aborts against one scheduler, checked in every step.

    The limit on steps: the first in order that runs computes at least one token in every step and
    is never preempted, so it ends after as many steps as it has tokens. Only the first admission of
    a more urgent one makes another request the first.
    """

    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        self.ledger = Ledger(
            blocks=draw.randint(3, 20),
            size=draw.choice([1, 2, 4]),
            every=draw.choice([10**9, 10**9, 1, 4]),
            reuse=draw.random() < 0.5,
        )
        self.budget, self.max_running = draw.choice([1, 2, 4, 8, 16]), draw.randint(1, 6)
        self.policy, self.static = draw.choice(["fcfs", "priority"]), draw.random() < 0.25
        self.scheduler = Scheduler(
            self.ledger, self.budget, self.max_running, self.policy, self.static
        )
        self.drafting, self.aborting = draw.random() < 0.5, draw.random() < 0.5
        self.requests, self.admitted, self.preempted = [], [], 0
        self.count, self.batch = draw.randint(1, 9), 0

    def arrive(self):
        draw, id = self.draw, len(self.requests)
        own = range(100 * id, 100 * id + draw.randint(1, 12))
        tokens = [*range(draw.choice([0, 4, 9])), *own]  # many begin alike
        wanted = draw.randint(1, 10)
        request = Request(
            id, tokens, params=wanted, samples=draw.choice([1, 1, 1, draw.randint(1, 4)]),
            priority=draw.randint(0, 2), salt=draw.choice([None, None, "a"]),
            most=len(tokens) + wanted - 1,
        )  # fmt: skip
        before = list(self.scheduler.waiting)
        try:
            self.scheduler.add(request)
        except ValueError:  # too large
            assert self.scheduler.waiting == before
            return
        request.wanted = request.samples
        self.requests.append(request)

    def maybe_abort(self):
        if self.aborting and self.requests and self.draw.random() < 0.04:
            family = self.draw.choice(self.requests).family
            for request in self.draw.choice([family, [self.draw.choice(family)]]):
                self.scheduler.abort(request)
            check(self.scheduler)

    def step(self):
        scheduler, draw = self.scheduler, self.draw
        for _ in range(draw.choice([0, 0, 1, 3])):
            if len(self.requests) < self.count:
                self.arrive()
        self.maybe_abort()
        plan = self.plan()
        self.maybe_abort()
        live = [(request, n) for request, n in plan if request.finish_reason is None]
        self.ledger.write(live)
        whole = forked(scheduler, live)
        scheduler.check()  # what the cache holds is not yet all computed
        self.ledger.check_holders(scheduler.running)
        kept = [result(self.ledger, request, n) for request, n in whole]
        if draw.random() < 0.02:
            kept[:1] = [([], "error")] * len(kept[:1])
        self.maybe_abort()
        scheduler.commit(whole, kept)
        check(scheduler)
        self.propose()
        self.maybe_abort()
        return bool(plan)

    def plan(self):
        """What is true of every plan."""
        scheduler = self.scheduler
        running, busy = list(scheduler.running), scheduler.busy
        if not running:
            self.batch = len(self.requests)  # static: who is here by now may be in it
        plan = scheduler.plan()
        check(scheduler)
        planned = [request for request, _ in plan]
        assert bool(plan) == busy, "every step plans something if there is something"
        assert sum(n for _, n in plan) <= self.budget
        assert all(1 <= n <= request.behind for request, n in plan)
        assert len(set(planned)) == len(planned) and set(planned) <= set(scheduler.running)
        gone = scheduler.preempted
        assert gone == running[len(running) - len(gone) :][::-1], "not the last in order"
        assert set(gone) <= set(scheduler.waiting)
        stayed = running[: len(running) - len(gone)]
        assert planned[: len(stayed)] == stayed[: self.budget], "somebody stalled"
        self.admissions(planned[len(stayed) :], running)
        self.preempted += len(gone)
        if gone or not scheduler.waiting:
            assert scheduler.blocked is None
        else:
            assert scheduler.waiting[0].waits[scheduler.blocked] > 0
        return plan

    def admissions(self, admitted, running):
        scheduler = self.scheduler
        assert not (admitted and scheduler.preempted), "admitted in a step that preempted"
        assert set(scheduler.running) <= {*running, *admitted}
        for request in admitted:
            for other in scheduler.waiting:
                assert self.rank(request) < self.rank(other), "somebody overtook"
            if self.static and running:
                assert request.id < self.batch, "admitted before the batch ended"
            if request.id not in self.admitted:
                self.admitted.append(request.id)

    def rank(self, request):
        urgency = request.priority if self.policy == "priority" else 0
        return urgency, request.id, request.index

    def propose(self):
        """Forced ids are those the model draws; of the drafts some are, and some are not."""
        for request in list(self.scheduler.running):
            left = request.params - len(request.output)
            if request.output and left > 1 and self.draw.random() < 0.1:
                more = self.draw.randint(1, left - 1)
                self.scheduler.extend(request, drawn(request, more))
                left -= more
            if request.output and self.drafting and self.draw.random() < 0.7:
                draft = drawn(request, self.draw.randint(0, left - 1))
                if draft and self.draw.random() < 0.6:
                    draft[self.draw.randrange(len(draft))] = 3000
                request.draft = draft

    def limit(self):
        sizes = [request.most for request in self.requests for _ in range(request.wanted)]
        if self.policy == "fcfs":
            return sum(sizes)
        return 2 * len(sizes) * max(sizes, default=0)

    def end(self):
        scheduler = self.scheduler
        assert not self.ledger.held and not scheduler.running and not scheduler.waiting
        for priority in range(3) if self.policy == "priority" else (None,):
            order = [i for i in self.admitted if priority in (None, self.requests[i].priority)]
            assert order == sorted(order), "somebody overtook"
        for request in self.requests:
            assert request.finished
            for sample in request.family:
                assert sample.finish_reason in ("length", "abort", "error")
                assert sample.tokens == alone(sample, len(sample.output))
                assert sample.finish_reason != "length" or len(sample.output) == sample.params
            if {sample.finish_reason for sample in request.family} == {"length"}:
                assert self.aborting or len(request.family) == request.wanted


def drawn(request, count):
    return alone(request, len(request.output) + count)[len(request.tokens) :]


RUNS = 50


@pytest.mark.parametrize("seed", range(40))
def test_random_workloads_end_in_order_within_budget_and_with_the_tokens_each_has_alone(seed):
    preempted = 0
    for run in range(RUNS):
        load = Workload(seed * RUNS + run)
        steps = tries = 0
        while load.scheduler.busy or (len(load.requests) < load.count and tries < 100):
            steps += load.step()
            tries += 1
            assert steps <= load.limit(), "some request never finishes"
        load.end()
        preempted += load.preempted
    assert preempted > 0, "nobody was preempted: this proves little"


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


@pytest.mark.parametrize("policy", ["lifo", "FCFS", "", None])
def test_a_policy_that_is_not_known_is_refused(policy):
    with pytest.raises(ValueError, match=f"policy {policy!r} is neither fcfs nor priority"):
        Scheduler(Ledger(1), 1, 1, policy)


def test_a_refused_request_leaves_the_scheduler_as_it_was():
    scheduler = scheduler_of(prompt(7, 2), blocks=3)
    for bad in (Request(0, []), prompt(1, 2, samples=9), prompt(2, 13), prompt(3, 2, most=13)):
        with pytest.raises(ValueError):
            scheduler.add(bad)
    assert ids(scheduler.arrived) == [7] and not (scheduler.running or scheduler.waiting)
    assert scheduler.manager.held == 0
    scheduler.add(prompt(4, 2, most=12))


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
    scheduler.manager.grow = lambda request, n, ahead=0: False
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
        (1, lambda s: s.running.append(s.running[-1])),
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
        advance(scheduler)
    scheduler.budget = budget
    request.draft = list(range(900, 900 + draft))
    for _ in range(20):
        before = request.computed
        plan = scheduler.plan()
        scheduler.manager.write(plan)
        sampled = plan[0][1] == request.behind
        accepted = request.draft[:1] if sampled else []
        scheduler.commit(plan, [([*accepted, 7] if sampled else [], None)])
        check(scheduler)
        assert request.computed > before
    assert len(request.output) > 10


@pytest.mark.parametrize("left", ["because it is too large", "before it ran", "after it ran"])
def test_static_who_arrives_during_a_batch_takes_no_place_that_a_member_left(left):
    """Places were counted, not members: one that was free joined the batch to whoever came."""
    first, second, late = prompt(0, 8), prompt(1, 6), prompt(2, 1, priority=-1)
    second.samples = 4 if left == "because it is too large" else 1
    scheduler = scheduler_of(
        first, second, static=True, policy="priority",
        budget=4 if left == "before it ran" else 20, blocks=4 if left == "after it ran" else 20,
    )  # fmt: skip
    advance(scheduler)
    advance(scheduler)
    assert (scheduler.running, scheduler.waiting) == ([first], [second])
    if left != "because it is too large":
        scheduler.abort(second)
    scheduler.add(late)
    advance(scheduler)
    assert (scheduler.running, late.waits) == ([first], {"batch": 1})


@pytest.mark.parametrize("verb", ["match", "grow"])
def test_a_request_that_arrives_while_the_first_of_the_queue_is_admitted_is_not_lost(verb):
    """Another thread adds while a step runs. More urgent, it was taken off the queue in place of
    the one that was admitted, and never ran."""
    first, urgent = prompt(0, 4), prompt(1, 4, priority=-1)
    scheduler = scheduler_of(first, policy="priority")
    answer = getattr(scheduler.manager, verb)

    def interleaved(*given):
        if not urgent.stamps:
            urgent.stamps["received"] = 1.0
            scheduler.add(urgent)
        return answer(*given)

    setattr(scheduler.manager, verb, interleaved)
    advance(scheduler)
    assert {*scheduler.running, *scheduler.arrived} == {first, urgent}
    while scheduler.busy:
        advance(scheduler, 2)
    assert first.output == urgent.output == [7, 7]


def test_a_fork_that_fails_leaves_samples_that_can_be_ended():
    """The child was in its family and in no list: to abort it was a ValueError."""
    first = prompt(0, 3, samples=3)
    scheduler = scheduler_of(first)
    plan = scheduler.plan()

    def failing(parent, child):
        raise RuntimeError("no room")

    scheduler.manager.fork = failing
    with pytest.raises(RuntimeError):
        forked(scheduler, plan)
    for request in list(first.family):
        scheduler.abort(request)
    check(scheduler)
    assert first.finished and not scheduler.busy and not scheduler.manager.held


class Interrupted(BaseException):
    """Ctrl-C."""


def interrupt(count, work):
    """Run `work` and interrupt it before the `count`-th line of scheduler or manager; whether it
    got that far."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        ours = frame.f_code.co_filename == scheduling.__file__
        if event == "call" and not ours and not isinstance(frame.f_locals.get("self"), Ledger):
            return None
        lines += event == "line"
        if event == "line" and lines == count:
            sys.settrace(None)
            raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


def full_step(scheduler, plans):
    plans += [scheduler.plan()]
    scheduler.manager.write(plans[0])
    plans[0] = forked(scheduler, plans[0])
    scheduler.commit(plans[0], [result(scheduler.manager, r, n) for r, n in plans[0]])


def crowd(kind):
    """Shortly before a step that preempts, admits and forks, or lets go."""
    requests = [prompt(i, n, params=4, most=n + 3) for i, n in enumerate((8, 3, 5))]
    requests[2].samples = 2 if kind == "forks" else 1
    scheduler = scheduler_of(*requests, budget=20, blocks=5 if kind == "preempts" else 9)
    for _ in range({"preempts": 1, "forks": 0, "ends": 3}[kind]):
        step(scheduler)
    return scheduler, requests


@pytest.mark.parametrize("kind", ["preempts", "forks", "ends"])
def test_an_interruption_before_any_line_of_a_step_leaves_nothing_torn(kind):
    """A request whose blocks were released, but that was still among the running with its tokens
    computed, went on over blocks that nobody had written; one in no list was waited for for ever.
    What a plan named is ended, as the engine does it; the others go on."""
    count, going = 0, True
    while going:
        count += 1
        scheduler, requests = crowd(kind)
        plans = []
        going = interrupt(count, lambda: full_step(scheduler, plans))
        planned = [one for plan in plans for request, _ in plan for one in request.family]
        for request in dict.fromkeys(planned if going else ()):
            scheduler.abort(request)
        scheduler.repair()
        check(scheduler)
        while scheduler.busy:
            step(scheduler)
        assert not scheduler.manager.held
        for sample in (sample for request in requests for sample in request.family):
            assert sample.finish_reason in ("length", "abort"), f"lost before line {count}"
            assert sample.tokens == alone(sample, len(sample.output))
    assert count > 100
