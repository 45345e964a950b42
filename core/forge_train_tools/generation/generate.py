"""`forge generate` for many prompts: answers in the order of the prompts, on one process or a layout of several."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from forge_train.base.errors import ConfigError
from forge_train.base.strict_json import dumps
from forge_train.compose.compose import compose
from forge_train.plugin.job import Job
from forge_train.store.manifest import hash_of
from forge_train_kit import hookspecs
from forge_train_kit.data.items import prompts_of

from ..configuration.request import Request
from ..inference.identity import values_of, weights_of
from ..inference.infer import Inference
from ..inference.output_file import FLAG
from ..launching.once import launch_once
from ..launching.world import here
from ..offline.adapted import add_adapters
from ..offline.opening import Opened, Source, run_folder
from ..offline.read_only import ReadOnlyRun
from ..process import prepared
from ..sources import continuing
from .answers import Answer, Answering
from .chats import ChatPrompts
from .completion import items_of
from .defaults import tell_unused
from .drafts import drafts_of
from .requests import KEY, PROMPT, Long, Requests
from .rows import check, longest
from .sampling import Sampling, SamplingOptions
from .writing import Answers, opened


class GenerationOptions(SamplingOptions, total=False):
    """Some fields of `Generation` and its rule, as keywords."""

    adapters: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Prompts to answer, as they were asked.

    Args:
        path: a run, a checkpoint or a Hugging Face folder.
        prompts: texts, or records with one.
        items: files by modality that each prompt has beside text, if prompts are texts.
        files: files, folders, patterns or addresses of such records, instead of prompts.
        out: the file of JSON lines to write, which does not exist; with files.
        sampling: how to choose tokens, where a record says nothing else.
        samples: answers to each prompt.
        chat: whether prompts are messages of a user, to be put into the model's chat template.
        template: another chat template: `chatml`, `llama3`, `plain` or a file.
        field: of records that holds the prompt; empty for `messages`, or else `prompt`.
        long: treatment of prompts that leave no room for an answer.
        logprobs: whether to give the tokens with their log-probabilities.
        batch: answers that are written side by side.
        adapters: folder of PEFT → factor.
        plugins: to enable too; so is `set`, values to override.

    Raises:
        ConfigError: a value is out of range, or does not go with another.
    """

    path: Path
    prompts: tuple[str | Mapping[str, Any], ...] = ()
    items: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    files: tuple[str, ...] = ()
    out: Path | None = None
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    samples: int = 1
    chat: bool = False
    template: str = ""
    field: str = ""
    long: Long = "refuse"
    logprobs: bool = False
    batch: int = 8
    adapters: Mapping[str, float] = dataclasses.field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    set: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for wrong, text in (
            (self.samples < 1, f"--samples: expected at least 1, found {self.samples}."),
            (self.batch < 1, f"--batch: expected at least 1, found {self.batch}."),
            (not self.prompts and not self.files, f"There is no prompt; give some, or a file of them ({KEY})."),
            (self.prompts and self.files, f"{KEY}: there are prompts beside the file; leave one of them out."),
            (
                self.items and not all(isinstance(one, str) for one in self.prompts or (None,)),
                "--image and --item go with --prompt; records have items of their own.",
            ),
            (self.files and self.out is None, f"{KEY} needs --out, the file to write."),
            (
                self.out is not None and not self.files,
                f"--out goes with {KEY}; leave it out, or give a file of prompts.",
            ),
            (
                self.out is not None and self.out.suffix.lower() not in ("", ".jsonl"),
                f"--out: {self.out}: answers are lines of JSON; expected a name that ends with .jsonl.",
            ),
        ):
            if wrong:
                raise ConfigError(text)

    def source(self, world: int) -> Source:
        """The weights, and the configuration for a number of processes.

        Raises:
            ConfigError: for a path or a layout that can't be.
        """
        same = Inference(
            path=self.path, data=self.files, out=self.out or Path(), batch=1, plugins=self.plugins, set=self.set
        )
        return same.source(world)


@dataclass(frozen=True)
class Generated:
    """Results of generation."""

    checkpoint: str
    step: int
    world: int
    out: str
    """The file that was written; empty without."""
    count: int
    """Number of answers, those in the file that another command wrote among them."""
    answers: tuple[Answer, ...] = ()
    """In the order of the prompts; none if they are in a file."""
    tokens: int = 0
    """Tokens that this call generated."""
    seconds: float = 0.0
    cut: int = 0
    """Answers to prompts that were cut, of those that this call wrote."""
    drafts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Numbers of tokens that were guessed (`proposed`) and chosen too (`accepted`); empty without drafts and lookup."""


def generate(asked: Generation, *, nproc: int = 1, told: Callable[[str], None] = lambda text: None) -> Generated:
    """Answer all prompts, in their order. A call that was killed while it wrote a file continues there, on any layout.

    Args:
        asked: the prompts.
        nproc: local processes to use, including this one.
        told: is given a line about how far it is; only with one process.

    Raises:
        ConfigError: for a path, a prompt, an option or a file that can't be, before anything is computed.
        ForgeError: with the message of the rank that failed first.
    """
    if nproc == 1:
        return _generate(asked, told)
    path = asked.source(nproc).path  # so that a mistake is reported only once, as is what follows
    tell_unused(path, asked.sampling)
    for folder in asked.adapters:
        continuing(Request(), folder, path)
    arguments = dataclasses.asdict(asked) | {"path": str(asked.path), "out": asked.out and str(asked.out)}
    found = launch_once(f"{__name__}:worker", {"asked": arguments}, nproc)["generated"]
    return Generated(**found | {"answers": tuple(_read(one) for one in found["answers"])})


def worker(asked: dict[str, Any]) -> dict[str, Any]:
    """The work of each process."""
    sampling = Sampling(**asked["sampling"] | {"stop": tuple(asked["sampling"]["stop"])})
    tuples = {name: tuple(asked[name]) for name in ("prompts", "files", "plugins", "set")}
    paths = {"path": Path(asked["path"]), "out": asked["out"] and Path(asked["out"])}
    return {
        "code": 0,
        "generated": dataclasses.asdict(_generate(Generation(**asked | tuples | paths | {"sampling": sampling}))),
    }


def _read(answer: dict[str, Any]) -> Answer:
    lists = ("ids", "log_probabilities", "model_log_probabilities")
    return Answer(**answer | {name: None if answer[name] is None else tuple(answer[name]) for name in lists})


def _generate(asked: Generation, told: Callable[[str], None] = lambda text: None) -> Generated:
    """Do it on this process alone, or on one of those that a launcher started."""
    world = here().size
    source = asked.source(world)
    with prepared(source.setup, ReadOnlyRun(run_folder(source.path))) as job:
        model = compose(job, extra=False).model
        check(job, model)
        items_of(job, asked.items)
        drafts = drafts_of(job, model, asked.sampling)
        trained = Opened(job, model, source.path, source.step, source.tokens, tuple(map(Path, asked.adapters)))
        requests, chats = _requests(asked, trained)
        prompts, chat = job.dist.on_main(requests.check)
        if asked.template and not chat:
            raise ConfigError("--template: no prompt is a chat; add --chat, or leave it out.")
        total = prompts * asked.samples
        made_of = _made_of(asked, source, job, requests, chats().digest if chat else "") if asked.out else {}
        if world == 1:
            tell_unused(source.path, asked.sampling)
        with opened(asked.out, made_of, job, told) as (out, done):
            source.load(model, job)
            add_adapters(trained, asked.adapters, asked.plugins)
            answering = Answering(
                job=job,
                model=model,
                requests=requests,
                samples=asked.samples,
                slots=asked.batch,
                longest=requests.longest,
                ends=tuple(chats().ends) if chat else (),
                scored=asked.logprobs,
                drafts=drafts,
            )
            answers = Answers(out, asked.samples, total, told, keep=asked.out is None)
            for answer in answering.answers(done, total):
                answers.add(answer)
            job.dist.on_main(answers.finish)
        to = str(asked.out) if asked.out else ""
        return Generated(
            str(source.path),
            source.step,
            world,
            to,
            total,
            tuple(answers.kept),
            answers.tokens,
            answers.seconds,
            answers.cut,
            {"proposed": drafts.proposed, "accepted": drafts.accepted} if drafts else {},
        )


def _requests(asked: Generation, opened: Opened) -> tuple[Requests, Callable[[], ChatPrompts]]:
    chats = cache(partial(ChatPrompts, opened.job, opened.path, opened.adapters, asked.template))
    found = Requests(
        given=[_with_items(asked, one) if isinstance(one, str) else one for one in asked.prompts],
        files=asked.files,
        field=asked.field,
        chat=asked.chat,
        long=asked.long,
        sampling=asked.sampling,
        longest=longest(opened.model),
        tokenizer=hookspecs.tokenizer(opened.job),
        chats=chats,
        items=prompts_of(opened.job),
    )
    return found, chats


def _with_items(asked: Generation, text: str) -> str | dict[str, Any]:
    items = {f"{name}s": files for name, files in asked.items.items()}
    return {asked.field or PROMPT: text, **items} if items else text


def _made_of(asked: Generation, source: Source, job: Job, requests: Requests, template: str) -> dict[str, str]:
    """All that decides the content of the file, by name."""
    sampling = {name: value for name, value in vars(asked.sampling).items() if name not in ("drafts", "lookup", "stop")}
    flags = {name: FLAG * getattr(asked, name) for name in ("chat", "logprobs")}
    own = {name: getattr(asked, name) for name in ("samples", "field", "long")}
    stop = dumps(asked.sampling.stop) if asked.sampling.stop else ""
    options = {**sampling, "stop": stop, **own, **flags}
    return {
        "model": weights_of(source, job.dist),
        "configuration of the model": values_of(job),
        "choice of --adapter": repr([(_weights(Path(one)), factor) for one, factor in asked.adapters.items()]),
        "tokenizer": hookspecs.tokenizer(job).digest,
        "chat template": template,
        f"content of {KEY}": job.dist.on_main(lambda: requests.digest),
        **{f"--{name.replace('_', '-')}": str(value) for name, value in options.items()},
        "train.precision": job.config.train.precision,
    }


def _weights(adapter: Path) -> str:
    found = hashlib.sha256()
    for file in sorted(adapter.glob("*.safetensors")):
        with file.open("rb") as data:
            found.update(hash_of(data).encode())
    return found.hexdigest()
