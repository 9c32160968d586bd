"""speculative.py in the engine: guesses change how long a text takes, and nothing else."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import model
import speculative
from generate import Engine, SamplingParams, byte_checkpoint
from kv_cache import LayerSpec
from speculative import Draft, Drafter
from tiny import with_head

GOLDEN = Path(__file__).parent / "golden"
KINDS = ["qwen3", "qwen2_sliding", "qwen3_5_text", "deepseek_v3", "deepseek_v32", "gemma3"]


class Oracle(Drafter):
    """Knows what will come (`answers`: prompt -> all tokens), and says some of it wrong."""

    name, most = "oracle", 6

    def __init__(self, answers: dict, how: str, vocab: int):
        self.answers, self.how, self.vocab = answers, how, vocab
        self.draw = random.Random(7)

    def propose(self, requests, counts, rows):
        return [Draft(self._guesses(r, n)) for r, n in zip(requests, counts)]

    def _guesses(self, request, n):
        known = self.answers[tuple(request.tokens[: request.prompt_tokens]), request.index]
        ids = known[len(request.tokens) :][:n]
        if self.how == "wrong":
            ids = [(i + 1) % self.vocab for i in ids]
        if self.how == "alternating":
            ids = [(i + j % 2) % self.vocab for j, i in enumerate(ids)]
        if self.how == "random":
            ids = ids[: self.draw.randrange(n + 1)]
            ids = [i if self.draw.random() < 0.7 else self.draw.randrange(self.vocab) for i in ids]
        return ids


def checkpoint(family: str) -> model.Checkpoint:
    return model.load(GOLDEN / family)


def served(engine: Engine, work) -> list:
    """Tokens, reasons and logprobs of each request, every invariant checked at every step."""
    requests = [engine.add(prompt, params) for prompt, params in work]
    while engine.scheduler.busy:
        engine.step()
        engine.check()
    assert engine.manager.held == 0
    members = [one for r in requests for one in r.family]
    return [(one.prompt_tokens, one.index, one.tokens, one.finish_reason) for one in members]


def workload(vocab: int, seed: int = 0, count: int = 5) -> list:
    draw = random.Random(seed)
    work = []
    for i in range(count):
        prompt = [draw.randrange(3, vocab) for _ in range(draw.randrange(1, 30))]
        params = {"temperature": 0.8 * (i % 2), "seed": i, "max_tokens": draw.randrange(1, 30)}
        if i % 3 == 2:
            params |= {"top_k": 20, "presence_penalty": 0.5, "repetition_penalty": 1.1}
        work.append((prompt, SamplingParams(ignore_eos=True, n=1 + (i == 3), **params)))
    return work


@pytest.mark.parametrize("how", ["right", "wrong", "alternating", "random"])
@pytest.mark.parametrize("family", KINDS)
def test_guesses_change_nothing_that_comes_out(family, how):
    data = checkpoint(family)
    work = workload(data.config.vocab)
    base = {"device": "cpu", "dtype": "float32", "block_size": 8, "kv_memory": 2**22}
    plain = served(Engine(data, **base), work)
    answers = {(tuple(tokens[:n]), index): tokens for n, index, tokens, _ in plain}
    oracle = Oracle(answers, how, data.config.vocab)
    engine = Engine(data, **base, speculative=oracle, spec_tokens=6)
    assert served(engine, work) == plain
    tally = engine.speculation.tally
    if how == "right":
        assert tally.accepted == tally.guesses > 0
    if how == "wrong":
        assert tally.accepted == 0 < tally.guesses


# ---------------------------------------------------------------- guesses from what was computed

BASE = {"device": "cpu", "dtype": "float32", "block_size": 8}


def aware(engine: Engine, work, each=lambda step, requests: None) -> list:
    """`served`, and each slot of the drafter's cache belongs to one running request or to none."""
    drafter, steps = engine.speculation.drafter, 0
    requests = [engine.add(prompt, params) for prompt, params in work]
    while engine.scheduler.busy:
        each(steps, requests)
        engine.step()
        engine.check()
        drafter.slots.check(list(drafter.held.values()))
        assert drafter.held.keys() <= set(engine.scheduler.running)
        for request, held in drafter.held.items():
            assert held.seen == request.computed
            assert held.pending == sum(len(part[0]) for part in held.features)
        steps += 1
    assert engine.manager.held == drafter.slots.held == 0 and not drafter.held
    members = [one for r in requests for one in r.family]
    return [(one.prompt_tokens, one.index, one.tokens, one.finish_reason) for one in members]


def slow_but(one: str, families: list[str]) -> list:
    """One of them by default, the others among the slow tests."""
    slow = [pytest.param(x, marks=pytest.mark.slow) for x in families if x != one]
    return [one, *slow]


class Chain(speculative.Chained):
    """The least that goes on by itself: attention without any weight, over the target's own."""

    name, hidden, most, CHUNK = "chain", True, 4, 5

    def __init__(self, target: model.Model):
        super().__init__(target, (LayerSpec("full", 1, 8),))

    def fuse(self, features):
        return features[0]

    def run(self, features, tokens, step):
        x = features + self.target.embedding[tokens]
        few = x[:, None, :8]
        x = torch.cat((few[:, 0] + step.attend(0, few, few, few)[:, 0], x[:, 8:]), 1)
        return x, x

    def score(self, x):
        return self.target.logits(x)


@pytest.mark.parametrize("family", slow_but("gemma3", KINDS))
def test_any_chain_of_guesses_changes_nothing(family):
    data = checkpoint(family)
    work = workload(data.config.vocab, count=8)
    target = Engine(data, **BASE, kv_memory=2**22)
    plain = served(target, work)
    chain = Chain(target.model)
    engine = Engine(data, **BASE, kv_memory=2**22, speculative=chain, spec_tokens=4, budget=9)
    assert aware(engine, work) == plain
    assert 0 < engine.speculation.tally.accepted < engine.speculation.tally.guesses


# ---------------------------------------------------------------- the checkpoint's own head

HEADED = ["deepseek_v3", "deepseek_v32", "deepseek_v3_yarn", "qwen3_next", "qwen3_5_text"]


@pytest.mark.parametrize("family", slow_but("qwen3_next", HEADED))
def test_a_head_changes_nothing_that_comes_out(family):
    data = with_head(checkpoint(family))
    work = workload(data.config.vocab, count=4)
    plain = served(Engine(data, **BASE, kv_memory=2**22), work)
    engine = Engine(data, **BASE, kv_memory=2**22, speculative="mtp", spec_tokens=3, budget=40)
    assert aware(engine, work) == plain
    assert engine.speculation.tally.guesses > 30
    assert aware(engine, work) == plain  # their prompts are cached now: the head begins after them
    assert engine.counts.reused_tokens > 0


# so that the drafter has fewer slots than there are requests; where no states are, blocks lack too
LITTLE = {"deepseek_v3": 60_000, "deepseek_v32": 60_000, "deepseek_v3_yarn": 40_000}
LITTLE |= {"qwen3_next": 250_000, "qwen3_5_text": 130_000}


@pytest.mark.parametrize("family", slow_but("deepseek_v3", HEADED))
def test_a_head_in_little_memory_changes_nothing(family):
    data = with_head(checkpoint(family))
    work = workload(data.config.vocab, seed=1, count=6)
    plain = served(Engine(data, **BASE, kv_memory=2**22), work)
    memory = {"kv_memory": LITTLE[family], "max_running": 4, "max_len": 64, "budget": 9}
    engine = Engine(data, **BASE, **memory, speculative="mtp", spec_tokens=3)
    assert engine.speculation.drafter.slots.total < engine.scheduler.max_running
    preempted = []

    def preempt(step, requests):
        for request in engine.scheduler.running[::-1][: 2 * (step % 4 == 3)]:
            engine.scheduler._preempt(request)
            preempted.append(request)

    assert aware(engine, work, preempt) == plain
    assert len(preempted) > 10 and engine.speculation.tally.guesses > 20
    assert engine.counts.preemptions > 0 or "qwen" in family


def test_a_head_after_aborted_requests_leaks_nothing():
    data = with_head(checkpoint("deepseek_v3"))
    work = [one for one in workload(data.config.vocab, seed=2, count=9) if one[1].n == 1]
    plain = served(Engine(data, **BASE, kv_memory=2**22), work)
    engine = Engine(
        data, **BASE, kv_memory=2**22, max_running=3, budget=9, speculative="mtp", spec_tokens=3
    )
    draw, gone = random.Random(4), set()

    def abort(step, requests):
        if step % 5 == 4:
            gone.add(draw.choice(requests))
            for request in gone:
                engine.abort(request)

    came = aware(engine, work, abort)
    assert len(gone) > 3
    ended = [(a, b) for a, b in zip(came, plain) if a[3] != "abort"]
    assert len(ended) > 2 and all(a == b for a, b in ended)
    assert all(b[2][: len(a[2])] == a[2] for a, b in zip(came, plain))


def test_a_head_where_a_grammar_leaves_no_choice_changes_nothing():
    """Forced tokens come several at a time: the head waits until the target has computed them."""
    text = byte_checkpoint()
    raw = json.loads((GOLDEN / "deepseek_v3" / "config.json").read_text())
    config = model.Config.from_hf(raw | {"vocab_size": text.config.vocab})
    data = replace(with_head(model.random(config, 0)), tokenizer=text.tokenizer)
    form = {"regex": r"\{name: [a-z]{1,6}, age: (\d{1,3}|none)\}", "max_tokens": 40}
    seeded = {"temperature": 1.0, "seed": 3}
    work = [([5, 6], form | {"temperature": 0.0}), ([7], form | seeded), ([8] * 20, form | seeded)]
    work.append(([9, 9], seeded | {"max_tokens": 20}))
    work = [(prompt, SamplingParams(**params)) for prompt, params in work]
    plain = served(Engine(data, **BASE, kv_memory=2**22), work)
    engine = Engine(data, **BASE, kv_memory=2**22, speculative="mtp", spec_tokens=3, budget=9)
    forced = []

    def note(step, requests):
        running = engine.scheduler.running
        forced.extend(r.missing for r in running if r.output and r.missing > 1)

    assert aware(engine, work, note) == plain
    assert len(forced) > 5 and engine.speculation.tally.guesses > 20


# A model whose next token depends on the last one alone, and a head that knows it: of what it
# hears of token i and of token i + 1 it believes one a little more.


def cyclic(believed: str) -> model.Checkpoint:
    raw = json.loads((GOLDEN / "qwen3_5_text" / "config.json").read_text())
    config = model.Config.from_hf(raw | {"vocab_size": 32, "tie_word_embeddings": False})
    data = with_head(model.random(config, 0))
    after = torch.randperm(32, generator=torch.Generator().manual_seed(3))
    cycle = dict(zip(after.tolist(), after.roll(-1).tolist()))  # one of all 32
    follow = torch.zeros(32, 32)
    for token, follower in cycle.items():
        follow[follower, token] = 1
    tensors = data.tensors
    for name in tensors:
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros_like(tensors[name])  # x is the embedding, up to the end
        if name.endswith("norm.weight") or "pre_fc_norm" in name:
            tensors[name] = torch.zeros_like(tensors[name])  # times 1
    tensors["model.embed_tokens.weight"] = torch.eye(32)
    tensors["lm_head.weight"] = 2 * follow
    share = {"token": 0.6, "hidden": 0.4}[believed]
    tensors["mtp.fc.weight"] = torch.cat((share * torch.eye(32), (1 - share) * follow), 1)
    return data


class Late(speculative.MTP):
    """Off by one: it is told of position i what the target computed at i - 1."""

    def open(self, slots, max_len):
        super().open(slots, max_len)
        self.last: dict = {}

    def learn(self, request, start, features):
        before = self.last.get(request, torch.zeros(1, 32))
        self.last[request] = features[0][-1:]
        super().learn(request, start, [torch.cat((before, features[0]))[:-1]])


class Early(speculative.MTP):
    """Off by one: with position i it sees token i."""

    def _catch_up(self, requests, leave=0):
        for request in requests:
            request.tokens.insert(0, 0)
        try:
            return super()._catch_up(requests, leave)
        finally:
            for request in requests:
                del request.tokens[0]


GOOD = [(speculative.MTP, "token"), (speculative.MTP, "hidden"), (Late, "token")]  # or unharmed
OFF = [(Late, "hidden"), (Early, "token")]


@pytest.mark.parametrize(("kind", "believed"), GOOD + OFF)
def test_a_good_head_is_right_and_one_that_is_off_by_one_is_not(monkeypatch, kind, believed):
    monkeypatch.setattr(speculative, "MTP", kind)
    engine = Engine(cyclic(believed), **BASE, kv_memory=2**22, speculative="mtp", spec_tokens=3)
    params = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 1}, {"temperature": 0.0}]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, **own) for own in params]
    prompts = [[5], [1, 2, 3], [9, 30, 7, 7, 21, 2, 8, 0, 1, 4]]
    aware(engine, list(zip(prompts, params)))
    tally = engine.speculation.tally
    assert tally.guesses > 80
    rate = tally.accepted / tally.guesses
    assert rate < 0.02 if (kind, believed) in OFF else rate > 0.98, rate
