"""The Python API of `forge generate` for many prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from .messages import shown
from .process import alone, unchanged
from .run_folder import RunFolder
from .sources import as_assignments

if TYPE_CHECKING:
    from .generation.generate import Generated, GenerationOptions


def generate(
    path: str | Path | RunFolder,
    prompts: str | Iterable[str | Mapping[str, Any]],
    *,
    samples: int = 1,
    chat: bool = False,
    template: str = "",
    logprobs: bool = False,
    long: Literal["refuse", "left"] = "refuse",
    plugins: Iterable[str] = (),
    set: Mapping[str, Any] | None = None,
    nproc: int = 1,
    **options: Unpack[GenerationOptions],
) -> Generated:
    """Continue texts with a trained model; `open_model` streams a single one.

    Args:
        path: a run, a checkpoint, or a Hugging Face folder.
        prompts: texts, or records as `forge generate --from-file` reads them: `{"messages": [...]}`.
        samples: answers to each.
        chat: whether texts are messages of a user, to be put into the model's chat template.
        template: another chat template than the model's: `chatml`, `llama3`, `plain` or a file.
        logprobs: whether answers have their tokens and log-probabilities.
        long: treatment of prompts that leave no room for an answer: refused, or cut on their left.
        plugins: plugins to enable too.
        set: values to override, as in `train`.
        nproc: local processes to use, including this one.
        options: as in `forge generate`: `tokens` (200), `temperature` (0.8), `top_k`, `top_p`, `min_p`,
            `repetition_penalty`, `seed`, `stop`, `drafts` and `lookup`; and `adapters`, folder of PEFT → factor: what
            each adds to the weights, times the factor, is added.

    Returns:
        The answers, in the order of the prompts: `found.answers[0].text`.

    Raises:
        ConfigError: for a path, a prompt or an option that can't be, before anything is computed.
    """
    with alone(), shown(progress=False), unchanged():
        from .generation.generate import Generation
        from .generation.generate import generate as run
        from .generation.sampling import sampling_of

        adapters = options.pop("adapters", {})
        asked = Generation(
            path=path.path if isinstance(path, RunFolder) else Path(path),
            prompts=tuple([prompts] if isinstance(prompts, str) else prompts),
            sampling=sampling_of(options),
            samples=samples,
            chat=chat,
            template=template,
            logprobs=logprobs,
            long=long,
            adapters=adapters,
            plugins=tuple(plugins),
            set=tuple(as_assignments(set or {})),
        )
        return run(asked, nproc=nproc)
