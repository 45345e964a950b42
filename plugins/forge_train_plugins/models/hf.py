"""Models of the library `transformers`."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from forge_train import ConfigError, FilePath, Plugin, Problem, hookimpl, section
from forge_train_kit import hookspecs
from forge_train_kit.hf import HFModel

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from forge_train import Job


class HF(Plugin):
    """Any causal language model of `transformers`, built from its configuration by the library's own class.

    The class's own declarations decide which layouts work: `_no_split_modules` names the units, `base_model_tp_plan` is
    the plan for tensor parallelism, `base_model_pp_plan` names the stages of a pipeline, and `base_model_ep_plan` the
    experts that `ep` spreads over ranks. If a class uses the library's attention interface, the run's attention kernel
    computes its attention: it keeps documents apart and works with `cp`. Other classes compute attention themselves.
    Classes that read images too are given text alone, unless `hf_images` is enabled.
    The heads of `classify`, `token_classify`, `embed` and `reward` take the place of the class's own.
    """

    api = (1, 0)
    facts = {"plan.per_unit": True, "hf.architectures": ("*",)}
    needs: ClassVar[Mapping[str, str]] = {"transformers": "pip install 'forge-train[hf]'"}

    @section
    class Config:
        config: Annotated[str, FilePath()] = ""
        """A folder in Hugging Face layout, or its `config.json`; empty means the folder in `weights`."""
        type: str = ""
        """Instead of `config`: a model type of transformers, such as `falcon`, with its class's defaults."""
        set: Mapping[str, Any] = field(default_factory=dict)
        """Keys of `config.json` to change, such as `{ hidden_size = 64 }`. A model made from `type` has the tokenizer's
        vocabulary unless `vocab_size` is set."""
        extra: Mapping[str, Any] = field(default_factory=dict)
        """Keys of `config.json` that the configuration's class does not list, although the model's code may read them,
        such as GLM-4-MoE's `head_dim`. An import sets them."""
        weights: Annotated[str, FilePath()] = ""
        """A folder whose safetensors files hold the initial weights; empty draws random ones, as the class does."""
        fingerprint: str = ""
        """Hash of `config.json`. Forge sets it when a run begins; afterwards, a file with other values is refused."""

    config: Config

    @classmethod
    def implied_values(cls, config: Any) -> Mapping[str, Any]:
        """The folder's tokenizer, and the hash of its `config.json`."""
        from forge_train_kit.model_files import files, vocabulary_of

        file = _described_in(config)
        folder = Path(config.weights) if config.weights else file.parent if file else None
        tokenizer = {"tokenizer.path": str(folder)} if folder and vocabulary_of(files(folder)) else {}
        return tokenizer | ({"hf.fingerprint": _fingerprint(file)} if file and file.is_file() else {})

    @hookimpl
    def check_config(self) -> Iterator[Problem]:
        mine = self.config
        if mine.config and mine.type:
            yield Problem("hf.type", "hf.config already determines the type; set only one of them.")
        if mine.fingerprint and not _described_in(mine):
            yield Problem("hf.fingerprint", "there is no config.json to compare: the model is made from hf.type.")
        if not (mine.config or mine.type or mine.weights):
            yield Problem(
                "hf.config", "is required: a folder with a config.json, or set a model type in hf.type instead."
            )

    @hookimpl
    def build_model(self, job: Job) -> nn.Module:
        from ._hf.build import build

        return build(self._config(job), job, self.config.weights)

    @hookimpl
    def import_hf(self, config: Mapping[str, Any]) -> HFModel | None:
        from ._hf.files import imported

        return imported(config)

    @hookimpl
    def export_hf(self, job: Job) -> HFModel:
        from ._hf.files import exported

        classes = hookspecs.classes(job) if job.hooks.provider("classes") else None
        # As for the decoder: texts to classify don't end with the token that ends documents.
        pad = hookspecs.tokenizer(job).end if classes and job.hooks.provider("tokenizer") else None
        given = job.hooks.gives("head") if job.hooks.provider("head") else "token_logits"
        return exported(self._config(job), given, classes, pad)

    def _config(self, job: Job) -> PreTrainedConfig:
        from forge_train_kit.foreign import advice

        from ._hf.config import HEADS, fits_folder, read

        tokenizer = hookspecs.tokenizer(job) if job.hooks.provider("tokenizer") else None
        mine = self.config
        if (given := job.hooks.provider("head")) and job.hooks.gives("head") not in HEADS:
            raise ConfigError(
                f"hf: the heads of transformers' classes give {', '.join(HEADS)}; plugin {given!r} gives "
                f"{job.hooks.gives('head')!r}."
            )
        file = _described_in(mine)
        if file and not (file.is_file() and file.suffix == ".json"):
            option = "config" if mine.config else "weights"
            if file.is_file():
                raise ConfigError(f"hf.{option}: {file} is not a folder with a config.json.{advice(file)}")
            way_out = advice(file.parent) or " If the folder was moved, move it back."
            raise ConfigError(f"hf.{option}: there is no {file}, which describes the model.{way_out}")
        if file and mine.fingerprint and file.is_file() and (now := _fingerprint(file)) != mine.fingerprint:
            raise ConfigError(
                f"hf.fingerprint: {file} has other values than when the run began ({mine.fingerprint} then, {now} "
                "now). Restore the file, or start a new run."
            )
        found = read(file, mine.type, mine.set, mine.extra, tokenizer)
        if mine.type and job.config.train.init_from:
            fits_folder(found, {**mine.set, **mine.extra}, job.config.train.init_from)
        return found


def _described_in(section: HF.Config) -> Path | None:
    """The `config.json` that describes the model; None for a model made from a type."""
    path = section.config or ("" if section.type else section.weights)
    if not path:
        return None
    return Path(path) / "config.json" if Path(path).is_dir() else Path(path)


def _fingerprint(file: Path) -> str:
    """The same for files that differ in white space or in the order of keys only."""
    text = file.read_bytes()
    with contextlib.suppress(ValueError):  # told when the model is built
        text = json.dumps(json.loads(text), sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()[:16]
