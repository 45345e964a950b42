"""What an exchange with Hugging Face layout costs beside safetensors alone, and generation beside transformers.

    python benchmarks/huggingface.py           # prints the rows
    python benchmarks/run.py huggingface       # writes benchmarks/results/huggingface.md

A random Llama is written in files. Each way of moving it is measured in fresh processes, in turns, by CPU seconds of
all threads, of which the least counts: other work on the machine adds time and never takes any away. Every process
imports its libraries, and moves a tiny model, before the clock starts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WIDTH, LAYERS, VOCABULARY, SHARD = 1536, 12, 32_000, 5 * 10**9
"""1.75 GB in fp32."""
TINY = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 300}
SPOKEN = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "vocab_size": 2000}
"""The model that generates."""
REPEATS, TOKENS = 8, 200


def write_model(folder: Path, **shape: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    LlamaForCausalLM(LlamaConfig(**shape, **heads, **ends)).save_pretrained(folder, max_shard_size=SHARD)


# -- each in a process of its own -------------------------------------------------------------------------------------


def plain(source: Path, target: Path) -> None:
    """Read every file and write it again, with safetensors alone."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    for file in sorted(source.glob("*.safetensors")):
        save_file(load_file(file), target / file.name, metadata={"format": "pt"})


def flushed(source: Path, target: Path) -> None:
    """The same, flushed to the disk, as Forge does before it gives a folder its name."""
    plain(source, target)
    for file in target.iterdir():
        with file.open("rb") as written:
            os.fsync(written.fileno())


def convert(source: Path, target: Path) -> None:
    from forge_train_tools.offline.convert import convert_folder

    convert_folder(source, target)


def bring_in(source: Path, target: Path) -> None:
    from forge_train_tools.offline.hf_import import import_checkpoint

    import_checkpoint(source, target)


def take_out(source: Path, target: Path) -> None:
    from forge_train_tools.offline.huggingface import export_checkpoint

    export_checkpoint(source, target)


def hashed(source: Path, target: Path) -> None:
    """One hash of every file, as a checkpoint's manifest has it."""
    from forge_train.store.manifest import hash_of

    for file in source.glob("*.safetensors"):
        with file.open("rb") as data:
            hash_of(data)


WAYS = {one.__name__: one for one in (plain, flushed, convert, bring_in, take_out, hashed)}


def move(way: str, tiny: Path, source: Path, target: Path) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    WAYS[way](tiny, target)
    shutil.rmtree(target, ignore_errors=True)
    wall, cpu = time.perf_counter(), time.process_time()
    WAYS[way](source, target)
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def speak(model: Path) -> dict[str, float]:
    """CPU milliseconds of a greedy token, by Forge and by transformers, in turns."""
    import torch
    from transformers import AutoModelForCausalLM

    from forge_train_tools.generation.completion import Completion
    from forge_train_tools.generation.sampling import Sampling
    from forge_train_tools.offline.opening import open_model

    torch.set_num_threads(1)
    opened, prompt = open_model(model), "a prompt of a few words"
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    ids = torch.tensor([list(prompt.encode())])

    def forge(count: int) -> list[int]:
        completion = Completion(opened.job, opened.model, prompt, Sampling(tokens=count, temperature=0))
        for _ in completion:
            pass
        return [*completion.ids]

    def transformers(count: int) -> list[int]:
        with torch.no_grad():
            made = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        return made[0, ids.shape[1] :].tolist()

    # Forge chooses among the tokenizer's ids only, so texts agree up to the first id beyond them.
    least = {"forge": float("inf"), "transformers": float("inf")}
    for count in (5, *[TOKENS] * 5):
        for name, generate in (("forge", forge), ("transformers", transformers)):
            before = time.process_time()
            made = len(generate(count))
            if count == TOKENS:
                least[name] = min(least[name], (time.process_time() - before) / made * 1000)
    return least


# -- all of them ------------------------------------------------------------------------------------------------------


def alone(*arguments: str) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def parts(folder: Path) -> dict[str, Any]:
    """Measure everything below a folder."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        here = Path(name)
        write_model(here / "tiny", **TINY)
        write_model(here / "spoken", **SPOKEN)
        big = {"hidden_size": WIDTH, "intermediate_size": 4096, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
        write_model(here / "big", **big)
        size = sum(file.stat().st_size for file in (here / "big").glob("*.safetensors"))
        bring_in(here / "tiny", here / "tiny-checkpoint")
        bring_in(here / "big", here / "big-checkpoint")
        seconds: dict[str, dict[str, float]] = {}
        for _ in range(REPEATS):
            for way in WAYS:
                kind = "-checkpoint" if way == "take_out" else ""
                where = [str(here / f"{model}{kind}") for model in ("tiny", "big")]
                found = alone(way, *where, str(here / "out"))
                shutil.rmtree(here / "out", ignore_errors=True)
                best = seconds.setdefault(way, found)
                seconds[way] = {key: min(best[key], found[key]) for key in found}
        return {"size": size, "seconds": seconds, "speak": alone("speak", str(here / "spoken"))}


def bars(found: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    cpu = {way: one["cpu"] for way, one in found["seconds"].items()}
    size = f"{found['size'] / 1e9:.2f} GB"
    through = cpu["bring_in"] + cpu["take_out"]
    rows = [
        (f"`forge checkpoint convert`, {size}: CPU s of safetensors alone / ours", cpu["plain"], cpu["convert"]),
        ("the same, if safetensors alone flushes its files too", cpu["flushed"], cpu["convert"]),
        ("`import` and then `export`: CPU s of safetensors alone, twice / ours", 2 * cpu["plain"], through),
    ]
    ratios = [(f"{what} ({a:.2f} / {b:.2f})", f"{a / b:.2f}", "≥ 0.8", a / b >= 0.8) for what, a, b in rows]
    spoken = found["speak"]["transformers"] / found["speak"]["forge"]
    what = "greedy tokens per CPU second, `forge generate` / `generate` of transformers with its cache"
    return [*ratios, (what, f"{spoken:.2f}", "≥ 1.0", spoken >= 1)]


def note(found: dict[str, Any]) -> str:
    hashes, size = found["seconds"]["hashed"]["cpu"], found["size"] / 1e9
    text = f"Reading and hashing the {size:.2f} GB once takes {hashes:.2f} CPU seconds. An import hashes a checkpoint"
    text += " twice (as it is\nwritten, and as it is read back), and an export once (before it is trusted)."
    return f"{text}\nA conversion and `--from` make no checkpoint."


def main() -> None:
    if not sys.argv[1:]:
        for row in bars(parts(Path(tempfile.gettempdir()))):
            print(*row, sep="  |  ")
    elif sys.argv[1] == "speak":
        print(json.dumps(speak(Path(sys.argv[2]))))
    else:
        print(json.dumps(move(sys.argv[1], *map(Path, sys.argv[2:5]))))


if __name__ == "__main__":
    main()
