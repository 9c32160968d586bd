"""Every file runs, quickly, and draws what the README shows: `python FILE.py` against a copy.

After a change that is meant: python tests/test_pictures.py writes the copies anew.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

ROOT = Path(__file__).parent.parent
EXPECTED = Path(__file__).parent / "expected"
RUNS = {  # copy -> command line
    "kernels": ["kernels.py"],
    "kernels_rows": ["kernels.py", "--rows", "16"],
    "kv_cache": ["kv_cache.py"],
    "kv_cache_qwen3": ["kv_cache.py", "--model", "Qwen3-8B"],
    "kv_cache_27b": ["kv_cache.py", "--example", "27b"],
    "kv_cache_gpu": [
        "kv_cache.py", "--model", "Qwen3.6-27B", "--gpu", "rtx3090", "--weights", "int4",
        "--kv-dtype", "fp8", "--util", "0.97",
    ],
    "kv_cache_compare": [
        "kv_cache.py", "--compare", "Qwen3-32B", "Gemma-3-27b", "Qwen3.6-27B", "Llama-4-Scout-17B-16E",
        "DeepSeek-V3.2",
    ],
    "model": ["model.py"],
    "model_experts": ["model.py", "--experts", "4"],
    "sample": ["sample.py"],
    "sample_cold": ["sample.py", "--temperature", "0.5"],
    "scheduler": ["scheduler.py"],
    "scheduler_static": ["scheduler.py", "--static"],
    "scheduler_budget": ["scheduler.py", "--budget", "15"],
    "paged": ["paged.py"],
    "paged_blocks": ["paged.py", "--block-size", "64"],
    "paged_kinds": ["paged.py", "--kinds"],
    "grammar": ["grammar.py"],
    "grammar_schema": ["grammar.py", "--schema", '{"enum": ["alpha", "apple", 3]}'],
    "speculative": ["speculative.py"],
    "speculative_gpu": [
        "speculative.py", "--rule", "reject", "--agreement", "0.4", "--costs", "gpu", "--requests", "64",
    ],
    "generate_demo": ["generate.py", "--demo"],
}  # fmt: skip
REFUSED = {  # command line -> words of the refusal
    ("kernels.py", "--rows", "0"): "--rows 0",
    ("kernels.py", "--arch", "90"): "--arch 90",
    ("kernels.py", "--compile", "--arch", "80,75"): "--arch 75",
    ("kernels.py", "--compile", "--rows", "2"): "--rows",
    ("kv_cache.py", "--model", "nothing"): "nothing",
    ("model.py", "--experts", "1"): "--experts 1",
    ("sample.py", "--temperature", "0"): "--temperature 0",
    ("grammar.py", "--schema", '{"type": "strin"}'): "#/type",
    ("scheduler.py", "--budget", "0"): "--budget",
    ("speculative.py", "--agreement", "1.5"): "--agreement 1.5",
    ("speculative.py", "--requests", "0"): "--requests 0",
    ("paged.py", "--block-size", "24"): "--block-size 24",
}


SERVER = multiprocessing.get_context("forkserver")  # has torch loaded; each file runs in a fork


def run(arguments: list[str]) -> CompletedProcess:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("out", "err")]
        for _ in range(2):
            process = SERVER.Process(target=play, args=(arguments, paths))
            process.start()
            process.join(120)
            process.kill()
            process.join()
            if process.exitcode != 255:  # the fork server's own, where it lost the real one
                break
        return CompletedProcess(arguments, process.exitcode, *(p.read_text() for p in paths))


def play(arguments: list[str], paths: list[Path]):
    """`python FILE.py ...` in a process of its own, whose output goes to files."""
    os.chdir(ROOT)
    for stream, path in zip((1, 2), paths):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.argv, sys.path[:0] = arguments, [str(ROOT)]
    torch.set_num_threads(1)  # two run at a time
    runpy.run_path(arguments[0], run_name="__main__")


@pytest.fixture(scope="module")
def ran(request):
    """What every chosen command line gave: two run at a time."""
    chosen = [item for item in request.session.items if item.path == request.path]
    values = [next(iter(item.callspec.params.values())) for item in chosen]
    SERVER.set_forkserver_preload(["torch", "numpy"])
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(values, pool.map(lambda x: run([*RUNS.get(x, x)]), values)))


@pytest.mark.parametrize("name", RUNS)
def test_a_file_draws_its_picture(name, ran):
    result = ran[name]
    assert result.returncode == 0, result.stderr
    assert result.stdout == (EXPECTED / f"{name}.txt").read_text()
    lines = result.stdout.splitlines()
    assert len(lines) <= 40, f"{len(lines)} lines"
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_a_bad_flag_is_refused_in_one_sentence(arguments, ran):
    result = ran[arguments]
    assert result.returncode == 2, result.stdout
    assert REFUSED[arguments] in result.stderr and "Traceback" not in result.stderr


if __name__ == "__main__":
    EXPECTED.mkdir(exist_ok=True)
    for name, arguments in RUNS.items():
        (EXPECTED / f"{name}.txt").write_text(run(arguments).stdout)
