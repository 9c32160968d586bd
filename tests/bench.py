"""Measurements side by side; a script, never a timed test.

    python tests/bench.py decode        tokens/s against transformers' generate(), same weights
    python tests/bench.py serve         32 requests at once: throughput, and the start
    python tests/bench.py serve --vllm VENV/bin/python      in turns with vLLM (see bench_vllm.py)
    python tests/bench.py serve --profile   where a step of 32 decodes goes
    python tests/bench.py serve --workload nano             nano-vllm's 256 requests, for a GPU
    python tests/bench.py serve --rate 2 --seed 0           requests arrive one by one: delays
    python tests/bench.py chat          the second turn of a long chat, with and without the cache

What is compared runs in turns, so that whatever else the machine does hits both. decode needs
transformers (pip install transformers).
"""

import argparse
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
sys.path[:0] = [str(HERE.parent), str(HERE / "golden")]

import generate  # noqa: E402  before torch: it says how threads wait

import kv_cache  # noqa: E402
import model  # noqa: E402
import torch  # noqa: E402
from generate import Engine, SamplingParams  # noqa: E402


def octavo_round(engine: Engine, ids: list[int], tokens: int) -> tuple[float, float, list[int]]:
    """Seconds of prefill, seconds a decoded token (median), and the ids."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    (output,) = engine.generate(ids, params)
    t = output.timings
    return t["prefill_s"] + t["sample_s"], t["tpot_p50_s"], output.token_ids


def transformers_round(llama, ids: list[int], tokens: int) -> tuple[float, float, list[int]]:
    """The same of transformers: every token is stamped by a stopping criterion that never stops."""
    stamps = [time.perf_counter()]

    def stamp(sequence, scores, **rest):
        stamps.append(time.perf_counter())
        return torch.zeros(len(sequence), dtype=torch.bool)

    rows = torch.tensor([ids])
    with torch.inference_mode():
        out = llama.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            do_sample=False,
            max_new_tokens=tokens,
            pad_token_id=0,
            stopping_criteria=[stamp],
        )
    gaps = [after - before for before, after in zip(stamps[1:], stamps[2:])]
    return stamps[1] - stamps[0], statistics.median(gaps), out[0, len(ids) :].tolist()


def decode(args):
    try:
        import make_real
    except ImportError as error:
        sys.exit(
            f"bench.py decode: {error}; it compares with transformers: pip install transformers"
        )
    if args.threads:
        torch.set_num_threads(args.threads)
    path, _ = model.find(None, say=print)
    checkpoint = model.load(path)
    most = args.prompt_tokens + args.tokens
    engine = Engine(
        checkpoint, device="cpu", dtype=args.dtype, max_len=most, max_running=1, prefix_cache=False,
        budget=max(512, args.prompt_tokens),
    )  # fmt: skip
    llama = make_real.reference(checkpoint).to(engine.dtype)
    llama.generation_config.eos_token_id = None
    text = make_real.long_text()
    ids = engine.tokenizer.encode(text * (1 + args.prompt_tokens // 500))[: args.prompt_tokens]

    bandwidth = generate.read_bandwidth(engine.device)
    each = kv_cache.bytes_per_token(engine.config.specs, engine.dtype.itemsize)
    read = engine.model.read_bytes + each * (args.prompt_tokens + args.tokens / 2)
    bound = read / bandwidth
    print(
        f"{engine.name}, {args.dtype}, {torch.get_num_threads()} threads,"
        f" torch {torch.__version__}: prompt {len(ids)}, output {args.tokens} tokens"
    )
    print(
        f"bound: {read / 1e6:.0f} MB a step at {bandwidth / 1e9:.1f} GB/s = {1e3 * bound:.1f} ms,"
        f" {1 / bound:.1f} tokens/s\n"
    )
    rounds = {
        "octavo": lambda: octavo_round(engine, ids, args.tokens),
        "transformers": lambda: transformers_round(llama, ids, args.tokens),
    }
    for each_round in rounds.values():  # the first run allocates, packs and compiles
        each_round()
    results: dict[str, list] = {name: [] for name in rounds}
    print(f"{'round':<7}{'who':<14}{'prefill':>10}{'a token':>11}{'tokens/s':>10}{'of bound':>10}")
    for number in range(args.rounds):
        for name, each_round in rounds.items():
            prefill, token, drawn = each_round()
            results[name].append((prefill, token, drawn))
            line(number + 1, name, prefill, token, bound)
    print()
    medians = {}
    for name, rows in results.items():
        prefill = statistics.median(row[0] for row in rows)
        medians[name] = prefill, statistics.median(row[1] for row in rows)
        line("median", name, *medians[name], bound)
    pairs = zip(results["octavo"], results["transformers"])
    ratios = sorted(theirs[1] / ours[1] for ours, theirs in pairs)
    print(
        f"\noctavo decodes {statistics.median(ratios):.2f} times as fast"
        f" (rounds: {', '.join(f'{ratio:.2f}' for ratio in ratios)}),"
        f" prefill {medians['transformers'][0] / medians['octavo'][0]:.2f} times"
    )
    ours, theirs = results["octavo"][0][2], results["transformers"][0][2]
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), len(ours))
    print(f"the first {same} of {args.tokens} greedy tokens are the same in {args.dtype}")


def line(number, name: str, prefill: float, token: float, bound: float):
    print(
        f"{number:<7}{name:<14}{1e3 * prefill:>7.0f} ms{1e3 * token:>8.1f} ms"
        f"{1 / token:>10.1f}{bound / token:>10.0%}",
        flush=True,
    )


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


def since_start() -> float:
    """Seconds since this process was started (Linux)."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def worker(args):
    """Octavo behind a pipe, as bench_vllm.py has vLLM."""
    settings = {"max_len": 2048, "prefix_cache": False, "max_running": 256}
    settings |= {"budget": args.budget} if args.budget else {}
    engine = Engine(device=args.device, dtype=args.dtype, threads=args.threads, **settings)

    def run(work: dict) -> float:
        params = [
            SamplingParams(
                max_tokens=n, temperature=0.6, top_k=0, top_p=1.0, min_p=0.0, ignore_eos=True
            )
            for n in work["outputs"]
        ]
        started = time.perf_counter()
        outputs = engine.generate(work["prompts"], params)
        seconds = time.perf_counter() - started
        assert [len(output.token_ids) for output in outputs] == work["outputs"]
        return seconds

    run({"prompts": [[1, 2, 3]], "outputs": [2]})
    print(json.dumps({"ready_s": since_start()}), flush=True)
    for text in sys.stdin:
        print(json.dumps({"seconds": run(json.loads(text))}), flush=True)


class Worker:
    """A process that answers a line with a line."""

    def __init__(self, command: list[str], log):
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        self.ready_s = self._read()["ready_s"]

    def _read(self) -> dict:
        text = self.process.stdout.readline()
        if not text:
            sys.exit(f"bench.py: {' '.join(self.process.args)} ended: {self.process.wait()}")
        return json.loads(text)

    def __call__(self, work: dict) -> float:
        self.process.stdin.write(json.dumps(work) + "\n")
        self.process.stdin.flush()
        return self._read()["seconds"]


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
    ours = [sys.executable, __file__, "worker", "--dtype", args.dtype]
    for name in ("device", "threads", "budget"):
        if (value := getattr(args, name)) is not None:
            ours += [f"--{name}", str(value)]
    with tempfile.TemporaryDirectory() as folder, open(args.log, "w") as log:
        workers = {"octavo": Worker(ours, log)}
        if args.vllm:
            folder = str(write_checkpoint(Path(folder) / "model"))
            script = str(HERE / "bench_vllm.py")
            workers["vllm"] = Worker([args.vllm, script, folder], log)
        seconds = {name: {case: [] for case in cases} for name in workers}
        print(f"\n{'round':<7}{'who':<9}{'batch':>8}{'output tok/s':>14}{'alone tok/s':>13}"
              f"{'1,023 prompt tokens':>21}")  # fmt: skip
        for number in range(args.rounds):
            for name, run in workers.items():
                for case, one in cases.items():
                    seconds[name][case].append(run(one))
                _serve_line(
                    f"{number + 1}", name, output, {c: s[-1] for c, s in seconds[name].items()}
                )
    best = {n: {c: statistics.median(s) for c, s in by.items()} for n, by in seconds.items()}
    for name, by in best.items():
        _serve_line("median", name, output, by)
    found = {
        name: {
            "start_s": round(workers[name].ready_s, 1),
            "output_tokens_per_s": round(output / by["batch"], 1),
            "alone_tokens_per_s": round(64 / by["alone"], 1),
            "prefill_1023_s": round(by["prefill"], 3),
        }
        for name, by in best.items()
    }
    for name, run in workers.items():
        print(f"{name} was ready {run.ready_s:.1f} s after its process began")
    if args.vllm:
        pairs = zip(seconds["octavo"]["batch"], seconds["vllm"]["batch"])
        ratios = sorted(theirs / ours for ours, theirs in pairs)
        found["ratio"] = round(statistics.median(ratios), 2)
        print(
            f"octavo has {found['ratio']:.2f} times vLLM's throughput (rounds:"
            f" {', '.join(f'{ratio:.2f}' for ratio in ratios)}) and starts"
            f" {workers['vllm'].ready_s / workers['octavo'].ready_s:.0f} times as fast"
        )
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
        f"{number:<7}{name:<9}{by['batch']:>6.1f} s{output / by['batch']:>14.1f}"
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    add = commands.add_parser("decode", help="tokens/s against transformers")
    add.add_argument("--rounds", type=int, default=5)
    add.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    add.add_argument("--prompt-tokens", type=int, default=128)
    add.add_argument("--dtype", default="bfloat16")
    add.add_argument("--threads", type=int)
    add.set_defaults(run=decode)
    add = commands.add_parser("serve", help="many requests: throughput or delays")
    add.add_argument("--workload", choices=WORKLOADS, default="small")
    add.add_argument("--vllm", help="the Python of an environment that has vLLM")
    add.add_argument("--rounds", type=int, default=3)
    add.add_argument("--profile", action="store_true", help="where a step of decodes goes")
    add.add_argument("--rate", type=float, default=0, help="arrivals a second: measures delays")
    add.add_argument("--requests", type=int, default=40, help="with --rate (default 40)")
    add.add_argument("--seed", type=int, default=0)
    add.add_argument("--log", default=os.devnull, help="where the workers' messages go")
    add.set_defaults(run=serve)
    commands.add_parser("worker").set_defaults(run=worker)
    add = commands.add_parser("chat", help="the second turn of a long chat")
    add.add_argument("--rounds", type=int, default=5)
    add.add_argument("--words", type=int, default=480, help="of the first question")
    add.set_defaults(run=chat)
    for command in ("serve", "worker", "chat"):
        add = commands.choices[command].add_argument
        add("--dtype", default="bfloat16")
        add("--device")
        add("--threads", type=int)
        add("--budget", type=int)
    args = parser.parse_args()
    if args.run is decode and min(args.rounds, args.tokens - 2, args.prompt_tokens) < 1:
        parser.error("--rounds and --prompt-tokens are at least 1, --tokens at least 3")
    if args.run is chat and min(args.rounds, args.words) < 1:
        parser.error("--rounds and --words are at least 1")
    if args.run is serve and (args.rounds < 1 or args.rate < 0 or args.requests < 2):
        parser.error("--rounds is at least 1, --rate at least 0, --requests at least 2")
    args.run(args)


if __name__ == "__main__":
    main()
