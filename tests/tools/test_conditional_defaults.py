"""Defaults that count only in several processes, or at a narrow precision."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_train.base.errors import ConfigError
from forge_train.loop.describe import to_toml
from forge_train.registry.setup import Setup
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve

pytestmark = pytest.mark.unit

WATCHED = {"fsdp2", "zero1", "ddp", "precision", "loss_scaler"}


def setup(precision: str, world: int, *plugins: str, config: str | None = None) -> Setup:
    sets = ("train.steps=1", "train.micro_batch=1", f"train.precision={precision}") if config is None else ()
    return resolve(Request(config=config, plugins=plugins, set=sets), world=world)


def enabled(found: Setup) -> set[str]:
    return WATCHED & set(found.hooks.enabled)


@pytest.mark.parametrize(
    ("precision", "world", "plugins", "expected"),
    [
        ("fp32", 1, (), set()),
        ("fp32", 2, (), {"fsdp2"}),
        ("bf16", 1, (), {"precision"}),
        ("bf16", 2, (), {"fsdp2", "precision"}),
        ("fp16", 1, (), {"precision", "loss_scaler"}),
        ("fp16", 2, ("ddp",), {"ddp", "precision", "loss_scaler"}),
        ("fp32", 2, ("zero1",), {"zero1"}),
        ("fp32", 1, ("zero1",), {"zero1"}),
    ],
)
def test_are_enabled_where_they_have_something_to_do(
    precision: str, world: int, plugins: tuple[str, ...], expected: set[str]
) -> None:
    assert enabled(setup(precision, world, *plugins)) == expected


def test_are_written_so_that_one_file_serves_any_number_of_processes(tmp_path: Path) -> None:
    two = setup("fp16", 2)
    file = tmp_path / "config.toml"
    file.write_text(to_toml(two.config, two.hooks), encoding="utf-8")
    assert enabled(setup("fp16", 2, config=str(file))) == {"fsdp2", "precision", "loss_scaler"}
    assert enabled(setup("fp16", 1, config=str(file))) == {"precision", "loss_scaler"}
    file.write_text(file.read_text(encoding="utf-8").replace('"fp16"', '"fp32"'), encoding="utf-8")
    assert enabled(setup("fp32", 1, config=str(file))) == set()


def test_settings_in_a_users_file_wait_for_their_plugin(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[train]\nsteps = 1\nmicro_batch = 1\n[fsdp2]\nreshard = "never"\n', encoding="utf-8")
    assert setup("fp32", 2, config=str(file)).config.sections["fsdp2"].reshard == "never"
    assert "fsdp2" not in setup("fp32", 1, config=str(file)).config.sections


def test_a_transport_is_there_for_experts_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert "alltoall" in setup("fp32", 1, "moe").hooks.enabled
    assert "alltoall" not in setup("fp32", 1).hooks.enabled
    assert not caplog.records
    setup("fp32", 1, "alltoall")
    assert caplog.messages == [
        "Plugin 'alltoall' has nothing to do: nothing requires 'token_dispatch', which it fills."
    ]


def test_its_section_is_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[alltoall]\npayload = "fp8"\n[train]\nsteps = 1\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mine.toml:1: section \[alltoall\] belongs to a plugin that is not enabled"):
        setup("fp32", 1, config=str(file))
    assert "alltoall" in setup("fp32", 1, "moe", config=str(file)).hooks.enabled
    file.write_text(f'plugins = ["moe"]\n{file.read_text(encoding="utf-8")}', encoding="utf-8")
    dense = resolve(Request(config=str(file), without=("moe",)))
    assert "alltoall" not in dense.hooks.enabled, "a file serves with and without what it is for"
