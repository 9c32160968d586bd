"""What the engine generates with the tiny checkpoints of tests/golden, a JSON line each.

    python tests/triton_engine.py FAMILY ...

On a GPU and in Triton's interpreter (TRITON_INTERPRET=1) the ids must be those of PyTorch on a
CPU. Chunks, decodes, a pool that is too small, prompts found again, samples, every filter; and
what nobody has written is NaN. In the interpreter, decode steps are "recorded" as on a GPU: what
runs again is the step of the recording, and all that changes between steps is in its buffers.
"""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

import kv_cache  # noqa: E402
import paged  # noqa: E402
import tiny  # noqa: E402
from generate import Engine, SamplingParams  # noqa: E402


def serve(engine: Engine, work: list) -> list[list[int]]:
    requests = [engine.add(prompt, params) for prompt, params in work]
    while engine.scheduler.busy:
        engine.step()
        if engine.counts.steps % 7 == 6 and engine.scheduler.running:
            engine.scheduler._preempt(engine.scheduler.running[-1])
        engine.check()
    assert all(request.finish_reason == "length" for request in requests)
    return [one.output for request in requests for one in request.family]


class Recording:
    """What a recorded graph does: the same work once more, on what its buffers hold by then."""

    def __init__(self, run, step):
        self.run, self.step, self.results = run, step, run(step)

    def replay(self):
        for kept, new in zip(self.results, self.run(self.step)):
            kept.copy_(new)


@torch.inference_mode()
def record(engine: Engine):
    for size in engine.forward.sizes:
        recording = Recording(engine.forward.run, engine.cache.prepare([], size))
        engine.forward.recorded[size] = recording, recording.results


def small(specs) -> int:
    """The fewest bytes that have 4 blocks for what keeps all tokens, and one more than a single
    request needs of a window, 12 states, or all of these."""
    for memory in range(0, 10**6, 256):
        try:
            found, _ = paged.rooms(specs, memory, 8, 12, 4, 4)
        except ValueError:
            continue
        if all(room.blocks >= (12 if room.state else -(-room.window // 8) + 4) for room in found):
            return memory
    raise AssertionError("a cache of a megabyte is too small")


def tokens(family: str, graphs: bool) -> dict:
    folder = ROOT / "tests/golden" / family
    specs = kv_cache.layers(json.loads((folder / "config.json").read_text()))
    engine = Engine(
        str(folder), dtype="float32", block_size=8, budget=12, max_running=4, max_len=32,
        kv_memory=small(specs), graphs=graphs,
    )  # fmt: skip
    tiny.poisoned(engine.cache)
    if os.environ.get("TRITON_INTERPRET") == "1":
        record(engine)

    def params(**settings):
        defaults = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
        return SamplingParams(**defaults | settings)

    shared = [7 * i % 90 for i in range(8)]
    filters = {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}
    found = serve(engine, [
        (shared + [3, 1, 4], params(max_tokens=8)),
        ([5], params(max_tokens=10, temperature=1, seed=1, **filters)),
        (shared + [2, 7], params(temperature=1.5, seed=2, n=2)),
        ([11 * i % 90 for i in range(15)], params(temperature=0.7, seed=3, top_k=5)),
    ])  # fmt: skip
    found += serve(engine, [(shared + [9], params(max_tokens=1))])
    assert engine.counts.reused_tokens, "nothing was found again"
    assert bool(engine.cache.sizes) == graphs
    return {"family": family, "ids": found}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for i, name in enumerate(sys.argv[1:]):
        print(json.dumps(tokens(name, graphs=i % 2 == 0)))
