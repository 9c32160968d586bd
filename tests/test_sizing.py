"""kv_cache.py's sizing: bytes from a config alone, against published sizes and servers' logs."""

import json
import random
import re
from pathlib import Path

import pytest

import kv_cache
from kv_cache import (
    STATES,
    LayerSpec,
    layers,
    parameters,
    plan,
    read_bytes,
    row_bytes,
    shard,
    state_bytes,
    stored_bytes,
)

ROOT = Path(kv_cache.__file__).parent
MODELS = {
    entry["name"]: entry["config"] for entry in json.loads((ROOT / "models.json").read_text())
}
LOGS = json.loads((ROOT / "tests" / "startup_logs.json").read_text())
GIB, MIB = 2**30, 2**20
NEXT = {  # the 27B hybrid of 64 layers: 16 keep tokens, 48 a state
    "model_type": "qwen3_5_text", "num_hidden_layers": 64, "hidden_size": 5120,
    "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32",
}  # fmt: skip


# ---------------------------------------------------------------- by hand

TABLE = """
SmolLM2-135M             30 full                          23,040    0.0   0.0  2.81  2.81
gemma3-270m              15 sliding 3 full                 3,072    7.5   0.0  0.38  0.38
Qwen3-0.6B               28 full                         114,688    0.0   0.0 14.00 14.00
Llama-3.2-1B             16 full                          32,768    0.0   0.0  4.00  4.00
Gemma-3-1b               22 sliding 4 full                 4,096   11.0   0.0  0.51  0.51
SmolLM3-3B               36 full                          73,728    0.0   0.0  9.00  9.00
Qwen2.5-7B               28 full                          57,344    0.0   0.0  7.00  7.00
Mistral-7B-v0.1          32 sliding                            0  512.0   0.0  0.50  0.50
Llama-3.1-8B             32 full                         131,072    0.0   0.0 16.00 16.00
Qwen3-8B                 36 full                         147,456    0.0   0.0 18.00 18.00
Phi-4                    40 full                         204,800    0.0   0.0 25.00 25.00
gpt-oss-20b              12 sliding 12 full               24,576    3.0   0.0  3.00  3.00
Mistral-Small-3.2-24B    40 full                         163,840    0.0   0.0 20.00 20.00
Gemma-4-26B-A4B          25 sliding 5 full                20,480  200.0   0.0  2.70  2.70
Qwen3.6-27B              48 linear 16 full                65,536    0.0 146.8  8.14  8.29
Qwen3.5-27B              48 linear 16 full                65,536    0.0 146.8  8.14  8.29
Gemma-3-27b              52 sliding 10 full               81,920  416.0   0.0 10.41 10.41
Qwen3-30B-A3B            48 full                          98,304    0.0   0.0 12.00 12.00
Nemotron-3-Nano-30B-A3B  23 mamba2 23 none 6 full          6,144    0.0  46.8  0.80  0.84
Gemma-4-31B              50 sliding 10 full               81,920  800.0   0.0 10.78 10.78
Qwen3-32B                64 full                         262,144    0.0   0.0 32.00 32.00
Qwen3.6-35B-A3B          30 linear 10 full                20,480    0.0  61.4  2.56  2.62
Kimi-Linear-48B-A3B      20 kda 7 latent                   8,064    0.0  41.4  1.02  1.07
Nemotron-H-56B           54 mamba2 54 none 10 full        40,960    0.0 870.3  5.85  6.70
Llama-3.3-70B            80 full                         327,680    0.0   0.0 40.00 40.00
Qwen3-Next-80B-A3B       36 linear 12 full                24,576    0.0  37.7  3.04  3.07
Llama-4-Scout-17B-16E    36 chunked 12 full               49,152 1152.0   0.0  7.12  6.56
gpt-oss-120b             18 sliding 18 full               36,864    4.5   0.0  4.50  4.50
MiniMax-M2               62 full                         253,952    0.0   0.0 31.00 31.00
Qwen3-235B-A22B          94 full                         192,512    0.0   0.0 23.50 23.50
GLM-4.5                  92 full                         376,832    0.0   0.0 46.00 46.00
DeepSeek-V3              61 latent                        70,272    0.0   0.0  8.58  8.58
DeepSeek-V3.2            61 sparse                        78,324    0.0   0.0  9.56  1.12
GLM-5                    78 sparse                       100,152    0.0   0.0 12.23  1.43
GLM-5.2                  21 sparse 57 sparse              92,628    0.0   0.0 11.31  0.51
Kimi-K2                  61 latent                        70,272    0.0   0.0  8.58  8.58
"""


@pytest.mark.parametrize("line", TABLE.strip().splitlines(), ids=lambda line: line.split()[0])
def test_a_published_model_at_131072_tokens(line):
    """Layers that cache, bytes a token, window and state MiB, stored and read GiB (bfloat16).

    GLM-5.2: 78 x 1,152 + 21 x 132 bytes a token; 131,072 x 21 x 132 + 2,048 x 78 x 1,152 read.
    """
    name, *counts, token, window, state, stored, read = line.split()
    specs = layers(MODELS[name])
    kinds = {}
    for spec in specs:
        kinds[spec] = kinds.get(spec, 0) + 1
    assert sorted(f"{n} {s.kind}" for s, n in kinds.items()) == sorted(
        " ".join(counts[i : i + 2]) for i in range(0, len(counts), 2)
    )
    assert len(specs) == kv_cache.text(MODELS[name])["num_hidden_layers"]
    length = 131_072
    windows = sum(stored_bytes(s, length) for s in specs if s.kind in ("sliding", "chunked"))
    found = [
        f"{sum(row_bytes(s) for s in specs if s.grows):,}",
        f"{windows / MIB:.1f}",
        f"{sum(map(state_bytes, specs)) / MIB:.1f}",
        f"{sum(stored_bytes(s, length) for s in specs) / GIB:.2f}",
        f"{sum(read_bytes(s, length) for s in specs) / GIB:.2f}",
    ]
    assert found == [token, window, state, stored, read]


def test_every_config_is_sized_or_refused_with_a_reason():
    refused = {"DeepSeek-V4-Flash": "'deepseek_v4' is not sized", "MiniMax-M3": "'minimax_m3'"}
    sized = [line.split()[0] for line in TABLE.strip().splitlines()]
    for name, config in MODELS.items():
        if name in refused:
            with pytest.raises(ValueError, match=refused[name]):
                layers(config)
        else:
            assert layers(config)
    assert len(MODELS) == 44 and set(sized) | set(refused) <= set(MODELS)


def test_a_token_in_every_format():
    full, latent = LayerSpec("full", 4, 256), LayerSpec("latent", 1, 576, values=512)
    sizes = {  # 4 heads x 2 vectors x what 256 numbers take
        "auto": 512, "bfloat16": 512, "fp32": 1024, "fp8": 256, "fp8_e5m2": 256,
        "int8_per_token_head": 256 + 4, "fp8_per_token_head": 256 + 4,
        "int4_per_token_head": 128 + 4, "nvfp4": 128 + 16,
        "q8_0": 8 * 34, "q5_1": 8 * 24, "q5_0": 8 * 22, "q4_1": 8 * 20, "q4_0": 8 * 18,
    }  # fmt: skip
    for name, vector in sizes.items():
        assert row_bytes(full, name) == 8 * vector, name
    assert row_bytes(LayerSpec("full", 2, 192, values=128), "auto") == 2 * (192 + 128) * 2
    assert (row_bytes(latent), row_bytes(latent, "fp8"), row_bytes(latent, "q8_0")) == (
        1152,
        576,
        612,
    )
    assert row_bytes(latent, "fp8_ds_mla") == 656
    sparse = LayerSpec("sparse", 1, 576, values=512, index=128, top=2048)
    assert row_bytes(sparse) == 1152 + 132
    assert row_bytes(sparse, "fp8") == row_bytes(sparse, "fp8_ds_mla") == 656 + 132


@pytest.mark.parametrize("spec, name", [
    (LayerSpec("full", 4, 256), "fp8_ds_mla"),
    (LayerSpec("latent", 1, 576, values=512), "int4_per_token_head"),
    (LayerSpec("latent", 1, 576, values=512), "nvfp4"),
    (LayerSpec("full", 4, 80), "q8_0"),
    (LayerSpec("full", 4, 256), "turboquant_k8v4"),
], ids=str)  # fmt: skip
def test_a_format_that_does_not_fit_is_refused(spec, name):
    with pytest.raises(ValueError, match=f"cache format '{name}'"):
        row_bytes(spec, name)


def test_a_state_is_a_matrix_a_head_and_the_columns_of_a_convolution():
    spec = next(s for s in layers(NEXT) if s.kind == "linear")
    assert state_bytes(spec) == 48 * 128 * 128 * 4 + 3 * 10_240 * 2 == 3_207_168
    assert state_bytes(spec, 2) == 48 * 128 * 128 * 2 + 3 * 10_240 * 2
    assert state_bytes(spec, 0, 3) == 3_207_168 + 3 * 10_240 * 2
    assert stored_bytes(spec, 7) == stored_bytes(spec, 10**6) == 3_207_168
    assert read_bytes(spec, 7) == 2 * 3_207_168  # read and written
    assert 48 * 3_207_168 == 153_944_064


def test_what_windows_and_chunks_keep_and_read():
    sliding, chunked = LayerSpec("sliding", 1, 8, 1024), LayerSpec("chunked", 1, 8, 1024)
    assert [stored_bytes(sliding, n) for n in (1, 1024, 5000)] == [32, 32_768, 32_768]
    assert [read_bytes(sliding, n) for n in (1, 1024, 5000)] == [32, 32_768, 32_768]
    assert [stored_bytes(chunked, n) for n in (1, 1024, 5000)] == [32, 32_768, 32_768]
    assert [read_bytes(chunked, n) for n in (1, 1024, 5000)] == [32, 32_768, 16_384]  # on average
    shared = LayerSpec("shared", 1, 8, 1024)
    assert (stored_bytes(shared, 5000), read_bytes(shared, 5000)) == (0, 32_768)
    none = LayerSpec("none", 0, 0)
    assert (stored_bytes(none, 5000), read_bytes(none, 5000), row_bytes(none)) == (0, 0, 0)


def test_a_sparse_layer_reads_every_index_key_and_the_tokens_it_chose():
    own = LayerSpec("sparse", 1, 576, values=512, index=128, top=2048)
    lent = LayerSpec("sparse", 1, 576, values=512, index=0, top=2048)
    assert read_bytes(own, 131_072) == 131_072 * 132 + 2_048 * 1_152
    assert read_bytes(own, 131_072, "fp8") == 131_072 * 132 + 2_048 * 656  # 18.6 MB
    assert read_bytes(lent, 131_072, "fp8") == 2_048 * 656
    assert read_bytes(own, 100) == 100 * (132 + 1_152)
    dense = LayerSpec("latent", 1, 576, values=512)
    assert read_bytes(own, 3_026, "fp8") <= read_bytes(dense, 3_026, "fp8") + 132  # break-even
    assert read_bytes(own, 3_027, "fp8") < read_bytes(dense, 3_027, "fp8")


def test_tensor_parallelism_divides_heads_then_repeats_them_and_leaves_latents_whole():
    full = LayerSpec("full", 8, 128)
    assert [shard(full, n).heads for n in (1, 2, 8, 16)] == [8, 4, 1, 1]
    latent = LayerSpec("latent", 1, 576, values=512)
    assert shard(latent, 8) == latent
    state = next(s for s in layers(NEXT) if s.kind == "linear")
    assert state_bytes(shard(state, 2)) * 2 == state_bytes(state)
    with pytest.raises(ValueError, match="8 heads of full layers do not divide over 3 GPUs"):
        shard(full, 3)
    with pytest.raises(ValueError, match="16 heads of linear layers do not divide over 32 GPUs"):
        shard(state, 32)


def blocks_of(dtype="auto", length=262_144, tp=1, **more):
    specs = [shard(s, tp) for s in layers(NEXT)]
    specs += [next(s for s in specs if s.kind == "full")] * (more.get("drafts", 0) > 0)
    return plan(specs, 0, length, dtype, **more)


def test_a_page_of_attention_grows_until_a_state_fits():
    assert blocks_of().block == 784  # 16 * ceil(3,207,168 / 16 / 4,096)
    assert blocks_of("fp8").block == 1568
    assert blocks_of("fp8", tp=2).block == 1568
    assert blocks_of("fp8", drafts=3).block == 1600
    assert blocks_of("fp8", number=2).block == 800  # a 16-bit state
    assert blocks_of(block=1024).block == 1024 and blocks_of(block=32).block == 784
    assert [blocks_of(number=2, drafts=n).block for n in (7, 15)] == [448, 480]  # as logged
    experts = [shard(s, 4) for s in layers(MODELS["Qwen3.6-35B-A3B"])]
    assert plan(experts, 0, 4096).block == 528  # as logged
    kimi = layers(MODELS["Kimi-Linear-48B-A3B"])
    assert plan(kimi, 0, 4096).block == 1920  # in steps of 64: ceil(2,170,880 / 64 / 1,152)
    halves = [shard(s, 2) for s in kimi]
    assert plan(halves, 0, 4096).block == 960
    assert plan(halves, 0, 4096, block=944).block == 944  # as logged, by a kernel of 16


def test_blocks_of_one_request_of_the_27b_hybrid():
    def request(dtype, prefix, **more):
        made = blocks_of(dtype, prefix=prefix, **more)
        return made.request, f"{made.request * made.block_bytes / GIB:.2f}"

    assert request("auto", False) == (338, "16.17") and request("auto", True) == (341, "16.32")
    assert request("fp8", False) == (171, "8.18") and request("fp8", True) == (174, "8.33")
    assert request("fp8", False, number=2) == (331, "8.08")
    made = blocks_of("fp8", length=204_800)  # the server said: needs 6.56 GiB
    assert (made.request, made.block_bytes) == (131 + 6, 49 * MIB)
    assert f"{made.request * made.block_bytes / GIB:.3f}" == "6.556"


def test_states_a_request_holds_by_version_prefix_caching_and_drafts():
    def states(**more):
        return [blocks for kind, _, _, blocks in blocks_of(**more).groups if kind == "linear"]

    assert states(prefix=True) == [2] * 3 and states(prefix=False) == [1] * 3
    assert states(prefix=True, drafts=3) == [5] * 3 and states(prefix=False, drafts=1) == [2] * 3
    assert states(prefix=True, version=(0, 13)) == [1] * 3  # had no modes
    mamba = layers(MODELS["Nemotron-3-Nano-30B-A3B"])
    every = plan(mamba, 0, 100_000, version=(0, 20))
    assert every.block == 2176  # ceil(2,134,016 / 1,024) in pieces of 128 tokens
    assert all(blocks == 46 for _, _, _, blocks in every.groups)  # a state at each block's end
    assert plan(mamba, 0, 100_000, version=(0, 28)).block == 2096


def test_groups_are_as_large_as_the_rarest_kind_unless_that_pads_more():
    def groups(name, version=(0, 28), **more):
        made = plan(layers(MODELS[name]), 0, 131_072, version=version, **more)
        return [(kind, count) for kind, count, *_ in made.groups]

    assert sorted(groups("Gemma-3-27b")) == [("full", 10)] + [
        ("sliding", x) for x in (8, 8, 9, 9, 9, 9)
    ]
    assert groups("gpt-oss-120b") == [("sliding", 18), ("full", 18)]
    assert groups("DeepSeek-V3.2") == [("sparse", 61)]
    assert groups("Gemma-3-27b", (0, 8)) == groups("Gemma-3-27b", hybrid=False) == [("full", 62)]
    scout = [groups("Llama-4-Scout-17B-16E", v) for v in ((0, 10), (0, 12), (0, 13))]
    assert scout[0] == scout[2] == [("chunked", 12)] * 3 + [("full", 12)]
    assert scout[1] == [("full", 48)]
    drafted = layers(MODELS["gpt-oss-20b"]) + [layers(MODELS["gpt-oss-20b"])[1]]  # 12 and 13
    padded = [[count for _, count, *_ in plan(drafted, 0, 4096, version=v).groups]
              for v in ((0, 11), (0, 12))]  # fmt: skip
    assert padded == [[12, 7, 6], [12, 13]]
    uneven = [LayerSpec("full", 1, 8)] * 10 + [LayerSpec("sliding", 1, 8, 64)] * 14
    assert len(plan(uneven, 0, 4096, version=(0, 17)).groups) == 3
    assert len(plan(uneven, 0, 4096, version=(0, 18)).groups) == 2


def test_narrow_layers_of_a_hybrid_take_more_tokens_a_block():
    made = plan(layers(MODELS["Gemma-4-31B"]), 0, 131_072)
    assert {(kind, block) for kind, _, block, _ in made.groups} == {("sliding", 16), ("full", 32)}
    with pytest.raises(ValueError, match=r"no common page of \[48, 64\] bytes a token"):
        plan([LayerSpec("full", 1, 12), LayerSpec("sliding", 1, 16, 8)], 0, 64)


def test_a_window_counts_what_is_in_flight():
    def blocks(kind, window, **more):
        specs = [LayerSpec(kind, 1, 8, window), LayerSpec("full", 1, 8)]
        return plan(specs, 0, 131_072, **more).groups[0][3]

    assert blocks("sliding", 1024, version=(0, 25), batched=8192) == 577  # ceil(9,215 / 16) + 1
    assert blocks("sliding", 1024, version=(0, 26), batched=8192) == 1089  # two batches
    assert blocks("sliding", 1024, version=(0, 26), batched=8192, stages=2) == 1089
    assert blocks("sliding", 200_000, version=(0, 25)) == 8193
    assert blocks("chunked", 8192, version=(0, 25), batched=8192) == 1024


def test_the_printed_tokens_changed_their_meaning():
    specs = layers(MODELS["Gemma-3-27b"])
    old, new = (plan(specs, 20 * GIB, 8192, version=v) for v in ((0, 20, 0), (0, 20, 1)))
    assert old.blocks == new.blocks and old.concurrency == new.concurrency
    assert old.tokens == old.blocks // 7 * 16
    assert new.tokens == int(new.concurrency * 8192)


def test_pipeline_stages_take_the_memory_of_the_fullest():
    specs = [LayerSpec("full", 8, 128)] * 7
    assert plan(specs, 10**9, 64, stages=2).block_bytes == 4 * 16 * 4096
    mixed = [LayerSpec("full", 8, 128), LayerSpec("sliding", 8, 128, 64)] * 4
    assert plan(mixed, 10**9, 64, stages=2).block_bytes == 2 * 16 * 4096
    sparse = [mixed[0], mixed[1], mixed[1]] * 2  # a group takes every second sliding layer
    assert plan(sparse, 10**9, 64, stages=2).block_bytes == 16 * 4096


def test_context_parallelism_divides_a_request():
    specs = layers(MODELS["Kimi-K2"])
    one, eight = (plan(specs, 40 * GIB, 131_072, version=(0, 19), context=n) for n in (1, 8))
    assert eight.tokens == 8 * one.tokens and eight.request == one.request // 8


# ---------------------------------------------------------------- against servers' own lines

OUTLIERS = {  # what a log says, and why the prediction is not inside its rounding
    "v05": "four ranks with a KV connector: the GiB line is one rank's, blocks are the minimum",
    "v40": "8,192 tokens in flight were inferred: with 8,240 it is inside, and whole blocks",
    "v51": "the GiB line is from the boot before, at another length: one block of 113",
}


def number_of(version: str) -> tuple[int, ...]:
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(x) for x in match.groups() if x) if match else (0, 28)


def specs_of(log) -> list[LayerSpec]:
    if shape := log.get("layers"):
        heads, dim = shape.get("kv_full", shape["kv"]), shape.get("hd_full", shape["hd"])
        specs = [LayerSpec("full", heads, dim)] * shape["full"]
        specs += [LayerSpec("sliding", shape["kv"], shape["hd"], shape["window"])] * shape["swa"]
    else:
        specs = layers(log.get("fields") or MODELS[log["config"]])
    specs = [shard(spec, log.get("tp", 1)) for spec in specs]
    return specs + [kv_cache.draft_layer(specs)] * log.get("draft_layers", 0)


def planned(log, memory, **more):
    return plan(
        specs_of(log), int(memory), log.get("max_model_len", 8192), log.get("kv_dtype", "auto"),
        number_of(log.get("version", "")), log.get("batched", 8192), log.get("block_size", 0),
        drafts=log.get("drafts", 0), prefix=log.get("prefix_cache", True),
        stages=log.get("pp", 1), context=log.get("dcp", 1),
        hybrid=log.get("hybrid_manager", True), **more,
    )  # fmt: skip


def reported(log) -> int:
    return log.get("kv_tokens") or 16 * log["gpu_blocks"]


VLLM = [log for log in LOGS if log["engine"] == "vllm"]
SIZED = [log for log in VLLM if log.get("available_kv_gib")]
BLOCKS = [log for log in VLLM if not log.get("available_kv_gib")]


def inside(log) -> bool:
    """Whether a memory that prints as this GiB line gives these tokens, and within 0.2 %."""
    gib, tokens = log["available_kv_gib"], reported(log)
    low, found, high = (planned(log, (gib + x) * GIB) for x in (-0.005, 0, 0.005))
    near = abs(found.tokens / tokens - 1) <= 0.002
    if wanted := log.get("max_concurrency"):
        near = near and low.concurrency - 0.005 <= wanted <= high.concurrency + 0.005
    if blocks := log.get("gpu_blocks"):
        near = near and low.blocks <= blocks <= high.blocks
    return near and low.tokens <= tokens <= high.tokens


@pytest.mark.parametrize("log", SIZED, ids=lambda log: log["id"])
def test_tokens_follow_from_the_reported_gib(log):
    assert inside(log) == (log["id"] not in OUTLIERS), OUTLIERS.get(log["id"])


@pytest.mark.parametrize("log", BLOCKS, ids=lambda log: log["id"])
def test_tokens_without_a_gib_line_are_a_whole_number_of_blocks(log):
    """And that number of blocks gives the reported concurrency."""
    tokens, unit = reported(log), planned(log, 10 * GIB)
    guess = round(tokens / unit.tokens * unit.blocks)
    near = [planned(log, n * unit.block_bytes) for n in range(max(0, guess - 99), guess + 99)]
    fitting = [made for made in near if made.tokens == tokens]
    if log["id"] in ("v52", "v53"):  # bfloat16 pages after all: 8-bit ones give no whole block
        assert not [m for m in near if planned({**log, "kv_dtype": "fp8"}, 0).tokens == tokens]
    assert fitting
    wanted = log.get("max_concurrency")
    assert wanted is None or any(abs(m.concurrency - wanted) <= 0.00501 for m in fitting)


def test_nine_of_ten_logs_are_inside_their_rounding():
    inside_ = [log["id"] for log in SIZED if inside(log)] + [log["id"] for log in BLOCKS]
    assert len(inside_) >= 0.9 * len(VLLM) and len(VLLM) >= 47
    told = f"Of {len(VLLM)} servers' start-up logs, {len(inside_)} give the printed tokens"
    assert told in (ROOT / "README.md").read_text()


def test_outliers_are_what_their_explanation_says():
    logs = {log["id"]: log for log in SIZED}

    def exact(log):
        unit = planned(log, GIB).block_bytes
        return [n for n in range(8200, 8400) if planned(log, n * unit).tokens == reported(log)]

    assert exact(logs["v40"]) == []  # no number of blocks gives these tokens
    assert exact({**logs["v40"], "batched": 8240}) == [8288]
    assert inside({**logs["v40"], "batched": 8240})
    last = logs["v51"]
    unit = planned(last, GIB).block_bytes
    assert planned(last, 5.42 * GIB).blocks == 113
    assert planned(last, 112 * unit).tokens == reported(last)


def test_a_pool_of_429k_blocks_with_and_without_the_manager_that_frees_windows():
    """The same memory of a gpt-oss server, in blocks of 64 tokens: 1.88 times as many tokens."""
    log = next(log for log in LOGS if log["id"] == "v37")
    made = planned(log, 0)
    on, off = (
        planned({**log, "hybrid_manager": x}, 428_888 * made.block_bytes) for x in (True, False)
    )
    assert (on.tokens, off.tokens) == (25_798_626, 13_724_416)


@pytest.mark.parametrize("log", [x for x in LOGS if x["engine"] == "sglang"], ids=lambda x: x["id"])
def test_another_server_s_bytes_are_tokens_times_bytes_a_token(log):
    specs = layers(MODELS[log["config"]])
    dtype, tokens = log.get("kv_dtype", "auto"), log["kv_tokens"]
    found = tokens * sum(row_bytes(s, dtype) for s in specs if s.grows) / GIB
    if log.get("indexer") is False:  # a bug of its own: the line left the index out
        found -= tokens * len(specs) * 132 / GIB
    wanted = log.get("kv_gib") or log["k_gib"] + log["v_gib"]
    assert abs(found - wanted) <= 0.0112
    if "ssm_gib" in log:
        states = [s for s in specs if s.kind in STATES]
        pool = (log["mamba_slots"] + 1) * sum(state_bytes(s, 2) for s in states)
        assert abs(pool / GIB - log["ssm_gib"] - log["conv_gib"]) <= 0.0112


# ---------------------------------------------------------------- by property


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"DeepSeek-V4-Flash", "MiniMax-M3"}))
def test_bytes_grow_with_length_and_no_more_is_read_than_is_kept(name):
    """But for states, which are written too, and layers that read what others keep."""
    specs = layers(MODELS[name])
    draw = random.Random(name)
    lengths = sorted(draw.randint(1, 2_000_000) for _ in range(12))
    for spec in set(specs):
        kept = [stored_bytes(spec, n) for n in lengths]
        assert kept == sorted(kept)
        assert all(
            read_bytes(spec, n) <= stored_bytes(spec, n) + state_bytes(spec) for n in lengths
        )
        for dtype in ("fp8", "q8_0"):
            assert stored_bytes(spec, 5000, dtype) <= stored_bytes(spec, 5000)
    for dtype in ("auto", "fp8"):
        made = [plan(specs, 40 * GIB, n, dtype) for n in lengths]
        assert [m.request for m in made] == sorted(m.request for m in made)
        for m, n in zip(made, lengths):
            assert m.blocks * m.block_bytes <= 40 * GIB < (m.blocks + 1) * m.block_bytes
            assert m.request * m.block_bytes >= sum(stored_bytes(s, n, dtype) for s in specs)
            assert sum(count for _, count, *_ in m.groups) == sum(s.kind != "none" for s in specs)


@pytest.mark.parametrize("seed", range(40))
def test_any_plan_holds_what_it_promises(seed):
    """Random hybrids: whole blocks, equal pages, groups that cover each layer once."""
    draw = random.Random(seed)
    kinds = [
        LayerSpec("full", 2, 64),
        LayerSpec("sliding", 2, 64, 512),
        LayerSpec("chunked", 2, 64, 999),
    ]
    kinds += [LayerSpec("linear", 4, 32, values=32, conv=(3, 64)), LayerSpec("none", 0, 0)]
    chosen = [kinds[0], *draw.sample(kinds[1:], draw.randint(0, 3))]
    specs = [draw.choice(chosen) for _ in range(draw.randint(1, 30))] + [kinds[0]]
    length, memory = draw.randint(1, 100_000), draw.randint(0, 2**34)
    for version in ((0, 10), (0, 13), (0, 20), (0, 25), (0, 32)):
        made = plan(specs, memory, length, version=version, batched=draw.choice([512, 8192]),
                    drafts=draw.randint(0, 3), prefix=draw.random() < 0.5)  # fmt: skip
        assert made.blocks == memory // made.block_bytes
        assert made.request == sum(blocks for *_, blocks in made.groups)
        assert sum(n for _, n, *_ in made.groups) == sum(s.kind != "none" for s in specs)
        assert made.concurrency == pytest.approx(made.blocks / made.request)
        assert plan(specs, 2 * memory, length, version=version).blocks >= made.blocks


def test_listed_kinds_are_those_that_the_pattern_gives():
    """Of configs that name every layer: without the names the family's rule gives the same."""
    listed = 0
    for name, config in MODELS.items():
        config = kv_cache.text(config)
        if config.get("layer_types") and config["model_type"] != "deepseek_v4":
            bare = {key: value for key, value in config.items() if key != "layer_types"}
            assert layers(bare) == layers(config), name
            listed += 1
    assert listed >= 8


def test_kinds_are_read_in_all_the_ways_configs_say_them():
    """The layers of transformers' own defaults, where a config leaves everything out."""
    base = {"num_hidden_layers": 12, "hidden_size": 4096, "num_attention_heads": 32}

    def short(**fields):
        specs = layers({**base, **fields})
        return "".join(s.kind[0] for s in specs), specs

    assert short(model_type="gpt_oss")[0] == "sf" * 6
    assert short(model_type="gemma2")[0] == "sf" * 6 and short(model_type="gemma2")[1][0].dim == 256
    assert short(model_type="gemma3_text")[0] == "sssssf" * 2
    assert short(model_type="exaone4")[0] == short(model_type="olmo3")[0] == "sssf" * 3
    assert short(model_type="mistral")[0] == "s" * 12 and short(model_type="phi3")[0] == "f" * 12
    assert short(model_type="phi3", sliding_window=2047)[1][0].window == 2047
    assert short(model_type="llama4_text")[0] == "cccf" * 3
    assert short(model_type="llama4_text", no_rope_layers=[1, 0] * 6)[0] == "cf" * 6
    assert short(model_type="llama4_text", attention_chunk_size=None)[0] == "f" * 12
    text, specs = short(model_type="gemma4_text", num_kv_shared_layers=6, num_key_value_heads=4)
    assert text == "sssssf" + "s" * 6 and {s.kind for s in specs[6:]} == {"shared"}
    assert specs[11] == LayerSpec("shared", 4, 512) and specs[6].window == 512
    qwen3 = {"model_type": "qwen3", "num_attention_heads": 64, "num_key_value_heads": 8}
    assert short(**qwen3)[1][0].dim == 128  # not 4096 / 64
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    kinds = {"full_attn_layers": [4, 8, 12], "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11]}
    kimi = {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4, **kinds}
    assert short(model_type="kimi_linear", linear_attn_config=kimi, **latent)[0] == "kkkl" * 3
    mamba = {"mamba_num_heads": 8, "mamba_head_dim": 4, "n_groups": 2, "ssm_state_size": 16,
             "conv_kernel": 4, "chunk_size": 128, "num_key_value_heads": 8}  # fmt: skip
    text, specs = short(model_type="nemotron_h", hybrid_override_pattern="M-M*ME" * 2, **mamba)
    assert text == "mnmfmn" * 2 and specs[0].conv == (3, 8 * 4 + 2 * 2 * 16)
    assert (
        short(model_type="nemotron_h", layer_types=["linear_attention", "moe"] * 6, **mamba)[0]
        == "mn" * 6
    )


@pytest.mark.parametrize("fields, message", [
    ({"model_type": "mamba9"}, "model_type 'mamba9' is not one of"),
    ({"layer_types": ["linear_attention"] * 3 + ["hyena"]}, "layer_types of 64 layers: {'hyena'}"),
    ({"layer_types": ["full_attention"]}, "layer_types of 64 layers: 1"),
    ({"mamba_ssm_dtype": "float64"}, "state dtype 'float64'"),
    ({"linear_num_key_heads": 5}, "48 value heads cannot share 5 key heads"),
    ({"model_type": "gemma4_text", "num_kv_shared_layers": 64}, "leaves none of 64 layers"),
    ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is not known in qwen3_5_text"),
    ({"model_type": "llama", "kv_lora_rank": 512}, "kv_lora_rank is not known in llama"),
    ({"model_type": "llama", "cross_attention_layers": [3]}, "cross_attention_layers is not known"),
    ({"model_type": "deepseek_v3", "index_topk": 2048}, "index_topk is not known in deepseek_v3"),
    ({"model_type": "minimax_m2", "sparse_attention_config": {"sparse_topk_blocks": 16}},
     "sparse_attention_config is not known in minimax_m2: its layers keep something else"),
    ({"model_type": "qwen3", "compress_ratios": [4] * 64}, "compress_ratios is not known in qwen3"),
    ({"model_type": "llama", "layer_types": ["sliding_attention"] * 64, "sliding_window": 128},
     "layer_types of 64 layers: {'sliding_attention'}"),
    ({"model_type": "kimi_linear", "layer_types": ["linear_attention"] * 64}, "num_heads is None"),
    ({"model_type": "kimi_linear"}, "linear_attn_config does not name each of 64 layers"),
    ({"model_type": "nemotron_h"}, "layer_types of 64 layers: 0"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*X"}, "{'X'}"),
    ({"model_type": "glm_moe_dsa", "kv_lora_rank": 8, "qk_rope_head_dim": 4, "index_topk": 4,
      "index_head_dim": 4, "indexer_types": ["half"] * 64}, "indexer_types has 'half' for layer 0"),
], ids=str)  # fmt: skip
def test_what_no_formula_covers_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        layers({**NEXT, **fields})


def test_a_family_without_a_pattern_slides_in_all_layers_whatever_a_pattern_says():
    """And files that name sliding layers and switch them off are full, as their classes have it."""
    mistral = {**MODELS["Mistral-7B-v0.1"], "sliding_window_pattern": 2}
    assert {(s.kind, s.window) for s in layers(mistral)} == {("sliding", 4096)}
    off = {**MODELS["Qwen3-8B"], "layer_types": ["sliding_attention"] * 36}
    assert layers(off) == layers(MODELS["Qwen3-8B"])


def test_a_model_that_sees_has_its_text_s_fields_inside_or_beside_the_others():
    text = {**MODELS["Qwen2.5-7B"], "model_type": "qwen2_5_vl_text"}
    nested = {"model_type": "qwen2_5_vl", "vision_config": {}, "text_config": text}
    beside = {**text, "model_type": "qwen2_5_vl", "vision_config": {}}
    assert layers(nested) == layers(beside) == layers(MODELS["Qwen2.5-7B"])
    bare = {"num_hidden_layers": 36, "hidden_size": 2560, "num_attention_heads": 32}
    qwen3 = layers(
        {"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text", **bare}}
    )
    assert set(qwen3) == {LayerSpec("full", 32, 128)}  # not 2560 / 32


def test_a_multimodal_config_is_sized_by_its_text():
    nested = {"model_type": "qwen3_5", "hidden_size": 1, "text_config": NEXT}
    assert layers(nested) == layers(NEXT)
    for spoiled in (None, 3):
        with pytest.raises(ValueError, match=f"text_config is {spoiled}, not an object"):
            layers(nested | {"text_config": spoiled})


# ---------------------------------------------------------------- the command line


def run(capsys, *arguments):
    """What the command prints, and its exit code."""
    try:
        kv_cache._main([*arguments])
        code = 0
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


def test_json_says_what_is_printed(capsys):
    flags = ["--model", "qwen3.6-27b", "--kv-memory", "31.24GiB", "--max-model-len", "8192"]
    code, out, _ = run(capsys, *flags, "--vllm-version", "0.27", "--json")
    found = json.loads(out)
    _, text, _ = run(capsys, *flags, "--vllm-version", "0.27")
    assert code == 0 and found["num_blocks"] == 652 and found["block_size"] == 784
    assert f"{found['kv_tokens']:,}" == "314,187" and f"{found['max_concurrency']:.4f}" == "38.3529"
    assert found["bytes_per_token"] == 65_536 and found["state_bytes"] == 153_944_064
    assert found["read_bytes_per_token"] == 8192 * 65_536 + 2 * 153_944_064
    for part in ("bytes_per_token", "state_bytes", "stored_bytes", "read_bytes_per_token"):
        assert found[part] == sum(row[part] for row in found["kinds"])
    assert sum(row["layers"] for row in found["kinds"]) == 64
    assert "GPU KV cache size: 314,187 tokens\n" in text
    assert "Maximum concurrency for 8,192 tokens per request: 38.35x\n" in text
    assert "652 blocks of 49.0 MiB, of which a request takes 17" in text
    for row in (*found["kinds"], *found["by_context"]):
        for part in ("stored_bytes", "read_bytes_per_token"):
            assert kv_cache.human(row[part]) in text
    assert found["by_context"][-1]["stored_bytes"] == found["stored_bytes"]


def test_lines_of_the_first_engine_count_blocks(capsys):
    flags = ["--kv-memory", "3.81GiB", "--max-model-len", "20000"]
    _, out, _ = run(capsys, "--model", "Llama-3.1-8B", *flags, "--vllm-version", "0.6")
    assert "# GPU blocks: 1950\n" in out and "20,000 tokens per request: 1.56x" in out


@pytest.mark.parametrize("model, version, util, seqs, weights, measured, near", [
    ("Llama-3.1-8B", "0.19", 0.95, 1024, "14.99GiB", 58.11, 0.02),
    ("Qwen2.5-7B", "0.19", 0.95, 1024, "14.25GiB", 58.53, 0.05),
    ("Llama-3.1-8B", "0.11", 0.9, 1024, "14.99GiB", 51.38, 0.15),
    ("gpt-oss-120b", "0.10", 0.9, 1024, "65.97GiB", -2.14, 0.2),
    ("gpt-oss-120b", "0.11", 0.95, 1024, "65.97GiB", 1.71, 0.2),
    ("Mistral-Small-3.2-24B", "0.11", 0.95, 1024, "44.76GiB", 28.20, 3),  # images: less sampling
])  # fmt: skip
def test_a_budget_is_about_what_servers_measured(
    capsys, model, version, util, seqs, weights, measured, near
):
    flags = ["--gpu", "h100", "--util", str(util), "--weights", weights, "--vllm-version", version]
    _, out, _ = run(capsys, "--model", model, *flags, "--max-num-seqs", str(seqs), "--json")
    found = json.loads(out)
    assert abs(found["kv_memory_bytes"] / GIB - measured) <= near
    assert found["kv_memory_bytes"] == sum(x["bytes"] for x in found["budget"].values())


def test_what_is_left_becomes_tokens_requests_and_a_longest_one(capsys):
    flags = ["--model", "Qwen3.6-27B", "--kv-memory", "5.42GiB", "--kv-dtype", "fp8"]
    _, out, _ = run(capsys, *flags, "--max-model-len", "204800", "--json")
    found = json.loads(out)
    specs = layers(MODELS["Qwen3.6-27B"])
    longest = found["longest_context"]
    kept = [sum(stored_bytes(s, n, "fp8") for s in specs) for n in (longest, longest + 1)]
    assert kept[0] <= found["kv_memory_bytes"] < kept[1]
    for length, fits in (
        (found["longest_max_model_len"], True),
        (found["longest_max_model_len"] + 1, False),
    ):
        assert (plan(specs, found["kv_memory_bytes"], length, "fp8").concurrency >= 1) == fits
    _, text, _ = run(capsys, *flags, "--max-model-len", "204800")
    assert (
        "and refuses to start: 6.56 GiB needed, 5.42 GiB there; --max-model-len 167776 fits" in text
    )
    assert "note:" not in text
    _, text, _ = run(capsys, *flags, "--max-model-len", "300000")
    assert "note: 300,000 tokens are more than the model's 262,144 positions" in text
    _, text, _ = run(capsys, "--model", "Mistral-7B-v0.1", "--kv-memory", "1GiB")
    assert "or one of any length" in text


def test_every_flag_changes_the_answer(capsys):
    flags = ["--model", "Qwen3.6-27B", "--gpu", "h100"]
    _, plain, _ = run(capsys, *flags, "--json")
    changes = [
        ("--context", "5000"), ("--kv-dtype", "fp8"), ("--state-dtype", "bfloat16"), ("--tp", "2"),
        ("--util", "0.5"), ("--weights", "int4"), ("--max-num-seqs", "8"), ("--pp", "2"),
        ("--vllm-version", "0.13"), ("--max-model-len", "5000"), ("--num-spec", "2"),
        ("--max-num-batched-tokens", "64"), ("--block-size", "2048"), ("--no-prefix-cache",),
        ("--gpu", "a100"),
    ]  # fmt: skip
    for change in changes:
        code, out, _ = run(capsys, *flags, *change, "--json")
        assert code == 0 and out != plain, change
    latent = ["--model", "Kimi-K2", "--kv-memory", "9GiB", "--tp", "8", "--json"]
    assert run(capsys, *latent)[1] != run(capsys, *latent, "--dcp", "2")[1]
    window = ["--model", "Gemma-3-27b", "--kv-memory", "9GiB", "--json"]
    assert run(capsys, *window)[1] != run(capsys, *window, "--no-hybrid-manager")[1]


def test_a_draft_layer_has_a_cache_of_its_own(capsys):
    """The log of 255,975 tokens, from the command line: 17 layers keep tokens, not 16."""
    flags = ["--kv-memory", "17.25GiB", "--num-spec", "1", "--no-prefix-cache"]
    flags += ["--max-model-len", "131,072", "--vllm-version", "0.21", "--json"]
    found = json.loads(run(capsys, "--model", "Qwen3.6-27B", *flags)[1])
    assert (found["kv_tokens"], found["block_size"], found["num_blocks"]) == (255_975, 800, 332)
    assert max(group["layers"] for group in found["groups"]) == 17
    found = json.loads(run(capsys, "--model", "DeepSeek-V3", *flags)[1])
    assert [group["layers"] for group in found["groups"]] == [62]


def test_a_format_of_llama_cpp_gets_bytes_and_no_blocks(capsys):
    flags = ["--model", "Qwen3.6-27B", "--kv-memory", "5GiB", "--kv-dtype", "q4_0"]
    found = json.loads(run(capsys, *flags, "--json")[1])
    assert found["longest_context"] == (5 * GIB - 153_944_064) // 18_432
    assert found["num_blocks"] is None and found["kv_tokens"] is None
    text = run(capsys, *flags)[1]
    assert f"or one of {found['longest_context']:,} tokens" in text and "vLLM" not in text


def test_a_gpu_is_known_by_the_names_people_call_it(capsys):
    flags = ["--model", "Qwen3-0.6B", "--json", "--gpu"]
    for names in (("rtx3090", "3090", "RTX 3090", "rtx-3090"), ("h100", "H100-80GB"),
                  ("a100-40gb", "A100 40GB"), ("a100", "a100-80gb")):  # fmt: skip
        found = {run(capsys, *flags, name) for name in names}
        assert len(found) == 1 and found.pop()[0] == 0
    assert run(capsys, *flags, "A100")[1] != run(capsys, *flags, "A100-40GB")[1]
    lower = run(capsys, *flags, "l4", "--weights", "int4", "--kv-dtype", "fp8")
    assert lower[0] == 0 and lower == run(
        capsys, *flags, "l4", "--weights", "INT4", "--kv-dtype", "FP8"
    )


def test_a_length_that_does_not_fit_at_all_is_said_to(capsys):
    _, out, _ = run(capsys, "--model", "Qwen3-8B", "--kv-memory", "1MiB")
    assert "requests of 40,960 tokens, or one of 7 tokens" in out
    assert "and refuses to start: 5.62 GiB needed, 1.0 MiB there; no length fits" in out


def test_models_side_by_side_say_where_and_beyond_what(capsys):
    flags = ["--compare", "Qwen3-8B", "Gemma-3-27b", "--tp", "2", "--kv-dtype", "fp8"]
    _, out, _ = run(capsys, *flags)
    assert out.startswith("A request of 131,072 tokens on each of 2 GPUs, cache in fp8\n")
    assert out.endswith("\nnote: Qwen3-8B has 40,960 positions only\n")


def test_models_side_by_side(capsys):
    code, out, _ = run(
        capsys, "--compare", "Qwen3-32B", "Llama-4-Scout-17B-16E", "--context", "4096"
    )
    assert code == 0 and "64 full" in out and "36 chunked, 12 full" in out
    _, out, _ = run(capsys, "--model", "Qwen3-8B", "--compare", "Qwen3-32B", "--json")
    assert [m["model"] for m in json.loads(out)["models"]] == ["Qwen3-8B", "Qwen3-32B"]


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"DeepSeek-V4-Flash", "MiniMax-M3"}))
def test_no_line_is_wider_than_100(capsys, name):
    flags = [
        "--model",
        name,
        "--gpu",
        "b200",
        "--weights",
        "100GiB",
        "--context",
        "1000000000",
        "--num-spec",
        "3",
        "--no-prefix-cache",
    ]
    code, out, _ = run(capsys, *flags)
    assert code == 0 and max(map(len, out.splitlines())) <= 100
    assert len(out.splitlines()) <= 40


PUBLISHED = {  # billions of parameters on the model's card
    "SmolLM2-135M": 0.135, "Llama-3.1-8B": 8.03, "Llama-3.3-70B": 70.6, "Qwen3-8B": 8.19,
    "Qwen3-32B": 32.8, "Qwen3-30B-A3B": 30.5, "Qwen3-235B-A22B": 235, "Gemma-3-27b": 27,
    "Gemma-3-1b": 1.0, "Gemma-4-31B": 30.7, "gpt-oss-20b": 20.9, "gpt-oss-120b": 117,
    "DeepSeek-V3": 671, "Kimi-K2": 1026, "Phi-4": 14.7, "Mistral-7B-v0.1": 7.24,
    "Mistral-Small-3.2-24B": 23.6, "Nemotron-3-Nano-30B-A3B": 31.6, "Nemotron-H-56B": 56.3,
    "Qwen3.6-27B": 27.3, "Llama-4-Scout-17B-16E": 109, "GLM-5": 744, "MiniMax-M2.5": 229,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_are_counted_within_two_percent_of_the_card(name):
    assert parameters(MODELS[name]) / 1e9 == pytest.approx(PUBLISHED[name], rel=0.02)


REFUSED = {  # command line -> exit code and words of the refusal
    "--model nothing": (2, "--model nothing is no config.json, and not one of: DeepSeek-V3"),
    "--model nowhere.json": (1, "No such file"),
    "--model DeepSeek-V4-Flash": (1, "DeepSeek-V4-Flash: model_type 'deepseek_v4' is not sized"),
    "--util 0.5": (2, "--util needs --gpu"),
    "--weights int4 --kv-memory 1GiB": (2, "--weights needs --gpu"),
    "--vllm-version 0.28": (2, "--vllm-version needs --gpu or --kv-memory"),
    "--num-spec 2": (2, "--num-spec needs --gpu or --kv-memory"),
    "--gpu 24GiB --kv-memory 3GiB": (2, "give one of them"),
    "--gpu h1000": (2, "'h1000' is neither a size such as 24GiB nor one of\nt4"),
    "--gpu nan": (2, "'nan'"),
    "--gpu 24": (2, "'24' is neither a size such as 24GiB"),
    "--kv-memory 5": (2, "'5' is no size such as 24GiB"),
    "--model=": (1, "No such file"),
    "--model Kimi-K2 --kv-memory 5GiB --tp 8 --dcp 3": (1, "--dcp 3 does not divide --tp 8"),
    "--model Qwen3-8B --kv-memory 5GiB --tp 8 --dcp 2": (1, "less than 2 copies of 8 heads"),
    "--gpu -1GiB": (2, "--gpu: expected one argument"),
    "--gpu=-1GiB": (2, "'-1GiB' is neither a size"),
    "--kv-memory 0GiB": (2, "'0GiB'"),
    "--kv-memory 1e9GiB": (2, "'1e9GiB'"),
    "--gpu 24GiB --util nan": (2, "'nan' is not a share"),
    "--gpu 24GiB --util 1.5": (2, "'1.5' is not a share"),
    "--gpu 24GiB --weights 5bit": (2, "'5bit' is no size"),
    "--context 0": (2, "'0' is not a whole number"),
    "--context 1e9": (2, "'1e9' is not a whole number"),
    "--context 99999999999999999999999999": (2, "is not a whole number from 1 to 10^9"),
    "--kv-memory 1GiB --vllm-version 0.5": (2, "'0.5' is no version from 0.6 on"),
    "--kv-memory 1GiB --pp 31": (1, "--pp 31 is more than 30 layers"),
    "--kv-dtype int8": (2, "--kv-dtype int8 is not one of auto, bf16"),
    "--kv-dtype q8_0 --kv-memory 1GiB --pp 2": (2, "q8_0 is llama.cpp's, --pp is vLLM's"),
    "--kv-dtype fp8_ds_mla": (1, "'fp8_ds_mla' does not fit layers of the kind 'full'"),
    "--model Qwen3-8B --tp 3": (1, "--tp 3 does not divide 32 query heads"),
    "--model GLM-4.5 --gpu h100": (1, "give the weights' size"),
    "--compare Qwen3-8B --gpu 24GiB": (2, "--compare does not go with --gpu"),
    "--example 27b --tp 2": (2, "--example does not go with --tp"),
    "--model Qwen3.6-27B --kv-memory 9GiB --vllm-version 0.9": (1, "no page before vLLM 0.10"),
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_command_that_cannot_be_answered_says_why(capsys, line):
    code, out, err = run(capsys, *line.split())
    assert (code, out) == (REFUSED[line][0], "") and REFUSED[line][1] in err


@pytest.mark.parametrize("text, message", [
    ("{", "is not JSON"),
    ("[" * 10**5, "is not JSON"),
    ("[1]", "is not a JSON object"),
    ("{}", "no max_position_embeddings"),
    ('{"max_position_embeddings": 64}', "model_type None"),
    ('{"max_position_embeddings": NaN}', "max_position_embeddings is nan"),
    ('{"max_position_embeddings": 64, "num_hidden_layers": 1e9}', "layers is 1000000000.0"),
    ('{"max_position_embeddings": 64, "num_hidden_layers": 99999999}', "over 10,000"),
    ('{"max_position_embeddings": 64, "model_type": "llama", "num_hidden_layers": 1,'
     f' "hidden_size": 8, "num_attention_heads": 1, "head_dim": 1{"0" * 400}}}', "is too large"),
    ('{"max_position_embeddings": 64, "model_type": "llama", "num_hidden_layers": 1,'
     ' "hidden_size": 8, "num_attention_heads": 1, "layer_types": 3}', "malformed"),
    ('{"max_position_embeddings": 64, "model_type": "nemotron_h", "num_hidden_layers": 2,'
     ' "hybrid_override_pattern": "--"}', "no layer of this config keeps anything"),
], ids=lambda x: x[:60])  # fmt: skip
def test_a_config_that_makes_no_sense_is_refused_in_one_sentence(capsys, tmp_path, text, message):
    (tmp_path / "m.json").write_text(text)
    code, out, err = run(capsys, "--model", str(tmp_path / "m.json"))
    assert (code, out) == (1, "") and message in err and err.count("\n") == 1


def test_a_folder_and_a_file_are_models_too(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Gemma-3-27b"]))
    _, folder, _ = run(capsys, "--model", str(tmp_path))
    _, file, _ = run(capsys, "--model", str(tmp_path / "config.json"))
    _, name, _ = run(capsys, "--model", "GEMMA-3-27B")
    assert folder == file and folder.split(":")[1] == name.split(":")[1]
