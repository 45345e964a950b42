"""Rules of `precision`: modules that compute in a dtype of their own, on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forge_train import ConfigError
from forge_train_kit.model import dtype_borders
from forge_train_tools.testing.runs import RunForge

RULES = "precision.rules"


def ruled(*rules: tuple[str, str]) -> dict[str, Any]:
    return {RULES: [{"match": match, "dtype": dtype} for match, dtype in rules]}


def test_all_modules_narrow_by_rule_is_the_narrow_run(run_forge: RunForge) -> None:
    whole = run_forge(config={"train.precision": "bf16"})
    by_rule = run_forge(["precision"], ruled(("*", "bf16")))
    assert by_rule.losses == whole.losses
    assert by_rule.losses != run_forge().losses


def test_each_module_reads_its_weights_in_its_own_dtype(run_forge: RunForge) -> None:
    rules = ruled(("layers.0.attention", "fp32"), ("*.feed_forward", "fp32"), ("layers.1.feed_forward", "bf16"))
    run = run_forge(config={"train.precision": "bf16", "decoder.qk_norm": True, **rules})
    dtypes = {name: module.weight.dtype for name, module in run.model.named_modules() if hasattr(module, "weight")}
    wide = {name for name, dtype in dtypes.items() if dtype is torch.float32}
    assert wide == {name for name in dtypes if name.startswith(("layers.0.attention.", "layers.0.feed_forward."))}
    borders = dtype_borders(run.model.parts[0], torch.bfloat16)
    assert borders.keys() == {"layers.0.attention", "layers.0.feed_forward"}, "the nearest name beats patterns"
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
    assert run.model(torch.zeros(1, 4, dtype=torch.int64)).dtype is torch.bfloat16


def test_a_head_in_fp32_gives_logits_in_fp32(run_forge: RunForge) -> None:
    run = run_forge(config={"train.precision": "bf16", **ruled(("head", "fp32"))})
    head: Any = run.model.parts[0].head
    hidden = torch.randn(1, 3, head.weight.shape[1], dtype=torch.bfloat16)
    assert torch.equal(head(hidden), hidden.float() @ head.weight.T)


def test_a_module_that_several_share_is_cast_once(run_forge: RunForge) -> None:
    run = run_forge(config={"train.precision": "bf16", **ruled(("*.rope", "fp32"))})
    first, second = (layer.attention.rope for layer in run.model.parts[0].layers.values())
    assert first is second
    assert len(first._forward_pre_hooks) == len(first._forward_hooks) == 1


def test_low_precision_leaves_modules_with_a_rule_as_they_are(run_forge: RunForge) -> None:
    config = {"train.precision": "bf16", "decoder.dim": 64, "decoder.hidden": 64}
    plain = run_forge(["fp8"], {**config, **ruled(("layers.0", "fp32"))})
    names = [name for name, module in plain.model.named_modules() if hasattr(module, "product")]
    assert names
    assert all(name.startswith("layers.1.") for name in names)
    with pytest.raises(ConfigError, match="a rule has it compute in float32"):
        run_forge(["fp8"], {**config, "fp8.include": ["layers.0.attention.q"], **ruled(("layers.0", "fp32"))})


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ((("layer.0", "fp32"),), r"precision\.rules: 'layer\.0' matches no module\. Did you mean 'layers\.0'\?"),
        ((("*", "bf16"), ("*attention", "fp32")), r"'\*' \(bf16\) and '\*attention' \(fp32\) both match"),
        ((("head", "fp32"), ("head", "bf16")), r"precision\.rules: 2 rules for 'head'"),
        ((("head", "fp64"),), "fp64"),
        ((("layers.0", "bf16"),), r"'layers\.0' changes nothing: the run computes in bf16 already"),
    ],
)
def test_bad_rules_are_refused(run_forge: RunForge, rules: tuple[tuple[str, str], ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_forge(config={"train.precision": "bf16", **ruled(*rules)})


def test_parameters_that_are_narrow_at_rest_have_no_wide_copies(run_forge: RunForge) -> None:
    with pytest.raises(ConfigError, match=r"precision.*bf16_parameters|bf16_parameters.*precision"):
        run_forge(["bf16_parameters"], {"train.precision": "bf16", **ruled(("head", "fp32"))})
