"""`forge generate`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forge_train.base.errors import ConfigError
from forge_train.base.strict_json import dumps

from . import screen
from .options import json_option, plugins_option, set_option
from .sampling import factors, sampling_options, values

if TYPE_CHECKING:
    from forge_train_tools.generation.completion import Completion

ENDED = {
    "tokens": "the requested number of tokens",
    "end": "the end of the document",
    "stop": "a stop string",
    "length": "the model's longest sequence",
}


@click.command(short_help="Continue a text with a trained model.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--prompt", default="", metavar="TEXT", help="The text to continue; - reads it from stdin, unchanged.")
@sampling_options
@click.option(
    "--drafts",
    default=0,
    metavar="N",
    help="Let the model's own modules draft N tokens at once; needs --temperature 0.",
)
@click.option("--chat", is_flag=True, help="The prompt is a user's message; put it into the model's chat template.")
@plugins_option
@set_option
@json_option
def generate(
    path: Path,
    prompt: str,
    chat: bool,
    adapter: tuple[str, ...],
    plugins: tuple[str, ...],
    assignments: tuple[str, ...],
    as_json: bool,
    **choices: Any,
) -> None:
    """Continue a text with the model of PATH: a run (its newest whole checkpoint), a checkpoint, or a Hugging Face
    folder.

    \b
    forge generate runs/first --prompt "def "
    forge generate runs/first --prompt "import " --temperature 0 --stop $'\\n'
    forge generate Qwen3-0.6B --prompt "Once upon a time"
    forge generate gpt-oss-20b -p flex --prompt "Once upon a time"
    forge generate runs/first --prompt "import " --temperature 0 --drafts 1
    forge generate runs/tuned --chat --prompt "Who are you?"
    forge generate Qwen3-0.6B --adapter polite --adapter brief=0.5 --prompt "Dear"
    """
    from forge_train_tools import open_model
    from forge_train_tools.generation.sampling import Sampling

    sampling = Sampling(**choices)
    prompt = _stdin() if prompt == "-" else prompt
    adapters = factors(adapter)
    opened = open_model(path, plugins=plugins, set=values(assignments), adapters=adapters)
    completion = opened.complete(prompt, sampling, chat=chat)
    started = time.perf_counter()
    if not as_json:
        _show("" if chat else prompt, completion)
    else:
        for _ in completion:
            pass
        seconds = time.perf_counter() - started
        result: dict[str, Any] = {
            "checkpoint": str(opened.path),
            "step": opened.step,
            "prompt": prompt,
            "text": completion.text,
            "tokens": completion.tokens,
            "stopped": completion.stopped,
            "tokens_per_second": completion.tokens / seconds,
        }
        if adapter:
            result["adapters"] = adapters
        if sampling.drafts:
            result["drafts"] = {"proposed": completion.drafts.proposed, "accepted": completion.drafts.accepted}
        click.echo(dumps(result))


def _stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompt -: stdin is not UTF-8 (byte {error.start}).") from error


def _show(prompt: str, completion: Completion) -> None:
    """Print the text as it arrives. On a terminal, control characters are made visible: a model may write any."""
    terminal = sys.stdout.isatty()
    click.echo(click.style(prompt, dim=True) if terminal else prompt, nl=False)
    for piece in completion:
        click.echo(screen.visible(piece) if terminal else piece, nl=False)
        sys.stdout.flush()
    click.echo()
    if terminal:
        drafts = f"; {completion.drafts}" if completion.drafts.proposed else ""
        click.secho(f"({completion.tokens} tokens; {ENDED[completion.stopped]}{drafts})", dim=True, err=True)
