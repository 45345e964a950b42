"""Every head on two ranks of each kind, against one process: losses, gradient norms, gradients and evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import compositions
import heads_data
import hf_models
from crossed import few
from forge_train import ForgeError
from forge_train_tools.configuration.request import Request
from forge_train_tools.offline.hf_request import starting_from
from forge_train_tools.testing import Verifier

pytestmark = [pytest.mark.dist]

Settings = Mapping[str, Any]
HEADS: dict[str, tuple[tuple[str, ...], Settings]] = {
    "classify": (("classify", "text_labels"), {"classify.classes": heads_data.PACKAGES}),
    "classify, smoothed, padded": (
        ("classify", "text_labels"),
        {"classify.classes": heads_data.PACKAGES, "cross_entropy.label_smoothing": 0.1, "text_labels.packing": "pad"},
    ),
    "token_classify": (("token_classify", "text_labels"), {"token_classify.classes": heads_data.KINDS}),
    "embed": (("embed", "text_pairs"), {"text_pairs.kind": "embedding"}),
    "embed, last, groups": (
        ("embed", "text_pairs"),
        {"text_pairs.kind": "embedding", "embed.pooling": "last", "embed.group": 1 + 2},
    ),
    "embed, first": (("embed", "text_pairs"), {"text_pairs.kind": "embedding", "embed.pooling": "cls"}),
    "reward": (("reward", "text_pairs"), {"text_pairs.template": "plain"}),
}
LAYOUTS: dict[str, tuple[tuple[str, ...], Settings]] = {
    "fsdp2": (("fsdp2",), {}),
    "tp2": (("tp",), {"parallel.tp": 2}),
    "pp2": (("pp",), {"parallel.pp": 2}),
    "cp2": (("cp", "fsdp2"), {"parallel.cp": 2}),
}
ACCUMULATED = {"train.micro_batch": 6}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short texts of each kind, and the configuration that all cases share."""
    folder = tmp_path_factory.mktemp("heads")
    texts = [heads_data.passages(name, 40) for name in heads_data.PACKAGES]
    short = [(name, text[:40].strip()) for name, some in zip(heads_data.PACKAGES, texts, strict=True) for text in some]
    heads_data.write_tasks(folder, short)
    heads_data.kinds(folder / "token_classify.jsonl", 200)
    compositions.write_config(
        folder / "heads.toml",
        ("decoder",),
        run={"seed": 3},
        train={"steps": 3, "global_batch": 12, "sequence": 48, "evaluate_every": 2, "evaluate_batches": 2},
        decoder={"layers": 2, "max_sequence": 64},
        adamw={"lr": 1e-2},
    )
    return folder


def request(data: Path, case: str, plugins: tuple[str, ...] = (), **settings: Any) -> Request:
    own, values = HEADS[case]
    name = own[1]
    files = {
        f"{name}.path": str(data / f"{own[0]}.jsonl"),
        f"{name}.cache": str(data / "cache"),
        f"{name}.held_out": 0.2,
        f"{name}.long": "right",
    }
    chosen = {**files, **values, **settings}
    return compositions._request(data / "heads.toml", (*own, *plugins), chosen)


ONCE = {"classify, smoothed, padded": "fsdp2", "embed, first": "cp2"}
"""What is tried on one layout; the others are on all."""
CASES = [(case, layout) for case in HEADS for layout in LAYOUTS if ONCE.get(case, layout) == layout]


IN_CI = [
    *(("classify", "pp2"), ("classify", "cp2"), ("classify, smoothed, padded", "fsdp2"), ("token_classify", "tp2")),
    *(("embed", "pp2"), ("embed, last, groups", "tp2"), ("embed, first", "cp2"), ("reward", "fsdp2")),
    *(("reward", "pp2"), ("token_classify", "cp2")),
]
"""Every head, and every kind of head on layouts that share out the sequence, its features and the layers."""


@pytest.mark.parametrize(("case", "layout"), few(CASES, IN_CI), ids=lambda one: one)
def test_a_head_agrees_with_one_process(verify: Verifier, data: Path, case: str, layout: str) -> None:
    plugins, settings = LAYOUTS[layout]
    group = "groups" in case
    cut = {**settings, **(ACCUMULATED if group or not case.startswith("embed") else {})}
    if layout == "pp2" and case.startswith("embed") and not group:
        cut |= {"train.micro_batch": 12, "pp.schedule": "gpipe"}
    verdict = verify(request(data, case, plugins, **cut), 2, steps=2, reference=request(data, case))
    assert verdict.agree, verdict


@pytest.mark.parametrize(
    ("case", "layout"),
    few([("embed", "fsdp2"), ("reward", "fsdp2"), ("embed", "cp2")], [("reward", "fsdp2"), ("embed", "cp2")]),
)
def test_few_held_out_pairs_count_once_on_every_layout(verify: Verifier, data: Path, case: str, layout: str) -> None:
    plugins, settings = LAYOUTS[layout]
    few = {"text_pairs.held_out": 0.01}
    verdict = verify(request(data, case, plugins, **settings, **few), 2, steps=2, reference=request(data, case, **few))
    assert verdict.agree, verdict


GLM = {key: one for key, one in hf_models.MODELS["glm"].items() if key != "vocab_size"}
FOREIGN: Settings = {"hf.type": "glm", **{f"hf.set.{key}": one for key, one in GLM.items()}}


@pytest.mark.parametrize(
    ("case", "layout"),
    few(
        [("classify", "pp2"), ("token_classify", "tp2"), ("embed", "cp2"), ("reward", "fsdp2")],
        [("classify", "pp2"), ("token_classify", "tp2"), ("embed", "cp2")],
    ),
    ids=lambda one: one,
)
def test_a_head_on_a_class_of_transformers_agrees(verify: Verifier, data: Path, case: str, layout: str) -> None:
    pytest.importorskip("transformers")
    plugins, settings = LAYOUTS[layout]
    cut = {**FOREIGN, **settings, **({} if case == "embed" else ACCUMULATED)}
    whole, split = request(data, case, ("hf",), **FOREIGN), request(data, case, ("hf", *plugins), **cut)
    whole, split = (replace(one, without=("decoder", "console", "tensorboard")) for one in (whole, split))
    verdict = verify(split, 2, steps=2, reference=whole)
    assert verdict.agree, verdict


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_head_unties_a_tied_folder(verify: Verifier, data: Path, tmp_path: Path, layout: str) -> None:
    """The option of the folder and the weights that it has for a tied model, against an untied one of the same."""
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = transformers.Qwen3Config(**shape, **heads, max_position_embeddings=64, pad_token_id=None)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    plugins, settings = LAYOUTS[layout]
    sets = {**ACCUMULATED, "checkpoint.allow_changes": ["decoder.tied"]}
    split, whole = (
        starting_from(replace(request(data, "classify", more, **cut), model_from=str(tmp_path)))
        for more, cut in ((plugins, {**sets, **settings}), ((), {**sets, "decoder.tied": False}))
    )
    assert split.sections["decoder"]["tied"] is True
    verdict = verify(split, 2, steps=2, reference=whole)
    assert verdict.agree, verdict


def test_negatives_of_a_part_of_the_batch_are_refused(verify: Verifier, data: Path) -> None:
    with pytest.raises(ForgeError, match=r"embed\.group: the global batch of 6 pairs is computed in groups of 3"):
        verify(request(data, "embed", **ACCUMULATED), 1, steps=1)
    with pytest.raises(ForgeError, match=r"embed\.group: 4 does not divide the 6 pairs"):
        verify(request(data, "embed", **{"embed.group": 4}), 1, steps=1)
