"""The scheduler: decide, before every forward pass, which tokens go into it.

The idea      There is no prefill phase and no decode phase. A request knows its tokens and how
              many of them have their keys and values in the cache; a step lets it catch up. A
              new request is many tokens behind, a decoding one is one behind, and one forward
              pass carries them all, up to a budget of tokens. A long prompt is cut into chunks,
              so that those who decode need not wait for it; who finishes makes room at once for
              the next. When the cache is full, the youngest request gives its blocks up and
              computes them again later: its tokens stay, and the answer is the same.

The data      tokens:   | prompt ............................. | generated ... |
              Request:  |<- computed ->|<- this step: n ->|     (not yet seen)
                         KV is in cache    goes through the model now
              waiting --admit--> running --finish--> released
                 ^--------preempt-------'      both lists by (priority, arrival)
              a step of budget 8:   A 1   B 1   C 1 (decodes)   D 5 of 14 prompt tokens
              request, samples = 3:   prompt ......... last row --fork--> 3 requests
              with a draft of 3 guesses:   | known, not yet seen | guesses |  n reaches over both;
                         guesses that were wrong do not count as computed

Invariants    1. within a priority nobody overtakes: who waits came after all who run
              2. waiting: nothing held in the cache, computed == 0
              3. running: 0 <= computed < len(tokens), and the manager has room for those
              4. tokens planned in a step <= budget; every step plans at least one (see `plan`)
              5. running requests, counting samples not yet forked, <= max_running
              6. the first in order always runs: it may take the blocks of all others, and what
                 could not run alone was refused by `add`; so every request ends

Units         tokens, computed, n, budget: tokens. Stamps: seconds of time.perf_counter().
Articles      "Continuous Batching, Animated: How a Server Keeps the GPU Busy" and
              "Chunked Prefill: Trading First-Token Time for Smooth Streaming"
Try           python scheduler.py                requests x steps, chunks beside decodes
              python scheduler.py --static       a batch must end before the next begins
              python scheduler.py --budget 15    fewer, longer steps
              python tests/mutations.py scheduler.py   change it: known bugs, each with its test
Imports       nothing of ours, and not torch: a plan is arithmetic on integers.
"""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field


@dataclass(eq=False)
class Request:
    """One sequence on its way through the engine.

    `tokens` holds committed ids only: the prompt, then what was generated; `draft` this
    step's guesses of the next ones, which go through the model after them. `computed` tokens have
    their keys and values in the cache. `samples` counts the sequences that will come out of
    this one, itself included, until it forks; then it is 1. `params` is opaque here.
    """

    id: int
    tokens: list[int]
    params: object = None
    seed: int = 0
    samples: int = 1
    index: int = 0  # which sample of its prompt
    priority: int = 0  # smaller goes first
    salt: str | None = None  # only requests of the same salt share a cached prefix
    most: int = 0  # tokens it may come to have in the cache
    draft: list[int] = field(default_factory=list)
    computed: int = 0
    slot: int | None = None  # place of its state in the cache
    tables: list[list[int]] = field(default_factory=list)  # a block table for each cache group
    reused: int = 0  # prompt tokens that were in the cache when it first ran
    preempted: int = 0  # how often it gave its blocks up
    waits: dict[str, int] = field(default_factory=dict)  # why it was not admitted -> steps
    finish_reason: str | None = None
    stream: object = None  # what makes its ids text; opaque here, as params
    stamps: dict[str, float] = field(default_factory=dict)  # stage -> when it ended
    token_stamps: list[float] = field(default_factory=list)  # when each token was sampled

    def __post_init__(self):
        self.prompt_tokens = len(self.tokens)
        self.most = max(self.most, self.prompt_tokens)
        self.family = [self]  # all samples of this prompt so far, shared by them

    @property
    def missing(self) -> int:
        """Committed tokens that have not been through the model."""
        return len(self.tokens) - self.computed

    @property
    def behind(self) -> int:
        """The same with this step's draft."""
        return self.missing + len(self.draft)

    def stay(self, n: int, ids: int) -> int:
        """Of n planned rows how many stay in the cache, if so many ids come out of them: one row
        yields the token after it, so the newest token is always still to be computed."""
        return n - len(self.draft) + max(ids - 1, 0)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def finished(self) -> bool:
        """Whether every sample of the prompt has ended."""
        return all(request.finish_reason is not None for request in self.family)


class Scheduler:
    """Plans steps over a manager of cache room.

    The manager (slots of a contiguous cache, or blocks) answers `door(request)` (ValueError if
    it can never run), `match(tokens, salt) -> (tables, computed)`, `limit(request, n) -> n`,
    `grow(request, n, ahead) -> bool` (room for the n tokens of a step, and, if the request begins,
    for what it needs of all the `ahead` ones that it has to compute), `fork(parent, child)`,
    `commit(request)`, `forget(request)`, `release(request)`, `repair(running)`.

    policy  "fcfs": in order of arrival; "priority": the smaller `Request.priority` first
    static  admit nobody before the whole batch has ended, as servers did before Orca (Yu 2022)
    """

    def __init__(self, manager, budget: int, max_running: int, policy="fcfs", static=False):
        if budget < 1 or max_running < 1:
            raise ValueError(f"budget {budget} and max_running {max_running} must be at least 1")
        if policy not in ("fcfs", "priority"):
            raise ValueError(f"policy {policy!r} is neither fcfs nor priority")
        self.manager = manager
        self.budget = budget
        self.max_running = max_running
        self.policy = policy
        self.static = static
        self.batch: set[int] = set()  # static: ids of those that may run before all have ended
        self.arrived: deque[Request] = deque()  # from any thread; not yet among the waiting
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preempted: list[Request] = []  # by the last plan
        self.blocked: str | None = None  # why the first of the queue was not admitted by it

    def order(self, request: Request) -> tuple[int, int, int]:
        """Who goes first: both lists are sorted by it."""
        priority = request.priority if self.policy == "priority" else 0
        return priority, request.id, request.index

    def add(self, request: Request):
        """Queue a request. ValueError: an empty prompt, or one that could never run."""
        if not request.tokens:
            raise ValueError("the prompt has no tokens; at least 1 is needed")
        if request.samples > self.max_running:
            raise ValueError(
                f"n = {request.samples} samples need as many running requests,"
                f" and max_running is {self.max_running}"
            )
        self.manager.door(request)
        self.arrived.append(request)

    def plan(self) -> list[tuple[Request, int]]:
        """Choose this step's work: [(request, n)], n tokens of tokens[computed:] + draft.

        Running requests first, then waiting ones; nobody is admitted in a step that had to
        preempt. A chunk leaves a token of the budget to everyone who runs after it.

        Example: budget 8, A decodes, a prompt B of 14 tokens waits: [(A, 1), (B, 7)], the same
        again, then [(A, 1), (B, 1)] a step.
        """
        self._queue()
        self.preempted, self.blocked = [], None
        plan, room = [], self.budget
        while len(plan) < len(self.running) and room > 0:
            request = self.running[len(plan)]
            later = len(self.running) - len(plan) - 1
            n = self.manager.limit(request, min(request.behind, max(1, room - later)))
            # A draft is cut to what fits: the step that has one verifies all of it.
            request.draft = request.draft[: max(n - request.missing, 0)]
            if self._grow(request, n - len(request.draft)):
                plan.append((request, n))
                room -= n
        if not self.preempted:
            self._admit(plan, room)
        plan = [(request, self._with_draft(request, n)) for request, n in plan]
        assert plan or not self.busy, "4: a step with requests must plan something"
        return plan

    def _queue(self):
        """Let those who have arrived wait in order."""
        while self.arrived:
            request = self.arrived[0]
            place = bisect_left(self.waiting, self.order(request), key=self.order)
            if self.waiting[place : place + 1] != [request]:  # else interrupted here before
                self.waiting.insert(place, request)
            self.arrived.popleft()

    def _with_draft(self, request: Request, n: int) -> int:
        """Of n tokens those there is room for, now that all others have theirs: with the draft, or
        without it."""
        if request.draft and not self.manager.grow(request, n):
            n -= len(request.draft)
            request.draft = []
        return n

    def _grow(self, request: Request, n: int) -> bool:
        """Room for n more tokens, taken from the last in order; False: that was the request."""
        while not self.manager.grow(request, n):
            last = self.running[-1]
            self._preempt(last)
            if last is request:
                return False
        return True

    def _preempt(self, request: Request):
        """Give all room up and wait; the tokens stay, and will be computed again."""
        insort(self.waiting, request, key=self.order)
        self.running.remove(request)  # from here on `repair` takes its room
        self.manager.release(request)
        request.computed, request.draft = 0, []
        request.preempted += 1
        self.preempted.append(request)

    def _admit(self, plan: list[tuple[Request, int]], room: int):
        """Let waiting requests run, in order, until the first that cannot."""
        count = sum(request.samples for request in self.running)
        if not self.running:
            self._form_batch()
        while self.waiting:
            request = self.waiting[0]
            self.blocked = self._obstacle(request, room, count) or self._start(request, plan, room)
            if self.blocked is not None:
                request.waits[self.blocked] = request.waits.get(self.blocked, 0) + 1
                return
            room -= plan[-1][1]
            count += request.samples

    def _form_batch(self):
        """Static: the next batch is as many of the queue as may run together."""
        self.batch, left = set(), self.max_running
        for request in self.waiting:
            left -= request.samples
            if left < 0:
                return
            self.batch.add(request.id)

    def _obstacle(self, request: Request, room: int, count: int) -> str | None:
        """What keeps the first of the queue from running, apart from blocks; None: nothing."""
        if self.static and request.id not in self.batch:
            return "batch"
        if count + request.samples > self.max_running:
            return "running limit"
        return "budget" if room == 0 else None

    def _start(self, request: Request, plan: list[tuple[Request, int]], room: int) -> str | None:
        """Let the first of the queue run; or, if it cannot, what it lacks."""
        request.tables, request.computed = self.manager.match(request.tokens, request.salt)
        n = self.manager.limit(request, min(request.behind, room))
        # Blocks for all that it has to compute, or it would be the next to be preempted.
        if not self.manager.grow(request, n, request.behind):
            self.manager.release(request)
            request.computed = 0
            return "blocks"
        if not request.preempted:
            request.reused = min(request.computed, request.prompt_tokens)
        insort(self.running, request, key=self.order)
        self.waiting.pop(0)
        plan.append((request, n))
        return None

    def fork(self, request: Request, index: int) -> Request:
        """Make sample `index` of a request whose prompt this step completes.

        The child shares what is computed so far and joins the running requests; in this
        step's plan it stands with the parent's n, so `commit` advances both alike.
        """
        assert request.samples > 1, f"request {request.id} has one sample, nothing to fork"
        child = Request(
            request.id, list(request.tokens), request.params, request.seed, index=index,
            priority=request.priority, salt=request.salt, most=request.most,
            computed=request.computed, reused=request.reused, stamps=dict(request.stamps),
        )  # fmt: skip
        child.prompt_tokens = request.prompt_tokens  # it may have tokens that need no sampling
        child.family = request.family
        child.family.append(child)
        self.manager.fork(request, child)
        insort(self.running, child, key=self.order)
        request.samples -= 1
        return child

    def commit(self, plan: list[tuple[Request, int]], kept: list[tuple[list[int], str | None]]):
        """Take a step's result: per planned request its new ids and why it finished, if it did.

        What a draft's rows left beyond `Request.stay` is not computed: length decides.
        """
        assert len(plan) == len(kept), f"{len(plan)} planned, {len(kept)} results"
        for (request, n), (ids, finish) in zip(plan, kept):
            if request.finish_reason is not None:
                continue  # aborted while the step ran: its room is free already
            request.computed += request.stay(n, len(ids))
            request.draft = []
            request.tokens += ids
            self.manager.commit(request)
            if finish is not None:
                self._leave(request, finish)

    def extend(self, request: Request, ids: list[int], finish: str | None = None):
        """Append committed ids that need no sampling, and let the request go if it finished."""
        request.tokens += ids
        if finish is not None:
            self._leave(request, finish)

    def abort(self, request: Request, reason: str = "abort"):
        """End a request wherever it is; its room is free at once. Ended already: no effect."""
        self._queue()
        if request.finish_reason is None:
            self._leave(request, reason)

    def _leave(self, request: Request, reason: str):
        request.finish_reason = reason  # from here on `repair` takes its room
        for members in (self.running, self.waiting):
            if request in members:
                members.remove(request)
        if reason == "error":  # what it computed is not for others to find
            self.manager.forget(request)
        self.manager.release(request)

    def repair(self):
        """Restore the invariants after an interruption between two lines: who runs does not wait,
        who waits holds nothing, and the manager has handed out what the running ones name. Drafts
        are dropped: they may be half made."""
        self._queue()
        self.running = [r for r in dict.fromkeys(self.running) if r.finish_reason is None]
        kept = [r for r in dict.fromkeys(self.waiting) if r.finish_reason is None]
        self.waiting = [r for r in kept if r not in self.running]
        for request in self.waiting:
            request.computed, request.slot, request.tables, request.draft = 0, None, [], []
        for request in self.running:
            request.draft = []
        self.manager.repair(self.running)

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting or self.arrived)

    def check(self):
        """Raise AssertionError where an invariant of this file does not hold."""
        for request in self.waiting:
            assert request.computed == 0, f"2: waiting {request.id} has {request.computed} computed"
            assert request.slot is None and not any(request.tables), f"2: {request.id} holds room"
        for request in self.running:
            known = len(request.tokens)
            assert 0 <= request.computed < known, f"3: {request.computed} computed of {known}"
        for members in (self.running, self.waiting):
            orders = [self.order(request) for request in members]
            assert orders == sorted(set(orders)), f"1: out of order: {orders}"
        last = {self.order(request)[0]: self.order(request) for request in self.running}
        for request in self.waiting:
            order = self.order(request)
            assert last.get(order[0], order) <= order, f"1: {last[order[0]]} overtook {order}"
        samples = sum(request.samples for request in self.running)
        assert samples <= self.max_running, f"5: {samples} running, limit {self.max_running}"


# ---------------------------------------------------------------- the experiment


class Counting:
    """A manager that counts blocks of 4 tokens."""

    def __init__(self, blocks: int):
        self.free = blocks
        self.held: dict[Request, int] = {}

    def door(self, request):
        """Whatever is drawn here fits."""

    def match(self, tokens, salt):
        return [], 0

    def limit(self, request, n):
        return n

    def grow(self, request, n, ahead=0):
        held = self.held.get(request, 0)
        more = max(-(-(request.computed + max(n, ahead)) // 4) - held, 0)
        if more > self.free:
            return False
        self.held[request] = held + more
        self.free -= more
        return True

    def commit(self, request):
        """Nothing is found again here."""

    def release(self, request):
        self.free += self.held.pop(request, 0)


WORK = (  # arrives in step, prompt tokens, output tokens
    (0, 6, 14),
    (0, 14, 6),
    (0, 3, 22),
    (2, 17, 5),
    (3, 5, 9),
    (5, 8, 6),
    (6, 4, 12),
)


def picture(budget: int, blocks: int, static: bool) -> str:
    """Requests x steps: what each computed, and what the steps were made of."""
    manager = Counting(blocks)
    scheduler = Scheduler(manager, budget, max_running=4, static=static)
    requests = [Request(i, list(range(work[1]))) for i, work in enumerate(WORK)]
    rows = ["" for _ in WORK]
    tokens, used, again, preempted = [], [], 0, 0

    def draw(request: Request, mark: str):
        rows[request.id] = rows[request.id].ljust(len(tokens)) + mark

    while scheduler.busy or len(tokens) <= WORK[-1][0]:
        for request, (arrival, _, _) in zip(requests, WORK):
            if arrival == len(tokens):
                scheduler.add(request)
        reach = {request: request.computed for request in scheduler.running}
        plan = scheduler.plan()
        for request in scheduler.waiting:
            draw(request, "x" if request in scheduler.preempted else ".")
        again += sum(reach[request] for request in scheduler.preempted)
        preempted += len(scheduler.preempted)
        kept = []
        for request, n in plan:
            last = n == request.behind
            decode = n == 1 and request.computed >= request.prompt_tokens
            draw(request, "d" if decode else DIGITS[n])
            ends = last and len(request.output) + 1 == WORK[request.id][2]
            kept.append(([0] * last, "length" if ends else None))
        tokens.append(sum(n for _, n in plan))
        used.append(sum(manager.held.values()))
        scheduler.commit(plan, kept)
        scheduler.check()
    steps = len(tokens)
    lines = [
        f"{'static' if static else 'continuous'} batching: at most {budget} tokens a step,"
        f" 4 requests, {blocks} blocks of 4 tokens",
        "",
        "step      " + "".join(str(i % 10) for i in range(steps)),
    ]
    for request, (_, prompt, output) in zip(requests, WORK):
        name = "ABCDEFGHIJ"[request.id]
        lines.append(f"{name} {prompt:>2}+{output:<3}  {rows[request.id]}")
    lines.append("tokens    " + "".join(DIGITS[n] for n in tokens))
    lines.append("blocks    " + "".join(DIGITS[n] for n in used))
    lines.append("")
    lines.append(
        f"{steps} steps for {sum(tokens)} tokens ({again} of them computed again):"
        f" {sum(tokens) / steps:.1f} a step; {preempted} preemptions"
    )
    reasons: dict[str, int] = {}
    for request in requests:
        for reason, count in request.waits.items():
            reasons[reason] = reasons.get(reason, 0) + count
    waits = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
    lines.append(f"the first of the queue waited for: {waits or 'nothing'} (steps)")
    lines.append("A 6+14: prompt and output tokens   digit: prompt tokens, after x those of the")
    lines.append("answer too; A to Z from 10 on   d: decode   .: waits   x: preempted")
    return "\n".join(lines)


DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="Draw which tokens go into which step.")
    parser.add_argument("--budget", type=int, default=8, help="tokens a step, 1 to 35 (default 8)")
    parser.add_argument("--blocks", type=int, default=14, help="in the cache, 8 to 35 (default 14)")
    parser.add_argument("--static", action="store_true", help="a batch ends before the next")
    args = parser.parse_args()
    if not 1 <= args.budget <= 35 or not 8 <= args.blocks <= 35:
        parser.error("--budget is from 1 to 35 and --blocks from 8 to 35")
    print(picture(args.budget, args.blocks, args.static))
