"""paged.py: tables by hand, against the contiguous cache, against dictionaries, whole workloads.

What a block holds is played with numbers: the content of a place is a hash of all ids up to it,
computed from the content of the place before it, read through the table. One block in a wrong
table, or one that was given away too early, and every number after it is another one.
"""

import random
import sys
from collections import Counter

import pytest
import torch

import kernels
import kv_cache
import paged
import tiny
from kv_cache import ContiguousCache, LayerSpec
from paged import BlockManager, PagedCache, PrefixIndex, Room, rooms
from scheduler import Request, Scheduler

torch.set_num_threads(1)
S = 8


# ---------------------------------------------------------------- helpers


def ids(start, count):
    return list(range(start, start + count))


def admit(manager, tokens, **fields):
    """A request with its prefix matched and room for all its tokens, nothing computed yet."""
    request = Request(0, list(tokens), **fields)
    request.tables, request.computed = manager.match(request.tokens, request.salt)
    grown = manager.grow(request, request.missing)
    assert grown, "the pool is too small for this test"
    return request


def arrive(manager, tokens, **fields):
    """The same, computed and committed."""
    request = admit(manager, tokens, **fields)
    request.computed = len(request.tokens)
    manager.commit(request)
    return request


def pass_by(manager, tokens, **fields):
    """A request that comes, computes its tokens and leaves: its table while it was there."""
    request = arrive(manager, tokens, **fields)
    table = list(request.tables[0])
    manager.release(request)
    return table


def found(manager, tokens, salt=None):
    """How many tokens a match finds; what it held is given back."""
    probe = Request(0, list(tokens), salt=salt)
    probe.tables, count = manager.match(tokens, salt)
    manager.release(probe)
    return count


def cached_blocks(manager, group=0):
    index = manager.pools[group].index
    return {entry.block for entry in index.entries.values() if entry.idle}


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize("length, tokens", [
    (1, 0), (7, 0), (8, 0), (9, 8), (15, 8), (16, 8), (17, 16), (23, 16), (24, 16), (25, 24),
])  # fmt: skip
def test_a_match_ends_before_the_last_token(length, tokens):
    manager = BlockManager([8, 8], S)
    table = pass_by(manager, ids(0, 32))
    assert table == [1, 2, 3, 4]
    tables, count = manager.match(ids(0, length), None)
    assert (tables, count) == ([table[: tokens // S]] * 2, tokens)
    assert (length - 1) // S * S == tokens


@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17, 24])
def test_the_same_prompt_sent_twice_always_has_a_token_left_to_compute(length):
    manager = BlockManager(8, S)
    first = arrive(manager, ids(0, length))
    second = admit(manager, ids(0, length))
    assert second.missing >= 1
    full = (length - 1) // S
    assert second.tables[0][:full] == first.tables[0][:full]
    assert not set(second.tables[0][full:]) & set(first.tables[0])
    manager.check([first, second])


@pytest.mark.parametrize("tokens, blocks", [(1, 1), (7, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_a_table_has_exactly_the_blocks_its_tokens_fill(tokens, blocks):
    manager = BlockManager([8, 8], S)
    request = Request(0, ids(0, tokens))
    assert manager.grow(request, tokens)
    assert [len(table) for table in request.tables] == [blocks, blocks]
    assert manager.held == 2 * blocks
    assert manager.grow(request, tokens)
    assert manager.held == 2 * blocks, "asked twice for the same room"


def test_a_block_is_taken_when_the_one_before_it_is_full():
    manager = BlockManager(8, S)
    request = Request(0, ids(0, 30))
    held = []
    for n in (3, 5, 1, 7, 8, 1):  # up to 3, 8, 9, 16, 24, 25 tokens
        assert manager.grow(request, n)
        request.computed += n
        held.append(len(request.tables[0]))
    assert held == [1, 1, 2, 2, 3, 4]
    assert request.tables == [[1, 2, 3, 4]]


def test_all_groups_grow_or_none_does():
    manager = BlockManager([4, 4], S)
    other = [manager.pools[1].take() for _ in range(3)]
    request = Request(0, ids(0, 16))
    assert not manager.grow(request, 16)
    assert not any(request.tables)
    assert [pool.available for pool in manager.pools] == [4, 1]
    assert manager.grow(request, 8)
    assert request.tables == [[1], [4]]
    request.computed = 8
    assert not manager.grow(request, 1)
    assert request.tables == [[1], [4]] and manager.pools[0].available == 3
    for block in other:
        manager.pools[1].let_go(block, 0)
    assert manager.grow(request, 1)
    manager.check([request])


def test_three_samples_share_what_is_full_and_each_has_the_rest_of_its_own():
    """20 tokens: blocks 1 and 2 are full, 3 is not, 4 and 5 were taken for the other two."""
    manager = BlockManager(8, S)
    parent = admit(manager, ids(0, 20), samples=3)
    assert parent.tables == [[1, 2, 3, 4, 5]]
    children = []
    while parent.samples > 1:
        children.append(Request(0, ids(0, 20)))
        manager.fork(parent, children[-1])
        parent.samples -= 1
    assert parent.tables == [[1, 2, 3]]
    assert [child.tables for child in children] == [[[1, 2, 5]], [[1, 2, 4]]]
    assert manager.pools[0].references == [0, 3, 3, 1, 1, 1, 0, 0, 0]
    assert manager.held == 5
    family = [parent, *children]
    for i, request in enumerate(family):
        manager.check(family[i:])
        manager.release(request)
    manager.check([])
    assert manager.held == 0


def test_samples_of_a_prompt_that_ends_with_a_block_need_no_copy():
    manager = BlockManager(8, S)
    parent = admit(manager, ids(0, 16), samples=2)
    assert parent.tables == [[1, 2]]
    child = Request(0, ids(0, 16), computed=16)
    manager.fork(parent, child)
    parent.computed, parent.samples = 16, 1
    assert child.tables == [[1, 2]]
    assert manager.grow(parent, 1) and manager.grow(child, 1)
    assert (parent.tables, child.tables) == ([[1, 2, 3]], [[1, 2, 4]])
    manager.check([parent, child])


def test_room_for_the_samples_is_taken_with_the_end_of_the_prompt_and_not_before():
    manager = BlockManager(8, S)
    request = Request(0, ids(0, 20), samples=3)
    assert manager.grow(request, 17) and len(request.tables[0]) == 3
    request.computed = 17
    assert manager.grow(request, 3) and len(request.tables[0]) == 5


def test_a_block_is_counted_once_for_each_table_that_holds_it():
    manager = BlockManager(8, S)
    a = arrive(manager, ids(0, 20))
    b = arrive(manager, ids(0, 18))
    assert (a.tables, b.tables) == ([[1, 2, 3]], [[1, 2, 4]])
    assert manager.pools[0].references[1:5] == [2, 2, 1, 1]
    assert (manager.held, manager.cached) == (4, 0)
    manager.release(a)
    assert manager.pools[0].references[1:5] == [1, 1, 0, 1]
    assert (manager.held, manager.cached, manager.pools[0].free[-1]) == (3, 0, 3)
    manager.release(b)
    assert (manager.held, cached_blocks(manager)) == (0, {1, 2})
    manager.check([])


def test_a_released_prompt_is_evicted_from_its_tail():
    manager = BlockManager(3, S)
    assert pass_by(manager, ids(0, 24)) == [1, 2, 3]
    assert pass_by(manager, ids(100, 7)) == [3]
    assert found(manager, ids(0, 32)) == 16
    last = arrive(manager, ids(200, 9))
    assert last.tables == [[3, 2]]
    assert found(manager, ids(0, 32)) == 8
    manager.check([last])


def test_the_request_that_left_first_is_evicted_first_and_a_match_counts_as_use():
    def order_after(*matches):
        manager = BlockManager(4, S)
        assert pass_by(manager, ids(0, 16)) == [1, 2]
        assert pass_by(manager, ids(100, 16)) == [3, 4]
        for tokens in matches:
            found(manager, tokens)
        return arrive(manager, ids(200, 32)).tables[0]

    assert order_after() == [2, 1, 4, 3]
    assert order_after(ids(0, 17)) == [4, 3, 2, 1]
    assert order_after(ids(0, 9)) == [2, 4, 3, 1]  # only its head was used again
    assert order_after(ids(0, 17), ids(100, 17)) == [2, 1, 4, 3]
    assert order_after(ids(0, 8)) == [2, 1, 4, 3]  # too short to match anything


def test_a_free_block_goes_before_a_cached_one():
    manager = BlockManager(4, S)
    pass_by(manager, ids(0, 16))
    assert cached_blocks(manager) == {1, 2}
    assert arrive(manager, ids(100, 9)).tables == [[3, 4]]
    assert found(manager, ids(0, 17)) == 16


def test_a_cached_block_that_is_held_again_is_not_evicted():
    manager = BlockManager(3, S)
    pass_by(manager, ids(0, 16))
    holder = admit(manager, ids(0, 17))
    assert holder.tables == [[1, 2, 3]]
    assert not manager.grow(Request(1, ids(50, 8)), 8)
    assert (manager.held, manager.cached) == (3, 0)
    manager.check([holder])


def test_requests_of_another_salt_find_nothing():
    manager = BlockManager(9, S)
    tables = [pass_by(manager, ids(0, 24), salt=salt) for salt in (None, "a", "")]
    assert tables == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    for salt, table in zip((None, "a", ""), tables):
        probe = admit(manager, ids(0, 17), salt=salt)
        assert probe.tables[0][:2] == table[:2] and probe.computed == 16
        manager.release(probe)
    assert found(manager, ids(0, 24), "b") == 0


def test_equal_blocks_of_one_step_stay_two_and_the_second_is_not_entered():
    manager = BlockManager(8, S)
    a, b = admit(manager, ids(0, 20)), admit(manager, ids(0, 20))
    for request in (a, b):
        request.computed = 20
        manager.commit(request)
    assert (a.tables, b.tables) == ([[1, 2, 3]], [[4, 5, 6]])
    assert set(manager.pools[0].index.of_block) == {1, 2}
    manager.check([a, b])
    manager.release(b)
    assert (manager.cached, manager.held) == (0, 3)
    c = admit(manager, ids(0, 17))
    assert c.tables[0][:2] == [1, 2]
    manager.release(c)
    manager.release(a)
    assert cached_blocks(manager) == {1, 2}


def test_after_the_first_of_two_equal_blocks_was_evicted_nothing_wrong_is_found():
    """B goes on from blocks whose twins of A, the ones in the index, are gone."""
    manager = BlockManager(6, S)
    a, b = admit(manager, ids(0, 16)), admit(manager, ids(0, 16))
    for request in (a, b):
        request.computed = 16
        manager.commit(request)
    assert (a.tables, b.tables) == ([[1, 2]], [[3, 4]])
    manager.release(a)
    c = arrive(manager, ids(100, 32))
    assert c.tables == [[5, 6, 2, 1]]
    manager.check([b, c])
    assert found(manager, ids(0, 17)) == 0
    manager.release(c)
    b.tokens += ids(16, 8)
    assert manager.grow(b, 8)
    b.computed = 24
    manager.commit(b)
    manager.check([b])
    assert b.tables[0][:2] == [3, 4]
    tables, count = manager.match(ids(0, 25), None)
    assert tables == [b.tables[0][: count // S]]


def test_two_prefixes_with_the_same_key_are_a_miss(monkeypatch):
    monkeypatch.setattr(paged, "chain", lambda parent, salt, ids: 7)
    manager = BlockManager(8, S)
    a = arrive(manager, ids(0, 20))
    b = arrive(manager, ids(100, 20))
    assert (a.tables, b.tables) == ([[1, 2, 3]], [[4, 5, 6]])
    assert set(manager.pools[0].index.of_block) == {1}
    assert found(manager, ids(0, 20)) == 8
    assert found(manager, ids(100, 20)) == found(manager, ids(0, 20), "salt") == 0
    for request in (a, b):  # what is behind the collision is never entered
        request.tokens += ids(500, 20)
        manager.grow(request, 12)
        request.computed = 32
        manager.commit(request)
    manager.check([a, b])
    assert set(manager.pools[0].index.of_block) == {1}
    manager.release(a)
    manager.release(b)
    assert (manager.cached, len(manager.pools[0].free)) == (1, 7)


def test_equal_blocks_behind_different_ones_with_the_same_key_are_a_miss(monkeypatch):
    good = paged.chain
    monkeypatch.setattr(paged, "chain", lambda parent, salt, ids: good(None, None, ids))
    manager = BlockManager(8, S)
    a = arrive(manager, [*[0] * 8, *[5] * 8, 1])
    b = arrive(manager, [*[1] * 8, *[5] * 8, 1])
    manager.check([a, b])
    assert (found(manager, a.tokens), found(manager, b.tokens)) == (16, 8)
    assert found(manager, [5] * 9) == 0
    assert manager.match(b.tokens, None) == ([b.tables[0][:1]], 8)


def test_the_key_of_a_block_says_what_comes_before_it():
    root = paged.chain(None, None, (1, 2))
    assert root != paged.chain(None, "a", (1, 2)) and root != paged.chain(None, None, (2, 1))
    parents = [PrefixIndex().insert(None, None, (first,), 1) for first in (1, 2)]
    assert len({paged.chain(parent, None, (5, 6)) for parent in (None, *parents)}) == 3
    assert root == paged.chain(None, None, (1, 2))


def test_without_a_prefix_cache_nothing_is_remembered():
    manager = BlockManager(4, S, prefix_cache=False)
    for _ in range(3):
        request = arrive(manager, ids(0, 24))
        assert found(manager, ids(0, 25)) == 0
        manager.release(request)
        assert (manager.held, manager.cached, len(manager.pools[0].free)) == (0, 0, 4)
    assert not manager.pools[0].index.entries


def test_a_reservation_is_taken_whole_at_admission_and_never_grows():
    manager = BlockManager(8, S, reserve=True)
    request = Request(0, ids(0, 5), most=30)
    assert manager.grow(request, 2)
    assert request.tables == [[1, 2, 3, 4]]
    for computed in range(2, 30):
        request.computed = computed
        assert manager.grow(request, 1) and len(request.tables[0]) == 4
    assert not manager.grow(Request(1, ids(0, 5), most=33), 1)


def test_a_reservation_of_samples_holds_the_longest_answer_of_each():
    """10 tokens, at most 30: one full block is shared, three more for each of the two."""
    manager = BlockManager(8, S, reserve=True)
    parent = admit(manager, ids(0, 10), samples=2, most=30)
    assert parent.tables == [[1, 2, 3, 4, 5, 6, 7]]
    child = Request(0, ids(0, 10), most=30)
    manager.fork(parent, child)
    parent.samples = 1
    assert parent.tables == [[1, 2, 3, 4]] and child.tables == [[1, 7, 6, 5]]
    parent.computed = child.computed = 29
    assert manager.grow(parent, 1) and manager.grow(child, 1)
    assert manager.held == 7
    manager.check([parent, child])


def test_only_full_blocks_of_committed_ids_are_entered_generated_ones_too():
    manager = BlockManager(8, S)
    request = arrive(manager, ids(0, 6))
    index = manager.pools[0].index
    assert not index.entries
    request.tokens += [100]
    request.draft = ids(200, 5)
    assert manager.grow(request, request.behind)  # 12 rows, two blocks
    request.computed, request.draft = 7, []  # all of the draft was rejected
    request.tokens += [101]  # and this is not computed yet
    manager.commit(request)
    assert not index.entries and len(request.tables[0]) == 1  # what the draft had is given back
    request.tokens += ids(102, 3)
    request.computed = 10
    manager.commit(request)
    assert [entry.ids for entry in index.entries.values()] == [(0, 1, 2, 3, 4, 5, 100, 101)]
    request.tokens += ids(105, 6)
    manager.grow(request, 6)
    request.computed = 16
    manager.commit(request)
    assert [entry.block for entry in index.entries.values()] == request.tables[0]
    assert [entry.depth for entry in index.entries.values()] == [0, 1]
    manager.release(request)
    assert found(manager, [*ids(0, 6), *ids(100, 10), 1]) == 16
    assert found(manager, [*ids(0, 6), *ids(200, 10), 1]) == 0


def test_an_aborted_request_leaves_what_it_had_committed_and_a_failed_one_nothing():
    manager = BlockManager(8, S)
    scheduler = Scheduler(manager, budget=8, max_running=4)
    for finish, tokens in (("error", ids(0, 20)), ("abort", ids(100, 20))):
        request = Request(0, tokens)
        scheduler.add(request)
        scheduler.commit(scheduler.plan(), [([], None)])
        plan = scheduler.plan()
        assert plan == [(request, 8)] and len(request.tables[0]) == 3
        if finish == "abort":
            scheduler.abort(request)
        scheduler.commit(plan, [([], finish)])
        scheduler.check()
        manager.check(scheduler.running)
        assert (manager.held, request.finish_reason, request.tables) == (0, finish, [])
        assert found(manager, tokens) == (8 if finish == "abort" else 0)
    assert manager.cached == 1
    waiting = Request(1, ids(0, 20))
    scheduler.add(waiting)
    scheduler.abort(waiting)
    assert manager.held == 0


def test_a_request_that_is_not_admitted_holds_nothing_of_its_prefix():
    manager = BlockManager(4, S)
    pass_by(manager, ids(0, 17))
    scheduler = Scheduler(manager, budget=64, max_running=4)
    first, second = Request(0, ids(100, 15), most=16), Request(1, ids(0, 25))
    for request in (first, second):
        scheduler.add(request)
    assert scheduler.plan() == [(first, 15)]
    assert (scheduler.blocked, second.tables, second.computed) == ("blocks", [], 0)
    scheduler.check()
    manager.check(scheduler.running)
    assert manager.pools[0].references.count(1) == 2


def test_after_repair_the_tables_are_the_truth():
    manager = BlockManager([8, 8], S)
    a, b = arrive(manager, ids(0, 20)), arrive(manager, ids(0, 18))
    gone = arrive(manager, ids(100, 9))
    manager.pools[0].references[1] = 9
    manager.pools[1].free.clear()
    gone.tables = []  # interrupted in the midst of its release
    a.tables[1].append(8)  # or in the midst of growing
    manager.repair([a, b, Request(5, [1])])
    manager.check([a, b, gone])
    assert (manager.held, manager.cached) == (4 + 5, 0)
    assert found(manager, ids(0, 20)) == 0
    for request in (a, b):
        manager.commit(request)
    manager.check([a, b])
    assert found(manager, ids(0, 20)) == 16
    manager.release(a)
    manager.release(b)
    manager.check([])
    assert manager.held == 0


def test_an_order_of_ones_own_decides_who_is_evicted():
    def leave_in(order):
        """Blocks 1, 2 and 3 are one prompt, 4 another; 1 is used again. Who goes first?"""
        index = PrefixIndex(order)
        parent = None
        for block in (1, 2, 3):
            parent = index.insert(parent, None, (block,), block)
        index.insert(None, None, (9,), 4)
        for now, block in ((1, 3), (1, 2), (1, 1), (2, 4)):
            index.let_go(block, now)
        assert index.match([1, 0], None, 1) == [1]
        index.hold(1)
        index.let_go(1, 3)
        assert index.idle == 4
        return [index.evict() for _ in range(4)]

    assert leave_in(paged.least_recently_used) == [3, 2, 4, 1]
    assert leave_in(lambda entry: entry.block) == [1, 2, 3, 4]  # first in, first out
    assert leave_in(lambda entry: -entry.used) == [1, 4, 3, 2]  # most recently used
    assert leave_in(lambda entry: (entry.depth, entry.used)) == [4, 1, 2, 3]


# ---------------------------------------------------------------- by hand: windows and states


def compute(manager, request, n=None):
    """One step of a request alone, as far as the manager lets it go."""
    n = manager.limit(request, request.missing if n is None else n)
    assert manager.grow(request, n)
    request.computed += n
    manager.commit(request)
    return n


def chunks(manager, tokens, budget=64, output=0):
    """Serve a prompt alone: what was found, the chunks, and the request."""
    request = Request(0, list(tokens))
    request.tables, request.computed = manager.match(request.tokens, None)
    found, sizes = request.computed, []
    while request.missing:
        sizes.append(compute(manager, request, min(request.missing, budget)))
    for i in range(output):
        request.tokens.append(900 + i)
        compute(manager, request)
    manager.check([request])
    return found, sizes, request


@pytest.mark.parametrize(
    "window, first", [(1, 3), (8, 2), (9, 2), (10, 1), (17, 1), (18, 0), (99, 0)]
)
def test_a_block_that_no_later_row_sees_is_given_back(window, first):
    """24 tokens: the row at position 24 sees 25 - window .. 24."""
    manager = BlockManager([8, Room(8, window)], S)
    _, _, request = chunks(manager, ids(0, 24))
    assert request.tables == [[1, 2, 3], [0, 0, 0][:first] + [1, 2, 3][first:]]
    assert first == max(25 - window, 0) // S
    assert len(manager.pools[1].free) == 5 and manager.pools[1].index.idle == first
    manager.release(request)
    manager.check([])


def test_a_window_holds_as_many_blocks_after_1000_tokens_as_after_50():
    manager = BlockManager([Room(5, 20)], S, prefix_cache=False)
    request = Request(0, ids(0, 40))
    held = []
    while len(request.tokens) < 1000:
        compute(manager, request, min(request.missing, S))
        held.append(manager.held)
        if not request.missing:
            request.tokens.append(0)
    assert max(held) == max(held[:30]) == 4
    assert len(request.tables[0]) == 125 and sum(map(bool, request.tables[0])) <= 4


def test_a_chunk_is_no_longer_than_its_window_has_blocks_for():
    manager = BlockManager([40, Room(5, 10)], S)
    _, sizes, _ = chunks(manager, ids(0, 200), budget=200)
    assert sizes[0] == 40 and max(sizes[1:]) == 24 and sum(sizes) == 200


def test_a_window_is_found_again_if_all_of_the_last_one_is_there():
    manager = BlockManager([Room(9, 10)], S)
    chunks(manager, ids(0, 40))[2].tables  # blocks 1..5, of which 4 and 5 are held
    index = manager.pools[0].index
    assert found(manager, ids(0, 48)) == 40
    index.evict(), index.evict(), index.evict()  # blocks 1 to 3 in some order
    assert set(index.of_block) == {4, 5}
    assert found(manager, ids(0, 48)) == 40, "a row at 40 sees 31.., which are in 4 and 5"
    assert found(manager, [7, *ids(1, 47)]) == 0, "the same blocks behind another beginning"
    index.forget(4)
    assert found(manager, ids(0, 48)) == 0


def test_a_window_is_found_again_only_without_a_hole():
    """A row at 24 sees 9.., so blocks 2 and 3 are needed: the first two are no help."""
    pool = paged.Windowed(Room(9, 2 * S), S, True)
    assert list(pool.cuts([1, 2, 0, 3])) == [1, 2]
    assert list(pool.cuts([0, 2, 3, 0])) == [3]


def test_the_longest_prefix_that_every_group_can_go_on_from_is_taken():
    manager = BlockManager([8, Room(8, 10), Room(4, state=True)], S)
    _, sizes, request = chunks(manager, ids(0, 40), budget=24)
    assert sizes == [24, 8, 8] and len(manager.pools[2].index.entries) == 3  # at 24, 32 and 40
    manager.release(request)
    for length, tokens in ((48, 40), (41, 40), (40, 32), (32, 24), (25, 24), (24, 0)):
        assert found(manager, ids(0, length)) == tokens, length
    tables, count = manager.match(ids(0, 32), None)
    state = manager.pools[2].index.match(ids(0, 32), None, S, gaps=True)
    assert tables == [[1, 2, 3], [0, 2, 3], [state[2]]] and state == [0, 0, state[2]]


def test_a_step_reads_one_state_and_writes_another():
    manager = BlockManager([Room(3, state=True)], S, prefix_cache=False)
    request = Request(0, ids(0, 3))
    seen = []
    for _ in range(3):
        assert manager.grow(request, request.missing)
        seen.append(list(request.tables[0]))
        request.computed += request.missing
        manager.commit(request)
        request.tokens.append(0)
    assert seen == [[0, 1], [1, 2], [2, 1]]
    assert request.tables == [[1]] and manager.held == 1


@pytest.mark.parametrize("length, sizes", [
    (7, [7]), (8, [8]), (9, [8, 1]), (15, [8, 7]), (16, [8, 8]), (17, [16, 1]), (47, [40, 7]),
    (48, [40, 8]), (50, [48, 2]), (130, [64, 64, 2]),
])  # fmt: skip
def test_chunks_of_a_prompt_end_with_a_block_where_there_are_states(length, sizes):
    manager = BlockManager([40, Room(9, state=True)], S)
    assert chunks(manager, ids(0, length))[1] == sizes


def test_a_draft_over_states_needs_no_more_of_them():
    """Its rows are computed from the state before it, and those that stay once more."""
    manager = BlockManager([40, Room(9, state=True)], S)
    _, _, request = chunks(manager, ids(0, 10), output=1)
    request.tokens.append(5)
    request.draft = [7] * 9  # to position 20, over two ends of blocks
    assert manager.limit(request, 10) == 10
    assert manager.grow(request, 10)
    (read,) = request.tables[1][:-1]
    assert len(request.tables[0]) == 3 and len(request.tables[1]) == 2
    write = request.tables[1][1]
    request.computed, request.draft = request.computed + 3, []
    request.tokens += [7, 7, 8]
    manager.commit(request)
    assert request.tables[1] == [write] and read != write
    assert len(request.tables[0]) == 2  # position 14 needs no more
    manager.check([request])


def test_a_state_is_found_again_only_where_a_round_ended_with_a_block():
    """Of 11 tokens on 5 rows stay, then 2: the state after 16 can be found. Of one round 7: there
    is none after 16."""
    for rounds, expected in (([5, 2], 16), ([7], 8)):
        manager = BlockManager([40, Room(9, state=True)], S)
        _, _, request = chunks(manager, ids(0, 10), output=1)
        for n in rounds:
            assert manager.grow(request, n)
            request.tokens += ids(100, n)
            request.computed += n
            manager.commit(request)
        tokens = list(request.tokens)
        manager.release(request)
        assert found(manager, tokens) == expected


def test_what_guesses_took_is_given_back_whatever_keeps_it():
    """Also of a window; but not what a prompt or a reservation took ahead of itself."""
    manager = BlockManager([20, Room(12, window=8)], S)
    request = arrive(manager, ids(0, 8))
    request.tokens.append(5)
    request.draft = [7] * 16
    held = manager.held
    assert manager.grow(request, 17)
    assert manager.held == held + 6
    request.computed, request.draft = 9, []
    request.tokens.append(6)
    manager.commit(request)
    assert [len(table) for table in request.tables] == [2, 2]
    manager.check([request])
    for reserve in (True, False):
        manager = BlockManager([20], S, reserve=reserve)
        request = Request(0, ids(0, 30), most=60)
        assert manager.grow(request, 8, 30)
        taken = len(request.tables[0])
        request.computed = 8
        manager.commit(request)
        assert len(request.tables[0]) == taken == (8 if reserve else 4)


def test_without_a_prefix_cache_a_prompt_is_not_cut_for_its_states():
    manager = BlockManager([40, Room(9, state=True)], S, prefix_cache=False)
    assert chunks(manager, ids(0, 50))[1] == [50]


@pytest.mark.parametrize("budget", [1, 3, 7, 8, 9, 15])
def test_states_are_found_again_whatever_the_budget(budget):
    """A step of no more than a block passed the end of a block, and left no state there."""
    manager = BlockManager([60, Room(20, state=True)], S)
    prompts = [[*ids(0, 20), *ids(100 * i, 30)] for i in range(1, 5)]
    found = []
    for prompt in prompts:
        reused, sizes, request = chunks(manager, prompt, budget)
        manager.release(request)
        again, _, request = chunks(manager, prompt, budget, output=9)
        manager.release(request)
        found += [reused, again]
    assert len(manager.pools[1].index.entries) == 9, "two for each prompt, and where they part"
    assert found == [0, 48, 0, 48, 16, 48, 16, 48]


def test_where_prompts_part_the_second_leaves_a_state_for_the_third():
    manager = BlockManager([60, Room(9, state=True)], S)
    prompts = [[*ids(0, 20), *ids(100 * i, 30)] for i in range(1, 5)]
    served = []
    for prompt in prompts:
        reused, sizes, request = chunks(manager, prompt)
        served.append((reused, sizes))
        manager.release(request)
    assert served == [(0, [48, 2]), (0, [16, 32, 2]), (16, [32, 2]), (16, [32, 2])]


def test_of_an_answers_states_only_the_last_is_kept():
    manager = BlockManager([60, Room(9, state=True)], S)
    _, _, request = chunks(manager, ids(0, 10), output=40)
    states = manager.pools[1].index
    depths = sorted(8 * (entry.depth + 1) for entry in states.entries.values())
    assert depths == [8, 48], "one of the prompt, one of the answer"
    tokens = list(request.tokens)
    manager.release(request)
    assert found(manager, [*tokens, 1, 2, 3]) == 48


def test_a_tail_that_was_evicted_is_not_taken_for_what_lies_in_its_block_now():
    manager = BlockManager([60, Room(4, state=True)], S)
    _, _, request = chunks(manager, ids(0, 10), output=10)
    tail = next(iter(manager.progress[request].tails.values()))
    manager.pools[1].index.forget(tail.block)  # evicted, then given to another prefix
    other = manager.pools[1].index.insert(None, "x", tuple(ids(0, S)), tail.block)
    for i in range(S):
        request.tokens.append(i)
        compute(manager, request)
    assert manager.pools[1].index.of_block.get(tail.block) in (other, None)
    assert manager.pools[1].index.entries.get(other.key) is other


@pytest.mark.parametrize("room", [Room(20, 10), Room(9, state=True)])
def test_what_a_failed_request_has_left_behind_is_forgotten(room):
    manager = BlockManager([20, room], S)
    manager.release(chunks(manager, ids(100, 20))[2])
    known = [set(pool.index.of_block) for pool in manager.pools]
    _, _, request = chunks(manager, ids(0, 50), budget=16, output=9)
    manager.forget(request)
    manager.release(request)
    assert [set(pool.index.of_block) for pool in manager.pools] == known != [set(), set()]
    manager.check([])


def test_bytes_are_shared_out_states_first_then_windows_then_what_keeps_all():
    full, window = LayerSpec("full", 1, 8), LayerSpec("sliding", 1, 8, 20)
    state = LayerSpec("linear", 1, 4, values=4, conv=(3, 12))
    block, one = 2 * 8 * S * 4, 4 * 4 * 4 + 3 * 12 * 4
    specs = [state, full, window, window]
    found, running = rooms(specs, 10**6, S, 16, 4, 4)
    assert running == 4
    assert found[0] == Room(16, state=True) and found[2] == Room(4 * 5 + 2, 20)
    left = 10**6 - 17 * one - 23 * 2 * block
    assert found[1] == Room(left // block - 1)
    cache = PagedCache(specs, [room.blocks for room in found], S, 16, 4)
    assert cache.nbytes == 17 * one + 23 * 2 * block + (left // block) * block <= 10**6


def test_little_memory_lowers_how_many_run_and_less_is_refused():
    """Half of it was not enough for a window, and the other half lay idle: refused, with a number
    of bytes that was not enough either."""
    full, window = LayerSpec("full", 1, 8), LayerSpec("sliding", 1, 8, 20)
    state = LayerSpec("linear", 1, 4, values=4, conv=(3, 12))
    specs, lowered = [full, window, state], 0
    block, one = 2 * 8 * S * 4, 4 * 4 * 4 + 3 * 12 * 4
    needed = 3 * one + 6 * block + 2 * block
    with pytest.raises(
        ValueError, match=f"^kv_memory {needed - 1:,} bytes: a request needs 4,720: "
    ):
        rooms(specs, needed - 1, S, 16, 64, 4)
    assert needed == 4720
    for memory in range(needed, 30000, 500):
        found, running = rooms(specs, memory, S, 16, 64, 4)
        lowered += running < 64
        assert running == min(64, found[2].blocks // 2)
        cache = PagedCache(specs, [room.blocks for room in found], S, 16, running)
        assert cache.nbytes <= memory
    assert lowered > 10


def test_any_memory_is_shared_out_so_that_a_request_runs_and_no_more_is_taken():
    draw = random.Random(0)
    kinds = [
        LayerSpec("full", 2, 4), LayerSpec("full", 1, 4, values=12), LayerSpec("latent", 1, 9),
        LayerSpec("linear", 2, 4, values=3, conv=(3, 9)), LayerSpec("sliding", 1, 8, 1),
        LayerSpec("sliding", 2, 4, 20), LayerSpec("sliding", 1, 4, 70),
    ]  # fmt: skip
    for _ in range(100):
        specs = draw.choices(kinds, k=draw.randint(1, 6))
        size, budget, asked = draw.choice([8, 16, 64]), draw.randint(1, 99), draw.randint(1, 9)
        with pytest.raises(ValueError, match="a request needs ([\\d,]+): of ") as refused:
            rooms(specs, 0, size, budget, asked, 4)
        least = int(refused.value.args[0].split("needs ")[1].split(":")[0].replace(",", ""))
        with pytest.raises(ValueError, match="a request needs"):
            rooms(specs, least - 1, size, budget, asked, 4)
        for memory in (least, least + draw.randint(0, least), 20 * least):
            found, running = rooms(specs, memory, size, budget, asked, 4)
            cache = PagedCache(specs, [room.blocks for room in found], size, budget, running)
            assert cache.nbytes <= memory and 1 <= running <= asked
            grows = [room.blocks for room in found if not (room.window or room.state)]
            longest = min(grows, default=20) * size
            manager = BlockManager(found, size, prefix_cache=draw.random() < 0.5)
            manager.door(Request(0, [1], most=longest))
            request = Request(0, ids(0, min(longest, 150) - 4))
            while len(request.tokens) < min(longest, 150):
                compute(manager, request, min(request.missing, budget))
                manager.check([request])
                request.tokens += [7] * (not request.missing)


def test_a_block_of_a_known_model_takes_the_published_bytes():
    specs = [LayerSpec("full", 3, 64)] * 30  # SmolLM2-135M
    assert sum(kv_cache.block_bytes(spec, 16, 2) for spec in specs) == 368_640
    cache = PagedCache(specs[:2], 5, 16, budget=4, max_running=2, dtype=torch.bfloat16)
    assert cache.nbytes == 6 * 368_640 * 2 // 30  # five blocks and the one never handed out


def test_rows_of_two_requests_go_where_their_tables_say():
    cache = PagedCache([LayerSpec("full", 1, 2)], 6, S, budget=16, max_running=4)
    first = with_tables(tiny.request(range(20), computed=15), [5, 1, 3])
    second = with_tables(tiny.request(range(50, 54), samples=2), [2])
    step = cache.prepare([(first, 2), (second, 4)])
    assert step.tokens.tolist() == [15, 16, 50, 51, 52, 53]
    assert step.positions.tolist() == [15, 16, 0, 1, 2, 3]
    assert step.sample_rows.tolist() == [5, 5]
    assert step.views[0].slots.tolist() == [1 * 8 + 7, 3 * 8, 16, 17, 18, 19]


def decode(block, length=3, **fields):
    return with_tables(tiny.request(range(length), computed=length - 1, **fields), [block])


def test_a_step_of_single_rows_is_padded_to_the_next_of_the_sizes_and_no_other_is():
    cache = PagedCache([LayerSpec("full", 1, 2)], 9, S, budget=8, max_running=4, sizes=(1, 2, 4))
    step = cache.prepare([(decode(2), 1), (decode(5, 4), 1), (decode(1, 1), 1)])
    assert step.padded == 4
    assert step.tokens.tolist() == [2, 3, 0, 0] and step.positions.tolist() == [2, 3, 0, 0]
    assert step.sample_rows.tolist() == [0, 1, 2, 3]
    assert step.views[0].slots.tolist() == [18, 43, 8, -1] and step.views[0].rows == 3
    assert cache.prepare([(decode(2), 1), (decode(1), 1)]).tokens.tolist() == [2, 2]
    unpadded = {
        "a chunk": [(decode(2), 1), (with_tables(tiny.request(range(5)), [3]), 5)],
        "half a prompt of one row": [(decode(2), 1), (with_tables(tiny.request(range(5)), [3]), 1)],
        "a row that is sampled twice": [(decode(2), 1), (decode(3, samples=2), 1)],
        "a draft": [(decode(2, draft=[7]), 2)],
        "more than the largest": [(decode(block), 1) for block in range(1, 6)],
    }
    for why, plan in unpadded.items():
        step, count = cache.prepare(plan), sum(n for _, n in plan)
        assert step.padded is None and len(step.tokens) == step.views[0].rows == count, why
    step = cache.prepare([], 4)  # what is recorded: nothing but padding
    assert step.padded == 4 and step.views[0].slots.tolist() == [-1] * 4
    assert len(step.tokens) == len(step.sample_rows) == 4 and step.views[0].rows == 0


@pytest.mark.parametrize("count", range(1, 9))
def test_padded_rows_store_nothing_and_get_0(count):
    specs = [LayerSpec("full", 1, 4)] * 2
    cache = tiny.poisoned(PagedCache(specs, 9, S, budget=12, max_running=8, sizes=(1, 2, 4, 8)))
    for buffer in (cache.tokens, cache.positions, cache.sample_rows, cache.layouts[0].slots):
        buffer.tensor.fill_(77)  # left by other steps
    requests = [decode(block, 1) for block in range(1, count + 1)]
    step = cache.prepare([(request, 1) for request in requests])
    rows = next(size for size in (1, 2, 4, 8) if size >= count)
    k = torch.arange(float(rows * 4)).view(rows, 1, 4)
    k[count:] = torch.nan
    for layer in range(2):
        out = step.attend(layer, k.repeat(1, 2, 1), k, k + 1)
        assert torch.equal(out[:count], (k + 1)[:count].expand(-1, 2, -1))
        assert out[count:].eq(0).all() and len(out) == rows
        for pool in cache.pools[layer]:
            written = pool.isfinite().all(-1).flatten().nonzero().flatten().tolist()
            assert written == [block * S for block in range(1, count + 1)]


def test_a_fork_copies_the_block_that_is_not_full_in_every_layer_and_no_other():
    specs = [LayerSpec("full", 1, 2), LayerSpec("full", 2, 2), LayerSpec("full", 1, 2)]
    cache = tiny.poisoned(PagedCache(specs, 6, S, budget=4, max_running=2))
    parent = with_tables(tiny.request([]), [1, 2], [3, 4])
    child = with_tables(tiny.request([]), [1, 5], [3, 6])
    pools = [pool for layer in cache.pools for pool in layer]
    for pool in pools:
        pool[1:5] = torch.randn(pool[1:5].shape)
    before = [pool.clone() for pool in pools]
    cache.copy(parent, child, 16)  # both blocks are full
    assert all(torch.equal(pool[1:5], old[1:5]) for pool, old in zip(pools, before))
    assert all(pool[5:].isnan().all() for pool in pools)
    cache.copy(parent, child, 9)
    for i, (source, target, other) in enumerate(((2, 5, 6), (4, 6, 5), (2, 5, 6))):
        for pool, old in zip(pools[2 * i :][:2], before[2 * i :]):
            assert torch.equal(pool[target], pool[source])
            assert pool[other].isnan().all() and torch.equal(pool[1:5], old[1:5])


# ---------------------------------------------------------------- against the contiguous cache


def with_tables(request, *tables):
    request.tables = [list(table) for table in tables]
    return request


class Pair:
    """The same requests in a paged and in a contiguous cache; what is not written is NaN."""

    def __init__(self, count, length, size, heads=4, shared=2, seed=0, **options):
        self.draw, self.length = random.Random(seed), length
        dtype = options.get("dtype", torch.float32)
        specs = options.get("specs", [LayerSpec("full", shared, 4)])
        blocks = count * -(-length // size) + 2
        self.paged = tiny.poisoned(
            PagedCache(specs, blocks, size, count * length, count, dtype=dtype)
        )
        self.plain = tiny.garbage(ContiguousCache(specs, count, length, dtype=dtype))
        self.specs, self.heads, self.dtype = specs, heads, dtype
        self.requests = [tiny.request(range(length), slot=slot) for slot in range(count)]
        self.tables(blocks, options.get("consecutive", False))
        self.generator = torch.Generator().manual_seed(seed)

    def tables(self, blocks, consecutive):
        per = (blocks - 2) // len(self.requests)
        orders = [ids(1, blocks) for _ in self.paged.groups]
        for order in orders:
            if not consecutive:
                self.draw.shuffle(order)
        for i, request in enumerate(self.requests):
            with_tables(request, *(order[i * per : (i + 1) * per] for order in orders))

    def randn(self, *shape):
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def step(self, plan, layer=0, causal=True, atol=1e-5):
        """Run [(request, n)] through both; the outputs must be equal. Returns them (T, H, D)."""
        for request, n in plan:
            request.behind = self.length - request.computed
        rows, spec = sum(n for _, n in plan), self.specs[layer]
        q = self.randn(rows, self.heads, spec.dim)
        k, v = self.randn(rows, spec.heads, spec.dim), self.randn(rows, spec.heads, spec.dim)
        first, second = self.paged.prepare(plan), self.plain.prepare(plan)
        for name in ("tokens", "positions", "sample_rows"):
            assert torch.equal(getattr(first, name), getattr(second, name))
        found = first.attend(layer, q, k, v, causal)
        expected = second.attend(layer, q, k, v, causal)
        assert found.dtype == q.dtype and found.shape == q.shape
        assert torch.allclose(found.float(), expected.float(), atol=atol, rtol=0)
        return found

    def advance(self, plan, **options):
        found = self.step(plan, **options)
        for request, n in plan:
            request.computed += n
        return found

    def some(self, most=5):
        """A random plan: chunks, and decodes of one row."""
        plan = []
        for request in self.draw.sample(self.requests, self.draw.randint(1, len(self.requests))):
            left = self.length - request.computed
            n = min(self.draw.choice([1, 1, 1, 2, most, 3 * most]), left)
            if n:
                plan.append((request, n))
        return plan


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("heads, shared, size, causal, dtype", [
    (4, 2, 8, True, torch.float32),
    (4, 2, 16, False, torch.float32),
    (2, 2, 8, False, torch.float32),
    (2, 2, 64, True, torch.float32),
    (4, 1, 16, True, torch.float32),
    (4, 1, 32, True, torch.bfloat16),
    (4, 2, 8, True, torch.bfloat16),
], ids=str)  # fmt: skip
def test_random_steps_equal_the_contiguous_cache(heads, shared, size, causal, dtype, consecutive):
    for seed in range(4):
        pair = Pair(5, 50, size, heads, shared, seed, dtype=dtype, consecutive=consecutive)
        atol = 1e-5 if dtype == torch.float32 else 0.03
        while min(request.computed for request in pair.requests) < 50:
            if plan := pair.some():
                found = pair.advance(plan, causal=causal, atol=atol)
                assert found.isfinite().all()


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("first", [-1, 0, 1])
@pytest.mark.parametrize("second", [-1, 0, 1])
def test_chunks_that_end_at_a_block_before_it_and_behind_it(size, first, second):
    pair = Pair(2, 4 * size, size)
    one, other = pair.requests
    for n in (size + first, 1, size + second - 1, 1, size - 1):
        pair.advance([(one, n), (other, 1)])
    pair.advance([(other, size + first)])
    pair.advance([(one, 1), (other, 1)])


def test_many_decodes_of_very_different_lengths_take_several_parts():
    pair = Pair(24, 400, S, shared=1)
    lengths = [1, 2, 7, 8, 9, 15, 16, 17, 39, 40, 41, 64, 100, 120, 150, 200, 201, 300, 399]
    for request, length in zip(pair.requests, lengths):
        if length > 1:
            pair.advance([(request, length - 1)])
    plan = [(request, 1) for request, _ in zip(pair.requests, lengths)]
    pair.draw.shuffle(plan)
    parts = pair.paged.prepare(plan).views[0].parts
    assert 2 <= len(parts) < len(plan) / 2
    pair.step(plan)
    pair.step([*plan, (pair.requests[-1], 20)])
    pair.step(plan, causal=False)


def test_layers_of_another_shape_are_another_group_with_tables_of_its_own():
    specs = [LayerSpec("full", 2, 4), LayerSpec("full", 1, 8), LayerSpec("full", 2, 4)]
    pair = Pair(3, 30, S, specs=specs)
    assert pair.paged.groups == specs[:2] and pair.paged.group_of == [0, 1, 0]
    assert all(first != second for first, second in (r.tables for r in pair.requests))
    while min(request.computed for request in pair.requests) < 30:
        if plan := pair.some():
            for layer in range(3):
                pair.step(plan, layer)
            for request, n in plan:
                request.computed += n


def test_a_row_reads_only_what_its_own_request_has_written():
    """The blocks of all others, and what is behind its own tokens, are NaN: no row sees it."""
    pair = Pair(6, 40, S)
    lengths = [1, 8, 9, 17, 30, 40]
    for request, length in zip(pair.requests, lengths):
        if length > 1:
            pair.advance([(request, length - 1)])
    pair.step([(request, 1) for request in pair.requests])
    step = pair.paged.prepare([(request, 1) for request in pair.requests])
    keys, values = pair.paged.pools[0]
    q = pair.randn(6, 4, 4)
    whole = kernels.attention(q, keys, values, step.views[0])
    for row, request in enumerate(pair.requests):
        own = [request.tables[0][p // S] * S + p % S for p in range(lengths[row])]
        alone = [torch.full_like(x, torch.nan) for x in (keys, values)]
        for x, source in zip(alone, (keys, values)):
            x.flatten(0, 1)[own] = source.flatten(0, 1)[own]
        out = kernels.attention(q, *alone, step.views[0])
        assert torch.allclose(out[row], whole[row], atol=1e-6)


def test_stale_content_of_a_block_that_is_used_again_is_never_read():
    pair = Pair(2, 40, S)
    old, new = pair.requests
    pair.advance([(old, 40)])
    for keep in (0, 2):  # a block that another one had, and a table that begins with shared ones
        new.tables = [[*old.tables[0][:keep], *old.tables[0][keep:][::-1]]]
        new.computed = keep * S
        for buffer in pair.plain.buffers[0]:
            buffer[1] = torch.nan
            buffer[1, : keep * S] = buffer[0, : keep * S]
        for n in (3, 1, 8, 1):
            assert pair.advance([(new, n)]).isfinite().all()
        for buffer in pair.plain.buffers[0]:
            buffer[0] = torch.nan
        old.computed = 0
        pair.advance([(old, 40)])


def test_rejected_rows_are_overwritten_by_the_next_step():
    pair = Pair(2, 30, S)
    request, other = pair.requests
    pair.advance([(request, 7)])
    request.draft, request.tokens = [0] * 5, list(range(8))
    pair.length = 13
    pair.step([(request, 6), (other, 2)])
    request.computed, request.draft = 8, []  # all were rejected
    request.tokens = list(range(30))
    pair.length = 30
    for n in (1, 4, 1):
        pair.advance([(request, n)])


STATE = kv_cache.LayerSpec("linear", 2, 4, values=4, conv=(2, 24))


def state_step(cache, plan, data):
    """A step of one linear layer over rows that are functions of position and id: its output."""
    step = cache.prepare(plan)
    x, q, k, v, g, beta = (
        data[name][step.tokens, step.positions] for name in ("x", "q", "k", "v", "g", "beta")
    )
    out = step.conv(0, x, data["weight"])
    return step, torch.cat((out.flatten(1), step.recur(0, q, k, v, g, beta).flatten(1)), 1)


def state_data(ids=9, positions=80):
    draw = torch.Generator().manual_seed(0)

    def rows(*shape, scale=1.0):
        return torch.randn(ids, positions, *shape, generator=draw) * scale

    return {
        "x": rows(24), "weight": torch.randn(24, 3, generator=draw),
        "q": rows(2, 4), "k": torch.nn.functional.normalize(rows(2, 4), dim=-1), "v": rows(2, 4),
        "g": -rows(2).abs() * 0.1, "beta": rows(2).sigmoid(),
    }  # fmt: skip


def states_of(cache, request, which):
    if isinstance(cache, ContiguousCache):
        return [buffer[request.slot].clone() for buffer in cache.buffers[0]]
    return [pool[request.tables[0][which]].clone() for pool in cache.pools[0]]


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("stay", [1, 2, 4, 5])
def test_the_state_after_a_draft_is_that_of_the_rows_that_stay(stay, paged):
    """As if they had come one by one; that of others in the step, and of a fork in it, too."""
    data = state_data()

    def cache():
        if paged:
            return tiny.poisoned(PagedCache([STATE], 9, S, budget=32, max_running=4))
        return tiny.garbage(ContiguousCache([STATE], 4, 80))

    def given(number, *fields, **named):
        request = tiny.request(*fields, slot=number, **named)
        request.tables = [[0, 2 * number + 1]]
        return request

    one, tokens = cache(), [1, 5, 2, 7, 3, 8, 4, 6]
    alone = given(0, tokens[: 3 + stay])
    for n in (3, *[1] * stay):
        step, last = state_step(one, [(alone, n)], data)
        one.commit(step, [n])
        alone.computed += n
        if paged:
            alone.tables[0] = alone.tables[0][::-1] if alone.computed > n else [1, 2]
    expected = states_of(one, alone, 0)

    many = cache()
    first, other = given(0, tokens[:3]), given(1, [4, 4])
    step, _ = state_step(many, [(first, 3), (other, 2)], data)
    many.commit(step, [3, 2])
    first.tokens, first.computed, first.draft = tokens[:4], 3, tokens[4:]
    first.tables, other.tables, other.computed = [[1, 2]], [[3, 4]], 2
    other.tokens = [4, 4, 1]
    forking, child = given(2, [6, 1]), given(3, [6, 1])
    plan = [(other, 1), (first, 5), (forking, 2)]
    for request, n in plan:
        request.behind = n
    step, rows = state_step(many, plan, data)
    if not paged:
        many.copy(forking, child, 2)
        assert all(map(torch.equal, states_of(many, child, 1), states_of(many, forking, 1)))
    untouched = [states_of(many, request, 1) for request in (other, forking)] if paged else []
    many.commit(step, [1, stay, 2])
    for found, wanted in zip(states_of(many, first, 1), expected):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(rows[stay], last[-1], atol=1e-6, rtol=1e-5)
    for request, before in zip((other, forking), untouched):
        assert all(map(torch.equal, states_of(many, request, 1), before))


def test_a_forked_request_goes_on_as_its_parent_would_have():
    for length in (15, 16, 17):
        pair = Pair(3, 40, S)
        parent, child, other = pair.requests
        pair.advance([(parent, length)])
        full = length // S
        child.tables = [[*parent.tables[0][:full], *child.tables[0][full:]]]
        child.computed = length
        pair.paged.copy(parent, child, length)
        pair.plain.copy(parent, child, length)
        for n in (1, 5, 1):
            pair.advance([(parent, n), (child, n), (other, 1)])


def logits(model, cache, *plan):
    step = cache.prepare(plan)
    hidden, _ = model(step.tokens, step.positions, step)
    return model.logits(hidden[step.sample_rows])


@pytest.mark.parametrize("chunk", [7, 8, 9, 16, 17])
def test_a_models_logits_whole_in_chunks_and_beside_others_are_the_contiguous_caches(chunk):
    with torch.inference_mode():
        model = tiny.build()
        prompts = [[7 * i % 96 for i in range(26)], [5 * i % 96 for i in range(9)], [3]]
        specs = model.config.specs
        expected = []
        for prompt in prompts:
            cache = tiny.garbage(ContiguousCache(specs, 1, 32))
            expected.append(logits(model, cache, (tiny.request(prompt), len(prompt))))
        cache = tiny.poisoned(PagedCache(specs, 12, S, budget=64, max_running=4))
        tables = ([9, 4, 7, 1], [2, 5], [12])
        first, second, third = (
            with_tables(tiny.request(p, computed=0), t) for p, t in zip(prompts, tables)
        )
        assert torch.allclose(logits(model, cache, (first, 26)), expected[0], atol=1e-4)
        tiny.poisoned(cache)
        assert len(logits(model, cache, (first, chunk))) == 0
        first.computed, first.behind = chunk, 26 - chunk
        together = logits(model, cache, (second, 9), (first, 26 - chunk), (third, 1))
        wanted = torch.cat([expected[1], expected[0], expected[2]])
        assert torch.allclose(together, wanted, atol=1e-4)
        for request in (first, second, third):  # and all their last tokens as decodes
            request.computed, request.behind = len(request.tokens) - 1, 1
        decodes = logits(model, cache, (third, 1), (first, 1), (second, 1))
        wanted = torch.cat([expected[2], expected[0], expected[1]])
        assert torch.allclose(decodes, wanted, atol=1e-4)


# ---------------------------------------------------------------- by property: the manager


def beginning(salt):
    return 0 if salt is None else 1 + len(salt)


def contents(tokens, salt=None):
    """What the places of these tokens must hold: a number for each, of all ids up to it."""
    state, states = beginning(salt), []
    for token in tokens:
        state = hash((state, token))
        states.append(state)
    return states


class Memory:
    """The pools' contents as numbers, written and read through the tables. A state is one number:
    that of the last token before it."""

    def __init__(self, manager):
        self.manager, self.size = manager, manager.block_size
        self.pools = [
            [[None] * self.size for _ in range(pool.blocks + 1)] for pool in manager.pools
        ]

    def seen(self, request, group):
        """What a row at `computed` can see in a group: from where on, and the numbers there."""
        room, done = self.manager.pools[group].room, request.computed
        if room.state:
            block = request.tables[group][0] if done else 0
            state = self.pools[group][block][0] if block else beginning(request.salt)
            return done - 1 if done else None, [state]
        first = max(done - room.window + 1, 0) if room.window else 0
        return first, self.read(request, group, first, done)

    def read(self, request, group, start, end):
        pool, table, size = self.pools[group], request.tables[group], self.size
        return [pool[table[p // size]][p % size] for p in range(start, end)]

    def write(self, request, n):
        """Compute n rows; each continues what is found in the place before it."""
        known = [*request.tokens, *request.draft]
        self.check(request)
        for group, pool in enumerate(self.pools):
            owner, table = self.manager.pools[group], request.tables[group]
            size, at = self.size, request.computed
            seen = self.seen(request, group)[1]
            before = (seen or contents(known[:at], request.salt) or [beginning(request.salt)])[-1]
            for p in range(at, at + n):
                before = hash((before, known[p]))
                block = table[1] if owner.room.state else table[p // size]
                assert owner.references[block] == 1, "5: a shared block is written"
                pool[block][0 if owner.room.state else p % size] = before

    def replay(self, request, n, stay):
        """Of n rows some stay: what a state wrote it writes again, from what it has read."""
        known = [*request.tokens, *request.draft]
        for group, owner in enumerate(self.manager.pools):
            if owner.room.state and stay < n:
                before = self.seen(request, group)[1][0]
                for p in range(request.computed, request.computed + stay):
                    before = hash((before, known[p]))
                self.pools[group][request.tables[group][1]][0] = before

    def copy(self, parent, child, length):
        full = length // self.size
        if length % self.size:
            for group, pool in enumerate(self.pools):
                if not self.manager.pools[group].room.state:
                    pool[child.tables[group][full]][:] = pool[parent.tables[group][full]]

    def forget_what_is_free(self):
        for pool, owner in zip(self.pools, self.manager.pools):
            for block in owner.free:
                pool[block] = [None] * self.size

    def check(self, request):
        """What the request reads is what its committed tokens wrote."""
        expected = contents(request.tokens[: request.computed], request.salt)
        for group in range(len(self.pools) if request.tables else 0):
            first, numbers = self.seen(request, group)
            wanted = [beginning(request.salt)] if first is None else expected[first:]
            assert numbers == wanted, "foreign content"

    def check_index(self):
        """Every block in the index holds what its key stands for, and no draft."""
        for group, owner in enumerate(self.manager.pools):
            for entry in owner.index.entries.values():
                known, at = [], entry
                while at is not None:
                    known[:0] = at.ids
                    at = at.parent
                expected, held = contents(known, entry.salt), self.pools[group][entry.block]
                right = held[0] == expected[-1] if owner.room.state else held == expected[-S:]
                assert right, "a block in the index is wrong"


class Dictionary:
    """Random requests against one manager; what it knows is also in a dictionary by prefix.

    known: (group, salt, all ids up to a block's end) -> the block. `twins`: equal blocks may be
    filled by two requests at once; a prefix may then be known without its beginning, and the
    dictionary is only the most that can be found.
    """

    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        self.groups, self.twins = draw.choice([1, 1, 2]), draw.random() < 0.3
        self.manager = BlockManager([draw.randint(2, 14)] * self.groups, S)
        self.memory = Memory(self.manager)
        self.known, self.running, self.count = {}, [], Counter()

    def tokens(self):
        """Prompts over three ids that begin with whole blocks of zeros and of ones."""
        draw = self.draw
        begin = [draw.choice([0, 1]) for _ in range(draw.choice([0, 1, 1, 2, 3]))]
        begin = [token for token in begin for _ in range(S)]
        return begin + [draw.randint(0, 2) for _ in range(draw.randint(1, 10))]

    def prefix(self, request, group, i):
        return group, request.salt, tuple(request.tokens[: (i + 1) * S])

    def longest(self, request):
        """By brute force: blocks of the longest prefix that all groups know."""
        for i in range((len(request.tokens) - 1) // S):
            if any(
                self.prefix(request, group, i) not in self.known for group in range(self.groups)
            ):
                return i
        return (len(request.tokens) - 1) // S

    def match(self):
        request = Request(0, self.tokens(), salt=self.draw.choice([None, None, "a"]))
        request.samples = self.draw.choice([1, 1, 2, 3])
        longest = self.longest(request)
        request.tables, request.computed = self.manager.match(request.tokens, request.salt)
        count = request.computed // S
        assert [len(table) for table in request.tables] == [count] * self.groups
        assert count == longest or (self.twins and count < longest)
        self.memory.check(request)
        for group, table in enumerate(request.tables):
            if not self.twins:
                assert table == [self.known[self.prefix(request, group, i)] for i in range(count)]
        self.count["found"] += count
        if not self.grow(request, request.missing):
            self.manager.release(request)
            return
        self.running.append(request)
        if request.samples > 1 or not self.twins or self.draw.random() < 0.5:
            self.fork(request)
            self.commit(request)

    def fork(self, parent):
        """The samples of a prompt, in the step that computes the end of it."""
        self.memory.write(parent, parent.behind)
        children = []
        while parent.samples > 1:
            child = Request(0, list(parent.tokens), salt=parent.salt)
            self.manager.fork(parent, child)
            parent.samples -= 1
            children.append(child)
            self.count["forked"] += 1
        parent.computed = len(parent.tokens)
        for child in children:
            child.computed = len(child.tokens)
            self.memory.copy(parent, child, child.computed)
            self.running.append(child)

    def grow(self, request, n):
        held = [{b for r in self.running for b in r.tables[g]} for g in range(self.groups)]
        before = [list(table) for table in request.tables]
        demand = -(-(request.computed + n) // S)
        demand += (request.samples - 1) * bool(len(request.tokens) % S)
        fits = all(
            demand - len(table) <= pool.available for table, pool in zip(before, self.manager.pools)
        )
        cached = [cached_blocks(self.manager, group) for group in range(self.groups)]
        assert self.manager.grow(request, n) == fits
        for group, table in enumerate(request.tables):
            new = table[len(before[group]) :]
            assert table[: len(before[group])] == before[group]
            assert len(table) == (max(demand, len(before[group])) if fits else len(before[group]))
            assert not held[group] & set(new) and 0 not in new, "handed out twice"
            self.count["evicted"] += len(cached[group] & set(new))
            free = {key: b for key, b in self.known.items() if key[0] != group or b not in new}
            self.known = free
        return fits

    def commit(self, request):
        self.memory.write(request, request.behind)
        request.computed, request.draft = len(request.tokens), []
        self.manager.commit(request)
        for group in range(self.groups):
            for i in range(request.computed // S):
                self.known.setdefault(self.prefix(request, group, i), request.tables[group][i])
        self.known = {
            key: block
            for key, block in self.known.items()
            if self.manager.pools[key[0]].index.of_block.get(block)
        }

    def go_on(self):
        """Some generated tokens and a draft, all of which is rejected."""
        request = self.draw.choice(self.running)
        request.tokens += [self.draw.randint(0, 2) for _ in range(self.draw.randint(1, 9))]
        request.draft = [self.draw.randint(0, 2) for _ in range(self.draw.randint(0, 9))]
        if self.grow(request, request.behind):
            self.commit(request)
        else:
            self.leave(request)

    def leave(self, request):
        self.running.remove(request)
        self.manager.release(request)
        assert request.tables == []

    def step(self):
        action = self.draw.choice([self.match, self.go_on, self.leave, self.match, self.go_on])
        if action == self.match or not self.running:
            self.match()
        elif action == self.go_on:
            self.go_on()
        else:
            self.leave(self.draw.choice(self.running))
        self.manager.check(self.running)
        self.memory.forget_what_is_free()
        self.memory.check_index()
        for request in self.running:
            self.memory.check(request)


def test_random_operations_agree_with_a_dictionary_of_prefixes():
    total = Counter()
    for seed in range(150):
        load = Dictionary(seed)
        for _ in range(40):
            load.step()
        while load.running:
            load.leave(load.running[0])
            load.manager.check(load.running)
        assert load.manager.held == 0
        total += load.count
    assert min(total[what] for what in ("found", "evicted", "forked")) > 100, total


@pytest.mark.parametrize("modulus", [1, 3])
def test_keys_that_collide_never_make_a_wrong_block_match(monkeypatch, modulus):
    good = paged.chain
    monkeypatch.setattr(paged, "chain", lambda *what: good(*what) % modulus)
    for seed in range(40):
        load = Dictionary(seed)
        load.twins = True  # what is found is less than the dictionary knows
        for _ in range(40):
            load.step()


# ---------------------------------------------------------------- by property: whole workloads


def next_id(state, seed, index, position):
    """The id sampled behind a place: small, so that answers often begin alike."""
    return hash((state, seed, index, position)) % 3


class Workload:
    """Random requests through the real scheduler and manager, over a memory of numbers."""

    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        self.reserve = draw.random() < 0.15
        self.manager = BlockManager(
            self.rooms(), S, prefix_cache=draw.random() < 0.8, reserve=self.reserve
        )
        self.scheduler = Scheduler(
            self.manager, budget=draw.choice([1, 7, 8, 9, 16, 64]), max_running=draw.randint(1, 6),
            policy=draw.choice(["fcfs", "priority"]), static=draw.random() < 0.15,
        )  # fmt: skip
        self.memory = Memory(self.manager)
        self.drafting, self.aborting = draw.random() < 0.4, draw.random() < 0.3
        self.to_come, self.requests, self.count = draw.randint(3, 12), [], Counter()

    def rooms(self):
        blocks = self.draw.choice([self.draw.randint(1, 8), self.draw.randint(6, 30)])
        return [blocks] * self.draw.choice([1, 1, 1, 2])

    def arrive(self):
        draw = self.draw
        begin = [draw.choice([0, 1])] * draw.choice([0, 0, 7, 8, 9, 16, 24])
        tokens = begin + [draw.randint(0, 2) for _ in range(draw.randint(1, 6))]
        output = draw.randint(1, 14)
        request = Request(
            len(self.requests), tokens, params=output, seed=draw.randint(0, 1),
            samples=draw.choice([1, 1, 1, draw.randint(1, 3)]), priority=draw.randint(0, 2),
            salt=draw.choice([None, None, None, "a"]), most=len(tokens) + output - 1,
        )  # fmt: skip
        self.to_come -= 1
        try:
            self.scheduler.add(request)
        except ValueError:
            self.count["refused"] += 1
            return
        self.requests.append(request)

    def maybe_abort(self):
        if self.aborting and self.requests and self.draw.random() < 0.08:
            family = self.draw.choice(self.requests).family
            for request in self.draw.choice([list(family), [self.draw.choice(family)]]):
                self.scheduler.abort(request)
            self.count["aborted"] += 1
            self.check()

    def result(self, request, n):
        """Sample after the last row, accepting what of the draft is what would be sampled."""
        if n < request.behind or request.finish_reason is not None:
            return [], None
        if self.aborting and self.draw.random() < 0.01:
            return [], "error"
        start = request.computed + n - 1 - len(request.draft)
        group = next(i for i, pool in enumerate(self.manager.pools) if not pool.room.state)
        states = self.memory.read(request, group, start, start + 1 + len(request.draft))
        ids = []
        for i, state in enumerate(states):
            ids.append(next_id(state, request.seed, request.index, start + i))
            if i < len(request.draft) and request.draft[i] != ids[-1]:
                break
        left = request.params - len(request.output)
        self.count["accepted"] += len(ids) - 1
        return ids[:left], "length" if len(ids) >= left else None

    def step(self):
        scheduler = self.scheduler
        for _ in range(self.draw.choice([0, 0, 1, 2])):
            if self.to_come:
                self.arrive()
        self.maybe_abort()
        busy = scheduler.busy
        plan = self.plan()
        assert bool(plan) == busy and sum(n for _, n in plan) <= scheduler.budget
        self.count["preempted"] += len(scheduler.preempted)
        reserved = self.reserve and self.manager.growing == self.manager.pools
        assert not (reserved and scheduler.preempted), "a reservation was not enough"
        self.check()
        self.memory.forget_what_is_free()
        for request, n in plan:
            self.memory.write(request, n)
        whole = []
        for request, n in plan:
            whole.append((request, n))
            if n == request.behind:
                for index in range(1, request.samples):
                    child = scheduler.fork(request, index)
                    self.memory.copy(request, child, request.computed + n)
                    whole.append((child, n))
                    self.count["forked"] += 1
        self.check()
        self.maybe_abort()
        kept = [self.result(request, n) for request, n in whole]
        for (request, n), (ids, _) in zip(whole, kept):
            if request.finish_reason is None:
                self.memory.replay(request, n, request.stay(n, len(ids)))
        scheduler.commit(whole, kept)
        self.check()
        for request in scheduler.running:
            for pool, table in zip(self.manager.pools, request.tables):
                most = self.manager._demand(request, len(request.tokens), self.reserve)
                assert pool.room.state or len(table) <= most, "guesses have kept their room"
        self.propose()

    def plan(self):
        return self.scheduler.plan()

    def propose(self):
        for request in self.scheduler.running:
            done, left = len(request.output), request.params - len(request.output) - 1
            if request.output and left > 0 and self.draw.random() < 0.1:
                forced = alone(request, done + self.draw.randint(1, left))[done:]
                self.scheduler.extend(request, forced)
                left -= len(forced)
                self.count["forced"] += 1
            if self.drafting and request.output and left > 0 and self.draw.random() < 0.6:
                count = self.draw.randint(1, min(left, 10))
                request.draft = [self.draw.randint(0, 2) for _ in range(count)]

    def check(self):
        self.scheduler.check()
        self.manager.check(self.scheduler.running)
        for request in self.scheduler.running:
            self.memory.check(request)

    def run(self):
        steps = 0
        while self.to_come or self.scheduler.busy:
            self.step()
            steps += 1
            assert steps < 3000, "some request never finishes"
            if steps % 8 == 0:
                self.memory.check_index()
        self.memory.check_index()
        self.check_end()

    def check_end(self):
        pools = self.manager.pools
        assert self.manager.held == 0
        assert all(len(pool.free) + pool.index.idle == pool.blocks for pool in pools)
        for request in self.requests:
            assert request.finished
            self.count["reused"] += request.reused
            for sample in request.family:
                expected = alone(sample, len(sample.output))
                assert sample.output == expected, "not what it generates alone"
                if sample.finish_reason == "length":
                    assert len(sample.output) == sample.params


class Kinds(Workload):
    """Groups that keep a window or a state, alone and beside those that keep all."""

    def rooms(self):
        draw = self.draw
        kept = [draw.choice([draw.randint(1, 8), draw.randint(6, 30)])] * draw.choice([0, 1, 1])
        windows = [draw.choice([1, 2, S - 1, S, S + 1, 20]) for _ in range(draw.randint(0, 2))]
        found = [Room(draw.randint(4, 20), window) for window in windows]
        found += [Room(draw.randint(2, 12), state=True)] * draw.choice([0, 1, 1, 2])
        if not kept and not windows:
            kept = [12]
        return draw.sample(kept + found, len(kept + found))


class Interrupted(Workload):
    """Ctrl-C between two lines of a plan, then `repair`, and the plan is made again."""

    FILES = [one.__code__.co_filename for one in (BlockManager.grow, Scheduler.plan)]

    def plan(self):
        if self.draw.random() < 0.7:
            return self.scheduler.plan()
        left, before = self.draw.randint(1, self.draw.choice([60, 300])), sys.gettrace()

        def count(frame, event, argument):
            nonlocal left
            if frame.f_code.co_filename not in self.FILES:
                return None
            left -= event == "line"
            if left == 0:
                raise KeyboardInterrupt
            return count

        sys.settrace(count)
        try:
            return self.scheduler.plan()
        except KeyboardInterrupt:
            sys.settrace(before)
        finally:
            sys.settrace(before)
        self.scheduler.repair()
        self.check()
        self.count["interrupted"] += 1
        return self.plan()


class InterruptedKinds(Kinds, Interrupted):
    """The same over windows and states."""


def alone(request, count):
    """The answer of a request that runs alone, without cache, budget or drafts."""
    tokens = request.tokens[: request.prompt_tokens]
    state = contents(tokens, request.salt)[-1]
    for position in range(len(tokens) - 1, len(tokens) - 1 + count):
        tokens.append(next_id(state, request.seed, request.index, position))
        state = hash((state, tokens[-1]))
    return tokens[request.prompt_tokens :]


@pytest.mark.parametrize("part", range(5))
def test_whole_workloads_generate_what_each_request_generates_alone(part):
    total = Counter()
    for seed in range(400 * part, 400 * part + 400):
        load = Workload(seed)
        load.run()
        total += load.count
    for what in ("refused", "aborted", "preempted", "forked", "accepted", "forced", "reused"):
        assert total[what] > 50, f"{what} is hardly tested: {total}"


@pytest.mark.parametrize("kind", [Interrupted, InterruptedKinds])
def test_a_plan_that_is_interrupted_between_two_lines_and_repaired_changes_no_answer(kind):
    total = Counter()
    for seed in range(150):
        load = kind(seed)
        load.run()
        total += load.count
    assert total["interrupted"] > 300 and total["preempted"] > 15, total


@pytest.mark.parametrize("part", range(3))
def test_workloads_over_windows_and_states_generate_what_each_request_generates_alone(part):
    total = Counter()
    for seed in range(400 * part, 400 * part + 400):
        load = Kinds(seed)
        load.run()
        total += load.count
    for what in ("refused", "aborted", "preempted", "forked", "accepted", "forced", "reused"):
        assert total[what] > 50, f"{what} is hardly tested: {total}"


def test_samples_and_chunks_that_end_with_a_block_survive_a_preemption():
    """Every length around one and two blocks, in a pool that is too small for both requests."""
    preempted = 0
    for length in (7, 8, 9, 15, 16, 17):
        for samples in (1, 2):
            for budget in (7, 8, 9, 64):
                load = Workload(0)
                load.manager = BlockManager(5, S)
                load.scheduler = Scheduler(load.manager, budget, 4)
                load.memory, load.reserve = Memory(load.manager), False
                load.to_come, load.aborting, load.drafting = 0, False, True
                load.requests = [
                    Request(i, [1] * length, params=14, samples=samples, most=length + 13)
                    for i in range(2)
                ]
                for request in load.requests:
                    load.scheduler.add(request)
                load.run()
                preempted += load.count["preempted"]
                assert all(len(r.family) == samples for r in load.requests)
    assert preempted > 20


def test_a_prompt_sent_again_is_found_for_as_long_as_there_is_room():
    """The rate of hits is the point of the cache, and no answer tells that it is zero."""
    manager = BlockManager(40, S)
    scheduler = Scheduler(manager, budget=32, max_running=4)
    system = ids(0, 64)
    for i in range(20):
        request = Request(i, [*system, 1000 + i, 2000 + i], params=1)
        scheduler.add(request)
        while scheduler.busy:
            plan = scheduler.plan()
            scheduler.commit(
                plan, [([7], "length") if n == r.behind else ([], None) for r, n in plan]
            )
        assert request.reused == (64 if i else 0)


@pytest.mark.parametrize("budget", [7, 16, 64])
@pytest.mark.parametrize("blocks", [9, 10, 14, 20, 24, 40])
def test_nothing_is_computed_twice_where_the_windows_have_room_for_some_requests_only(
    blocks, budget
):
    """A request was admitted when its first chunk had room, preempted by its second, and again
    every other step: twenty times as many rows as were needed."""
    manager = BlockManager([1000, Room(blocks, 50)], S, prefix_cache=False)
    scheduler = Scheduler(manager, budget, max_running=8)
    requests = [Request(i, ids(1000 * i, 200), most=240) for i in range(6)]
    for request in requests:
        scheduler.add(request)
    rows = most = 0
    while scheduler.busy:
        plan = scheduler.plan()
        rows += sum(n for _, n in plan)
        most = max(most, len(plan))
        results = [([7], "length" if len(r.output) == 39 else None) for r, _ in plan]
        pairs = zip(plan, results)
        scheduler.commit(plan, [one if n == r.behind else ([], None) for (r, n), one in pairs])
        manager.check(scheduler.running)
    assert rows == 6 * 239 and not any(request.preempted for request in requests)
    assert most >= min(blocks // 9, 3)


# ---------------------------------------------------------------- the door


def test_a_request_that_could_never_run_alone_is_refused_with_both_numbers():
    manager = BlockManager(3, S)
    manager.door(Request(0, ids(0, 24)))
    manager.door(Request(0, [1], most=24))
    for request in (Request(0, ids(0, 25)), Request(0, [1], most=25)):
        with pytest.raises(ValueError, match="needs 4 blocks of 8 tokens; the cache has 3$"):
            manager.door(request)
    with pytest.raises(ValueError, match="needs 1,250 blocks of 8 tokens; the cache has 3$"):
        manager.door(Request(0, [1], most=10_000))


def test_samples_that_cannot_fork_together_are_refused_with_both_numbers():
    """Their prompts share the full blocks and need one more each; later they may take turns."""
    manager = BlockManager(4, S)
    manager.door(Request(0, ids(0, 17), samples=2))
    manager.door(Request(0, ids(0, 16), samples=9, most=32))
    manager.door(Request(0, ids(0, 9), samples=3, most=32))
    with pytest.raises(ValueError, match="needs 5 blocks of 8 tokens; the cache has 4"):
        manager.door(Request(0, ids(0, 17), samples=3))


def test_a_reservation_that_does_not_fit_is_refused_with_both_numbers():
    manager = BlockManager(7, S, reserve=True)
    manager.door(Request(0, ids(0, 10), most=56))
    manager.door(Request(0, ids(0, 10), most=32, samples=2))
    with pytest.raises(ValueError, match="reserves 8 blocks of 8 tokens; the cache has 7"):
        manager.door(Request(0, ids(0, 10), most=57))
    with pytest.raises(ValueError, match="reserves 9 blocks of 8 tokens; the cache has 7"):
        manager.door(Request(0, ids(0, 10), most=33, samples=2))


def test_what_passes_the_door_runs_alone():
    for prompt in (1, 7, 8, 9, 16, 17):
        for output in (1, 7, 8, 9):
            for samples in (1, 2, 3):
                for reserve in (False, True):
                    for blocks in range(1, 12):
                        manager = BlockManager(blocks, S, reserve=reserve)
                        request = Request(0, [1] * prompt, samples=samples, most=prompt + output)
                        try:
                            manager.door(request)
                        except ValueError:
                            assert not manager.grow(request, prompt) or prompt + output > blocks * S
                        else:
                            assert manager.grow(request, prompt)


@pytest.mark.parametrize("size", [0, 1, 4, 12, 512, -8])
def test_a_block_size_that_is_no_power_of_two_from_8_to_256_is_refused(size):
    with pytest.raises(ValueError, match=f"block_size {size} is not a power of two"):
        BlockManager(4, size)


@pytest.mark.parametrize("blocks", [0, -3])
def test_a_cache_without_blocks_is_refused(blocks):
    with pytest.raises(ValueError, match=f"a cache of {blocks} blocks holds nothing"):
        BlockManager(blocks)


def test_the_paged_cache_refuses_layers_that_it_only_knows_the_size_of():
    with pytest.raises(ValueError, match="'chunked' are sized, but no cache here holds them"):
        PagedCache([LayerSpec("full", 1, 2), LayerSpec("chunked", 1, 2, 8)], 4, S, 4, 2)


def test_more_rows_than_the_buffers_hold_are_refused():
    cache = PagedCache([LayerSpec("full", 1, 2)], 4, S, budget=4, max_running=2)
    with pytest.raises(ValueError):
        cache.prepare([(with_tables(tiny.request(range(5)), [1]), 5)])


def test_check_names_the_invariant_that_does_not_hold():
    def spoiled(number, spoil):
        manager = BlockManager(8, S)
        request = arrive(manager, ids(0, 20))
        pass_by(manager, ids(100, 8))
        pool = manager.pools[0]
        spoil(request, pool, pool.index)
        with pytest.raises(AssertionError, match=f"^{number}: "):
            manager.check([request])

    spoiled(1, lambda request, pool, index: pool.free.pop())
    spoiled(1, lambda request, pool, index: pool.free.append(4))  # it is cached
    spoiled(1, lambda request, pool, index: pool.free.append(request.tables[0][0]))
    spoiled(1, lambda request, pool, index: request.tables[0].append(pool.free[-1]))
    spoiled(1, lambda request, pool, index: setattr(index, "idle", 0))
    spoiled(2, lambda request, pool, index: pool.references.__setitem__(1, 2))
    spoiled(4, lambda request, pool, index: index.entries.pop(index.of_block[2].key))
    spoiled(4, lambda request, pool, index: request.tokens.__setitem__(3, 99))
    spoiled(4, lambda request, pool, index: setattr(request, "computed", 15))
    spoiled(4, lambda request, pool, index: setattr(index.of_block[2], "depth", 0))


# ---------------------------------------------------------------- regressions


def held_and_let_go(order, times=10_000):
    """A match takes an idle block and lets it go, again and again: the heap at its longest."""
    index, longest = PrefixIndex(order), 0
    for block in range(1, 6):
        index.insert(None, None, (block,), block)
        index.let_go(block, 0)
    for now in range(times):
        block = 1 + now % 5
        index.hold(block)
        index.let_go(block, now)
        longest = max(longest, len(index.heap))
    assert index.idle == 5 and sorted(index.evict() for _ in range(5)) == [1, 2, 3, 4, 5]
    return longest


def test_the_heap_stays_small_when_blocks_are_used_again_and_never_evicted():
    assert held_and_let_go(paged.least_recently_used) <= 2 * 5 + 64


def test_the_heap_stays_small_whatever_the_order():
    """An order that use does not change, first in first out, found every old item current: the
    heap grew with every release, and was searched whole each time."""
    assert held_and_let_go(lambda entry: entry.block, 1000) <= 2 * 5 + 64


def test_a_prefix_is_found_again_after_the_first_of_two_equal_blocks_was_evicted():
    """What was filled behind the lost twin kept its key, under a beginning that was no more:
    nobody could find it, and nobody else could enter that prefix."""
    manager = BlockManager(6, S)
    a, b = admit(manager, ids(0, 8)), admit(manager, ids(0, 8))
    for request in (a, b):
        request.computed = 8
        manager.commit(request)
    b.tokens += ids(8, 8)
    manager.grow(b, 8)
    b.computed = 16
    manager.commit(b)
    manager.release(a)
    pass_by(manager, ids(100, 8 * 4 - 1))  # takes all that is free or cached: a's block is lost
    assert found(manager, ids(0, 17)) == 0
    assert pass_by(manager, ids(0, 17))
    assert found(manager, ids(0, 17)) == 16
    manager.check([b])
