"""Measurements side by side; a script, never a timed test.

    python tests/bench.py decode        one request against transformers' generate()
    python tests/bench.py decode --vllm VENV/bin/python     against vLLM, both in bfloat16
    python tests/bench.py decode --llama VENV/bin/python    against llama.cpp, both from the file
    python tests/bench.py prefill --vllm ... --llama ...    a prompt of 1,024 tokens, one token
    python tests/bench.py serve         32 requests at once: throughput, and the start
    python tests/bench.py serve --vllm VENV/bin/python      in turns with vLLM
    python tests/bench.py serve --profile   where a step of 32 decodes goes
    python tests/bench.py serve --workload nano             nano-vllm's 256 requests, for a GPU
    python tests/bench.py serve --rate 2 --seed 0           requests arrive one by one: delays
    python tests/bench.py chat          the second turn of a long chat, with and without the cache
    python tests/bench.py guided        a token under a grammar against a free one
    python tests/bench.py guesses       answers that repeat their prompt, and chat, by n-grams
    python tests/bench.py long          one request of 100,000 tokens: its cache, and a token's time
    python tests/bench.py grammar       schemas: to compile them, masks; --others VENV/bin/python

What is compared runs in turns, so that whatever else the machine does hits both: each in a process
of its own, with the same weights and as many threads. bench_vllm.py, bench_llama.py and
bench_grammar.py say how to install what they run; transformers belongs into this environment (pip
install transformers).
"""

import argparse
import contextlib
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENT = dict(os.environ)  # as others get it: generate sets how our threads wait
sys.path[:0] = [str(HERE.parent), str(HERE / "golden")]

import generate  # noqa: E402  before torch: it says how threads wait

import bench_pipe  # noqa: E402
import grammar  # noqa: E402
import kv_cache  # noqa: E402
import model  # noqa: E402
import passages  # noqa: E402
import schemas  # noqa: E402
import speculative  # noqa: E402
import torch  # noqa: E402
from generate import Engine, SamplingParams  # noqa: E402


# ---------------------------------------------------------------- the workers


def worker(args):
    """Octavo or transformers behind a pipe, as bench_vllm.py has vLLM."""
    out = bench_pipe.own_output()
    build = {"octavo": octavo, "transformers": transformers}[args.who]
    run, facts = build(args)
    bench_pipe.answer(out, run, threads=torch.get_num_threads(), **facts)


def octavo(args):
    settings = {"max_len": 2048, "prefix_cache": False, "max_running": 256}
    settings |= {"budget": args.budget} if args.budget else {}
    engine = Engine(device=args.device, dtype=args.dtype, **settings)
    common = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True}

    def serve(work: dict) -> dict:
        params = [SamplingParams(max_tokens=n, temperature=0.6, **common) for n in work["outputs"]]
        started = time.perf_counter()
        outputs = engine.generate(work["prompts"], params)
        seconds = time.perf_counter() - started
        assert [len(output.token_ids) for output in outputs] == work["outputs"]
        return {"seconds": seconds}

    def one(work: dict) -> dict:
        params = SamplingParams(max_tokens=work["tokens"], temperature=0, **common)
        started = time.perf_counter()
        request = engine.add(work["prompt"], params)
        while engine.scheduler.busy:
            engine.step()
        return {"stamps": [at - started for at in request.token_stamps], "ids": request.output}

    serve({"prompts": [[1, 2, 3]], "outputs": [2]})
    facts = {
        "version": f"{engine.name}, torch {torch.__version__}",
        "weights": engine.model.read_bytes,  # of those, what a decoded token reads
        "token": kv_cache.bytes_per_token(engine.config.specs, engine.dtype.itemsize),
    }
    return lambda work: one(work) if "prompt" in work else serve(work), facts


def transformers(args):
    """Every token is stamped by a stopping criterion that never stops."""
    import make_real

    from transformers import __version__

    checkpoint = model.load(model.find(None)[0])
    llama = make_real.reference(checkpoint).to(getattr(torch, args.dtype))
    llama.generation_config.eos_token_id = None

    @torch.inference_mode()
    def one(work: dict) -> dict:
        stamps: list[float] = []

        def stamp(sequence, scores, **rest):
            stamps.append(time.perf_counter() - started)
            return torch.zeros(len(sequence), dtype=torch.bool)

        started = time.perf_counter()
        rows = torch.tensor([work["prompt"]])
        output = llama.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            do_sample=False,
            max_new_tokens=work["tokens"],
            pad_token_id=0,
            stopping_criteria=[stamp],
        )
        return {"stamps": stamps, "ids": output[0, rows.shape[1] :].tolist()}

    return one, {"version": f"transformers {__version__}, torch {torch.__version__}"}


class Worker:
    """A process that answers a line with a line (bench_pipe.py)."""

    def __init__(self, command: list[str], log, ours: bool, settle_s: float = 0.5):
        self.settle_s = settle_s  # until the threads of who ran before stop waiting in a loop
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env=None if ours else ENVIRONMENT,
        )  # fmt: skip
        self.facts = self._read()

    def _read(self) -> dict:
        text = self.process.stdout.readline()
        if not text:
            sys.exit(f"bench.py: {' '.join(self.process.args)} ended: {self.process.wait()}")
        return json.loads(text)

    def __call__(self, work: dict) -> dict:
        time.sleep(self.settle_s)
        self.process.stdin.write(json.dumps(work) + "\n")
        self.process.stdin.flush()
        return self._read()


@contextlib.contextmanager
def start(args, names: list[str]):
    """Workers by name: "octavo" and "transformers", each with a dtype or without (what the file
    is run in), "vllm" and "llama.cpp"."""
    threads = str(torch.get_num_threads())
    workers = {}
    with tempfile.TemporaryDirectory() as folder, open(args.log, "w") as log:
        try:
            for name in names:
                who, _, dtype = name.partition(" ")
                ours = who in ("octavo", "transformers")
                if who == "vllm":
                    at = str(write_checkpoint(Path(folder) / "model"))
                    command = [args.vllm, str(HERE / "bench_vllm.py"), at, dtype, threads]
                elif who == "llama.cpp":
                    at = str(model.find(None, say=print)[0])
                    command = [args.llama, str(HERE / "bench_llama.py"), at, threads]
                else:
                    command = [sys.executable, __file__, "worker", who, "--threads", threads]
                    given = {"dtype": dtype, "device": args.device, "budget": args.budget}
                    for option, value in given.items():
                        command += [f"--{option}", str(value)] if value else []
                workers[name] = Worker(command, log, ours)
                facts = workers[name].facts
                print(f"{name}: {facts['version']}, {facts['threads']} threads", flush=True)
            yield workers
        finally:
            for run in workers.values():
                run.process.kill()
                run.process.wait()


# ---------------------------------------------------------------- one request


def decode(args):
    """One request again and again, each contender in turn; each is measured against an Octavo
    that has the weights in the same numbers."""
    bf16 = args.dtype or "bfloat16"
    pairs = {f"vllm {bf16}": f"octavo {bf16}"} if args.vllm else {}
    if args.llama:  # the file as it is, and Octavo as it runs that file unless told otherwise
        pairs["llama.cpp"] = f"octavo {args.dtype}" if args.dtype else "octavo"
    if not pairs:
        if not importlib.util.find_spec("transformers"):
            sys.exit("bench.py: pip install transformers, or name what to compare with: --vllm...")
        pairs[f"transformers {bf16}"] = f"octavo {bf16}"
    tokenizer = generate.build_tokenizer(model.load(model.find(None, say=print)[0]).tokenizer)
    prompt = tokenizer.encode((HERE.parent / "LICENSE").read_text("utf-8"))[: args.prompt_tokens]
    args.device, args.budget = args.device or "cpu", args.budget or max(512, len(prompt))
    print(f"prompt {len(prompt)}, output {args.tokens} tokens, greedily")
    names = dict.fromkeys(name for pair in pairs.items() for name in reversed(pair))
    with start(args, names) as workers:
        bounds = _bounds(args, workers, pairs)
        work = {"prompt": prompt, "tokens": args.tokens}
        # the first run allocates, packs and compiles, and says which tokens these are
        ids = {name: run(work | {"ids": True})["ids"] for name, run in workers.items()}
        print(f"\n{'round':<7}{'who':<22}{'prefill':>10}{'tokens/s':>10}"
              + f"{'a token':>11}{'tokens/s':>10}{'of bound':>10}" * (args.tokens > 1)
              + f"{'cores':>7}")  # fmt: skip
        rows = {name: [] for name in workers}  # seconds of prefill, then seconds a token, cores
        for number in range(args.rounds):
            for name, run in workers.items():
                found = run(work)
                gaps = [after - at for at, after in zip(found["stamps"], found["stamps"][1:])]
                token = [statistics.median(gaps)] if gaps else []
                rows[name].append((found["stamps"][0], *token, found["cores"]))
                _line(number + 1, name, rows[name][-1], len(prompt), bounds[name])
    print()
    columns = {name: list(zip(*by_round)) for name, by_round in rows.items()}
    for name, by in columns.items():
        _line("median", name, [statistics.median(c) for c in by], len(prompt), bounds[name])
    for theirs, ours in pairs.items():
        _, prefill = times_as_fast(columns[ours][0], columns[theirs][0])
        print(f"\n{ours} prefills {prefill} {theirs}")
        if args.tokens > 1:
            _, token = times_as_fast(columns[ours][1], columns[theirs][1])
            print(f"{ours} decodes  {token} {theirs}")
        both = enumerate(zip(ids[ours], ids[theirs]))
        same = next((i for i, (a, b) in both if a != b), args.tokens)
        print(f"the first {same} of {args.tokens} greedy tokens are the same")
    print()
    for name in workers:
        print(f"{name} wrote {tokenizer.decode(ids[name])!r}")


def _bounds(args, workers: dict, pairs: dict) -> dict[str, float]:
    """Seconds to read from memory what the Octavo of a pair reads for a token."""
    bandwidth = generate.read_bandwidth(torch.device(args.device))
    found = {}
    for name, run in workers.items():
        if "weights" in run.facts:
            length = args.prompt_tokens + args.tokens / 2
            read = run.facts["weights"] + run.facts["token"] * length
            found[name] = read / bandwidth
            if args.tokens > 1:
                print(
                    f"bound of {name}: {read / 1e6:.0f} MB a step at {bandwidth / 1e9:.1f} GB/s"
                    f" = {1e3 * found[name]:.1f} ms, {1 / found[name]:.1f} tokens/s"
                )
    return found | {theirs: found[ours] for theirs, ours in pairs.items()}


def _line(number, name: str, row, prompt: int, bound: float):
    prefill, *token, cores = row
    text = f"{number:<7}{name:<22}{1e3 * prefill:>7.0f} ms{prompt / prefill:>10.0f}"
    for seconds in token:
        text += f"{1e3 * seconds:>8.1f} ms{1 / seconds:>10.1f}{bound / seconds:>10.0%}"
    print(f"{text}{cores:>7.2f}", flush=True)


def times_as_fast(ours, theirs) -> tuple[float, str]:
    """The ratio of two lists of seconds, a number a round: of their medians, and round by round."""
    ratio = statistics.median(theirs) / statistics.median(ours)
    rounds = ", ".join(f"{b / a:.2f}" for a, b in zip(ours, theirs))
    return ratio, f"{ratio:.2f} times as fast (rounds: {rounds}) as"


# ---------------------------------------------------------------- many requests at once

WORKLOADS = {  # requests, shortest and longest prompt, shortest and longest output, highest id
    "small": (32, 32, 256, 32, 256, 10_000),
    "nano": (256, 100, 1024, 100, 1024, 10_000),  # of nano-vllm's bench.py, seed 0
}


def workload(name: str, seed: int) -> dict:
    count, shortest, longest, least, most, ids = WORKLOADS[name]
    draw = random.Random(seed)
    prompts = [
        [draw.randint(0, ids) for _ in range(draw.randint(shortest, longest))] for _ in range(count)
    ]
    return {"prompts": prompts, "outputs": [draw.randint(least, most) for _ in range(count)]}


def serve(args):
    if args.rate:
        return delays(args)
    if args.profile:
        return profile(args)
    work = workload(args.workload, args.seed)
    prompt, output = sum(map(len, work["prompts"])), sum(work["outputs"])
    print(
        f"{len(work['prompts'])} requests at once, seed {args.seed}: {prompt:,} prompt and"
        f" {output:,} output tokens, temperature 0.6, {args.dtype}"
    )
    cases = {
        "batch": work,
        "alone": {"prompts": work["prompts"][:1], "outputs": [64]},
        "prefill": {"prompts": [[i % 9973 for i in range(1023)]], "outputs": [1]},
    }
    ours, theirs = f"octavo {args.dtype}", f"vllm {args.dtype}"
    with start(args, [ours, theirs] if args.vllm else [ours]) as workers:
        seconds = {name: {case: [] for case in cases} for name in workers}
        print(f"\n{'round':<7}{'who':<18}{'batch':>8}{'output tok/s':>14}{'alone tok/s':>13}"
              f"{'1,023 prompt tokens':>21}")  # fmt: skip
        for number in range(args.rounds):
            for name, run in workers.items():
                for case, one in cases.items():
                    seconds[name][case].append(run(one)["seconds"])
                _serve_line(
                    f"{number + 1}", name, output, {c: s[-1] for c, s in seconds[name].items()}
                )
    best = {n: {c: statistics.median(s) for c, s in by.items()} for n, by in seconds.items()}
    for name, by in best.items():
        _serve_line("median", name, output, by)
    found = {
        name: {
            "start_s": round(workers[name].facts["ready_s"], 1),
            "output_tokens_per_s": round(output / by["batch"], 1),
            "alone_tokens_per_s": round(64 / by["alone"], 1),
            "prefill_1023_s": round(by["prefill"], 3),
        }
        for name, by in best.items()
    }
    for name, run in workers.items():
        print(f"{name} was ready {run.facts['ready_s']:.1f} s after its process began")
    if args.vllm:
        for case in cases:
            ratio, text = times_as_fast(seconds[ours][case], seconds[theirs][case])
            found[f"{case}_ratio"] = round(ratio, 2)
            print(f"{case + ':':<9}{ours} is {text} {theirs}")
        start_s = [workers[name].facts["ready_s"] for name in (theirs, ours)]
        print(f"start:   {start_s[0] / start_s[1]:.0f} times as fast")
    print(json.dumps({"workload": args.workload, "seed": args.seed, **found}))


def write_checkpoint(folder: Path) -> Path:
    """The default model's weights as a folder that vLLM reads."""
    from test_real import write_folder

    checkpoint = model.load(model.find(None, say=print)[0])
    write_folder(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "bos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _serve_line(number: str, name: str, output: int, by: dict[str, float]):
    print(
        f"{number:<7}{name:<18}{by['batch']:>6.1f} s{output / by['batch']:>14.1f}"
        f"{64 / by['alone']:>13.1f}{by['prefill']:>19.2f} s",
        flush=True,
    )


def profile(args, steps: int = 30):
    """Milliseconds of a decode step by what it is spent on: the same workload, a third done."""
    engine = Engine(
        device=args.device, dtype=args.dtype, threads=args.threads, max_len=2048,
        prefix_cache=False, **({"budget": args.budget} if args.budget else {}),
    )  # fmt: skip
    work = workload(args.workload, args.seed)
    params = SamplingParams(max_tokens=400, temperature=0.6, top_k=0, top_p=1.0, ignore_eos=True)
    for prompt in work["prompts"]:
        engine.add(prompt, params)
    engine.step()
    while engine.scheduler.waiting or any(r.behind > 1 for r in engine.scheduler.running):
        engine.step()
    spent: dict[str, float] = {}

    def timed(owner, name: str, label: str):
        inner = getattr(owner, name)

        def call(*arguments, **named):
            started = time.perf_counter()
            try:
                return inner(*arguments, **named)
            finally:
                spent[label] = spent.get(label, 0.0) + time.perf_counter() - started

        setattr(owner, name, call)

    kernels = generate.models.kernels
    for owner, name, label in (
        (kernels, "linear", "linear layers and logits"),
        (kernels, "attention", "attention"),
        (kernels, "store_kv", "storing keys and values"),
        (kernels, "rms_norm", "norms"),
        (kernels, "rope", "rope"),
        (kernels, "silu_mul", "silu"),
        (generate, "sample", "sampling"),
        (engine.scheduler, "plan", "plan and commit"),
        (engine.scheduler, "commit", "plan and commit"),
        (engine.cache, "prepare", "rows and views"),
    ):
        timed(owner, name, label)
    started = time.perf_counter()
    for _ in range(steps):
        engine.step()
    whole = time.perf_counter() - started
    spent["everything else"] = whole - sum(spent.values())
    rows = len(engine.scheduler.running)
    length = statistics.mean(r.computed for r in engine.scheduler.running)
    print(f"a step of {rows} decodes, {length:.0f} tokens each: {1e3 * whole / steps:.1f} ms\n")
    for label, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        share = seconds / whole
        print(
            f"{label:<26}{1e3 * seconds / steps:>6.1f} ms {share:>5.0%}  {'#' * round(50 * share)}"
        )


# ---------------------------------------------------------------- requests that arrive


def delays(args):
    """Open loop: requests arrive as they do, whether the engine keeps up or not."""
    draw = random.Random(args.seed)
    arrivals, at = [], 0.0
    for _ in range(args.requests):
        at += draw.expovariate(args.rate)
        long = draw.random() < 0.2
        prompt = [
            draw.randint(0, 10_000)
            for _ in range(draw.randint(*((512, 1024) if long else (32, 128))))
        ]
        arrivals.append((at, prompt, draw.randint(32, 96)))
    engine = Engine(
        device=args.device, dtype=args.dtype, threads=args.threads, max_len=2048,
        budget=2048, max_running=64, prefix_cache=False,
    )  # fmt: skip
    engine.generate([1] * 600, SamplingParams(max_tokens=4, ignore_eos=True))
    print(
        f"{args.requests} requests, {args.rate:g} a second (Poisson, seed {args.seed}): prompts of"
        f" 32 to 128 tokens, a fifth of them 512 to 1,024; outputs of 32 to 96\n"
    )
    print(f"{'':<24}{'TTFT, ms':^38}{'between tokens, ms':^26}{'output':>9}")
    print(f"{'':<24}{'mean':>7}{'p99':>8} = {'queue':>6}{'prefill':>8}{'step':>6}"
          f"{'p50':>8}{'p99':>8}{'max':>8}{'tok/s':>11}")  # fmt: skip
    normal = {"budget": 512, "max_running": 64, "static": False}
    cases = {"static": normal | {"static": True}, "continuous": normal}
    cases |= {f"budget {b}": normal | {"budget": b} for b in (32, 64, 128, 256, 512, 1024, 2048)}
    cases |= {f"max running {m}": normal | {"max_running": m} for m in (4, 8, 16, 32)}
    found = {}
    for name, settings in cases.items():
        for field, value in settings.items():
            setattr(engine.scheduler, field, value)
        found[name] = row = open_loop(engine, arrivals)
        print(
            f"{name:<24}{row['ttft']:>7,.0f}{row['ttft_p99']:>8,.0f}   {row['queue']:>6,.0f}"
            f"{row['prefill']:>8,.0f}{row['step']:>6,.0f}{row['itl_p50']:>8,.0f}"
            f"{row['itl_p99']:>8,.0f}{row['itl_max']:>8,.0f}{row['tokens_per_s']:>11,.0f}",
            flush=True,
        )
    print("\nbudget     mean TTFT" + " " * 31 + "p99 between tokens")
    rows = {name: row for name, row in found.items() if name.startswith("budget")}
    top = [max(row[key] for row in rows.values()) for key in ("ttft", "itl_p99")]
    for name, row in rows.items():
        bars = ["#" * max(1, round(28 * row[k] / t)) for k, t in zip(("ttft", "itl_p99"), top)]
        print(
            f"{name.split()[1]:>6} {row['ttft']:>7,.0f} ms {bars[0]:<29}"
            f"{row['itl_p99']:>6,.0f} ms {bars[1]}"
        )
    print(json.dumps({"rate": args.rate, "seed": args.seed, "cases": found}))


def open_loop(engine: Engine, arrivals) -> dict[str, float]:
    """One run: requests are added when their time has come; milliseconds, and tokens/s."""
    requests, coming = [], list(arrivals)
    started = time.perf_counter()
    while coming or engine.scheduler.busy:
        now = time.perf_counter() - started
        while coming and coming[0][0] <= now:
            at, prompt, output = coming.pop(0)
            params = SamplingParams(
                max_tokens=output, temperature=0.6, top_k=0, top_p=1.0, ignore_eos=True
            )
            request = engine.add(prompt, params)
            request.stamps["received"] = started + at  # not when the step under way had ended
            requests.append(request)
        if engine.scheduler.busy:
            engine.step()
        else:
            time.sleep(max(0.0, coming[0][0] - now))
    took = time.perf_counter() - started
    stamps = [request.stamps for request in requests]
    gaps = sorted(
        1e3 * (b - a) for r in requests for a, b in zip(r.token_stamps, r.token_stamps[1:])
    )
    first = sorted(1e3 * (s["first token"] - s["received"]) for s in stamps)

    def mean(before: str, after: str) -> float:
        return 1e3 * statistics.mean(s[after] - s[before] for s in stamps)

    row = {
        "ttft": statistics.mean(first),
        "ttft_p99": first[int(0.99 * len(first))],
        "queue": mean("received", "scheduled"),
        "prefill": mean("scheduled", "prefill"),
        "step": mean("prefill", "first token"),
        "itl_p50": statistics.median(gaps),
        "itl_p99": gaps[int(0.99 * len(gaps))],
        "itl_max": gaps[-1],
        "tokens_per_s": sum(len(r.output) for r in requests) / took,
    }
    return {name: round(value, 1) for name, value in row.items()}


# ---------------------------------------------------------------- a conversation


def chat(args):
    """TTFT of a second turn: its prompt is the first turn, the answer, and one more message."""
    checkpoint = model.load(model.find(None, say=print)[0])
    common = {"device": args.device, "dtype": args.dtype, "threads": args.threads, "max_len": 4096}
    engines = {
        name: Engine(checkpoint, prefix_cache=name == "found", **common)
        for name in ("found", "computed")
    }
    words = (HERE.parent / "README.md").read_text("utf-8").split()
    params = SamplingParams(max_tokens=64, temperature=0)
    print(f"{'round':<7}{'prompt tokens':>14}{'found':>7}{'TTFT':>12}{'without':>12}{'ratio':>8}")
    ratios, same = [], 0
    for number in range(args.rounds + 1):  # the first warms up
        question = f"Round {number}. " + " ".join(words[number : number + args.words])
        row = {}
        for name, engine in engines.items():
            messages = [{"role": "user", "content": question}]
            (first,) = engine.generate(messages, params)
            messages.append({"role": "assistant", "content": first.text})
            messages.append({"role": "user", "content": "Go on."})
            (row[name],) = engine.generate(messages, params)
        same += row["found"].token_ids == row["computed"].token_ids
        with_cache, without = (row[name].timings["ttft_s"] for name in engines)
        usage = row["found"].usage
        if number:
            ratios.append(without / with_cache)
            print(
                f"{number:<7}{usage['prompt_tokens']:>14,}{usage['cached_tokens']:>7,}"
                f"{1e3 * with_cache:>9.0f} ms{1e3 * without:>9.0f} ms{ratios[-1]:>8.1f}",
                flush=True,
            )
    print(
        f"\nthe second turn answers {statistics.median(ratios):.1f} times as soon (median);"
        f" the same tokens in {same} of {args.rounds + 1} rounds"
    )


# ---------------------------------------------------------------- text that follows a grammar


def guided(args):
    """Time of a token under a grammar that any text of some length follows, every token sampled:
    the same work as without it, but for masks."""
    common = {"device": args.device, "dtype": args.dtype, "threads": args.threads}
    engine = Engine(jump=False, prefix_cache=False, max_len=1024, **common)
    prompts = [f"Tell me a long story about {i + 1} foxes." for i in range(args.requests)]
    prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    print(f"{'temperature':<13}{'round':<7}{'free':>10}{'masked':>10}{'more':>8}{'a mask':>9}")
    for temperature in (0, 0.8):
        more = []
        for number in range(args.rounds + 1):  # the first warms up
            row = {}
            for name, regex in (("free", None), ("masked", r"(.|\n){5000,}")):
                params = SamplingParams(
                    max_tokens=args.tokens, temperature=temperature, seed=number, ignore_eos=True,
                    regex=regex,
                )  # fmt: skip
                row[name] = engine.generate(prompts, params)
            free, masked = (
                statistics.median(one.timings["tpot_p50_s"] for one in row[name]) for name in row
            )
            if number:
                more.append(masked / free - 1)
                mask_s = statistics.mean(one.timings["mask_mean_s"] for one in row["masked"])
                print(
                    f"{temperature:<13}{number:<7}{1e3 * free:>7.2f} ms{1e3 * masked:>7.2f} ms"
                    f"{more[-1]:>8.1%}{1e6 * mask_s:>6.0f} us",
                    flush=True,
                )
        print(f"a masked token takes {statistics.median(more):.1%} more (median)\n")


# ---------------------------------------------------------------- a long context

HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
COMMON = HEAD | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 131_072,
}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 4}
WINDOW = 256  # tokens
LONG = {  # what a model is made of -> its config.json
    "6 sliding": {"model_type": "mistral", "num_hidden_layers": 6, "sliding_window": WINDOW},
    "5 sliding, 1 full": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 64,
    },
    "3 linear, 1 full": LINEAR
    | {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "1 full": {"model_type": "llama", "num_hidden_layers": 1},
}
DEPTHS = (1_000, 3_000, 10_000, 30_000, 100_000, 131_000)  # tokens


def guesses(args):
    """The same prompts with a drafter and without, in turns; each row is a kind of prompt."""
    settings = {"prefix_cache": False, "max_len": 1024, "device": args.device}
    plain = Engine(dtype=args.dtype, **settings)
    drafted = Engine(
        dtype=args.dtype, speculative=args.drafter, spec_tokens=args.spec_tokens, **settings
    )
    costs = drafted.speculation.costs
    points = ", ".join(f"{rows}: {1e3 * costs.step_s(rows):.0f}" for rows in costs.rows)
    print(f"{drafted.name}, {args.drafter}, temperature {args.temperature:g}; {args.rounds} rounds")
    print(f"a step's ms by its rows: {points}\n")
    print(f"{'':<9}{'requests':>9}{'tok/s':>8}{'drafted':>9}{'ratio':>8}{'(all rounds)':>16}"
          f"{'decode':>9}{'expected':>10}{'accepted':>10}{'a round':>9}")  # fmt: skip
    for kind in args.kinds.split(","):
        for count in map(int, args.batches.split(",")):
            _guesses_row(plain, drafted, kind, count, args)


def _guesses_row(plain: Engine, drafted: Engine, kind: str, count: int, args):
    params = SamplingParams(max_tokens=128, temperature=args.temperature, seed=1)
    work = passages.prompts(kind, max(count, 8))
    groups = [work[i : i + count] for i in range(0, len(work), count)]
    drafted.speculation.tally = tally = speculative.Tally()
    seconds: dict[Engine, list[float]] = {plain: [], drafted: []}
    texts, tokens = {}, 0
    for turn in range(args.rounds):
        for engine in (plain, drafted) if turn % 2 else (drafted, plain):
            began = time.perf_counter()
            outputs = [output for group in groups for output in engine.generate(group, params)]
            seconds[engine].append(time.perf_counter() - began)
            texts[engine] = [output.token_ids for output in outputs]
            tokens = sum(map(len, texts[engine]))
    ratios = sorted(a / b for a, b in zip(seconds[plain], seconds[drafted]))
    ratio = statistics.median(ratios)
    rates = (tokens / statistics.median(seconds[engine]) for engine in (plain, drafted))
    share = tally.accepted / max(tally.guesses, 1)
    print(
        f"{kind:<9}{count:>9}" + "".join(f"{rate:>8.0f} " for rate in rates)
        + f"{ratio:>8.2f}{f'{ratios[0]:.2f}..{ratios[-1]:.2f}':>16}{tally.speedup:>9.2f}"
        f"{tally.expected_speedup:>10.2f}{share:>10.0%}{tally.a_round:>9.2f}",
        flush=True,
    )  # fmt: skip
    if args.dtype == "float32" and texts[plain] != texts[drafted]:
        print("          the texts differ")


def long(args):
    """What a long request holds and what a token takes, at several depths of its context."""
    torch.set_num_threads(args.threads or 1)  # layers this small are not for more
    depths = [depth for depth in DEPTHS if depth < args.tokens] + [args.tokens]
    draw = random.Random(args.seed)
    prompt = [draw.randrange(COMMON["vocab_size"]) for _ in range(args.tokens)]
    found = {}
    for name, config in LONG.items():
        engine = Engine(
            model.random(model.Config.from_hf(COMMON | config)), device=args.device,
            dtype=args.dtype, threads=args.threads or 1, budget=args.budget or 512, max_running=1,
            max_len=args.tokens + 64, kv_memory=2**29,
        )  # fmt: skip
        engine.generate([prompt[:600][::-1]], SamplingParams(max_tokens=8, ignore_eos=True))
        found[name] = []
        for depth in depths:
            print(f"{name}: {depth:,} tokens", file=sys.stderr, flush=True)
            found[name].append(at_depth(engine, prompt[:depth]))
    print(
        f"a request of {args.tokens:,} tokens in chunks of {args.budget or 512}, 64 decoded at each"
        f" depth; windows of {WINDOW} tokens,\n1 head of 64 numbers, random weights,"
        f" {args.dtype}, {torch.get_num_threads()} thread(s)\n"
    )
    for line in curves(found, depths):
        print(line)
    print(json.dumps({"tokens": args.tokens, "seed": args.seed, "models": found}))


def at_depth(engine: Engine, prompt: list[int]) -> dict[str, float]:
    """The request goes on where the prefix cache ends, which is near the depth before this one.

    held: bytes of all blocks in its tables, the most while it decodes. token, prompt: seconds of
    a decoded token (median), and of one token in the chunks before it (the last four, median);
    on a CPU those of the processor, which others on the machine disturb less.
    """
    clock = time.process_time if engine.device.type == "cpu" else time.perf_counter
    pools, specs = engine.cache.pools, engine.cache.specs
    size = {spec: 0 for spec in engine.cache.groups}  # bytes of a block, over a group's layers
    for spec, layer in zip(specs, pools):
        size[spec] += sum(pool[0].numel() * pool.element_size() for pool in layer)
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    request = engine.add(prompt, params)
    rows, held, tokens, chunks = 0, [], [], []

    def watch(record):
        nonlocal rows
        ((_, _, rows),) = record.parts

    engine.watch = watch
    while engine.scheduler.busy:
        started = clock()
        engine.step()
        took = clock() - started
        if request.computed > len(prompt):
            tokens.append(took)
            blocks = [sum(map(bool, table)) for table in request.tables]
            held.append(sum(n * each for n, each in zip(blocks, size.values())))
        elif rows >= engine.scheduler.budget // 2:
            chunks.append(took / rows)
    return {
        "held": max(held),
        "token": round(statistics.median(tokens), 6),
        "prompt": round(statistics.median(chunks[-4:]), 7),
    }


def curves(found: dict[str, list[dict]], depths: list[int]) -> list[str]:
    """A line a depth: what it holds, and what a token takes, as bars; last / first below."""
    every = [row for rows in found.values() for row in rows]
    top = {key: max(row[key] for row in every) for key in ("held", "token")}
    lines = [
        f"{'layers':<19}{'context':>8}  {'cache it holds':<37}{'a decoded token':<31}a prompt token"
    ]
    for name, rows in found.items():
        for depth, row in zip(depths, rows):
            held, token = ("#" * max(1, round(20 * row[key] / top[key])) for key in top)
            lines.append(
                f"{name:<19}{depth:>8,}{row['held'] / 1e6:>9.2f} MB {held:<21}"
                f"{1e3 * row['token']:>8.2f} ms {token:<21}{1e6 * row['prompt']:>8.0f} us"
            )
        ratio = {key: rows[-1][key] / rows[0][key] for key in rows[0]}
        lines.append(
            f"{'':<11}last / first {ratio['held']:>9.2f}{'':<24}{ratio['token']:>8.2f}{'':<24}"
            f"{ratio['prompt']:>8.2f}\n"
        )
    return lines


# ---------------------------------------------------------------- masks of a grammar


def masks(args):
    """Each schema is compiled by everyone in turn, then given the same texts: one of its valid
    instances, which is its first request, and others like it with new content."""
    tokenizers = {"the default model": default_tokens()}
    if args.tiktoken:
        tokenizers[args.tiktoken.name] = tiktoken_tokens(args.tiktoken)
    else:
        print("only one vocabulary: --tiktoken FILE, such as the cl100k of the litellm wheel")
    names = ["octavo", "xgrammar", "llguidance"] if args.others else ["octavo"]
    if not args.others:
        print("xgrammar and llguidance are not compared: --others PYTHON (see bench_grammar.py)")
    corpus = read_schemas(args.schemas)
    rng = random.Random(args.seed)
    for name, (tokens, stop, encode) in tokenizers.items():
        with tempfile.TemporaryDirectory() as folder, open(args.log, "w") as log:
            file = Path(folder) / "tokens.json"
            known = [None if token is None else token.hex() for token in tokens]
            file.write_text(json.dumps({"tokens": known, "stop": stop}))
            workers = {}
            try:
                for who in names:
                    python = sys.executable if who == "octavo" else args.others
                    command = [python, str(HERE / "bench_grammar.py"), who, str(file)]
                    workers[who] = Worker(command, log, ours=False, settle_s=0)
                found = {who: [] for who in names}
                for number, (schema, values) in enumerate(corpus):
                    texts = [schemas.spell(value, (", ", ": ")) for value in values[:1]]
                    texts += [schemas.spell(v) for v in varied(rng, schema, values, args.texts)]
                    work = {"schema": schema, "texts": [[*encode(t), stop] for t in texts]}
                    for who in rng.sample(names, len(names)):
                        found[who].append(workers[who](work))
                    print(f"\r{number + 1} of {len(corpus)}", end="", file=sys.stderr, flush=True)
                print(file=sys.stderr)
            finally:
                for run in workers.values():
                    run.process.kill()
                    run.process.wait()
        print(f"\n{name}: {len(tokens):,} ids, {len(corpus)} schemas, {args.texts} texts of each")
        mask_table(found, {who: run.facts for who, run in workers.items()})


def mask_table(found: dict[str, list[dict]], facts: dict[str, dict]):
    """Vocabulary in seconds, compilation in ms, masks and tokens in us, of one thread.

    refused: texts that the schema allows and of which a token was not accepted.
    """

    def at(values: list[float], part: float) -> float:
        return values[min(int(part * len(values)), len(values) - 1)]

    print(
        f"{'':<18}{'ids':>7}{'compiles':>13}{'p50':>8}{'p95':>8}{'max':>7}   {'first: mean':>12}"
        f"{'p99':>7}{'max':>8}   {'then: mean':>11}{'p50':>7}{'p99':>7}   {'accept':>8}"
        f"{'refused':>9}"
    )
    for who, rows in found.items():
        done = [row for row in rows if "error" not in row]
        took = sorted(1e3 * row["compile"] for row in done)
        first = sorted(1e6 * s for row in done for s in (row["masks"] or [[]])[0])
        later = sorted(1e6 * s for row in done for text in row["masks"][1:] for s in text)
        accept = [1e6 * s for row in done for text in row["accepts"][1:] for s in text]
        print(
            f"{facts[who]['version']:<18}{facts[who]['vocabulary']:>5.2f} s"
            f"{len(done):>6} of {len(rows):>3}"
            f"{at(took, 0.5):>8.2f}{at(took, 0.95):>8.1f}{took[-1]:>7.0f} ms"
            f"{statistics.mean(first):>12.0f}{at(first, 0.99):>7.0f}{first[-1]:>8.0f} us"
            f"{statistics.mean(later):>11.2f}{at(later, 0.5):>7.2f}{at(later, 0.99):>7.1f} us"
            f"{statistics.mean(accept):>8.2f}{sum(row['refused'] for row in done):>9}"
        )


def default_tokens():
    """(the bytes of each id, a stop id, encode) of the default model."""
    checkpoint = model.load(model.find(None, say=print)[0])
    tokenizer = generate.build_tokenizer(checkpoint.tokenizer)
    stop = tokenizer.special["<|im_end|>"]
    return tokenizer.tokens, stop, lambda text: tokenizer.encode(text, special=False)


def tiktoken_tokens(file: Path):
    """The same of a file of tiktoken's, split as cl100k does; the stop id comes after it."""
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    ranks = load_tiktoken_bpe(str(file))
    split = (
        r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++"""
        r"""[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
    )
    encoding = tiktoken.Encoding(file.name, pat_str=split, mergeable_ranks=ranks, special_tokens={})
    tokens = [None] * (max(ranks.values()) + 22)
    for token, i in ranks.items():
        tokens[i] = token
    return tokens, max(ranks.values()) + 2, encoding.encode


def read_schemas(folder: Path | None) -> list[tuple[str, list]]:
    """(schema, valid values in its order): those of tests/golden, or of MaskBench's files."""
    if folder:
        found = [json.loads(path.read_text("utf-8")) for path in sorted(folder.rglob("*.json"))]
        found = [group for group in found if isinstance(group, dict) and "tests" in group]
        for group in found:
            group["valid"] = [test["data"] for test in group["tests"] if test["valid"]]
    else:
        with (HERE / "golden" / "schemas.jsonl").open(encoding="utf-8") as lines:
            found = [json.loads(line) for line in lines]
    return [
        (json.dumps(g["schema"]), [schemas.arranged(value, g["schema"]) for value in g["valid"]])
        for g in found
    ]


def varied(rng, schema: str, values: list, count: int) -> list:
    """The values with other texts and numbers, wherever the schema allows them."""
    try:
        g = grammar.compile(
            grammar.Vocabulary([bytes([i]) for i in range(256)], []), json_schema=schema
        )
    except grammar.SchemaError:
        return []
    words = (HERE.parent / "LICENSE").read_text("utf-8").split()

    def other(value):
        if isinstance(value, str):
            return " ".join(rng.choices(words, k=rng.randint(1, 6)))
        if isinstance(value, bool) or value is None:
            return rng.random() < 0.5
        if isinstance(value, int):
            return rng.randint(0, 10 ** rng.randint(1, 4))
        return round(rng.uniform(0, 10 ** rng.randint(0, 3)), rng.randint(1, 3))

    def change(inside, whole):
        for key in inside if isinstance(inside, dict) else range(len(inside)):
            value = inside[key]
            if isinstance(value, (dict, list)):
                change(value, whole)
                continue
            inside[key] = other(value)
            if not g.accepts(schemas.spell(whole)):
                inside[key] = value

    found = []
    while len(found) < count and values:
        box = [json.loads(json.dumps(rng.choice(values)))]
        if isinstance(box[0], (dict, list)):
            change(box[0], box[0])
        if not g.accepts(schemas.spell(box[0])):
            values = [value for value in values if g.accepts(schemas.spell(value))]
            continue
        found.append(box[0])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    add = commands.add_parser("decode", help="one request, token by token")
    add.add_argument("--prompt-tokens", type=int, default=128)
    add.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    add.add_argument("--rounds", type=int, default=5)
    add.set_defaults(run=decode)
    add = commands.add_parser("prefill", help="one long prompt")
    add.add_argument("--prompt-tokens", type=int, default=1024)
    add.add_argument("--rounds", type=int, default=5)
    add.set_defaults(run=decode, tokens=1)
    add = commands.add_parser("serve", help="many requests: throughput or delays")
    add.add_argument("--workload", choices=WORKLOADS, default="small")
    add.add_argument("--rounds", type=int, default=3)
    add.add_argument("--profile", action="store_true", help="where a step of decodes goes")
    add.add_argument("--rate", type=float, default=0, help="arrivals a second: measures delays")
    add.add_argument("--requests", type=int, default=40, help="with --rate (default 40)")
    add.add_argument("--seed", type=int, default=0)
    add.set_defaults(run=serve)
    add = commands.add_parser("worker", help="one who is compared: a line in, a line out")
    add.add_argument("who", choices=("octavo", "transformers"))
    add.set_defaults(run=worker)
    add = commands.add_parser("chat", help="the second turn of a long chat")
    add.add_argument("--rounds", type=int, default=5)
    add.add_argument("--words", type=int, default=480, help="of the first question")
    add.set_defaults(run=chat)
    add = commands.add_parser("guided", help="a token under a grammar against a free one")
    add.add_argument("--rounds", type=int, default=5)
    add.add_argument("--tokens", type=int, default=64)
    add.add_argument("--requests", type=int, default=1, help="at once (default 1)")
    add.set_defaults(run=guided)
    add = commands.add_parser("guesses", help="speculative decoding against plain")
    add.add_argument("--drafter", default="ngram", help="as --speculative (default ngram)")
    add.add_argument("--spec-tokens", type=int, help="guesses a round (default: what pays)")
    add.add_argument("--kinds", default="copy,edit,extract,chat", help="of prompts")
    add.add_argument("--batches", default="1,4,16", help="requests at once")
    add.add_argument("--temperature", type=float, default=0.0)
    add.add_argument("--rounds", type=int, default=5)
    add.set_defaults(run=guesses)
    add = commands.add_parser("long", help="one request of many tokens: its cache, a token's time")
    add.add_argument("--tokens", type=int, default=100_000, help="of context (default 100,000)")
    add.add_argument("--seed", type=int, default=0)
    add.set_defaults(run=long)
    add = commands.add_parser("grammar", help="schemas: to compile them, their masks")
    add.add_argument("--others", metavar="PYTHON", help="of an environment with the others")
    add.add_argument("--schemas", type=Path, metavar="FOLDER", help="of MaskBench's files")
    add.add_argument("--tiktoken", type=Path, metavar="FILE", help="a second vocabulary")
    add.add_argument("--texts", type=int, default=60, help="of each schema (default 60)")
    add.add_argument("--seed", type=int, default=0)
    add.add_argument("--log", default=os.devnull, help="where the workers' messages go")
    add.set_defaults(run=masks)
    for name, command in commands.choices.items():
        if name == "grammar":
            continue
        add = command.add_argument
        # theirs depends on who is compared, or is the engine's own
        own = name in ("decode", "prefill", "worker", "guesses")
        add("--dtype", default=None if own else "float32" if name == "long" else "bfloat16")
        add("--device")
        add("--threads", type=int, help="of each who is compared")
        add("--budget", type=int)
        if name in ("decode", "prefill", "serve"):
            add("--vllm", metavar="PYTHON", help="of an environment that has vLLM")
            add("--log", default=os.devnull, help="where the workers' messages go")
        if name in ("decode", "prefill"):
            add("--llama", metavar="PYTHON", help="of an environment that has xllamacpp")
    args = parser.parse_args()
    if args.run is decode and min(args.rounds, args.tokens, args.prompt_tokens) < 1:
        parser.error("--rounds, --tokens and --prompt-tokens are at least 1")
    if args.run is decode and args.prompt_tokens + args.tokens > 2048:
        parser.error("prompt and output are at most 2048 tokens")
    if args.run is guided and min(args.rounds, args.requests, args.tokens - 1) < 1:
        parser.error("--rounds and --requests are at least 1, --tokens at least 2")
    if args.run is chat and min(args.rounds, args.words) < 1:
        parser.error("--rounds and --words are at least 1")
    if args.run is long and not 1_000 <= args.tokens <= DEPTHS[-1]:
        parser.error(f"--tokens is from 1,000 to {DEPTHS[-1]:,}")
    if args.run is serve and (args.rounds < 1 or args.rate < 0 or args.requests < 2):
        parser.error("--rounds is at least 1, --rate at least 0, --requests at least 2")
    if args.run is masks:
        return masks(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    args.run(args)


if __name__ == "__main__":
    main()
