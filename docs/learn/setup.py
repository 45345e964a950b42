"""Cell `setup` of every guide: the model, and two helpers."""

import json
import shlex
import subprocess
from pathlib import Path

ROWS, SEQUENCE, DIM, LAYERS, VOCABULARY, FP32 = 4, 32, 32, 2, 320, 4

Path("learn.toml").write_text(f"""
plugins = ["synthetic"]
[run]
device = "cpu"
[train]
steps = 10
global_batch = {ROWS}
micro_batch = 2
sequence = {SEQUENCE}
[decoder]
vocabulary = {VOCABULARY}
dim = {DIM}
layers = {LAYERS}
heads = 4
""")


def forge(command):
    """Run a forge command, and return its findings."""
    done = subprocess.run(["forge", *shlex.split(command), "--json"], capture_output=True, text=True)
    return json.loads(done.stdout) if done.stdout else print(done.stderr)


def show(calls):
    """A line for each call of a rank, in order."""
    for call in calls:
        place = call["places"][0].rpartition("/")[2]
        what = f"{call['phase']:9} {call['kind']:14} {call['bytes']:7,} B"
        print(f"{what}  {call['axis']:8} {call['plugin']:8} {call['module'] or '–':27} {place}")


def judge(verdict):
    """What `forge verify` finds."""
    print("They agree." if verdict["agree"] else "They differ.")
    for check in verdict["checks"]:
        if not check["ok"]:
            print(f"  {check['name']}")
    print(*verdict["advice"], sep="\n")
