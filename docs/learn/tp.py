# %% [markdown]
# # Tensor and sequence parallelism: every rank computes a part of every layer
#
# FSDP2 divides what ranks *keep*. Tensor parallelism divides what they *compute*: all ranks work on the same rows,
# and each has a part of every matrix, which no other rank ever sees.
#
# ![A block: hidden states are gathered, multiplied by parts of the matrices, and summed and divided again](tp.svg)
#
# - The first matrices of a block (`q`, `k`, `v`; `gate`, `up`) are split by *columns*: each rank computes some of the
#   features, or some of the heads, for all tokens.
# - The last one (`o`; `down`) is split by *rows*: each rank multiplies its features by its rows, and has one part of
#   every sum. Only the sum over ranks is the output.
# - Between blocks, with *sequence parallelism*, each rank keeps the hidden states of half of the tokens. Norms and
#   residual sums look at one token at a time, so they need no other rank.
#
# So a block begins with an **all-gather** (the tokens of all ranks) and ends with a **reduce-scatter** (the sum of
# the parts, of which each rank keeps its tokens). In the backward pass, each becomes the other: the gradient of a
# gather is a sum, and the gradient of a sum is a gather.

# %% setup

# %% [markdown]
# ## A real step

# %%
step = forge("trace learn.toml --nproc 2 -p tp -s parallel.tp=2 -s train.micro_batch=4")
first = [call for call in step["calls"] if call["rank"] == 0]
show(first)

# %% [markdown]
# - **forward**: the embedding table is split by its rows, the vocabulary. A rank looks up the tokens that it has and
#   gives zero for the others, so the sum over ranks is the embedding. Then each block gathers and reduces, and the
#   head gathers once more.
# - **forward, all_reduce**: the head is split by the vocabulary, and a softmax needs all of it. Instead of gathering
#   logits, ranks exchange three numbers per token: the largest logit, the sum of the exponentials, and the logit of
#   the target. With 100,000 tokens in the vocabulary this is the difference between kilobytes and gigabytes.
# - **backward**: the same calls in reverse, with gather and reduce exchanged.
#   The softmax has no call there: every rank has the sum of the exponentials from the forward pass, and so the gradient
#   of its own logits.
# - **gradients, all_reduce by tp**: each rank computed the norms for its half of the tokens, so it has one part of
#   their gradients. A matrix needs no such sum: its rank saw all tokens, and nobody else has that part of it.
# - **all_reduce by forge**: the gradient norm, and whether some rank was asked to stop. Both ranks have the same
#   rows, so there are no tokens to count.
#
# ## The formula
#
# Every gather and every reduction of a block has the hidden states of the micro-batch.

# %%
hidden = ROWS * SEQUENCE * DIM * FP32
borders = 2 * LAYERS + 1  # attention and feed-forward of each layer; and the embedding, or the head
for kind in ("all_gather", "reduce_scatter"):
    for phase in ("forward", "backward"):
        calls = [call for call in first if (call["kind"], call["phase"]) == (kind, phase)]
        assert [call["bytes"] for call in calls] == [hidden] * borders
        print(f"{phase:8} {kind:14} {len(calls)} × {hidden:,} B")

norms = (2 * LAYERS + 1) * DIM * FP32
softmax = ROWS * SEQUENCE * 3 * FP32
sums = [call for call in first if call["kind"] == "all_reduce" and call["plugin"] == "tp"]
assert sum(call["bytes"] for call in sums if call["phase"] == "gradients") == norms
assert sum(call["bytes"] for call in sums if call["phase"] == "forward") == softmax
print(f"norms {norms:,} B, softmax {softmax:,} B")

# %% [markdown]
# Compare with [FSDP2](fsdp2.md): its bytes grow with the weights, and these with the *tokens*, for each layer, in
# both passes, and each call waits for the one before. That is why `tp` stays within a machine with fast links, and
# `fsdp2` spans machines. Together, `tp` divides each weight first and `fsdp2` divides the rest: its all-gathers bring
# back one rank's part of the layer, and never that of another tensor-parallel rank.
#
# ## Break it
#
# The sum of the norms' gradients is the collective that is forgotten most often: it has a few bytes, and everything
# else works without it. This plugin leaves out all that happens between backward pass and optimizer.

# %%
Path("broken.py").write_text('''
from forge_train import Plugin, hookimpl


class Broken(Plugin):
    """Leaves gradients unfinished."""

    @hookimpl
    def on_start(self, model):
        model.after_backward = lambda: None
''')
judge(forge("verify learn.toml --nproc 2 -p tp -s parallel.tp=2 -p ./broken.py --steps 2"))

# %% [markdown]
# `forge verify` names the parameters, and the axis along which their gradients should have been summed. The ranks
# drift apart: *replicas* are parameters that should be equal on all ranks, bit for bit.
#
# ## Try
#
# - Hidden states stay whole between blocks. Which kinds of collectives remain, and do bytes change?
#   `forge trace learn.toml --nproc 2 -p tp -s parallel.tp=2 -s train.micro_batch=4 -s tp.sequence_parallel=false`
# - Both together, without `-s train.micro_batch=4`. The column of axes tells whose collective each is.
#   `forge trace learn.toml --nproc 4 -p tp -p fsdp2 -s parallel.tp=2 --json`
#
# <details><summary>Answers</summary>
#
# - All-reduces alone, of the same 16,384 B, each in the place of a reduce_scatter and an all_gather. An all-reduce
#   sends as much as both, so the bytes sent are the same. The sum of the norms' gradients goes away: each rank has all
#   tokens.
# - `dp_shard` is FSDP2's, `tp` is tensor parallelism's: see [All together](together.md).
#
# </details>
