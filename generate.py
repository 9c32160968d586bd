"""Generate: a prompt in, tokens out, and where the time went.

The idea      One request passes many hands: a template makes messages into text, a tokenizer
              text into ids, the scheduler gives it a place in a step, the model turns rows into
              logits, sampling draws an id, a stream turns ids back into text. Each hand-over is
              stamped, so that the slow part is known before anyone optimises another.

The data      messages --template--> text --tokenizer--> ids --add--> waiting
                 plan:     which tokens of which requests            scheduler.py
                 prepare:  their rows, and a view of the cache       paged.py, kv_cache.py
                 forward:  rows -> hidden -> logits                  model.py
                 sample:   logits -> one id a request                sample.py
                           of those that its grammar allows          Guide, below; grammar.py
                 cut:      ids -> what is kept, and why it ended     Stream, below
                           of a draft's rows: which guesses stay     speculative.py
                 commit:   tokens and computed move on
                 jump:     ids that the grammar leaves no choice about, for the next step
                 draft:    guesses, if asked for, that the next step verifies
              Event(request, text, token_ids, finish_reason) --> whoever waits for it

Invariants    1. the pieces of a stream, joined, are the decoding of its ids, up to a stop
              2. no part of a stop string is ever released, and all else is
              3. a request that ended, for whatever reason, holds nothing after the step under way
              4. text of special tokens inside a message never becomes a special token
              5. text under a grammar is in it, or the beginning of one that is ("length")
              6. with the rule "sample" guesses change no token

Units         seconds (perf_counter), tokens, bytes.
Article       "From Prompt to Token: The Life of an LLM Request"
Try           python generate.py --prompt "Why is the sky blue?"
              python generate.py --prompt "Why?" --profile   a prompt's step against a decode's
              python generate.py --prompt "Is it blue?" --choice yes --choice no
              python generate.py --prompt "Say a b c a b c." --speculative ngram
              python generate.py --demo            a tiny random model, step by step
              python tests/mutations.py generate.py   change it: known bugs, each with its test
Imports       grammar, kv_cache, model, paged, sample, scheduler, speculative; never kernels.
"""

import argparse
import asyncio
import codecs
import dataclasses
import io
import json
import math
import operator
import os
import re
import shutil
import signal
import statistics
import sys
import threading
import time
import unicodedata
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path

# PyTorch's CPU threads wait for each other in a loop. On a busy machine that takes the core the
# other one needs, and a token takes 300 ms instead of 24; with a shorter loop 75. Read once, when
# PyTorch is imported; it costs an idle machine nothing.
os.environ.setdefault("GOMP_SPINCOUNT", "4000")

import jinja2
import regex
import tiktoken
import torch
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

import grammar
import kv_cache
import model as models
import paged
import speculative
from kv_cache import block_bytes
from sample import (
    DRAFT, GRAMMARS, TARGET, Logprobs, Row, SamplingParams, mix, sample, sample_seed,
)  # fmt: skip
from scheduler import Request, Scheduler

# ---------------------------------------------------------------- the engine


@dataclass(frozen=True)
class Event:
    """What a step did for one request."""

    request: Request
    text: str  # released by this step; may be empty while a character or stop string is open
    token_ids: list[int]
    finish_reason: str | None


@dataclass
class Output:
    """A finished sample. token_ids include the stop id; text includes neither it nor a stop.

    Under a grammar usage and timings have more: see Guide.usage and Guide.timings. So has usage
    where tokens are guessed: see speculative.Tally.usage.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | str | None  # the stop id or string, or what went wrong
    logprobs: list[Logprobs] | None
    usage: dict[str, object]
    timings: dict[str, float]


BUDGET, MAX_RUNNING = 512, 64
MOST = {"budget": 2**20, "max_running": 2**16}


class Engine:
    """A model, its cache, and the requests that are on their way.

    model       None (the default), a folder, a .gguf file, a name of models.json, a hub
                repository (and its `revision`), or a Checkpoint
    load        "auto", "safetensors" or "gguf" to insist, or "dummy": random weights for a
                config.json, or whatever else `model.dummy` takes
    device      "cpu", "cuda" or "cuda:N" (default: cuda if there is one)
    dtype       "float32", "bfloat16", "float16" (default: bfloat16 where the device has it)
    quantize    "int8" or "int4": the layers' weights in fewer bits, on a CPU. Without it and
                without a dtype, 4-bit weights of a .gguf file run as they are stored
    threads     CPU threads (default: the cores this process may use, if PyTorch takes more)
    kv_memory   bytes of cache (default: from free memory)
    block_size  tokens a block of the cache holds: a power of two from 8 to 256
    max_len     most tokens of prompt and output (default: the model's positions, if they fit)
    budget      most tokens a step computes
    max_running most requests at once, samples counted
    prefix_cache  whether a prompt finds what earlier ones have computed
    policy      "fcfs", or "priority": the smaller SamplingParams.priority goes first
    static      admit nobody before the whole batch has ended (for comparison)
    reserve     take the blocks for the longest answer at admission (for comparison)
    graphs      pad decode steps to a few sizes, which a GPU records once and replays (default:
                on a GPU); elsewhere the same padded steps are computed as ever
    jump        whether text that a grammar leaves no choice about is appended unsampled
    speculative who guesses the next tokens (default: nobody): "ngram" (what followed the last few
                before), "draft:MODEL" (a smaller model of the same vocabulary), "mtp" (the
                head in the model's own checkpoint), "eagle:PATH" or "dflash:PATH" (a head
                trained for it), "linear:FILE" (one that --fit made), or a speculative.Drafter
    spec_tokens guesses in every round, 1 to 64, but no more than the drafter makes (its `most`).
                Default: as many as are worth their rows here, by steps timed at the start
    verify      "sample" (same seed, same tokens as without guesses) or "reject" (the same law)
    seed        of requests that have none of their own, each mixed with its number
    say         called with lines for people
    progress    called with (layers loaded, layers) while the model loads

    ValueError, one sentence, for what cannot be loaded or does not fit.
    """

    def __init__(
        self,
        model=None,
        *,
        revision: str | None = None,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        quantize: str | None = None,
        threads: int | None = None,
        load: str = "auto",
        kv_memory: int | None = None,
        block_size: int = 16,
        max_len: int | None = None,
        budget: int = BUDGET,
        max_running: int = MAX_RUNNING,
        prefix_cache: bool = True,
        policy: str = "fcfs",
        static: bool = False,
        reserve: bool = False,
        graphs: bool | None = None,
        jump: bool = True,
        speculative: "str | speculative.Drafter | None" = None,
        spec_tokens: int | None = None,
        verify: str = "sample",
        seed: int = 0,
        say=None,
        progress=None,
    ):
        started = time.perf_counter()
        self.say = say or (lambda line: None)
        optional = {"kv_memory": kv_memory, "max_len": max_len, "threads": threads}
        optional["spec_tokens"] = spec_tokens
        given = {name: value for name, value in optional.items() if value is not None}
        given |= {"block_size": block_size, "budget": budget, "max_running": max_running}
        for name, value in {**given, "seed": seed}.items():
            if type(value) is not int:
                raise ValueError(f"{name} {value!r} is not an integer")
            if name in MOST and not 1 <= value <= MOST[name]:
                raise ValueError(f"{name} {value} is not from 1 to {MOST[name]:,}")
        _set_threads(threads)
        self.device = _device(device)
        self.dtype = _dtype(dtype, self.device)
        if quantize not in (None, "int8", "int4"):
            raise ValueError(f"quantize {quantize!r} is not int8 or int4")
        if quantize and (reason := models.cannot_quantize(self.device, self.dtype)):
            raise ValueError(f"quantize {quantize}: {reason}")
        self._check_drafter(speculative, spec_tokens, verify)
        checkpoint = self._load(model, revision, load, progress, quantize, dtype is None)
        self.speculation = self._speculation(speculative, spec_tokens, verify, checkpoint)
        on_gpu = self.device.type == "cuda"
        self.on_device = torch.cuda.device(self.device) if on_gpu else nullcontext()
        graphs = on_gpu if graphs is None else graphs
        this = weakref.proxy(self)  # a cycle of references would keep the memory of a GPU
        most = min(budget, max_running) if graphs else 0
        graphs_of = partial(self.model.graphs, lambda step: this._pass(step))
        self.forward = graphs_of(most)
        if block_size not in paged.BLOCK_SIZES:
            raise ValueError(f"block_size {block_size} is not one of {paged.BLOCK_SIZES}")
        rooms, max_running = self._fit(kv_memory, block_size, max_len, budget, max_running)
        self.forward = graphs_of(min(most, max_running))  # if that was lowered
        self.cache = self._cache(rooms, block_size, budget, max_running)
        with self.on_device, torch.inference_mode(), _fitting(self.device):
            self.forward.record(self.cache)
        self.manager = paged.BlockManager(rooms, block_size, prefix_cache, reserve)
        self.scheduler = Scheduler(self.manager, budget, max_running, policy, static)
        self.drafter_failed = False
        self.grammars = Grammars(self.tokens, self.config.vocab)
        self.jump = jump
        if self.speculation is not None:
            self.speculation.costs = self._costs()
            self.say(self.speculation.costs.line())
        self.seed = seed
        self.next_id = 0
        self.doomed: deque[Request] = deque()  # to abort before the next step
        self.step_lock = threading.Lock()  # held while a step runs
        self.stepper: int | None = None  # the thread that runs it
        self.queue_lock = threading.Lock()  # ids are given in the order of the queue
        self.counts = Counts()
        self.watch = None  # called after each step with a StepRecord; may not step itself
        self.load_s = time.perf_counter() - started

    # ---- one step, and what it is made of

    def step(self) -> list[Event]:
        """Let every planned request catch up by one forward pass."""
        self._refuse_inside()
        with self.step_lock:
            events = self._reap() + self._step()
        self._reap_if_idle()  # what was doomed since
        return events

    def _refuse_inside(self):
        """A step's own callbacks would wait for the lock that their thread holds."""
        if self.stepper == threading.get_ident():
            raise RuntimeError("called inside a step of the same engine, in the same thread")

    @torch.inference_mode()
    def _step(self) -> list[Event]:
        plan: list[tuple[Request, int]] = []
        self.stepper = threading.get_ident()
        try:
            plan = self.scheduler.plan()
            if not plan:
                return []
            record = self._scheduled(plan)
            with self.on_device:
                events = self._run(plan)
                record.ended = time.perf_counter()
                record.sampled = sum(len(event.token_ids) for event in events)
                self.counts.add(record)
                if self.speculation is not None:
                    self._speculate(record)
        except BaseException:  # Ctrl-C between two lines: nobody knows what was kept
            self._fail(plan, "interrupted")
            self.scheduler.repair()
            self._keep([])  # nor what the drafter has of whom
            raise
        else:
            if self.watch is not None:
                self.watch(record)
            return events
        finally:
            self.stepper = None

    def _run(self, plan) -> list[Event]:
        """Compute a plan and commit it. What fails is tried again without guesses, then request by
        request, since nothing is committed yet: the one whose fault it was ends, the others go
        on."""
        failure = None
        try:
            step, features, drawn = self._compute(plan)
        except Exception as error:  # out of memory, a device that failed, a number too large
            failure = str(error)  # the error itself holds all the tensors of the step
        if failure is not None:
            if any(request.draft for request, _ in plan):  # perhaps it was a guess too many
                return self._run(self._unguessed(plan))
            if len(plan) == 1:
                return self._fail(plan, failure)
            return [event for pair in plan for event in self._run([pair])]
        try:
            whole = self._fork(plan)
            kept = self._cut(whole, iter(drawn))
            stay = {r: r.stay(n, len(ids)) for (r, n), (ids, _) in zip(whole, kept)}
            self.cache.commit(step, [stay[request] for request, _ in plan])
            self._learn(plan, stay, features)
            plan = whole
            self.scheduler.commit(plan, kept)
            for (request, _), (ids, _) in zip(plan, kept):
                if ids:
                    self._jump(request)
        except Exception as error:
            return self._fail(plan, str(error))
        return [self._event(request) for request, _ in plan]

    def _unguessed(self, plan):
        """The same plan without drafts."""
        fewer = [(request, n - len(request.draft)) for request, n in plan]
        for request, _ in plan:
            request.draft = []
        return fewer

    def _compute(self, plan):
        """One forward pass; what it leaves for a drafter; and for each sample of the requests that
        caught up the ids that come out of it: lists of (id, logprobs, what its mask took)."""
        step = self.cache.prepare(plan)
        logits, *features = self.forward(step)
        computed = self._mark()
        caught_up = [request for request, n in plan if n == request.behind]
        rows = [row for request in caught_up for row in self._rows(request)]
        drawn = []
        if any(request.draft for request in caught_up):
            samples = [request for request in caught_up for _ in range(request.samples)]
            drawn = self.speculation.verify(logits[: len(rows)], rows, samples)
        elif rows:
            drawn = [[one] for one in zip(*sample(logits[: len(rows)], rows))]
        at = computed()
        for request in caught_up:
            request.stamps.setdefault("prefill", at)
        return step, features, drawn

    def _pass(self, step) -> list[torch.Tensor]:
        """One forward pass to the logits (R, V) of the rows that are sampled, and to what a
        drafter reads of all rows: the residual stream after some layers, the last hidden state."""
        drafter = self.speculation.drafter if self.speculation is not None else None
        taps = () if drafter is None else drafter.taps
        hidden, tapped = self.model(step.tokens, step.positions, step, taps)
        logits = self.model.logits(hidden[step.sample_rows])
        return [logits, *tapped, *([hidden] if drafter is not None and drafter.hidden else [])]

    def _mark(self):
        """A function that waits for the step, and says when what was begun up to here was done.

        Sampling waits for the device when it reads the tokens, and nothing else does before.
        """
        now = time.perf_counter()
        if self.device.type != "cuda":
            return lambda: now
        here, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        here.record()

        def at() -> float:
            end.record()
            end.synchronize()
            return time.perf_counter() - here.elapsed_time(end) / 1e3

        return at

    def _fail(self, plan, reason: str) -> list[Event]:
        """End what a step had planned, forks too; the others go on."""
        reason = (reason.strip() or "the step failed").splitlines()[0]
        members = [one for request, _ in plan for one in request.family]
        return [event for request in members for event in self._end(request, "error", reason)]

    def _fork(self, plan):
        """Where a step completes a prompt, its n samples go on as n requests."""
        whole = []
        for request, n in plan:
            whole.append((request, n))
            if n < request.behind:
                continue
            for index in range(1, request.samples):
                child = self.scheduler.fork(request, index)
                child.seed = sample_seed(request.seed, index)
                child.stream = self._stream(child)
                self.cache.copy(request, child, request.computed + n)
                whole.append((child, n))
        return whole

    def _rows(self, request: Request) -> list[Row]:
        """The rows a request is sampled from: each of its draft's, then its last one, that once
        for each sample that it forks into."""
        tokens, draft = request.tokens, request.draft
        guide = request.stream and request.stream.guide
        masks = [None] * (1 + len(draft)) if guide is None else guide.masks(len(draft))
        seeds = [request.seed] * len(draft)
        seeds += [sample_seed(request.seed, i) for i in range(request.samples)]
        rows = []
        for i, seed in enumerate(seeds):
            j = min(i, len(draft))
            history = tokens + draft[:j] if j else tokens
            place = len(tokens) + j
            rows.append(Row(request.params, seed, place, history, masks[j], request.prompt_tokens))
        return rows

    def _cut(self, plan, drawn) -> list[tuple[list[int], str | None]]:
        """Per planned request the ids that stay, and why it ends if it does."""
        now = time.perf_counter()
        kept = []
        for request, n in plan:
            if n < request.behind:
                kept.append(([], None))
                continue
            stream, guide = request.stream, request.stream.guide
            came = next(drawn)
            right = len(came) - 1
            if guide is not None:
                came = came[: guide.until]
            if came[0][0] is None:
                stuck = guide is not None and guide.stuck
                why = "the grammar allows none" if stuck else "logits are not finite"
                stream.stop_reason = f"no token can be drawn: {why}"
                kept.append(([], "error"))
                continue
            first = stream.count
            ids, finish = stream.cut([id for id, *_ in came])
            for i, (_, logprob, took) in enumerate(came[: len(ids)]):
                if took is not None:
                    guide.count(*took, first + i)
                if logprob is not None:
                    stream.logprobs.append(logprob)
            request.stamps.setdefault("first token", now)
            request.token_stamps += [now] * len(ids)
            if self.speculation is not None:
                self.speculation.count(request, len(request.draft), right, len(ids))
                stream.guessed.add(len(request.draft), min(right, len(ids)), len(ids))
            kept.append((ids, finish))
        return kept

    # ---- guesses

    def _learn(self, plan, stay: dict, features: list[torch.Tensor]):
        """Give a drafter what the target left of each row that stays."""
        row = 0
        with self._drafting():
            for request, n in plan if features and not self.drafter_failed else ():
                own = [x[row : row + stay[request]].clone() for x in features]
                self.speculation.learn(request, request.computed, own)
                row += n

    def _speculate(self, record: "StepRecord"):
        """What came of the last step's guesses, and guesses for the next step."""
        speculation = self.speculation
        if record.prompt_rows == 0 and not self.drafter_failed:
            speculation.account(record.ended - record.began, record.guesses)
        self._keep(self.scheduler.running)
        with self._drafting():
            if not self.drafter_failed:
                self._propose()
        for request in self.scheduler.running if self.drafter_failed else ():
            request.draft = []

    def _keep(self, requests: list[Request]):
        """Let the drafter forget all others."""
        if self.speculation is not None and not self.drafter_failed:
            with self._drafting():
                self.speculation.keep(requests)

    @contextmanager
    def _drafting(self):
        """A drafter that fails says so, once, and is not asked again: nothing that comes out
        needs it."""
        try:
            yield
        except Exception as error:
            self.drafter_failed = True
            name, why = self.speculation.drafter.name, str(error).strip() or type(error).__name__
            self.say(f"guesses  {name} failed, there are none any more: {why.splitlines()[0]}")

    def _propose(self):
        """Guesses for the next step, for those who decode and are not at their last token."""
        running, speculation = self.scheduler.running, self.speculation
        asked, room = [], []
        for request in running:
            left = request.stream.room - request.stream.count - 1 if request.stream else 0
            if request.samples == 1 and request.output and request.missing <= FEW and left > 0:
                asked.append(request)
                room.append(left)
        rows = sum(request.missing for request in asked)
        drafts = speculation.propose(asked, room, rows, self._draft_row)
        for request, draft, most in zip(asked, drafts, room):
            ids = draft.ids[: self._sound(draft, most)]
            request.draft = ids[: self._worth(request, ids)]

    def _draft_row(self, request: Request, guesses: list[int]) -> Row:
        """What the token after some guesses is drawn from: by the target's own noise, if that is
        what it is compared with; then a drafter that thinks alike draws alike."""
        place, count = len(request.tokens) + len(guesses), request.prompt_tokens
        domain = TARGET if self.speculation.rule == "sample" else DRAFT
        history = request.tokens + guesses
        return Row(request.params, request.seed, place, history, None, count, domain)

    def _sound(self, draft: "speculative.Draft", most: int) -> int:
        """How many guesses can be verified at all: a drafter may be anybody's."""
        V, beliefs = self.config.vocab, draft.beliefs
        if beliefs is not None and beliefs.shape != (len(draft.ids), V):
            raise ValueError(f"beliefs {tuple(beliefs.shape)}, not {(len(draft.ids), V)}")
        for j, token in enumerate(draft.ids[:most]):
            if type(token) is not int or not 0 <= token < V:
                raise ValueError(f"guess {token!r} is not an id of 0 to {V - 1}")
        return min(len(draft.ids), most)

    def _worth(self, request: Request, guesses: list[int]) -> int:
        """How many guesses are worth a row: up to the first that ends the text, breaks its
        grammar, or is followed by what the grammar forces. That one too, for its row settles by
        chance whether it comes."""
        stream = request.stream
        stops = [j for j, token in enumerate(guesses) if token in stream.stop_ids]
        n = stops[0] if stops else len(guesses)
        if stream.guide is not None:
            worth = stream.guide.ahead(guesses[:n], partial(self._forced_ids, request))
            if worth < n:
                return worth
        return n + bool(stops)

    def _check_drafter(self, drafter, fixed: int | None, rule: str):
        """Refuse what no model has a drafter for, before one is loaded."""
        if drafter is not None:
            speculative.check(drafter, fixed, rule)

    def _speculation(
        self, drafter, fixed: int | None, rule: str, checkpoint: models.Checkpoint
    ) -> "speculative.Speculation | None":
        """The drafter that is asked for, at work; ValueError: it does not go with the model."""
        if drafter is None:
            return None
        if not isinstance(drafter, speculative.Drafter):
            with torch.inference_mode(), _fitting(self.device):
                drafter = speculative.drafter(str(drafter), self.model, checkpoint)
        return speculative.Speculation(drafter, rule, fixed)

    def _open_drafter(self, memory: int, running: int) -> int:
        """Make the drafter's cache: a slot a request, but of at most half the memory. Its bytes."""
        drafter = self.speculation.drafter
        each = drafter.slot_bytes(self.max_len)
        slots = min(running, memory // 2 // each) if each else running
        if slots < 1:
            raise ValueError(
                f"kv_memory {memory:,} bytes: {drafter.name} needs {each:,} in half of it, for the"
                f" cache of one request of {self.max_len:,} tokens"
            )
        with _fitting(self.device):
            drafter.open(slots, self.max_len)
        if each:
            size = slots * each
            size = f"{size / 2**30:.3g} GiB" if size >= 2**28 else f"{size / 2**20:.3g} MiB"
            self.say(f"cache: {slots} requests of {drafter.name}'s own, {size}")
        return slots * each

    @torch.inference_mode()
    def _costs(self) -> "speculative.Costs":
        """Measure how long steps of one request take here, by its rows, and how much longer if
        they are of several requests, and not the same number of each."""
        budget, count = self.scheduler.budget, min(self.scheduler.max_running, 4)
        prompt = min(32, budget, self.max_len // 2)
        params = SamplingParams(seed=0).with_defaults(self.generation)
        made = [Request(-1 - i, [0] * (prompt + 1), params) for i in range(count)]
        if not self.manager.grow(made[0], prompt + 1):  # a window may have fewer blocks
            prompt = 1
        most = min(48, budget, self.max_len - prompt)

        def seconds(*rows: int) -> float:
            """Of a step of requests with so many rows; endless, if the cache has no room."""
            plan = list(zip(made, rows))
            for own, n in plan:
                own.draft = [0] * (n - 1)
                self.speculation.drafts[own] = speculative.Draft(own.draft)
                if not self.manager.grow(own, n):
                    return math.inf
            began = time.perf_counter()
            self._compute(plan)
            return time.perf_counter() - began

        whole, mixed = (8,), (*[1] * (count - 1), 9 - count)
        try:
            with self.on_device:
                self.manager.grow(made[0], prompt + 1)  # first: the others may fill a small cache
                for own in made:
                    own.tokens = [0] * (prompt + 1)
                    if self.manager.grow(own, prompt):
                        self._compute([(own, prompt)])
                    own.computed = prompt
                shapes = [(n,) for n in speculative.SIZES if n <= most] + [mixed] * (most >= 8)
                best = dict.fromkeys(shapes, math.inf)
                for _ in range(4):  # in turns: whatever else goes on hits all alike
                    for shape in shapes:
                        best[shape] = min(best[shape], seconds(*shape))
        finally:
            self.speculation.drafts.clear()
            for own in made:
                self.manager.release(own)
        apart = max(best.get(mixed, 0.0) - best.get(whole, 0.0), 0.0)
        points = {sum(shape): s for shape, s in best.items() if len(shape) == 1 and s < math.inf}
        return speculative.Costs(points, apart if apart < math.inf else 0.0)

    def _jump(self, request: Request):
        """Append what the grammar leaves no choice about; the next step computes all of it."""
        ids, finish = self._forced(request)
        if ids:
            self.scheduler.extend(request, ids, finish)

    def _begin(self, request: Request):
        """The same before anything is sampled: it is computed with the prompt. Of an answer that
        it would end nothing is taken, for something must be sampled."""
        ids, finish = self._forced(request)
        if finish is None:
            request.tokens += ids
        else:
            request.stream = self._stream(request)

    def _forced(self, request: Request) -> tuple[list[int], str | None]:
        """Ids that the grammar leaves no choice about, cut as sampled ones are.

        None where logprobs are asked for: every token has some, and these have no logits.
        """
        stream, guide = request.stream, request.stream.guide
        if guide is None or request.finish_reason is not None:
            return [], None
        ids, finish = stream.cut(self._forced_ids(request))
        guide.forced_tokens += len(ids)
        return ids, finish

    def _forced_ids(self, request: Request) -> list[int]:
        stream, guide = request.stream, request.stream.guide
        if not self.jump or request.params.logprobs is not None:
            return []
        ids = guide.forced(self._plain_ids)
        return ids if stream.stop_ids.isdisjoint(ids) else []  # these are no text

    def _plain_ids(self, text: str) -> list[int]:
        """Ids whose bytes are the text, where a tokenizer may put a space before; [] if none."""
        wanted = text.encode()
        for before in ("", "\n"):
            ids = self.tokenizer.encode(before + text, special=False)
            data = [self.bytes_of(i) for i in ids]
            while data and not (data[0] and sum(map(len, data)) <= len(wanted)):
                del data[0]
            if all(data) and b"".join(data) == wanted:
                return ids[len(ids) - len(data) :]
        return []

    def _event(self, request: Request) -> Event:
        """The text and ids since the last one.

        What is forced before anything is sampled comes with the first token that is: there is no
        answer before its prompt has been computed."""
        stream, final = request.stream, request.finish_reason is not None
        text, ids, begun = "", [], "first token" in request.stamps
        if begun or final:
            text = stream.take(final)
            ids = request.tokens[request.prompt_tokens + stream.told :]
        stream.told += len(ids)
        now = time.perf_counter()
        if begun and ids:
            request.stamps.setdefault("detokenised", now)
        if request.finish_reason is not None:
            request.stamps["released"] = now
        event = Event(request, text, ids, request.finish_reason)
        stream.inbox.append(event)
        return event

    def _end(self, request: Request, finish: str, reason: str | None = None) -> list[Event]:
        """End a request from outside; its text up to here comes with the event."""
        if "released" in request.stamps:
            return []
        request.stream = request.stream or self._stream(request)  # a fork not yet complete
        if request.finish_reason is None:  # else interrupted before its last event
            request.stream.stop_reason = reason
            self.scheduler.abort(request, finish)
        return [self._event(request)]

    def _scheduled(self, plan) -> "StepRecord":
        now = time.perf_counter()
        for request, _ in plan:
            if "scheduled" not in request.stamps:
                request.stamps["scheduled"] = now
                self.counts.admitted_tokens += request.prompt_tokens
                self.counts.reused_tokens += request.reused
        parts = [(request, request.computed, n) for request, n in plan]
        guesses = [len(request.draft) for request, _ in plan]
        preempted = list(self.scheduler.preempted)
        return StepRecord(now, parts, guesses, preempted, self.manager.held)

    # ---- requests in and out

    def add(self, prompt, params: SamplingParams | None = None, template=None) -> Request:
        """Queue a prompt: text, token ids, or messages. Returns its (first) request.

        template: variables for the chat template, such as tools or enable_thinking. ValueError
        where it can be known that the request cannot run.
        """
        received = time.perf_counter()
        if not isinstance(params, SamplingParams | None):
            raise ValueError(f"params {params!r} are not SamplingParams")
        params = (params or SamplingParams()).with_defaults(self.generation)
        self._check_params(params)
        stamps = {"received": received, "template": received}
        ids = self._ids(prompt, template, stamps)
        stamps["tokenised"] = time.perf_counter()
        self._check_prompt(ids)
        guide = self._guide(params, stamps, ids)
        with self.queue_lock:
            seed = mix(self.seed, self.next_id) if params.seed is None else params.seed
            request = Request(
                self.next_id, ids, params, seed, params.n,
                priority=params.priority, salt=params.cache_salt, stamps=stamps,
                most=min(len(ids) + params.max_tokens, self.max_len) - 1,
            )  # fmt: skip
            request.stream = self._stream(request, guide)
            self._begin(request)
            self.scheduler.add(request)
            self.next_id += 1
        return request

    def _ids(self, prompt, template: dict | None, stamps: dict) -> list[int]:
        """A prompt of any kind as token ids."""
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], dict):
            if self.tokenizer is None:
                raise ValueError(f"{self.name} has no tokenizer.json: prompts must be token ids")
            if self.template is None:
                raise ValueError(f"{self.name} has no chat template: use a raw prompt (--raw)")
            text, restore = self.template.protected(self.tokenizer, prompt, **(template or {}))
            stamps["template"] = time.perf_counter()
            return self.tokenizer.encode(text, restore=restore)
        if template:
            raise ValueError(f"template variables {sorted(template)} go with messages only")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"{self.name} has no tokenizer.json: prompts must be token ids")
            ids, prefix = self.tokenizer.encode(prompt), self.tokenizer.prefix
            return ids if ids[: len(prefix)] == prefix else prefix + ids
        try:
            return [operator.index(i) for i in prompt]
        except TypeError:
            raise ValueError(f"prompt {str(prompt)[:60]!r} is not text, token ids or messages")

    def _guide(self, params: SamplingParams, stamps: dict, prompt=()) -> "Guide | None":
        """What keeps a request to its grammar, which is compiled here."""
        if not params.constraint:
            return None
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer.json: no text, and no grammar for one")
        start = params.think_end
        if isinstance(start, str):
            special = self.tokenizer.special.get(start)
            ids = self._plain_ids(start) if special is None else [special]
            if len(ids) != 1:
                raise ValueError(f"think_end {start!r} is not one token here")
            start = ids[0]
        stops = self._stops_of(params)
        if start in stops:
            raise ValueError(f"think_end {params.think_end!r} is a stop id: nothing comes after it")
        if start is not None and self._thought(prompt, start):
            start = None
        guide = Guide(self.grammars.lock, *self.grammars.compiled(params, stops), start)
        stamps["compiled"] = time.perf_counter()
        return guide

    def _thought(self, prompt, end: int) -> bool:
        """Whether a prompt ends with this token and white space: so do templates that are told
        to leave thinking out, and nothing would end it once more."""
        for token in reversed(prompt):
            if token == end or not self.bytes_of(token).isspace():
                return token == end
        return False

    def abort(self, request: Request):
        """End a request and all samples of its prompt; what it held is free at once.

        While a step runs (in another thread, or under a finaliser) it is free after the step.
        Its last Event goes to whoever iterates over the request.
        """
        self.doomed.append(request)
        self._reap_if_idle()

    def _reap_if_idle(self):
        while self.doomed and self.step_lock.acquire(blocking=False):
            try:
                self._reap()
            finally:
                self.step_lock.release()

    def _reap(self) -> list[Event]:
        events = []
        try:
            while self.doomed:
                for request in self.doomed[0].family:
                    events += self._end(request, "abort")
                self.doomed.popleft()
            if events:
                self._keep(self.scheduler.running)
        except BaseException:  # Ctrl-C
            self.scheduler.repair()
            raise
        return events

    def generate(self, prompts, params=None, template=None) -> list[Output]:
        """Run prompts to their end: one Output per prompt and sample, samples side by side.

        prompts: text, token ids, messages, or a list of these; params: one, or one for each.
        """
        prompts = _as_list(prompts)
        each = params if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} params for {len(prompts)} prompts")
        requests: list[Request] = []
        try:
            for prompt, one in zip(prompts, each):
                requests.append(self.add(prompt, one, template))
            for request in requests:
                while self.receive(request):
                    pass
            return [self.output(one) for request in requests for one in request.family]
        finally:
            self.doomed += requests
            self._reap_if_idle()

    def stream(self, prompt, params=None, template=None) -> "TextStream":
        """Pieces of one answer's text as they come; its `.output` is the whole afterwards."""
        if isinstance(params, SamplingParams) and params.n > 1:
            raise ValueError(f"n = {params.n} samples cannot be streamed as one text")
        return TextStream(self, self.add(prompt, params, template))

    def astream(self, prompt, params=None, template=None) -> "TextStream":
        """The same for `async for`: steps run in a thread, shared by all that wait."""
        return self.stream(prompt, params, template)

    def receive(self, request: Request) -> list[Event]:
        """The next events of a request and its samples; none when it has ended and all are taken.

        Whoever waits drives the engine, for everybody, a step at a time: events wait in their
        request's inbox.
        """
        inbox = request.stream.inbox
        self._refuse_inside()
        while True:
            with self.step_lock:
                self._reap()
                if not inbox and not request.finished:
                    self._step()
                    self._reap()
                events, over = list(inbox), request.finished
                inbox.clear()
            self._reap_if_idle()  # what was doomed since
            if events or over:
                return events
            time.sleep(0)  # others take what is theirs

    def output(self, request: Request) -> Output:
        """What a request has produced so far."""
        stream, ids = request.stream, request.output
        guide = stream.guide
        return Output(
            text=stream.text,
            token_ids=list(ids),
            finish_reason=request.finish_reason,
            stop_reason=stream.stop_reason,
            logprobs=stream.logprobs if request.params.logprobs is not None else None,
            usage={
                "prompt_tokens": request.prompt_tokens,
                "output_tokens": len(ids),
                "cached_tokens": request.reused,
                "preemptions": request.preempted,
                "cache_bytes": self.stored_bytes(request.computed),
                **(guide.usage if guide is not None else {}),
                **(stream.guessed.usage if self.speculation is not None else {}),
            },
            timings={**timings(request), **(guide.timings if guide is not None else {})},
        )

    # ---- what is settled once

    def _load(
        self, model, revision: str | None, load: str, progress, quantize, stored: bool
    ) -> models.Checkpoint:
        """Everything that comes from the checkpoint: weights, tokenizer, template, defaults."""
        checkpoint, defaults = model, {}
        if load == "dummy":
            checkpoint = self._dummy(model, revision)
        elif not isinstance(model, models.Checkpoint):
            path, entry = models.find(model, revision, self.say)
            checkpoint = models.load(path, load)
            checkpoint.name = entry.get("name", checkpoint.name)
            defaults = entry.get("generation", {})
        self.name, self.config = checkpoint.name, checkpoint.config
        self.generation = {**defaults, **checkpoint.generation}
        self.tokenizer = self.template = None
        if checkpoint.tokenizer is not None:
            self.tokenizer = build_tokenizer(checkpoint.tokenizer)
        self.tokens = (
            self.tokenizer.tokens if self.tokenizer is not None else []
        )  # bytes of each id
        if checkpoint.template is not None and self.tokenizer is not None:
            special = checkpoint.tokenizer.get("special_tokens", {})
            self.template = ChatTemplate(checkpoint.template, special)
        self.stop_ids = self._stop_ids(checkpoint)
        with torch.inference_mode(), _fitting(self.device):
            stored = stored and models.stores_four_bits(checkpoint, self.device, self.dtype)
            quantize = quantize or ("stored" if stored else None)
            self.model = models.Model(
                self.config, checkpoint.tensors, self.device, self.dtype, progress, quantize
            )
        if self.model.low:
            as_stored = "4 bits as in the file, scales rounded to"
            how = as_stored if quantize == "stored" else f"{quantize}, the rest"
            self.say(f"weights  {self.model.low} matrices in {how} {str(self.dtype)[6:]}")
        return checkpoint

    def _dummy(self, model, revision: str | None) -> models.Checkpoint:
        """Random weights, and where there is no tokenizer one of bytes."""
        if isinstance(model, models.Checkpoint) or revision is not None:
            raise ValueError("load='dummy' takes neither a Checkpoint nor a revision")
        checkpoint = models.dummy(model, self.device, self.dtype)
        need, free = checkpoint.tensors.nbytes, _free_bytes(self.device)
        if need > free:
            raise ValueError(
                f"{checkpoint.name} needs {need / 2**30:,.1f} GiB for its weights,"
                f" {free / 2**30:,.1f} GiB are free"
            )
        self.say("random weights: the text means nothing, the times do")
        if checkpoint.tokenizer is None and checkpoint.config.vocab > 256:
            checkpoint.tokenizer = byte_tokenizer(vocab=checkpoint.config.vocab)
            checkpoint.template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
        return checkpoint

    def _stop_ids(self, checkpoint) -> set[int]:
        """Union of config.json, generation_config.json and the tokenizer's end of sequence."""
        stops = {*self.config.stop_ids, *models.ids_of(checkpoint.generation.get("eos_token_id"))}
        if self.tokenizer is not None:
            eos = checkpoint.tokenizer.get("special_tokens", {}).get("eos_token")
            stops.add(self.tokenizer.special.get(eos))
        return stops - {None}

    def _stream(self, request: Request, guide: "Guide | None" = None) -> "Stream":
        params = request.params
        room = min(params.max_tokens, self.max_len - request.prompt_tokens)
        first = request.family[0].stream
        if first is not None and first.guide is not None:
            guide = first.guide.anew()
        stream = Stream(self.tokens, self._stops_of(params), params.stop, room, guide)
        stream.inbox = deque() if first is None else first.inbox  # one for all samples
        stream.cut(request.output)  # forced, before samples go their own ways
        if guide is not None:
            guide.forced_tokens = stream.count
        return stream

    def _stops_of(self, params: SamplingParams) -> set[int]:
        """Ids that end a request. Where a grammar lets a text end, it may: ignore_eos or not."""
        ignored = params.ignore_eos and not params.constraint
        return {*params.stop_token_ids, *(() if ignored else self.stop_ids)}

    def stored_bytes(self, tokens: int) -> int:
        """Bytes of cache that a request of so many tokens takes."""
        specs, size = self.config.specs, self.dtype.itemsize
        return sum(block_bytes(s, min(tokens, s.window or tokens), size) for s in specs)

    def _cache(self, rooms: list[paged.Room], block_size: int, budget: int, max_running: int):
        try:
            return paged.PagedCache(
                self.config.specs, [room.blocks for room in rooms], block_size, budget,
                max_running, self.device, self.dtype, self.max_len, self.forward.sizes,
            )  # fmt: skip
        except (RuntimeError, MemoryError):
            gib = sum(self._room_bytes(rooms, block_size).values()) / 2**30
            raise ValueError(f"there is no memory for a cache of {gib:,.1f} GiB") from None

    def _room_bytes(self, rooms: list[paged.Room], block_size: int) -> dict:
        """Bytes of each cache group: its blocks, and block 0."""
        specs, size = self.config.specs, self.dtype.itemsize
        return {
            spec: (room.blocks + 1) * specs.count(spec) * block_bytes(spec, block_size, size)
            for spec, room in zip(dict.fromkeys(specs), rooms)
        }

    def _fit(self, kv_memory: int | None, block_size: int, max_len: int | None, budget, running):
        """What each cache group has, said with the reason; how many requests run at once. Sets
        max_len: the model's positions, or what the cache holds."""
        if max_len is not None and not 2 <= max_len <= self.config.positions:
            raise ValueError(
                f"max_len {max_len}: from 2 to the model's {self.config.positions} positions"
            )
        self.max_len = wanted = max_len or self.config.positions
        why = "kv_memory"
        if kv_memory is None and self.device.type == "cuda":
            with _fitting(self.device):
                kv_memory, why = self._gpu_memory(block_size, budget, running), "what is left"
        elif kv_memory is None:
            kv_memory, why = _free_memory(self.stored_bytes(wanted))
        if self.speculation is not None:
            kv_memory -= self._open_drafter(kv_memory, running)
        specs, asked = self.config.specs, running
        rooms, running = paged.rooms(
            specs, kv_memory, block_size, budget, running, self.dtype.itemsize
        )
        sizes = self._room_bytes(rooms, block_size)
        for (spec, size), room in zip(sizes.items(), rooms):
            size = f"{size / 2**30:.3g} GiB" if size >= 2**28 else f"{size / 2**20:.3g} MiB"
            what = "states" if room.state else f"blocks of {block_size} tokens"
            of = f" of {specs.count(spec)} {spec.kind} layers" if len(rooms) > 1 else ""
            self.say(f"cache: {room.blocks:,} {what}{of}, {size} ({why})")
        if running < asked:
            self.say(f"max_running {running} instead of {asked}: the cache has no more states")
        kept = [room.blocks for spec, room in zip(sizes, rooms) if spec.grows]
        if kept and kept[0] * block_size < wanted:
            self.max_len = kept[0] * block_size
            self.say(
                f"max_len {self.max_len:,} instead of {wanted:,}:"
                f" the cache has {self.max_len:,} tokens"
            )
        return rooms, running

    def _gpu_memory(self, block_size: int, budget: int, running: int) -> int:
        """Bytes of a GPU that the cache may take: what the worst step and the recordings need is
        measured over a small cache of the same kind. (No GPU has run this yet.)"""
        cuda, device = torch.cuda, self.device
        weights = cuda.memory_allocated(device)
        count = -(-budget // block_size) + running
        rooms = [
            paged.Room(running, state=True)
            if spec.kind == "linear"
            else paged.Room(count, spec.window)
            for spec in dict.fromkeys(self.config.specs)
        ]
        scratch = self._cache(rooms, block_size, budget, running)
        with self.on_device, torch.inference_mode():
            cuda.reset_peak_memory_stats(device)
            before = cuda.memory_allocated(device)
            self._worst_step(scratch, paged.BlockManager(rooms, block_size), budget, running)
            worst = cuda.max_memory_allocated(device) - before
            cuda.empty_cache()
            free = cuda.mem_get_info(device)[0]
            self.forward.record(scratch)
            recorded = free - cuda.mem_get_info(device)[0]
            self.forward.recorded.clear()
        self.cache = scratch = None
        cuda.empty_cache()
        free, total = cuda.mem_get_info(device)
        others = total - free - cuda.memory_reserved(device)
        needs = {
            "other processes, and CUDA itself": others,
            "weights": weights,
            f"the largest step: {budget} rows, {running} of them sampled": worst,
            f"{len(self.forward.sizes)} recorded decode steps": recorded,
        }
        lines, left = memory_budget(cuda.get_device_name(device), total, needs)
        self.say(lines)
        if left <= 0:
            need, most = (x / 2**30 for x in (sum(needs.values()), 0.9 * total))
            raise ValueError(
                f"no memory is left for a cache on {device}: {need:.1f} GiB are needed without"
                f" it, of the {most:.1f} GiB that may be used"
            )
        return left

    def _worst_step(self, cache, manager: paged.BlockManager, budget: int, running: int):
        """A step of `budget` rows, as many of them sampled as there can be, with every filter."""
        params = SamplingParams(top_k=50, top_p=0.9, min_p=0.01, presence_penalty=0.1)
        params = params.with_defaults({"repetition_penalty": 1.1})
        count = min(budget, running)
        plan, left = [], budget
        for i in range(count):
            n = min(left - (count - 1 - i), self.max_len)  # a row is left for each of the others
            left -= n
            request = Request(i, [0] * n, params, seed=i)
            grown = manager.grow(request, n)
            assert grown, f"no room for {n} rows of {budget}"
            plan.append((request, n))
        self.cache = cache
        self._compute(plan)

    def _check_params(self, params: SamplingParams):
        self._check_ids(params.stop_token_ids, "stop_token_ids:")
        self._check_ids(params.logit_bias or (), "logit_bias:")
        if isinstance(params.think_end, int):
            self._check_ids([params.think_end], "think_end")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop {list(params.stop)}: this checkpoint has no tokenizer")

    def _check_prompt(self, ids: list[int]):
        if len(ids) >= self.max_len:
            raise ValueError(
                f"the prompt has {len(ids):,} tokens; the most is {self.max_len - 1:,}"
                f" (max_len {self.max_len:,}, less one to generate)"
            )
        self._check_ids(ids, "prompt token")

    def _check_ids(self, ids, what: str):
        for i in ids:
            if not 0 <= i < self.config.vocab:
                raise ValueError(f"{what} {i} is not an id of 0 to {self.config.vocab - 1}")

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; nothing, for a special one."""
        return (self.tokens[token] if token < len(self.tokens) else None) or b""

    def name_of(self, reason: int | str) -> str:
        """A stop reason for people: the stop id's text, or the stop string."""
        if isinstance(reason, str):
            return repr(reason) if reason else "empty"
        names = {i: text for text, i in self.tokenizer.special.items()} if self.tokenizer else {}
        return names.get(reason, f"id {reason}")

    def check(self):
        """Raise AssertionError where an invariant of scheduler or cache does not hold."""
        self.scheduler.check()
        self.manager.check(self.scheduler.running)


class TextStream:
    """An iterator over the pieces of one answer, for `for` and for `async for`.

    Dropped, closed early, or cancelled, it ends its request.
    """

    def __init__(self, engine: Engine, request: Request):
        self.engine, self.request = engine, request
        self.pieces: deque[str] = deque()
        self.output: Output | None = None

    def __iter__(self):
        return self

    def __next__(self) -> str:
        while not self.pieces and (events := self.engine.receive(self.request)):
            self.pieces += [event.text for event in events if event.text]
        if self.output is not None or not self.pieces:
            self.close()
            raise StopIteration
        self.request.stamps.setdefault("streamed", time.perf_counter())
        return self.pieces.popleft()

    def close(self):
        """End the request if it runs still; `output` has what there is."""
        if self.output is None:
            self.engine.doomed.append(self.request)
            if self.engine.stepper != threading.get_ident():
                with self.engine.step_lock:  # a step that is under way comes to its end first
                    self.engine._reap()
                self.engine._reap_if_idle()
            self.output = self.engine.output(self.request)

    def __del__(self):
        self.engine.abort(self.request)

    def __aiter__(self):
        return self

    async def __anext__(self) -> str:
        try:
            piece = await asyncio.to_thread(next, self, None)
        except asyncio.CancelledError:
            self.engine.abort(self.request)
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def aclose(self):
        await asyncio.to_thread(self.close)


# ---------------------------------------------------------------- ids back to text


class Stream:
    """Turns one request's ids into text that is safe to show, and says when it ends.

    Text is released as soon as nothing can take it back: bytes wait for the rest of their
    character, and text waits while it may be the beginning of a stop string.

    Example: stop "END", tokens "a", "EN", "T", "END": released "a", "", "ENT", "".
    """

    def __init__(self, tokens: list[bytes | None], stop_ids: set[int], stops, room, guide=None):
        self.tokens, self.stop_ids, self.stops, self.room = tokens, stop_ids, stops, room
        self.guide: Guide | None = guide
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.held = ""  # decoded, not released
        self.text = ""  # released
        self.ended = False
        self.count = 0  # ids so far
        self.told = 0  # of these, in events
        self.stop_reason: int | str | None = None
        self.logprobs: list[Logprobs] = []
        self.guessed = speculative.Tally()

    def cut(self, ids: list[int]) -> tuple[list[int], str | None]:
        """The ids that stay, and "stop", "length", "error" (what the grammar does not allow) or
        None; what follows an end is dropped."""
        for i, token in enumerate(ids):
            finish = self._take(token)
            if finish:
                return ids[: i + 1], finish
        return ids, None

    def _take(self, token: int) -> str | None:
        self.count += 1
        if token in self.stop_ids:
            self.stop_reason = token
            return self._flush("stop")
        if self.guide is not None and not self.guide.accept(token):
            self.stop_reason = self.guide.refusal
            return self._flush("error")
        known = self.tokens[token] if token < len(self.tokens) else None
        self.held += self.decoder.decode(known or b"")
        if self._stop():
            return "stop"
        if self.guide is not None and self.guide.finished:
            return self._flush("stop")
        return self._flush("length") if self.count >= self.room else None

    def _flush(self, finish: str) -> str:
        """A character that never completed becomes U+FFFD, which may complete a stop string."""
        self.held += self.decoder.decode(b"", final=True)
        return "stop" if self._stop() else finish

    def _stop(self) -> bool:
        """Cut at the stop string that is complete first; of those the one that began first."""
        found = [(self.held.find(stop) + len(stop), -len(stop), stop) for stop in self.stops]
        found = [entry for entry in found if entry[0] >= -entry[1]]
        if not found:
            return False
        end, length, self.stop_reason = min(found)
        self.held = self.held[: end + length]
        self.ended = True
        return True

    def take(self, final: bool = False) -> str:
        """Release what can be released; at the end, all of it."""
        if final and not self.ended:
            self._flush("")
        keep = 0 if final else self._open()
        piece = self.held[: len(self.held) - keep]
        self.held = self.held[len(piece) :]
        self.text += piece
        return piece

    def _open(self) -> int:
        """Length of the longest end of `held` that begins a stop string."""
        longest = max(map(len, self.stops), default=1) - 1
        for start in range(max(0, len(self.held) - longest), len(self.held)):
            if any(stop.startswith(self.held[start:]) for stop in self.stops):
                return len(self.held) - start
        return 0


# ---------------------------------------------------------------- text that follows a grammar


class Grammars:
    """An engine's compiled grammars; what is used again need not be compiled again.

    A vocabulary is the tokens' bytes as far as the logits go, and the ids that may end a text: one
    for most engines, one more for each set of further stop ids. Automata grow while they are
    read: whoever reads one holds `lock`.
    """

    def __init__(self, tokens: list[bytes | None], vocab: int):
        # What is not in the tokenizer is no text, and what has no logit cannot be said.
        self.tokens = [*tokens[:vocab], *[None] * (vocab - len(tokens))]
        self.lock = threading.Lock()
        self.known: dict[frozenset, tuple[grammar.Vocabulary, dict]] = {}  # the last used is last

    def compiled(self, params: SamplingParams, stop_ids) -> tuple[grammar.Grammar, dict]:
        """A request's grammar, and the seconds spent on it. ValueError (grammar.SchemaError) for
        one that is refused."""
        ((kind, source),) = params.constraint.items()
        options = {}
        if kind == "json_schema":
            options = {"whitespace": params.json_whitespace, "lenient": params.json_lenient}
        try:
            key = kind, json.dumps(source), *options.values()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{kind}: {error}") from None
        except RecursionError:
            raise ValueError(f"{kind}: nested too deeply") from None
        began = time.perf_counter()
        with self.lock:
            spent = {}
            stops = frozenset(i for i in stop_ids if i < len(self.tokens))
            if stops not in self.known:
                self.known[stops] = grammar.Vocabulary(self.tokens, stops), {}
                spent["vocabulary_s"] = time.perf_counter() - began
                began = time.perf_counter()
            vocabulary, known = _last(self.known, stops, VOCABULARIES)
            if key not in known:
                known[key] = grammar.compile(vocabulary, **{kind: source}, **options)
            spent["compile_s"] = time.perf_counter() - began
            return _last(known, key, COMPILED), spent


FEW = 16  # tokens behind with which a request is still guessed for: a grammar may force some
VOCABULARIES, COMPILED = 4, 64  # most that are kept


def _last(known: dict, key, most: int):
    """known[key], which is now the last; of more than `most` the first is forgotten."""
    known[key] = value = known.pop(key)
    if len(known) > most:
        del known[next(iter(known))]
    return value


class Guide:
    """Keeps one request to its grammar, from the token `start` on if there is one (ids are
    compared, not text), and counts what that costs."""

    def __init__(self, lock, compiled: grammar.Grammar, timings: dict, start: int | None = None):
        self.lock, self.compiled, self.spent, self.start = lock, compiled, timings, start
        self.matcher = self._matcher() if start is None else None
        self.refusal: str | None = None  # why a token was not accepted
        self.forced_tokens = self.changed = 0
        self.mask_s = self.forced_s = 0.0
        self.taken: list[float] = []  # probability that each mask took
        self.worst = (0.0, 0)  # the largest of these, and the index of its token
        self.states = 0  # that this text made in machines it shares
        self.later: list = []  # masks after the guesses: see `ahead`
        self.until: int | None = None  # tokens of a round that count: what comes next is forced

    def _matcher(self) -> grammar.Matcher:
        with self.lock:  # it may need a new machine
            return self.compiled.matcher()

    def _ask(self, what: str, *given):
        """What the matcher answers. SchemaError: it is over a limit. Where others have filled the
        machine with their states it moves to another one; whose are most of them, has to end."""
        with self.lock:
            try:
                return self._asked(what, given)
            except grammar.SchemaError:
                full = len(self.matcher.machine.states) == grammar.STATES
                if not full or self.states > grammar.STATES // 2:
                    raise
            self.matcher.move()
            return self._asked(what, given)

    def _asked(self, what: str, given):
        known = self.matcher.machine.states
        before = len(known)
        try:
            return getattr(self.matcher, what)(*given)
        finally:
            self.states += len(known) - before

    def anew(self) -> "Guide":
        """The same for another sample, from the beginning."""
        return Guide(self.lock, self.compiled, self.spent, self.start)

    def mask(self):
        """Words of the ids that may come next (see kernels.allow); None where all may."""
        if self.matcher is None:
            return None
        began = time.perf_counter()
        words = self._ask("mask")
        self.mask_s += time.perf_counter() - began
        return words

    def accept(self, token: int) -> bool:
        """Go on by a token, or say in `refusal` why not."""
        if self.matcher is None:
            if token == self.start:
                self.matcher = self._matcher()
            return True
        try:
            accepted = self._ask("accept", token)
        except grammar.SchemaError as error:  # over a limit, in the middle of a text
            self.refusal = str(error)
            return False
        self.refusal = None if accepted else f"the grammar does not allow token {token}"
        return accepted

    def ahead(self, guesses: list[int], forced=lambda: []) -> int:
        """How many of these are worth a row: up to the first that ends the text, is not in it, or
        is followed by ids that are `forced`; that one too. Makes the masks of the rows after them:
        None after such a one."""
        before, states = self.matcher, self.states
        known = 0 if before is None else len(before.ids)
        self.later, self.until = [], None
        try:
            for n, token in enumerate(guesses, 1):
                if not self.accept(token) or self.finished:
                    self.later.append(None)
                    return n
                if forced():
                    self.later.append(None)
                    self.until = n
                    return n
                self.later.append(self.mask())
        except grammar.SchemaError:  # over a limit: not before it comes to that
            return n - 1
        finally:
            self.refusal = None
            self.matcher, self.states = before, states  # of guesses, so nobody's
            if before is not None:
                self._ask("rollback", len(before.ids) - known)
        return len(guesses)

    def masks(self, guesses: int) -> list:
        """Of the rows of a draft that `ahead` has seen, and of the one that has none before it."""
        later = [*self.later, None][:guesses]  # nobody looks at the row after one that ends it
        return [self.mask(), *later]

    def forced(self, encode) -> list[int]:
        """Ids of the text that can go one way only from here."""
        if self.matcher is None:
            return []
        began = time.perf_counter()
        try:
            ids = self._ask("forced", encode)
        except grammar.SchemaError:  # over a limit: the next mask will say so
            return []
        self.forced_s += time.perf_counter() - began
        return ids

    @property
    def finished(self) -> bool:
        """Nothing can follow, and the text may end here."""
        return self.matcher is not None and self.matcher.finished

    @property
    def stuck(self) -> bool:
        words = self.mask()
        return words is not None and not words.any()

    def count(self, mass: float, likeliest: bool, index: int):
        """What the mask took before token `index` of the output: see sample.sample."""
        mass = max(0.0, mass)  # NaN: 0
        self.taken.append(mass)
        self.worst = max(self.worst, (mass, -index))
        self.changed += likeliest

    @property
    def usage(self) -> dict:
        """masks: sampled tokens that had one; forced_tokens: appended unsampled. removed_mass:
        the probability that a mask took, on average, at most, and before which of token_ids that
        was; argmax_changed: how often the likeliest token was in it."""
        most, index = self.worst
        found = {
            "masks": len(self.taken),
            "forced_tokens": self.forced_tokens,
            "removed_mass_mean": sum(self.taken) / max(len(self.taken), 1),
            "removed_mass_max": most,
            "removed_mass_max_at": -index,
            "argmax_changed": self.changed,
        }
        if self.compiled.ignored:
            found["ignored_keywords"] = self.compiled.ignored
        return found

    @property
    def timings(self) -> dict[str, float]:
        """vocabulary_s: where this request was the first that needed one; compile_s: next to
        nothing for a known grammar; mask_s, mask_mean_s, forced_s: on masks, on forced tokens."""
        each = self.mask_s / max(len(self.taken), 1)
        spent = {"mask_s": self.mask_s, "mask_mean_s": each, "forced_s": self.forced_s}
        return {**self.spent, **spent}


# ---------------------------------------------------------------- where the time went


@dataclass
class StepRecord:
    """What a step was made of, for whoever watches: a progress bar, a timeline."""

    began: float  # seconds, as all stamps
    parts: list[tuple[Request, int, int]]  # request, first position, rows
    guesses: list[int]  # of these rows, the last of each
    preempted: list[Request]  # to make room for it
    held: int  # blocks, while it ran
    ended: float = 0.0
    sampled: int = 0  # tokens that came out

    @property
    def prompt_rows(self) -> int:
        """Rows that are neither decodes nor guesses: prompt or forced tokens, and what is computed
        again."""
        parts = ((r, start, n - k) for (r, start, n), k in zip(self.parts, self.guesses))
        return sum(n for request, start, n in parts if n > 1 or start < request.prompt_tokens)

    @property
    def rows(self) -> int:
        return sum(n for _, _, n in self.parts)


@dataclass
class Counts:
    """Sums over an engine's steps."""

    steps: int = 0
    rows: int = 0
    prompt_tokens: int = 0  # computed; after a preemption, again
    output_tokens: int = 0
    admitted_tokens: int = 0  # of prompts that began to run
    reused_tokens: int = 0  # of these, found in the cache
    preemptions: int = 0
    most_held: int = 0  # blocks
    prompt_s: float = 0.0  # in steps of mostly prompt tokens
    prompt_rows: int = 0  # in those steps

    def add(self, record: StepRecord):
        self.steps += 1
        self.rows += record.rows
        self.prompt_tokens += record.prompt_rows
        self.output_tokens += record.sampled
        self.preemptions += len(record.preempted)
        self.most_held = max(self.most_held, record.held)
        if record.prompt_rows >= max(32, 0.75 * record.rows):
            self.prompt_s += record.ended - record.began
            self.prompt_rows += record.rows

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found in the cache."""
        return self.reused_tokens / self.admitted_tokens if self.admitted_tokens else 0.0

    def saved_s(self, tokens: int) -> float:
        """What computing so many prompt tokens would have taken, at the pace so far; 0 if no
        step had enough of them to tell."""
        return tokens * self.prompt_s / self.prompt_rows if self.prompt_rows else 0.0


def timings(request: Request) -> dict[str, float]:
    """Seconds from one hand-over to the next; what has not happened yet is left out.

    TTFT: from received to the first piece of text handed on, or, where nobody streams, to the
    first id made text. TPOT: the gap between sampled tokens, 0 between those of one step.
    Prefill: from the first step of a prompt to the end of its last.
    """
    s, tokens = request.stamps, request.token_stamps
    times: dict[str, float] = {}
    before = s.get("received")
    for name, stage in STAGES[1:]:
        if stage in s:
            times[name] = s[stage] - before
            before = s[stage]
    first = s.get("streamed", s.get("detokenised"))
    if first is not None:
        times["ttft_s"] = first - s["received"]
    gaps = sorted(b - a for a, b in zip(tokens, tokens[1:]))
    if gaps:
        times["tpot_mean_s"] = sum(gaps) / len(gaps)
        times["tpot_p50_s"] = statistics.median(gaps)
        times["tpot_p99_s"] = gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]
        times["tpot_max_s"] = gaps[-1]
        times["decode_s"] = tokens[-1] - tokens[0]
        times["decode_tokens_per_s"] = len(gaps) / max(times["decode_s"], 1e-9)
    if "released" in s:
        times["total_s"] = s["released"] - s["received"]
    return times


STAGES = (  # the part of TTFT that ends with a stamp
    ("", "received"),
    ("template_s", "template"),
    ("tokenise_s", "tokenised"),
    ("grammar_s", "compiled"),  # of requests that have one
    ("queue_s", "scheduled"),
    ("prefill_s", "prefill"),
    ("sample_s", "first token"),
    ("detokenise_s", "detokenised"),
    ("stream_s", "streamed"),
)


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second that this machine streams from memory, with the threads in use.

    256 MiB are reduced six times and the best counts. Measured once, then kept.
    """

    def measure() -> float:
        block = torch.ones(2048, 2**15, device=device)
        seconds = []
        for reduce in (block.sum, block.amax) * 3:
            started = time.perf_counter()
            reduce(-1).sum().item()
            seconds.append(time.perf_counter() - started)
        return block.numel() * 4 / min(seconds)

    return models.known_rate(device, measure)


def profile(engine: Engine, request: Request, path: str) -> str:
    """Prefill against decode, on a request that has ended: its prompt in one step (or the part
    of it that the budget allows), and the step after its first token, measured operation by
    operation. Both run again, in blocks of their own; `path` gets their Chrome trace."""
    tokens, prompt = request.tokens, request.prompt_tokens
    manager, recorded = engine.manager, engine.forward.recorded
    chunk = min(engine.scheduler.budget, prompt)
    first, last = (
        Request(-1, tokens[:prompt], request.params, request.seed, salt=request.salt)
        for _ in range(2)
    )

    @torch.inference_mode()
    def run(own: Request, n: int):
        if not manager.grow(own, n):
            raise ValueError(f"no room in the cache for {prompt + 1:,} tokens to profile")
        engine._compute([(own, n)])

    def step(own: Request, n: int):
        return own.computed, n, partial(run, own, n)

    with engine.step_lock, engine.on_device:
        try:
            engine.forward.recorded = {}  # operations, not their replay
            while last.missing:
                n = manager.limit(last, min(last.missing, chunk))
                run(last, n)
                last.computed += n
                manager.commit(last)
            last.tokens = tokens[: prompt + 1]
            run(first, chunk)
            run(last, 1)  # all has run once before it is measured
            text = models.profile(
                engine.model, step(first, chunk), step(last, 1),
                [("sampling", sys.modules[__name__], "sample"),
                 ("prepare", type(engine.cache), "prepare")],
                path, read_bandwidth(engine.device),
                models.multiply_rate(engine.device, engine.dtype),
            )  # fmt: skip
        finally:
            engine.forward.recorded = recorded
            manager.release(first)
            manager.release(last)
    size = os.path.getsize(path) / 1e6
    return f"{text}\n\ntrace    {path} ({size:.1f} MB): both steps; ui.perfetto.dev opens it"


def summary(engine: Engine, output: Output) -> str:
    """What a person wants to know after the answer: sizes, times, and the bound on decode."""
    t, usage = output.timings, output.usage
    reason = output.finish_reason or "running"
    if output.stop_reason is not None:
        reason += f" ({engine.name_of(output.stop_reason)})"
    elif "masks" in usage and reason == "stop":
        reason += " (nothing can follow)"
    counts = f"{usage['prompt_tokens']} prompt + {usage['output_tokens']} output"
    lines = [f"tokens   {counts}, {reason}"]
    if "ttft_s" in t:
        parts = [(name[:-2], t[name]) for name, _ in STAGES[1:] if name in t]
        text = " + ".join(f"{name} {1e3 * s:.1f}" for name, s in parts if s >= 5e-5)
        lines.append(f"TTFT     {1e3 * t['ttft_s']:.1f} ms = {text}")
    if "tpot_mean_s" in t:
        lines.append(
            f"TPOT     {1e3 * t['tpot_mean_s']:.1f} ms mean, {1e3 * t['tpot_p50_s']:.1f} p50,"
            f" {1e3 * t['tpot_p99_s']:.1f} p99: decode {t['decode_tokens_per_s']:.1f} tokens/s"
        )
    if "masks" in usage:
        lines += _grammar_lines(t, usage)
    if engine.speculation is not None:
        lines += _guess_lines(engine, usage)
    specs, size = engine.config.specs, engine.manager.block_size
    grows = kv_cache.bytes_per_token(specs, engine.dtype.itemsize)
    held = usage["prompt_tokens"] + usage["output_tokens"] - 1  # the last has not been computed
    what = "of windows and states"
    for pool in engine.manager.growing[:1]:
        what = f"({grows:,} bytes a token)"
        what += f" in {-(-held // size):,} of {pool.blocks:,} blocks of {size} tokens"
    lines.append(f"cache    {usage['cache_bytes'] / 1e6:.1f} MB {what}")
    if usage["cached_tokens"]:
        saved = engine.counts.saved_s(usage["cached_tokens"])
        lines.append(
            f"found    {usage['cached_tokens']:,} prompt tokens in the cache"
            + (f", which saved about {1e3 * saved:.0f} ms" if saved else "")
        )
        if engine.speculation is not None and engine.speculation.begins_cold:
            lines.append("         the drafter has seen nothing of these: its guesses begin cold")
    if "tpot_mean_s" in t:
        length = usage["prompt_tokens"] + usage["output_tokens"] / 2
        read = engine.model.read_bytes + engine.stored_bytes(int(length))
        bandwidth = read_bandwidth(engine.device)
        bound = read / bandwidth
        step_s = t["decode_s"] / max(usage.get("rounds", usage["output_tokens"]) - 1, 1)
        lines.append(
            f"bound    a decode step reads {read / 1e6:.0f} MB: {1e3 * bound:.1f} ms at"
            f" {bandwidth / 1e9:.1f} GB/s, so decode runs at {bound / step_s:.0%} of it"
        )
    return "\n".join(lines)


def _guess_lines(engine: Engine, usage: dict) -> list[str]:
    """What came of guesses, as the engine counts it: of all its requests so far."""
    first, *rest = engine.speculation.lines()
    alone = usage["rounds"] == engine.speculation.tally.rounds
    return [first if alone else f"{first}, in all answers so far", *rest]


def _grammar_lines(t: dict, usage: dict) -> list[str]:
    """What the grammar cost: time, and what the model would rather have said."""
    built = f", vocabulary in {1e3 * t['vocabulary_s']:.0f} ms" if "vocabulary_s" in t else ""
    lines = [
        f"grammar  compiled in {1e3 * t['compile_s']:.1f} ms{built}; {usage['masks']} masks in"
        f" {1e3 * t['mask_s']:.1f} ms, {1e6 * t['mask_mean_s']:.0f} us each;"
        f" {usage['forced_tokens']} of {usage['output_tokens']} tokens forced",
        f"masked   {usage['removed_mass_mean']:.1%} of the probability on average,"
        f" {usage['removed_mass_max']:.1%} at most (token {usage['removed_mass_max_at']});"
        f" the likeliest token {usage['argmax_changed']} times",
    ]
    if not usage["masks"]:  # thinking never ended, say
        lines[1] = "masked   nothing: no token was sampled under the grammar"
    if "ignored_keywords" in usage:
        lines.append(f"ignored  {', '.join(usage['ignored_keywords'])}")
    return lines


def trace(request: Request, load_s: float) -> str:
    """The request's timeline, stage by stage: when each ended, how long it took, drawn."""
    s, tokens = request.stamps, request.token_stamps
    marks = [(stage, s[stage]) for _, stage in STAGES if stage in s]
    marks += [(f"token {i}", tokens[i - 1]) for i in (2, 4, 8, 16) if i < len(tokens)]
    if len(tokens) > 1:
        marks.append((f"last token ({len(tokens)})", tokens[-1]))
    if "released" in s:
        marks.append(("released", s["released"]))
    marks.sort(key=lambda mark: mark[1])
    start, end = marks[0][1], max(marks[-1][1], marks[0][1] + 1e-9)
    lines = [f"{'stage':<18}{'ended at':>11}{'took':>11}   (loaded in {load_s:.2f} s)"]
    before = start
    for stage, at in marks:
        left = round(50 * (before - start) / (end - start))
        bar = " " * left + "#" * max(1, round(50 * (at - start) / (end - start)) - left)
        lines.append(
            f"{stage:<18}{1e3 * (at - start):>8.1f} ms{1e3 * (at - before):>8.1f} ms   {bar}"
        )
        before = at
    if request.waits:
        waits = ", ".join(f"{reason} {steps}" for reason, steps in sorted(request.waits.items()))
        lines.append(f"steps it was first in the queue and waited, for: {waits}")
    return "\n".join(lines)


# ---------------------------------------------------------------- what an engine is given


def _as_list(prompts) -> list:
    """One prompt (text, ids or messages) or a list of them -> a list of them."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)) or not prompts:
        raise ValueError(f"prompts {prompts!r}: text, token ids, messages, or a list of these")
    return [prompts] if isinstance(prompts[0], (int, dict)) else list(prompts)


def _device(name: str | torch.device | None) -> torch.device:
    name = str(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not re.fullmatch(r"(cpu|cuda)(:[1-9]?[0-9])?", name):
        raise ValueError(f"device {name!r} is not cpu, cuda or cuda:N")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: this PyTorch sees no CUDA device")
    device = torch.device(name)
    if device.type == "cuda" and torch.version.hip:
        raise ValueError(f"device {name!r}: only NVIDIA's GPUs are known here, not AMD's")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r}: this PyTorch sees {torch.cuda.device_count()} of them")
    return device


def _dtype(name: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name is None:
        if device.type == "cuda":
            ampere = torch.cuda.get_device_capability(device) >= (8, 0)  # before, only emulated
            return torch.bfloat16 if ampere else torch.float16
        return torch.bfloat16 if models.cpu_has_bfloat16() else torch.float32
    if name not in known and name not in known.values():
        raise ValueError(f"dtype {name!r} is not one of {', '.join(known)}")
    return known.get(name, name)


@contextmanager
def _fitting(device: torch.device):
    """What does not fit while an engine is made is a ValueError, in one sentence."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(f"no memory is left on {device}: {str(error).splitlines()[0]}") from None


def memory_budget(device: str, total: int, needs: dict[str, int]) -> tuple[str, int]:
    """Nine tenths of a GPU's memory, less what is needed: as lines for people, and in bytes."""
    limit = int(0.9 * total)
    left = limit - sum(needs.values())
    rows = {"nine tenths of it": limit, **{f"- {k}": v for k, v in needs.items()}, "= cache": left}
    width = max(map(len, rows))
    lines = [f"memory: {device}, {total / 2**30:.1f} GiB"]
    lines += [f"  {name:<{width}} {size / 2**30:>8.2f} GiB" for name, size in rows.items()]
    return "\n".join(lines), left


def _set_threads(threads: int | None):
    """More threads than cores wait for each other: refused, and undone where it is a default."""
    allowed, cores = available_cores()
    if threads is None:
        threads = min(torch.get_num_threads(), cores)
    if not 1 <= threads <= allowed:
        raise ValueError(f"threads {threads}: from 1 to the {allowed} that this process may use")
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def available_cores(root: Path = Path("/")) -> tuple[int, int]:
    """CPUs that this process may use, and how many of them are cores of their own.

    The least of the scheduler's affinity and every quota of a control group above the process
    (what containers set): cpu.max of version 2, cpu.cfs_quota_us of version 1. A quota of 1.5
    CPUs counts as 2. Two hardware threads of a core multiply no faster than one.
    """
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        count = os.cpu_count() or 1
        return count, count
    mine = os.sched_getaffinity(0)
    allowed = min([len(mine), *_quotas(root)])
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = {_read(root / siblings.format(cpu)) or str(cpu) for cpu in mine}
    return allowed, min(allowed, len(cores))


def _quotas(root: Path) -> Iterator[int]:
    groups = (line.split(":", 2) for line in _read(root / "proc/self/cgroup").splitlines())
    for _, controllers, path in groups:
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        inner = top / path.strip("/")
        for folder in [inner, *inner.parents]:  # of which a container may see the top only
            if folder.is_relative_to(top):
                if controllers:
                    names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
                    words = [_read(folder / name) for name in names]
                else:
                    words = _read(folder / "cpu.max").split()
                if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
                    yield max(1, -(-int(words[0]) // int(words[1])))


def _read(path: Path) -> str:
    """A small file of the system; "" where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _free_memory(longest: int) -> tuple[int, str]:
    """Bytes of main memory the cache may take, and why: half of what is free, and no more than
    4 GiB or one longest request takes, for others use the machine too."""
    free = _free_bytes(torch.device("cpu"))
    most = max(4 * 2**30, longest)
    if free // 2 < most:
        return free // 2, f"half of {free / 2**30:.3g} GiB free"
    return most, f"--kv-memory sets it; {free / 2**30:.3g} GiB are free"


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        cuda = torch.cuda  # what PyTorch keeps of freed tensors is free as well
        kept = cuda.memory_reserved(device) - cuda.memory_allocated(device)
        return cuda.mem_get_info(device)[0] + kept
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return 8 * 2**30


# ---------------------------------------------------------------------------------------------
# Tokenizer
#
# text --added tokens cut out--> parts --normalizer, pre-tokenizer--> pieces --BPE--> ids
# "Hi<|end|>you all"             "Hi" <|end|> "you all"  "Hi" <|end|> "you" " all"   [..., 2, ...]
# ---------------------------------------------------------------------------------------------

# Byte-level BPE writes each byte as one printable character (GPT-2, Radford et al. 2019): the
# printable Latin-1 ones stand for themselves, the other 68 follow from U+0100 on (space is "Ġ").
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
ALPHABET = {byte: chr(byte) for byte in PRINTABLE}
ALPHABET |= {b: chr(256 + i) for i, b in enumerate(sorted(set(range(256)) - set(PRINTABLE)))}
BYTE_CHARACTERS = set(ALPHABET.values())
# A Latin-1 character outside the alphabet is sent out of Latin-1, so that encoding it fails.
TO_BYTES = {code: "\uffff" for code in range(256)} | {ord(c): b for b, c in ALPHABET.items()}

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WHITE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000"
WHITE += "".join(map(chr, range(0x2000, 0x200B)))  # Unicode White_Space; str.isspace has \x1c too
WORD = regex.compile(r"[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]")
# What Oniguruma, the regex engine of tokenizer.json, reads otherwise than `regex` does.
UNLIKE = re.compile(r"\{[\d,]+\}\+|\{\d+\}\?|\\[hHKOXRyYzZ]|\[[^\]]*(--|\|\||~~)")


class Tokenizer:
    """Byte-level BPE as a Hugging Face tokenizer.json describes it; merging is tiktoken's.

    `spec` is the parsed file. The ids equal the `tokenizers` library's, with two exceptions:
    characters newer than either side's Unicode tables, and a special token is never made out of
    plain text by merges. Attributes:

    tokens: bytes of each id, None for special and unused ids
    special: id of each special token's text
    prefix, suffix: ids the post-processor puts around one text; `encode` does not add them

    A tokenizer of the bytes "a", "b" and the merge "a b" encodes "abba" to [ab, b, a].
    Raises ValueError, naming it, for whatever is not byte-level BPE or not supported.
    """

    def __init__(self, spec: dict):
        model = spec["model"]
        _require_byte_level(spec)
        vocab = model["vocab"]
        added = _added_tokens(spec, vocab)
        self.special = {token["content"]: token["id"] for token in added if token["special"]}
        self.prefix, self.suffix = _affixes(spec.get("post_processor"))
        self._normalize = _normalizer(spec.get("normalizer"))
        texts = {token_id: text for text, token_id in vocab.items()}
        for token in added:
            text = token["content"]
            texts[token["id"]] = self._normalize(text) if token.get("normalized", True) else text
        hidden = set(self.special.values())
        self.tokens = [None] * (max(texts, default=-1) + 1)
        for token_id, text in texts.items():
            if token_id not in hidden:
                self.tokens[token_id] = _as_bytes(text)
        self._steps = _pre_tokenizer(spec.get("pre_tokenizer"))
        as_is = [token for token in added if not token.get("normalized", True)]
        normal = [token for token in added if token.get("normalized", True)]
        self._matchers = _matcher(as_is, str), _matcher(normal, self._normalize)
        self._build_bpe(model)
        self._memo = lru_cache(maxsize=1 << 16)(self._merge)

    def _build_bpe(self, model):
        vocab = model["vocab"]
        alphabet = [c for c in ALPHABET.values() if c in vocab and c not in self.special]
        if not alphabet:
            raise ValueError("this vocabulary has no token for any byte, it is not byte-level BPE")
        self._missing = bytes(set(range(256)) - {TO_BYTES[ord(c)] for c in alphabet})
        order = alphabet + _reachable(model["merges"], vocab, self.special, alphabet)
        self._ids = [vocab[text] for text in order]
        ranks = {_as_bytes(text): rank for rank, text in enumerate(order)}
        self._bpe = tiktoken.Encoding(
            "octavo", pat_str="(?s:.+)", mergeable_ranks=ranks, special_tokens={}
        )
        self._whole = {}  # pieces that are a token at once, whatever the merges say
        if model.get("ignore_merges"):
            texts = [t for t in vocab if t not in self.special and BYTE_CHARACTERS.issuperset(t)]
            self._whole = {_as_bytes(text): vocab[text] for text in texts}
        self._warned = False

    def encode(self, text: str, special: bool = True, restore: dict | None = None) -> list[int]:
        """Token ids of text. special=False leaves the text of special tokens plain text.

        `restore` is a `str.translate` table applied after the special tokens were cut out; what
        it changes stays plain text (`ChatTemplate.encode` protects the messages with it).
        """
        _check_text(text)
        ids = []
        for part in self._parts(text, special):
            if isinstance(part, int):
                ids.append(part)
            elif restore and part.translate(restore) != part:
                ids += self.encode(part.translate(restore), special=False)
            else:
                for piece in self._pieces(part):
                    ids += self._memo(piece) if len(piece) <= 64 else self._merge(piece)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids: special and unknown ids skipped, broken UTF-8 replaced by U+FFFD."""
        tokens = (self.tokens[i] for i in ids if 0 <= i < len(self.tokens))
        return b"".join(token for token in tokens if token).decode("utf-8", "replace")

    def _parts(self, text, special):
        """Ids of added tokens and normalized text between; the raw ones are found first."""
        first, second = self._matchers
        for part in _cut(first, text, special):
            if isinstance(part, int):
                yield part
            else:
                yield from _cut(second, self._normalize(part), special)

    def _pieces(self, text):
        pieces = [text]
        for step in self._steps:
            pieces = [piece for whole in pieces for piece in step(whole) if piece]
        return pieces

    def _merge(self, piece):
        data = piece.encode()
        if data in self._whole:
            return (self._whole[data],)
        kept = data.translate(None, self._missing)
        if len(kept) < len(data) and not self._warned:
            self._warned = True
            warnings.warn(f"this vocabulary has no token for some bytes of {piece[:20]!r}: dropped")
        # The public calls of tiktoken take text only; what is left may be no valid UTF-8.
        return tuple(self._ids[r] for r in self._bpe._encode_single_piece(kept)) if kept else ()


def _reachable(merges, vocab, special, alphabet):
    """Tokens that the merges produce, by the rank of the one merge that produces each.

    Why one: BPE looks at nothing outside of a token while it builds it, so a token's bytes
    always go through the same last pair. tiktoken joins any pair whose text is a token, thus
    a token must be left out when that last pair is not a listed merge. With the merges
    ["b c", "a b", "ab c"] the text abc becomes [a, bc]: abc is listed but never produced.
    """
    listed = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges]
    # Of equal merges the last counts; no merge makes a special token out of plain text.
    pairs = {pair: rank for rank, pair in enumerate(listed) if "".join(pair) not in special}
    made = {text: (-1, None, None) for text in alphabet}
    doubtful = {}
    for rank, (left, right) in enumerate(listed):
        text = left + right
        if text not in vocab:
            raise ValueError(f"merge {left!r} {right!r}: its token is not in the vocabulary")
        if text in made or pairs.get((left, right)) != rank:
            continue
        if left in made and right in made and not _crossed(left, right, made, pairs):
            made[text] = rank, left, right
        else:
            doubtful[text] = None
    ranks = {text: rank for text, (rank, _, _) in made.items() if rank >= 0}
    for text in doubtful.keys() - made.keys():
        pair = _last_pair(text, pairs)
        if pair in pairs:
            ranks[text] = pairs[pair]
    return sorted(ranks, key=ranks.get)


def _last_pair(text, pairs):
    """The two tokens before the last merge of text, by trying; None if it gets stuck before."""
    parts = list(text)
    while len(parts) > 2:
        neighbours = enumerate(zip(parts, parts[1:]))
        found = [(pairs[pair], place) for place, pair in neighbours if pair in pairs]
        if not found:
            return None
        _, place = min(found)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return tuple(parts)


def _crossed(left, right, made, pairs):
    """Whether some merge joins the end of left to the start of right before both are whole.

    Every token in `made` has a larger rank than its parts, so ranks are times. Goes back in
    time: undoes the later of the two last merges (of equal ones the right: BPE works from the
    left) and asks whether the neighbours then had a merge that came first.
    """
    while True:
        left_rank, _, inner = made[left]
        right_rank, outer, _ = made[right]
        if left_rank == right_rank == -1:
            return False
        if left_rank > right_rank:
            left, limit = inner, left_rank
        else:
            right, limit = outer, right_rank + 1
        if pairs.get((left, right), limit) < limit:
            return True


def _cut(matcher, text, special):
    """Ids of the added tokens in text, in order, and the text between them."""
    pattern, tokens = matcher
    done = 0
    for match in pattern.finditer(text) if pattern else ():
        token = tokens[match.group()]
        start, end = match.span()
        if token["special"] and not special:
            continue
        if token.get("single_word") and (
            start > 0 and WORD.match(text, start - 1) or WORD.match(text, end)
        ):
            continue
        if token.get("lstrip"):
            while start > done and text[start - 1] in WHITE:
                start -= 1
            start = max(start, done)
        while token.get("rstrip") and end < len(text) and text[end] in WHITE:
            end += 1
        if done < start:
            yield text[done:start]
        if start < end:  # else the token before took these spaces
            yield token["id"]
            done = end
    if done < len(text):
        yield text[done:]


def _matcher(added, normalize):
    """A pattern for the added tokens, the longest first, and the token of each text."""
    tokens = {normalize(token["content"]): token for token in added}
    return _any_of(tokens) if tokens else None, tokens


def _any_of(texts):
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def _added_tokens(spec, vocab):
    """Added tokens with the ids the reference gives them: the vocabulary's, else counted on."""
    fresh = len(vocab)
    added = {}
    for token in spec.get("added_tokens") or ():
        content = token["content"]
        if content:
            token_id = added.get(content, {"id": vocab.get(content, fresh)})["id"]
            fresh = max(fresh, token_id + 1)
            added[content] = token | {"id": token_id}
    return list(added.values())


def _as_bytes(text):
    """Bytes a token decodes to; one that is not all byte characters stands for its own text."""
    try:
        return text.translate(TO_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def _check_text(text):
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text is no UTF-8: it has a lone surrogate") from None


# Reading the parts of a tokenizer.json


def _require_byte_level(spec):
    """Refuse, by name, what changes ids and is not byte-level BPE."""
    model = spec["model"]
    kind = model.get("type", "BPE" if "merges" in model else "unknown")
    decoder = (spec.get("decoder") or {}).get("type", "none")
    if kind != "BPE" or decoder != "ByteLevel":
        raise ValueError(f"this tokenizer is {kind} with decoder {decoder}, not byte-level BPE")
    options = "dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"
    for option in options:
        if model.get(option):
            raise ValueError(f"this tokenizer has {option} {model[option]!r}, not byte-level BPE")
    if model.get("unk_token") and not BYTE_CHARACTERS <= model["vocab"].keys():
        raise ValueError(f"unk_token {model['unk_token']!r} with bytes missing is not supported")


def _affixes(node):
    """Ids a post-processor puts before and after a single text."""
    kind = (node or {}).get("type", "ByteLevel")
    if kind == "ByteLevel":
        return [], []
    if kind == "Sequence":
        prefix, suffix = [], []
        for inner in map(_affixes, node["processors"]):
            prefix, suffix = inner[0] + prefix, suffix + inner[1]
        return prefix, suffix
    if kind != "TemplateProcessing":
        raise ValueError(f"post-processor {kind} is not supported")
    prefix, suffix = [], []
    side = prefix
    for item in node["single"]:
        if "Sequence" in item:
            side = suffix
        else:
            side += node["special_tokens"][item["SpecialToken"]["id"]]["ids"]
    return prefix, suffix


def _normalizer(node):
    """A normalizer node as a function of text."""
    kind = (node or {}).get("type")
    if kind is None:
        return str
    if kind in ("NFC", "NFD", "NFKC", "NFKD"):
        return partial(unicodedata.normalize, kind)
    if kind != "Sequence":
        raise ValueError(f"normalizer {kind} is not supported")
    steps = [_normalizer(inner) for inner in node["normalizers"]]

    def run(text):
        for step in steps:
            text = step(text)
        return text

    return run


def _pre_tokenizer(node):
    """A pre-tokenizer node as functions, each from a piece to its pieces; ByteLevel is last."""
    nodes = list(_flat(node))
    kinds = [inner["type"] for inner in nodes]
    if kinds.count("ByteLevel") != 1 or kinds[-1] != "ByteLevel":
        raise ValueError(f"pre-tokenizer {kinds} is not supported: ByteLevel must be the last")
    return [_split_step(inner) for inner in nodes]


def _flat(node):
    kind = (node or {}).get("type")
    if kind == "Sequence":
        for inner in node["pretokenizers"]:
            yield from _flat(inner)
    elif kind:
        yield node


def _split_step(node):
    kind = node["type"]
    if kind == "ByteLevel":
        split = partial(_split, _compile(GPT2), "Isolated", False)
        step = split if node.get("use_regex", True) else lambda text: [text]
        if node.get("add_prefix_space", True):
            return lambda text: step(text if text.startswith(" ") else " " + text)
        return step
    if kind == "Digits":
        behavior = "Isolated" if node.get("individual_digits") else "Contiguous"
        return partial(_split, _compile(r"\p{N}"), behavior, False)
    if kind == "WhitespaceSplit":
        return partial(_split, _compile(r"\s"), "Removed", False)
    if kind != "Split":
        raise ValueError(f"pre-tokenizer {kind} is not supported")
    ((form, text),) = node["pattern"].items()
    pattern = _compile(text if form == "Regex" else regex.escape(text))
    if node["behavior"] not in BEHAVIORS:
        raise ValueError(f"split behavior {node['behavior']!r} is not supported")
    return partial(_split, pattern, node["behavior"], node.get("invert", False))


def _compile(pattern):
    unlike = UNLIKE.search(pattern)
    if unlike:
        raise ValueError(f"pattern {pattern!r} is not supported because of {unlike.group()!r}")
    try:
        return regex.compile(pattern, regex.V1 | regex.MULTILINE)
    except regex.error as error:
        raise ValueError(f"pattern {pattern!r} is not supported: {error}") from None


def byte_tokenizer(letters: bytes = bytes(range(256)), vocab: int = 0) -> dict:
    """A tokenizer.json of an id for each of `letters` and one that ends a text; further ids, up
    to `vocab`, come out of no text and are written as their numbers."""
    end = len(letters)
    texts = {ALPHABET[byte]: i for i, byte in enumerate(letters)}
    if vocab:
        texts |= {"<end>": end, **{f"{ALPHABET[32]}{i}": i for i in range(end + 1, vocab)}}
    return {
        "model": {
            "type": "BPE",
            "vocab": texts,
            "merges": [],
        },
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": [{"id": end, "content": "<end>", "special": True}],
        "special_tokens": {"eos_token": "<end>"},
    }


BEHAVIORS = "Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext"


def _split(pattern, behavior, invert, text):
    """Pieces of text around the matches of pattern, put together as `behavior` says.

    "1a22" at digits: Isolated 1 a 2 2, Removed a, Contiguous 1 a 22, MergedWithPrevious
    1a 2 2 with "a" as the pattern, MergedWithNext 1 a2 2.
    """
    spans, done = [], 0
    for match in pattern.finditer(text):
        start, end = match.span()
        if start == end == done and spans:
            continue  # an empty match at the end of a match is none
        if start > done:
            spans.append((done, start, invert))
        spans.append((start, end, not invert))
        done = end
    if done < len(text):
        spans.append((done, len(text), invert))
    if behavior == "Removed":
        spans = [span for span in spans if not span[2]]
    elif behavior == "MergedWithNext":
        spans = _glued(spans[::-1], behavior)[::-1]
    elif behavior != "Isolated":
        spans = _glued(spans, behavior)
    return [text[start:end] for start, end, _ in spans]


def _glued(spans, behavior):
    """Neighbours as one: of a kind (Contiguous), or a match with what came before it here."""
    glued, before = [], None
    for start, end, matched in spans:
        if matched == before if behavior == "Contiguous" else matched and before is False:
            start, end = min(start, glued[-1][0]), max(end, glued[-1][1])
            glued.pop()
        glued.append((start, end, matched))
        before = matched
    return glued


# Tokenizers that are not byte-level BPE


def build_tokenizer(spec: dict):
    """Tokenizer of a parsed tokenizer.json; what it refuses goes to `tokenizers`, if installed.

    Raises ValueError saying what the tokenizer is when that package is needed and absent.
    """
    try:
        return Tokenizer(spec)
    except ValueError as error:
        reason = error
    except (KeyError, TypeError, AttributeError) as error:
        reason = ValueError(f"tokenizer.json is malformed: {error!r}")
    try:
        import tokenizers
    except ImportError:
        raise ValueError(f"{reason}; `pip install tokenizers` makes it work") from reason
    try:
        theirs = {key: value for key, value in spec.items() if key != "special_tokens"}
        library = tokenizers.Tokenizer.from_str(json.dumps(theirs))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{reason}; `tokenizers` refuses it too: {error}") from error
    return LibraryTokenizer(library, "ByteLevel" in json.dumps(spec.get("decoder")))


class LibraryTokenizer:
    """The face of `Tokenizer` over the `tokenizers` library.

    byte_level says how its tokens spell bytes: as `Tokenizer` has them, or "▁" for a space and
    "<0x0A>" for a byte.

    Two things are approximate: `tokens` (one token decoded alone), and, in a text with `restore`,
    the space some models put before a text is put before each restored part. Some models make special tokens of plain text: with `restore` a refusal.
    """

    def __init__(self, library, byte_level: bool = False):
        self._library, self._lock = library, threading.Lock()
        added = library.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items() if token.special}
        vocab = library.get_vocab()
        self.tokens = [None] * (max(vocab.values()) + 1)
        for text, token_id in vocab.items():
            if text not in self.special:
                self.tokens[token_id] = _as_bytes(text) if byte_level else _as_piece(text)
        ids = library.encode("a").ids
        plain = library.encode("a", add_special_tokens=False).ids
        starts = [i for i in range(len(ids)) if ids[i : i + len(plain)] == plain]
        start = starts[0] if starts else 0
        self.prefix, self.suffix = ids[:start], ids[start + len(plain) :]

    def encode(self, text, special=True, restore=None):
        _check_text(text)
        if not restore or text.translate(restore) == text:
            with self._lock:  # the setting is the library's own, for all threads
                self._library.encode_special_tokens = not special
                return self._library.encode(text, add_special_tokens=False).ids
        ids, done = [], 0
        for match in _any_of(self.special).finditer(text):
            ids += self._restored(text[done : match.start()], restore)
            ids.append(self.special[match.group()])
            done = match.end()
        return ids + self._restored(text[done:], restore)

    def _restored(self, part, restore):
        plain = part.translate(restore)
        ids = self.encode(plain, special=plain == part) if part else []
        if plain != part and not set(self.special.values()).isdisjoint(ids):
            raise ValueError("a message holds a special token that this tokenizer must read as one")
        return ids

    def decode(self, ids):
        return self._library.decode(ids, skip_special_tokens=True)


def _as_piece(text):
    if re.fullmatch("<0x[0-9A-F]{2}>", text):
        return bytes([int(text[3:5], 16)])
    return text.replace("\u2581", " ").encode()


# ---------------------------------------------------------------------------------------------
# Chat template
# ---------------------------------------------------------------------------------------------


class ChatTemplate:
    """A model's Jinja template, from messages to the text it was trained on.

    `source` is the template, `special` its variables bos_token, eos_token and so on. The text
    is what `transformers` renders. Raises ValueError for a template that does not parse.
    """

    def __init__(self, source: str, special: dict[str, str]):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        # In place of Jinja's own, through which a template could leave the sandbox.
        environment.globals["namespace"] = Namespace
        environment.globals["dict"] = lambda *items, **named: dict(*items, **named)
        self._source = source
        self._special = special
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError) as error:
            raise ValueError(f"chat template does not parse: {error}") from error

    def render(self, messages, /, **variables) -> str:
        """Text of the messages, [{"role": "user", "content": "Hi"}] as "<|user|>Hi<|end|>", say.

        `content` is a text, None, or a list of {"type": "text", "text": ...}, which are joined.
        Variables: tools, documents, add_generation_prompt (True), and what the template reads.
        Raises ValueError for other shapes, and with the template's own words where it refuses.
        """
        if "messages" in variables:
            raise ValueError("messages is not a template variable that can be set")
        names = {"documents": None, "tools": None, "add_generation_prompt": True}
        names |= self._special | variables | {"messages": _checked(messages)}
        try:
            return self._template.render(names)
        except TEMPLATE_ERRORS as error:
            raise ValueError(f"chat template: {error}") from error

    def protected(self, tokenizer, messages, /, **variables) -> tuple[str, dict]:
        """The rendered messages, in which only the template writes special tokens.

        "<|im_end|>" in a message cannot end its turn: before rendering, the first character of
        each special token in a message is exchanged for a stand-in, one unused character per
        character. The second result puts them back: `tokenizer.encode(text, restore=...)` does
        so when the genuine special tokens have been cut out.
        """
        given = [_checked(messages), *variables.values()]
        shield = Shield(tokenizer, self._source, given)
        messages, *values = shield.protect(given)
        return self.render(messages, **dict(zip(variables, values))), shield.restore

    def encode(self, tokenizer, messages, /, **variables) -> list[int]:
        """Ids of the messages; the text of a special token inside them stays text."""
        text, restore = self.protected(tokenizer, messages, **variables)
        return tokenizer.encode(text, restore=restore)


TEMPLATE_ERRORS = (  # what running somebody's template on somebody's messages can raise
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class Shield:
    """Exchanges characters of given texts so that no special token stands or arises in them.

    Exchanged: the first character of a special token inside a text; the first (last) one of a
    text that starts with the end (ends with the start) of a special token, which the text
    before (after) could complete; and of a `content` that is the middle of one.
    """

    def __init__(self, tokenizer, source, given):
        self._texts = {text for text in tokenizer.special if text}
        self._normalize = getattr(tokenizer, "_normalize", str)
        self._texts |= {self._normalize(text) for text in self._texts}
        self._pattern = _any_of(self._texts)
        self._joined = "\0" + "\0".join(sorted(self._texts)) + "\0"
        self._longest = max(map(len, self._texts), default=0)
        used = set(source).union(self._joined)
        _mapped(given, lambda text, _: used.update(text))
        unused = (chr(code) for code in range(0x10FFFD, 0, -1) if chr(code) not in used)
        self._stand_in = dict(zip(sorted(set(self._joined)), unused))
        self.restore = {ord(new): old for old, new in self._stand_in.items()}

    def protect(self, given):
        return _mapped(given, self._protected) if self._texts else given

    def _protected(self, text, key):
        if self._pattern.search(self._normalize(text)):
            text = self._normalize(text)
        places = self._inside(text) | self._at_ends(text)
        if key == "content" and 0 < len(text.strip()) < self._longest:
            if text.strip() in self._joined:
                places.add(text.index(text.strip()))
        if not places:
            return text
        return "".join(self._stand_in[c] if i in places else c for i, c in enumerate(text))

    def _inside(self, text):
        places = set()
        match = self._pattern.search(text)
        while match:
            places.add(match.start())
            match = self._pattern.search(text, match.start() + 1)
        return places

    def _at_ends(self, text):
        """Ends as they are and without white space: templates trim."""
        places = set()
        for start in (0, len(text) - len(text.lstrip())):
            for end in range(start + 1, min(start + self._longest, len(text) + 1)):
                if text[start:end] not in self._joined:
                    break
                if text[start:end] + "\0" in self._joined:
                    places.add(start)
        for end in (len(text), len(text.rstrip())):
            for start in range(end - 1, max(end - self._longest, -1), -1):
                if text[start:end] not in self._joined:
                    break
                if "\0" + text[start:end] in self._joined:
                    places.add(end - 1)
        return places


def _mapped(value, change, key=None):
    """`value` with every text in it, keys too, replaced by change(text, its key)."""
    if isinstance(value, str):
        return change(value, key)
    if isinstance(value, dict):
        return {_mapped(k, change): _mapped(inner, change, k) for k, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(inner, change, key) for inner in value]
    return value


def _checked(messages):
    """The messages with contents made one text; ValueError for what is no list of messages."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages must be a list of messages, not {messages!r}")
    return [_checked_message(message) for message in messages]


def _checked_message(message):
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"a message must be a dict with a text as its role, not {message!r}")
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "".join(map(_part_text, content))
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"content must be a text, None or a list of parts, not {content!r}")
    return message | {"content": content} if "content" in message else message


def _part_text(part):
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ValueError(f"a content part of type {kind!r} is not supported, only text")
    return part["text"]


class Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without underscored names, through which templates left the sandbox."""

    def __init__(self, *items, **named):
        super().__init__()
        for name, value in dict(*items, **named).items():
            self[name] = value

    def __setitem__(self, name, value):
        if str(name).startswith("_"):
            raise jinja2.sandbox.SecurityError(f"a template may not store a name such as {name!r}")
        super().__setitem__(name, value)


class Generation(Extension):
    """{% generation %} marks what an assistant said, for training: its body is rendered."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Jinja's own escapes < and > for HTML, which no model was trained on.
    options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message):
    raise jinja2.TemplateError(message)


# ---------------------------------------------------------------- many prompts: a file of them


@dataclass
class Job:
    """A line of a file of prompts."""

    number: int
    id: object  # what the line calls itself; its number, if it does not
    kind: str  # "chat", "completion": OpenAI's batch format; "own": ours
    prompt: object = None
    fields: dict = dataclasses.field(default_factory=dict)  # of SamplingParams
    template: dict = dataclasses.field(default_factory=dict)
    arrival_s: float = 0.0
    error: str | None = None


URLS = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
WITHOUT_EFFECT = {"model", "user", "metadata", "store", "service_tier", "safety_identifier"}


def read_job(text: str, number: int, raw: bool = False, system: str | None = None) -> Job:
    """A line: a prompt as it is, ours ({"prompt" | "messages", ...}) or OpenAI's batch format.

    A line that cannot be read is a Job with an `error`; what only the engine can refuse is not.
    """
    job = Job(number, number, "own")
    if not text.startswith("{"):
        job.prompt = _unquoted(text) if raw else _messages(system, _unquoted(text))
        return job
    try:
        entry = json.loads(text, parse_constant=_no_constant)
        batch = "custom_id" in entry or "url" in entry or "body" in entry
        job.id = entry.pop("custom_id" if batch else "id", number)
        job.kind = "chat" if batch else "own"
        _read_batch(job, entry) if batch else _read_own(job, entry)
        talk = isinstance(job.prompt, list) and job.prompt and type(job.prompt[0]) is dict
        if talk and system is not None and job.prompt[0].get("role") != "system":
            job.prompt = [*_messages(system, "")[:1], *job.prompt]
    except json.JSONDecodeError as error:
        job.error = f"not JSON: {error}"
    except RecursionError:
        job.error = "nested too deeply"
    except ValueError as error:
        job.error = str(error)
    return job


def _unquoted(text: str) -> str:
    """A line that is one JSON string is what the string says: so a prompt can have lines."""
    try:
        value = json.loads(text) if text.startswith('"') else text
    except json.JSONDecodeError:
        return text
    return value if isinstance(value, str) else text


def _no_constant(name: str):
    raise ValueError(f"not JSON: {name}")


def _read_own(job: Job, entry: dict):
    entry = {name: value for name, value in entry.items() if value is not None}
    _take_prompt(job, entry, [name for name in ("prompt", "messages") if name in entry])
    job.template = _object(entry, "template")
    arrival_s = entry.pop("arrival_s", 0)
    if type(arrival_s) not in (int, float) or not 0 <= arrival_s <= 1e6:
        raise ValueError(f"arrival_s {arrival_s!r} is not a number of seconds up to 1e6")
    _take_fields(job, entry)
    job.arrival_s = arrival_s  # a line that is refused is refused at once


def _read_batch(job: Job, entry: dict):
    """OpenAI's batch format; of the body, vLLM's further fields too."""
    method, url, body = (entry.pop(name, None) for name in ("method", "url", "body"))
    known = isinstance(url, str) and url in URLS
    if entry or method != "POST" or not known or not isinstance(body, dict):
        raise ValueError(
            f"method {method!r}, url {url!r}, other fields {sorted(entry)}: a line has custom_id,"
            f" method POST, url {' or '.join(URLS)}, and a body"
        )
    job.kind = URLS[url]
    body = {k: v for k, v in body.items() if v is not None and k not in WITHOUT_EFFECT}
    _take_prompt(job, body, ["messages" if job.kind == "chat" else "prompt"])
    job.template = _object(body, "chat_template_kwargs")
    if "tools" in body:
        job.template["tools"] = tools = body.pop("tools")
        if not isinstance(tools, list):
            raise ValueError(f"tools {tools!r} is not a list")
    for name in ("stream", "echo"):
        if body.pop(name, False):
            raise ValueError(f"{name} is not for a file of requests")
    if "max_completion_tokens" in body:
        body["max_tokens"] = body.pop("max_completion_tokens")
    if job.kind == "chat":
        said = "logprobs" in body
        shown, top = body.pop("logprobs", False), body.pop("top_logprobs", 0)
        if shown not in (True, False):
            raise ValueError(f"logprobs {shown!r} is neither true nor false")
        body |= {"logprobs": top if shown else None} if shown or said else {}
    _take_fields(job, body)


def _take_prompt(job: Job, entry: dict, names: list[str]):
    if len(names) != 1 or names[0] not in entry:
        raise ValueError(f"a line has one of prompt and messages, not {names or 'none'}")
    job.prompt = entry.pop(names[0])
    kinds = (list,) if names[0] == "messages" else (str, list)
    if not isinstance(job.prompt, kinds):
        raise ValueError(f"{names[0]} {str(job.prompt)[:60]!r} is not text, ids or messages")
    inner = dict if names[0] == "messages" else int
    if isinstance(job.prompt, list) and not all(type(part) is inner for part in job.prompt):
        raise ValueError(f"{names[0]}: a list of {'messages' if inner is dict else 'token ids'}")


def _object(entry: dict, name: str) -> dict:
    value = entry.pop(name, None)
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise ValueError(f"{name} {value!r} is not an object")
    return dict(value)


def _take_grammar(entry: dict):
    """A grammar under the names that OpenAI and vLLM have for it becomes ours."""
    form, outputs = _object(entry, "response_format"), _object(entry, "structured_outputs")
    kind = form.pop("type", "text")
    found = [(f"guided_{name}", name) for name in STRUCTURES if f"guided_{name}" in entry]
    found = [(STRUCTURES[name], entry.pop(theirs)) for theirs, name in found]
    if outputs.pop("disable_any_whitespace", False):
        entry.setdefault("json_whitespace", "compact")
    if outputs.pop("json_object", False) or kind == "json_object":
        found.append(("json_schema", {"type": "object"}))
    found += [(STRUCTURES[name], outputs.pop(name)) for name in STRUCTURES if name in outputs]
    if kind == "json_schema":
        inner = _object(form, "json_schema")
        if inner.get("schema") is None:
            raise ValueError("response_format json_schema has no schema")
        found.append(("json_schema", inner["schema"]))
    elif kind not in ("text", "json_object"):
        raise ValueError(f"response_format {kind!r} is not text, json_object or json_schema")
    if unknown := sorted({*form, *outputs}):
        raise ValueError(f"response_format and structured_outputs: unknown {', '.join(unknown)}")
    found = [(name, value) for name, value in found if value is not None]
    given = [name for name, _ in found] + [name for name in GRAMMARS if name in entry]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: a text can follow one of them")
    entry.update(found)


STRUCTURES = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


def with_flags(flags: dict, own: dict) -> dict:
    """A line's fields, and the flags' where it has none; its own grammar takes the place of
    theirs, and where there is none, what goes with one is left out."""
    if own.keys() & GRAMMARS.keys():
        flags = {name: value for name, value in flags.items() if name not in GRAMMARS}
    fields = {**flags, **own}
    if not any(fields.get(name) is not None for name in GRAMMARS) and "think_end" not in own:
        fields.pop("think_end", None)
    return fields


def _take_fields(job: Job, entry: dict):
    _take_grammar(entry)
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    if unknown := sorted(set(entry) - known):
        raise ValueError(f"unknown field{'s' * (len(unknown) > 1)} {', '.join(unknown)}")
    if isinstance(entry.get("logit_bias"), dict):  # ids are text in JSON
        try:
            entry["logit_bias"] = {int(i): bias for i, bias in entry["logit_bias"].items()}
        except ValueError:
            raise ValueError(f"logit_bias {entry['logit_bias']!r}: ids must be integers") from None
    job.fields = entry


def result(engine: Engine, job: Job, outputs: list[Output]) -> dict:
    """A finished job as its line's format has it."""
    failed = [output for output in outputs if output.finish_reason == "error"]
    if job.error is not None or failed:
        return _failure(job, job.error or str(failed[0].stop_reason), 500 if failed else 400)
    if job.kind == "own":
        samples = [dataclasses.asdict(output) for output in outputs]
        return {"id": job.id, **(samples[0] if len(samples) == 1 else {"samples": samples})}
    choices = [_choice(engine, job.kind, i, output) for i, output in enumerate(outputs)]
    first = outputs[0].usage
    out = sum(output.usage["output_tokens"] for output in outputs)
    usage = {
        "prompt_tokens": first["prompt_tokens"],
        "completion_tokens": out,
        "total_tokens": first["prompt_tokens"] + out,
        "prompt_tokens_details": {"cached_tokens": first["cached_tokens"]},
    }
    body = {
        "id": f"{'chatcmpl' if job.kind == 'chat' else 'cmpl'}-{job.number}",
        "object": "chat.completion" if job.kind == "chat" else "text_completion",
        "created": int(time.time()),
        "model": engine.name,
        "choices": choices,
        "usage": usage,
    }
    return _batch_line(job, 200, body, None)


def _failure(job: Job, message: str, code: int) -> dict:
    if job.kind == "own":
        return {"id": job.id, "error": message}
    kind = "invalid_request_error" if code == 400 else "server_error"
    body = {"error": {"message": message, "type": kind, "code": None}}
    return _batch_line(job, code, body, {"code": kind, "message": message})


def _batch_line(job: Job, status: int, body: dict, error: dict | None) -> dict:
    response = {"status_code": status, "request_id": f"req-{job.number}", "body": body}
    return {
        "id": f"batch-{job.number}", "custom_id": job.id, "response": response, "error": error
    }  # fmt: skip


def _choice(engine: Engine, kind: str, index: int, output: Output) -> dict:
    choice: dict = {"index": index, "logprobs": None, "finish_reason": output.finish_reason}
    if kind == "chat":
        choice["message"] = {"role": "assistant", "content": output.text}
    else:
        choice["text"] = output.text
    if output.logprobs is None:
        return choice
    if kind == "chat":
        content = [
            {
                **_logprob(engine, one.id, one.logprob),
                "top_logprobs": [_logprob(engine, *pair) for pair in one.top],
            }
            for one in output.logprobs
        ]
        choice["logprobs"] = {"content": content}
        return choice
    decoder, offsets, length = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
    for one in output.logprobs:
        offsets.append(length)
        length += len(decoder.decode(engine.bytes_of(one.id)))
    choice["logprobs"] = {
        "tokens": [_token(engine, one.id) for one in output.logprobs],
        "token_logprobs": [one.logprob for one in output.logprobs],
        "top_logprobs": [{_token(engine, i): x for i, x in one.top} for one in output.logprobs],
        "text_offset": offsets,
    }
    return choice


def _logprob(engine: Engine, token: int, logprob: float) -> dict:
    data = engine.bytes_of(token)
    return {"token": _token(engine, token), "logprob": logprob, "bytes": [*data]}


def _token(engine: Engine, token: int) -> str:
    """A token's text: a special one's name, and bytes that are no text on their own in hex."""
    data = engine.bytes_of(token)
    try:
        return data.decode() if data else engine.name_of(token)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Batch:
    """Jobs through an engine: results as they finish, and the numbers at the end."""

    def __init__(self, engine: Engine, jobs: list[Job], defaults: dict, template: dict):
        self.engine, self.defaults, self.template = engine, defaults, template
        self.jobs = deque(sorted(jobs, key=lambda job: job.arrival_s))
        self.total = len(jobs)
        self.open: dict[Request, Job] = {}  # first request of a job -> the job
        self.done = self.failed = self.aborted = 0
        self.stopped = False
        self.times: list[dict[str, float]] = []
        self.guided: list[tuple[dict, dict]] = []  # usage and times of those with a grammar
        self.compile_s = 0.0  # of a request once, not of each of its samples
        self.waits: dict[str, int] = {}
        self.started = time.perf_counter()

    def run(self, write, progress):
        """Until all jobs have ended; `write` gets a dict a job, `progress` is called each step."""
        scheduler = self.engine.scheduler
        while (self.jobs and not self.stopped) or self.open:
            self._arrive(write)
            progress(self)
            if not scheduler.busy and self.jobs and not self.stopped:
                ahead = self.jobs[0].arrival_s - (time.perf_counter() - self.started)
                time.sleep(min(max(ahead, 0), 0.2))
            ended = [event.request.family[0] for event in self.engine.step() if event.finish_reason]
            if self.stopped:
                ended = list(self.open)
            for request in dict.fromkeys(ended):
                if request in self.open and request.finished:
                    self._finish(request, write)

    def stop(self):
        """End what runs; what has not begun is left out."""
        self.stopped = True
        for request in list(self.open):
            self.engine.abort(request)

    def _arrive(self, write):
        """Add what has arrived, some at a time: the first need not wait for the last's ids."""
        now = time.perf_counter() - self.started
        for _ in range(256):
            if self.stopped or not self.jobs or self.jobs[0].arrival_s > now:
                return
            job = self.jobs.popleft()
            try:
                if job.error is None:
                    params = SamplingParams(**with_flags(self.defaults, job.fields))
                    talk = (
                        isinstance(job.prompt, list) and job.prompt and type(job.prompt[0]) is dict
                    )
                    template = {**self.template, **job.template} if talk else job.template
                    request = self.engine.add(job.prompt, params, template)
                    self.open[request] = job
                    if self.stopped:  # while it was tokenised
                        self.engine.abort(request)
                    continue
            except ValueError as error:
                job.error = str(error)
            except RecursionError:
                job.error = "nested too deeply"
            self._fail(job, job.error, write, [])

    def _finish(self, request: Request, write):
        job = self.open.pop(request)
        if "scheduled" not in request.stamps:
            return  # stopped before it began
        outputs = [self.engine.output(one) for one in request.family]
        reasons = {output.finish_reason for output in outputs}
        if "error" in reasons:
            bad = next(output for output in outputs if output.finish_reason == "error")
            self._fail(job, str(bad.stop_reason), write, outputs)
        else:
            self.aborted += "abort" in reasons
            self.done += "abort" not in reasons
            write(result(self.engine, job, outputs))
        self.times += [output.timings for output in outputs]
        self.guided += [(one.usage, one.timings) for one in outputs if "masks" in one.usage]
        self.compile_s += outputs[0].timings.get("compile_s", 0)
        for reason, steps in request.waits.items():
            self.waits[reason] = self.waits.get(reason, 0) + steps

    def _fail(self, job: Job, reason: str, write, outputs: list[Output]):
        self.failed += 1
        write(result(self.engine, job, outputs))
        print(f"line {job.number}: {reason}", file=sys.stderr, flush=True)

    def summary(self) -> str:
        """Where the time went, over all requests."""
        counts, took = self.engine.counts, time.perf_counter() - self.started
        left = self.total - self.done - self.failed - self.aborted
        lines = [
            f"requests  {self.done:,} done, {self.failed:,} failed"
            + (f", {self.aborted:,} stopped" if self.aborted else "")
            + (f", {left:,} not begun" if left else "")
            + f" in {took:.1f} s",
            f"tokens    {counts.admitted_tokens:,} prompt, {counts.output_tokens:,} output:"
            f" {counts.output_tokens / took:.1f} output tokens/s",
        ]
        if counts.reused_tokens:
            share = counts.reused_tokens / counts.admitted_tokens
            saved = counts.saved_s(counts.reused_tokens)
            lines.append(
                f"found     {counts.reused_tokens:,} prompt tokens in the cache ({share:.0%})"
                + (f", which saved about {saved:.1f} s" if saved else "")
            )
            if self.engine.speculation is not None and self.engine.speculation.begins_cold:
                lines.append("          the drafter has seen nothing of these: it began cold")
        if self.guided:
            masks, forced = (
                sum(usage[name] for usage, _ in self.guided) for name in ("masks", "forced_tokens")
            )
            mask_s = sum(times["mask_s"] for _, times in self.guided)
            lines.append(
                f"grammars  of {len(self.guided):,} answers:"
                f" compiled in {1e3 * self.compile_s:,.1f} ms,"
                f" {masks:,} masks in {1e3 * mask_s:,.1f} ms; {forced:,} tokens forced"
            )
        if self.engine.speculation is not None:
            lines += [f"{line[:8]:<10}{line[9:]}" for line in self.engine.speculation.lines()]
        for title, name in (
            ("TTFT", "ttft_s"), ("  queue", "queue_s"), ("  prefill", "prefill_s"),
            ("TPOT", "tpot_mean_s"), ("worst gap", "tpot_max_s"),
        ):  # fmt: skip
            values = sorted(times[name] for times in self.times if name in times)
            if values:
                lines.append(
                    f"{title:<10}{1e3 * sum(values) / len(values):,.1f} ms mean,"
                    f" {1e3 * _percentile(values, 0.5):,.1f} p50,"
                    f" {1e3 * _percentile(values, 0.99):,.1f} p99"
                )
        if counts.steps:
            lines.append(
                f"steps     {counts.steps:,} of {counts.rows / counts.steps:.1f} rows,"
                f" {counts.preemptions:,} preemptions; at most {counts.most_held:,} of"
                f" {self.engine.manager.blocks:,} blocks held"
            )
        if self.waits:
            waits = ", ".join(f"{reason} {n:,}" for reason, n in sorted(self.waits.items()))
            lines.append(f"waited    the first of the queue, for: {waits} (steps)")
        return "\n".join(lines)


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Timeline:
    """Steps as a Chrome trace (JSON; opens in Perfetto or chrome://tracing): a track a request,
    a slice a step and stage, and counters. Written as it happens."""

    def __init__(self, path: str, engine: Engine):
        self.file = open(path, "w", encoding="utf-8")
        self.engine, self.zero = engine, time.perf_counter()
        self.tracks: dict[Request, int] = {}  # of requests that have not ended
        self.count = 0
        self.file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        self._write(ph="M", name="process_name", args={"name": engine.name}, comma="")
        self._write(ph="M", name="thread_name", tid=0, args={"name": "steps"})
        engine.watch = self.step

    def _write(self, comma=",\n", **event):
        self.file.write(comma + json.dumps({"pid": 0, **event}))

    def _slice(self, track: int, name: str, began: float, ended: float, **details):
        at, end = (round(1e6 * (t - self.zero), 1) for t in (began, max(began, ended)))
        dur = round(end - at, 1)  # of rounded ends: slices of a track touch and do not overlap
        self._write(ph="X", name=name, tid=track, ts=at, dur=dur, args=details)

    def _track(self, request: Request) -> int:
        if request not in self.tracks:
            self.count += 1
            self.tracks[request] = track = self.count
            name = f"request {request.id}" + (f".{request.index}" if request.params.n > 1 else "")
            self._write(ph="M", name="thread_name", tid=track, args={"name": name})
            stamps = request.stamps
            stages = [(name, stamps[name]) for _, name in STAGES[:5] if name in stamps]
            if not request.index:
                for (_, before), (name, at) in zip(stages, stages[1:]):
                    details = request.waits if name == "scheduled" else {}
                    names = {"tokenised": "tokenise", "compiled": "grammar", "scheduled": "queue"}
                    name = names.get(name, name)
                    self._slice(track, name, before, at, **details)
        return self.tracks[request]

    def step(self, record: StepRecord):
        """A step has ended."""
        engine, at = self.engine, round(1e6 * (record.ended - self.zero), 1)
        for request in record.preempted:
            self._write(ph="i", s="t", name="preempted", tid=self._track(request), ts=at)
        for request, start, n in record.parts:
            stage = "again" if request.preempted else "prefill"
            if start >= request.prompt_tokens and (n == 1 or not request.preempted):
                stage = "decode" if n == 1 else "forced"
            self._slice(
                self._track(request), stage, record.began, record.ended, rows=n, position=start
            )
            if request.finish_reason is not None:
                del self.tracks[request]
        rows, prompt = record.rows, record.prompt_rows
        self._slice(
            0, f"{rows} rows", record.began, record.ended,
            requests=len(record.parts), prompt=prompt, sampled=record.sampled,
        )  # fmt: skip
        counts = engine.counts
        counters = {
            "tokens a step": {"prompt": prompt, "decode": rows - prompt},
            "blocks": {"held": record.held, "cached": engine.manager.cached},
            "requests": {
                "running": len(engine.scheduler.running), "waiting": len(engine.scheduler.waiting)
            },
            "hit rate, %": {"found": round(100 * counts.hit_rate, 1)},
        }  # fmt: skip
        for name, values in counters.items():
            self._write(ph="C", name=name, ts=at, args=values)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.engine.watch = None
        self.file.write("\n]}\n")
        self.file.close()


# ---------------------------------------------------------------- a head for this model

SUBJECTS = (
    "the water cycle", "a good night's sleep", "the history of bread", "how a bicycle works",
    "learning a language", "honey bees", "saving money", "the moon", "cooking rice", "volcanoes",
    "public speaking", "whales", "computers", "friendship", "coffee", "ancient Egypt",
)  # fmt: skip
ASKED = (
    "Tell me about {}.", "Explain {} to a child.", "Write a short story about {}.",
    "Give five tips about {}.", "What are common mistakes with {}?", "Write a poem about {}.",
)  # fmt: skip


def fit(engine: Engine, path: str, say) -> str:
    """Let the model answer prompts, fit a `speculative.Linear` on what it computes meanwhile, and
    write that to a file: lines for people. The engine's drafter is a Recorder.

    Nothing about every eighth subject is fitted on: such answers, at temperature 0, tell how good
    the head is. Fitting also on what people wrote, this project's docstrings, made it no better.
    """
    began, requests, answer = time.perf_counter(), [], min(ANSWER, engine.max_len // 2)
    for i, subject in enumerate(SUBJECTS):
        params = SamplingParams(max_tokens=answer, temperature=0.7 * (i % 8 > 0), seed=i)
        for asked in ASKED:
            prompt = asked.format(subject)
            prompt = _messages(None, prompt) if engine.template else prompt
            requests.append(engine.add(prompt, params))
    while engine.scheduler.busy:
        engine.step()
        say.fitting(engine.counts.output_tokens, answer * len(requests))
    say.done()
    if failed := [r for r in requests if r.finish_reason not in ("stop", "length")]:
        raise ValueError(f"--fit {path}: {failed[0].stream.stop_reason}")
    answered = time.perf_counter()
    fitted, held = [], []
    for i, request in enumerate(requests):
        text = engine.speculation.drafter.text(request)
        (fitted if i // len(ASKED) % 8 else held).append(text)
    with torch.inference_mode():
        head, rates = speculative.fit(engine.model, fitted, held)
    right = [f"{rate:.3f}" for rate in rates]
    head.save(path, model=engine.name, right=" ".join(right))
    fitting = time.perf_counter() - answered
    rows = sum(len(text.hidden) for text in fitted)
    return (
        f"fitted   {path}: {Path(path).stat().st_size / 1e6:.1f} MB, for {engine.name}, on"
        f" {rows:,} positions of {len(fitted)} of its answers\n"
        f"         {answered - began:.0f} s to answer and {fitting:.0f} to solve for a matrix of"
        f" {' x '.join(f'{n:,}' for n in head.parts['matrix'].shape)};"
        f" {len(head.ids):,} of {engine.config.vocab:,} ids\n"
        f"right    {right[0]} of first guesses on {len(held)} answers about other things,"
        f" {right[1]} of second ones where the first is\n"
        f"try      python generate.py --speculative linear:{path}"
    )


ANSWER = 160  # tokens


# ---------------------------------------------------------------- the command line


SAMPLING = {  # SamplingParams' plain fields: type, help
    "max_tokens": (int, "most tokens to generate (default 256)"),
    "temperature": (float, "0: always the likeliest token"),
    "top_k": (int, "sample among the k likeliest tokens"),
    "top_p": (float, "sample among the likeliest tokens that share p"),
    "min_p": (float, "leave out tokens below this part of the best one's chance"),
    "repetition_penalty": (float, "above 1: avoid what was said"),
    "presence_penalty": (float, "avoid tokens already generated"),
    "frequency_penalty": (float, "the same, for each occurrence"),
    "logprobs": (int, "with --json or --prompts: log-probabilities, of the N likeliest too"),
    "n": (int, "samples of the prompt (default 1)"),
    "seed": (int, "draw other tokens (default: runs repeat themselves)"),
}


EPILOG = """\
Sampling flags that are not given are the model's own (generation_config.json).

A line of --prompts (- reads standard input) is a prompt as it is, or an object:
  {"prompt": ...}     text that is continued, or token ids; or {"messages": [...]}
                      with id, priority, arrival_s, sampling fields (max_tokens, ...), and a
                      grammar: json_schema, regex, choice, grammar, or response_format
  {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}
                      OpenAI's batch format (vllm run-batch), or /v1/completions
A line that is one JSON string is what the string says. Flags are defaults for lines that do
not say. Exit code 1 if a line failed, 130 after Ctrl-C.
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="generate.py",
        usage="generate.py [--prompt TEXT | --prompts FILE] [flags]   --help lists the flags",
        description="Answer a prompt and say where the time went. Without --prompt: a chat.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
        allow_abbrev=False,
    )
    add = p.add_argument
    add("--prompt", help="what to answer; - reads it from standard input")
    add("--prompts", metavar="FILE", help="a request a line, results as JSON lines (see below)")
    add("--system", help="system message before the prompt")
    add("--raw", action="store_true", help="continue the prompt as it is, without chat template")
    add("--model", help="folder, .gguf file, name in models.json or hub repository")
    add("--load", choices=("auto", "safetensors", "gguf", "dummy"), default="auto",
        help="insist on a format; dummy: random weights, a config is enough")  # fmt: skip
    add("--revision", help="branch, tag or commit of the hub repository")
    for name, (kind, text) in SAMPLING.items():
        add("--" + name.replace("_", "-"), type=kind, help=text)
    add("--logit-bias", type=_bias, action="append", default=[], metavar="ID=BIAS",
        help="add to a logit (repeatable)")  # fmt: skip
    add("--stop", action="append", default=[], help="end before this text (repeatable)")
    add("--stop-token-id", type=int, action="append", default=[], help="repeatable")
    add("--ignore-eos", action="store_true", help="go on to --max-tokens")
    add("--json-schema", metavar="FILE|JSON",
        help="answer with JSON of this schema: a file, or the schema itself; true: any JSON")  # fmt: skip
    add("--regex", help="answer with a text that this matches from its beginning to its end")
    add("--choice", action="append", metavar="TEXT", help="answer with one of these (repeatable)")
    add("--grammar", metavar="FILE", help="answer by this grammar (GBNF)")
    add("--json-whitespace", choices=list(grammar.SLOTS), default="default",
        help="between JSON's tokens: none, little, or as much as JSON allows")  # fmt: skip
    add("--json-lenient", action="store_true",
        help="pass over keywords of a schema that cannot be enforced, and name them")  # fmt: skip
    add("--think-end", type=_token_or_id, metavar="TOKEN",
        help="the grammar begins after this token (text or id), such as </think>")  # fmt: skip
    add("--no-jump", action="store_true",
        help="sample also the tokens that a grammar leaves no choice about")  # fmt: skip
    add("--speculative", metavar="DRAFTER",
        help="guess several tokens a step and verify them: ngram (no weights), draft:MODEL (a"
        " smaller one), mtp (the model's own head), eagle:PATH, dflash:PATH, linear:FILE (--fit)")  # fmt: skip
    add("--spec-tokens", type=int, metavar="N",
        help="guesses a round, at most as many as the drafter makes: ngram 16, dflash a block, the"
        " others 8 (default: as many as pay here, often none)")  # fmt: skip
    add("--verify", choices=speculative.RULES, default="sample",
        help="sample (default): accept what is drawn anyway, the tokens stay the same; reject:"
        " by chances (rejection sampling), other tokens of the same law")  # fmt: skip
    add("--template", type=_variable, action="append", default=[], metavar="NAME=VALUE",
        help="of the chat template, such as enable_thinking=false (repeatable)")  # fmt: skip
    add("--device", help="cpu, cuda or cuda:N")
    add("--dtype", help="float32, bfloat16 or float16")
    add("--quantize", choices=("int8", "int4"), help="the layers' weights in 8 or 4 bits (CPU)")
    add("--threads", type=int, help="CPU threads")
    add("--max-len", type=int, help="most tokens of prompt and output")
    add("--kv-memory", type=_bytes, help="bytes for the cache, such as 2GiB")
    add("--block-size", type=int, default=16, help="tokens a cache block holds (default 16)")
    add("--budget", type=int, default=BUDGET,
        help=f"most tokens a step computes (default {BUDGET})")  # fmt: skip
    add("--max-running", type=int, default=MAX_RUNNING,
        help=f"most requests at once (default {MAX_RUNNING})")  # fmt: skip
    add("--no-prefix-cache", action="store_true", help="compute every prompt from its beginning")
    add("--policy", choices=("fcfs", "priority"), default="fcfs",
        help="order of arrival, or the smaller priority first")  # fmt: skip
    add("--static", action="store_true", help="admit nobody before the batch has ended")
    add("--reserve", action="store_true", help="take the longest answer's blocks at admission")
    add("--graphs", action=argparse.BooleanOptionalAction,
        help="replay recorded decode steps (default: on a GPU)")  # fmt: skip
    add("--trace", action="store_true", help="print the request's timeline")
    add("--profile", nargs="?", const="profile.json", metavar="FILE",
        help="measure the prompt's step against a decode's, operation by operation, and write"
        " their trace (default profile.json)")  # fmt: skip
    add("--timeline", metavar="FILE", help="write a Chrome trace of all steps (Perfetto opens it)")
    add("--quiet", action="store_true", help="the answer only (errors are still shown)")
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("--fit", metavar="FILE",
        help="fit a drafter, linear:FILE, on the model's own answers, and write it: a minute")  # fmt: skip
    add("--demo", action="store_true", help="a tiny random model, a line a step: no download")
    return p


def main(argv: list[str] | None = None) -> int:
    """Exit code 0; 1 for a failure, 2 for wrong usage, 130 after Ctrl-C."""
    _open_streams()
    p = parser()
    args = p.parse_args(argv)
    many = args.prompts is not None
    chat = args.prompt is None and not many and args.fit is None
    if many and (args.prompt is not None or args.trace or args.json or args.demo):
        p.error("--prompts goes without --prompt, --trace, --json and --demo")
    alone = (args.prompt, args.prompts, args.speculative, args.system)
    if args.fit is not None and (
        any(x is not None for x in alone)
        or (args.demo or args.trace or args.json or args.raw or args.template)
    ):
        p.error("--fit goes with flags of the model and of the engine only")
    if chat and not args.demo and (not sys.stdin.isatty() or args.json or args.raw):
        p.error("--prompt is needed (- reads standard input); a chat needs a terminal")
    if args.profile is not None and (
        args.prompt is None or args.json or args.demo or (args.n or 1) > 1
    ):
        p.error("--profile follows one --prompt, without --json, --demo and --n")
    if args.logprobs is not None and not (args.json or many):
        p.error("--logprobs is shown by --json and --prompts only")
    if args.raw and (args.system is not None or args.template):
        p.error("--raw takes no --system and no --template")
    if (args.n or 1) > 1 and (chat or args.trace):
        p.error(f"--n {args.n}: a chat and --trace follow one sample")
    guided = any(getattr(args, name) is not None for name in GRAMMARS)
    if not (guided or many) and (args.think_end is not None or args.no_jump):
        p.error("--think-end and --no-jump go with a grammar: --json-schema, --regex, ...")
    if args.speculative is None and (args.spec_tokens is not None or args.verify != "sample"):
        p.error("--spec-tokens and --verify go with --speculative")
    for_json = args.json_lenient or args.json_whitespace != "default"
    if for_json and args.json_schema is None and not many:
        p.error("--json-lenient and --json-whitespace go with --json-schema")
    try:
        if args.speculative is not None:
            speculative.check(args.speculative, args.spec_tokens, args.verify)
        fields, template = _fields(args), dict(args.template)
        params = SamplingParams(**with_flags(fields, {}))
        if params.constraint:
            Grammars([bytes([i]) for i in range(256)], 256).compiled(params, ())
        if args.fit is not None and fields != _fields(p.parse_args([])):
            raise ValueError("--fit takes no flags of sampling and none of a grammar")
    except ValueError as error:
        p.error(str(error))
    say = Say(args.quiet)
    try:
        if args.demo:
            print(demo(), flush=True)
            return 0
        if args.profile is not None:
            _check_file(args.profile)
        if args.fit is not None:
            _check_file(args.fit)
        jobs = _jobs(args) if many else []  # before the model is loaded: it takes a while
        engine = Engine(
            args.model, revision=args.revision, load=args.load,
            device=args.device, dtype=args.dtype, quantize=args.quantize,
            threads=args.threads, kv_memory=args.kv_memory, block_size=args.block_size,
            max_len=args.max_len, budget=args.budget, max_running=args.max_running,
            prefix_cache=not args.no_prefix_cache, policy=args.policy, static=args.static,
            reserve=args.reserve, graphs=args.graphs, jump=not args.no_jump,
            speculative=speculative.Recorder() if args.fit else args.speculative,
            spec_tokens=args.spec_tokens, verify=args.verify,
            say=None if args.quiet else say, progress=say.progress,
        )  # fmt: skip
        say.done()
        with Timeline(args.timeline, engine) if args.timeline else nullcontext():
            if args.fit:
                print(fit(engine, args.fit, say))
                return 0
            if many:
                return _prompts(engine, jobs, fields, template, args, say)
            if chat:
                return _chat(engine, params, template, args, say)
            text = sys.stdin.read() if args.prompt == "-" else args.prompt
            prompt = text if args.raw else _messages(args.system, text)
            return _answer(engine, prompt, params, template, args, say)
    except ValueError as error:
        say.done()
        print(f"generate.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say.done()
        return 130
    except BrokenPipeError:  # the reader has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 1


def _open_streams():
    """A closed standard stream is the null device; what a terminal cannot show is replaced."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    warnings.formatwarning = lambda message, *rest: f"{message}\n"


def _fields(args) -> dict:
    """The sampling fields that flags give."""
    given = {name: getattr(args, name) for name in SAMPLING}
    return {
        **{name: value for name, value in given.items() if value is not None},
        "logit_bias": dict(args.logit_bias) or None,
        "stop": args.stop,
        "stop_token_ids": args.stop_token_id,
        "ignore_eos": args.ignore_eos,
        "json_schema": _schema(args.json_schema),
        "regex": args.regex,
        "choice": args.choice,
        "grammar": None if args.grammar is None else _read_flag("--grammar", args.grammar),
        "json_whitespace": args.json_whitespace,
        "json_lenient": args.json_lenient,
        "think_end": args.think_end,
    }


def _schema(text: str | None) -> str | None:
    """The JSON text of a schema: itself, or what the file of that name has."""
    inline = text is None or text.lstrip()[:1] in ("{", "[", '"') or text in ("true", "false")
    return text if inline else _read_flag("--json-schema", text)


def _read_flag(flag: str, path: str) -> str:
    """The text of a file that a flag names."""
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise ValueError(f"{flag} {path!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{flag} {path!r}: the file is not UTF-8 text") from None


def _check_file(path: str):
    """What can be known of a file that is written at the end."""
    folder = Path(path).resolve().parent
    if not path or Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{path or 'an empty name'}: no file that can be written")


UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def _bytes(text: str) -> int:
    """ "2GiB", "500MB" or a number of bytes."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d+)?) *([a-z]*)", text.strip().lower())
    if match is None or match[2] not in UNITS:
        message = f"{text!r} is not a size such as 2GiB, 500MB or 1000000"
        raise argparse.ArgumentTypeError(message)
    value = int(float(match[1]) * UNITS[match[2]])
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0")
    return value


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=BIAS") from None


def _token_or_id(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _variable(text: str) -> tuple[str, object]:
    """NAME=VALUE, the value as JSON where it is JSON, else as text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _messages(system: str | None, user: str) -> list[dict]:
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": user}]


class Say:
    """Lines and a progress bar on standard error, unless --quiet."""

    def __init__(self, quiet: bool):
        self.quiet, self.started, self.open = quiet, time.perf_counter(), False
        self.last, self.before = self.started, (0, 0)

    def __call__(self, line: str):
        self.done()
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def progress(self, done: int, total: int):
        """A bar for what takes longer than a second."""
        if self.quiet or not sys.stderr.isatty() or time.perf_counter() - self.started < 1:
            return
        filled = round(30 * done / total)
        bar = f"\rloading  [{'#' * filled}{'.' * (30 - filled)}] {done}/{total} layers"
        print(bar, end="", file=sys.stderr, flush=True)
        self.open = True

    def fitting(self, done: int, most: int):
        """How far a fit's answers are: on a terminal twice a second, else every 10 s."""
        now, terminal = time.perf_counter(), sys.stderr.isatty()
        if self.quiet or now - self.last < (0.5 if terminal else 10):
            return
        self.last = now
        line = f"fitting  {done:,} tokens answered, at most {most:,}"
        print("\r" * terminal + line, end="" if terminal else "\n", file=sys.stderr, flush=True)
        self.open = terminal

    def batch(self, batch: Batch):
        """The same for a file of prompts: on a terminal twice a second, else every 10 s."""
        now, terminal = time.perf_counter(), sys.stderr.isatty()
        if self.quiet or now - self.last < (0.5 if terminal else 10):
            return
        counts, scheduler, manager = (
            batch.engine.counts,
            batch.engine.scheduler,
            batch.engine.manager,
        )
        rate = (
            (counts.prompt_tokens - self.before[0]) / (now - self.last),
            (counts.output_tokens - self.before[1]) / (now - self.last),
        )
        self.last, self.before = now, (counts.prompt_tokens, counts.output_tokens)
        ended = batch.done + batch.failed
        filled = round(8 * ended / batch.total)
        line = (
            f"[{'#' * filled}{'.' * (8 - filled)}] {ended}/{batch.total}"
            f"  {rate[0]:,.0f} in {rate[1]:,.0f} out tok/s"
            f"  {len(scheduler.running)} run {len(scheduler.waiting)} wait"
            f"  {manager.held}/{manager.blocks} blocks  {counts.hit_rate:.0%} found"
        )
        if terminal:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + line[:width].ljust(width), end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)
        self.open = terminal

    def done(self):
        if self.open:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + " " * width + "\r", end="", file=sys.stderr, flush=True)
        self.open = False


def _answer(engine: Engine, prompt, params, template, args, say: Say) -> int:
    """One prompt: stream its answer, or print all samples, or one JSON object."""
    if params.n > 1:
        request = engine.add(prompt, params, template)
        with Interrupt(lambda: engine.abort(request)):
            while engine.receive(request):
                pass
        outputs = [engine.output(one) for one in request.family]
        result = {"samples": [dataclasses.asdict(output) for output in outputs]}
        if not args.json:
            for i, output in enumerate(outputs):
                print(f"--- sample {i + 1} of {params.n}\n{output.text}")
    else:
        stream = engine.stream(prompt, params, template)
        outputs = [_show(stream, None if args.json else sys.stdout)]
        result, request = dataclasses.asdict(outputs[0]), stream.request
    if args.json:
        print(json.dumps({**result, "load_s": engine.load_s}))
    sys.stdout.flush()
    if not args.json:  # which has the numbers in it
        say("\n(of sample 1)" if params.n > 1 else "")
        say(summary(engine, outputs[0]))
    if args.trace:
        print(trace(request, engine.load_s), file=sys.stderr)
    if args.profile and outputs[0].finish_reason in ("stop", "length"):
        print("\n" + profile(engine, request, args.profile), file=sys.stderr)
    for output in outputs:
        if output.finish_reason == "error":
            print(f"generate.py: {output.stop_reason}", file=sys.stderr)
    reasons = {output.finish_reason for output in outputs}
    return 1 if "error" in reasons else 130 if "abort" in reasons else 0


def _jobs(args) -> list[Job]:
    data = sys.stdin.buffer.read() if args.prompts == "-" else Path(args.prompts).read_bytes()
    text = data.decode("utf-8-sig", "surrogateescape")  # a byte that is no UTF-8: its line's error
    lines = enumerate((line.strip() for line in text.split("\n")), 1)
    jobs = [read_job(line, number, args.raw, args.system) for number, line in lines if line]
    if not jobs:
        raise ValueError(f"--prompts {args.prompts}: no line in it has a prompt")
    return jobs


def _prompts(engine: Engine, jobs: list[Job], fields, template: dict, args, say: Say) -> int:
    """A file of prompts: a JSON line for each as it ends, a bar meanwhile, the account after."""

    def write(line: dict):
        say.done()
        print(json.dumps(line), flush=True)

    batch = Batch(engine, jobs, fields, template)
    with Interrupt(batch.stop):
        batch.run(write, say.batch)
    say("\n" + batch.summary())
    return 130 if batch.stopped else 1 if batch.failed else 0


def _show(stream: TextStream, out) -> Output:
    """Print an answer as it comes; Ctrl-C ends it and keeps what was printed."""
    with Interrupt(lambda: stream.engine.abort(stream.request)):
        for piece in stream:
            if out is not None:
                print(piece, end="", file=out, flush=True)
    if out is not None:
        print(file=out, flush=True)
    return stream.output


class Interrupt:
    """Turns the first Ctrl-C into an action; a second one is obeyed as ever."""

    def __init__(self, action):
        self.action = action

    def __enter__(self):
        self.before = signal.signal(signal.SIGINT, self._first)

    def _first(self, number, frame):
        signal.signal(signal.SIGINT, self.before)
        self.action()

    def __exit__(self, *exception):
        signal.signal(signal.SIGINT, self.before)


def _chat(engine: Engine, params, template, args, say: Say) -> int:
    """A conversation on a terminal: Ctrl-C ends an answer, Ctrl-D the chat."""
    try:
        import readline  # noqa: F401  arrow keys and history in input()
    except ImportError:
        pass  # not on Windows
    messages = _messages(args.system, "")[:-1]
    say(f"{engine.name}: type a message, Ctrl-C stops an answer, Ctrl-D ends")
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            stream = engine.stream(messages, params, template)
        except ValueError as error:
            print(f"{error}", file=sys.stderr)
            messages.pop()
            continue
        output = _show(stream, sys.stdout)
        messages.append({"role": "assistant", "content": output.text})
        say("\n" + summary(engine, output) + "\n")
        if args.trace:
            print(trace(stream.request, engine.load_s), file=sys.stderr)


# ---------------------------------------------------------------- the experiment


def byte_checkpoint(letters: bytes = bytes(range(256)), seed: int = 0) -> models.Checkpoint:
    """A tiny random model over bytes: an id for each of `letters`, one more ends a text."""
    checkpoint = models.random(models.tiny(vocab=len(letters) + 1), seed)
    checkpoint.tokenizer = byte_tokenizer(letters)
    checkpoint.name = "a tiny random model"
    return checkpoint


def demo() -> str:
    """A tiny random model, a line a step: what was planned, computed, sampled and released."""
    printable = byte_checkpoint(bytes(range(32, 127)))
    engine = Engine(
        printable, device="cpu", dtype="float32", budget=8, max_running=3, max_len=32,
        kv_memory=8 * 2048, block_size=8,
    )  # fmt: skip
    engine.add("Octavo reads", SamplingParams(max_tokens=6, temperature=0))
    engine.add("two", SamplingParams(max_tokens=4, seed=1, n=2, top_p=0.9))
    engine.add("Octavo reads on", SamplingParams(max_tokens=3, temperature=0))
    engine.add("sure?", SamplingParams(seed=2, regex="(yes|no), [1-9]0% sure"))
    lines = [
        "A: prompt of 12, temperature 0, 6 tokens.  B: prompt of 3, top_p 0.9, 2 samples of 4.",
        "C: prompt of 15, it begins like A, 3 tokens. At most 8 tokens a step and 3 requests;",
        "a cache of 7 blocks of 8 tokens. D: prompt of 5, then yes or no, and how sure it is.",
        "",
        f"{'plan':<36}{'held':>6}  sample -> released",
    ]

    def name(r: Request) -> str:
        return "ABCD"[r.id] + (str(r.index + 1) if r.params.n > 1 else "")

    records: list[StepRecord] = []
    engine.watch = records.append
    while engine.scheduler.busy:
        events = engine.step()
        engine.check()
        planned = []
        for r, start, n in records[-1].parts:
            rows = f"{start}..{start + n - 1}" if n > 1 else f"{start}"
            found = f" ({start} found)" if r.reused and start == r.reused else ""
            planned.append(f"{name(r)} {rows}{found}")
        known = {r for r, _, _ in records[-1].parts}
        planned += [f"{name(e.request)} forks" for e in events if e.request not in known]
        drawn = [
            f"{name(e.request)} {e.token_ids[0]} {e.text!r}{' ' + (e.finish_reason or '')}".rstrip()
            for e in events
            if e.token_ids
        ]
        held = engine.manager.held
        lines.append(f"{', '.join(planned):<36}{held:>6}  {', '.join(drawn)}".rstrip())
    lines += [
        "",
        "plan: positions that go through the model. held: blocks in use after the step. B's prompt",
        "is computed once and its last row sampled twice; then B2 has its own copy of the block.",
        "C waits for a place, and finds the block that A has filled with its first 8 tokens.",
        "D follows a grammar: what must come after its first letter is not sampled, and is computed",
        "in one step.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
