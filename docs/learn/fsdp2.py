# %% [markdown]
# # FSDP2: every rank keeps a share of every weight
#
# Two ranks train one model on different rows. With plain data parallelism each of them keeps all weights, gradients
# and optimizer states: 16 bytes per weight with AdamW in fp32. FSDP2 has each rank keep half of each of these, and
# fetch the other half only while a layer computes.
#
# ![Halves of the weights are gathered, used and dropped; gradients are averaged and divided](fsdp2.svg)
#
# - **all-gather**: every rank sends its share to all others, and all have the whole. Before a layer's forward pass,
#   and again before its backward pass, because the other half was dropped in between.
# - **reduce-scatter**: every rank has gradients of *all* weights, but of *its own rows*. They are averaged over
#   ranks, and each rank receives the average of its share alone. That is all its optimizer needs.

# %% setup

# %% [markdown]
# ## A real step
#
# `forge trace` trains up to a step on two processes of this machine, and records each collective of that step. On a
# terminal it prints totals; with `--json`, which the helper `forge` adds, it has every call.

# %%
step = forge("trace learn.toml --nproc 2 -p fsdp2")
first = [call for call in step["calls"] if call["rank"] == 0]
show(first)

# %% [markdown]
# Read the table from top to bottom; it is the step of rank 0, in order.
#
# - **forward, all_gather**: five groups of weights. The norm before the head (128 B) belongs to the model itself;
#   embedding, each layer and head are groups of their own. The column of modules says where the rank was when it
#   asked.
# - **backward, reduce_scatter**: the same five groups, as soon as the backward pass has left a group's module: head,
#   layers in reverse, embedding. The last norm is a parameter of the model itself, which is left last of all, so its
#   128 B come late.
# - **backward, all_gather**: only three, `layers.1`, `layers.0` and the embedding. The head and the last norm were not
#   dropped, as the backward pass begins with them. FSDP2 asks *ahead*: the gather for a group starts while the one
#   after it still computes, so the column of modules names a place before the group that is gathered. This hides the
#   transfer behind work. The table of the embedding is gathered although its gradient does not need it: FSDP2 does
#   not know what a module computes.
# - **all_reduce by forge**: a few bytes. How many tokens count in the loss of this step and how many there are, in
#   order that each has the same weight on whichever rank; the squared gradient norm for clipping; the loss for the
#   log; and whether some rank was asked to stop.
# - No collective spreads the update: each rank updates its shares, and the next forward pass gathers them.
#
# ## The formula
#
# A layer has four square matrices in its attention, three matrices of four times the width in its feed-forward block,
# and two norms.

# %%
layer = (4 * DIM**2 + 3 * DIM * 4 * DIM + 2 * DIM) * FP32
table, norm = VOCABULARY * DIM * FP32, DIM * FP32  # the embedding, as large as the head; and the last norm


def measured(kind, phase):
    return sum(call["bytes"] for call in first if (call["kind"], call["phase"]) == (kind, phase))


forward = norm + table + LAYERS * layer + table
backward = table + LAYERS * layer
assert measured("all_gather", "forward") == forward
assert measured("all_gather", "backward") == backward
assert measured("reduce_scatter", "backward") == forward
print(f"{forward:,} B gathered forward, {backward:,} B backward, {forward:,} B reduced, as computed")

# %% [markdown]
# Over *n* ranks, each sends (n − 1)/n of these bytes. An all-reduce, as in plain data parallelism, is a
# reduce-scatter and an all-gather: two times the weights. FSDP2 sends three times the weights, and keeps 1/n of the
# memory.

# %%
sent = sum(call["sent"] for call in first if call["plugin"] == "fsdp2")
assert sent == (forward + backward + forward) * (2 - 1) / 2
print(f"rank 0 sends {sent:,.0f} B in this step")

# %% [markdown]
# ## Break it
#
# This plugin tells FSDP2 not to reduce the gradients of one layer, as somebody does who accumulates gradients and
# forgets to switch synchronization on again. No error is raised, and the loss still falls.

# %%
Path("broken.py").write_text('''
from forge_train import Plugin, hookimpl


class Broken(Plugin):
    """Leaves the gradients of one layer as each rank has them."""

    @hookimpl
    def on_start(self, job, model):
        def skip(layer, args):
            layer.set_requires_gradient_sync(False)

        if job.dist.world > 1:
            model.parts[0].layers["1"].register_forward_pre_hook(skip)
''')
broken = forge("trace learn.toml --nproc 2 -p fsdp2 -p ./broken.py")
for name, found in (("healthy", step), ("broken", broken)):
    sums = {one["kind"]: one for one in found["collectives"] if one["rank"] == 0 and one["plugin"] == "fsdp2"}
    print(f"{name:8} {sums['reduce_scatter']['count']} reduce-scatters, {sums['reduce_scatter']['bytes']:,} B")

# %% [markdown]
# One reduction is missing, and with it exactly the bytes of one layer. `forge verify` needs no list of collectives:
# it compares the step with the same step on one process.

# %%
judge(forge("verify learn.toml --nproc 2 -p fsdp2 -p ./broken.py --steps 2"))

# %% [markdown]
# ## Try
#
# - `-s fsdp2.reshard=never` (ZeRO-2) keeps gathered weights until the backward pass has used them. Which rows of the
#   table go away?
# - `-s train.micro_batch=1` makes two micro-batches. How many times is a layer gathered, and how many times reduced?
# - `--out trace.html` shows the same step on a time line.
#
# <details><summary>Answers</summary>
#
# - The three gathers of the backward pass.
# - Each layer is gathered four times, in both passes of both micro-batches (16 gathers in all), and reduced once, after
#   the last.
#
# </details>
