"""generate.py: the engine, the stream, and the command line, on a tiny model over bytes.

The tokenizer and the chat template have test_tokenizer.py.
"""

import asyncio
import codecs
import dataclasses
import fcntl
import functools
import gc
import io
import itertools
import json
import math
import os
import pty
import random
import re
import select
import signal
import statistics
import subprocess
import sys
import termios
import threading
import time
import warnings
import weakref
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import generate
import grammar
import kv_cache
import model as models
import paged
import tiny
from generate import Engine, SamplingParams, Stream
from sample import Row, mix, sample, sample_seed
from scheduler import Scheduler

ROOT = Path(__file__).parent.parent
END = 256  # the tiny model's end of text

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    """The bandwidth is measured once for all of this file, and not into the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "CACHE", tmp_path_factory.mktemp("cache"))
        yield


# ---------------------------------------------------------------- helpers

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    "{% if loud %}LOUD {% endif %}{% if add_generation_prompt %}a:{% endif %}"
)


@functools.cache
def checkpoint():
    whole = generate.byte_checkpoint()
    whole.template = TEMPLATE
    return whole


def build(**settings) -> Engine:
    defaults = {"device": "cpu", "dtype": "float32", "max_len": 64, "max_running": 4}
    defaults["kv_memory"] = 2**20
    engine = Engine(checkpoint(), **defaults | settings)
    tiny.poisoned(engine.cache)  # what is read without having been written shows
    return engine


def greedy(tokens=8, **settings) -> SamplingParams:
    return SamplingParams(**{"max_tokens": tokens, "temperature": 0, "ignore_eos": True} | settings)


def check_idle(engine: Engine):
    """Nothing waits, nothing runs, every block is free or cached, nothing is doomed."""
    engine.check()
    assert not engine.scheduler.busy
    assert engine.manager.held == 0
    assert not engine.doomed


def run(engine: Engine) -> list:
    """Step to the end with `check` after every step: all events."""
    events = []
    while engine.scheduler.busy:
        events += engine.step()
        engine.check()
    return events


@torch.inference_mode()
def reference(engine: Engine, prompt, params: SamplingParams, seed: int = 0) -> list[int]:
    """The ids of an answer without any cache: the whole sequence in one pass for each token."""
    tokens, params = list(prompt), params.with_defaults({})
    guide = engine._guide(params, {})
    while len(tokens) < len(prompt) + params.max_tokens:
        n = len(tokens)
        cache = kv_cache.ContiguousCache(engine.config.specs, 1, n)
        step = cache.prepare([(tiny.request(tokens), n)])
        hidden, _ = engine.model(step.tokens, step.positions, step)
        mask = guide.mask() if guide is not None else None
        row = Row(params, seed, len(tokens), tokens, mask, prompt_tokens=len(prompt))
        ids, *_ = sample(engine.model.logits(hidden[step.sample_rows]), [row])
        tokens = tokens + ids
        if ids[0] == END and (guide is not None or not params.ignore_eos):
            break
        if guide is not None and (not guide.accept(ids[0]) or guide.finished):
            break
    return tokens[len(prompt) :]


class Around:
    """A model with something done before every forward pass."""

    def __init__(self, inner, before):
        self.inner, self.before, self.passes = inner, before, 0

    def __call__(self, *args, **kwargs):
        self.passes += 1
        self.before(self.passes)
        return self.inner(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def slowed(engine: Engine, seconds: float):
    engine.model = Around(engine.model, lambda number: time.sleep(seconds))


def failing(engine: Engine, number: int, error: BaseException):
    """Make forward pass `number` raise."""

    def before(now):
        if now == number:
            raise error

    engine.model = Around(engine.model, before)


def failing_for(engine: Engine, number: int, length: int, error: Exception):
    """Make every forward pass raise that has request `number` in it with `length` tokens known."""
    prepare = engine.cache.prepare

    def refuse(plan):
        if any(request.id == number and len(request.tokens) >= length for request, _ in plan):
            raise error
        return prepare(plan)

    engine.cache.prepare = refuse


# ---------------------------------------------------------------- the stream, by hand


def release(tokens: list[bytes | None], stops=(), stop_ids=(), room=10**6):
    """Feed tokens one by one: the pieces, the ids kept and the reason."""
    stream = Stream(list(tokens), set(stop_ids), tuple(stops), room)
    pieces, kept = [], []
    for i in range(len(tokens)):
        ids, finish = stream.cut([i])
        kept += ids
        pieces.append(stream.take(final=finish is not None))
        if finish:
            return pieces, kept, finish, stream.stop_reason
    pieces.append(stream.take(final=True))
    return pieces, kept, None, None


def test_text_waits_while_it_may_begin_a_stop_string():
    pieces, kept, finish, reason = release([b"a", b"EN", b"T", b"END", b"b"], ["END"])
    assert pieces == ["a", "", "ENT", ""]
    assert (kept, finish, reason) == ([0, 1, 2, 3], "stop", "END")


def test_a_character_waits_for_its_last_byte():
    assert release([b"\xe2", b"\x82", b"\xac!"])[0] == ["", "", "€!", ""]


def test_a_byte_that_cannot_go_on_is_replaced_at_once():
    assert release([b"a\xe2", b"b"])[0] == ["a", "\ufffdb", ""]


def test_a_character_that_never_completes_becomes_one_replacement():
    assert release([b"a\xf0\x9f", b"\x99"])[0] == ["a", "", "\ufffd"]


def test_of_stop_strings_the_first_to_complete_cuts():
    pieces, _, _, reason = release([b"xabcd"], ["abcd", "bc"])
    assert ("".join(pieces), reason) == ("xa", "bc")


def test_of_stop_strings_that_complete_together_the_longest_cuts():
    pieces, _, _, reason = release([b"xabc"], ["c", "abc", "bc"])
    assert ("".join(pieces), reason) == ("x", "abc")


def test_a_stop_string_across_tokens_and_characters():
    pieces, kept, _, _ = release([b"so\xe2", b"\x82", b"\xac", b"\xe2\x82\xac", b"z"], ["o€€"])
    assert ("".join(pieces), kept) == ("s", [0, 1, 2, 3])


def test_a_stop_id_is_kept_as_an_id_and_gives_no_text():
    tokens = [b"a", b"b", b"c"]
    assert release(tokens, stop_ids=[1]) == (["a", ""], [0, 1], "stop", 1)


def test_a_stop_id_ends_a_near_miss_and_an_open_character():
    pieces, _, finish, reason = release([b"aEN\xe2", None], ["END"], stop_ids=[1])
    assert ("".join(pieces), finish, reason) == ("aEN\ufffd", "stop", 1)


def test_max_tokens_ends_with_length_and_counts_ids_without_text():
    tokens = [b"a", None, b"E", b"N"]
    assert release(tokens, ["EN"], room=3) == (["a", "", "E"], [0, 1, 2], "length", None)


def test_a_stop_on_the_last_token_is_a_stop_and_no_length():
    assert release([b"a", b"b"], ["b"], room=2)[2:] == ("stop", "b")
    assert release([b"a", b"b"], stop_ids=[1], room=2)[2:] == ("stop", 1)


def test_a_replaced_tail_may_complete_a_stop_string():
    pieces, _, finish, reason = release([b"a", b"E\xe2"], ["E\ufffd"], room=2)
    assert ("".join(pieces), finish, reason) == ("a", "stop", "E\ufffd")


def test_ids_after_an_end_are_dropped():
    stream = Stream([b"a", b"END", b"z"], {2}, ("END",), 9)
    assert stream.cut([0, 1, 0, 2]) == ([0, 1], "stop")
    assert (stream.take(final=True), stream.count) == ("a", 2)


# ---------------------------------------------------------------- the stream, by property

CHARACTERS = ["a", "a", "b", "b", "ab", "é", "€", "🙂"]
BROKEN = [b"\x80", b"\xff", b"\xe2\x82", b"\xf0\x9f", b"\xc3", b"\xed\xa0\x80", b"\xc0\xaf"]


def stable(data: bytes) -> str:
    """What no further byte can change."""
    return codecs.utf_8_decode(data, "replace", False)[0]


def first_stop(text: str, stops) -> tuple[int, int, str] | None:
    """(where it completes, where it begins, which): the first to complete, then the longest."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return end, end - len(longest), longest
    return None


def safe(text: str, stops) -> int:
    """How much of a text may be shown: up to the first place where a stop string may begin."""
    starts = range(len(text))
    return next((i for i in starts if any(s.startswith(text[i:]) for s in stops)), len(text))


def a_text(draw: random.Random) -> bytes:
    parts = [draw.choice(CHARACTERS).encode() for _ in range(draw.randint(0, 40))]
    for _ in range(draw.choice([0, 0, 1, 3])):
        parts.insert(draw.randint(0, len(parts)), draw.choice(BROKEN))
    return b"".join(parts) + draw.choice([b"", b"", b"\xe2", b"\xf0\x9f\x99"])


def stops_for(draw: random.Random, data: bytes) -> list[str]:
    """Up to four of 1 to 40 characters: random ones, parts of the text, prefixes of others."""
    text, stops = data.decode("utf-8", "replace"), []
    for _ in range(draw.randint(0, 4)):
        kind = draw.randint(0, 3)
        if kind == 0 and text:
            start = draw.randrange(len(text))
            stops.append(text[start : start + draw.randint(1, 40)])
        elif kind == 1 and stops:
            whole = draw.choice(stops)
            stops.append(whole[: draw.randint(1, len(whole))])
        elif kind == 2 and text:  # a near-miss: the last character differs
            start = draw.randrange(len(text))
            stops.append(text[start : start + draw.randint(1, 39)] + "Z")
        else:
            stops.append("".join(draw.choices(CHARACTERS, k=draw.randint(1, 3))))
    return stops


def split(draw: random.Random, data: bytes) -> list[bytes | None]:
    """Tokens of 1 to 6 bytes, cut anywhere, with tokens that have no bytes between."""
    tokens, at = [], 0
    while at < len(data):
        if draw.random() < 0.1:
            tokens.append(None)
        size = draw.choice([1, 1, 2, 3, 6])
        tokens.append(data[at : at + size])
        at += size
    return tokens


@pytest.mark.parametrize("seed", range(4))
def test_pieces_are_the_decoding_cut_at_the_first_stop_string(seed):
    draw = random.Random(seed)
    for _ in range(300):
        data = a_text(draw)
        stops, tokens = stops_for(draw, data), split(draw, data)
        stream = Stream(tokens, set(), tuple(stops), 10**6)
        shown, seen, finish = "", b"", None
        for i, token in enumerate(tokens):
            seen += token or b""
            ids, finish = stream.cut([i])
            assert ids == [i]
            shown += stream.take(final=finish is not None)
            assert shown == stream.text
            text, case = stable(seen), (seed, data, stops, tokens[: i + 1])
            stop = first_stop(text, stops)
            assert (finish == "stop") == (stop is not None), case
            if finish:
                assert (shown, stream.stop_reason) == (text[: stop[1]], stop[2]), case
                break
            assert shown == text[: safe(text, stops)], case
        if not finish:  # ends by its last token: the same as if that had been max_tokens
            last = Stream(tokens, set(), tuple(stops), max(1, len(tokens)))
            finish = last.cut(list(range(len(tokens))))[1] if tokens else "length"
            text = data.decode("utf-8", "replace")
            stop = first_stop(text, stops)
            assert finish == ("stop" if stop else "length"), (seed, data, stops, tokens)
            cut = text[: stop[1]] if stop else text
            assert last.take(final=True) == cut, (seed, data, stops, tokens)
            assert cut.startswith(shown)


@pytest.mark.parametrize("seed", range(2))
def test_several_ids_in_one_cut_equal_one_by_one(seed):
    draw = random.Random(100 + seed)
    for _ in range(200):
        data = a_text(draw)
        stops, tokens = stops_for(draw, data), split(draw, data)
        stop_ids = {draw.randrange(len(tokens))} if tokens and draw.random() < 0.3 else set()
        room = draw.randint(1, len(tokens) + 5)
        results = []
        for most in (1, 4):
            stream = Stream(tokens, stop_ids, tuple(stops), room)
            text, kept, finish, at = "", [], None, 0
            while at < len(tokens) and not finish:
                size = draw.randint(1, most)
                ids, finish = stream.cut(list(range(at, min(at + size, len(tokens)))))
                kept += ids
                text += stream.take(final=finish is not None)
                at += size
            text += "" if finish else stream.take(final=True)
            results.append((text, kept, finish, stream.stop_reason))
        assert results[0] == results[1], (data, stops, tokens, stop_ids, room)


# ---------------------------------------------------------------- the engine, by hand


def test_a_request_step_by_step():
    engine = build(budget=8)
    expected = reference(engine, b"Octavo reads", greedy(3))
    request = engine.add("Octavo reads", greedy(3))
    assert (request.tokens, request.computed, engine.scheduler.running) == (
        list(b"Octavo reads"), 0, []
    )  # fmt: skip
    (event,) = engine.step()
    assert (event.request, event.token_ids, event.text) == (request, [], "")
    assert (request.computed, event.finish_reason) == (8, None)
    (event,) = engine.step()
    assert (request.computed, event.token_ids) == (12, expected[:1])
    (event,) = engine.step()
    assert (request.computed, event.token_ids) == (13, expected[1:2])
    (event,) = engine.step()
    assert (request.computed, event.token_ids) == (14, expected[2:])
    assert event.finish_reason == request.finish_reason == "length"
    check_idle(engine)
    assert engine.step() == []


def test_prompts_are_text_ids_messages_or_lists_of_these():
    engine = build()
    messages = [{"role": "user", "content": "hi"}]
    rendered = "u:hi\na:"
    (whole,) = engine.generate(rendered, greedy())
    assert engine.generate(messages, greedy())[0].token_ids == whole.token_ids
    assert engine.generate(list(rendered.encode()), greedy())[0].token_ids == whole.token_ids
    mixed = engine.generate([messages, rendered, list(rendered.encode())], greedy())
    assert [output.token_ids for output in mixed] == [whole.token_ids] * 3
    assert [output.token_ids for output in engine.generate([rendered], [greedy()])] == [
        whole.token_ids
    ]
    (loud,) = engine.generate(messages, greedy(), template={"loud": True})
    assert loud.usage["prompt_tokens"] == len("u:hi\nLOUD a:")
    check_idle(engine)


def test_text_gets_the_tokenizers_prefix_once():
    whole = generate.byte_checkpoint()
    whole.tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<end>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {"<end>": {"id": "<end>", "ids": [END], "tokens": ["<end>"]}},
    }
    engine = Engine(whole, device="cpu", dtype="float32", max_len=64, max_running=1)
    assert engine.add("hi").tokens == [END, *b"hi"]
    assert engine.add("<end>hi").tokens == [END, *b"hi"]
    assert engine.add(list(b"hi")).tokens == [*b"hi"]


def test_the_end_of_text_is_an_id_and_no_text():
    engine = build()
    bias = greedy(20, ignore_eos=False, logit_bias={END: 1e4})
    (output,) = engine.generate("hi", bias)
    assert (output.token_ids, output.text) == ([END], "")
    assert (output.finish_reason, output.stop_reason) == ("stop", END)
    assert engine.name_of(END) == "<end>"
    (output,) = engine.generate("hi", greedy(5, logit_bias={END: 1e4}))
    assert (output.token_ids, output.text) == ([END] * 5, "")
    assert (output.finish_reason, output.stop_reason) == ("length", None)


def test_stop_ids_are_the_union_of_all_that_a_checkpoint_says():
    whole = generate.byte_checkpoint()
    whole.config = models.Config(**{**vars(whole.config), "stop_ids": (1, 2)})
    whole.generation = {"eos_token_id": [3, 4]}
    assert Engine(whole, device="cpu", dtype="float32").stop_ids == {1, 2, 3, 4, END}
    whole.generation = {"eos_token_id": 5}
    assert Engine(whole, device="cpu", dtype="float32").stop_ids == {1, 2, 5, END}


def test_a_stop_id_and_a_stop_string_cut_an_answer():
    engine = build()
    (whole,) = engine.generate("hello", greedy(30))
    third = whole.token_ids[2]
    first = whole.token_ids.index(third)
    (output,) = engine.generate("hello", greedy(30, stop_token_ids=[third]))
    assert output.token_ids == whole.token_ids[: first + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", third)
    stop = whole.text[4:6]
    (output,) = engine.generate("hello", greedy(30, stop=stop))
    assert output.text == whole.text[: whole.text.index(stop)]
    assert whole.token_ids[: len(output.token_ids)] == output.token_ids
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_logprobs_are_there_when_asked_for():
    engine = build()
    (plain,) = engine.generate("hi", greedy(5))
    assert plain.logprobs is None
    for count in (0, 3, 1000):
        (output,) = engine.generate("hi", greedy(5, logprobs=count))
        assert output.token_ids == plain.token_ids
        assert [entry.id for entry in output.logprobs] == output.token_ids
        for entry in output.logprobs:
            assert len(entry.top) == min(count, END + 1)
            values = [value for _, value in entry.top]
            assert values == sorted(values, reverse=True) and entry.logprob <= 0
            if count:  # greedy: the drawn id is the best one
                assert entry.top[0] == (entry.id, entry.logprob)
    assert sum(math.exp(value) for value in values) == pytest.approx(1, abs=1e-5)


def test_unset_fields_come_from_the_checkpoint():
    whole = generate.byte_checkpoint()
    whole.generation = {"temperature": 0, "top_k": 7}
    engine = Engine(whole, device="cpu", dtype="float32", max_len=64, max_running=1)
    request = engine.add("hi", SamplingParams(top_k=3))
    assert (request.params.temperature, request.params.top_k) == (0, 3)
    assert engine.add("hi").params.top_k == 7


def test_usage_counts_tokens_and_cache_bytes():
    engine = build()
    (output,) = engine.generate("hello", greedy(6))
    each = kv_cache.bytes_per_token(engine.config.specs, 4)
    assert output.usage == {
        "prompt_tokens": 5, "output_tokens": 6, "cached_tokens": 0, "preemptions": 0,
        "cache_bytes": (5 + 6 - 1) * each,
    }  # fmt: skip


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_timings_add_up(way):
    engine = build(budget=4)
    if way == "stream":
        stream = engine.stream([{"role": "user", "content": "hello"}], greedy(6))
        list(stream)
        t = stream.output.timings
    else:
        t = engine.generate([{"role": "user", "content": "hello"}], greedy(6))[0].timings
    parts = "template_s tokenise_s queue_s prefill_s sample_s detokenise_s".split()
    parts += ["stream_s"] * (way == "stream")
    assert all(t[name] >= 0 for name in parts), t
    assert sum(t[name] for name in parts) == pytest.approx(t["ttft_s"], abs=1e-9)
    assert t["template_s"] > 0 and t["prefill_s"] > 0
    assert t["tpot_mean_s"] * 5 == pytest.approx(t["decode_s"])
    assert 0 < t["tpot_p50_s"] <= t["tpot_p99_s"] <= t["decode_s"]
    assert t["decode_tokens_per_s"] == pytest.approx(5 / t["decode_s"])
    assert t["ttft_s"] + t["decode_s"] <= t["total_s"] + t.get("stream_s", 0) + 1e-3
    assert t["tpot_p99_s"] <= t["tpot_max_s"] <= t["decode_s"]
    assert set(t) == {*parts, "ttft_s", "tpot_mean_s", "tpot_p50_s", "tpot_p99_s", "tpot_max_s",
                      "decode_s", "decode_tokens_per_s", "total_s"}  # fmt: skip


def test_timings_of_what_has_not_happened_are_left_out():
    engine = build()
    request = engine.add("hi", greedy(1))
    assert set(generate.timings(request)) == {"template_s", "tokenise_s"}
    run(engine)
    assert "tpot_mean_s" not in generate.timings(request)


def test_a_stream_is_an_iterator_of_pieces_with_the_output_at_its_end():
    engine = build()
    (whole,) = engine.generate("hello", greedy(20))
    stream = engine.stream("hello", greedy(20))
    assert stream.output is None
    pieces = list(stream)
    assert all(pieces) and len(pieces) > 5
    assert "".join(pieces) == whole.text == stream.output.text
    assert stream.output.token_ids == whole.token_ids
    assert stream.output.finish_reason == "length"
    check_idle(engine)


def test_a_sample_ends_at_max_len():
    engine = build(max_len=16)
    (output,) = engine.generate("hello", greedy(100))
    assert (len(output.token_ids), output.finish_reason) == (11, "length")
    (output,) = engine.generate("x" * 15, greedy(100))
    assert (len(output.token_ids), output.finish_reason) == (1, "length")
    check_idle(engine)


def test_max_len_is_lowered_to_what_memory_holds_and_said():
    each = kv_cache.bytes_per_token(checkpoint().config.specs, 4)
    said = []
    engine = build(max_len=None, kv_memory=4 * each * 16, say=said.append)
    assert engine.max_len == 48 and len(said) == 2  # block 0 is not handed out
    assert "3 blocks of 16" in said[0] and "(kv_memory)" in said[0]
    assert "48" in said[1] and "256" in said[1]
    assert engine.cache.nbytes <= 4 * each * 16
    said.clear()
    assert build(max_len=None, kv_memory=2**30, say=said.append).max_len == 256
    assert len(said) == 1 and "1 GiB" in said[0]


# ---------------------------------------------------------------- against the reference


@pytest.mark.parametrize("budget", [1, 3, 8, 64])
def test_greedy_in_chunks_equals_no_cache_at_all(budget):
    engine = build(budget=budget)
    for prompt in ("x", "Octavo reads a prompt", "né€🙂"):
        (output,) = engine.generate(prompt, greedy(12))
        assert output.token_ids == reference(engine, prompt.encode(), greedy(12))
        assert output.text == bytes(i for i in output.token_ids if i < END).decode(
            "utf-8", "replace"
        )
    check_idle(engine)


@pytest.mark.parametrize("budget", [1, 3, 8, 64])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7, "top_k": 20, "ignore_eos": False},
        {"top_p": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {65: 2.0}},
    ],
)
def test_seeded_in_chunks_equals_no_cache_at_all(settings, budget):
    engine = build(budget=budget)
    params = greedy(12, **{"temperature": 1, "seed": 11} | settings)
    (output,) = engine.generate("Octavo reads", params)
    assert output.token_ids == reference(engine, b"Octavo reads", params, 11)
    check_idle(engine)


@pytest.mark.parametrize("budget", [2, 64])
def test_n_samples_are_n_requests_and_one_prefill(budget):
    engine = build(budget=budget)
    rows = []
    inner = engine.model
    engine.model = Around(inner, lambda number: None)
    prepare = engine.cache.prepare

    def counted(plan):
        step = prepare(plan)
        rows.append(len(step.tokens))
        return step

    engine.cache.prepare = counted
    params = SamplingParams(max_tokens=6, seed=5, n=4, logprobs=1, ignore_eos=True)
    samples = engine.generate("Octavo reads", params)
    # rows: the prompt once, and after each sample's first token five more of each
    assert sum(rows) == len("Octavo reads") + 4 * 5
    assert len({tuple(output.token_ids) for output in samples}) == 4
    for i, output in enumerate(samples):
        one = SamplingParams(max_tokens=6, seed=sample_seed(5, i), logprobs=1, ignore_eos=True)
        (alone,) = engine.generate("Octavo reads", one)
        assert (output.token_ids, output.text) == (alone.token_ids, alone.text)
        assert [x.id for x in output.logprobs] == output.token_ids
        assert output.usage == alone.usage
        assert alone.token_ids == reference(engine, b"Octavo reads", one, sample_seed(5, i))
    check_idle(engine)


def test_samples_of_a_prompt_stand_next_to_each_other():
    engine = build()
    params = [
        SamplingParams(max_tokens=4, seed=1, n=3),
        SamplingParams(max_tokens=5, seed=2, ignore_eos=True),
        SamplingParams(max_tokens=3, seed=3, n=2, ignore_eos=True),
    ]
    outputs = engine.generate(["one", "two", "three"], params)
    alone = [engine.generate(p, q) for p, q in zip(["one", "two", "three"], params)]
    expected = [output.token_ids for each in alone for output in each]
    assert [output.token_ids for output in outputs] == expected
    assert [output.usage["prompt_tokens"] for output in outputs] == [3, 3, 3, 3, 5, 5]
    check_idle(engine)


def test_alone_or_in_a_queue_is_the_same():
    engine = build(budget=5)
    prompts = [f"prompt number {i}" for i in range(5)]
    params = [greedy(4 + i, temperature=i % 2, seed=i) for i in range(5)]
    alone = [engine.generate(p, q)[0] for p, q in zip(prompts, params)]
    together = engine.generate(prompts, params)
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert [o.text for o in together] == [o.text for o in alone]


def test_a_seed_belongs_to_its_request():
    engine = build()
    outputs = engine.generate(["hi"] * 4, [greedy(10, temperature=1, seed=s) for s in (1, 2, 1, 0)])
    ids = [output.token_ids for output in outputs]
    assert ids[0] == ids[2] and len({*map(tuple, ids)}) == 3


def test_without_a_seed_the_engines_seed_and_the_number_decide():
    free = greedy(10, temperature=1)
    first, again, other = build(seed=3), build(seed=3), build(seed=4)
    ids = [output.token_ids for output in first.generate(["hi"] * 3, free)]
    assert len({*map(tuple, ids)}) == 3
    assert [again.generate("hi", free)[0].token_ids for _ in range(3)] == ids
    assert other.generate("hi", free)[0].token_ids != ids[0]
    seeded = greedy(10, temperature=1, seed=mix(3, 1))
    assert other.generate("hi", seeded)[0].token_ids == ids[1]


def test_pieces_of_a_stream_equal_the_generated_text():
    engine = build()
    for seed in range(6):
        params = greedy(40, temperature=1, seed=seed, stop=["a", "\ufffd\ufffd", "~1"])
        (whole,) = engine.generate("stream", params)
        stream = engine.stream("stream", params)
        assert "".join(stream) == whole.text == stream.output.text
        decoded = bytes(i for i in whole.token_ids if i < END).decode("utf-8", "replace")
        stop = first_stop(decoded, params.stop)
        assert whole.text == (decoded[: stop[1]] if stop else decoded)
        assert whole.stop_reason == (stop[2] if stop else None)
    check_idle(engine)


def test_astream_gives_the_same_pieces_to_many_tasks():
    engine = build()
    params = [greedy(5 + i, temperature=1, seed=i) for i in range(10)]
    alone = [engine.generate("task", each)[0].text for each in params]

    async def collect(each):
        return "".join([piece async for piece in engine.astream("task", each)])

    async def together():
        return await asyncio.gather(*map(collect, params))

    assert asyncio.run(asyncio.wait_for(together(), 60)) == alone
    check_idle(engine)


def test_several_threads_share_an_engine():
    engine = build(budget=4)
    params = [greedy(6 + i, temperature=1, seed=i) for i in range(8)]
    alone = [engine.generate(f"thread {i}", each)[0].text for i, each in enumerate(params)]
    got: dict[int, str] = {}

    def work(i):
        for _ in range(3):
            if i % 2:
                got[i] = "".join(engine.stream(f"thread {i}", params[i]))
            else:
                got[i] = engine.generate(f"thread {i}", params[i])[0].text

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread waits forever"
    assert [got[i] for i in range(8)] == alone
    check_idle(engine)


def begun(*families: str) -> list[subprocess.Popen]:
    """tests/triton_engine.py, with PyTorch alone and in the interpreter."""
    command = [sys.executable, "tests/triton_engine.py", *families]
    return [
        subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": interpreted}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for interpreted in "01"
    ]  # fmt: skip


def agree(both: list[subprocess.Popen], *families: str):
    """Both give the same lines."""
    found = []
    for process in both:
        lines, errors = process.communicate()
        assert process.returncode == 0, errors
        found.append([json.loads(line) for line in lines.splitlines()])
    assert [line["family"] for line in found[0]] == list(families)
    assert found[0] == found[1]


GOLDEN = sorted(path.parent.name for path in (ROOT / "tests/golden").glob("*/config.json"))
QUICK = ["qwen3_moe"]
ALIKE = [  # what they launch is what others do: other angles, names or lists of layers
    "llama3", "llama_linear", "llama_yarn", "mistral", "qwen2_yarn", "qwen3", "smollm3_listed",
    "deepseek_v3_yarn", "qwen3_5",
]  # fmt: skip
TRITON = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")


@pytest.fixture(scope="module", autouse=True)
def quick(request):
    """Begun with the first test of this file, if the last one is chosen: it has another core."""
    last = "test_in_tritons_interpreter_the_engine_generates_the_same"
    chosen = any(item.name == last for item in request.session.items)
    both = begun(*QUICK) if chosen else []
    yield both
    for process in both:
        process.kill()


@TRITON
@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in GOLDEN if name not in QUICK + ALIKE])
def test_in_tritons_interpreter_every_kind_of_family_generates_the_same(family):
    agree(begun(family), family)


@TRITON
@pytest.mark.slow
def test_in_tritons_interpreter_the_demo_is_the_same():
    result = subprocess.run(
        [sys.executable, "generate.py", "--demo"], cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.stdout == (ROOT / "tests/expected/generate_demo.txt").read_text(), result.stderr


# ---------------------------------------------------------------- every kind of layer

KINDS = [  # a family of each kind, quickly; the others are slow
    "mistral_sliding", "gemma3_old", "qwen3_5", "qwen3_next_odd", "deepseek_v3_yarn",
    "deepseek_v32",
]  # fmt: skip


def room_for(specs, whole: int, block_size=8) -> int:
    """Bytes of cache in which groups that keep all tokens have `whole` blocks or a few more, and
    the others room for a request and a half."""
    for memory in range(2**10, 2**22, 2**10):
        try:
            found, running = paged.rooms(specs, memory, block_size, 16, 4, 4)
        except ValueError:
            continue
        few = [8 if r.state else -(-r.window // block_size) + 3 for r in found]
        if all(r.blocks >= (n if r.state or r.window else whole) for r, n in zip(found, few)):
            return memory
    raise AssertionError("no such room")


def golden(family: str) -> tuple[list[int], list[int]]:
    """A prompt and the reference's answer."""
    expected = load_file(ROOT / "tests/golden" / family / "expected.safetensors")
    return expected["prompt"].tolist(), expected["greedy"].tolist()


def of_golden(family: str, budget: int, kv_memory=2**21, **settings) -> Engine:
    settings = {"max_running": 4, "max_len": 96, "block_size": 8} | settings
    engine = Engine(
        str(ROOT / "tests/golden" / family), device="cpu", dtype="float32", budget=budget,
        kv_memory=kv_memory, **settings,
    )  # fmt: skip
    tiny.poisoned(engine.cache)
    return engine


def every_way(family: str):
    """One prompt of 72 tokens and 16 of the answer: whole, in chunks, crowded, forked, found."""
    prompt, answer = golden(family)
    params, engine = greedy(len(answer)), functools.partial(of_golden, family)

    def served(engine, prompts, params=params, every=10**6):
        requests = [engine.add(ids, params) for ids in prompts]
        while engine.scheduler.busy:
            engine.step()
            if engine.counts.steps % every == every - 1 and engine.scheduler.running:
                engine.scheduler._preempt(engine.scheduler.running[-1])
            engine.check()
        assert engine.manager.held == 0
        return requests

    one = engine(budget=512)
    for reused in (0, 64, 64):  # what the manager can find of 72 tokens: 8 blocks of 8
        (request,) = served(one, [prompt])
        assert request.output == answer and request.reused == reused
    assert served(one, [prompt + answer[:9]], greedy(7))[0].output == answer[9:]
    for budget in (7, 13, 30):
        assert served(engine(budget), [prompt])[0].output == answer
    # Four at once, of which two fit: others of the same beginning, shorter, and two samples.
    specs = list(models.load(ROOT / "tests/golden" / family).config.specs)
    crowd = engine(budget=24, kv_memory=room_for(specs, whole=13), graphs=True)
    prompts = [prompt, prompt + answer[:1], prompt[:50] + prompt[:10], prompt, prompt[:64]]
    first = served(crowd, prompts)
    again = [served(engine(64), [ids])[0].output for ids in prompts]
    assert [request.output for request in first] == again
    assert first[0].output == first[3].output == answer and first[1].output[:15] == answer[1:]
    found = served(crowd, prompts, every=4)  # whoever came last begins anew every 4th step
    assert [request.output for request in found] == again
    both = served(crowd, [prompt], greedy(16, n=2))[0].family
    assert [request.output for request in both] == [answer, answer]
    assert sum(request.preempted for request in found) > 4


@pytest.mark.parametrize("family", GOLDEN)
def test_a_cache_has_the_bytes_that_its_config_says(family, capsys):
    """In bfloat16; `kv_cache` counts index keys as servers keep them, in 8 bits and scales."""
    config = json.loads((ROOT / "tests/golden" / family / "config.json").read_text())
    engine = Engine(
        str(ROOT / "tests/golden" / family), device="cpu", dtype="bfloat16", block_size=8,
        budget=16, max_running=2, max_len=96, kv_memory=2**19,
    )  # fmt: skip
    total = 0
    for spec in kv_cache.layers(config):
        room = engine.manager.pools[engine.cache.groups.index(spec)].room
        each = kv_cache.row_bytes(spec, "bf16") * 8 or kv_cache.state_bytes(spec, number=4)
        each += 8 * (2 * spec.index - kv_cache.eight_bits(spec.index))
        assert each == kv_cache.block_bytes(spec, 8, 2)
        total += (room.blocks + 1) * each
    assert engine.cache.nbytes == total <= 2**19
    kv_cache._main(["--model", str(ROOT / "tests/golden" / family), "--context", "96", "--json"])
    assert json.loads(capsys.readouterr().out)["engine_bytes"] == engine.stored_bytes(96)


@pytest.mark.parametrize("family", KINDS)
def test_a_kind_of_layer_generates_the_references_tokens_in_every_way(family):
    every_way(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in GOLDEN if name not in KINDS])
def test_every_family_generates_the_references_tokens_in_every_way(family):
    every_way(family)


LENGTHY = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8,
           "num_key_value_heads": 1, "vocab_size": 96, "num_hidden_layers": 2,
           "max_position_embeddings": 32_768}  # fmt: skip
WINDOWED = LENGTHY | {"sliding_window": 44}
LINEAR = LENGTHY | {"model_type": "qwen3_5_text", "linear_num_key_heads": 1,
                    "linear_num_value_heads": 2, "linear_conv_kernel_dim": 4,
                    "linear_key_head_dim": 8, "linear_value_head_dim": 8}  # fmt: skip
SLIDING, STATE, FULL = "sliding_attention", "linear_attention", "full_attention"
KEEP_LITTLE = {
    "sliding": WINDOWED | {"model_type": "mistral"},
    "linear": LINEAR | {"layer_types": [STATE, STATE]},
}
KEEP_ALL_TOO = {
    "sliding and full": WINDOWED | {"model_type": "gemma3_text", "layer_types": [SLIDING, FULL]},
    "linear and full": LINEAR | {"layer_types": [STATE, FULL]},
}


def lengthy(config, **settings) -> Engine:
    """A model of 32,768 positions in blocks of 8 tokens, and room for one request."""
    checkpoint = models.random(models.Config.from_hf(config))
    given = {"max_running": 1, "budget": 512, "kv_memory": 2**23, "block_size": 8} | settings
    engine = Engine(checkpoint, device="cpu", dtype="float32", **given)
    tiny.poisoned(engine.cache)
    return engine


class Touched(list):
    """A list that counts its entries that are read."""

    entries = 0

    def __getitem__(self, at):
        self.entries += len(range(*at.indices(len(self)))) if isinstance(at, slice) else 1
        return super().__getitem__(at)

    def __iter__(self):
        self.entries += len(self)
        return super().__iter__()

    def __eq__(self, other):
        self.entries += len(self)
        return super().__eq__(other)


def lines_of(run) -> int:
    """How many lines of Python `run()` executes: the passes through every loop are in it."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # the finalisers of others would count
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def at_length(engine: Engine, prompt: list[int]) -> dict:
    """Of groups that do not grow, in decode steps: how many blocks a request holds, how many
    tokens a row sees, and the entries of tables and tokens that 16 steps read, which fill two
    blocks; and the lines of Python that these execute."""
    few = [group for group, spec in enumerate(engine.cache.groups) if not spec.grows]
    request, prepare = engine.add(prompt, greedy(40)), engine.cache.prepare
    steps = []  # of each group in each step: rows, blocks, what PyTorch reads

    def watched(plan):
        step, ((_, n),) = prepare(plan), plan
        for group in few:
            blocks = sum(map(bool, request.tables[group]))
            steps.append((group, n, blocks, step.views[group].parts[0]))
        return step

    engine.cache.prepare = watched
    while len(request.output) < 17:
        engine.step()
        assert request.finish_reason is None and len(steps) < 100, "chunks are short"
    held, seen = set(), set()
    for group, n, blocks, part in steps:
        window = engine.cache.groups[group].window
        assert blocks <= (-(-window // 8) + 1 + -(-n // 8) if window else 2)
        if n == 1:
            held.add((group, blocks))
            places = part.places if window else part.read
            seen.add(places.stop - places.start if isinstance(places, slice) else len(places))
    engine.cache.prepare = prepare
    request.tokens = Touched(request.tokens)
    request.tables = [Touched(table) for table in request.tables]
    lines = lines_of(lambda: [engine.step() for _ in range(16)])
    touched = [x.entries for x in (request.tokens, *(request.tables[group] for group in few))]
    run(engine)
    return {"held": held, "seen": seen, "touched": touched, "lines": lines}


def the_same_at_any_length(config, more: int = 0):
    """more: lines, for other ways that a step may take."""
    engine = lengthy(config)
    prompt = [i * i % 89 for i in range(20_000)]
    short, long = at_length(engine, prompt[:2_000]), at_length(engine, prompt)
    assert 0 <= long.pop("lines") - short.pop("lines") <= more
    assert all(short["touched"]) and short["held"] and short == long, (short, long)


@pytest.mark.parametrize("kind", KEEP_LITTLE)
def test_a_window_or_a_state_holds_and_costs_the_same_at_2_000_tokens_and_at_20_000(kind):
    the_same_at_any_length(KEEP_LITTLE[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KEEP_ALL_TOO)
def test_beside_layers_that_keep_all_it_costs_the_same_too(kind):
    the_same_at_any_length(KEEP_ALL_TOO[kind], more=100)


@pytest.mark.parametrize("kind", KEEP_LITTLE | KEEP_ALL_TOO)
def test_an_answer_after_3_000_tokens_is_that_of_a_contiguous_cache(kind):
    config = (KEEP_LITTLE | KEEP_ALL_TOO)[kind]
    engine = lengthy(config, budget=300)
    other = contiguous(lengthy(config, budget=300, max_len=3_200))
    turn = [i * i % 89 for i in range(3_000)]
    for found in (0, 3_056):  # of 3,060 tokens
        request, plain = (one.add(turn, greedy(60)) for one in (engine, other))
        run(engine)
        run(other)
        assert request.output == plain.output and request.reused == found
        turn = request.tokens + turn[:30]


# ---------------------------------------------------------------- many requests

SHARED = "Octavo reads a prompt in "  # three blocks of 8 and one token
WORK = [
    ("x", greedy(9)),
    (SHARED + "chunks", greedy(12)),
    (SHARED + "blocks", greedy(12, temperature=1, seed=7)),
    (SHARED, greedy(5, temperature=1, seed=8, n=3)),
    ("né€🙂", greedy(10, temperature=0.8, seed=9, top_p=0.8, repetition_penalty=1.4)),
    (SHARED + "chunks", greedy(9, temperature=1, seed=1, top_p=0.9, presence_penalty=0.6,
                               frequency_penalty=0.3, stop=("a", "\ufffd"))),
    ("two", greedy(20, temperature=1, seed=3, n=2, stop=("e", "\ufffd\ufffd"), ignore_eos=False)),
    ("z" * 32, greedy(1)),
    ("z" * 33, greedy(16, temperature=1, seed=5, ignore_eos=False, logit_bias={END: 3.0})),
    ("z" * 31, greedy(20, frequency_penalty=0.4)),
]  # fmt: skip


def what(output: generate.Output) -> tuple:
    return output.text, output.token_ids, output.finish_reason, output.stop_reason


def by_reference(engine: Engine, prompt: str, params: SamplingParams) -> list[tuple]:
    """What each sample must become: ids without any cache, cut as a stream cuts."""
    stops, outputs = engine._stops_of(params), []
    for index in range(params.n):
        seed = sample_seed(params.seed or 0, index)
        ids = reference(engine, prompt.encode(), params, seed)
        guide = engine._guide(params, {})
        stream = Stream(engine.tokenizer.tokens, stops, params.stop, params.max_tokens, guide)
        ids, finish = stream.cut(ids)
        outputs.append((stream.take(final=True), ids, finish, stream.stop_reason))
    return outputs


@functools.cache
def expected() -> list[tuple]:
    """All samples of WORK."""
    return [output for each in WORK for output in by_reference(build(), *each)]


def serve(engine: Engine, work, between=lambda step: None) -> list[generate.Output]:
    """All at once, with `between` and `check` after every step; each text as it was shown."""
    requests = [engine.add(*each) for each in work]
    shown, steps = {}, 0
    while engine.scheduler.busy:
        for event in engine.step():
            shown[event.request] = shown.get(event.request, "") + event.text
            assert shown[event.request] == event.request.stream.text
        steps += 1
        between(steps)
        engine.check()
        assert steps < 5000, "nothing moves"
    engine.check()  # nobody runs: nothing is held
    samples = [one for request in requests for one in request.family]
    for one in samples:
        assert engine.output(one).text == shown[one]
        forced = engine.output(one).usage.get("forced_tokens", 0)
        assert len(one.token_stamps) + forced == one.stream.count == len(one.output)
        assert one.token_stamps == sorted(one.token_stamps)
    return [engine.output(one) for one in samples]


def served(engine: Engine, work, between=lambda step: None) -> list[tuple]:
    return [what(output) for output in serve(engine, work, between)]


def pool(blocks: int, size: int = 16) -> int:
    """kv_memory for so many blocks; one more is not handed out."""
    return (blocks + 1) * size * kv_cache.bytes_per_token(checkpoint().config.specs, 4)


def contiguous(engine: Engine) -> Engine:
    """The engine over the simpler cache: a slot a request, nothing shared, nothing preempted."""
    budget, slots = engine.scheduler.budget, engine.scheduler.max_running
    engine.cache = kv_cache.ContiguousCache(engine.config.specs, slots, engine.max_len)
    engine.manager = kv_cache.Slots(slots)
    engine.scheduler = Scheduler(engine.manager, budget, slots)
    return engine


def preempt(engine: Engine, most: int = 10**6):
    """What a full pool does, the last in order first."""
    for request in engine.scheduler.running[::-1][:most]:
        engine.scheduler._preempt(request)


@pytest.mark.parametrize("max_running", [4, 16])
@pytest.mark.parametrize("budget", [1, 3, 8, 64])
def test_together_equals_one_by_one_equals_no_cache_at_all(budget, max_running):
    engine = build(budget=budget, max_running=max_running)
    assert served(engine, WORK) == expected()
    alone = build(budget=budget, prefix_cache=False)
    assert [output for each in WORK for output in served(alone, [each])] == expected()


@pytest.mark.parametrize("size", [8, 16, 32, 64])
@pytest.mark.parametrize("budget", [5, 64])
def test_blocks_of_any_size_equal_a_contiguous_cache(size, budget):
    engine = build(budget=budget, block_size=size, max_running=8)
    simple = contiguous(build(budget=budget, max_running=8))
    assert served(engine, WORK) == served(simple, WORK) == expected()
    assert engine.counts.reused_tokens > 0 == simple.counts.reused_tokens or size > 31


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("chunk", [3, 8, 13, 16, 64])
def test_a_prompt_sent_again_computes_its_last_tokens_only(size, chunk):
    """A prompt of whole blocks that is all in the cache left no row to sample from."""
    engine = build(budget=chunk, block_size=size)
    simple = contiguous(build(budget=64))
    for k, more in itertools.product((1, 2), (-1, 0, 1)):
        length = k * size + more
        prompt = bytes([65 + length]) * length  # one that begins like no other
        (cold,) = served(simple, [(prompt.decode(), greedy(4))])
        found = []
        for together in (1, 1, 2):
            outputs = serve(engine, [(prompt.decode(), greedy(4))] * together)
            assert [what(output) for output in outputs] == [cold] * together
            found += [output.usage["cached_tokens"] for output in outputs]
        assert found == [0] + [(length - 1) // size * size] * 3


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("most", [1, 2, 100])
def test_preempted_after_any_step_nobody_sees_a_difference(most, budget, prefix_cache):
    """Half a prompt, forked, decoding: what was shown is not shown again, nor computed wrong."""
    work = [
        (SHARED, greedy(4, temperature=1, seed=1, n=2, logprobs=2)),
        (SHARED + "chunks", greedy(5, logprobs=1, presence_penalty=0.5)),
    ]
    settings = {"budget": budget, "block_size": 8, "prefix_cache": prefix_cache}
    quiet = build(**settings)
    undisturbed = serve(quiet, work)
    for at in range(1, quiet.counts.steps):
        engine = build(**settings)
        outputs = serve(engine, work, lambda step: step == at and preempt(engine, most))
        assert list(map(what, outputs)) == list(map(what, undisturbed)), at
        assert 1 <= sum(output.usage["preemptions"] for output in outputs) <= most
        for output, other in zip(outputs, undisturbed):
            values = [entry.logprob for entry in other.logprobs]
            assert [entry.id for entry in output.logprobs] == output.token_ids
            assert [entry.logprob for entry in output.logprobs] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("budget", [32, 64])
def test_preempted_after_every_step_all_end_as_if_undisturbed(budget):
    engine = build(budget=budget, block_size=8, max_running=8)
    outputs = serve(engine, WORK, lambda step: preempt(engine))
    assert [what(output) for output in outputs] == expected()
    for output in outputs:
        sampled = len(output.token_ids) - output.usage.get("forced_tokens", 0)
        assert output.usage["preemptions"] >= sampled - 1


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("budget", [3, 8, 64])
@pytest.mark.parametrize(("size", "blocks"), [(8, 8), (16, 4), (32, 3)])
def test_a_pool_that_is_too_small_changes_no_answer(size, blocks, budget, prefix_cache):
    settings = {"block_size": size, "prefix_cache": prefix_cache}
    engine = build(budget=budget, max_running=16, kv_memory=pool(blocks, size), **settings)
    outputs = serve(engine, WORK * 2)
    assert [what(output) for output in outputs] == expected() * 2
    times = [output.usage["preemptions"] for output in outputs]
    assert 0 < sum(times) == engine.counts.preemptions
    assert max(times) < 20  # no thrashing


def spoil(engine: Engine, everything=False):
    """Fill what is laid out anew for every step with garbage, and at first the pools too."""
    cache = engine.cache
    for buffer in (cache.tokens, cache.positions, cache.sample_rows):
        buffer.tensor.fill_(10**9)
    for layout in cache.layouts:
        layout.slots.tensor.fill_(17)
    if everything:
        tiny.poisoned(cache)


def padding(**settings) -> tuple[Engine, list[int]]:
    """An engine that pads decode steps, spoiled; and how many rows were added in each step."""
    engine, added = build(graphs=True, **settings), []
    spoil(engine, everything=True)
    forward = engine.forward

    def watched(step):
        added.append(len(step.tokens) - step.views[0].rows)
        assert not added[-1] or len(step.tokens) in forward.sizes
        return forward(step)

    engine.forward = watched
    return engine, added


@pytest.mark.parametrize(
    "count", [*range(1, 13), *(pytest.param(n, marks=pytest.mark.slow) for n in range(13, 41))]
)
def test_padded_steps_generate_what_others_do(count):
    """From `count` requests at once down to one: they end one after another."""
    work = [
        ("xyz"[: 1 + i % 3] * (1 + i % 5), greedy(3 + i, temperature=i % 2, seed=i))
        for i in range(count)
    ]
    settings = {"max_running": 48, "kv_memory": 2**22, "block_size": 8}
    engine, added = padding(**settings)
    assert served(engine, work, lambda step: spoil(engine)) == served(build(**settings), work)
    assert any(added) == (count > 2), "3 are padded to 4"


def test_no_step_is_padded_to_more_requests_than_have_states():
    """The sizes were those of the max_running that was asked for, the buffers those of the one
    that the cache has states for: on a GPU such an engine did not start."""
    engine = of_golden("qwen3_5", 24, kv_memory=60_000, max_running=20, graphs=True)
    running = engine.scheduler.max_running
    assert 1 < running < 20 and engine.forward.sizes[-1] == engine.cache.sizes[-1] == running
    requests = [engine.add([i] * 9, greedy(5)) for i in range(1, 21)]
    run(engine)
    again = of_golden("qwen3_5", 24)
    assert [r.output for r in requests] == [
        again.generate([i] * 9, greedy(5))[0].token_ids for i in range(1, 21)
    ]


@pytest.mark.parametrize("blocks", [8, 40])
def test_padded_steps_beside_chunks_forks_and_preemptions_change_no_answer(blocks):
    settings = {"kv_memory": pool(blocks, 8), "block_size": 8, "budget": 24, "max_running": 10}
    engine, added = padding(**settings)

    def disturb(step):
        spoil(engine)
        if step % 5 == 0:
            preempt(engine, 2)

    outputs = serve(engine, WORK * 2, disturb)
    assert [what(output) for output in outputs] == expected() * 2
    assert sum(map(bool, added)) > 4 and sum(output.usage["preemptions"] for output in outputs)


def test_prefixes_are_shared_within_a_salt_only():
    engine = build(block_size=8)
    ids, found = set(), []
    for salt in (None, "a", None, "a", "b", "a", None):
        (output,) = serve(engine, [(SHARED, greedy(5, cache_salt=salt))])
        ids.add(tuple(output.token_ids))
        found.append(output.usage["cached_tokens"])
    assert found == [0, 0, 24, 24, 0, 24, 24] and len(ids) == 1
    outputs = serve(build(prefix_cache=False, block_size=8), [(SHARED, greedy(5))] * 3)
    assert [output.usage["cached_tokens"] for output in outputs] == [0, 0, 0]
    assert {tuple(output.token_ids) for output in outputs} == ids


def test_requests_of_one_step_share_nothing_and_those_of_the_next_do():
    engine = build(block_size=8, max_running=2)
    outputs = serve(engine, [(SHARED, greedy(3))] * 4)
    assert [output.usage["cached_tokens"] for output in outputs] == [0, 0, 24, 24]
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    assert (engine.counts.admitted_tokens, engine.counts.reused_tokens) == (100, 48)


@pytest.mark.parametrize("blocks", [7, 9, 40])
@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17])
def test_samples_are_requests_with_their_seeds_also_where_the_pool_is_small(length, blocks):
    """At a fork the full blocks are shared and the one that is not full is copied."""
    engine = build(block_size=8, kv_memory=pool(blocks, 8), max_running=8, budget=11)
    prompt = "these are to be sampled"[:length]
    params = greedy(30, temperature=1, seed=4, n=4)
    outputs = serve(engine, [("other", greedy(20)), (prompt, params), ("last", greedy(20))])
    singles = [(prompt, greedy(30, temperature=1, seed=sample_seed(4, i))) for i in range(4)]
    assert [what(o) for o in outputs[1:5]] == served(contiguous(build()), singles)
    assert sum(output.usage["preemptions"] for output in outputs[1:5]) > 0 or blocks == 40


@pytest.mark.parametrize("size", [8, 16])
def test_the_next_turn_finds_what_the_last_one_generated(size):
    engine = build(block_size=size)
    first = engine.add(SHARED, greedy(20, temperature=1, seed=2))
    run(engine)
    assert first.computed == 25 + 19  # the last token was sampled and never computed
    turn = first.tokens + list(b" and goes on")
    (again,) = engine.generate(turn, greedy(6))
    assert again.usage["cached_tokens"] == 44 // size * size > 25
    assert again.token_ids == reference(engine, turn, greedy(6))
    check_idle(engine)


@pytest.mark.parametrize("blocks", [8, 100])
def test_static_batches_and_reservations_give_the_same_answers(blocks):
    settings = {"block_size": 8, "max_running": 6, "kv_memory": pool(blocks, 8)}
    work = [each for each in WORK if each[1].n < 3]  # three samples at their longest: 9 blocks
    answers, steps = {}, {}
    for name in ("plain", "static", "reserve"):
        engine = build(**settings, **{name: True} if name != "plain" else {})
        answers[name] = served(engine, work)
        steps[name] = engine.counts.steps
        if name == "reserve" or blocks == 100:
            assert engine.counts.preemptions == 0
        else:
            assert engine.counts.preemptions > 0
    samples = iter(expected())
    kept = [(params, next(samples)) for _, params in WORK for _ in range(params.n)]
    assert answers["plain"] == [output for params, output in kept if params.n < 3]
    assert answers["static"] == answers["reserve"] == answers["plain"]
    assert steps["static"] > steps["plain"]


def test_a_reservation_is_for_the_longest_answer_and_no_longer():
    engine = build(reserve=True)
    for prompt, tokens, blocks in [(10, 6, 1), (10, 7, 1), (10, 8, 2), (10, 23, 2), (40, 99, 4)]:
        request = engine.add("x" * prompt, greedy(tokens))
        engine.step()
        assert len(request.tables[0]) == blocks
        run(engine)
    check_idle(engine)


def test_what_never_fits_is_refused_at_the_door_with_both_numbers():
    engine, reserving = build(kv_memory=pool(3)), build(kv_memory=pool(3), reserve=True)
    with pytest.raises(ValueError, match="needs 5 blocks of 16 tokens; the cache has 3"):
        engine.add("x" * 20, greedy(n=4))
    params = greedy(20, n=2)  # 39 tokens each, of which 16 are shared
    with pytest.raises(ValueError, match="reserves 5 blocks of 16 tokens; the cache has 3"):
        reserving.add("x" * 20, params)
    assert len(serve(engine, [("x" * 20, params)])) == 2
    assert len(serve(reserving, [("x" * 20, greedy(13, n=2))])) == 2  # 1 + 2 * 1
    check_idle(reserving)


def test_the_smaller_priority_goes_first_where_that_is_the_policy():
    for policy, order in (("fcfs", [0, 1, 2, 3]), ("priority", [3, 1, 0, 2])):
        engine = build(policy=policy, max_running=1)
        for priority in (5, 0, 5, -1):
            engine.add("hi", greedy(2, priority=priority))
        ended = [event.request.id for event in run(engine) if event.finish_reason]
        assert ended == order
        check_idle(engine)


def test_under_priority_the_larger_number_gives_its_blocks_up():
    engine = build(policy="priority", kv_memory=pool(4, 8), block_size=8, max_len=32)
    late = engine.add("late", greedy(20, priority=1))
    first = engine.add("first", greedy(20))
    events = run(engine)
    assert (first.preempted, late.preempted > 0) == (0, True)
    assert [event.request for event in events if event.finish_reason] == [first, late]
    for request in (first, late):
        prompt = request.tokens[: request.prompt_tokens]
        assert request.output == reference(engine, prompt, greedy(20))
    check_idle(engine)


@pytest.mark.parametrize("budget", [4, 64])
def test_a_request_that_fails_ends_alone_at_any_length(budget):
    work = [(SHARED, greedy(5)), (SHARED + "x", greedy(8, n=2, temperature=1, seed=1)),
            ("hello", greedy(5)), (SHARED, greedy(5, temperature=1, seed=2))]  # fmt: skip
    settings = {"budget": budget, "block_size": 8, "max_running": 6}
    quiet = iter(served(build(**settings), work))
    undisturbed = [[next(quiet) for _ in range(params.n)] for _, params in work]
    for number, length in itertools.product((0, 1, 2), (0, 3, 7, 28, 30)):
        engine = build(**settings)
        failing_for(engine, number, length, RuntimeError("lost"))
        requests = [engine.add(*each) for each in work]
        run(engine)
        check_idle(engine)
        for request, others in zip(requests, undisturbed):
            for output, other in zip(map(engine.output, request.family), others):
                if request.id != number or output.finish_reason != "error":
                    assert what(output) == other, (number, length)
                    continue
                assert output.stop_reason == "lost"
                assert other[1][: len(output.token_ids)] == output.token_ids
                assert other[0].startswith(output.text.rstrip("\ufffd"))


@pytest.mark.parametrize("blocks", [6, 40])
@pytest.mark.parametrize("whose", [0, 1, 2])
def test_one_of_several_aborted_after_any_step_disturbs_nobody(whose, blocks):
    """Then the same prompt again: no half-filled block is found by those that come later."""
    work = [(SHARED, greedy(7)), (SHARED + "x", greedy(6, n=2, temperature=1, seed=1)),
            (SHARED + "yz", greedy(6, temperature=1, seed=2))]  # fmt: skip
    settings = {"budget": 7, "block_size": 8, "kv_memory": pool(blocks, 8)}
    quiet = build(**settings)
    undisturbed = served(quiet, work)
    groups = [undisturbed[:1], undisturbed[1:3], undisturbed[3:]]
    for at in range(quiet.counts.steps):
        engine = build(**settings)
        requests = [engine.add(*each) for each in work]
        for _ in range(at):
            engine.step()
        engine.abort(requests[whose])
        engine.check()
        assert not any(one.tables for one in requests[whose].family)
        again = engine.add(*work[whose])
        run(engine)
        check_idle(engine)
        for i, (request, others) in enumerate(zip([*requests, again], [*groups, groups[whose]])):
            if i != whose:
                assert [what(engine.output(one)) for one in request.family] == others, (at, i)


class Poisoned:
    """A model whose logits are NaN for one request while `ill`, and so is what it caches."""

    def __init__(self, engine: Engine, number: int):
        self.inner, self.engine, self.number, self.ill = engine.model, engine, number, True
        self.prepare, engine.cache.prepare = engine.cache.prepare, self.note
        engine.model = self

    def note(self, plan):
        self.plan = plan
        return self.prepare(plan)

    def __call__(self, *arguments):
        return self.inner(*arguments)

    def logits(self, hidden):
        logits, row = self.inner.logits(hidden), 0
        for request, n in self.plan:
            samples = request.samples if n == request.behind else 0
            if self.ill and request.id == self.number:
                logits[row : row + samples] = math.nan
                self.spoil(request)
            row += samples
        return logits

    def spoil(self, request):
        cache = self.engine.cache
        for spec, group, pools in zip(cache.specs, cache.group_of, cache.pools):
            first = 1 if spec.kind == "linear" else request.computed // 8
            for pool, block in itertools.product(pools, request.tables[group][first:]):
                pool[block] = math.nan


@pytest.mark.parametrize("budget", [8, 64])
def test_what_a_failed_request_cached_is_found_by_nobody(budget):
    """In one step or in chunks: only at the end of the prompt it shows that they were bad."""
    engine = build(budget=budget, block_size=8)
    poisoned = Poisoned(engine, 0)
    outputs = serve(engine, [(SHARED, greedy(4)), ("other", greedy(4))])
    assert outputs[0].finish_reason == "error" and "finite" in outputs[0].stop_reason
    assert outputs[1].token_ids == reference(engine, b"other", greedy(4))
    poisoned.ill = False
    (again,) = serve(engine, [(SHARED, greedy(4))])
    assert again.token_ids == reference(engine, SHARED.encode(), greedy(4))
    assert again.usage["cached_tokens"] == 0


@pytest.mark.parametrize("budget", [8, 64])
@pytest.mark.parametrize("family", ["mistral_sliding", "gemma3_old", "qwen3_5"])
def test_what_a_failed_request_left_behind_is_found_by_nobody(family, budget):
    """Blocks before its window and states of its earlier chunks stayed in the index: whoever
    sent the prompt again failed, every time or every second time."""
    prompt, answer = golden(family)
    engine = of_golden(family, budget)
    poisoned = Poisoned(engine, 0)
    assert [o.finish_reason for o in engine.generate([prompt], greedy(4))] == ["error"]
    poisoned.ill = False
    for reused in (0, 64, 64):
        (output,) = engine.generate([prompt], greedy(4))
        assert (output.token_ids, output.usage["cached_tokens"]) == (answer[:4], reused)


def test_of_twenty_tasks_some_are_cancelled_and_the_others_read_on():
    engine = build(budget=16, max_running=6, block_size=8, kv_memory=pool(12, 8))
    params = [greedy(5 + i % 7, temperature=1, seed=i) for i in range(20)]
    alone = [
        what(build().generate(SHARED + str(i % 3), each)[0])[0] for i, each in enumerate(params)
    ]
    slowed(engine, 0.002)

    async def together():
        begun = [asyncio.Event() for _ in params]

        async def read(i):
            text = ""
            async for piece in engine.astream(SHARED + str(i % 3), params[i]):
                text += piece
                begun[i].set()
            return text

        tasks = [asyncio.create_task(read(i)) for i in range(20)]
        for i in range(0, 20, 3):
            if i % 2:
                await begun[i].wait()  # in the middle of its text; the others while they wait
            tasks[i].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(asyncio.wait_for(together(), 60))
    for i, result in enumerate(results):
        if i % 3 or not isinstance(result, asyncio.CancelledError):
            assert result == alone[i]
    assert sum(isinstance(result, asyncio.CancelledError) for result in results) >= 4
    check_idle(engine)


@pytest.mark.parametrize("way", ["raises", "is dropped", "closes"])
def test_a_reader_that_goes_frees_its_request_and_no_other(way):
    engine = build(block_size=8, budget=9)
    (whole,) = served(build(), [(SHARED, greedy(20))])
    streams = [engine.stream(SHARED, greedy(20)) for _ in range(4)]
    texts = [next(stream) for stream in streams]

    def read(stream):
        for _ in stream:
            raise LookupError("the reader failed")

    gone = streams.pop(1)
    number = gone.request.id
    if way == "closes":
        gone.close()
    elif way == "raises":
        with pytest.raises(LookupError):
            read(gone)
    del gone
    gc.collect()
    engine.check()
    running = [request.id for request in engine.scheduler.running]
    assert number not in running and len(running) == 3
    texts.pop(1)
    assert [text + "".join(rest) for text, rest in zip(texts, streams)] == [whole[0]] * 3
    check_idle(engine)


def test_counts_and_records_say_what_the_steps_were_made_of():
    engine = build(budget=40, block_size=8, kv_memory=pool(9, 8), max_running=4)
    records = []
    engine.watch = records.append
    outputs = serve(engine, [(SHARED + "x", greedy(20)), (SHARED + "y", greedy(20)),
                             ("z", greedy(3)), (SHARED + "x", greedy(2))])  # fmt: skip
    counts = engine.counts
    assert counts.steps == len(records)
    assert counts.rows == sum(n for record in records for _, _, n in record.parts)
    assert counts.output_tokens == sum(len(output.token_ids) for output in outputs) == 45
    assert counts.admitted_tokens == 26 * 3 + 1
    assert counts.reused_tokens == sum(output.usage["cached_tokens"] for output in outputs) > 0
    assert counts.preemptions == sum(output.usage["preemptions"] for output in outputs) > 0
    assert counts.preemptions == sum(len(record.preempted) for record in records)
    assert all(a.ended <= b.began for a, b in zip(records, records[1:]))
    first, decodes = records[0], records[1]
    assert [(r.id, start, n) for r, start, n in first.parts] == [(0, 0, 26), (1, 0, 14)]
    assert (first.rows, first.prompt_rows, first.sampled) == (40, 40, 1)
    assert [(r.id, start, n) for r, start, n in decodes.parts][:2] == [(0, 26, 1), (1, 14, 12)]
    assert decodes.prompt_rows == decodes.rows - 1
    assert counts.prompt_rows == sum(r.prompt_rows for r in records if r.prompt_rows >= 32)
    pace = counts.prompt_s / counts.prompt_rows
    assert counts.saved_s(1000) == pytest.approx(1000 * pace) and pace > 0
    assert generate.Counts().saved_s(1000) == 0


def test_summaries_count_the_blocks_of_every_group():
    """Of a model with windows or states more blocks were held than there are; and an answer
    took up all the blocks that its tokens would fill without a window."""
    whole = {"mistral_sliding": 0, "gemma3_old": 7, "qwen3_5": 7}
    for family, blocks in whole.items():
        prompt, _ = golden(family)
        specs = list(models.load(ROOT / "tests/golden" / family).config.specs)
        engine = of_golden(family, 64, room_for(specs, 7), max_running=2)
        batch = generate.Batch(engine, [], {}, {})
        (output,) = engine.generate([prompt[:40]], greedy(16))
        engine.generate([prompt[i : i + 9] for i in range(4)], greedy(20))
        most, there = map(int, re.search("(\\d+) of (\\d+) blocks", batch.summary()).groups())
        assert there == sum(pool.blocks for pool in engine.manager.pools) >= most > 4, family
        (line,) = [x for x in generate.summary(engine, output).split("\n") if "MB" in x][:1]
        kept = engine.manager.growing[0].blocks if blocks else 0
        assert (f" in {blocks} of {kept} blocks of 8 tokens" in line) == bool(blocks), line
        assert ("of windows and states" in line) != bool(blocks), line


def size_of(engine: Engine) -> dict[str, int]:
    """Everything in an engine that has a length."""
    (pool,), scheduler = engine.manager.pools, engine.scheduler
    places = {
        "waiting": scheduler.waiting, "running": scheduler.running, "doomed": engine.doomed,
        "preempted": scheduler.preempted, "arrived": scheduler.arrived, "free": pool.free,
        "heap": pool.index.heap, "entries": pool.index.entries, "of_block": pool.index.of_block,
        "progress": engine.manager.progress,
    }  # fmt: skip
    return {name: len(place) for name, place in places.items()}


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing_and_slow_nothing_down():
    engine = build(block_size=8, kv_memory=pool(24, 8), max_running=16, budget=64)
    draw, there, seconds, memory, sizes = random.Random(0), [], [], {}, {}
    engine.watch = lambda record: seconds.append(record.ended - record.began)
    ended = 0
    while ended < 10_000:
        there = [request for request in there if not request.finished]
        while len(there) < 20:
            prompt = SHARED[: draw.randint(1, 25)] + "".join(
                draw.choices("ab", k=draw.randint(0, 9))
            )
            params = greedy(draw.randint(1, 12), temperature=1, n=draw.choice([1, 1, 1, 2, 3]))
            there.append(engine.add(prompt, params))
            if draw.random() < 0.05:
                engine.abort(there[-1])
        for event in engine.step():
            ended += event.finish_reason is not None
        for mark in (4_000, 10_000):
            if ended >= mark and mark not in memory:
                engine.check()
                gc.collect()
                resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
                memory[mark] = len(gc.get_objects()), resident
                sizes[mark] = size_of(engine)
    objects, resident = (memory[10_000][i] - memory[4_000][i] for i in (0, 1))
    assert objects < 1000 and resident < 16 * 2**20, (objects, resident)
    for name, limit in {"heap": 2 * 24 + 64, "entries": 24, "of_block": 24, "progress": 16}.items():
        assert sizes[10_000][name] <= limit, (name, sizes)
    median = [statistics.median(part) for part in (seconds[:1000], seconds[-1000:])]
    assert len(seconds) > 2000 and median[1] < 3 * median[0], median
    while engine.scheduler.busy:
        engine.step()
    check_idle(engine)
    assert engine.counts.preemptions > 0
    (index,) = (pool.index for pool in engine.manager.pools)
    assert len(engine.manager.pools[0].free) + index.idle == 24


def test_a_4_bit_file_runs_as_it_is_without_a_dtype_only(monkeypatch):
    seen = []

    class Recorded(models.Model):
        def __init__(self, *args):
            seen.append(args[-1])
            super().__init__(*args[:-1])

    monkeypatch.setattr(models, "stores_four_bits", lambda *_: True)
    monkeypatch.setattr(models, "cannot_quantize", lambda *_: None)
    monkeypatch.setattr(models, "Model", Recorded)
    build(dtype=None)
    build()
    build(dtype=None, quantize="int8")
    assert seen == ["stored", None, "int8"]


@pytest.mark.skipif(
    models.cannot_quantize(torch.device("cpu"), torch.float32) is not None,
    reason="no low-bit kernels here",
)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantised_engine_says_so_and_answers_alone_as_in_a_batch(kind):
    lines = []
    engine = build(quantize=kind, say=lines.append)
    assert lines[0] == f"weights  14 matrices in {kind}, the rest float32"
    assert 0 < engine.model.read_bytes < build().model.read_bytes
    prompts = ["one", "two of them", "three, and a longer one"]
    together = engine.generate(prompts, greedy())
    alone = [build(quantize=kind).generate(prompt, greedy())[0] for prompt in prompts]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]


# ---------------------------------------------------------------- text that follows a grammar

FORM = r"\{name: [a-z]{1,6}, (\d{1,3}|none)\}"
PAIRS = 'root ::= "(" root ")" | "x"'
GUIDED = [
    WORK[3],
    (SHARED + "form", greedy(30, temperature=1, seed=6, n=2, regex=FORM)),
    WORK[4],
    ("say", greedy(9, temperature=1, seed=2, n=2, choice=["yes", "yesterday", "no"])),
    (SHARED + "chunks", greedy(12, regex="[a-c]+", logit_bias={END: 1.5}, repetition_penalty=1.2)),
    WORK[1],
    ("pairs", greedy(20, temperature=1, seed=3, top_k=2, min_p=0.1, grammar=PAIRS)),
    ("cut", greedy(5, temperature=1, seed=4, regex=FORM)),
    ("stops", greedy(20, regex="a(bc)*d", stop=("cb",), logit_bias={ord("b"): 9})),
]


@functools.cache
def guided() -> list[tuple]:
    """All samples of GUIDED, every token sampled."""
    return [output for each in GUIDED for output in by_reference(build(), *each)]


def jumped(engine: Engine) -> int:
    return sum(one.usage["forced_tokens"] for one in serve(engine, GUIDED) if "masks" in one.usage)


@pytest.mark.parametrize("jump", [True, False])
@pytest.mark.parametrize("budget", [3, 64])
def test_constrained_and_free_requests_together_equal_each_alone_without_any_cache(budget, jump):
    """Of single bytes there is one way to write a text: what is forced equals what is sampled."""
    engine = build(budget=budget, jump=jump)
    assert served(engine, GUIDED) == guided()
    shuffled = random.Random(1).sample(range(len(GUIDED)), len(GUIDED))
    alone = [served(engine, [GUIDED[i]]) for i in range(len(GUIDED))]
    assert [output for each in alone for output in each] == guided()
    found = served(engine, [GUIDED[i] for i in shuffled])
    assert found == [output for i in shuffled for output in alone[i]]
    assert (jumped(engine) > 30) == jump
    check_idle(engine)


def test_constrained_answers_are_in_their_grammars():
    texts = [text for text, *_ in guided()]
    assert all(re.fullmatch(FORM, text) for text in texts[3:5]) and texts[3] != texts[4]
    assert {*texts[6:8]} <= {"yes", "yesterday", "no"}
    assert re.fullmatch("[a-c]+", texts[8]) and guided()[8][2:] in [("stop", END), ("length", None)]
    assert re.fullmatch(r"(\(*)x(\)*)", texts[10]) and texts[10].count("(") == texts[10].count(")")
    assert guided()[11][0] == "{name" and guided()[11][2:] == ("length", None)
    assert guided()[12][0] == "ab" and guided()[12][2:] == ("stop", "cb")


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_constrained_request_that_was_preempted_goes_on_where_it_was(prefix_cache):
    engine = build(budget=64, block_size=8, max_running=8, prefix_cache=prefix_cache)
    outputs = serve(engine, GUIDED, lambda step: preempt(engine, step % 3))
    assert [what(output) for output in outputs] == guided()
    assert sum(output.usage["preemptions"] for output in outputs) > 10
    assert all(output.usage["cached_tokens"] <= len(SHARED) + 6 for output in outputs)


def parts(engine: Engine, prompt: str, params: SamplingParams) -> list[tuple[int, int]]:
    """First position and rows of each step of one request."""
    records: list[generate.StepRecord] = []
    engine.watch = records.append
    engine.generate(prompt, params)
    engine.watch = None
    return [(start, n) for record in records for _, start, n in record.parts]


def test_forced_text_is_computed_in_one_step():
    """With the prompt what is forced before the first sample; after a sample what follows it."""
    params = greedy(30, regex="one[12] and two[34]!")
    assert parts(build(), "abcd", params) == [(0, 7), (7, 9)]
    assert parts(build(jump=False), "abcd", params) == [(0, 4), *((i, 1) for i in range(4, 17))]
    assert parts(build(), "abcd", greedy(30, choice=["forced"])) == [(0, 4)]
    assert parts(build(budget=4), "abcd", params) == [(0, 4), (4, 3), (7, 4), (11, 4), (15, 1)]


def test_events_tell_every_forced_token_once():
    engine = build()
    request = engine.add("abcd", greedy(30, regex="one[12] and two[34], not[56]!"))
    events = run(engine)
    assert [token for event in events for token in event.token_ids] == request.output
    assert [re.sub("[1-6]", "?", event.text) for event in events] == [
        "one? and two",
        "?, not",
        "?!",
    ]
    assert events[2].finish_reason == "stop"
    output = engine.output(request)
    assert output.text == "".join(event.text for event in events) and output.stop_reason is None
    assert output.usage["forced_tokens"] == 3 + 8 + 5 + 1 and output.usage["masks"] == 3


def test_forced_text_is_told_with_the_first_sampled_token():
    """In a step before, its prompt has not been computed: no token would be that late."""
    engine = build(budget=4)
    request = engine.add("abcdefghijk", greedy(9, regex="hello [ab]"))
    events = run(engine)
    assert [len(event.token_ids) for event in events] == [0, 0, 0, 0, 7]
    assert not any(event.text for event in events[:-1])
    times = engine.output(request).timings
    parts = [times[name] for name, _ in generate.STAGES[1:] if name in times]
    assert min(parts) >= 0 and sum(parts) == pytest.approx(times["ttft_s"])


def test_forced_tokens_that_are_found_in_the_cache_are_no_prompt():
    engine = build(block_size=8)
    params = greedy(60, regex="forced, and for a while[!?]")
    first, again = (engine.generate("p" * 9, params)[0] for _ in range(2))
    assert what(first) == what(again) and first.usage["forced_tokens"] == 23
    assert again.usage["cached_tokens"] == 9 and engine.counts.hit_rate == 0.5
    assert engine.counts.rows < 9 + 23 + 9


@pytest.mark.parametrize("most", range(1, 12))
def test_max_tokens_inside_a_grammar_is_length_and_at_its_end_a_stop(most):
    for jump in (True, False):
        for settings in ({"regex": "a[bc]defgh[ij]"}, {"choice": ["abdefghi"]}):
            (output,) = build(jump=jump).generate("x", greedy(most, **settings))
            assert len(output.token_ids) == min(most, 8)
            assert output.finish_reason == ("length" if most < 8 else "stop")
            assert re.fullmatch("a[bc]defgh[ij]", output.text) or most < 8


@pytest.mark.parametrize("jump", [True, False])
def test_stop_ids_are_allowed_where_the_text_may_end_and_nowhere_else(jump):
    """All that a checkpoint and a request name, however much the model wants them."""
    engine = build(jump=jump)
    engine.stop_ids = {END, 7}
    for wanted in (END, 7, 9):
        params = greedy(20, regex="a+b", stop_token_ids=[9], logit_bias={wanted: 1e4})
        (output,) = engine.generate("x", params)
        assert re.fullmatch("a+b?", output.text) and output.stop_reason is None
        for ignore_eos in (True, False):
            params = greedy(
                20, regex="(ab)+", stop_token_ids=[9], logit_bias={wanted: 1e4},
                ignore_eos=ignore_eos,
            )  # fmt: skip
            (output,) = engine.generate("x", params)
            assert (output.text, output.token_ids[-1]) == ("ab", wanted)
            assert (output.finish_reason, output.stop_reason) == ("stop", wanted)


def test_a_stop_id_that_is_text_is_no_text_under_a_grammar():
    """It would end the text in the middle, where the grammar has the same byte."""
    b = ord("b")
    (output,) = build().generate("x", greedy(9, regex="a[bc]d", stop_token_ids=[b]))
    assert output.text == "acd"
    for jump in (True, False):
        params = greedy(9, regex="abd", stop_token_ids=[b])
        (output,) = build(jump=jump).generate("x", params)
        assert (output.text, output.finish_reason) == ("a", "error")


@pytest.mark.parametrize("jump", [True, False])
def test_a_grammar_without_a_token_is_an_error_of_its_own_and_never_token_0(jump):
    letters = bytes(range(32, 127))
    engine = Engine(
        generate.byte_checkpoint(letters), device="cpu", dtype="float32", kv_memory=2**20,
        jump=jump,
    )  # fmt: skip
    free = greedy(6)
    (wanted,) = engine.generate("free", free)
    with warnings.catch_warnings(action="ignore"):
        params = [greedy(6, regex="ab?\u00e9+"), free, greedy(6, choice=["\u00e9"])]
        found = engine.generate(["x", "free", "y"], params)
    assert [output.finish_reason for output in found] == ["error", "length", "error"]
    assert found[0].text in ("a", "ab") and found[2].token_ids == []
    for output in (found[0], found[2]):
        assert output.stop_reason == "no token can be drawn: the grammar allows none"
    assert found[1].token_ids == wanted.token_ids
    check_idle(engine)


def test_text_with_ids_beyond_the_logits_is_an_error_of_its_own():
    """A tokenizer may have more ids than there are logits: what is forced may need them."""
    whole = models.random(models.tiny(vocab=100), 0)
    whole.tokenizer = generate.byte_tokenizer()
    engine = Engine(whole, device="cpu", dtype="float32", kv_memory=2**20)
    params = [greedy(9, regex="[AB]xy"), greedy(3), greedy(9, regex="xy")]
    found = engine.generate([[65], [66], [67]], params)
    assert [output.finish_reason for output in found] == ["error", "length", "error"]
    assert found[0].text in "AB" and found[0].stop_reason == found[2].stop_reason
    assert found[2].stop_reason == "no token can be drawn: the grammar allows none"
    check_idle(engine)


def test_a_refused_token_ends_its_stream_with_an_error():
    """What the mask rules out; a stream does not rely on it."""
    engine = build()
    guide = engine._guide(SamplingParams(regex="ab"), {})
    stream = Stream(engine.tokens, {END}, (), 9, guide)
    assert stream.cut([ord("a"), ord("x"), ord("b")]) == ([ord("a"), ord("x")], "error")
    assert stream.stop_reason == "the grammar does not allow token 120"
    assert stream.take(final=True) == "a"


def test_a_limit_that_is_met_while_a_text_is_read_ends_its_request_only(monkeypatch):
    engine = build()
    requests = [engine.add("x", greedy(6, regex="[ab]+")), engine.add("y", greedy(6))]
    engine.step()
    for name in ("mask", "accept", "forced"):
        requests.append(engine.add("z", greedy(6, regex="[ab]+")))
        engine.step()

        def refuse(*given):
            raise grammar.SchemaError("#", "", "more than 4 meanings")

        monkeypatch.setattr(requests[-1].stream.guide.matcher, name, refuse)
    run(engine)
    reasons = [request.finish_reason for request in requests]
    assert reasons == ["length", "length", "error", "error", "length"]
    assert "more than 4 meanings" in requests[2].stream.stop_reason
    assert "more than 4 meanings" in requests[3].stream.stop_reason
    check_idle(engine)


def test_who_fills_a_machine_with_states_ends_and_who_shares_it_goes_on(monkeypatch):
    """Elsewhere, from the text so far; the states of all that follow it are made again."""
    work = [
        ("x", greedy(40, regex="[a-d]*a[a-d]{30}x", temperature=1, seed=1)),
        ("y", greedy(40, regex="([ab][cd][ef][gh]|[i-m]{7}n)*", logit_bias={END: -99})),
        ("z", greedy(40, json_schema=True, temperature=1, seed=3)),
        ("w", greedy(30)),
    ]
    expected = served(build(), work)
    moved, move = [], grammar.Matcher.move
    monkeypatch.setattr(
        grammar.Matcher, "move", lambda matcher: moved.append(matcher) or move(matcher)
    )
    for states in (30, 40, 50):
        monkeypatch.setattr(grammar, "STATES", states)
        engine = build()
        found = served(engine, work)
        assert found[1:] == expected[1:]
        assert found[0][2:] == ("error", f"#: the grammar needs more than {states} states")
        check_idle(engine)
    assert len(moved) > 3


# think_end


def thinking(engine: Engine, ids: list[int], params: SamplingParams) -> tuple:
    guide = engine._guide(params, {})
    stream = Stream(engine.tokens, {END}, (), 99, guide)
    return *stream.cut(ids), guide.mask() is not None


def test_a_grammar_begins_after_the_token_that_ends_thinking():
    """By its id, wherever in a step it comes: what is before is free, what is after is not."""
    engine = build()
    params = SamplingParams(regex="ab", think_end=1)
    assert thinking(engine, [], params) == ([], None, False)
    assert thinking(engine, [5, 0, 97], params) == ([5, 0, 97], None, False)
    assert thinking(engine, [5, 1], params) == ([5, 1], None, True)
    assert thinking(engine, [5, 1, 97, 98, 9], params) == ([5, 1, 97, 98], "stop", True)
    assert thinking(engine, [1, 97, 97], params) == ([1, 97, 97], "error", True)
    assert thinking(engine, [1, 97, 1], params) == ([1, 97, 1], "error", True)
    assert thinking(engine, [5, END, 1], params) == ([5, END], "stop", False)


@pytest.mark.parametrize("jump", [True, False])
@pytest.mark.parametrize("end", ["#", 35])
def test_thinking_is_free_and_the_answer_is_not(jump, end):
    engine = build(jump=jump)
    params = greedy(40, temperature=1, seed=3, logit_bias={35: 6, END: -99}, n=3)
    (free, *_) = engine.generate("why", params)
    params = dataclasses.replace(params, regex="yes[!?]|no[!?]", think_end=end)
    for output in engine.generate("why", params):
        thought, answer = output.text.split("#", 1)
        assert re.fullmatch("(yes|no)[!?]", answer) and output.finish_reason == "stop"
        assert output.usage["masks"] + output.usage["forced_tokens"] == len(answer)
        assert (output.usage["forced_tokens"] > 0) == jump
    (first, *_) = engine.generate("why", params)
    before = first.token_ids.index(35) + 1
    assert first.token_ids[:before] == free.token_ids[:before]
    check_idle(engine)


@pytest.mark.parametrize("jump", [True, False])
def test_thinking_that_a_prompt_has_ended_is_not_waited_for(jump):
    """So end templates that are told to leave it out; of earlier turns nothing is meant."""
    engine = build(jump=jump)
    params = greedy(9, choice=["yes", "no"], think_end="#")
    for prompt in ("<think>#", "#", "<think>\n\n#\n\n", [35, 10]):
        (output,) = engine.generate(prompt, params)
        assert output.text in ("yes", "no")
    for prompt in ("# so\n\n", "a #b", "\n", [35, END], [END, 10]):
        (output,) = engine.generate(prompt, params)
        assert output.usage["masks"] == 0


# what it costs


def test_the_removed_mass_is_that_of_the_models_distribution():
    """Against softmax over the whole vocabulary; of the last token there is one way, and END."""
    engine = build(jump=False)
    params = greedy(9, regex="[a-p]{3}", presence_penalty=0.5, logprobs=300)
    (output,) = engine.generate("mass", params)
    letters, masses, moved = range(97, 113), [], 0
    for i, one in enumerate(output.logprobs):
        scores = torch.full((257,), -torch.inf)
        for token, logprob in one.top:
            scores[token] = logprob - 0.5 * (token in output.token_ids[:i])
        shares = scores.softmax(-1)
        masses.append(1 - float(shares[list(letters)].sum()))
        moved += int(scores.argmax()) not in letters
    usage = output.usage
    assert usage["masks"] == 3 and usage["argmax_changed"] == moved
    assert usage["removed_mass_mean"] == pytest.approx(sum(masses) / 3, abs=1e-5)
    assert usage["removed_mass_max"] == pytest.approx(max(masses), abs=1e-5)
    assert usage["removed_mass_max_at"] == masses.index(max(masses))
    assert 0.5 < min(masses) and len(set(masses)) == 3


def test_logprobs_under_a_grammar_are_the_models_own_and_every_token_has_one():
    engine = build()
    params = greedy(9, choice=["forced"], logprobs=2)
    (output,) = engine.generate("same", params)
    assert output.text == "forced" and output.usage["forced_tokens"] == 0
    assert [one.id for one in output.logprobs] == output.token_ids
    (free,) = engine.generate("same", greedy(1, logprobs=300))
    assert output.logprobs[0].top == free.logprobs[0].top[:2]
    own = dict(free.logprobs[0].top)[ord("f")]
    assert output.logprobs[0].logprob == pytest.approx(own, abs=1e-5)


def test_a_grammar_is_compiled_once_and_its_time_is_in_the_timings(monkeypatch):
    engine, compiled = build(), []
    compile = grammar.compile

    def slowly(vocabulary, **given):
        time.sleep(0.05)
        compiled.append(given)
        return compile(vocabulary, **given)

    monkeypatch.setattr(grammar, "compile", slowly)
    first, again = (engine.generate("x", greedy(3, choice=["ab", "ac"]))[0] for _ in range(2))
    assert len(compiled) == 1
    assert first.timings["compile_s"] > 0.05 > again.timings["compile_s"]
    assert first.timings["grammar_s"] >= first.timings["compile_s"] + first.timings["vocabulary_s"]
    assert "vocabulary_s" in first.timings and "vocabulary_s" not in again.timings
    assert first.timings["mask_s"] > 0 and first.timings["ttft_s"] > 0.05
    assert "grammar_s" not in engine.generate("x", greedy(3))[0].timings
    engine.generate("x", greedy(3, choice=["ac", "ab"]))
    engine.generate("x", greedy(3, choice=["ab", "ac"], stop_token_ids=[5]))  # own vocabulary
    assert len(compiled) == 3 and len(engine.grammars.known) == 2


def test_a_schema_is_compiled_for_each_of_its_options():
    engine, texts = build(), []
    for whitespace in ("any", "compact", "default"):
        params = greedy(16, json_schema={"const": [True, None]}, json_whitespace=whitespace)
        params = dataclasses.replace(params, logit_bias={ord(" "): 50})
        texts.append(engine.generate("x", params)[0].text)
    assert texts == ["[" + " " * 15, "[true,null]", "[ true , null ]"]


def test_the_last_used_grammars_and_vocabularies_are_kept(monkeypatch):
    compiled, grammars = [], generate.Grammars([b"a", b"b"], 3)
    monkeypatch.setattr(generate, "COMPILED", 2)
    monkeypatch.setattr(generate, "VOCABULARIES", 2)
    compile = grammar.compile
    monkeypatch.setattr(
        grammar, "compile", lambda v, **given: compiled.append(given) or compile(v, **given)
    )
    for text in "ababcab":  # c takes the place of a, then a that of b, and b that of c
        grammars.compiled(SamplingParams(regex=text), {2})
    assert [given["regex"] for given in compiled] == [*"abcab"]
    for stops in ({2}, {1, 2}, {2}, {0}, {2}, {1, 2}):
        grammars.compiled(SamplingParams(regex="b"), stops)
    assert len(compiled) == 5 + 3 and len(grammars.known) == 2


def test_a_refused_grammar_is_refused_before_anything_runs():
    engine = build()
    for settings, words in (
        ({"regex": "a("}, "regex"),
        ({"json_schema": "{"}, "JSON"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema: "),
        ({"json_schema": True, "json_whitespace": "some"}, "'some'"),
        ({"choice": ["a"], "think_end": "two"}, "think_end 'two' is not one token"),
        ({"choice": ["a"], "think_end": 999}, "think_end 999 is not an id"),
        ({"choice": ["a"], "think_end": "<end>"}, "think_end '<end>' is a stop id"),
        ({"choice": ["a"], "think_end": 5, "stop_token_ids": [5]}, "think_end 5 is a stop id"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.generate(["fine", "refused"], [greedy(3), greedy(3, **settings)])
        assert engine.counts.steps == 0
        check_idle(engine)
    nested = []
    for _ in range(10**5):
        nested = [nested]
    with pytest.raises(ValueError, match="nested too deeply"):
        engine.add("x", SamplingParams(json_schema={"a": nested}))


def test_a_grammar_needs_a_tokenizer():
    bare = models.random(models.tiny(vocab=97), 0)
    engine = Engine(bare, device="cpu", dtype="float32", kv_memory=2**20)
    with pytest.raises(ValueError, match="no text, and no grammar for one"):
        engine.add([1, 2], SamplingParams(regex="a"))


def test_the_masks_are_as_wide_as_the_logits_and_never_allow_an_id_without_text():
    """Fewer ids than logits, and a tokenizer with more."""
    for vocab in (300, 256, 100):
        whole = models.random(models.tiny(vocab=vocab), 0)
        whole.tokenizer = generate.byte_tokenizer()
        engine = Engine(whole, device="cpu", dtype="float32", kv_memory=2**20)
        bias = {i: 1e3 for i in range(257, vocab)}
        (output,) = engine.generate([65], greedy(9, regex="[A-Z]{4}", logit_bias=bias))
        assert re.fullmatch("[A-Z]{4}", output.text) and output.finish_reason == "stop"


def test_forced_ids_are_the_text_whatever_a_tokenizer_puts_before_it():
    """A space, say, which may become one token with the first letter."""
    engine = build()
    engine.tokens = [*engine.tokens, b" n"]
    known = {"né": [257, 195, 169], "\nné": [32, 10, 110, 195, 169], "é": [32, 195, 169]}
    engine.tokenizer = SimpleNamespace(encode=lambda text, special: known.get(text, [0, 0]))
    assert engine._plain_ids("né") == [110, 195, 169]
    assert engine._plain_ids("é") == [195, 169]
    known["é"] = [END, 195, 169]
    assert engine._plain_ids("é") == [195, 169]
    known["é"] = [195, END, 169]
    assert engine._plain_ids("é") == []
    assert engine._plain_ids("a") == []  # then every token is sampled


@functools.cache
def merging(jump: bool) -> Engine:
    """A tokenizer with tokens of several bytes, which reach over ends in the grammars below."""
    merges = ["n a", "m e", "na me", '{ "', '" :', "a b", "b c", "ab c", 'Ġ "', 'c "', ", Ġ"]
    whole = models.random(models.tiny(vocab=257 + len(merges)), 0)
    whole.tokenizer = generate.byte_tokenizer()
    texts = [merge.replace(" ", "") for merge in merges]
    whole.tokenizer["model"]["vocab"] |= {text: 257 + i for i, text in enumerate(texts)}
    whole.tokenizer["model"]["merges"] = merges
    return Engine(whole, device="cpu", dtype="float32", kv_memory=2**20, max_len=128, jump=jump)


def test_forced_text_has_the_tokens_of_the_tokenizer_but_where_another_may_follow():
    """The space may come with a quote, and the quote with what is before it."""
    engine = merging(True)
    params = greedy(40, regex=r'\{"name": ("[a-c]+"|1)\}')
    request = engine.add("x", params)
    assert engine.tokenizer.encode('{"name":') == request.output == [260, 259, 261]
    engine.abort(request)
    request = engine.add("x", greedy(40, regex=r'\{"name": [01]\}'))
    assert engine.tokenizer.encode('{"name": ') == request.output
    engine.abort(request)
    check_idle(engine)


@pytest.mark.parametrize("seed", range(4))
def test_with_forced_tokens_and_without_a_text_is_in_the_grammar(seed):
    draw = random.Random(seed)
    parts = [
        '{"name": ',
        "name",
        '("abc", )?',
        "[a-c]{1,4}",
        '("bc"|"[a-c]*")',
        "(, ab){0,2}",
        "me",
    ]
    for _ in range(6):
        regex = "".join(draw.choices(parts, k=draw.randint(1, 5))).replace('{"', '\\{"')
        bias = {END: 3, **{i: 2 for i in range(257, 268)}}
        settings = {"temperature": draw.choice([0, 1]), "seed": seed, "logit_bias": bias}
        for jump in (True, False):
            engine = merging(jump)
            (output,) = engine.generate("x", greedy(90, regex=regex, **settings))
            assert re.fullmatch(regex, output.text) or output.finish_reason == "length", regex
            assert b"".join(map(engine.bytes_of, output.token_ids)).decode() == output.text
            assert jump or output.usage["forced_tokens"] == 0
            check_idle(engine)


@pytest.mark.parametrize("when", range(4))
def test_an_aborted_constrained_request_leaves_nothing(when):
    engine = build()
    request = engine.add("x", greedy(20, n=2, temperature=1, regex="begin [a-z]{9} end"))
    for _ in range(when):
        engine.step()
    engine.abort(request)
    run(engine)
    assert all(one.finish_reason == "abort" for one in request.family)
    assert all(engine.output(one).text.startswith("begin ") for one in request.family)
    assert all(len(one.output) == len(engine.output(one).text) for one in request.family)
    check_idle(engine)


@pytest.mark.parametrize("where", ["_cut", "_fork", "_jump", "_begin", "mask", "accept", "forced"])
def test_ctrl_c_leaves_no_place_in_a_grammar_half_taken(where, monkeypatch):
    engine = build()
    params = greedy(20, n=2, regex="begin [a-z]{3} end")
    expected = engine.generate("hello", params)[0].text
    owner = engine if where[0] == "_" else generate.Guide
    whole = getattr(owner, where)

    def interrupted(*arguments):
        monkeypatch.undo()
        whole(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["hello", "other"], params)
    check_idle(engine)
    assert (
        engine.generate("hello", params)[0].text == expected and not engine.grammars.lock.locked()
    )


def test_grammars_are_compiled_while_others_are_followed():
    """Their automata grow in both, in memory that they share."""
    engine = build(budget=8)

    def patterns(i):
        return [f"(ab{i}|[a-d]{{{j},9}}|x{j})(é|ü)" for j in range(1, 9)]

    alone = [engine.generate("x", greedy(12, regex=each))[0].text for each in patterns(0)]
    got: dict[int, list[str]] = {}
    engine = build(budget=8)

    def work(i):
        got[i] = [engine.generate("x", greedy(12, regex=each))[0].text for each in patterns(i)]

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got[0] == alone
    for i, texts in got.items():
        assert all(re.fullmatch(each, text) for each, text in zip(patterns(i), texts))
    check_idle(engine)


def test_automata_grow_under_the_lock_only(monkeypatch):
    """Also where a request needs a new machine, for the last one is worn."""
    engine, made, others = build(max_running=8), [], set()
    monkeypatch.setattr(grammar, "STATES", 300)
    for name in ("__init__", "state", "config", "step", "mask"):
        whole = getattr(grammar.Machine, name)

        def locked(machine, *given, whole=whole, name=name):
            if not engine.grammars.lock.locked():
                others.add(name)
            if name == "__init__":
                made.append(machine)
            return whole(machine, *given)

        monkeypatch.setattr(grammar.Machine, name, locked)
    again = [(prompt, dataclasses.replace(params, n=1)) for prompt, params in GUIDED]
    for i in range(4):
        work = [("x", greedy(9, choice=["a" * 20 + chr(97 + i) * 60], n=2, temperature=1))]
        served(engine, [*GUIDED, *work, *again])
    assert len(made) > 1 and not others


@pytest.mark.slow
@pytest.mark.parametrize("byte_level", [True, False])
def test_a_grammar_sees_the_text_that_comes_out_of_any_tokenizer(byte_level):
    """With a space for "Ġ" or "▁", also where the tokenizer puts one before a text."""
    library = pytest.importorskip("tokenizers")
    space = "Ġ" if byte_level else "▁"
    pieces = ["<unk>", "<s>", space, *"abcdefghijklmnop", f"{space}ab", "ab", f"{space}c", "de"]
    vocab = [(piece, -float(len(pieces) - i)) for i, piece in enumerate(pieces)]
    spec = json.loads(library.Tokenizer(library.models.Unigram(vocab, unk_id=0)).to_str())
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    spec["pre_tokenizer"] = spec["decoder"] = metaspace
    if byte_level:
        spec["pre_tokenizer"] = spec["decoder"] = {
            "type": "ByteLevel", "add_prefix_space": True, "use_regex": True, "trim_offsets": True
        }  # fmt: skip
    whole = models.random(models.tiny(vocab=len(pieces)), 0)
    whole.tokenizer = spec
    for jump in (True, False):
        engine = Engine(whole, device="cpu", dtype="float32", kv_memory=2**20, jump=jump)
        assert engine._plain_ids("ab de") and engine._plain_ids(" ab c")
        for text in ("ab de", " ab c", "a  b"):
            (output,) = engine.generate([3, 4], greedy(20, regex=f"{text}[cd](ab| c){{2}}"))
            assert re.fullmatch(f"{text}[cd](ab| c){{2}}", output.text)
            assert b"".join(engine.bytes_of(i) for i in output.token_ids).decode() == output.text
            assert (output.usage["forced_tokens"] > 0) == jump


# ---------------------------------------------------------------- by property


GRAMMARS = [
    {},
    {},
    {"regex": "[ab]{1,3}(c|ddd)*"},
    {"choice": ["a", "abba", "abba, or more"]},
    {"grammar": 'root ::= "a" root "b" | "ab"'},
]


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_and_aborts_leave_nothing_behind(seed):
    """Any mix of prompts, samples, stops and aborts: what ends unaborted ends as if alone."""
    draw = random.Random(seed)
    engine = build(budget=draw.choice([1, 3, 8, 64]))
    alone = build()
    requests, texts = [], {}
    while len(requests) < 8 or engine.scheduler.busy:
        if len(requests) < 8 and draw.random() < 0.3:
            prompt = bytes(draw.choices(b"abc ", k=draw.randint(1, 20))).decode()
            params = SamplingParams(
                max_tokens=draw.randint(1, 12), temperature=draw.choice([0, 1]), seed=seed,
                n=draw.choice([1, 1, 2, 4]), stop=draw.choice([(), ("\ufffd",), ("a", "bc")]),
                ignore_eos=draw.random() < 0.5, **draw.choice(GRAMMARS),
            )  # fmt: skip
            requests.append((engine.add(prompt, params), prompt, params))
        if requests and draw.random() < 0.1:
            engine.abort(draw.choice(requests)[0])
            engine.check()
        for event in engine.step():
            texts[event.request] = texts.get(event.request, "") + event.text
        engine.check()
    for request, prompt, params in requests:
        assert request.finished
        for expected, sampled in zip(alone.generate(prompt, params), request.family):
            if sampled.finish_reason == "abort":
                assert expected.token_ids[: len(sampled.output)] == sampled.output
                assert expected.text.startswith(sampled.stream.text)
                continue
            output = engine.output(sampled)
            assert (output.text, output.token_ids) == (expected.text, expected.token_ids)
            assert output.text == texts[sampled]
            assert output.finish_reason == expected.finish_reason
    check_idle(engine)


@functools.cache
def quiet() -> Engine:
    """A big engine that never shares, cuts or preempts anything."""
    return contiguous(build())


@pytest.mark.parametrize("seed", range(16))
def test_any_mix_on_any_engine_ends_as_each_would_alone(seed):
    """Prefixes, samples, stops, aborts, small pools, every policy: no answer depends on it."""
    draw = random.Random(1000 + seed)
    size = draw.choice([8, 16, 32])
    engine = build(
        block_size=size, kv_memory=pool(64 // size + draw.choice([0, 0, 1, 3, 20]), size),
        budget=draw.choice([1, 3, 8, 20, 64]), max_running=draw.choice([4, 4, 7]),
        prefix_cache=draw.random() < 0.8, policy=draw.choice(["fcfs", "fcfs", "priority"]),
        static=draw.random() < 0.2, reserve=draw.random() < 0.2, jump=draw.random() < 0.7,
    )  # fmt: skip
    stems = ["".join(draw.choices("ab", k=draw.choice([8, 16, 17, 31, 40]))) for _ in range(3)]
    requests, texts, steps, left = [], {}, 0, 14
    while left or engine.scheduler.busy:
        if left and draw.random() < 0.4:
            left -= 1
            stem = draw.choice(stems)[: draw.choice([0, 8, 16, 24, 40])]
            prompt = stem + "".join(draw.choices("ab", k=draw.choice([1, 2, 8, 9])))
            params = SamplingParams(
                max_tokens=draw.choice([1, 5, 16, 30]), temperature=draw.choice([0, 1]),
                seed=draw.randint(0, 3), n=draw.choice([1, 1, 1, 2, 4]),
                stop=draw.choice([(), (), ("\ufffd",), ("a", "bc")]),
                presence_penalty=draw.choice([0, 0, 0.7]), priority=draw.randint(0, 2),
                cache_salt=draw.choice([None, None, "salt"]), ignore_eos=draw.random() < 0.7,
                **draw.choice(GRAMMARS),
            )  # fmt: skip
            try:
                requests.append((engine.add(prompt, params), prompt, params))
            except ValueError as error:
                assert "blocks of" in str(error) and params.n > 1
        if requests and draw.random() < 0.03:
            engine.abort(draw.choice(requests)[0])
            engine.check()
        for event in engine.step():
            texts[event.request] = texts.get(event.request, "") + event.text
        engine.check()
        steps += 1
        assert steps < 3000, "nothing moves"
    for request, prompt, params in requests:
        for alone, one in zip(quiet().generate(prompt, params), request.family):
            output = engine.output(one)
            if output.finish_reason == "abort":
                assert alone.token_ids[: len(one.output)] == one.output
                assert alone.text.startswith(output.text.rstrip("\ufffd"))
                assert output.text.startswith(texts.get(one, ""))
            else:
                assert what(output) == what(alone)
                assert output.text == texts[one]
            assert output.usage["preemptions"] == 0 or not engine.manager.reserve
    check_idle(engine)


@pytest.mark.parametrize("at", range(8))
def test_abort_after_any_step(at):
    """Step 0: not begun. 1: half a prompt. 2 and later: forked and decoding. 7: over."""
    engine = build(budget=3)
    request = engine.add("hello", SamplingParams(max_tokens=5, n=3, ignore_eos=True, seed=1))
    follower = engine.add("next", greedy(3))
    for _ in range(at):
        engine.step()
        engine.check()
    engine.abort(request)
    engine.check()
    ended = "length" if at >= 6 else "abort"
    assert {sampled.finish_reason for sampled in request.family} == {ended}
    assert not any(sampled.tables for sampled in request.family)
    assert engine.manager.held == (1 if follower in engine.scheduler.running else 0)
    engine.abort(request)  # again: no effect
    run(engine)
    assert follower.output == reference(engine, b"next", greedy(3))
    check_idle(engine)


def test_abort_of_a_waiting_request_and_of_one_sample():
    engine = build()
    first = engine.add("first", SamplingParams(max_tokens=5, n=4, ignore_eos=True))
    second = engine.add("second", greedy(3))
    engine.step()
    assert second.waits == {"running limit": 1}
    engine.abort(second)
    assert second.finish_reason == "abort" and second.output == []
    engine.abort(first.family[1])  # a sample stands for its family
    assert first.finish_reason == "abort"
    check_idle(engine)


# ---------------------------------------------------------------- ends of every kind


@pytest.mark.parametrize("pieces", [0, 1, 4])
@pytest.mark.parametrize("way", ["closed", "deleted", "raised", "cycle"])
def test_a_stream_left_early_frees_its_slot(pieces, way):
    engine = build()

    def consume():
        stream = engine.stream("hello", greedy(30))
        for _ in range(pieces):
            next(stream)
        if way == "closed":
            stream.close()
            assert stream.output.finish_reason == "abort"
            assert len(stream.output.token_ids) >= pieces
        if way == "cycle":
            stream.itself = stream
        if way == "raised":
            raise LookupError("the consumer failed")

    try:
        consume()
    except LookupError:
        pass
    gc.collect()
    check_idle(engine)
    assert engine.generate("hi", greedy(3))[0].finish_reason == "length"


def test_what_a_closed_stream_has_shown_is_in_its_output():
    engine = build()
    (whole,) = engine.generate("hello", greedy(30))
    stream = engine.stream("hello", greedy(30))
    shown = "".join(itertools.islice(stream, 5))
    stream.close()
    stream.close()
    assert stream.output.text.startswith(shown) and whole.text.startswith(shown)
    assert stream.output.token_ids == whole.token_ids[: len(stream.output.token_ids)]
    assert stream.output.finish_reason == "abort"


def test_astream_left_early_frees_its_slot():
    engine = build()

    async def leave():
        pieces = engine.astream("hello", greedy(30))
        async for _ in pieces:
            break
        await pieces.aclose()
        with pytest.raises(LookupError):
            async for _ in engine.astream("hello", greedy(30)):
                raise LookupError("the consumer failed")

    asyncio.run(leave())
    gc.collect()
    check_idle(engine)


def test_a_failed_step_is_that_requests_error():
    engine = build(budget=3)
    failing_for(engine, 0, 7, RuntimeError("no memory\nand a long trace"))
    outputs = engine.generate(["hello", "other"], [greedy(5), greedy(4)])
    assert (outputs[0].finish_reason, outputs[0].stop_reason) == ("error", "no memory")
    assert outputs[0].token_ids == reference(engine, b"hello", greedy(5))[:2]
    assert outputs[1].token_ids == reference(engine, b"other", greedy(4))
    check_idle(engine)


def test_a_step_that_fails_once_is_tried_again_request_by_request():
    engine = build()
    failing(engine, 2, RuntimeError("no memory for so many"))
    outputs = engine.generate(["hello", "other"], [greedy(5), greedy(4, n=2)])
    assert [output.finish_reason for output in outputs] == ["length"] * 3
    assert outputs[0].token_ids == reference(engine, b"hello", greedy(5))
    assert outputs[2].token_ids == reference(engine, b"other", greedy(4))
    check_idle(engine)


def test_a_failed_step_reaches_the_stream():
    engine = build()
    failing(engine, 3, MemoryError())
    stream = engine.stream("hello", greedy(9))
    assert "".join(stream) == stream.output.text
    assert (stream.output.finish_reason, len(stream.output.token_ids)) == ("error", 2)
    assert stream.output.stop_reason
    check_idle(engine)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_failed_step_ends_all_samples(number):
    """Before the fork (passes 1 and 2 are the prompt's chunks) and after it, in both halves."""
    engine = build(budget=3)
    engine.model = Around(engine.model, lambda now: raising(RuntimeError("lost"))() if now >= number
                          else None)  # fmt: skip
    params = SamplingParams(max_tokens=5, n=3, ignore_eos=True)
    outputs = engine.generate("hello", params)
    assert {output.finish_reason for output in outputs} == {"error"}
    check_idle(engine)
    engine.model = engine.model.inner
    assert len(engine.generate("hello", params)) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(bad):
    engine = build()

    class Broken:
        def __getattr__(self, name):
            return getattr(inner, name)

        def __call__(self, *args, **kwargs):
            return inner(*args, **kwargs)

        def logits(self, hidden):
            logits = inner.logits(hidden)
            Broken.passes += 1
            if Broken.passes == 3:
                logits[0] = bad
            return logits

    Broken.passes, inner = 0, engine.model
    engine.model = Broken()
    outputs = engine.generate(["hello", "other"], greedy(4, logprobs=1))
    assert outputs[0].finish_reason == "error" and "finite" in outputs[0].stop_reason
    assert len(outputs[0].token_ids) == len(outputs[0].logprobs) == 2
    assert outputs[1].token_ids == reference(engine, b"other", greedy(4))
    check_idle(engine)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_ctrl_c_inside_a_step_leaves_nothing_behind(number):
    engine = build(budget=3)
    failing(engine, number, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["hello", "other"], SamplingParams(max_tokens=4, n=2, ignore_eos=True))
    check_idle(engine)
    (output,) = engine.generate("hello", greedy(4))
    assert output.token_ids == reference(engine, b"hello", greedy(4))


def test_nothing_runs_when_one_of_several_prompts_is_refused():
    engine = build()
    engine.model = Around(engine.model, lambda number: pytest.fail("a step ran"))
    with pytest.raises(ValueError, match="not an id"):
        engine.generate(["fine", [1, 2, 257]], greedy(2))
    check_idle(engine)


# ---------------------------------------------------------------- the door


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        ("", {}, "no tokens"),
        ([], {}, "no tokens"),
        ("x" * 64, {}, "64 tokens; the most is 63"),
        ([1, 2, 257], {}, "257 is not an id of 0 to 256"),
        ([1, -1], {}, "-1 is not an id"),
        ([1, 2.5], {}, "2.5.* is not text, token ids or messages"),
        (["a"], {}, "'a'.* is not text, token ids or messages"),
        (None, {}, "None.* is not text, token ids or messages"),
        ("hi", {"n": 5}, "n = 5 .* max_running is 4"),
        ("hi", {"stop_token_ids": [257]}, "stop_token_ids: 257"),
        ("hi", {"stop_token_ids": [-1]}, "stop_token_ids: -1"),
        ("hi", {"logit_bias": {300: 1.0}}, "logit_bias: 300"),
        ([{"role": "user", "content": 5}], {}, "content"),
        ([{"content": "hi"}], {}, "role"),
        ("\ud800", {}, "surrogate|encode|UTF|valid|text"),
    ],
)
def test_refused_requests(prompt, settings, words):
    engine = build()
    params = SamplingParams(**settings)
    with pytest.raises(ValueError, match=words):
        engine.add(prompt, params)
    with pytest.raises(ValueError, match=words):
        engine.generate([prompt], params)
    with pytest.raises(ValueError):
        engine.stream(prompt, params)
    check_idle(engine)


def test_refused_lists_of_prompts():
    engine = build()
    for prompts in ([], (), None, 5, {"role": "user", "content": "hi"}):
        with pytest.raises(ValueError, match="prompts"):
            engine.generate(prompts)
    with pytest.raises(ValueError, match="3 params for 2 prompts"):
        engine.generate(["a", "b"], [greedy()] * 3)
    with pytest.raises(ValueError, match="n = 2"):
        engine.stream("a", SamplingParams(n=2))
    check_idle(engine)


def test_a_prompt_that_just_fits_is_not_refused():
    engine = build()
    assert len(engine.generate("x" * 63, greedy())[0].token_ids) == 1
    with pytest.raises(ValueError, match="the prompt has 64 tokens; the most is 63"):
        engine.generate("x" * 64, greedy())


def test_a_checkpoint_without_tokenizer_takes_ids_only():
    bare = models.random(models.tiny())
    bare.name = "bare"
    engine = Engine(bare, device="cpu", dtype="float32", max_len=32, max_running=1)
    (output,) = engine.generate([1, 2, 3], SamplingParams(max_tokens=4, seed=1))
    assert len(output.token_ids) == 4 and output.text == ""
    for prompt in ("hi", [{"role": "user", "content": "hi"}]):
        with pytest.raises(ValueError, match="bare has no"):
            engine.add(prompt)
    with pytest.raises(ValueError, match="no tokenizer"):
        engine.add([1], SamplingParams(stop="x"))
    assert engine.name_of(7) == "id 7"


def test_a_checkpoint_without_template_takes_no_messages():
    engine = Engine(generate.byte_checkpoint(), device="cpu", dtype="float32", max_len=32)
    with pytest.raises(ValueError, match="no chat template"):
        engine.add([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"threads": 0}, "threads 0"),
        ({"threads": -2}, "threads -2"),
        ({"load": "dummy"}, "neither a Checkpoint"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"dtype": torch.int32}, "dtype torch.int32"),
        ({"quantize": "int3"}, "quantize 'int3' is not int8 or int4"),
        ({"quantize": "stored"}, "quantize 'stored' is not int8 or int4"),
        ({"quantize": "int8", "dtype": "float16"}, "quantize int8: .*not float16"),
        ({"max_len": 1}, "max_len 1.*256"),
        ({"max_len": 257}, "max_len 257.*256"),
        ({"kv_memory": 0}, "kv_memory 0"),
        ({"kv_memory": 1000}, "kv_memory 1,000 bytes.*16 tokens, 4,096 bytes"),
        ({"kv_memory": 2**60}, "no memory for a cache of 1,073,741,824.0 GiB"),
        ({"block_size": 24}, "block_size 24"),
        ({"block_size": 4}, "block_size 4"),
        ({"policy": "lifo"}, "policy 'lifo'"),
        ({"max_running": 10**9}, "max_running 1000000000"),
        ({"budget": 0}, "budget 0"),
        ({"max_running": -1}, "-1"),
    ],
)
def test_refused_engines(settings, words):
    with pytest.raises(ValueError, match=words):
        build(**settings)


def test_quantize_on_a_gpu_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ValueError, match="quantize int4: .* CPU only, not on cuda"):
        build(device="cuda", dtype=None, quantize="int4")


def test_a_gpu_is_one_that_is_there_and_computes_in_what_it_has(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert generate._device("cuda") == torch.device("cuda")
    assert generate._device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="device 'cuda:2': this PyTorch sees 2"):
        generate._device("cuda:2")
    for capability, dtype in (((7, 5), torch.float16), ((8, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert generate._dtype(None, torch.device("cuda:1")) == dtype


def test_what_pytorch_keeps_of_freed_tensors_is_free(monkeypatch):
    for name, found in (
        ("mem_get_info", (10, 80)),
        ("memory_reserved", 7),
        ("memory_allocated", 4),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
    assert generate._free_bytes(torch.device("cuda")) == 13


def test_what_does_not_fit_on_a_gpu_is_one_sentence(monkeypatch):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")

    monkeypatch.setattr(models.kernels.Graphs, "record", full)
    with pytest.raises(ValueError, match=r"^no memory is left on cpu: CUDA .* 9 GiB\.$"):
        build()
    monkeypatch.setattr(generate.models, "Model", full)
    with pytest.raises(ValueError, match="^no memory is left on cpu"):
        build()


def test_an_engine_that_nobody_holds_is_gone_at_once():
    """Without the garbage collector, which does not know that a GPU is full."""
    gc.collect()
    gc.disable()
    try:
        engine = build(graphs=True)
        engine.generate("Octavo", greedy(2))
        gone = weakref.ref(engine.model), weakref.ref(engine.cache)
        del engine
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("budget, running", [(512, 4), (40, 4), (4, 8), (1, 1), (200, 3)])
def test_the_worst_step_is_one_that_a_scheduler_can_plan(budget, running, monkeypatch):
    engine = build(budget=budget, max_running=running)
    engine.max_len = 64
    plans = []
    monkeypatch.setattr(engine, "_compute", plans.append)
    engine._worst_step(engine.cache, paged.BlockManager(100), budget, running)
    rows = [n for _, n in plans[0]]
    assert len(rows) == min(budget, running) and sum(rows) == min(budget, 64 * running)
    assert all(1 <= n <= 64 for n in rows)
    assert all(len(request.tables[0]) == -(-n // 16) for request, n in plans[0])


def test_a_step_that_failed_is_forgotten_before_its_requests_run_alone(monkeypatch):
    """Else what it has allocated is missing where memory ran out."""
    engine, tensors, freed = build(), [], []
    compute = engine._compute

    def fail(plan):
        if len(plan) == 1:
            freed.append(tensors[0]() is None)
            return compute(plan)
        held = torch.ones(1)
        tensors.append(weakref.ref(held))
        raise torch.OutOfMemoryError(f"CUDA out of memory, {len(held)} held")

    monkeypatch.setattr(engine, "_compute", fail)
    outputs = engine.generate(["Octavo", "reads"], greedy(1))
    assert [output.finish_reason for output in outputs] == ["length"] * 2
    assert freed == [True, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda_is_refused():
    with pytest.raises(ValueError, match="cuda.*no CUDA device"):
        build(device="cuda:1")


def test_unknown_keywords_are_refused():
    with pytest.raises(TypeError, match="speculate"):
        build(speculate=True)
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)
    with pytest.raises(TypeError, match="sampling"):
        build().generate("hi", sampling=None)


@pytest.mark.parametrize(
    ("given", "allowed", "then"),
    [(3, (8, 4), 3), (8, (8, 4), 8), (None, (8, 4), 4), (None, (8, 8), 6), (None, (1, 1), 1)],
)
def test_threads_are_set_and_a_default_is_lowered_to_the_cores(given, allowed, then, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(generate, "available_cores", lambda: allowed)
    try:
        torch.set_num_threads(6)  # what PyTorch would take
        build(threads=given)
        assert torch.get_num_threads() == then
    finally:
        torch.set_num_threads(before)


CPU = "sys/fs/cgroup/cpu"
QUOTAS = {  # files below / -> CPUs that may be used, of 8
    "none": ({}, 8),
    "v2": ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "150000 100000"}, 2),
    "v2, above": ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "300000 100000"}, 3),
    "v2, own root": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "20000 100000"}, 1),
    "v2, least": (
        {
            "proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "max 100000",
            "sys/fs/cgroup/cpu.max": "400000 100000",
        },
        4,
    ),
    "v1": (
        {
            "proc/self/cgroup": "5:memory:/x\n3:cpu,cpuacct:/d\n0::/",
            f"{CPU}/d/cpu.cfs_quota_us": "250000", f"{CPU}/d/cpu.cfs_period_us": "100000",
        },
        3,
    ),
    "v1, seen from inside": (
        {
            "proc/self/cgroup": "3:cpu:/docker/d", f"{CPU}/cpu.cfs_quota_us": "50000",
            f"{CPU}/cpu.cfs_period_us": "100000",
        },
        1,
    ),
    "v1, no limit": (
        {
            "proc/self/cgroup": "3:cpu:/", f"{CPU}/cpu.cfs_quota_us": "-1",
            f"{CPU}/cpu.cfs_period_us": "100000",
        },
        8,
    ),
    "more than there are": (
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "1600000 100000"}, 8,
    ),
    "damaged": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "many"}, 8),
}  # fmt: skip


@pytest.mark.parametrize("name", QUOTAS)
def test_a_containers_quota_counts_as_cores(name, tmp_path, monkeypatch):
    files, expected = QUOTAS[name]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text + "\n")
    assert generate.available_cores(tmp_path) == (expected, expected)


def test_two_threads_of_a_core_are_one_core(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 5}, raising=False)
    for cpu, siblings in {0: "0,4", 1: "1,5", 2: "2,6", 5: "1,5"}.items():
        file = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(siblings)
    assert generate.available_cores(tmp_path) == (4, 3)


# ---------------------------------------------------------------- prefill against decode


@pytest.fixture
def measured(monkeypatch):
    """The machine's rates are known: measuring them takes a second."""
    monkeypatch.setattr(models, "multiply_rate", lambda device, dtype: 1e11)


def ended(engine: Engine, prompt="Octavo reads on", **settings):
    stream = engine.stream(prompt, greedy(4, **settings))
    for _ in stream:
        pass
    return stream.request


@pytest.mark.parametrize("settings", [{}, {"budget": 8}, {"reserve": True}, {"block_size": 8}])
def test_a_profile_runs_both_steps_and_leaves_nothing(settings, measured, tmp_path):
    engine = build(**settings)
    request = ended(engine)
    state = [*request.tokens], request.computed, engine.manager.cached, engine.counts.steps
    text = generate.profile(engine, request, str(tmp_path / "p.json"))
    n = min(15, engine.scheduler.budget)
    assert re.search(rf"^prefill: {n} tokens in one step, context {n}, ", text, re.M)
    assert re.search(r"^decode: 1 token in one step, context 16, ", text, re.M)
    for name in ("prepare", "rms_norm", "rope", "store_kv", "attention", "logits"):
        assert len(re.findall(f"^{name} ", text, re.M)) == 2, name
    sampled = len(re.findall("^sampling ", text, re.M))
    assert sampled == (2 if n == 15 else 1), "a chunk of a prompt is not sampled"
    events = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {"prefill", "decode", "attention", "sampling"} <= names
    check_idle(engine)
    assert state == (request.tokens, request.computed, engine.manager.cached, engine.counts.steps)
    again = engine.generate("Octavo reads on", greedy(4))[0]
    assert again.token_ids == request.output


@pytest.mark.parametrize("budget", [4, 8, 64])
def test_a_profiles_steps_are_those_of_the_answer(budget, measured, tmp_path, monkeypatch):
    """Its decode reads the whole prompt's keys, and draws the token that the answer has."""
    engine = build(budget=budget)
    request = ended(engine)
    tiny.poisoned(engine.cache)
    compute, drawn = engine._compute, []

    def kept(plan):
        *rest, runs = compute(plan)
        drawn.append((plan[0][0].computed, plan[0][1], [id for run in runs for id, *_ in run]))
        return *rest, runs

    monkeypatch.setattr(engine, "_compute", kept)
    generate.profile(engine, request, str(tmp_path / "p.json"))
    decodes = [ids for start, _, ids in drawn if start == 15]
    assert len(decodes) >= 3 and all(ids == request.output[1:2] for ids in decodes)
    assert {(start, n) for start, n, _ in drawn if start == 0} == {(0, min(budget, 15))}


@pytest.mark.parametrize("family", ["mistral_sliding", "gemma3_old", "qwen3_5"])
def test_a_profile_over_windows_and_states_is_of_the_answer(
    family, measured, tmp_path, monkeypatch
):
    """A prompt longer than the window's blocks was refused; a decode read the state before the
    first token."""
    prompt, answer = golden(family)
    engine = of_golden(family, 24, max_running=1)
    request = engine.add(prompt, greedy(3))
    run(engine)
    compute, drawn = engine._compute, []

    def kept(plan):
        result = compute(plan)
        drawn.append((plan[0][0].computed, [id for run in result[-1] for id, *_ in run]))
        return result

    monkeypatch.setattr(engine, "_compute", kept)
    generate.profile(engine, request, str(tmp_path / "p.json"))
    decodes = [ids for start, ids in drawn if start == len(prompt)]
    assert len(decodes) >= 3 and all(ids == answer[1:2] for ids in decodes)
    check_idle(engine)


@pytest.mark.parametrize("where", ["profile", "read_bandwidth"])
def test_a_profile_that_is_interrupted_gives_its_blocks_back(
    where, measured, monkeypatch, tmp_path
):
    engine = build()
    request = ended(engine)
    owner = models if where == "profile" else generate
    monkeypatch.setattr(owner, where, raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        generate.profile(engine, request, str(tmp_path / "p.json"))
    check_idle(engine)
    assert engine.generate("Octavo reads on", greedy(4))[0].token_ids == request.output


def test_a_profile_without_room_is_refused(measured, tmp_path):
    engine = build(kv_memory=pool(3), prefix_cache=False)
    request = ended(engine)
    blocker = engine.add("x" * 33, greedy(9))
    engine.step()
    with pytest.raises(ValueError, match="no room in the cache for 16 tokens"):
        generate.profile(engine, request, str(tmp_path / "p.json"))
    engine.abort(blocker)
    check_idle(engine)


def test_profile_prints_the_answer_as_ever_and_writes_its_file(cli, measured, tmp_path):
    path = tmp_path / "out.json"
    code, out, err = cli("--prompt", "hi", *GREEDY, "--profile", str(path))
    assert (code, out) == (0, answer("u:hi\na:") + "\n")
    for words in ("^tokens ", "^prefill: 7 tokens", "^decode: 1 token", "^a prompt token takes",
                  f"^trace    {re.escape(str(path))} "):  # fmt: skip
        assert re.search(words, err, re.M), err
    assert json.loads(path.read_text())["traceEvents"]


def test_a_profiles_default_file_is_in_the_current_folder(cli, measured, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli("--prompt", "hi", *GREEDY, "--profile")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--profile",),
        ("--prompts", "x", "--profile"),
        ("--prompt", "hi", "--json", "--profile"),
        ("--prompt", "hi", "--n", "2", "--profile"),
        ("--demo", "--profile"),
    ],
)
def test_a_profile_is_of_one_prompt(cli, flags):
    code, out, err = cli(*flags)
    assert (code, out) == (2, "") and "--pro" in err and "Traceback" not in err


@pytest.mark.parametrize("path", ["", ".", "none/p.json"])
def test_a_profiles_file_is_refused_before_the_model_is_loaded(cli, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generate, "Engine", raising(AssertionError("loaded")))
    code, out, err = cli("--prompt", "hi", "--profile", path)
    assert (code, out, err.count("\n")) == (1, "", 1) and "no file that can be written" in err


# ---------------------------------------------------------------- random weights


@pytest.fixture
def config(folder, tmp_path) -> Path:
    """A config.json and nothing else."""
    shape = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shape | {"vocab_size": 300}))
    return tmp_path / "config.json"


def test_a_config_alone_answers_with_random_weights(config, capsys):
    flags = ("--prompt", "hi", "--load", "dummy", "--device", "cpu", "--dtype", "float32")
    code = generate.main([*flags, "--model", str(config), *GREEDY])
    out, err = capsys.readouterr()
    assert code == 0 and out.strip()
    assert "random weights: the text means nothing, the times do\n" in err
    assert "tokens   3 prompt + 12 output" in err  # "hi" and the end of a message, in bytes
    assert generate.main([*flags, "--model", str(config), *GREEDY]) == 0
    assert capsys.readouterr()[0] == out, "the same weights every time"


def test_random_weights_write_ids_that_are_no_bytes_as_numbers(config):
    engine = Engine(str(config), load="dummy", device="cpu", dtype="float32", max_len=64)
    assert engine.bytes_of(104) == b"h" and engine.bytes_of(299) == b" 299"
    assert engine.stop_ids == {256} and engine.tokenizer.encode("h 299") == [*b"h 299"]


def test_random_weights_use_a_folders_tokenizer(folder):
    engine = Engine(str(folder), load="dummy", device="cpu", dtype="float32", max_len=64)
    assert engine.stop_ids == {END}
    with pytest.raises(ValueError, match="300"):
        engine.add([300])
    assert engine.generate("hi", greedy(3))[0].finish_reason == "length"


def test_random_weights_of_few_ids_take_ids_only(config):
    shape = json.loads(config.read_text())
    config.write_text(json.dumps(shape | {"vocab_size": 256}))
    engine = Engine(str(config), load="dummy", device="cpu", dtype="float32", max_len=64)
    with pytest.raises(ValueError, match="no tokenizer"):
        engine.add("hi")
    assert len(engine.generate([1, 2], greedy(3))[0].token_ids) == 3


def test_random_weights_that_do_not_fit_are_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(generate, "_free_bytes", lambda device: 10 * 2**30)
    made = []
    monkeypatch.setattr(models.RandomTensors, "__getitem__", lambda self, name: made.append(name))
    with pytest.raises(ValueError, match=r"Qwen3-32B needs 61\.0 GiB .*10\.0 GiB are free"):
        Engine("Qwen3-32B", load="dummy", device="cpu", dtype="bfloat16")
    assert not made


# ---------------------------------------------------------------- the command line

POSITIONS = 100_000  # enough to be interrupted in


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The tiny model as people have models: config.json, model.safetensors, tokenizer.json."""
    whole, path = generate.byte_checkpoint(), tmp_path_factory.mktemp("tiny")
    spec = dict(whole.tokenizer)
    special = spec.pop("special_tokens")
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
        "vocab_size": END + 1, "max_position_embeddings": POSITIONS,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(json.dumps(spec))
    settings = {**special, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    save_file(dict(whole.tensors), path / "model.safetensors")
    return path


@pytest.fixture
def cli(folder, capsys, monkeypatch):
    """Run the command line in this process: exit code, standard output, standard error."""

    def call(*arguments, stdin: str | None = None):
        typed = io.TextIOWrapper(io.BytesIO((stdin or "").encode()), "utf-8")
        monkeypatch.setattr(sys, "stdin", typed)
        common = ["--model", str(folder), "--device", "cpu", "--dtype", "float32"]
        try:
            code = generate.main([*arguments, *common, "--max-len", "256", "--threads", "1"])
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code, out, err

    return call


GREEDY = ("--temperature", "0", "--max-tokens", "12", "--ignore-eos")


def answer(prompt: str, tokens: int = 12) -> str:
    return build(max_len=256).generate(prompt, greedy(tokens))[0].text


def test_a_prompt_answers_on_stdout_and_reports_on_stderr(cli):
    code, out, err = cli("--prompt", "hi", *GREEDY)
    assert (code, out) == (0, answer("u:hi\na:") + "\n")
    assert "tokens   7 prompt + 12 output, length" in err
    for word in ("TTFT", "TPOT", "cache", "bound"):
        assert re.search(f"^{word} ", err, re.M), err
    assert "stage" not in err


def test_system_raw_and_stdin(cli):
    assert cli("--prompt", "hi", "--system", "be", *GREEDY)[1] == answer("s:be\nu:hi\na:") + "\n"
    assert cli("--prompt", "hi", "--raw", *GREEDY)[1] == answer("hi") + "\n"
    assert cli("--prompt", "-", "--raw", *GREEDY, stdin="hi\n")[1] == answer("hi\n") + "\n"
    loud = cli("--prompt", "hi", "--template", "loud=true", *GREEDY)[1]
    assert loud == answer("u:hi\nLOUD a:") + "\n"


def test_quiet_prints_the_answer_only(cli):
    assert cli("--prompt", "hi", "--quiet", *GREEDY) == (0, answer("u:hi\na:") + "\n", "")


def test_json_is_one_object(cli):
    code, out, err = cli("--prompt", "hi", "--raw", "--json", "--logprobs", "2", *GREEDY)
    whole = json.loads(out)
    assert (code, err.count("\n"), out.count("\n")) == (0, 1, 1) and err.startswith("cache: ")
    assert set(whole) == {"text", "token_ids", "finish_reason", "stop_reason", "logprobs",
                          "usage", "timings", "load_s"}  # fmt: skip
    assert whole["text"] == answer("hi") and len(whole["token_ids"]) == 12
    assert [entry["id"] for entry in whole["logprobs"]] == whole["token_ids"]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("length", None)
    assert whole["usage"]["prompt_tokens"] == 2 and whole["timings"]["ttft_s"] > 0


def test_samples_and_a_seed(cli):
    draw = ("--prompt", "hi", "--raw", "--max-tokens", "6", "--seed", "3", "--n", "2", "--quiet")
    code, out, _ = cli(*draw)
    assert code == 0 and "sample 1 of 2" in out and "sample 2 of 2" in out
    assert cli(*draw)[1] == out
    samples = json.loads(cli(*draw, "--json")[1])["samples"]
    expected = build(max_len=256).generate("hi", SamplingParams(max_tokens=6, seed=3, n=2))
    assert [s["token_ids"] for s in samples] == [output.token_ids for output in expected]
    one = ("--prompt", "hi", "--raw", "--max-tokens", "6", "--quiet", "--json", "--seed")
    ids = [json.loads(cli(*one, seed)[1])["token_ids"] for seed in ("3", "4", "3")]
    assert ids[0] == ids[2] == samples[0]["token_ids"] and ids[0] != ids[1]


def test_stop_strings_and_stop_ids(cli):
    text = answer("hi")
    stop = text[5:7]
    code, out, err = cli("--prompt", "hi", "--raw", "--stop", "never", "--stop", stop, *GREEDY)
    assert (code, out) == (0, text[: text.index(stop)] + "\n")
    assert f"stop ({stop!r})" in err
    (third,) = build().generate("hi", greedy(3))
    whole = cli("--prompt", "hi", "--raw", "--json", *GREEDY, "--stop-token-id",
                str(third.token_ids[-1]))[1]  # fmt: skip
    assert json.loads(whole)["finish_reason"] == "stop"


def test_trace_draws_the_stages_in_order(cli):
    code, out, err = cli("--prompt", "hi", "--trace", *GREEDY)
    assert code == 0 and out == answer("u:hi\na:") + "\n"
    names = ["template", "tokenised", "scheduled", "prefill", "first token", "detokenised",
             "streamed", "token 2", "token 4", "token 8", "last token (12)"]  # fmt: skip
    places = [re.search(f"^{re.escape(name)} ", err, re.M) for name in names]
    assert all(places), err
    assert [m.start() for m in places] == sorted(m.start() for m in places)
    assert re.search(r"loaded in \d+\.\d\d s", err)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "hi", "--banana"], "--banana"),
        (["--prompt", "hi", "--max-tok", "3"], "--max-tok"),
        (["--prompt", "hi", "--max-tokens", "0"], "max_tokens 0"),
        (["--prompt", "hi", "--temperature", "-1"], "temperature -1"),
        (["--prompt", "hi", "--top-p", "1.5"], "top_p 1.5"),
        (["--prompt", "hi", "--stop", ""], "stop"),
        (["--prompt", "hi", "--logit-bias", "7"], "'7' is not ID=BIAS"),
        (["--prompt", "hi", "--logprobs", "3"], "--json"),
        (["--prompt", "hi", "--kv-memory", "lots"], "'lots'"),
        (["--prompt", "hi", "--kv-memory", "0"], "above 0"),
        (["--prompt", "hi", "--template", "loud"], "NAME=VALUE"),
        (["--prompt", "hi", "--regex", "a("], "regex"),
        (
            ["--prompt", "hi", "--regex", "a", "--choice", "b"],
            "regex and choice: a text can follow",
        ),
        (["--prompt", "hi", "--json-schema", "{"], "JSON"),
        (["--prompt", "hi", "--json-schema", "nowhere.json"], "nowhere.json"),
        (["--prompt", "hi", "--json-schema", '{"uniqueItems": true}'], "uniqueItems"),
        (["--prompt", "hi", "--grammar", "nowhere.gbnf"], "nowhere.gbnf"),
        (["--prompt", "hi", "--think-end", "x"], "--think-end and --no-jump go with a grammar"),
        (["--prompt", "hi", "--no-jump"], "--think-end and --no-jump go with a grammar"),
        (["--prompt", "hi", "--regex", "a", "--json-lenient"], "go with --json-schema"),
        (["--prompt", "hi", "--json-whitespace", "some"], "some"),
        (["--prompts", "x", "--regex", "a("], "regex"),
        ([], "--prompt is needed"),
        (["--json"], "--prompt is needed"),
        (["--raw"], "--prompt is needed"),
    ],
)
def test_wrong_usage_is_2_with_a_usage_line(cli, arguments, words):
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("usage: generate.py") and words in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "no-such-model"], "no-such-model"),
        (["--model", "no-such.gguf"], "no-such.gguf"),
        (["--model", "./nowhere/at/all"], "nowhere"),
        (["--threads", "0"], "threads 0"),
        (["--device", "tpu"], "tpu"),
        (["--budget", "0"], "budget 0"),
        (["--max-len", "1"], "max_len 1"),
        (["--kv-memory", "100"], "kv_memory 100"),
        (["--prompt", ""], "a chat|tokens|empty|answer"),
        (["--prompt", "x" * 300, "--max-len", "256"], "304|305|306"),
        (["--raw", "--prompt", ""], "no tokens"),
        (["--stop-token-id", "999"], "999"),
    ],
)
def test_a_failure_is_1_with_one_sentence(folder, capsys, arguments, words):
    common = ["--prompt", "hi", "--model", str(folder), "--max-tokens", "2", "--ignore-eos"]
    code = generate.main([*common, "--dtype", "float32", "--device", "cpu", *arguments])
    out, err = capsys.readouterr()
    if arguments == ["--prompt", ""]:  # an empty message is a message
        assert code == 0
        return
    assert (code, out) == (1, "")
    lines = [line for line in err.splitlines() if not line.startswith("cache: ")]
    assert len(lines) == 1 and lines[0].startswith("generate.py: ") and re.search(words, err)


def test_a_failed_answer_is_1(cli, monkeypatch):
    def broken(self, hidden):
        raise RuntimeError("device lost")

    monkeypatch.setattr(models.Model, "logits", broken)
    code, out, err = cli("--prompt", "hi", *GREEDY)
    assert (code, out) == (1, "\n") and "error ('device lost')" in err
    code, out, _ = cli("--prompt", "hi", "--json", *GREEDY)
    assert code == 1 and json.loads(out)["finish_reason"] == "error"


def test_an_answer_by_a_grammar_says_what_it_cost(cli, tmp_path):
    code, out, err = cli("--prompt", "hi", *GREEDY, "--regex", "[xy]{2} and z")
    assert code == 0 and re.fullmatch("[xy]{2} and z\n", out)
    assert "stop (nothing can follow)" in err and "6 of 8 tokens forced" in err
    assert re.search(
        r"^grammar  compiled in \d+\.\d ms, vocabulary in \d+ ms; 2 masks in ", err, re.M
    )
    assert re.search(
        r"^masked   \d+\.\d% of the probability on average, .* at most \(token [01]\)", err, re.M
    )
    code, out, err = cli("--prompt", "hi", *GREEDY, "--regex", "[xy]{2} and z", "--no-jump")
    assert re.fullmatch("[xy]{2} and z\n", out) and "0 of 8 tokens forced" in err
    code, out, err = cli("--prompt", "hi", *GREEDY, "--choice", "maybe so", "--choice", "never")
    assert code == 0 and out in ("maybe so\n", "never\n")
    (tmp_path / "g").write_text('root ::= "é" | "né"')
    code, out, err = cli("--prompt", "hi", *GREEDY, "--grammar", str(tmp_path / "g"))
    assert code == 0 and out in ("é\n", "né\n")
    code, out, err = cli("--prompt", "hi", *GREEDY, "--think-end", "33", "--choice", "a")
    assert "masked   nothing: no token was sampled under the grammar" in err
    code, out, err = cli("--prompt", "hi", *GREEDY, "--think-end", "33", "--choice", "a", "--json")
    assert code == 0 and json.loads(out)["usage"]["masks"] == 0


SCHEMA = """{
    "type": "object", "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer"}},
    "required": ["name", "age"], "additionalProperties": false
}"""


def test_a_schema_is_given_inline_or_in_a_file(cli, tmp_path):
    (tmp_path / "s.json").write_text(SCHEMA)
    flags = ("--temperature", "0", "--max-tokens", "60", "--json-whitespace", "compact", "--json")
    for source in (SCHEMA, str(tmp_path / "s.json")):
        code, out, _ = cli("--prompt", "hi", *flags, "--json-schema", source)
        output = json.loads(out)
        assert code == 0 and output["finish_reason"] == "stop"
        assert re.fullmatch('{"name":"(Ann|Bob)","age":-?[0-9]+(\\.0+)?}', output["text"])
        assert output["usage"]["masks"] + output["usage"]["forced_tokens"] >= len(output["text"])
        assert output["timings"]["compile_s"] > 0
    lenient = '{"type": "string", "maxLength": 5, "pattern": "a(?=b)"}'
    code, out, err = cli("--prompt", "hi", *flags, "--json-schema", lenient)
    assert (code, out) == (2, "") and "#/pattern: look-ahead is not supported" in err
    code, out, err = cli("--prompt", "hi", *flags[:-1], "--json-lenient", "--json-schema", lenient)
    assert code == 0 and re.search("^ignored  .*pattern", err, re.M)
    (tmp_path / "latin").write_bytes(b'root ::= "\xe9"')
    for flag, given, words in (
        ("--json-schema", "missing.json", "'missing.json': No such file"),
        ("--json-schema", "[1]", "#: "),
        ("--grammar", "missing.gbnf", "'missing.gbnf': No such file"),
        ("--grammar", str(tmp_path / "latin"), "not UTF-8 text"),
    ):
        code, out, err = cli("--prompt", "hi", flag, given)
        assert (code, out) == (2, "") and words in err and "Errno" not in err


def test_chat_keeps_the_conversation(folder, capsys, monkeypatch):
    typed = iter(["one", "  ", "x" * 300, "two"])

    def ask(prompt):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError

    seen = []
    stream = Engine.stream
    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(Engine, "stream", lambda self, messages, *rest: seen.append(
        [dict(m) for m in messages]) or stream(self, messages, *rest))  # fmt: skip
    arguments = ["--model", str(folder), "--system", "be", "--dtype", "float32", "--device", "cpu"]
    assert generate.main([*arguments, "--max-len", "256", *GREEDY]) == 0
    out, err = capsys.readouterr()
    first = [{"role": "system", "content": "be"}, {"role": "user", "content": "one"}]
    said = {"role": "assistant", "content": answer("s:be\nu:one\na:")}
    assert seen[0] == first
    assert seen[1] == [*first, said, {"role": "user", "content": "x" * 300}]  # refused: too long
    assert seen[2] == [*first, said, {"role": "user", "content": "two"}]
    assert said["content"] in out and "the most is 255" in err
    assert len(re.findall(r"^tokens   ", err, re.M)) == 2


def test_a_home_that_cannot_be_written_is_no_obstacle(cli, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(models, "CACHE", tmp_path / "file" / "octavo")
    code, out, err = cli("--prompt", "hi", *GREEDY)
    assert (code, out) == (0, answer("u:hi\na:") + "\n") and "bound" in err


@pytest.mark.parametrize("broken", ["", "{", "[1]", "null", '"x"', "{}", "\xff"])
def test_a_broken_bandwidth_file_is_measured_again(broken, monkeypatch, tmp_path):
    monkeypatch.setattr(models, "CACHE", tmp_path)
    monkeypatch.setattr(generate.torch, "ones", lambda *shape, device: torch.zeros(8, 8))
    (tmp_path / "bandwidth.json").write_bytes(broken.encode("latin-1"))
    measured = generate.read_bandwidth(torch.device("cpu"))
    assert measured > 0
    assert list(json.loads((tmp_path / "bandwidth.json").read_text()).values()) == [measured]
    assert generate.read_bandwidth(torch.device("cpu")) == measured  # kept


def write_gguf(path: Path):
    """The tiny model in llama.cpp's format."""
    gguf = pytest.importorskip("gguf")
    whole = generate.byte_checkpoint()
    vocab = whole.tokenizer["model"]["vocab"]
    names = sorted(vocab, key=vocab.get)
    w = gguf.GGUFWriter(str(path), "llama")
    w.add_block_count(2)
    w.add_embedding_length(32)
    w.add_head_count(4)
    w.add_head_count_kv(2)
    w.add_key_length(8)
    w.add_feed_forward_length(64)
    w.add_context_length(256)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list([*names, "<end>", "ab"])
    w.add_token_types([1] * END + [3, 1])
    w.add_token_merges(["a b"])
    w.add_eos_token_id(END)
    short = {theirs: ours for ours, theirs in models.GGUF_BLOCK.items()}
    for name, tensor in whole.tensors.items():
        part = name.rpartition(".")[0]
        if part == "model.embed_tokens" or part == "lm_head":
            tensor = torch.cat((tensor, tensor[:1]))  # a row for "ab"
        if part.startswith("model.layers."):
            _, _, layer, inner = part.split(".", 3)
            part = f"blk.{layer}.{short[inner]}"
        else:
            part = {theirs: ours for ours, theirs in models.GGUF_NAMES.items()}[part]
        w.add_tensor(part + ".weight", tensor.numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.mark.parametrize("broken", ["truncated", "empty", "other", "a folder"])
def test_a_broken_parsed_copy_is_parsed_anew(broken, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(models, "CACHE", tmp_path / "cache")
    write_gguf(tmp_path / "tiny.gguf")
    arguments = ["--model", str(tmp_path / "tiny.gguf"), "--prompt", "hi", "--raw", "--quiet"]
    arguments += ["--dtype", "float32", "--device", "cpu", *GREEDY]
    assert generate.main(arguments) == 0
    expected = capsys.readouterr().out
    (kept,) = (tmp_path / "cache" / "parsed").glob("*.json")
    whole = kept.read_bytes()
    if broken == "a folder":
        kept.unlink()
        kept.mkdir()
    else:
        kept.write_bytes({"truncated": whole[:1000], "empty": b"", "other": b"[]"}[broken])
    assert generate.main(arguments) == 0
    assert capsys.readouterr().out == expected
    if broken != "a folder":
        assert kept.read_bytes() == whole


# ---------------------------------------------------------------- as its own process


@pytest.fixture(scope="module")
def spawn(folder, tmp_path_factory):
    """Start generate.py as people do."""
    home = tmp_path_factory.mktemp("home")
    started = []

    def start(*arguments, **settings):
        command = [sys.executable, str(ROOT / "generate.py"), "--model", str(folder)]
        command += ["--device", "cpu", "--dtype", "float32", "--threads", "1", *arguments]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = {**os.environ, "HOME": str(home), "PYTHONUTF8": "1"}
        environment.pop("PYTHONUNBUFFERED", None)
        process = subprocess.Popen(command, env=environment, bufsize=0, **pipes | settings)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


ENDLESS = ("--temperature", "0", "--ignore-eos", "--max-tokens", str(POSITIONS - 100))


def test_ctrl_c_keeps_the_text_and_prints_the_summary(spawn):
    process = spawn("--prompt", "hi", "--raw", *ENDLESS)
    shown = b""
    while len(shown) < 40:
        shown += process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    text, report = (shown + rest).decode(), err.decode()
    assert process.returncode == 130, report
    assert text.endswith("\n") and "Traceback" not in report
    tokens = int(re.search(r"2 prompt \+ (\d+) output, abort", report)[1])
    assert 5 <= tokens < POSITIONS - 100
    few = min(tokens, 80)
    assert text[:-1][: few // 4] == answer("hi", few)[: few // 4]
    assert "TTFT" in report and "bound" in report


@pytest.mark.parametrize("flags", [ENDLESS, ("--json", *GREEDY)], ids=["stream", "json"])
def test_a_reader_that_goes_away_is_no_traceback(spawn, flags):
    process = spawn("--prompt", "hi", "--raw", *flags)
    if "--json" not in flags:
        process.stdout.read(5)
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(timeout=60) in (0, 1)
    assert "Traceback" not in err and "BrokenPipe" not in err, err


class Terminal:
    """A person at a terminal: types, and waits for what is printed."""

    def __init__(self, spawn, *arguments):
        self.master, slave = pty.openpty()

        def own_terminal():
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = spawn(
            *arguments, stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True, preexec_fn=own_terminal,
        )  # fmt: skip
        os.close(slave)
        self.printed = ""

    def wait_for(self, pattern: str, seconds: float = 60) -> str:
        """Read until the pattern matches what was printed since the last match."""
        until = time.monotonic() + seconds
        while not (match := re.search(pattern, self.printed, re.S)):
            ready, _, _ = select.select([self.master], [], [], max(0, until - time.monotonic()))
            assert ready, f"{pattern!r} did not come; there is {self.printed!r}"
            try:
                self.printed += os.read(self.master, 4096).decode("utf-8", "replace")
            except OSError:  # the other side closed the terminal
                raise AssertionError(f"{pattern!r} did not come; there is {self.printed!r}")
        self.printed, before = self.printed[match.end() :], self.printed[: match.end()]
        return before

    def type(self, text: str):
        os.write(self.master, text.encode())


def test_chat_on_a_terminal(spawn):
    chat = Terminal(spawn, "--temperature", "0", "--ignore-eos", "--max-tokens", "2000")
    chat.wait_for("Ctrl-D ends.*> ")
    chat.type("hi\n")
    chat.wait_for("hi\r?\n.{10}")
    chat.type("\x03")
    chat.wait_for(r"7 prompt \+ \d+ output, abort.*> ")
    chat.type("again\n")
    chat.wait_for(r"2000 output, length.*> ")
    chat.type("\x04")
    assert chat.process.wait(timeout=60) == 0
    os.close(chat.master)


# ---------------------------------------------------------------- regressions


def test_a_stream_that_has_ended_stays_ended():
    """next() after the end, or after close(), raised KeyError instead of StopIteration."""
    engine = build()
    stream = engine.stream("hi", greedy(3))
    assert list(stream) and list(stream) == [] and next(stream, None) is None
    stream = engine.stream("hi", greedy(3))
    next(stream)
    stream.close()
    assert list(stream) == []


def test_a_failure_while_forking_ends_all_samples():
    """A copy of the cache that failed left children running that nobody had asked for."""
    engine = build()

    def broken(*arguments):
        raise RuntimeError("no memory")

    engine.cache.copy = broken
    request = engine.add("hello", SamplingParams(max_tokens=4, n=3))
    engine.step()
    assert {sampled.finish_reason for sampled in request.family} == {"error"}
    check_idle(engine)


def test_astream_cancelled_during_a_step_frees_its_slot():
    """The step's thread met a mailbox that was gone, and the slot stayed held."""
    engine = build()
    slowed(engine, 0.05)

    async def cancelled():
        async def read():
            async for _ in engine.astream("hello", greedy(40)):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.12)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())  # waits for its threads
    check_idle(engine)


def test_a_stream_closed_during_anothers_step_knows_that_it_was_aborted():
    """output.finish_reason was None, and the step in flight still added a token afterwards."""
    engine = build()
    stream = engine.stream("hi", greedy(30))
    next(stream)
    slowed(engine, 0.1)
    other = threading.Thread(target=engine.generate, args=("other", greedy(2)))
    other.start()
    time.sleep(0.03)  # inside the step
    stream.close()
    other.join()
    assert stream.output.finish_reason == "abort"
    assert stream.output.token_ids == stream.request.output
    check_idle(engine)


def test_a_step_of_another_thread_right_after_add_loses_no_text(monkeypatch):
    """The mailbox was opened after the request was queued: events between got lost."""
    engine = build()
    add, threads = engine.scheduler.add, []

    def add_and_step(request):
        add(request)
        # somebody who waits longer than this request runs, and so drives it
        waits = type("Waits", (), {"finished": property(lambda self: request.finished)})()
        waits.stream = SimpleNamespace(inbox=deque())
        threads.append(threading.Thread(target=engine.receive, args=(waits,), daemon=True))
        threads[0].start()
        threads[0].join(0.5)

    monkeypatch.setattr(engine.scheduler, "add", add_and_step)
    stream = engine.stream("hi", greedy(8))
    assert "".join(stream) == stream.output.text != ""
    threads[0].join(60)
    assert not threads[0].is_alive()


def test_steps_by_hand_lose_no_text_of_a_stream():
    """step() gave a stream's events to its caller only."""
    engine = build()
    stream = engine.stream("hi", greedy(8))
    engine.step()
    engine.step()
    assert "".join(stream) == stream.output.text


def test_max_running_0_is_refused():
    """It was taken for "not given"."""
    with pytest.raises(ValueError, match="max_running"):
        build(max_running=0)


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_ctrl_c_during_a_prompt_is_heard_before_the_next_step(cli, monkeypatch, flags):
    """The stream asked only between pieces of text: a long prefill could not be stopped."""
    passes, forward = [], models.Model.__call__

    def interrupted(self, *arguments):
        passes.append(1)
        if len(passes) == 3:
            signal.raise_signal(signal.SIGINT)
        return forward(self, *arguments)

    monkeypatch.setattr(models.Model, "__call__", interrupted)
    code, out, err = cli("--prompt", "x" * 100, "--raw", "--budget", "1", *flags, *GREEDY)
    assert code == 130 and len(passes) <= 4
    assert "100 prompt + 0 output, abort" in err if not flags else '"abort"' in out


def test_two_threads_that_add_at_once_keep_the_order():
    """Numbers were given before the queue was entered: a later number could stand first."""
    engine, make = build(), Engine._stream
    other = threading.Thread(target=engine.add, args=("b",))

    def interleaved(request, *guide):
        if request.id == 0:
            other.start()
            other.join(0.2)
        return make(engine, request, *guide)

    engine._stream = interleaved
    engine.add("a")
    other.join()
    engine.check()
    assert [request.id for request in engine.scheduler.arrived] == [0, 1]


def test_flags_that_have_no_effect_are_refused(cli):
    """--raw took --system and --template and did nothing with them."""
    assert cli("--prompt", "hi", "--raw", "--system", "be", *GREEDY)[0] == 2
    assert cli("--prompt", "hi", "--raw", "--template", "loud=true", *GREEDY)[0] == 2


def test_a_device_that_torch_cannot_read_is_refused(cli):
    """RuntimeError, so a traceback on the command line."""
    with pytest.raises(ValueError, match="cpu:banana"):
        build(device="cpu:banana")


def test_a_step_that_fails_in_any_way_ends_its_own_requests_only():
    """An OverflowError (a penalty of 1e300) left its request in every later step, for ever."""
    engine = build()
    failing_for(engine, 0, 0, OverflowError("too large"))
    outputs = engine.generate(["bad", "good"], greedy(3))
    assert [o.finish_reason for o in outputs] == ["error", "length"]
    assert outputs[0].stop_reason == "too large"
    check_idle(engine)


@pytest.mark.parametrize("where", ["_cut", "_fork"])
def test_ctrl_c_between_the_lines_of_a_step_leaves_nothing_torn(where):
    """A token cut but not committed was drawn and shown a second time by the next step."""
    engine = build()
    expected = engine.generate("other", greedy(6))[0].token_ids
    whole = getattr(engine, where)

    def interrupted(*arguments):
        setattr(engine, where, whole)
        whole(*arguments)
        raise KeyboardInterrupt

    setattr(engine, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate("hello", SamplingParams(max_tokens=5, n=3))
    check_idle(engine)
    assert engine.generate("other", greedy(6))[0].token_ids == expected


def test_a_request_interrupted_while_it_is_admitted_can_still_be_aborted(monkeypatch):
    """It was in neither list, so nothing could end it and a loop that waited for it spun."""
    engine = build()
    request = engine.add("hello", greedy(5))
    with monkeypatch.context() as patch:
        patch.setattr(engine.manager, "match", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.abort(request)
    assert request.finish_reason == "abort"
    check_idle(engine)


def raising(error: BaseException):
    def call(*arguments):
        raise error

    return call


@pytest.mark.parametrize(
    "name",
    ["kv_memory", "block_size", "max_len", "max_running", "budget", "seed", "threads"],
)
def test_an_engine_refuses_what_is_no_integer(name):
    """They were TypeErrors, or came up much later."""
    with pytest.raises(ValueError, match=f"{name} '2' is not an integer"):
        build(**{name: "2"})


@pytest.mark.parametrize("threads", [0, -1, 3, 2**40])
def test_threads_have_a_limit(threads, monkeypatch):
    """Five thousand threads ran for a minute and said two words."""
    monkeypatch.setattr(generate, "available_cores", lambda: (2, 1))
    with pytest.raises(ValueError, match=f"threads {threads}: from 1 to the 2 that"):
        build(threads=threads)


@pytest.mark.parametrize("name", ["messages", "self", "tokenizer"])
def test_a_template_variable_may_have_any_name(cli, name):
    """--template messages=3 was a TypeError with a traceback."""
    code, _, err = cli("--prompt", "hi", "--template", f"{name}=3", *GREEDY)
    assert code in (0, 1) and "Traceback" not in err


def test_what_a_terminal_cannot_show_is_replaced(folder):
    """A character that the locale could not encode ended the answer with an error."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    flags = ["--raw", "--prompt", "x", "--logit-bias", "233=1e6", "--max-tokens", "3", "--quiet"]
    command = [sys.executable, generate.__file__, "--model", str(folder), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "?" in done.stdout, done.stderr


def test_closed_standard_streams_are_no_traceback(folder):
    """sys.stdin, sys.stdout and sys.stderr are None then."""
    command = f"'{sys.executable}' '{generate.__file__}' --model '{folder}' --prompt - --quiet"
    done = subprocess.run(["bash", "-c", command + " <&- >&-"], capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("kept", [0, -1.0, "fast", None])
def test_a_damaged_bandwidth_is_measured_again(kept, tmp_path, monkeypatch):
    """A kept 0 was a ZeroDivisionError after the answer."""
    monkeypatch.setattr(models, "CACHE", tmp_path)
    device = torch.device("cpu")
    first = generate.read_bandwidth(device)
    content = json.loads((tmp_path / "bandwidth.json").read_text())
    damaged = {key: kept for key in content}
    (tmp_path / "bandwidth.json").write_text(json.dumps(damaged))
    assert first > 1e6 and generate.read_bandwidth(device) > 1e6
    assert json.loads((tmp_path / "bandwidth.json").read_text()) != damaged


def test_the_end_of_a_text_is_not_lost_to_a_step_of_another_thread():
    """A reader looked between the commit of the last token and its event: it saw an ended
    request and an empty inbox, and left without the text."""
    for read in (lambda engine, stream: "".join(stream), None):
        engine = build()
        stream = engine.stream([65, 66], greedy(1))
        entered, go, commit = threading.Event(), threading.Event(), engine.scheduler.commit

        def held_up(*given, commit=commit, stream=stream, entered=entered, go=go):
            commit(*given)
            if stream.request.finish_reason and not entered.is_set():
                entered.set()
                go.wait(5)

        engine.scheduler.commit = held_up
        other = threading.Thread(target=engine.generate, args=([67, 68], greedy(3)))
        other.start()
        entered.wait(5)
        threading.Timer(0.1, go.set).start()
        if read is not None:
            assert read(engine, stream) == stream.output.text != ""
        else:
            while engine.receive(stream.request):
                pass
            assert engine.output(stream.request).timings["total_s"] > 0
        other.join()


def test_a_reader_whose_request_waits_does_not_hold_up_the_others():
    """It kept the lock until its own first token, and everybody's text came at once."""
    engine = build(max_running=1, max_len=256)
    first, second = engine.stream([65, 66], greedy(60)), engine.stream([67, 68], greedy(3))
    slowed(engine, 0.002)
    next(first)
    pieces = []
    waiting = threading.Thread(target=lambda: pieces.extend(second))
    waiting.start()
    stamps = [time.perf_counter() for _ in first]
    waiting.join()
    gaps = [b - a for a, b in zip(stamps, stamps[1:])]
    assert max(gaps) < 0.5 * (stamps[-1] - stamps[0])
    assert len(second.output.token_ids) == 3 and "".join(pieces) == second.output.text


def test_a_step_inside_a_step_is_refused_and_a_stream_closed_inside_one_ends_after_it():
    engine = build()
    stream = engine.stream([65], greedy(20))
    next(stream)

    def inside(record):
        with pytest.raises(RuntimeError, match="inside a step"):
            engine.generate([1], greedy(1))
        with pytest.raises(RuntimeError, match="inside a step"):
            engine.step()
        stream.close()

    engine.watch = inside
    engine.generate([66], greedy(3))
    engine.watch = None
    assert stream.request.finish_reason == "abort"
    assert engine.generate([67], greedy(2))[0].finish_reason == "length"
    run(engine)
    check_idle(engine)


@pytest.mark.parametrize("where", ["release", "_leave", "_end"])
def test_ctrl_c_while_an_abort_is_carried_out_leaves_nothing_torn(where):
    """Blocks were lost, or the request ran on with nobody to end it."""
    engine = build()
    first, second = engine.add([1, 2], greedy(5)), engine.add([3, 4], greedy(5))
    engine.step()
    owner = {"release": engine.manager, "_leave": engine.scheduler, "_end": engine}[where]
    whole = getattr(owner, where)

    def interrupted(*given):
        setattr(owner, where, whole)
        raise KeyboardInterrupt

    setattr(owner, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.abort(first)
    run(engine)
    assert first.finish_reason == "abort" and second.finish_reason == "length"
    check_idle(engine)


def test_ctrl_c_before_the_last_event_loses_no_text():
    engine = build()
    request = engine.add([65, 66], greedy(1))
    whole = engine._event

    def interrupted(*given):
        engine._event = whole
        raise KeyboardInterrupt

    engine._event = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.receive(request)[-1].finish_reason == request.finish_reason == "length"
    assert engine.output(request).text == engine.generate([65, 66], greedy(1))[0].text


def test_an_abort_while_a_stream_is_closed_is_not_left_over():
    engine = build()
    stream, other = engine.stream([65, 66], greedy(30)), engine.add([67], greedy(30))
    next(stream)
    whole = engine._reap

    def reap():
        events = whole()
        engine._reap = whole
        thread = threading.Thread(target=engine.abort, args=(other,))
        thread.start()
        thread.join()
        return events

    engine._reap = reap
    stream.close()
    assert other.finish_reason == "abort"
    check_idle(engine)


# ---------------------------------------------------------------- in Triton's interpreter, by now


@TRITON
def test_in_tritons_interpreter_the_engine_generates_the_same(quick):
    agree(quick, *QUICK)
