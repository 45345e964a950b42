"""Facts about plugins that Forge's tools read."""

from __future__ import annotations

from forge_train_kit.facts import Fact

PER_UNIT = Fact(
    "plan.per_unit",
    bool,
    "True if each further identical unit of the model adds the same amount to what the plugin has a step store, send "
    "and compute: `forge plan` then rehearses a few of many such units. Applies to plugins that build units or see all "
    "of them (`build_model`, `attention`, `feed_forward`, `fusion`, `modalities`, `task`, `executor`, `optimizer`, "
    "`parallelize`). False for gradients sent in buckets of a fixed size, or a layer that changes behaviour from some "
    "index on.",
)
EXAMPLE = Fact(
    "check.example",
    tuple[str, ...],
    "Assignments, as of `--set`, with which `forge plugins check` tries the plugin where its defaults do not train: a "
    "required key, or `train.precision=fp16`; and `plugins=a,b` for others that it is tried with.",
)
ROUNDS = Fact(
    "verify.rounds",
    float,
    "The largest relative error of a value that the plugin rounds below `train.precision`. `forge verify` allows for "
    "it, and has `--against train.precision=…` compare with a run without the plugin.",
)
DISPLAY = Fact(
    "bench.display",
    bool,
    "True if the plugin only displays the progress of a run. `forge bench` leaves it out, and `forge verify` does not "
    "tell it of steps.",
)
PEAK = Fact(
    "plan.peak",
    str,
    "Key of a cluster file's `[peak]`: `forge plan --search` counts the matrix products of the modules that the "
    "plugin's transforms match at that peak, not at that of `train.precision`.",
)
SEARCH = Fact(
    "plan.search",
    tuple[str, ...],
    "What `forge plan --search` may choose of the plugin, each as assignments separated by `;` "
    "(`mine.mode=full;mine.every=2`); an empty text leaves its options as they are configured. The search enables a "
    "plugin that provides an axis where the axis is above 1, and tries others with and without. It takes one of "
    "several that provide the same.",
    literal=True,
)
