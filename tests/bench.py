"""Measurements side by side; a script, never a timed test.

    python tests/bench.py decode        tokens/s against transformers' generate(), same weights

Both run in one process with the same threads and type, in turns, so that whatever else the machine
does hits both. Needs transformers (pip install transformers).
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "golden")]

import torch  # noqa: E402

import generate  # noqa: E402
import kv_cache  # noqa: E402
import model  # noqa: E402
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
        checkpoint, device="cpu", dtype=args.dtype, max_len=most, max_running=1,
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
    args = parser.parse_args()
    if min(args.rounds, args.tokens - 2, args.prompt_tokens) < 1:
        parser.error("--rounds and --prompt-tokens are at least 1, --tokens at least 3")
    args.run(args)


if __name__ == "__main__":
    main()
