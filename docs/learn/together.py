# %% [markdown]
# # All together: FSDP2 × tensor parallelism, and two axes more
#
# Each technique works along an *axis* of a mesh of ranks. With `parallel.tp=2` on four ranks, rank 0 and rank 1
# compute the same rows together, and so do 2 and 3. Ranks 0 and 2 have the same part of every matrix, and different
# rows: they are the pair along `dp_shard`, over which FSDP2 works.
#
# ![Four ranks: neighbours share rows along tp, and every second one parts of matrices](together.svg)
#
# Neighbouring ranks are on the same machine, so the axis with the most traffic, `tp`, is the innermost one.

# %% setup

# %% [markdown]
# ## A real step

# %%
layout = "--nproc 4 -p tp -p fsdp2 -s parallel.tp=2"
step = forge(f"trace learn.toml {layout}")
first = [call for call in step["calls"] if call["rank"] == 0]
show(first)

# %% [markdown]
# This is the step of rank 0, in order. Take one layer of the forward pass: FSDP2 gathers the other half of *this rank's
# part* of its weights; then each block gathers tokens along `tp` and sums along `tp`. With whom?

# %%
for axis in ("dp_shard", "tp"):
    for rank in range(4):
        groups = {tuple(call["ranks"]) for call in step["calls"] if call["rank"] == rank and call["axis"] == axis}
        print(f"{axis:8} rank {rank} talks with {', '.join(map(str, sorted(groups)))}")

# %% [markdown]
# Every collective of this step, and what it is for:
#
# | collective | axis | what for |
# |---|---|---|
# | all_gather by `fsdp2` | `dp_shard` | the other half of this rank's part of the weights, before each pass |
# | reduce_scatter by `fsdp2` | `dp_shard` | the mean of both ranks' gradients; each receives its half |
# | all_gather by `tp`, forward | `tp` | the tokens of both ranks, before a block |
# | reduce_scatter by `tp`, forward | `tp` | the sum of outputs of a block, or the embedding; each gets its tokens |
# | both, backward | `tp` | the same for gradients, with the kinds exchanged |
# | all_reduce by `tp`, forward | `tp` | the softmax over a vocabulary that is split |
# | all_reduce by `tp`, gradients | `tp` | gradients of norms, of which each rank has the part of its tokens |
# | all_reduce by `forge`, data | `dp_shard` | how many tokens count in this step, and the sum of their weights |
# | all_reduce by `forge`, `total_norm` | see column | squared gradient norms; see below |
# | all_reduce by `forge`, gradients, last | `dp_shard` | the loss, for the log |
# | all_reduce by `forge`, update | all ranks | whether some rank was asked to stop |
#
# The squared norm takes three calls of 4 B. Gradients that are split along both axes are summed over one axis and then
# over the other; those of the norms, which `tp` does not split, over `dp_shard` alone.
#
# The gradients of the norms along `tp` have 320 B and not 640, as on two ranks with `tp` alone: by then, FSDP2 has
# left each rank half of them.
#
# ## The formula
#
# Matrices are divided by two along `tp` before FSDP2 sees them; norms are whole. The hidden states are those of the
# two rows that a pair shares.

# %%
layer = ((4 * DIM**2 + 3 * DIM * 4 * DIM) // 2 + 2 * DIM) * FP32
table, norm = VOCABULARY // 2 * DIM * FP32, DIM * FP32
hidden = ROWS // 2 * SEQUENCE * DIM * FP32


def measured(kind, phase, plugin):
    return [call["bytes"] for call in first if (call["kind"], call["phase"], call["plugin"]) == (kind, phase, plugin)]


weights = norm + 2 * table + LAYERS * layer
assert sum(measured("all_gather", "forward", "fsdp2")) == weights
assert sum(measured("reduce_scatter", "backward", "fsdp2")) == weights
for kind in ("all_gather", "reduce_scatter"):
    assert measured(kind, "forward", "tp") == measured(kind, "backward", "tp") == [hidden] * (2 * LAYERS + 1)
print(f"weights {weights:,} B along dp_shard, hidden states {hidden:,} B for each call along tp")

# %% [markdown]
# ## Four axes
#
# A pipeline and context parallelism add two more axes, and 16 ranks. `forge plan` composes such a run on one process,
# without weights, and counts what one rank sends along each axis in a step:

# %%
four = "-p pp -p cp -s parallel.pp=2 -s parallel.cp=2 -s decoder.layers=4 -s train.micro_batch=1"
plan = forge(f"plan learn.toml --world 16 {layout.removeprefix('--nproc 4')} {four}")
print(" × ".join(f"{axis} {size}" for axis, size in plan["meshes"]["dense"].items() if size > 1))
for one in plan["communication"]:
    print(f"{one['kind']:14} {one['axis']:20} {one['count']:3} × of {one['ranks']} ranks {one['bytes']:9,.0f} B sent")

# %% [markdown]
# Weights are gathered over `dp_shard × cp`: ranks along either axis have different tokens and need the same weights.
# Across `pp`, ranks send hidden states to the next stage and nothing else. Nothing has to be said about the order of
# all this, because [the order is fixed](../parallelism-order.md).
#
# ## Break it
#
# What if tensor parallelism came *after* FSDP2? This plugin changes the phase of `tp`.

# %%
Path("broken.py").write_text('''
from dataclasses import replace

from forge_train import Phase, hookimpl
from forge_train_plugins.parallel.tp import TensorParallel


class Late(TensorParallel):
    """Splits matrices after FSDP2 has sharded them."""

    @hookimpl
    def parallelize(self, job):
        transform = super().parallelize(job)
        return transform and replace(transform, phase=Phase.SHARD, after=("data_parallel",))
''')
forge(f"verify learn.toml {layout.replace('-p tp', '-p ./broken.py')}")

# %% [markdown]
# The composition is refused before a step is taken, with exit code 2. Had it been accepted, each rank would have split
# a shard instead of a matrix, and computed with the wrong columns.
#
# Now find a fault yourself: take the broken plugin of [FSDP2](fsdp2.md) and that of [tensor parallelism](tp.md), run
# each on this layout, and say by `forge trace` and `forge verify` which axis each of them has forgotten. Both are
# called `broken.py` and `Broken`: save them as `one.py` and `two.py`, and trace with `-p ./one.py`, then
# with `-p ./two.py`.
#
# <details><summary>Answer</summary>
#
# That of FSDP2 has forgotten `dp_shard`: in the trace, `fsdp2` has four calls of reduce_scatter along it and not five.
# `forge verify` names the parameters without a gradient, and no axis: FSDP2 keeps what it has not reduced to itself.
# Along `tp`, the sum of the norms' gradients has 128 B less: the two norms of that layer have none to sum.
#
# That of tensor parallelism has forgotten `tp`: the all_reduce of the norms' gradients along it is missing.
# `forge verify` names the norms, and the axis.
#
# </details>
#
# ## Try
#
# - Hybrid sharding, without `-p tp`. Which collective is new, over which axis, and why does it have half of the bytes?
#   `forge trace learn.toml --nproc 4 -p fsdp2 -s parallel.dp_replicate=2 -s train.micro_batch=1 --json`
#
# <details><summary>Answer</summary>
#
# An all_reduce by `fsdp2` over `dp_replicate`, after each reduce_scatter. By then a rank has only its half of the
# gradients, and sums it with the ranks that keep the same half.
#
# </details>
