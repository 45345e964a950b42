# %% [markdown]
# # Data parallelism and ZeRO: every rank has its own rows
#
# The simplest way to use two devices: each has the whole model, and computes its half of the rows. The gradient of a
# mean over all rows is the mean of both halves' gradients. So the ranks exchange gradients once a step, and then take
# the same optimizer step.
#
# ![Both ranks compute on their rows, average gradients with one all-reduce, and take the same step](ddp.svg)
#
# An **all-reduce** gives every rank the sum of what all ranks have. It is made of two collectives, and *ZeRO* takes
# it apart:
#
# - a **reduce-scatter** leaves each rank with the sum of a share of the gradients. That is enough to update the same
#   share of the weights, with only a share of the optimizer's state (ZeRO-1).
# - an **all-gather** gives everybody the updated shares of all others.
#
# Both together send as much as the all-reduce, and AdamW's two states are kept once instead of on every rank.

# %% setup

# %% [markdown]
# ## Two real steps
#
# First with all-reduce, the plugin `ddp`; then with ZeRO-1, the plugin `zero1`.

# %%
plain = forge("trace learn.toml --nproc 2 -p ddp")
show([call for call in plain["calls"] if call["rank"] == 0])

# %%
zero = forge("trace learn.toml --nproc 2 -p zero1")
show([call for call in zero["calls"] if call["rank"] == 0])

# %% [markdown]
# - **ddp**: all gradients in one bucket, once they are complete. The last to come is that of the embedding, so the
#   rank is there when it calls. A larger model has several buckets, and the first are on their way while the backward
#   pass still computes.
# - **zero1**: weights are gathered group by group in the forward pass, and stay until the step ends; gradients are
#   reduced in the backward pass, as soon as a group's are complete.
# - **all_reduce by forge**: how many tokens count in this step, the loss for the log, and whether some rank was asked
#   to stop. With `zero1` the gradient norm too: no rank has all gradients. With `ddp` each rank has them all, and
#   computes the norm alone.
#
# ## The formula

# %%
layer = (4 * DIM**2 + 3 * DIM * 4 * DIM + 2 * DIM) * FP32  # attention, feed-forward, and two norms
weights = 2 * VOCABULARY * DIM * FP32 + LAYERS * layer + DIM * FP32  # embedding and head, layers, last norm


def sums(step, plugin):
    return {one["kind"]: one for one in step["collectives"] if one["rank"] == 0 and one["plugin"] == plugin}


reduced, shared = sums(plain, "ddp"), sums(zero, "zero1")
assert reduced["all_reduce"]["bytes"] == weights
assert reduced["all_reduce"]["sent"] == 2 * weights * (2 - 1) / 2
assert shared["all_gather"]["bytes"] == shared["reduce_scatter"]["bytes"] == weights
assert shared["all_gather"]["sent"] + shared["reduce_scatter"]["sent"] == reduced["all_reduce"]["sent"]
print(f"{weights:,} B of weights; rank 0 sends {reduced['all_reduce']['sent']:,.0f} B with either plugin")

# %% [markdown]
# With *n* ranks, each sends 2 (n − 1)/n times the weights, which is never more than twice, however many ranks there
# are. What a rank keeps per weight in fp32:
#
# | | weight | gradient | AdamW | with 8 ranks |
# |---|---|---|---|---|
# | `ddp` | 4 | 4 | 8 | 16 B |
# | `zero1` | 4 / n between steps, 4 in a step | 4 | 8 / n | 9 B in a step |
# | [`fsdp2`](fsdp2.md) | 4 / n | 4 / n | 8 / n | 2 B |
#
# ## Break it
#
# This plugin lets `ddp` average, and then gives every rank the gradients of its own rows back.

# %%
Path("broken.py").write_text('''
from forge_train import Plugin, hookimpl


class Broken(Plugin):
    """Leaves every rank the gradients of its own rows."""

    @hookimpl
    def on_start(self, model):
        own, finish = {}, model.after_backward

        def keep(weight):
            own[weight] = weight.grad.clone()

        def restore():
            finish()
            for weight, gradient in own.items():
                weight.grad = gradient

        model.after_backward = restore
        for weight in model.parts[0].parameters():
            weight.register_post_accumulate_grad_hook(keep)
''')
judge(forge("verify learn.toml --nproc 2 -p ddp -p ./broken.py --steps 2"))

# %% [markdown]
# Every rank trains, the loss falls on each of them, and after a while there are two different models. The first check
# to look at is *replicas*: parameters that must be equal on all ranks, bit for bit. The checkpoint has the weights of
# only one of the two models, so that line follows from the same fault.
#
# ## Try
#
# - Two micro-batches. Is anything sent more often?
#   `forge trace learn.toml --nproc 2 -p ddp -s train.micro_batch=1 --json`
# - Buckets of 0.05 MiB. Which gradients are sent first?
#   `forge trace learn.toml --nproc 2 -p ddp -s ddp.bucket_mb=0.05 --json`
#
# <details><summary>Answers</summary>
#
# - No. Gradients add up on each rank, and are sent in the backward pass of the last micro-batch alone.
# - Those of the head, the last norm and `layers.1.feed_forward.down` (57,472 B), which the backward pass completes
#   first. Those of the embedding come last.
#
# </details>
