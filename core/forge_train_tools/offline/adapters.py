"""Writes the adapter of a run as PEFT stores it. Plugins map what they added (`export_adapter`)."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save

from forge_train.base.errors import ConfigError
from forge_train.base.files import write_json
from forge_train.base.format import format_list
from forge_train.checkpoint import checkpoint
from forge_train.loop.weights import compare_shapes
from forge_train_kit import foreign, hookspecs, model_files
from forge_train_kit.format import format_lines
from forge_train_kit.hf.ranges import Weights
from forge_train_kit.hf.start import exported, same_modules
from forge_train_kit.state_map import Plan, Step
from forge_train_kit.stored import Base, base_beneath, base_of, places

from .hf_files import Exchanged, appearing, put_beside
from .opening import Wanted, compose_meta, lone_job, setup_of

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def export_adapter(source: Path, target: Path, *, settings: tuple[str, ...] = ()) -> Exchanged:
    """Write the adapter of a run (its newest whole checkpoint) or of a checkpoint as a folder of PEFT, with the
    tokenizer's files, whose chat template it was trained with.

    Args:
        source: a run or a checkpoint.
        target: a folder that does not exist yet or is empty.
        settings: values to override, as `--set` takes them.

    Raises:
        ConfigError: for a run without an adapter, one that the layout can't express, or a target in use.
    """
    source = foreign.resolve(source)
    saved = checkpoint.read_state(source)
    setup = setup_of(source, saved, wanted=Wanted(set=settings, data=False))
    job = lone_job(setup, source, "cpu")
    model = compose_meta(job, text=False)
    weights = model.state_dict()
    layout = exported(job)
    if layout is None:
        raise ConfigError(f"{source}: none of its plugins knows the Hugging Face names of its model (export_hf).")
    base = base_beneath(source, job.dist, setup.config.train.init_from)
    where = places(source, job.dist, base)
    compare_shapes(source, weights, job.dist, where)
    stored = Weights({name: where[name] for name in weights})
    arguments = {"modules": same_modules(layout, stored.views), "job": job}
    adapter = job.hooks.only(hookspecs.export_adapter, arguments)
    if adapter is None:
        raise ConfigError(f"{source}: none of its plugins adapts a model (export_adapter); leave --adapter out.")
    step = Step(stored.views)
    adapter.map.apply(step)
    if step.wrong:
        raise ConfigError(f"{source}: its adapter can't be written:{format_lines(step.wrong)}")
    if lost := sorted(name for name, one in model.named_parameters() if one.requires_grad and name in step.left):
        raise ConfigError(
            f"{source}: the run trains {format_list(lost, 4)} beside its adapter, whose folder has no place for it. "
            "Leave --adapter out: an export then has both."
        )
    plan = Plan(step.given)
    tensors = {name: plan.read(name, stored.read).contiguous() for name in plan.targets}
    with appearing(target) as part:
        write_json(part / CONFIG, {"base_model_name_or_path": _folder_beneath(source, base), **adapter.config})
        (part / TENSORS).write_bytes(save(tensors, {"format": "pt"}))  # save_file of safetensors 0.8 ignores the umask
        put_beside(part, model_files.of(setup.config, setup.hooks, source))
    return Exchanged(target, sum(one.numel() for one in tensors.values()), (TENSORS,))


def _folder_beneath(path: Path, base: Base | None) -> str:
    """The Hugging Face folder that the base of a checkpoint was imported from; None becomes null in JSON."""
    state = checkpoint.read_state(Path(base.path) if base else path)
    while base := base_of(state):
        state = checkpoint.read_state(Path(base.path))
    found: str = state.get("imported", {}).get("from", "")
    return found
