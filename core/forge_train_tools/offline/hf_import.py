"""Makes a checkpoint of a folder in Hugging Face layout. Plugins map its model and its names (`import_hf`)."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_train.base.errors import ConfigError
from forge_train.base.files import check_new, refused, write_json
from forge_train.base.format import format_list
from forge_train.checkpoint.writing import commit, stage
from forge_train.compose.initialise import tied_groups
from forge_train.contract.model import Model
from forge_train.loop.describe import plugin_list
from forge_train.mesh.world import World
from forge_train.plugin.job import Job
from forge_train.registry.setup import Setup
from forge_train.store.manifest import EDITABLE
from forge_train.store.tree import MODEL
from forge_train_kit import model_files
from forge_train_kit.full_tensors import Files
from forge_train_kit.hf import HFModel, fit
from forge_train_kit.hf.folder import Folder
from forge_train_kit.hf.start import new_head, noting
from forge_train_kit.new_folder import claimed
from forge_train_kit.state_map import Plan
from forge_train_kit.state_map.views import Stored
from forge_train_kit.stored import Patterns

from ..configuration.comments import noted
from ..configuration.request import Request, preset
from ..configuration.setup import resolve
from ..launching.once import launch_once
from .grown import Grown
from .hf_files import Exchanged, check_range, comments_in, fill_full
from .hf_request import PRESET, bring, data_key, tokenizer_notes
from .initial import initial
from .opening import compose_meta, lone_job


def import_checkpoint(
    source: Path,
    target: Path,
    *,
    plugins: Sequence[str] = (),
    without: Sequence[str] = (),
    settings: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    allow_missing: Sequence[str] = (),
    allow_extra: Sequence[str] = (),
    nproc: int = 1,
) -> Exchanged:
    """Make a checkpoint, of weights only, from a folder in Hugging Face layout.

    Its `config.toml` describes the model for forge and starts from these weights: `forge train TARGET/config.toml`
    trains them further. The weights are in safetensors files, whatever `checkpoint.format` is, and pass through memory
    one tensor at a time.

    Args:
        source: `config.json` with `model.safetensors`, or with several files and their index.
        target: the checkpoint's folder, which must not exist yet; an empty one, or a link to an empty one, is filled.
        plugins: to enable in addition to the defaults; one of all these must know the architecture.
        without: to disable.
        settings: `key=value`, as in `--set`; they override the folder's values.
        dtype: to store; by default, each tensor keeps its own. A model has fp32 parameters, whatever its checkpoint
            holds.
        allow_missing: patterns of tensors that may be missing or have another shape; their weights start as in a new
            model.
        allow_extra: patterns of tensors that the folder may have in addition to the model's; they are left out.
        nproc: local processes that each read and write a share of the tensors, including this one.

    Raises:
        ConfigError: for a folder, an architecture or tensors that can't be imported, for a pattern that matches
            nothing, or for a target that is in use or that another process is writing; nothing is written then.
        ForgeError: with several processes, the message of the one that failed first; then, too, nothing is left behind.
    """
    check_new(target)
    asked = _Asked(
        str(source),
        str(target.absolute()),
        (*plugins,),
        (*without,),
        (*settings,),
        str(dtype).removeprefix("torch.") if dtype else "",
        (*allow_missing,),
        (*allow_extra,),
    )
    made = _Import.of(asked)

    def filled(part: Path, files: Files) -> Mapping[str, str]:
        if nproc == 1:
            return fill_full(part, files, made.read)
        _fill_together(asked, part, nproc)
        return {}

    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = made.grown.tokenizer if made.grown else made.folder.path
        beside = _describe(Path(scratch), tokenizer, target, made.setup)
        try:
            with claimed(target) as place:
                _write(made, place, beside, filled)
        except OSError as error:
            raise ConfigError(f"{target}: can't be written: {error.strerror or error}.") from error
    files = tuple(sorted({entry.file.name for entry in made.folder.tensors.values()}))
    return Exchanged(
        target, sum(tensor.numel() for tensor in made.weights.values()), files, made.notes, data_key(made.setup)
    )


@dataclass(frozen=True)
class _Asked:
    """The arguments of an import in a form that JSON can hold; see `import_checkpoint`."""

    source: str
    target: str
    plugins: Sequence[str]
    without: Sequence[str]
    settings: Sequence[str]
    dtype: str
    allow_missing: Sequence[str]
    allow_extra: Sequence[str]


@dataclass(frozen=True)
class _Import:
    """Import to be written; no tensor is in memory."""

    folder: Folder
    setup: Setup
    job: Job
    model: Model
    plan: Plan
    weights: Mapping[str, Tensor]
    """On the meta device, in the dtype to store."""
    notes: tuple[str, ...]
    grown: Grown | None

    @classmethod
    def of(cls, asked: _Asked) -> _Import:
        folder = Folder.open(Path(asked.source))
        names = (*asked.plugins,), (*asked.without,), (*asked.settings,)
        request = Request(config=PRESET, plugins=names[0], without=names[1], set=names[2])
        layout, setup = _understand(folder, Path(asked.target), request)
        grown = Grown.of(folder, setup)
        if grown is not None:
            layout, setup = _understand(grown.folder, Path(asked.target), request, grown.tokenizer)
        job = lone_job(setup, folder.path, "cpu")
        takes_file = model_files.option(setup.hooks) is not None
        model, unfit = _composed(job)
        if grown is not None:
            layout = grown.layout(layout, model)
        wanted = {name: (tuple(one.shape), one.dtype) for name, one in model.state_dict().items()}
        head, left_out, extra = new_head(job, layout), list[str](), list[str]()
        may_lack = Patterns("--allow-missing", asked.allow_missing, head)
        may_exceed = Patterns("--allow-extra", asked.allow_extra)
        plan = fit.plan(
            folder,
            layout,
            wanted,
            tied=tied_groups(*model.parts),
            options=("--allow-missing", "--allow-extra"),
            missing=may_lack.take,
            unexpected=noting(may_exceed, extra),
            ignored=noting(Patterns("", (), head), left_out),
        )
        may_lack.check(f"{folder.path} lacks")
        may_exceed.check(f"{folder.path} holds in addition to the model")
        drawn = [name for name in wanted if name not in plan.targets]
        notes = tokenizer_notes(folder, unfit) if takes_file else ()
        if grown is not None:
            notes = (grown.note, *notes)
        if extra:
            notes = (f"{format_list(extra, 8)}: left out.", *notes)
        if left_out:
            notes = (f"{format_list(left_out, 8)}, of the folder's own head: left out.", *notes)
        if drawn:
            notes = (f"{format_list(drawn, 8)} start{'s' if len(drawn) == 1 else ''} as in a new model.", *notes)
        dtype = getattr(torch, asked.dtype) if asked.dtype else None
        weights = {name: torch.empty(shape, dtype=own, device="meta") for name, (shape, own) in wanted.items()}
        for name, one in weights.items():
            if one.is_floating_point():
                weights[name] = one.to(dtype or (plan.targets[name].dtype if name in plan.targets else one.dtype))
        return cls(folder, setup, job, model, plan, weights, notes, grown)

    @cached_property
    def state(self) -> dict[str, Any]:
        """The checkpoint's state."""
        enabled = [entry for entry in plugin_list(self.setup.hooks) if entry["name"] not in self.setup.config.neutral]
        source = {"from": str(self.folder.path.absolute()), "architectures": self.folder.config.get("architectures")}
        return {
            "model": dict(self.weights),
            "progress": {"step": 0, "tokens": 0},
            "config": self.setup.config.values(volatile=False),
            "enabled": enabled,
            "imported": source,
        }

    @property
    def files(self) -> Files:
        """The files of the checkpoint's tensors."""
        return Files.of({f"{MODEL}{name}": (tuple(t.shape), t.dtype) for name, t in self.weights.items()}, alone=True)

    def read(self, name: str) -> Tensor:
        """A tensor by its name in the checkpoint; if its stored form fits, it stays mapped from the folder."""
        own = name.removeprefix(MODEL)
        one, view = self.weights[own], self.plan.targets.get(own)
        if isinstance(view, Stored) and view.dtype == one.dtype:
            return self.plan.read(own, self.folder.read)
        tensor = torch.empty(one.shape, dtype=one.dtype)
        if view is None:
            initial(self.model, own, tensor, self.job.seed)
        else:
            self.plan.read_into(tensor, own, self.folder.read)
            check_range(own, tensor, lambda: self.plan.read(own, self.folder.read))
        return tensor


def _write(made: _Import, place: Path, beside: list[Path], filled: Callable[[Path, Files], Mapping[str, str]]) -> None:
    try:
        files = partial(Files.of, alone=True, fill=filled)
        staged = stage(place, 0, made.state, made.job.dist, contents=made.read, files=files)
        commit(staged, made.job.dist, beside=beside, editable=(EDITABLE,), replace=False)
    finally:
        shutil.rmtree(place.with_name(f".{place.name}.partial"), ignore_errors=True)


def _fill_together(asked: _Asked, part: Path, nproc: int) -> None:
    arguments = {"asked": dataclasses.asdict(asked), "part": str(part.absolute())}
    launch_once(f"{__name__}:import_share", arguments, nproc)


def import_share(asked: dict[str, Any], part: str) -> dict[str, Any]:
    """The work of each process of an import."""
    here, made = World.here(), _Import.of(_Asked(**asked))
    try:
        fill_full(Path(part), made.files, made.read, rank=here.rank, world=here.size)
    except OSError as error:
        raise refused(Path(asked["target"]), error) from error
    return {"code": 0}


def _understand(folder: Folder, target: Path, request: Request, tokenizer: Path | None = None) -> tuple[HFModel, Setup]:
    """Return how the model is built and named, and the configuration that trains it."""
    request, layout = bring(folder, request, tokenizer)
    sections = {**request.sections, "train": {**request.sections["train"], "init_from": str(target.absolute())}}
    return layout, resolve(dataclasses.replace(request, sections=sections), data=False)


def _describe(scratch: Path, tokenizer: Path, target: Path, setup: Setup) -> list[Path]:
    """The files next to the tensors. The configuration names them by relative paths, so that the checkpoint can
    be moved."""
    written = setup.config.as_written
    left_open = dict.fromkeys(("init_missing", "init_unexpected", "init_map"))  # for plugins that add parameters
    here = {"train": {**written.get("train", {}), "init_from": "./", **left_open}}
    here["checkpoint"] = {**written.get("checkpoint", {}), "only": None}
    config = dataclasses.replace(setup.config, as_written={**written, **here})
    beside = [scratch / EDITABLE, scratch / "plugins.json"]
    if found := model_files.files(tokenizer):
        if model_files.vocabulary_of(found):
            config = model_files.relative(config, setup.hooks, tokenizer)
        model_files.copy(found, scratch / model_files.FOLDER)
        beside.append(scratch / model_files.FOLDER)
    notes = comments_in(preset(PRESET)) | {("train", "init_from"): "the weights that were imported"}
    text = f"# forge train {target.name}/{EDITABLE} -s {data_key(setup)}=YOUR_TEXT\n\n"
    beside[0].write_text(text + noted(config, setup.hooks, notes), encoding="utf-8")
    write_json(beside[1], plugin_list(setup.hooks))
    return beside


def _composed(job: Job) -> tuple[Model, str]:
    """The model on the meta device, and why it can't use the tokenizer; empty if it can."""
    try:
        return compose_meta(job, text=True), ""
    except ConfigError as error:
        return compose_meta(job, text=False), str(error)
