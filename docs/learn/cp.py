# %% [markdown]
# # Context parallelism: every rank has a part of every sequence
#
# The memory of activations grows with the length of a sequence. If one sequence does not fit on a device, ranks
# divide its *tokens*. Norms, projections and feed-forward blocks look at one token at a time, so each rank computes
# them for its own tokens, with all weights. Only attention looks at other tokens.
#
# ![Each rank has two chunks of the sequence; keys and values are gathered, and their gradients summed](cp.svg)
#
# - Before attention, an **all-gather** brings the *keys and values* of all tokens to every rank. Queries stay where
#   they are: a rank computes attention for its own tokens.
# - In the backward pass, each rank has a gradient for the keys and values of *all* tokens. A **reduce-scatter** sums
#   them, and each rank receives those of its own.
#
# A causal model gives later tokens more work, because they look at everything before them. So each rank takes a chunk
# from the front and its mirror image from the end: with two ranks and four chunks, rank 0 has the first and the last.
# Then all ranks have about the same work.

# %% setup

# %% [markdown]
# ## A real step

# %%
step = forge("trace learn.toml --nproc 2 -p cp -s parallel.cp=2 -s train.micro_batch=4")
first = [call for call in step["calls"] if call["rank"] == 0]
show(first)

# %% [markdown]
# - **cp, forward**: the first gather of a step has 1,024 B: the positions of every rank's tokens, from which the
#   attention mask follows. They are the same for all layers. Then one gather for each layer, of keys and values.
# - **cp, backward**: one reduce-scatter for each layer.
# - **fsdp2**: ranks that have different tokens have different gradients of the same weights, just as with different
#   rows. So weights are sharded, gathered and averaged over the axis `cp` as in [FSDP2](fsdp2.md). Context
#   parallelism needs no weight collectives of its own.
#
# ## The formula
#
# Keys and values of all tokens of the micro-batch; positions are integers of eight bytes.

# %%
own = [call for call in first if call["plugin"] == "cp"]
keys_and_values = 2 * ROWS * SEQUENCE * DIM * FP32
forward = [call["bytes"] for call in own if call["phase"] == "forward"]
backward = [call["bytes"] for call in own if call["phase"] == "backward"]
assert sorted(forward) == sorted([ROWS * SEQUENCE * 8] + [keys_and_values] * LAYERS)
assert backward == [keys_and_values] * LAYERS
print(f"{LAYERS} × {keys_and_values:,} B of keys and values forward, and as many of their gradients backward")

# %% [markdown]
# Three ways to exchange keys and values send different bytes. `gather`, as here, grows with the number of *key*
# heads: with grouped-query attention it is small. `-s cp.method=ring` passes keys and values on from rank to rank,
# and never has all of them at once. `-s cp.method=ulysses` gives each rank whole sequences of some heads, by
# all-to-alls.
#
# ## Break it
#
# A rank must know *where* its tokens stand. This plugin has every rank count from zero, as if its slice were a
# sequence of its own.

# %%
Path("broken.py").write_text('''
import torch

from forge_train import Plugin, hookimpl


class Broken(Plugin):
    """Counts the positions of tokens from zero on every rank."""

    @hookimpl
    def on_start(self, model):
        def count(part, args, kwargs):
            tokens = args[0]
            kwargs["position_ids"] = torch.arange(tokens.shape[1]).expand_as(tokens)
            return args, kwargs

        model.parts[0].register_forward_pre_hook(count, with_kwargs=True)
''')
judge(forge("verify learn.toml --nproc 2 -p cp -s parallel.cp=2 -p ./broken.py --steps 2"))

# %% [markdown]
# On one process the plugin changes nothing: positions count from zero there anyway. Nothing crashes on two either,
# and no collective is missing: the trace of the broken run has the same calls and bytes. Only the numbers show it.
#
# ## Try
#
# - Two other methods. Who sends to whom, and how many bytes?
#   `forge trace learn.toml --nproc 2 -p cp -s parallel.cp=2 -s train.micro_batch=4 -p eager -s cp.method=ring --json`
#   `forge trace learn.toml --nproc 2 -p cp -s parallel.cp=2 -s train.micro_batch=4 -s cp.method=ulysses --json`
# - One head of keys and values for all heads of queries. What becomes of the gather?
#   `forge trace learn.toml --nproc 2 -p cp -s parallel.cp=2 -s train.micro_batch=4 -s decoder.kv_heads=1 --json`
