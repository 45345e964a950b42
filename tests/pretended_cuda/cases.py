"""What is trained on the pretended device: every plugin, some techniques together, and layouts of two ranks."""

from __future__ import annotations

from typing import Any

import drawn

Case = dict[str, Any]
BF16 = {"train.precision": "bf16"}
TEXTS = [f"{what} number {count}" for what in ("a cat", "the sun", "some rain", "one bird") for count in range(12)]
LEFT_OUT = {
    **dict.fromkeys(("aim", "mlflow", "trackio", "wandb"), "sends what the loop has logged, and starts a service"),
    "profile": "torch's profiler asks a driver that is not there",
    "hf": "builds transformers' models, whose code is not ours",
    "hf_images": "is read by hf",
    "hf_datasets": "reads from another library; its rows reach the device as those of text do",
    "multimodal": "reads records; their items reach the device as those of `images` do",
    "mixture": "mixes sources; their rows reach the device as those of text do",
    "distill": "needs a checkpoint to learn from",
    "kto": "needs a checkpoint to compare with",
    "text_feedback": "is read by kto; its rows reach the device as those of text_pairs do",
    "tokens": "reads what `forge data prepare` made of text; its rows reach the device as those of text do",
    "token_classify": "is `classify` with a label for each token",
    **dict.fromkeys(("cp", "tp", "pp", "ep", "fsdp2", "zero1", "ddp"), "does nothing on one process; see TWO_RANKS"),
}
"""Plugin → why no case of one process has it."""


def case(name: str, *plugins: str, **config: Any) -> Case:
    return {"name": name, "plugins": [*plugins], "config": {k.replace("__", "."): v for k, v in config.items()}}


def one_process(folder: str, plugins: dict[str, list[str]]) -> list[Case]:
    """Each plugin with its own example, and combinations.

    Args:
        folder: of the records that `data` wrote.
        plugins: name → plugins and settings beside it.
    """
    packed = BF16 | {"text.isolate": True}
    special: dict[str, Any] = {
        **dict.fromkeys(("varlen", "flash", "flex"), packed),
        "auto": BF16,
        "compile": {"compile.backend": "eager"},
        "lm_eval": {"lm_eval.tasks": [f"{folder}/text/a.txt"], "lm_eval.limit": 1, "train.evaluate_every": 2},
        "mla": {"decoder.kv_heads": 4},
        "skip_step": {"train.clip_norm": 1.0},
    }
    return [
        *(
            {**case(name, name), "beside": beside, "config": special.get(name, {})}
            for name, beside in plugins.items()
            if name not in {*LEFT_OUT, *TOGETHER, *DEFAULTS, *WATCHERS}
        ),
        case("defaults", *DEFAULTS),
        {**case("watchers", *WATCHERS), "beside": [one for name in WATCHERS for one in plugins[name]]},
        *_heads(folder),
        case("bf16", train__precision="bf16"),
        case("documents", text__isolate=True, train__precision="bf16"),
        case(
            *("moe of DeepSeek", "moe", "mla"),
            moe__router="sigmoid",
            moe__bias_speed=0.001,
            moe__groups=2,
            moe__top_groups=1,
            moe__shared=1,
            decoder__kv_heads=4,
            train__precision="bf16",
        ),
        case("moe with a capacity", "moe", moe__capacity=1.0, moe__balance=0.01, moe__z_loss=0.001),
        case("moe, experts choose", "moe", moe__router="expert_choice", moe__balance=0.0),
        case("deterministic delta_net", "delta_net", run__deterministic=True, text__isolate=True),
        case("deterministic flash", "flash", run__deterministic=True, train__precision="bf16"),
        case("states in 8 bits", adamw__state__first="8bit", adamw__state__second="8bit"),
        case("items", "prefix", "scans:Scans"),
        case("images", "image", "drawn:Drawn", **{**drawn.OPTIONS, "train.precision": "bf16"}),
        case("images of one size", "image", "drawn:Squares", **{**drawn.OPTIONS, **drawn.SQUARE}),
        case(
            "once for each image",
            *("image", "drawn:Drawn", "freeze"),
            **{**drawn.OPTIONS, "image.once": True, "image.cache": f"{folder}/kept"},
            freeze__parameters=["*.encoders.image.vision.*"],
        ),
        case("images in tiles", "image_tiles", "cross_attention", "drawn:Tiled", **drawn.TILES),
        case("items beside tokens", "cross_attention", "scans:Scans", cross_attention__every=1),
        case("mot", "mot", "scans:Scans"),
        case("moe of modalities", "moma", "moe", "scans:Scans", moe__capacity=1.0),
        case("saved", checkpoint__every=2),
        case("saved twice", checkpoint__every=2, checkpoint__format="both"),
        case("saved in the background", checkpoint__every=2, checkpoint__asynchronous=True),
        {**case("batches from the device", text__isolate=True), "does": "moves"},
        {**case("a plugin that reads"), "does": "reads"},
        {**case("a plugin that mixes devices"), "does": "mixes"},
        {"name": "plugins check flash", "forge": ["plugins", "check", "flash"]},
        {"name": "plugins check varlen", "forge": ["plugins", "check", "varlen"]},
        {
            "name": "verify",
            "forge": ["verify", "quickstart", "--steps", "2", *_set(TINY, **{"text.path": f"{folder}/text"})],
        },
    ]


TINY = {"decoder.dim": 32, "decoder.layers": 1, "decoder.heads": 4, "train.sequence": 32, "train.global_batch": 4}
DEFAULTS = (
    *("adamw", "console", "copies", "cosine", "cross_entropy", "decoder", "gqa", "lm_head", "mfu", "next_token"),
    *("out_of_memory", "sdpa", "sequential", "swiglu", "tensorboard", "text", "tokenizer"),
)
"""Plugins that every run has in which no other takes their place."""
WATCHERS = ("anomaly", "capture", "csv", "health", "resources", "sample", "signals", "statistics", "watchdog")
"""Plugins that look on; what makes the host wait is noted with its line, whoever else is there."""
TOGETHER = (
    *("tokens", "classify", "token_classify", "embed", "reward", "dpo", "text_labels", "text_pairs", "sft"),
    *("prefix", "cross_attention", "mot", "moma"),
)
"""Plugins that only work with each other, or with each other's records."""


def _set(*settings: dict[str, Any], **more: Any) -> list[str]:
    values = {key: value for one in (*settings, more) for key, value in one.items()}
    return [word for key, value in values.items() for word in ("-s", f"{key}={value}")]


def _heads(folder: str) -> list[Case]:
    pairs, labels, longer = f"{folder}/pairs.jsonl", f"{folder}/labels.jsonl", {"train__micro_batch": 4}
    preferred: dict[str, Any] = {"text_pairs__path": f"{folder}/preferred.jsonl", "text_pairs__template": "plain"}
    held: dict[str, Any] = {"text_pairs__held_out": 0.25}
    chats: dict[str, Any] = {"sft__path": f"{folder}/chats.jsonl", "sft__template": "plain", "sft__held_out": 0.25}
    room: dict[str, Any] = {"train__sequence": 128, "decoder__max_sequence": 128}
    return [
        case(
            "classify",
            "text_labels",
            "classify",
            text_labels__path=labels,
            text_labels__held_out=0.25,
            classify__classes=["a", "b"],
        ),
        case("embed", "text_pairs", "embed", text_pairs__path=pairs, text_pairs__kind="embedding", **longer, **held),
        case("reward", "text_pairs", "reward", **preferred, **room, **held),
        case("dpo", "text_pairs", "dpo", dpo__loss="simpo", **preferred, **room, **held),
        case("sft", "sft", **chats, **room, train__precision="bf16"),
    ]


TWO_RANKS = [
    case("fsdp2", "fsdp2", train__precision="bf16", train__micro_batch=1),
    case("fsdp2, offload", "fsdp2", fsdp2__offload=True, train__micro_batch=1, checkpoint__every=2),
    case("zero1", "zero1", train__precision="bf16", train__micro_batch=1),
    case("ddp", "ddp", train__micro_batch=1),
    case("tp", "tp", parallel__tp=2, train__precision="bf16"),
    case("ep", "moe", "ep", parallel__ep=2, train__precision="bf16", train__micro_batch=1),
    case("cp", "cp", "eager", parallel__cp=2, cp__method="ring", train__precision="bf16"),
    case("pp", "pp", parallel__pp=2, train__precision="bf16"),
    {**case("a rank that the others wait for", "ddp", "health", health__every=4, health__slow=1e9), "does": "dawdles"},
]
