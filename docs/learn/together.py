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
# This is the whole step of rank 0. Take one layer in the forward pass: FSDP2 gathers the other half of *this rank's
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
# | reduce_scatter by `fsdp2` | `dp_shard` | the mean of gradients over rows; each rank receives its half |
# | all_gather by `tp`, forward | `tp` | the tokens of both ranks, before a block and before the head |
# | reduce_scatter by `tp`, forward | `tp` | the sum of parts, after embedding and blocks; each receives its tokens |
# | both, backward | `tp` | the same for gradients, with the kinds exchanged |
# | all_reduce by `tp`, forward | `tp` | the softmax over a vocabulary that is split |
# | all_reduce by `tp`, gradients | `tp` | gradients of norms, of which each rank has the part of its tokens |
# | all_reduce by `forge`, data | `dp_shard` | the tokens that count: ranks along `tp` have the same ones |
# | all_reduce by `forge`, three times | `dp_shard`, `tp`, `dp_shard` | squares for the gradient norm |
# | all_reduce by `forge`, the last of the gradients | `dp_shard` | the loss for the log |
# | all_reduce by `forge`, update | all ranks | requests to stop |
#
# The squares of split matrices are added up along both axes. Norms are whole along `tp`, so theirs are added along
# `dp_shard` alone. And their gradients have 320 B here, where they had 640 B without FSDP2, which keeps half.
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
refused = forge(f"verify learn.toml {layout.replace('-p tp', '-p ./broken.py')}")
print(refused["error"].partition("tp: ")[2].partition(".")[0])

# %% [markdown]
# The composition is refused before a step is taken. Had it been accepted, each rank would have split a shard instead
# of a matrix, and computed with the wrong columns.
#
# Now find a fault yourself: take the broken plugin of [FSDP2](fsdp2.md) and that of [tensor parallelism](tp.md) as
# `one.py` and `other.py`, run each on this layout, and say by `forge trace` and `forge verify` which axis it has
# forgotten.
#
# <details><summary>Answer</summary>
#
# The trace of FSDP2's has one reduce-scatter along `dp_shard` less, that of `layers.1`. Its shards get no gradient,
# which is what `verify` says; along `tp`, less is summed only because the norms of that layer have none. The other's
# has no all_reduce by `tp` among the gradients, and `verify` says that gradients of norms are not reduced over `tp`.
#
# </details>
#
# ## Try
#
# - `--nproc 4 -p fsdp2 -s parallel.dp_replicate=2 -s train.micro_batch=1`, without `tp`: hybrid sharding. Which
#   collective is new, over which axis, and why does it have half of the bytes?
#
# <details><summary>Answer</summary>
#
# An all-reduce along `dp_replicate`, of the gradients: each rank has scattered them already, and keeps half.
#
# </details>
