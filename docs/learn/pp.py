# %% [markdown]
# # Pipeline parallelism: every rank has some of the layers
#
# The model is cut between layers. Rank 0 has the embedding and the first layers, the last rank has the last layers
# and the loss. A micro-batch passes through the ranks, and its gradient comes back the same way. While rank 1
# computes the first micro-batch, rank 0 computes the second: that is the only reason why both are busy.
#
# ![Four micro-batches on two ranks by 1F1B: forward and backward passes alternate, with gaps at both ends](pp.svg)
#
# - **send, recv**: a message from one rank to one other. Forward the hidden states at the cut, backward their
#   gradients. Nothing else is exchanged: no weights, because each weight lives on one rank only.
# - The **bubble** is the time in which a rank has nothing to do: at the start, until the first micro-batch arrives,
#   and at the end.
#
# A *schedule* is the order of passes on each rank. `gpipe` does all forward passes and then all backward passes, and
# keeps the activations of every micro-batch. `1f1b` begins the backward pass of a micro-batch as soon as it can, so a
# rank keeps at most as many as there are ranks. Both have the same bubble. Other schedules cut the model into more
# parts, or split the backward pass, and make it smaller.

# %% setup

# %% [markdown]
# ## A real step
#
# Four rows in micro-batches of one.

# %%
pipeline = "learn.toml --nproc 2 -p pp -s parallel.pp=2 -s train.micro_batch=1"
step = forge(f"trace {pipeline}")
for rank in (0, 1):
    print(f"rank {rank}")
    show([call for call in step["calls"] if call["rank"] == rank and call["plugin"] == "pp"])

# %% [markdown]
# Rank 0 sends twice before it receives anything: it works ahead by one micro-batch, so that rank 1 always has the
# next one. A `recv` stands where the rank *asks* for a message; it waits only when it needs it. The first column is
# what the rank was doing meanwhile, not what is in the message.
#
# Besides, all ranks sum a few bytes once a step: the gradient norm (each rank has the gradients of its own layers),
# the loss that only the last rank knows, and whether some rank was asked to stop.
#
# ## The formula

# %%
message = 1 * SEQUENCE * DIM * FP32  # the hidden states of a micro-batch of one row
for rank, peer in ((0, 1), (1, 0)):
    own = [call for call in step["calls"] if call["rank"] == rank and call["plugin"] == "pp"]
    sent = [call["bytes"] for call in own if call["kind"] == "send" and call["ranks"] == [rank, peer]]
    received = [call["bytes"] for call in own if call["kind"] == "recv" and call["ranks"] == [peer, rank]]
    assert sent == received == [message] * ROWS
    print(f"rank {rank} sends and receives {ROWS} × {message:,} B")

# %% [markdown]
# These are the fewest bytes of all techniques, and they do not depend on the number of layers: pipelines span slow
# links. The price is the bubble. With *p* ranks of equal work and *m* micro-batches it is (p − 1) / (m + p − 1) of
# the time. `forge plan` simulates the schedule with the work of the real parts:

# %%
for rows in (4, 16):
    plan = forge(f"plan {pipeline.replace('--nproc', '--world')} -s train.global_batch={rows}")["pipeline"]
    work = " and ".join(f"{stage['flops_share']:.0%}" for stage in plan["stages"])
    print(f"{rows:2} micro-batches: bubble {plan['bubble']:.0%}, stages of {work} of the work")
    print(f"    with equal stages: {1 / (rows + 1):.0%}")

# %% [markdown]
# The second stage has the head, so the first one waits for it in every round: more micro-batches do not help against
# that, a better cut does.
#
# ## Break it
#
# A pipeline is as fast as its slowest rank. This plugin makes a layer of rank 0 slow. Its numbers stay right, so
# `forge verify` has no objection; `forge trace` is the one to ask.

# %%
Path("broken.py").write_text('''
import time

from forge_train import Plugin, hookimpl


class Broken(Plugin):
    """Sleeps in a layer of the first stage."""

    @hookimpl
    def on_start(self, job, model):
        def nap(module, args):
            time.sleep(0.5)

        if job.dist.rank == 0:
            model.parts[0].get_submodule("layers.0.feed_forward").register_forward_pre_hook(nap)
''')
slow = forge(f"trace {pipeline} -p ./broken.py")
worst = slow["stragglers"][0]
print(f"rank {worst['rank']} waited for rank {worst['behind']}, in {worst['module']} ({worst['phase']})")
assert worst["share"] > 0.5

# %% [markdown]
# ## Try
#
# - `forge plan … --schedules` compares all schedules by bubble and memory. See [Read a pipeline's
#   timeline](../how-to/pipelines.md).
# - `-s decoder.tied=true`: embedding and head share their weight, and lie on different ranks. Which collective is
#   new, and what is it for?
