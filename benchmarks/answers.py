"""From text to a model that answers: pre-trained here, tuned with `lora` on questions, and asked what it was not asked.

    python benchmarks/answers.py   # writes benchmarks/results/answers.md, in six minutes

A tokenizer and a model learn Python's standard library from its sources. Then adapters learn, in chats, the first line
of a function's documentation. Each function is asked about in six ways, of which the chats have five; the sixth is the
test. The merged model must give the same answers in `transformers`.
"""

from __future__ import annotations

import ast
import json
import os
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))  # before torch

import torch

from forge_train_tools import RunFolder, open_model, train
from forge_train_tools.offline.huggingface import export_checkpoint

RESULTS = Path(__file__).parent / "results" / "answers.md"
LIBRARY = Path(sysconfig.get_paths()["stdlib"])
MODULES = ("argparse", "bisect", "calendar", "copy", "fnmatch", "glob", "inspect", "ntpath", "os", "shutil", "textwrap")
WAYS = (
    "What does {} do?",
    "Tell me what {} does.",
    "Explain {} in a line.",
    "What is {} for?",
    "Describe {}.",
    "I want to know what {} does.",
)
SOURCES = "*.py"
"""Files of the library that the base reads."""
TOKENS, VOCABULARY, LONGEST = 256, 2048, 72
"""Of a row; of the tokenizer; and characters of an answer."""
DIM, LAYERS, STEPS = 192, 4, 400


def files() -> list[Path]:
    """Modules at the top of the standard library."""
    return sorted(LIBRARY.glob(SOURCES))


def read(sources: Iterable[Path]) -> Iterator[str]:
    for file in sources:
        yield file.read_text(encoding="utf-8", errors="replace")


def facts() -> dict[str, str]:
    """Function → the first line of its documentation, where no two functions have the same line."""
    found: dict[str, str] = {}
    for name in MODULES:
        tree = ast.parse((LIBRARY / f"{name}.py").read_text(encoding="utf-8"))
        for node in tree.body:
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            line = (text or "").partition("\n")[0].strip()
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and 15 < len(line) <= LONGEST:
                found.setdefault(f"{name}.{node.name}", line)
    lines = [*found.values()]
    return {function: line for function, line in found.items() if lines.count(line) == 1}


def questions(known: dict[str, str]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Questions and answers to learn, and to be tested with: each function is tested in another way."""
    learned, tested = [], []
    for at, (function, line) in enumerate(known.items()):
        for number, way in enumerate(WAYS):
            (tested if number == at % len(WAYS) else learned).append((way.format(function), line))
    return learned, tested


def tokenizer(folder: Path, sources: Iterable[Path]) -> Path:
    """Learn one of byte pairs from the sources, with the tokens that chats need."""
    import tokenizers

    found = tokenizers.ByteLevelBPETokenizer()
    found.train_from_iterator(
        read(sources), VOCABULARY, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False
    )
    folder.mkdir()
    found.save(str(folder / "tokenizer.json"))
    return folder


def text(folder: Path, sources: Iterable[Path]) -> Path:
    """The sources, as documents."""
    file = folder / "sources.jsonl"
    file.write_text("".join(json.dumps({"text": one}) + "\n" for one in read(sources)), encoding="utf-8")
    return file


def chats(file: Path, learned: list[tuple[str, str]]) -> Path:
    records = (
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in learned
    )
    file.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return file


def answers(path: Path, tested: list[tuple[str, str]], *, chat: bool) -> list[str]:
    """What a model says to each question, at temperature 0. A base knows no chats: it continues a line."""
    model = open_model(path)
    prompt = "{}" if chat else "# {}\n# "
    found = (model.generate(prompt.format(one), chat=chat, tokens=40, temperature=0, stop="\n") for one, _ in tested)
    return [one.strip() for one in found]


def theirs(path: Path, tested: list[tuple[str, str]]) -> list[str]:
    """The same, in `transformers`, by its own chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    found = []
    for question, _ in tested:
        messages = [{"role": "user", "content": question}]
        prompt = tokens.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            out = model.generate(**prompt, max_new_tokens=40, do_sample=False)
        found.append(tokens.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return found


def base(folder: Path) -> RunFolder:
    return train(
        "quickstart",
        {
            "text.path": str(text(folder, files())),
            "text.cache": str(folder / "cache"),
            "tokenizer.path": str(tokenizer(folder / "tokenizer", files())),
            "decoder": {"dim": DIM, "layers": LAYERS, "heads": 4},
            "train": {"steps": STEPS, "global_batch": 8, "sequence": TOKENS, "evaluate_every": 0},
        },
        name="base",
        run_dir=folder,
    )


def tuned(folder: Path, learned: list[tuple[str, str]]) -> RunFolder:
    file = chats(folder / "chats.jsonl", learned)
    return train(
        "finetune",
        {
            "train": {"steps": STEPS, "global_batch": 8, "sequence": TOKENS, "evaluate_every": 0},
            "sft": {"path": str(file), "cache": str(folder / "cache"), "template": "chatml", "held_out": 0},
            "lora": {"rank": 32, "alpha": 64},
            "adamw.lr": 2e-3,
        },
        plugins=["lora", "sft"],
        model_from=folder / "base",
        name="tuned",
        run_dir=folder,
    )


@dataclass(frozen=True)
class Asked:
    """What was asked, and what was said."""

    tested: list[tuple[str, str]]
    base: list[str]
    tuned: list[str]
    theirs: list[str]
    parameters: int
    seconds: float

    def share(self, said: list[str]) -> float:
        """Part of the answers that are the line, character by character."""
        return sum(one == line for one, (_, line) in zip(said, self.tested, strict=True)) / len(self.tested)


def measure(folder: Path) -> Asked:
    """Train both, and ask."""
    learned, tested = questions(facts())
    began = time.perf_counter()
    runs = base(folder), tuned(folder, learned)
    seconds = time.perf_counter() - began
    assert all(run.outcome == "done" for run in runs), [run.outcome for run in runs]
    first, second = (run.path for run in runs)
    size = export_checkpoint(second, folder / "exported").parameters
    said = answers(first, tested, chat=False), answers(second, tested, chat=True)
    return Asked(tested, *said, theirs(folder / "exported", tested), size, seconds)


def main() -> None:
    from run import Row, table

    with tempfile.TemporaryDirectory(prefix="forge-answers-") as name:
        asked = measure(Path(name))
    before, after = asked.share(asked.base), asked.share(asked.tuned)
    same = sum(one == other for one, other in zip(asked.tuned, asked.theirs, strict=True))
    count = len(asked.tested)
    rows = [
        Row("right answers of the base", f"{before:.3f}", "≤ 0.1", before <= 0.1),
        Row("right answers once tuned", f"{after:.3f}", "≥ 0.9", after >= 0.9),
        Row("equal answers in `transformers`", f"{same} of {count}", f"{count}", same == count),
    ]
    for row in rows:
        print(f"{'ok  ' if row.ok else 'MISS'} {row.what}: {row.measured} (bar {row.bar})", flush=True)
    note = (
        f"{asked.parameters / 1e6:.1f} M parameters. {STEPS} steps of 8 × {TOKENS} tokens on the sources of Python's "
        f"library, then {STEPS} with `lora` on {count * (len(WAYS) - 1)} chats: {asked.seconds / 60:.0f} minutes. Each "
        f"of {count} functions is asked about in words that no chat about it has. An answer is right if it is the line."
    )
    RESULTS.write_text(table(rows, "Questions to a model tuned here", "python benchmarks/answers.py", note), "utf-8")


if __name__ == "__main__":
    main()
