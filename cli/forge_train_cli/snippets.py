"""Small working implementations of each hook, from which `forge plugins new --hook` starts a plugin."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Snippet:
    """One hook's part of a plugin's source.

    Args:
        body: the decorated method and everything that belongs to it, indented for a class.
        fields: options of the section, indented for it.
        imports: names from `forge_train`, or of `KIT`, that are used when the module is imported.
        types: likewise, that are used only in annotations.
        torch: whether annotations use torch.
    """

    body: str
    fields: str = ""
    imports: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    torch: bool = False


KIT = {
    "AttentionKernel": "layers",
    "AttentionOptions": "layers",
    "FeedForward": "layers",
    "KernelCapabilities": "capabilities",
    "Layer": "layers",
    "LossFunction": "losses",
}
"""Name → module of the kit."""

SNIPPETS = {
    "on_step": Snippet(
        fields='''\
        decay: Annotated[float, Ge(0), Lt(1)] = 0.9
        """Share of the running mean that a step keeps."""
''',
        imports=("Ge", "Lt"),
        types=("StepResult",),
        torch=True,
        body='''\
    mean: torch.Tensor | None = None
    """Of the losses so far. It stays a tensor: reading it here would make every step wait for the device."""

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        if step.skipped:
            return
        loss = step.loss.detach()
        self.mean = loss if self.mean is None else self.mean.lerp(loss, 1 - self.config.decay)
        step.add("mean_loss", self.mean)

    def state_dict(self) -> dict[str, Any]:
        """Saved with every checkpoint."""
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]
''',
    ),
    "on_gradients": Snippet(
        fields='''\
        limit: Annotated[float, Gt(0)] = 100.0
        """Gradient norm above which a step is skipped."""
''',
        imports=("Gt",),
        types=("Update",),
        body="""\
    @hookimpl
    def on_gradients(self, update: Update) -> None:
        if float(update.grad_norm) > self.config.limit:
            update.veto(f"gradient norm {float(update.grad_norm):.3g}")
""",
    ),
    "on_log": Snippet(
        types=("Evaluation", "LogRecord"),
        body="""\
    @hookimpl
    def on_log(self, record: LogRecord | Evaluation) -> None:
        logging.getLogger("forge_train").info("step %d: %s", record.step, dict(record.metrics))
""",
    ),
    "around": Snippet(
        types=("Job", "Span", "SpanName"),
        body="""\
    @hookimpl
    def around(self, span: SpanName, job: Job) -> Span | None:
        if span == "step":
            return None
        from torch.profiler import record_function

        return lambda: record_function(span)
""",
    ),
    "optimizer": Snippet(
        fields='''\
        lr: Annotated[float, Gt(0)] = 1e-2
        """Learning rate."""
        momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
        """Decay of the running mean of the gradients."""
''',
        imports=("Ge", "Gt", "Lt"),
        types=("Job", "Model"),
        torch=True,
        body="""\
    @hookimpl
    def optimizer(self, model: Model, job: Job) -> torch.optim.Optimizer:
        import torch

        return torch.optim.SGD(model.parameters(), lr=self.config.lr, momentum=self.config.momentum)
""",
    ),
    "lr_schedule": Snippet(
        types=("Job", "Schedule"),
        torch=True,
        body="""\
    @hookimpl
    def lr_schedule(self, optimizer: torch.optim.Optimizer, job: Job) -> Schedule:
        from torch.optim.lr_scheduler import LambdaLR

        return LambdaLR(optimizer, lambda step: 1 - step / max(job.steps, 1))
""",
    ),
    "loss": Snippet(
        types=("Job", "LossFunction"),
        torch=True,
        body="""\
    @hookimpl
    def loss(self, job: Job) -> LossFunction:
        from torch.nn.functional import cross_entropy

        def summed(hidden: torch.Tensor, head: torch.nn.Module, labels: torch.Tensor) -> torch.Tensor:
            logits = head(hidden).float().flatten(0, 1)
            return cross_entropy(logits, labels.flatten(), ignore_index=MASKED, reduction="sum")

        return summed
""",
        imports=("MASKED",),
    ),
    "prepare_batch": Snippet(
        fields='''\
        skip: Annotated[int, Ge(0)] = 4
        """Tokens at the beginning of each sequence that are read, and not trained on."""
''',
        imports=("MASKED", "BatchPhase", "Ge", "PrepareBatch"),
        types=("Batch", "Job"),
        body="""\
    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch:
        def mask(batch: Batch) -> Batch:
            labels = batch.labels.clone()
            labels[:, : self.config.skip] = MASKED
            return replace(batch, labels=labels)

        return PrepareBatch(BatchPhase.MASK, mask)
""",
    ),
    "parallelize": Snippet(
        fields='''\
        name: str = "norm"
        """Parameters with this in their name keep their initial values."""
''',
        imports=("Applied", "Phase", "Transform"),
        types=("Job",),
        torch=True,
        body="""\
    @hookimpl
    def parallelize(self, job: Job) -> Transform:
        return Transform(Phase.ADAPT, "freeze", self._freeze)

    def _freeze(self, part: torch.nn.Module) -> Applied:
        matched = {name: parameter for name, parameter in part.named_parameters() if self.config.name in name}
        for parameter in matched.values():
            parameter.requires_grad_(False)
        return Applied(part, tuple(matched), f"{len(matched)} parameters frozen")
""",
    ),
    "attention_kernel": Snippet(
        imports=("KernelCapabilities",),
        types=("AttentionKernel", "AttentionOptions", "Job"),
        torch=True,
        body="""\
    kernel_capabilities = KernelCapabilities(documents=True)

    @hookimpl
    def attention_kernel(self, job: Job) -> AttentionKernel:
        import torch

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
        ) -> torch.Tensor:
            options.check(self.kernel_capabilities, query, key)
            group = query.shape[2] // key.shape[2]
            key, value = key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)
            logits = torch.einsum("bqhd,bkhd->bhqk", query, key) * options.factor(query)
            seen = logits.new_ones(logits.shape[-2:], dtype=torch.bool).tril(key.shape[1] - query.shape[1])
            if (ids := options.document_ids) is not None:
                seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
            weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
            return torch.einsum("bhqk,bkhd->bqhd", weights, value)

        return attend
""",
    ),
    "feed_forward": Snippet(
        types=("FeedForward", "Job", "Layer"),
        body="""\
    @hookimpl
    def feed_forward(self, layer: Layer, job: Job) -> FeedForward:
        from torch import nn

        from forge_train_kit.model import Linear

        return nn.Sequential(
            Linear(layer.dim, layer.ffn_dim, bias=layer.bias, std=layer.std),
            nn.GELU(),
            Linear(layer.ffn_dim, layer.dim, bias=layer.bias, std=layer.output_std),
        )
""",
    ),
}
