"""`forge generate`."""

from __future__ import annotations

import sys
import time
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forge_train.base.errors import ConfigError
from forge_train.base.strict_json import dumps
from forge_train_kit.format import format_plural
from forge_train_tools.messages import say, waiting

from . import screen
from .options import items_of, items_options, json_option, nproc_option, plugins_option, set_option, stdin_text
from .sampling import factors, sampling_options, values

if TYPE_CHECKING:
    from forge_train_tools.generation.completion import Completion
    from forge_train_tools.generation.generate import Generated, Generation

ENDED = {
    "tokens": "the requested number of tokens",
    "end": "the end of the document",
    "stop": "a stop string",
    "length": "the model's longest sequence",
}
JOB = {"out": None, "samples": 1, "field": "", "long": "refuse", "logprobs": False, "batch": 8}
"""Options of many prompts, and what they are if not given."""


@click.command(short_help="Continue texts with a trained model.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--prompt",
    multiple=True,
    metavar="TEXT",
    help="The text to continue; - reads it from stdin, unchanged; may be repeated.",
)
@items_options
@click.option(
    "--from-file", multiple=True, metavar="SOURCE", help="Files, folders or patterns of records with a prompt."
)
@click.option("--out", type=click.Path(path_type=Path), help="With --from-file: the file of JSON lines to write.")
@sampling_options(tokens=200)
@click.option("--samples", default=1, metavar="N", help="Answers to each prompt.")
@click.option("--logprobs", is_flag=True, help="Give the tokens, and their log-probabilities.")
@click.option("--chat", is_flag=True, help="A prompt is a user's message; put it into the model's chat template.")
@click.option("--field", default="", metavar="NAME", help="Field of the prompt; by default messages, or prompt.")
@click.option(
    "--long",
    type=click.Choice(["refuse", "left"]),
    default="refuse",
    help="Refuse prompts that leave no room for an answer, or cut them on their left.",
)
@click.option("--batch", default=8, metavar="N", help="Answers that are written side by side (8).")
@plugins_option
@set_option
@nproc_option()
@json_option
def generate(
    path: Path,
    prompt: tuple[str, ...],
    adapter: tuple[str, ...],
    chat: bool,
    template: str,
    plugins: tuple[str, ...],
    assignments: tuple[str, ...],
    nproc: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Continue texts with the model of PATH: a run (its newest whole checkpoint), a checkpoint, or a Hugging Face
    folder. Answers to a file are in its order; the same command continues where it was stopped, on any number of
    processes.

    \b
    forge generate runs/first --prompt "def "
    forge generate runs/first --prompt "import " --temperature 0 --stop $'\\n'
    forge generate Qwen3-0.6B --prompt "Once upon a time" --prompt "It was" --samples 4 --min-p 0.1
    forge generate Qwen3-0.6B --from-file questions.jsonl --out answers.jsonl
    forge generate runs/big --from-file questions.jsonl --out answers.jsonl --nproc 4 -p tp -s parallel.tp=2
    forge generate runs/first --prompt "import " --drafts 1
    forge generate runs/first --from-file modules.jsonl --out more.jsonl --lookup 8
    forge generate runs/tuned --chat --prompt "Who are you?"
    forge generate runs/seeing --image cat.png --prompt "A picture of "
    forge generate runs/watching --item video=clip.mp4
    forge generate Qwen3-0.6B --adapter polite --adapter brief=0.5 --prompt "Dear"
    """
    from forge_train_tools.generation.sampling import Sampling

    job = {name: options.pop(name) for name in JOB}
    files, items = options.pop("from_file"), items_of(options.pop("image"), options.pop("item"))
    sampling, adapters = Sampling(**options), factors(adapter)
    if prompt.count("-") > 1:
        raise ConfigError("--prompt -: stdin can be read once.")
    if job["logprobs"] and not (as_json or job["out"]):
        raise ConfigError("--logprobs: log-probabilities are printed with --json, or written with --out; add one.")
    texts = tuple(stdin_text("--prompt -") if one == "-" else one for one in prompt)
    if len(texts) > 1 or files or items or nproc not in (None, 1) or job != JOB:
        prompts = texts or (() if files else ("",))
        asked: dict[str, Any] = {"prompts": prompts, "items": items, "files": files, **job}
        _many({"path": path, "sampling": sampling, "chat": chat, "template": template, "adapters": adapters,
               "plugins": plugins, "set": assignments, **asked}, nproc or 1, as_json=as_json)  # fmt: skip
        return
    if template and not chat:
        raise ConfigError("--template: no prompt is a chat; add --chat, or leave it out.")
    with waiting(f"loading {path}"):
        from forge_train_tools import open_model
        from forge_train_tools.generation.defaults import tell_unused

        opened = open_model(path, plugins=plugins, set=values(assignments), adapters=adapters)
        tell_unused(opened.path, sampling)
        text = texts[0] if texts else ""
        completion = opened.complete(text, sampling, chat=chat, template=template)
    if not as_json:
        _show("" if chat else text, completion)
        return
    started = time.perf_counter()
    for _ in completion:
        pass
    result = _head(str(opened.path), opened.step, adapters) | {
        "prompt": text,
        "text": completion.text,
        "tokens": completion.tokens,
        "stopped": completion.stopped,
        "tokens_per_second": completion.tokens / (time.perf_counter() - started),
    }
    if completion.drafts:
        result["drafts"] = {"proposed": completion.drafts.proposed, "accepted": completion.drafts.accepted}
    click.echo(dumps(result))


def _head(checkpoint: str, step: int, adapters: dict[str, float]) -> dict[str, Any]:
    return {"checkpoint": checkpoint, "step": step} | ({"adapters": adapters} if adapters else {})


def _many(options: dict[str, Any], nproc: int, *, as_json: bool) -> None:
    """Several answers, or one on several processes."""
    from forge_train_tools.generation.generate import Generation
    from forge_train_tools.generation.generate import generate as run

    asked = Generation(**options)
    with waiting("generating"):
        found = run(asked, nproc=nproc, told=say)
    if as_json:
        click.echo(dumps(_as_json(found, asked)))
    elif asked.out:
        _summary(found)
    else:
        _print(found, asked)


def _as_json(found: Generated, asked: Generation) -> dict[str, Any]:
    head = _head(found.checkpoint, found.step, dict(asked.adapters))
    speed: dict[str, Any] = {"tokens_per_second": found.tokens / max(found.seconds, 1e-9)}
    speed |= {"drafts": found.drafts} if found.drafts else {}
    if asked.out:
        counts = {"answers": found.count, "tokens": found.tokens, "seconds": found.seconds, "cut": found.cut}
        return head | {"out": found.out, **counts} | speed
    items = {f"{name}s": files for name, files in asked.items.items()}
    answers = [{"prompt": asked.prompts[one.record], **items, **one.line(asked.samples)} for one in found.answers]
    if len(answers) > 1:
        return head | {"answers": answers} | speed
    del answers[0]["record"]
    return head | answers[0] | speed


def _print(found: Generated, asked: Generation) -> None:
    """Print each answer after its prompt, under its number if there are several."""
    terminal = sys.stdout.isatty()
    for answer in found.answers:
        if found.count > 1:
            sample = f", sample {answer.sample + 1}" if asked.samples > 1 else ""
            click.echo(click.style(f"[prompt {answer.record + 1}{sample}]", dim=terminal))
        prompt = "" if asked.chat else str(asked.prompts[answer.record])
        text = screen.visible(answer.text) if terminal else answer.text
        click.echo(f"{click.style(prompt, dim=True) if terminal else prompt}{text}")
    if found.cut:
        click.echo(_cut(found), err=True)
    if found.drafts and terminal:
        click.secho(f"({_drafts(found)})", dim=True, err=True)


def _summary(found: Generated) -> None:
    processes = f" on {found.world} processes" if found.world > 1 else ""
    screen.line(f"{found.checkpoint}, step {found.step}{processes}", "bold")
    screen.line(
        f"  {format_plural(found.count, 'answer')} in {found.out}; {found.tokens:,} tokens in {found.seconds:.1f} s, "
        f"{found.tokens / max(found.seconds, 1e-9):,.0f} tokens/s"
    )
    if found.drafts:
        screen.line(f"  {_drafts(found)}")
    if found.cut:
        screen.line(f"  {_cut(found)}", "yellow")


def _drafts(found: Generated) -> str:
    return "{accepted:,} of {proposed:,} drafts accepted".format(**found.drafts)


def _cut(found: Generated) -> str:
    prompts = "prompt was cut on its" if found.cut == 1 else "prompts were cut on their"
    return f"{found.cut:,} {prompts} left; `cut` says by how many tokens."


def _show(prompt: str, completion: Completion) -> None:
    """Print the text as it arrives. On a terminal, control characters are made visible: a model may write any."""
    terminal, pieces = sys.stdout.isatty(), iter(completion)
    first = next(pieces, "")  # mistakes of plugins in the model come with it: nothing stands before their message
    click.echo(click.style(prompt, dim=True) if terminal else prompt, nl=False)
    for piece in chain([first], pieces):
        click.echo(screen.visible(piece) if terminal else piece, nl=False)
        sys.stdout.flush()
    click.echo()
    if terminal:
        drafts = f"; {completion.drafts}" if completion.drafts.proposed else ""
        click.secho(f"({completion.tokens} tokens; {ENDED[completion.stopped]}{drafts})", dim=True, err=True)
