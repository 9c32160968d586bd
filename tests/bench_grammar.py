"""A maker of token masks behind a pipe, for `bench.py grammar`: octavo, xgrammar or llguidance.

Runs in an environment that has the one it is to run, and imports nothing of ours but bench_pipe.py
and, for octavo, grammar.py. The two others:

    python -m venv masks && . masks/bin/activate
    pip install xgrammar llguidance

A work is a schema and texts as ids; the answer has seconds of this process's one thread: to
compile, and for every mask, copied to where a batch has it, and every token accepted. A schema
that is refused, and a token that is, are said.
"""

import json
import sys
import time
from importlib import metadata
from pathlib import Path

import bench_pipe

clock = time.thread_time


def octavo(tokens, stop):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import grammar
    import numpy as np

    started = clock()
    vocabulary = grammar.Vocabulary(tokens, [stop])
    took, row = clock() - started, np.zeros(-(-len(tokens) // 32), np.int32)

    def compile(schema: str):
        return grammar.compile(vocabulary, json_schema=schema).matcher

    def mask(matcher):
        row[:] = matcher.mask()

    return took, "this checkout", compile, mask, lambda matcher, token: matcher.accept(token)


def xgrammar(tokens, stop):
    import torch
    import xgrammar

    torch.set_num_threads(1)
    started = clock()
    given = [token or b"" for token in tokens]  # it takes an id without bytes for a special one
    info = xgrammar.TokenizerInfo(given, stop_token_ids=[stop])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    took, row = clock() - started, xgrammar.allocate_token_bitmask(1, len(tokens))

    def compile(schema: str):
        found = compiler.compile_json_schema(schema, strict_mode=False)
        return lambda: xgrammar.GrammarMatcher(found)

    def mask(matcher):
        matcher.fill_next_token_bitmask(row)

    version = f"xgrammar {metadata.version('xgrammar')}"
    return took, version, compile, mask, lambda matcher, token: matcher.accept_token(token)


def llguidance(tokens, stop):
    import llguidance
    import llguidance.numpy

    class Tokens:
        eos_token_id, bos_token_id = stop, None
        special_token_ids = [i for i, token in enumerate(tokens) if token is None]

        def __call__(self, text):
            return []  # only its own fast-forward encodes

    Tokens.tokens = [token or b"<special>" for token in tokens]
    started = clock()
    tokenizer = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(Tokens()), slices=llguidance.LLTokenizer.json_slices()
    )
    took, row = clock() - started, llguidance.numpy.allocate_token_bitmask(1, len(tokens))

    def compile(schema: str):
        found = llguidance.LLMatcher.grammar_from_json_schema(schema)
        first = llguidance.LLMatcher(tokenizer, found)
        if first.is_error():
            raise ValueError(first.get_error())
        return first.deep_copy

    def mask(matcher):
        llguidance.numpy.fill_next_token_bitmask(matcher, row, 0)

    version = f"llguidance {metadata.version('llguidance')}"
    return took, version, compile, mask, lambda matcher, token: matcher.consume_token(token)


def main(who: str, file: str):
    out = bench_pipe.own_output()
    given = json.loads(Path(file).read_text())
    tokens = [None if token is None else bytes.fromhex(token) for token in given["tokens"]]
    build = {"octavo": octavo, "xgrammar": xgrammar, "llguidance": llguidance}[who]
    took, version, compile, mask, accept = build(tokens, given["stop"])

    def run(work: dict) -> dict:
        """`masks` and `accepts`: for each text the seconds of each of its tokens."""
        found = {"masks": [], "accepts": [], "refused": 0}
        started = clock()
        try:
            new = compile(work["schema"])
        except (ValueError, RuntimeError) as error:
            return {"error": str(error)[:200]}
        found["compile"] = clock() - started
        for ids in work["texts"]:
            matcher, masks, accepts = new(), [], []
            for token in ids:
                at = clock()
                mask(matcher)
                between = clock()
                taken = accept(matcher, token)
                accepts.append(clock() - between)
                masks.append(between - at)
                if not taken:
                    break
            found["refused"] += not taken
            found["masks"].append(masks)
            found["accepts"].append(accepts)
        return found

    bench_pipe.answer(out, run, version=version, threads=1, vocabulary=took)


if __name__ == "__main__":
    main(*sys.argv[1:])
