"""generate.py --prompts and --timeline: lines in, results out, in both formats, and the trace.

The engine and the rest of the command line have test_generate.py, whose tiny model this uses.
"""

import io
import json
import re
import signal
import threading

import pytest

import generate
from generate import Batch, read_job
from test_generate import GREEDY, answer, build, check_idle, cli, folder, greedy, own_cache

__all__ = ["cli", "folder", "own_cache"]  # fixtures

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def batch_line(url: str, custom_id="c", **body) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def hi(text="hi") -> list[dict]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def prompts(cli, tmp_path):
    """Run --prompts over some lines (text, or objects): exit code, results, standard error."""

    def call(*lines, flags=GREEDY):
        path = tmp_path / "prompts.jsonl"
        text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(text) + "\n", encoding="utf-8")
        code, out, err = cli("--prompts", str(path), *flags)
        return code, [json.loads(line) for line in out.splitlines()], err

    return call


def by_id(results: list[dict]) -> dict:
    return {line.get("custom_id", line.get("id")): line for line in results}


# ---------------------------------------------------------------- lines, by hand


def test_a_bare_line_is_a_user_message_and_with_raw_a_text():
    assert read_job("hi there", 3).prompt == hi("hi there")
    assert read_job("hi there", 3, raw=True).prompt == "hi there"
    assert read_job("hi", 3, system="be kind").prompt == [
        {"role": "system", "content": "be kind"}, *hi()
    ]  # fmt: skip
    assert read_job('"two\\nlines"', 1, raw=True).prompt == "two\nlines"
    assert read_job('"Hello," he said', 1, raw=True).prompt == '"Hello," he said'
    assert (read_job("hi", 7).id, read_job("hi", 7).kind) == (7, "own")


def test_our_own_object_has_a_prompt_or_messages_and_sampling_fields():
    job = read_job(
        '{"id": "a", "prompt": [1, 2], "max_tokens": 3, "priority": -1, "arrival_s": 2.5,'
        ' "logit_bias": {"5": 1.5}, "template": {"x": 1}}',
        1,
    )
    assert (job.error, job.id, job.prompt, job.arrival_s) == (None, "a", [1, 2], 2.5)
    assert job.fields == {"max_tokens": 3, "priority": -1, "logit_bias": {5: 1.5}}
    assert job.template == {"x": 1}
    assert read_job(json.dumps({"messages": hi()}), 1).prompt == hi()


def test_the_batch_format_is_translated():
    job = read_job(
        json.dumps(
            batch_line(
                CHAT, "x", model="any", messages=hi(), max_completion_tokens=4, stop=None,
                logprobs=True, top_logprobs=2, stream=False, user="me", tools=[{"a": 1}],
                chat_template_kwargs={"enable_thinking": False}, top_k=3,
                response_format={"type": "text"},
            )
        ),
        1,
    )  # fmt: skip
    assert (job.error, job.kind, job.id) == (None, "chat", "x")
    assert job.fields == {"max_tokens": 4, "logprobs": 2, "top_k": 3}
    assert job.template == {"enable_thinking": False, "tools": [{"a": 1}]}
    job = read_job(json.dumps(batch_line(TEXT, prompt="One", logprobs=1, echo=False)), 1)
    assert (job.error, job.kind, job.prompt, job.fields) == (
        None, "completion", "One", {"logprobs": 1}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ('{"id": NaN, "prompt": "x"}', "not JSON: NaN"),
        ('{"prompt": ' + "[" * 50_000 + "]" * 50_000 + "}", "nested too deeply"),
        (batch_line([], input="x"), "url "),
        (batch_line(CHAT, messages=hi(), tools=5), "tools 5"),
        ('{"prompt": "x", "bogus": 1, "worse": 2}', "unknown fields bogus, worse"),
        ('{"prompt": "x", "messages": []}', "one of prompt and messages"),
        ('{"max_tokens": 3}', "one of prompt and messages, not none"),
        ('{"prompt": 5}', "prompt '5'"),
        ('{"prompt": ["a", "b"]}', "a list of token ids"),
        ('{"prompt": [true]}', "a list of token ids"),
        ('{"messages": "hi"}', "messages 'hi'"),
        ('{"messages": ["hi"]}', "a list of messages"),
        ('{"prompt": "x", "arrival_s": -1}', "arrival_s -1"),
        ('{"prompt": "x", "arrival_s": "soon"}', "arrival_s 'soon'"),
        ('{"prompt": "x", "template": 3}', "template 3"),
        ('{"prompt": "x", "logit_bias": {"a": 1}}', "ids must be integers"),
        (batch_line("/v1/embeddings", input="x"), "url '/v1/embeddings'"),
        ({**batch_line(CHAT, messages=hi()), "method": "GET"}, "method 'GET'"),
        ({**batch_line(CHAT, messages=hi()), "more": 1}, "other fields .'more'."),
        ({"custom_id": "a", "method": "POST", "url": CHAT}, "and a body"),
        (batch_line(CHAT, prompt="x"), "one of prompt and messages"),
        (batch_line(CHAT, messages=hi(), stream=True), "stream"),
        (batch_line(TEXT, prompt="x", echo=True), "echo"),
        (batch_line(TEXT, prompt="x", suffix="y"), "unknown field suffix"),
        (batch_line(CHAT, messages=hi(), logprobs=3), "logprobs 3"),
        ('{"prompt": "x", "response_format": "json"}', "response_format 'json' is not an object"),
        ('{"prompt": "x", "response_format": {"type": "xml"}}', "'xml' is not text, json_object"),
        ('{"prompt": "x", "response_format": {"type": "json_schema"}}', "has no schema"),
        (
            batch_line(
                CHAT,
                messages=hi(),
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": None},
                },
            ),
            "has no schema",
        ),
        ('{"prompt": "x", "response_format": {"y": 1}}', "unknown y"),
        ('{"prompt": "x", "structured_outputs": {"structural_tag": 1}}', "unknown structural_tag"),
        ('{"prompt": "x", "structured_outputs": {"regex": "a", "json": {}}}', "schema and regex"),
        ('{"prompt": "x", "guided_json": {}, "json_schema": {}}', "json_schema and json_schema"),
    ],
)
def test_a_line_that_cannot_be_read_says_why(line, words):
    job = read_job(line if isinstance(line, str) else json.dumps(line), 1)
    assert job.error is not None and words.replace(".", "") in job.error.replace("[", "").replace(
        "]", ""
    ).replace(".", "")
    assert job.kind == ("own" if isinstance(line, str) else "chat") or job.kind == "completion"


def test_a_quoted_line_is_a_string_or_the_text_that_it_is():
    assert read_job('"To be" or "not to be"', 1, raw=True).prompt == '"To be" or "not to be"'
    assert read_job('"one \\u00e9"', 1, raw=True).prompt == "one é"


def test_null_means_not_said_and_false_means_no():
    job = read_job('{"prompt": "x", "stop": null, "max_tokens": null, "id": null}', 4)
    assert (job.error, job.fields) == (None, {})
    assert read_job(json.dumps(batch_line(CHAT, messages=hi(), logprobs=False)), 1).fields == {
        "logprobs": None
    }


def test_a_system_message_goes_before_messages_that_have_none():
    line = json.dumps({"messages": hi()})
    assert [m["role"] for m in read_job(line, 1, system="s").prompt] == ["system", "user"]
    line = json.dumps({"messages": [{"role": "system", "content": "own"}, *hi()]})
    assert [m["content"] for m in read_job(line, 1, system="s").prompt] == ["own", "hi"]


def test_a_line_that_is_refused_does_not_wait_for_its_time():
    assert read_job('{"prompt": "x", "arrival_s": 3, "bogus": 1}', 1).arrival_s == 0
    assert read_job('{"prompt": "x", "arrival_s": "soon"}', 1).arrival_s == 0


# ---------------------------------------------------------------- the command


def test_every_line_gets_its_result_and_the_answers_are_those_of_one_prompt(prompts):
    code, results, err = prompts("hi", "", {"prompt": "raw", "id": "r"}, {"messages": hi("ho")})
    lines = by_id(results)
    assert code == 0 and set(lines) == {1, "r", 4}
    assert lines[1]["text"] == answer("u:hi\na:") and lines["r"]["text"] == answer("raw")
    assert lines[4]["text"] == answer("u:ho\na:")
    assert set(lines[1]) == {"id", "text", "token_ids", "finish_reason", "stop_reason",
                             "logprobs", "usage", "timings"}  # fmt: skip
    for words in ("3 done, 0 failed", "36 output", "TTFT", "queue", "steps"):
        assert words in err


def test_results_come_in_openais_format_where_the_line_has_it(prompts):
    code, results, _ = prompts(
        batch_line(CHAT, "chat", model="m", messages=hi(), logprobs=True, top_logprobs=2),
        batch_line(TEXT, "text", prompt="raw", n=2, logprobs=1, max_tokens=3),
    )
    lines = by_id(results)
    assert code == 0 and all(line["error"] is None for line in results)
    assert all(line["response"]["status_code"] == 200 for line in results)
    body = lines["chat"]["response"]["body"]
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": answer("u:hi\na:")}
    assert (choice["finish_reason"], body["object"]) == ("length", "chat.completion")
    assert body["usage"] == {
        "prompt_tokens": 7, "completion_tokens": 12, "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    content = choice["logprobs"]["content"]
    assert len(content) == 12 and all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert bytes(sum((entry["bytes"] for entry in content), [])).decode(errors="replace") == answer(
        "u:hi\na:"
    )
    body = lines["text"]["response"]["body"]
    assert body["object"] == "text_completion" and [c["index"] for c in body["choices"]] == [0, 1]
    assert body["choices"][0]["text"] == answer("raw", 3)
    assert len(body["choices"][1]["logprobs"]["token_logprobs"]) == 3
    assert body["usage"]["completion_tokens"] == 6


def test_a_bad_line_is_reported_with_its_number_and_the_others_run(prompts):
    code, results, err = prompts(
        "good", '{"prompt": "x", "bogus": 3}', {"prompt": "y" * 300, "id": "long"},
        batch_line(CHAT, "b", messages=hi(), temperature=-1), "fine",
    )  # fmt: skip
    lines = by_id(results)
    assert code == 1 and len(results) == 5
    assert lines[1]["text"] == answer("u:good\na:") and lines[5]["text"] == answer("u:fine\na:")
    assert lines[2]["error"] == "unknown field bogus"
    assert "300 tokens" in lines["long"]["error"] and "255" in lines["long"]["error"]
    assert lines["b"]["response"]["status_code"] == 400
    assert "temperature -1" in lines["b"]["error"]["message"]
    assert lines["b"]["response"]["body"]["error"]["message"] == lines["b"]["error"]["message"]
    for words in ("line 2: unknown field bogus", "line 3: the prompt has 300", "line 4: temp"):
        assert words in err
    assert "2 done, 3 failed" in err and "Traceback" not in err


def test_flags_are_defaults_for_lines_that_do_not_say(prompts):
    flags = ("--temperature", "0", "--max-tokens", "2", "--ignore-eos", "--logit-bias", "65=1000")
    _, results, _ = prompts("a", {"prompt": "b", "max_tokens": 4, "id": "b"}, flags=flags)
    lines = by_id(results)
    assert (lines[1]["text"], lines["b"]["text"]) == ("AA", "AAAA")


def test_samples_of_a_line_stand_in_its_result(prompts):
    _, results, _ = prompts({"prompt": "x", "n": 3, "seed": 4, "temperature": 1, "id": "s"})
    assert len(results) == 1 and len(results[0]["samples"]) == 3
    expected = build(max_len=256).generate(
        "x", greedy(12, n=3, seed=4, temperature=1)
    )  # fmt: skip
    assert [s["token_ids"] for s in results[0]["samples"]] == [o.token_ids for o in expected]


def test_the_smaller_priority_is_first_and_arrivals_wait_for_their_time(prompts):
    flags = (*GREEDY, "--max-running", "1", "--policy", "priority")
    lines = [{"prompt": "p", "id": i, "priority": p} for i, p in enumerate((5, 3, 9, 1))]
    lines.append({"prompt": "p", "id": "late", "priority": 0, "arrival_s": 0.4})
    _, results, _ = prompts(*lines, flags=flags)
    assert [line["id"] for line in results] == [3, 1, 0, 2, "late"]
    _, results, _ = prompts(*lines[:4], flags=flags[:-2])
    assert [line["id"] for line in results] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        (
            {"response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "strict": True, "schema": {"type": "null"}},
            }},
            {"json_schema": {"type": "null"}},
        ),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, {"json_schema": '{"type": "null"}'}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"regex": "a", "json": None}}, {"regex": "a"}),
        ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
        ({"structured_outputs": {"grammar": "g"}}, {"grammar": "g"}),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            {"json_schema": {}, "json_whitespace": "compact"},
        ),
        ({"guided_json": {"a": 1}}, {"json_schema": {"a": 1}}),
        ({"guided_regex": "a"}, {"regex": "a"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": "g"}, {"grammar": "g"}),
        ({"regex": "a", "think_end": 3}, {"regex": "a", "think_end": 3}),
    ],
)  # fmt: skip
def test_a_grammar_has_the_names_of_openai_and_of_vllm(given, ours):
    for line in ({"prompt": "x"} | given, batch_line(CHAT, messages=hi(), **given)):
        job = read_job(json.dumps(line), 1)
        assert (job.error, job.fields) == (None, ours)


def test_a_line_with_a_grammar_of_its_own_has_no_use_for_that_of_the_flags(prompts):
    flags = (*GREEDY, "--regex", "[ab]{3}", "--think-end", "!")
    _, results, err = prompts(
        {"prompt": "x", "id": 1}, {"prompt": "x", "id": 2, "choice": ["yes", "no"]},
        {"prompt": "x", "id": 3, "regex": "a("}, {"prompt": "x", "id": 4, "think_end": None},
        {"prompt": "x", "id": 5, "logit_bias": {"33": 100}}, flags=flags,
    )  # fmt: skip
    lines = by_id(results)
    assert lines[1]["text"] == lines[4]["text"] and "masks" in lines[1]["usage"]
    assert "regex" in lines[3]["error"] and "line 3: " in err
    assert lines[5]["text"][0] == "!" and re.fullmatch("[ab]{3}", lines[5]["text"][1:])
    assert re.search(
        r"^grammars  of 4 answers: compiled in .* masks in .* tokens forced", err, re.M
    )
    _, results, _ = prompts(
        {"prompt": "x", "id": 1}, {"prompt": "x", "id": 2, "choice": ["yes", "no"]},
        {"prompt": "x", "id": 3, "think_end": 7}, flags=(*GREEDY, "--think-end", "!", "--no-jump"),
    )  # fmt: skip
    lines = by_id(results)
    assert "masks" in lines[2]["usage"] and "masks" not in lines[1]["usage"]
    assert "there is no grammar to begin after it" in lines[3]["error"]


def test_a_grammar_that_many_samples_follow_is_compiled_once_in_the_account_too(prompts):
    _, results, err = prompts(
        {"prompt": "x", "id": 1, "choice": ["yes", "no"], "n": 4}, {"prompt": "x", "regex": "a|b"}
    )
    samples = [*by_id(results)[1]["samples"], by_id(results)[2]]
    compile_s = sum(samples[i]["timings"]["compile_s"] for i in (0, 4))
    assert f"grammars  of 5 answers: compiled in {1e3 * compile_s:,.1f} ms, 5 masks" in err


@pytest.mark.parametrize("flag", ["--static", "--reserve", "--no-prefix-cache", "--block-size=8"])
def test_switches_change_no_answer(prompts, flag):
    _, results, _ = prompts("one", "two", "three", flags=(*GREEDY, flag, "--max-running", "2"))
    texts = {line["id"]: line["text"] for line in results}
    expected = {i: answer(f"u:{word}\na:") for i, word in enumerate(("one", "two", "three"), 1)}
    assert texts == expected


def test_what_was_found_in_the_cache_is_reported(prompts):
    history = "a long beginning that is the same for both of them, "
    flags = (*GREEDY, "--max-running", "1")
    _, results, err = prompts(history + "one", history + "two", flags=flags)
    usage = by_id(results)[2]["usage"]
    assert usage["cached_tokens"] == (len("u:" + history) // 16) * 16
    assert f"{usage['cached_tokens']} prompt tokens in the cache" in err


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (("--prompts", "nowhere.jsonl"), "nowhere.jsonl", 1),
        (("--prompts", "x", "--prompt", "y"), "--prompts goes without", 2),
        (("--prompts", "x", "--trace"), "--prompts goes without", 2),
        (("--prompts", "x", "--json"), "--prompts goes without", 2),
        (("--prompt", "x", "--timeline", "/nowhere/at/all.json"), "/nowhere/at/all.json", 1),
        (("--prompt", "x", "--policy", "lifo"), "lifo", 2),
    ],
)
def test_wrong_usage_is_one_sentence(cli, arguments, words, code):
    found, out, err = cli(*arguments)
    assert (found, out) == (code, "") and words in err and "Traceback" not in err


def test_prompts_come_from_standard_input_and_none_is_an_error(cli):
    code, out, _ = cli("--prompts", "-", *GREEDY, stdin="hi\n")
    assert code == 0 and json.loads(out)["text"] == answer("u:hi\na:")
    code, out, err = cli("--prompts", "-", *GREEDY, stdin="\n \n")
    assert (code, out) == (1, "") and "no line" in err


def test_a_byte_order_mark_is_no_text_and_a_broken_byte_is_its_lines_error(cli, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "raw"}\r\nbad \xff byte\nhi\n')
    code, out, err = cli("--prompts", str(path), *GREEDY)
    lines = by_id([json.loads(line) for line in out.splitlines()])
    assert code == 1 and lines[1]["text"] == answer("raw")
    assert "error" in lines[2] and lines[3]["text"] == answer("u:hi\na:") and "line 2" in err


def test_completion_logprobs_name_special_tokens_and_broken_bytes(prompts):
    flags = ("--temperature", "0", "--max-tokens", "4", "--logit-bias", "200=1000")
    line = batch_line(TEXT, prompt="x", logprobs=3)
    logprobs = prompts(line, flags=flags)[1][0]["response"]["body"]["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc8"] * 4
    assert logprobs["text_offset"] == [0, 0, 1, 2]  # a byte waits for what follows it
    assert all(len(top) == 3 for top in logprobs["top_logprobs"])
    flags = ("--temperature", "0", "--max-tokens", "4", "--logit-bias", "256=1000")
    logprobs = prompts(line, flags=flags)[1][0]["response"]["body"]["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["<end>"]


def test_ctrl_c_while_a_line_is_tokenised_stops_it(monkeypatch):
    engine = build()
    batch = Batch(engine, [read_job("x", 1, raw=True)], {"max_tokens": 40}, {})
    add, written = engine.add, []

    def interrupted(*arguments):
        batch.stop()
        return add(*arguments)

    monkeypatch.setattr(engine, "add", interrupted)
    batch.run(written.append, lambda batch: None)
    assert written == [] and "1 not begun" in batch.summary()
    check_idle(engine)


def test_ctrl_c_ends_what_runs_and_keeps_what_is_done(prompts, monkeypatch):
    steps = []

    class Stopping(Batch):
        def _finish(self, request, write):
            super()._finish(request, write)
            steps.append(request)
            if len(steps) == 1:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(generate, "Batch", Stopping)
    assert threading.current_thread() is threading.main_thread()
    lines = [{"prompt": "p", "id": i, "max_tokens": 2 + 20 * bool(i)} for i in range(3)]
    code, results, err = prompts(*lines, {"prompt": "late", "arrival_s": 60})
    assert code == 130 and "1 done, 0 failed, 2 stopped, 1 not begun" in err
    assert results[0]["finish_reason"] == "length"
    assert [line["finish_reason"] for line in results[1:]] == ["abort", "abort"]


def test_a_request_that_fails_while_running_is_its_own_lines_error(folder, capsys):
    engine = build(max_len=256)
    prepare = engine.cache.prepare

    def refuse(plan):
        if any(request.id == 1 and request.output for request, _ in plan):
            raise RuntimeError("no memory")
        return prepare(plan)

    engine.cache.prepare = refuse
    jobs = [read_job(f"prompt {i}", i, raw=True) for i in range(2)]
    jobs.append(read_job(json.dumps(batch_line(TEXT, "b", prompt="x")), 2))
    batch, written = Batch(engine, jobs, {"max_tokens": 4, "temperature": 0}, {}), []
    batch.run(written.append, lambda batch: None)
    lines = by_id(written)
    assert (batch.done, batch.failed) == (2, 1)
    assert lines[1] == {"id": 1, "error": "no memory"}
    assert len(lines[0]["token_ids"]) == 4 and lines["b"]["error"] is None
    assert "line 1: no memory" in capsys.readouterr().err
    check_idle(engine)


def test_the_bar_shows_what_runs_on_a_terminal_and_off_one(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, end in ((Terminal(), ""), (io.StringIO(), "\n")):
        monkeypatch.setattr("sys.stderr", stream)
        engine = build(max_running=2)
        jobs = [read_job(f"prompt {i}", i, raw=True) for i in range(4)]
        batch, say = (
            Batch(engine, jobs, {"max_tokens": 4, "temperature": 0}, {}),
            generate.Say(False),
        )

        def progress(batch, say=say):
            say.last -= 60  # a minute later
            say.batch(batch)

        batch.run(lambda line: None, progress)
        shown = stream.getvalue()
        for words in ("0/4", "2 run 2 wait", "blocks", "found", "out tok/s"):
            assert words in shown
        assert shown.endswith("found" + end) or not end


# ---------------------------------------------------------------- the timeline


def test_the_timeline_has_a_track_a_request_a_slice_a_step_and_counters(prompts, tmp_path):
    path = tmp_path / "out.json"
    flags = (*GREEDY, "--timeline", str(path), "--budget", "8", "--max-running", "2")
    prompts({"prompt": "a" * 20, "n": 2}, {"prompt": "b"}, flags=flags)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["request 0.0", "request 0.1", "request 1", "steps"]
    slices = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in slices)
    for track in names:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == track)
        assert all(a[1] <= b[0] + 0.01 for a, b in zip(own, own[1:])), "slices of a track overlap"
    track = {name: tid for tid, name in names.items()}["request 0.0"]
    stages = [e["name"] for e in slices if e["tid"] == track]
    assert stages == ["template", "tokenise", "queue"] + ["prefill"] * 3 + ["decode"] * 11
    assert [e["args"]["rows"] for e in slices if e["name"] == "prefill"][:3] == [8, 8, 4]
    steps = [e for e in slices if e["tid"] == 0]
    counters = [e for e in events if e["ph"] == "C"]
    assert len(counters) == 4 * len(steps)
    tokens = [e["args"] for e in counters if e["name"] == "tokens a step"]
    assert tokens[0] == {"prompt": 8, "decode": 0}
    assert {"held", "cached"} == set(counters[1]["args"])


def test_a_preemption_is_on_the_timeline(tmp_path):
    engine = build(kv_memory=5 * 16 * 256, max_len=64)
    with generate.Timeline(str(tmp_path / "out.json"), engine):
        outputs = engine.generate(["a" * 30, "b" * 30], greedy(30))
    assert engine.watch is None and outputs[1].usage["preemptions"] > 0
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    names = [event["name"] for event in events]
    assert names.count("preempted") == outputs[1].usage["preemptions"] and "again" in names


def test_one_prompt_has_a_timeline_too(cli, tmp_path):
    path = tmp_path / "out.json"
    assert cli("--prompt", "hi", *GREEDY, "--timeline", str(path))[0] == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["name"] == "decode" for event in events) == 11
