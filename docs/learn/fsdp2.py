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
# `forge trace` trains up to a step on two processes of this machine, and records each collective of that step.
# On the screen it shows totals; the rows below are in its `--json`, which the helper `forge` asks for, and on the page
# of `--out trace.html`.

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
# - **backward, reduce_scatter**: the same five groups. Head and layers come in reverse, as soon as the gradients of a
#   group are complete. FSDP2 knows that from the gradient of the group's input. The whole model and the embedding have
#   tokens as input, which get no gradient; so the last norm (128 B) and the embedding wait for the end of the backward
#   pass. It was in the embedding last, so both rows name `embedding`.
# - **backward, all_gather**: only three: `layers.1`, `layers.0`, and the embedding. The head and the last norm were not
#   dropped, as the backward pass begins with them. FSDP2 asks *ahead*: when the backward pass arrives at a group, the
#   group after it in that pass is gathered. The column names the module that it has just left: none for `layers.1`
#   (asked for at the head), `norm` for `layers.0` (at `layers.1`), and `layers.1` for the embedding (at `layers.0`).
#   This hides the transfer behind work. The gradient of an embedding does not need its weights; FSDP2 treats all groups
#   alike, and gathers it nevertheless.
# - **update**: no all_gather. Each rank updates its share, and the next forward pass's gathers bring it to the others.
# - **all_reduce by forge**: a few bytes. How many tokens count in this step and the sum of their weights (two numbers
#   of 8 B), in order that each has the same weight on whichever rank; the squared gradient norm for clipping; the loss
#   for the log; and whether some rank was asked to stop.
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
# - ZeRO-2 keeps gathered weights until the backward pass has used them. Which rows of the table go away?
#   `forge trace learn.toml --nproc 2 -p fsdp2 -s fsdp2.reshard=never --json`
# - Two micro-batches. How many times is a layer gathered, and how many times reduced?
#   `forge trace learn.toml --nproc 2 -p fsdp2 -s train.micro_batch=1 --json`
# - The same step on a time line: `forge trace learn.toml --nproc 2 -p fsdp2 --out trace.html`
#
# <details><summary>Answers</summary>
#
# - The three all_gathers of the backward pass.
# - A layer is gathered four times, once for each pass of each micro-batch, and reduced once, in the last one.
#
# </details>
