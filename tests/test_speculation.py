"""speculative.py in the engine: guesses change how long a text takes, and nothing else."""

import json
import random
import shutil
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


def plainly(data: model.Checkpoint, **settings) -> Engine:
    base = {"device": "cpu", "dtype": "float32", "block_size": 8, "kv_memory": 2**22}
    return Engine(data, **base | settings)


def twin(data: model.Checkpoint, **settings) -> Engine:
    """An engine whose model drafts for itself: whatever is asked, each guess is right."""
    own = model.Model(data.config, data.tensors)
    drafter = speculative.DraftModel(own, own)
    return plainly(data, **{"speculative": drafter, "spec_tokens": 5} | settings)


def asked(vocab: int, count: int = 6, most: int = 30) -> list:
    """Work without an early end; every other prompt begins alike."""
    draw = random.Random(3)
    shared = [draw.randrange(3, vocab) for _ in range(20)]
    work = []
    for i in range(count):
        prompt = shared * (i % 2) + [draw.randrange(3, vocab) for _ in range(draw.randrange(1, 30))]
        params = {
            "temperature": 0.8 * (i % 3 > 0),
            "seed": i,
            "max_tokens": draw.randrange(4, most),
        }
        if i % 3 == 2:
            params |= {"top_k": 20, "presence_penalty": 0.5, "repetition_penalty": 1.1}
        work.append((prompt, SamplingParams(ignore_eos=True, n=1 + (i == 3), **params)))
    return work


QUICK = [("qwen3", "sample"), ("qwen3_5_text", "reject"), ("deepseek_v32", "sample")]
SLOW = [(family, rule) for family in KINDS for rule in speculative.RULES]


@pytest.mark.parametrize(
    "family, rule",
    QUICK + [pytest.param(*x, marks=pytest.mark.slow) for x in SLOW if x not in QUICK],
)
def test_a_model_that_drafts_for_itself_is_always_right(family, rule):
    """With prompts in parts, shared prefixes, several samples; who joins and leaves."""
    data = checkpoint(family)
    work = asked(data.config.vocab, 4)
    engine = twin(data, verify=rule, max_running=4, budget=24)
    texts = served(engine, work)
    tally = engine.speculation.tally
    assert tally.accepted == tally.guesses > 40
    assert tally.a_round > 2
    if rule == "sample":
        assert texts == served(plainly(data), work)
    assert not engine.speculation.drafter.held
    assert engine.speculation.drafter.slots.held == 0


class TwoSlots(speculative.DraftModel):
    """Has room for two requests, whatever the memory."""

    def slot_bytes(self, max_len):
        return 0

    def open(self, slots, max_len):
        super().open(2, max_len)


@pytest.mark.parametrize(
    "family, kv_memory",
    [pytest.param("qwen3", 74_000, marks=pytest.mark.slow), ("qwen3_5_text", 56_000)],
)
def test_it_goes_on_after_preemption_and_without_a_slot_for_everyone(family, kv_memory):
    data = checkpoint(family)
    own, work = model.Model(data.config, data.tensors), asked(data.config.vocab, most=40)
    engine = plainly(
        data, speculative=TwoSlots(own, own), spec_tokens=5, kv_memory=kv_memory, max_running=4,
        budget=24, max_len=96,
    )  # fmt: skip
    drafter = engine.speculation.drafter
    preempted = without = 0

    def look(record):
        nonlocal preempted, without
        preempted += len(record.preempted)
        without += len(engine.scheduler.running) - len(drafter.held)
        assert drafter.held.keys() <= set(engine.scheduler.running)

    engine.watch = look
    assert served(engine, work) == served(plainly(data), work)
    tally = engine.speculation.tally
    assert preempted > 0 and without > 0
    assert tally.accepted == tally.guesses > 30


def test_a_draft_model_is_named_by_its_path():
    data, lines = checkpoint("qwen3"), []
    name = f"draft:{GOLDEN / 'qwen3'}"
    engine = plainly(data, speculative=name, spec_tokens=3, say=lines.append)
    work = asked(data.config.vocab, 3)
    assert served(engine, work) == served(plainly(data), work)
    tally = engine.speculation.tally
    assert tally.accepted == tally.guesses > 0
    [own] = [line for line in lines if "draft's own" in line]
    slots, each = len(engine.speculation.drafter.slots.free), 2**22 // 2
    assert own.startswith(f"cache: {slots} requests of draft's own, ")
    bytes_each = engine.speculation.drafter.slot_bytes(engine.config.positions)
    assert slots == each // bytes_each
    assert engine.speculation.drafter.cache.nbytes == slots * bytes_each


def test_another_model_guesses_and_the_text_is_the_targets():
    """One that thinks otherwise, of a smaller vocabulary, with states where the target has none."""
    data, other = checkpoint("qwen3"), checkpoint("qwen3_5_text")
    work = asked(data.config.vocab, 3)
    drafter = speculative.DraftModel(
        model.Model(data.config, data.tensors), model.Model(other.config, other.tensors)
    )
    engine = plainly(data, speculative=drafter, spec_tokens=4, budget=24)
    assert served(engine, work) == served(plainly(data), work)
    assert engine.speculation.tally.guesses > 40


def test_what_cannot_be_a_draft_model_is_refused_in_a_sentence(tmp_path):
    def refusal(name, **settings):
        with pytest.raises(ValueError) as refused:
            plainly(checkpoint("qwen3"), speculative=f"draft:{name}", **settings)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    assert "no such file or folder" in refusal("nobody/knows/it")
    folder = tmp_path / "changed"
    shutil.copytree(GOLDEN / "qwen3", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 90}))
    assert refusal(folder) == (
        f"speculative draft:{folder}: its vocabulary has 90 ids, that of qwen3 96"
    )
    (folder / "config.json").write_text(json.dumps(config))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert refusal(folder).startswith(f"speculative draft:{folder}: ")
    message = refusal(GOLDEN / "qwen3", kv_memory=40_000)
    assert message.startswith("kv_memory 40,000 bytes: draft needs ")


@pytest.mark.parametrize("settings", [{"spec_tokens": 6}, {"verify": "reject"}])
def test_n_grams_of_prompts_that_repeat_and_of_others(settings):
    data, draw = checkpoint("qwen3"), random.Random(1)
    work = []
    for i in range(4):
        prompt = [draw.randrange(3, 96) for _ in range(4)] * (1 + 3 * (i % 2))
        params = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True, n=1 + (i == 1))
        work.append((prompt, params))
    engine = plainly(data, speculative="ngram", budget=24, max_running=4, **settings)
    assert served(engine, work) == served(plainly(data), work)
    assert not engine.speculation.drafter.known
    if "spec_tokens" in settings:
        assert engine.speculation.tally.accepted > 5
