"""What only a GPU can show; `bash tests/gpu.sh` runs all of it and writes one JSON file.

    python tests/gpu.py                     every part
    python tests/gpu.py --part equal graphs only these
    python tests/gpu.py --device cpu        every part in miniature, to try the script itself

A part that fails is reported and the next one runs. Exit code 1 if any failed.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import generate  # noqa: E402  before torch: it says how threads wait

import kernels  # noqa: E402
import model  # noqa: E402
import torch  # noqa: E402
from generate import Engine, SamplingParams  # noqa: E402

SOON = 420  # seconds after which no part is begun


class Card:
    """The device, its measured limits, and a clock for it."""

    def __init__(self, name: str):
        self.device = torch.device(name)
        self.small = self.device.type == "cpu"
        self.dtype = torch.float32 if self.small else torch.bfloat16
        self.name = "CPU" if self.small else torch.cuda.get_device_name(self.device)
        n = 2**20 if self.small else 2**29
        source = torch.empty(n, dtype=torch.uint8, device=self.device)
        into = torch.empty_like(source)
        self.bandwidth = 2 * n / self.seconds(lambda: into.copy_(source))  # bytes/s
        m = 256 if self.small else 8192
        a = torch.randn(m, m, device=self.device).to(self.dtype)
        self.rate = 2 * m**3 / self.seconds(lambda: a @ a)  # FLOP/s

    def seconds(self, run, repeat: int = 20) -> float:
        """Median seconds of a call, after three to warm up."""
        for _ in range(3):
            run()
        if self.small:
            times = []
            for _ in range(3):
                started = time.perf_counter()
                run()
                times.append(time.perf_counter() - started)
            return statistics.median(times)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
        flush = torch.empty(2**26, dtype=torch.int32, device=self.device)  # more than any L2
        for begin, end in events:
            flush.zero_()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize(self.device)
        return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3


# ---------------------------------------------------------------- right


def cases(card: Card) -> dict:
    """tests/triton_cases.py: every kernel against its PyTorch body or float64."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", str(HERE / "triton_cases.py")]
    result = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    return {"pytest": result.stdout.strip().splitlines()[-1]}


def golden_folders() -> list[Path]:
    return sorted(path.parent for path in (HERE / "golden").glob("*/config.json"))


def equal(card: Card) -> dict:
    """The tiny model of every family: the reference's greedy tokens, alone and all together,
    chunked, in a small pool, seeded; recorded steps or not; as the CPU draws them."""
    from safetensors.torch import load_file

    found = {}
    for folder in golden_folders():
        expected = load_file(folder / "expected.safetensors")
        prompt, greedy = expected["prompt"].tolist(), expected["greedy"].tolist()
        checkpoint = model.load(folder)
        checkpoint.generation, checkpoint.tokenizer = {}, None
        prompts = [prompt[: 5 + 9 * i] for i in range(7)] + [prompt]
        params = [
            SamplingParams(max_tokens=len(greedy), temperature=i % 2, seed=i, ignore_eos=True)
            for i in range(7)
        ]
        params.append(SamplingParams(max_tokens=len(greedy), temperature=0, ignore_eos=True))
        settings = {"dtype": "float32", "block_size": 8, "budget": 24, "max_running": 6}
        tokens = {}
        for name, more in {
            "cpu": {"device": "cpu"},
            "eager": {"device": str(card.device), "graphs": False},
            "graphs": {"device": str(card.device), "graphs": True},
            "guesses": {"device": str(card.device), "speculative": "ngram", "spec_tokens": 5},
        }.items():
            engine = Engine(checkpoint, kv_memory=2**22, **settings, **more)
            engine.check()
            tokens[name] = [o.token_ids for o in engine.generate(prompts, params)]
            engine.check()
        assert tokens["eager"][-1] == greedy, f"{folder.name}: not the reference's tokens"
        assert all(ids == tokens["cpu"] for ids in tokens.values()), f"{folder.name}: {tokens}"
        found[folder.name] = "equal"
    return found


def graphs(card: Card) -> dict:
    """Recorded and plain decode steps give the same tokens for every number of requests."""
    checkpoint = generate.byte_checkpoint()
    settings = {"device": str(card.device), "dtype": "float32", "max_running": 40}
    settings |= {"kv_memory": 2**24, "prefix_cache": False, "max_len": 64}
    engines = [Engine(checkpoint, graphs=on, **settings) for on in (True, False)]
    draw = random.Random(0)
    for count in range(1, 41):
        prompts = [[draw.randrange(256) for _ in range(draw.randint(1, 20))] for _ in range(count)]
        params = [SamplingParams(max_tokens=8, temperature=i % 2, seed=i, ignore_eos=True,
                                 regex="[a-m]{2,9}( x+)?" if i % 3 == 2 else None)
                  for i in range(count)]  # fmt: skip
        one, other = ([o.token_ids for o in e.generate(prompts, params)] for e in engines)
        assert one == other, f"{count} requests differ"
    recorded = sorted(engines[0].forward.recorded)
    assert card.small or recorded == list(engines[0].forward.sizes), recorded
    return {"batch sizes": "1..40 equal", "recorded": recorded}


# ---------------------------------------------------------------- fast


def step_of(card: Card, spans: list[tuple[int, int]], heads: int, shared: int, dim: int):
    """q, k, v of requests [(rows, tokens before them)], pools that hold them, and their view."""
    size = 16
    counts = [-(-(n + before) // size) for n, before in spans]
    blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)) + 1
    tables = [part.tolist() for part in blocks.split(counts)]
    rows, whole = 0, []
    for n, before in spans:
        whole.append((rows, n, before))
        rows += n
    layout = kernels.Layout(rows, len(spans), max(counts), size, card.device, card.dtype)
    view = layout.view(tables, whole)
    shapes = [(rows, heads, dim), (rows, shared, dim), (rows, shared, dim)]
    q, k, v = (torch.randn(s, device=card.device).to(card.dtype) for s in shapes)
    pool = (sum(counts) + 1, size, shared, dim)
    keys, values = (torch.randn(pool, device=card.device).to(card.dtype) for _ in range(2))
    return q, k, v, keys, values, view


def each_kernel(card: Card) -> dict:
    """Seconds of each kernel against the card's measured copy bandwidth and matmul rate."""
    heads, shared, dim, width, inner = 32, 8, 128, 4096, 12288  # Qwen3-8B
    found = {}

    def note(name: str, run, nbytes: float, flops: float = 0.0):
        seconds = card.seconds(run)
        bound = max(nbytes / card.bandwidth, flops / card.rate)
        found[name] = {"us": round(1e6 * seconds, 1), "of limit": round(bound / seconds, 3)}

    itemsize = card.dtype.itemsize
    for rows in (1, 8) if card.small else (1, 64, 512):
        x, delta = (torch.randn(rows, width, device=card.device).to(card.dtype) for _ in range(2))
        weight = torch.ones(width, dtype=card.dtype, device=card.device)
        each = rows * width * itemsize
        note(f"rms_norm {rows}", lambda: kernels.rms_norm(x, weight, 1e-6), 2 * each)
        note(f"add_norm {rows}", lambda: kernels.add_norm(x, delta, weight, 1e-6), 4 * each)
        wide = torch.randn(rows, 2 * inner, device=card.device).to(card.dtype)
        note(f"silu_mul {rows}", lambda: kernels.silu_mul(wide), 3 * rows * inner * itemsize)
        qk = torch.randn(rows, heads + shared, dim, device=card.device).to(card.dtype)
        positions = torch.arange(rows, device=card.device)
        frequencies = torch.ones(dim // 2, device=card.device)
        tables = kernels.rope_tables(positions, frequencies, 1.0)
        note(f"rope {rows}", lambda: kernels.rope(qk, tables), 2 * qk.numel() * itemsize)
    contexts = (100,) if card.small else (1000, 8000, 32000)
    batches = (1, 4) if card.small else (1, 8, 64)
    for count in batches:
        for context in contexts:
            if count * context > 600_000:
                continue
            q, k, v, keys, values, view = step_of(card, [(1, context)] * count, heads, shared, dim)
            nbytes = 2 * count * context * shared * dim * itemsize
            name = f"attention decode {count} x {context}"
            note(name, lambda: kernels.attention(q, keys, values, view), nbytes)
            note(f"store_kv {count}", lambda: kernels.store_kv(k, v, keys, values, view),
                 4 * k.numel() * itemsize)  # fmt: skip
    for n, before in ((20, 10),) if card.small else ((512, 0), (512, 7680), (4096, 0)):
        q, k, v, keys, values, view = step_of(card, [(n, before)], heads, shared, dim)
        pairs = n * before + n * (n + 1) / 2
        flops = 4 * heads * dim * pairs
        name = f"attention prompt {n} after {before}"
        note(name, lambda: kernels.attention(q, keys, values, view), 2 * keys.nbytes, flops)
    vocab = 1000 if card.small else 151_936
    logits = torch.randn(8, vocab, device=card.device)
    params = SamplingParams(top_k=50, top_p=0.9)
    rows = [generate.Row(params, i, i) for i in range(8)]
    note("sampling 8, top-k 50, top-p 0.9", lambda: generate.sample(logits, rows), logits.nbytes)
    return found


def whole_models(card: Card) -> dict:
    """Decode and prefill of real shapes with random weights, against reading and computing."""
    found = {}
    names = ("SmolLM2-135M-Instruct",) if card.small else ("Qwen3-0.6B", "Qwen3-8B")
    for name in names:
        engine = Engine(name, load="dummy", device=str(card.device), max_len=4096, say=print,
                        prefix_cache=False, budget=2048, kv_memory=2**28 if card.small else None)  # fmt: skip
        found[name] = row = {"ready s": round(engine.load_s, 1)}
        for count in (1,) if card.small else (1, 8, 64):
            tokens, prompt = (4, 8) if card.small else (64, 128)
            params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
            outputs = engine.generate([[i] * prompt for i in range(count)], params)
            step = statistics.median(o.timings["tpot_p50_s"] for o in outputs)
            read = engine.model.read_bytes + count * engine.stored_bytes(prompt + tokens // 2)
            row[f"decode {count}"] = {
                "tokens/s": round(count / step, 1), "step ms": round(1e3 * step, 3),
                "of bandwidth": round(read / card.bandwidth / step, 3),
            }  # fmt: skip
        prompt = 32 if card.small else 2047
        outputs = [
            engine.generate([[i] * prompt], SamplingParams(max_tokens=1, temperature=0))[0]
            for i in range(3)
        ]
        seconds = statistics.median(o.timings["prefill_s"] for o in outputs)
        unused = engine.model.head.nbytes  # logits are made of the last row only
        weights = (engine.model.read_bytes - unused) / engine.dtype.itemsize
        row["prefill"] = {
            "tokens": prompt, "tokens/s": round(prompt / seconds),
            "of matmul rate": round(2 * weights * prompt / seconds / card.rate, 3),
        }  # fmt: skip
        del engine
        if not card.small:
            torch.cuda.empty_cache()
    return found


def nano(card: Card) -> dict:
    """nano-vllm's bench.py: 256 requests at once, Qwen3-0.6B (random weights)."""
    draw = random.Random(0)
    count, longest, name = (
        (4, 20, "SmolLM2-135M-Instruct") if card.small else (256, 1024, "Qwen3-0.6B")
    )
    least = min(100, longest // 2)
    prompts = [
        [draw.randint(0, 10_000) for _ in range(draw.randint(least, longest))] for _ in range(count)
    ]
    params = [
        SamplingParams(max_tokens=draw.randint(least, longest), temperature=0.6, ignore_eos=True)
        for _ in range(count)
    ]
    engine = Engine(name, load="dummy", device=str(card.device), max_len=4096, max_running=count,
                    budget=8192, kv_memory=2**28 if card.small else None, say=print)  # fmt: skip
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    started = time.perf_counter()
    outputs = engine.generate(prompts, params)
    seconds = time.perf_counter() - started
    tokens = sum(len(o.token_ids) for o in outputs)
    assert tokens == sum(p.max_tokens for p in params)
    return {"output tokens": tokens, "seconds": round(seconds, 2), "tokens/s": round(tokens / seconds),
            "preemptions": engine.counts.preemptions}  # fmt: skip


def guesses(card: Card) -> dict:
    """What a step costs by its rows, recorded and not, and whether n-gram guesses pay: a text of
    few words, which a random model repeats, and one request or many."""
    name = "SmolLM2-135M-Instruct" if card.small else "Qwen3-8B"
    found = {}
    for graphs in (True, False):
        settings = {"load": "dummy", "device": str(card.device), "max_len": 2048, "graphs": graphs}
        settings |= {"kv_memory": 2**28 if card.small else None, "prefix_cache": False}
        engine = Engine(name, speculative="ngram", **settings)
        costs = engine.speculation.costs
        found[f"step ms, graphs {graphs}"] = {
            rows: round(1e3 * costs.step_s(rows), 2) for rows in costs.rows
        } | {"each length": round(1e3 * costs.apart, 3)}
        for count in (1,) if card.small else (1, 8, 32):
            params = SamplingParams(max_tokens=8 if card.small else 64, temperature=0)
            engine.generate([[i, i + 1] * 16 for i in range(count)], params)
            tally = engine.speculation.tally
            found[f"{count} requests, graphs {graphs}"] = {
                "tokens a round": round(tally.a_round, 2), "speed-up": round(tally.speedup, 2),
                "expected": round(tally.expected_speedup, 2),
            }  # fmt: skip
        del engine
        if not card.small:
            torch.cuda.empty_cache()
    return found


PARTS = {
    "cases": cases, "equal": equal, "graphs": graphs,
    "kernels": each_kernel, "models": whole_models, "nano": nano, "guesses": guesses,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", help="write the results here too")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu tries the script")
    started, results = time.perf_counter(), {}
    for name in args.part:
        if len(args.part) == 1:
            results = alone(name, Card(args.device))
        elif time.perf_counter() - started < SOON or args.device == "cpu":
            results |= apart(name, args.device)
        else:
            results[name] = {"failed": "no time was left for it"}
        print(name, json.dumps(results[name], indent=1), flush=True)
        if args.out:  # after each part: what is known stays known
            Path(args.out).write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))
    return 1 if any("failed" in results[name] for name in args.part) else 0


def alone(name: str, card: Card) -> dict:
    """One part, and what it ran on."""
    began = time.perf_counter()
    try:
        found = PARTS[name](card)
    except Exception:
        found = {"failed": traceback.format_exc()[-3000:]}
    found["took s"] = round(time.perf_counter() - began, 1)
    return {
        "device": card.name, "torch": torch.__version__,
        "triton": kernels.triton and kernels.triton.__version__,
        "copy GB/s": round(card.bandwidth / 1e9, 1), "matmul TFLOP/s": round(card.rate / 1e12, 2),
        name: found,
    }  # fmt: skip


def apart(name: str, device: str) -> dict:
    """The same in a process of its own: an error that a GPU does not forget ends that one."""
    with tempfile.NamedTemporaryFile() as file:
        command = [sys.executable, __file__, "--part", name, "--device", device]
        result = subprocess.run(
            [*command, "--out", file.name], capture_output=True, text=True, check=False
        )
        try:
            return json.loads(Path(file.name).read_text())
        except ValueError:
            return {name: {"failed": result.stderr[-3000:]}}


if __name__ == "__main__":
    sys.exit(main())
