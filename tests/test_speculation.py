"""speculative.py in the engine: guesses change how long a text takes, and nothing else."""

import random
from pathlib import Path

import pytest

import model
from generate import Engine, SamplingParams
import speculative
from speculative import Draft, Drafter

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


# ---------------------------------------------------------------- another model guesses


def drafting(data: model.Checkpoint, **settings) -> Engine:
    """An engine whose drafter is a second copy of its own model."""
    base = {"device": "cpu", "dtype": "float32", "block_size": 8, "kv_memory": 2**22}
    engine = Engine(data, **base | settings, speculative=twin(data), spec_tokens=5)
    return engine


def twin(data: model.Checkpoint) -> speculative.DraftModel:
    target = model.Model(data.config, data.tensors)
    return speculative.DraftModel(target, target)


def asked(vocab: int, count: int = 6) -> list:
    """Work of which every guess of a model that thinks alike is right: nothing ends early."""
    draw = random.Random(3)
    shared = [draw.randrange(3, vocab) for _ in range(20)]
    work = []
    for i in range(count):
        prompt = shared * (i % 2) + [draw.randrange(3, vocab) for _ in range(draw.randrange(1, 30))]
        params = {"temperature": 0.8 * (i % 3 > 0), "seed": i, "max_tokens": draw.randrange(4, 30)}
        if i % 3 == 2:
            params |= {"top_k": 20, "presence_penalty": 0.5, "repetition_penalty": 1.1}
        work.append((prompt, SamplingParams(ignore_eos=True, n=1 + (i == 3), **params)))
    return work


@pytest.mark.parametrize("rule", ["sample", "reject"])
@pytest.mark.parametrize("family", KINDS)
def test_a_model_that_drafts_for_itself_is_always_right(family, rule):
    data = checkpoint(family)
    work = asked(data.config.vocab)
    engine = drafting(data, verify=rule, max_running=4, budget=24)
    texts = served(engine, work)
    tally = engine.speculation.tally
    assert tally.accepted == tally.guesses > 60
    assert tally.a_round > 2
    if rule == "sample":
        base = {"device": "cpu", "dtype": "float32", "block_size": 8, "kv_memory": 2**22}
        assert texts == served(Engine(data, **base), work)
