"""llama.cpp behind a pipe, for `bench.py decode` and `prefill` with --llama PYTHON.

Runs in an environment that has xllamacpp, and imports nothing of ours but bench_pipe.py. Its wheel
is for any x86-64 with AVX2; built where it runs, with cmake and a C++ compiler, it uses all that
the machine has (AVX-512, say), and only that is a fair comparison:

    python -m venv llama && . llama/bin/activate
    CMAKE_ARGS="-DLLAMA_LLGUIDANCE=OFF -DLLAMA_BUILD_BORINGSSL=OFF" \
        pip install --no-binary xllamacpp xllamacpp==2026.10.11549
"""

import re
import sys
import time

import bench_pipe


def main(file: str, threads: str):
    out = bench_pipe.own_output()
    import xllamacpp

    params = xllamacpp.CommonParams()  # as they come: keys and values in float16, 512 rows a pass
    params.model.path = file
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.n_ctx, params.n_parallel = 2048, 1
    params.cache_prompt = params.cache_idle_slots = False  # every prompt is computed
    params.cache_ram_mib = params.n_ctx_checkpoints = 0
    server = xllamacpp.Server(params)

    def one(work: dict) -> dict:
        """Its stream has text, not ids: those are asked for (as "logprobs") where nobody times."""
        chunks, stamps = [], []

        def stamp(chunk: dict):
            stamps.append(time.perf_counter() - started)
            chunks.append(chunk)

        request = {
            "prompt": work["prompt"],
            "n_predict": work["tokens"],
            "temperature": 0,  # the last of the samplers: without one they draw at random
            "samplers": ["temperature"],
            "ignore_eos": True,
            "stream": True,
        }
        if work.get("ids"):
            request["logprobs"] = 1
        started = time.perf_counter()
        server.handle_completions(request, stamp)
        last = chunks.pop()  # usage, and no token
        assert "usage" in last, last
        counts = last["usage"]
        assert counts["prompt_tokens"] == len(work["prompt"]) == last["timings"]["prompt_n"], counts
        assert counts["completion_tokens"] == len(chunks) == work["tokens"], counts
        probs = [chunk["choices"][0]["logprobs"] for chunk in chunks]  # None where not asked for
        ids = [row["content"][0]["id"] for row in probs if row]
        return {"stamps": stamps[:-1], "ids": ids}

    one({"prompt": [1, 2, 3], "tokens": 2})
    built_for = " ".join(re.findall(r"(\w+) = 1", xllamacpp.get_system_info()))
    version = f"llama.cpp of xllamacpp {xllamacpp.__version__}, built for {built_for}"
    bench_pipe.answer(out, one, version=version, threads=int(threads))


if __name__ == "__main__":
    main(*sys.argv[1:])
