"""The scheduler: decide, before every forward pass, which tokens go into it.

The idea      There is no prefill phase and no decode phase. A request knows its tokens and how
              many of them have left their trace in the cache; a step lets it catch up. A new
              request is many tokens behind, a decoding one is one behind. Here one request
              runs after another; the n samples of a prompt run side by side, because their
              prompt was computed once.

The data      tokens:   | prompt ............................. | generated ... |
              Request:  |<- computed ->|<- this step: n ->|     (not yet seen)
                         KV is in cache    goes through the model now
              waiting (deque, in order of arrival) --admit--> running --finish--> released
              request, samples = 3:   prompt ......... last row --fork--> 3 requests, 3 slots

Invariants    1. running + waiting is in order of arrival: nobody overtakes
              2. waiting: nothing held in the cache, computed == 0
              3. running: 0 <= computed < len(tokens), and the manager holds computed tokens
              4. tokens planned in a step <= budget; every step plans at least one (see `plan`)
              5. running requests, counting samples not yet forked, <= max_running

Units         tokens, computed, n, budget: tokens. Stamps: seconds of time.perf_counter().
Article       "Continuous Batching, Animated: How a Server Keeps the GPU Busy"
Try           python scheduler.py                one prompt after another, chunk by chunk
              python scheduler.py --samples 3    a prompt computed once and sampled three times
              python tests/mutations.py scheduler.py   change it: known bugs, each with its test
Imports       nothing of ours, and not torch: a plan is arithmetic on integers.
"""

from collections import deque
from dataclasses import dataclass, field


@dataclass(eq=False)
class Request:
    """One sequence on its way through the engine.

    `tokens` holds committed ids only: the prompt, then what was generated; `draft` the
    proposals of this step, which go through the model after them. `computed` tokens have
    their keys and values in the cache. `samples` counts the sequences that will come out of
    this one, itself included, until it forks; then it is 1. `params` is opaque here.
    """

    id: int
    tokens: list[int]
    params: object = None
    seed: int = 0
    samples: int = 1
    index: int = 0  # which sample of its prompt
    draft: list[int] = field(default_factory=list)
    computed: int = 0
    slot: int | None = None  # place of its state in the cache
    tables: list[list[int]] = field(default_factory=list)  # a block table for each cache group
    finish_reason: str | None = None
    stream: object = None  # what makes its ids text; opaque here, as params
    stamps: dict[str, float] = field(default_factory=dict)  # stage -> when it ended
    token_stamps: list[float] = field(default_factory=list)  # when each token was sampled

    def __post_init__(self):
        self.prompt_tokens = len(self.tokens)
        self.family = [self]  # all samples of this prompt so far, shared by them

    @property
    def missing(self) -> int:
        """Committed tokens that have not been through the model."""
        return len(self.tokens) - self.computed

    @property
    def behind(self) -> int:
        """The same with this step's draft."""
        return self.missing + len(self.draft)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def finished(self) -> bool:
        """Whether every sample of the prompt has ended."""
        return all(request.finish_reason is not None for request in self.family)


class Scheduler:
    """Plans steps over a manager of cache room.

    The manager (slots of a contiguous cache, or blocks) answers `match(tokens) -> (tables,
    computed)`, `grow(request, n) -> bool`, `limit(request, n) -> n`, `fork(parent, child)`,
    `commit(request)` and `release(request)`.
    """

    def __init__(self, manager, budget: int, max_running: int):
        if budget < 1 or max_running < 1:
            raise ValueError(f"budget {budget} and max_running {max_running} must be at least 1")
        self.manager = manager
        self.budget = budget
        self.max_running = max_running
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request):
        """Queue a request. ValueError: empty prompt, or more samples than can run at once."""
        if not request.tokens:
            raise ValueError("the prompt has no tokens; at least 1 is needed")
        if request.samples > self.max_running:
            raise ValueError(
                f"n = {request.samples} samples need as many running requests,"
                f" and max_running is {self.max_running}"
            )
        self.waiting.append(request)

    def plan(self) -> list[tuple[Request, int]]:
        """Choose this step's work: [(request, n)], n tokens of tokens[computed:] + draft.

        Example: budget 8, one waiting prompt of 10 tokens: [(A, 8)], then [(A, 2)] whose last
        row is sampled, then [(A, 1)] a step.
        """
        if not self.running and self.waiting:
            self._admit(self.waiting[0])
            self.waiting.popleft()
        plan = []
        room = self.budget
        for request in self.running:
            n = self.manager.limit(request, min(request.behind, room))
            # A draft is cut to what fits: the step that has one verifies all of it.
            request.draft = request.draft[: max(n - request.missing, 0)]
            if n > 0 and self.manager.grow(request, n):
                plan.append((request, n))
                room -= n
        assert plan or not self.running, "4: a step with running requests must plan something"
        return plan

    def _admit(self, request: Request):
        request.tables, request.computed = self.manager.match(request.tokens)
        self.running.append(request)

    def fork(self, request: Request, index: int) -> Request:
        """Make sample `index` of a request whose prompt this step completes.

        The child shares what is computed so far and joins the running requests; in this
        step's plan it stands with the parent's n, so `commit` advances both alike.
        """
        assert request.samples > 1, f"request {request.id} has one sample, nothing to fork"
        child = Request(request.id, list(request.tokens), request.params, request.seed)
        child.index, child.family = index, request.family
        child.family.append(child)
        child.prompt_tokens = request.prompt_tokens
        child.computed = request.computed
        child.stamps = dict(request.stamps)
        self.manager.fork(request, child)
        self.running.append(child)
        request.samples -= 1
        return child

    def commit(self, plan: list[tuple[Request, int]], kept: list[tuple[list[int], str | None]]):
        """Take a step's result: per planned request its new ids and why it finished, if it did.

        Of n rows, k of them drafts, n - k + max(len(ids) - 1, 0) stay in the cache: one row
        yields the token after it, so the newest token is always still to be computed.
        """
        assert len(plan) == len(kept), f"{len(plan)} planned, {len(kept)} results"
        for (request, n), (ids, finish) in zip(plan, kept):
            if request not in self.running:
                continue  # aborted while the step ran: its room is free already
            request.computed += n - len(request.draft) + max(len(ids) - 1, 0)
            request.draft = []
            self.manager.commit(request)
            self.extend(request, ids, finish)

    def extend(self, request: Request, ids: list[int], finish: str | None = None):
        """Append committed ids that need no sampling, and let the request go if it finished."""
        request.tokens += ids
        if finish is not None:
            self._leave(request, finish)

    def abort(self, request: Request, reason: str = "abort"):
        """End a request wherever it is; its room is free at once. Ended already: no effect."""
        if request.finish_reason is not None:
            return
        waits = request in self.waiting
        if waits:
            self.waiting.remove(request)
        if not waits or request in self.running:  # in both: interrupted while it was admitted
            self._leave(request, reason)
        request.finish_reason = reason

    def _leave(self, request: Request, reason: str):
        self.manager.release(request)
        if request in self.running:
            self.running.remove(request)
        request.finish_reason = reason

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def check(self):
        """Raise AssertionError where an invariant of this file does not hold."""
        for request in self.waiting:
            assert request.computed == 0, f"2: waiting {request.id} has {request.computed} computed"
            assert request.slot is None and not any(request.tables), f"2: {request.id} holds room"
        for request in self.running:
            known = len(request.tokens)
            assert 0 <= request.computed < known, f"3: {request.computed} computed of {known}"
        order = [request.id for request in [*self.running, *self.waiting]]
        assert order == sorted(order), f"1: out of order: {order}"
        samples = sum(request.samples for request in self.running)
        assert samples <= self.max_running, f"5: {samples} running, limit {self.max_running}"


# ---------------------------------------------------------------- the experiment


class Counting:
    """A manager that only counts the tokens it holds: all that a picture needs."""

    def __init__(self):
        self.held = {}  # (request id, sample) -> tokens

    def match(self, tokens):
        return [], 0

    def limit(self, request, n):
        return n

    def grow(self, request, n):
        self.held[request.id, request.index] = request.computed + n
        return True

    def fork(self, parent, child):
        self.held[child.id, child.index] = self.held[parent.id, parent.index]

    def commit(self, request):
        pass

    def release(self, request):
        self.held.pop((request.id, request.index), None)


def picture(prompts: list[int], outputs: int, budget: int, samples: int) -> str:
    """Requests x steps: a digit is a prompt chunk's tokens, d a decode, f a fork, . waiting."""
    manager = Counting()
    scheduler = Scheduler(manager, budget, max_running=max(samples, 4))
    for i, length in enumerate(prompts):
        scheduler.add(Request(i, list(range(length)), samples=samples if i == 1 else 1))
    rows: dict[str, str] = {}  # name -> what it did in each step
    tokens, cached = [], []  # of each step

    def draw(request: Request, mark: str):
        sampled = samples > 1 and request.id == 1  # the one with several samples: B1, B2, ...
        name = "ABCDEFGH"[request.id] + (str(request.index + 1) if sampled else " ")
        rows[name] = rows.get(name, "").ljust(len(tokens)) + mark

    while scheduler.busy:
        plan = scheduler.plan()
        for request in scheduler.waiting:
            draw(request, ".")
        whole, kept = [], []
        for request, n in plan:
            last = n == request.behind
            forks = range(1, request.samples) if last else ()
            family = [request, *(scheduler.fork(request, i) for i in forks)]
            ends = last and len(request.output) + 1 == outputs
            for one in family:
                draw(one, "f" if one is not request else "d" if request.output else f"{n:x}")
                whole.append((one, n))
                kept.append(([0] * last, "length" if ends else None))
        tokens.append(sum(n for _, n in plan))
        cached.append(sum(manager.held.values()))
        scheduler.commit(whole, kept)
        scheduler.check()
    steps = len(tokens)
    lines = [f"budget {budget} tokens a step, {outputs} tokens generated a request", ""]
    lines.append("step    " + "".join(str(i % 10) for i in range(steps)))
    lines += [f"  {name}    {row}" for name, row in sorted(rows.items())]
    lines.append("tokens  " + "".join(f"{n:x}" for n in tokens))
    lines.append("")
    lines.append(
        f"{steps} steps, {sum(tokens)} tokens computed, {max(cached)} in the cache at most,"
        f" {sum(n == 1 for n in tokens)} steps with a single row"
    )
    lines.append("digit (hex): prompt tokens   d: decode   f: fork   .: waiting for its turn")
    lines.append(f"A prompt's last chunk yields the first token, {outputs - 1} decodes the others.")
    return "\n".join(lines)


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="Draw which tokens go into which step.")
    parser.add_argument("--budget", type=int, default=8, help="tokens a step, 1 to 15 (default 8)")
    parser.add_argument("--samples", type=int, default=1, help="of prompt B, 1 to 8 (default 1)")
    args = parser.parse_args()
    if not 1 <= args.budget <= 15 or not 1 <= args.samples <= 8:
        parser.error("--budget is from 1 to 15 and --samples from 1 to 8")
    print(picture([6, 14, 3], 6, args.budget, args.samples))
