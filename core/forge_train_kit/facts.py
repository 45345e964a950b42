"""Facts about plugins that the kit's libraries read."""

from __future__ import annotations

from forge_train import Fact

ARCHITECTURES = Fact(
    "hf.architectures",
    tuple[str, ...],
    "Architectures of a `config.json` that the plugin's `import_hf` reads; `*` if it can't list them. The message "
    "about an unknown architecture names the plugins that know it.",
    literal=True,
)
WEIGHS_LABELS = Fact(
    "task.weighs_labels",
    bool,
    "True if the task that the plugin provides multiplies the loss of each label by the target `label_weights`, as "
    "`forge_train_kit.losses.batch_weight` and `batch_loss` do. Data with weights are refused by every other task.",
)
