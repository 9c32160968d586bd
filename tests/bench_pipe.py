"""The worker's side of the pipe of bench.py: a line of JSON in, a line out.

The standard library alone, since it also runs in environments that have nothing of ours.

    {"prompt": ids, "tokens": n}          one request, greedily -> {"stamps": [...], "ids": [...]}
    {"prompts": [...], "outputs": [...]}  all at once, at temperature 0.6 -> {"seconds": ...}

Stamps are seconds from the request's arrival to each of its tokens.
"""

import json
import os
import sys
import time


def own_output():
    """The pipe, ours alone: what anyone else prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return out


def since_start() -> float:
    """Seconds since this process was started (Linux)."""
    with open("/proc/self/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def answer(out, run, **facts):
    """Say that we are ready, then answer work with what run makes of it, and the cores it kept
    busy: with threads that wait in a loop, as many as there were threads."""
    print(json.dumps({"ready_s": since_start(), **facts}), file=out)
    for line in sys.stdin:
        wall, busy = time.perf_counter(), time.process_time()
        result = run(json.loads(line))
        busy, wall = time.process_time() - busy, time.perf_counter() - wall
        print(json.dumps(result | {"cores": busy / wall}), file=out)
