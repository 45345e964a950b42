"""New tokens of a model that exists: import, rows, export, against transformers; and what is refused."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import chat_model
from forge_cli import forge, one_message
from forge_train_kit import hookspecs
from forge_train_tools.offline.opening import open_model

pytest.importorskip("transformers")
pytestmark = pytest.mark.e2e

TOKENS, SPECIAL = ["<tool>", "</tool>"], ["<|call|>"]
ADD = (f"tokenizer.add={json.dumps(TOKENS)}", f"tokenizer.add_special={json.dumps(SPECIAL)}")
TEXT = "<tool>say one</tool> and<|call|> then say <tool> two"
SMALL = {
    "FORGE_SET": "run.device=cpu;train.steps=3;train.global_batch=4;train.sequence=32;train.evaluate_every=0;"
    "text.held_out=0;text.path=texts;adamw.lr=1e-2;adamw.decay_embeddings=true"
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    chat_model.write_model(folder / "hf")
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text(f"{TEXT}\n" * 200, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))


def sets(*assignments: str) -> list[str]:
    return [word for one in assignments for word in ("-s", one)]


def run(*words: Any, environment: dict[str, str] | None = None) -> str:
    ended = forge(*words, environment=environment or {})
    assert ended.code == 0, ended.err
    return ended.out + ended.err


def weights(path: object) -> dict[str, torch.Tensor]:
    return {name: one.detach() for name, one in open_model(Path(str(path)), text=False).model.state_dict().items()}


def base(run: str) -> str:
    """The checkpoint that a run started from."""
    return str(tomllib.loads(Path(run, "config.toml").read_text(encoding="utf-8"))["train"]["init_from"])


@pytest.mark.slow
def test_rows_are_added_trained_alone_and_exported(place: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said = run("train", "hf", *sets(*ADD), "-p", "new_rows", "--name", "rows", environment=SMALL)
    published = AutoModelForCausalLM.from_pretrained("hf")
    old = published.get_input_embeddings().weight.detach().clone(), published.get_output_embeddings().weight.detach()
    count, added = len(old[0]), [*TOKENS, *SPECIAL]
    assert f"{count} token ids become {count + 3}" in said
    start, ended = weights(base("runs/rows")), weights("runs/rows")
    published.resize_token_embeddings(count + 3, mean_resizing=True)
    theirs = published.get_input_embeddings().weight, published.get_output_embeddings().weight
    for name, before, other in zip(("embedding.weight", "head.weight"), old, theirs, strict=True):
        assert torch.equal(start[name][:count], before)
        assert torch.allclose(start[name][count:], before.mean(0).expand(3, -1), atol=1e-6)
        assert torch.allclose(start[name][count:], other.detach()[count:], atol=1e-3), (
            "theirs are drawn around the mean"
        )
        assert torch.equal(ended[name][:count], before)
        assert ((ended[name][count:] - start[name][count:]).abs().amax(1) > 1e-3).all()
    for name in start.keys() - {"embedding.weight", "head.weight"}:
        assert torch.equal(start[name], ended[name]), name

    run("checkpoint", "export", "runs/rows", "rows-hf")
    model, tokenizer = AutoModelForCausalLM.from_pretrained("rows-hf"), AutoTokenizer.from_pretrained("rows-hf")
    assert model.config.vocab_size == len(tokenizer) == count + 3
    opened = open_model(Path("runs/rows"))
    ids = hookspecs.tokenizer(opened.job).encode(TEXT)
    assert tokenizer(TEXT, add_special_tokens=False)["input_ids"] == ids
    assert {count, count + 1, count + 2} <= {*ids}
    assert tokenizer.convert_tokens_to_ids(added) == [count, count + 1, count + 2]
    assert (
        hookspecs.tokenizer(opened.job).decode(ids)
        == TEXT.replace("<|call|>", "")
        == tokenizer.decode(ids, skip_special_tokens=True)
    )
    inputs = torch.tensor([ids])
    with torch.no_grad():
        ours = opened.model.parts[0].head(opened.model(inputs))
        assert (ours - model(inputs).logits).abs().max() <= 1e-5
    run("generate", "runs/rows", "--prompt", "<tool>", "--tokens", "2")
    run("train", "--resume", "runs/rows", *sets("train.steps=4"))


def test_free_rows_are_taken(place: Path) -> None:
    from transformers import AutoModelForCausalLM

    shutil.copytree("hf", "padded")
    model = AutoModelForCausalLM.from_pretrained("hf")
    count = model.config.vocab_size
    model.resize_token_embeddings(count + 8)
    model.save_pretrained("padded")
    said = run("checkpoint", "import", "padded", "padded-base", *sets(*ADD))
    assert "They take 3 of 8 rows without a token." in said
    assert torch.equal(weights("padded-base")["embedding.weight"], model.get_input_embeddings().weight)


def test_a_class_of_transformers_whose_head_is_tied(place: Path) -> None:
    from transformers import AutoModelForCausalLM

    shutil.copytree("hf", "tied")
    model = AutoModelForCausalLM.from_pretrained("hf", tie_word_embeddings=True)
    model.tie_weights()
    model.save_pretrained("tied")
    run("checkpoint", "import", "tied", "tied-base", "-p", "hf", *sets(*ADD))
    held = weights("tied-base")
    (name,) = (one for one in held if "embed_tokens" in one)
    rows = model.get_input_embeddings().weight.detach()
    assert torch.equal(held[name][: len(rows)], rows)
    assert torch.allclose(held[name][len(rows) :], rows.mean(0).expand(3, -1), atol=1e-6)
    assert not [one for one in held if "lm_head" in one]


@pytest.mark.slow
def test_beside_an_adapter(place: Path) -> None:
    """The rows are trained in full, the adapter with them, and nothing else; an export has both."""
    from transformers import AutoModelForCausalLM

    only = 'checkpoint.only=["*lora_*", "embedding.*", "head.*"]'
    more = ("-p", "lora,new_rows", *sets(*ADD, only, "lora.rank=2"))
    run("train", "--from", "hf", *more, "--name", "adapted", environment=SMALL)
    before, after = weights(base("runs/adapted")), weights("runs/adapted")
    count = len(before["embedding.weight"]) - 3
    for name in ("embedding.weight", "head.weight"):
        assert torch.equal(after[name][:count], before[name][:count])
        assert not torch.equal(after[name][count:], before[name][count:])
    refused = one_message(forge("checkpoint", "export", "runs/adapted", "adapter", "--adapter"), 2)
    assert "the run trains embedding.weight, head.weight beside its adapter" in refused
    run("checkpoint", "export", "runs/adapted", "adapted-hf")
    opened, model = open_model(Path("runs/adapted")), AutoModelForCausalLM.from_pretrained("adapted-hf")
    inputs = torch.tensor([hookspecs.tokenizer(opened.job).encode(TEXT)])
    with torch.no_grad():
        assert (opened.model.parts[0].head(opened.model(inputs)) - model(inputs).logits).abs().max() <= 1e-5


def test_an_adapter_alone_leaves_their_rows_and_says_so(place: Path) -> None:
    more = ("-p", "lora", *sets(*ADD, "lora.rank=2", "checkpoint.only=[]"))
    told = "the rows of added tokens (<tool>, </tool>, <|call|>) are not trained. Enable new_rows too"
    assert told in run("train", "--from", "hf", *more, "--name", "alone", environment=SMALL).replace("\n", " ")
    trained = (*more, *sets("lora.tune=['embedding', 'head']"))
    assert "are not trained" not in run("train", "--from", "hf", *trained, "--name", "tuned", environment=SMALL)


def test_a_new_model_has_as_many_ids(place: Path) -> None:
    Path("new.toml").write_text('[tokenizer]\npath = "hf/tokenizer.json"\nadd = ["<tool>"]\n', encoding="utf-8")
    small = ("decoder.dim=16", "decoder.layers=1", "decoder.heads=2", "run.name=new")
    run("train", "new.toml", *sets(*small), environment=SMALL)
    opened = open_model(Path("runs/new"))
    assert len(weights("runs/new")["embedding.weight"]) == hookspecs.tokenizer(opened.job).vocabulary
    assert hookspecs.tokenizer(opened.job).encode("<tool>") == [hookspecs.tokenizer(opened.job).vocabulary - 1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("hf", *sets('tokenizer.add=["<|im_end|>"]')), "tokenizer.add: '<|im_end|>' is token"),
        (("hf", *sets('tokenizer.add=[""]')), "tokenizer.add: a token is empty."),
        (("hf", *sets('tokenizer.add=["a b", "a b"]')), "tokenizer.add: 'a b' is named twice."),
        (("hf", *sets('tokenizer.add=["<x>"]', "tokenizer.path=bytes")), "tokenizer.add: bytes take no tokens"),
        (("pieces", *sets(*ADD)), "tokenizer.add: tokens can be added to a tokenizer.json"),
        (("hf", "-p", "new_rows"), "new_rows: no token was added to the tokenizer"),
    ],
)
def test_bad_input(place: Path, words: tuple[str, ...], says: str) -> None:
    if not Path("pieces").exists():
        shutil.copytree("hf", "pieces")
        Path("pieces/tokenizer.json").rename("pieces/tokenizer.model")
    assert says in one_message(forge("train", *words, environment=SMALL), 2)
