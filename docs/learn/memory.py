# %% [markdown]
# # Memory of a step: what is held, when, and by which rank
#
# A step holds four things. *Weights*, all the time. *Activations*, which grow layer by layer in the forward pass and
# are freed in reverse by the backward pass. *Gradients*, from the backward pass to the update. And the *states of the
# optimizer*, two for each weight with AdamW, all the time from the first update on.
#
# ![Weights, gradients and states of one rank at three moments of a step](memory.svg)
#
# Each technique takes one of these down: sharding (FSDP2) all but activations, recomputation (AC) activations alone,
# tensor and context parallelism some of both.

# %% setup

# %% [markdown]
# ## A real step
#
# This plugin weighs what a rank really holds, in bytes of storage: when the forward pass has reached the last norm,
# before the update, and after it.

# %%
Path("weigh.py").write_text('''
from forge_train import Plugin, hookimpl


def size(tensors):
    """Bytes that this rank holds."""
    return sum(getattr(one, "_local_tensor", one).nbytes for one in tensors if one is not None)


class Weigh(Plugin):
    """Bytes of a rank at three moments of a step."""

    @hookimpl
    def on_start(self, job, model, optimizer):
        self.model, self.optimizer, self.saved, part = model, optimizer, {}, model.parts[0]
        part.norm.register_forward_hook(lambda *_: self.saved.update(inside=size(part.parameters())))

    @hookimpl
    def on_gradients(self, update):
        self.saved["gradients"] = size(one.grad for one in update.parameters)

    @hookimpl
    def on_step(self, step):
        for name, found in self.saved.items():
            step.add(name, found)
        step.add("weights", size(self.model.parameters()))
        step.add("states", size(one for state in self.optimizer.state.values() for one in state.values()))
''')
MOMENTS = ("weights", "inside", "gradients", "states")


def weigh(name, options):
    """Bytes that rank 0 holds in a step."""
    forge(f"train learn.toml -p ./weigh.py -s train.steps=1 -s log.every=1 --name {name} {options}")
    line = json.loads(Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()[-1])
    return {moment: int(line[f"weigh.{moment}"]) for moment in MOMENTS}


alone, sharded = weigh("alone", "--nproc 1"), weigh("sharded", "--nproc 2 -p fsdp2")
print(f"{'':10}{'one process':>14}{'rank 0 of 2':>14}")
for moment in MOMENTS:
    print(f"{moment:10}{alone[moment]:12,} B{sharded[moment]:12,} B")

# %% [markdown]
# Between steps a rank has half of everything. *Inside*, at the end of the forward pass, it has a little more: the
# last norm is still whole, and each layer has been dropped again.
#
# ## The formula
#
# In fp32: 4 bytes per weight, 4 per gradient, and two states of 4 bytes each; AdamW also counts steps, in 4 bytes per
# tensor. Over *n* ranks, each has 1/n.

# %%
layer, table = 16 * DIM**2 + 2 * DIM, VOCABULARY * DIM
weights, tensors = 2 * table + LAYERS * layer + DIM, 2 + LAYERS * 9 + 1
for held, ranks in ((alone, 1), (sharded, 2)):
    assert held["weights"] == held["gradients"] == weights * FP32 // ranks
    assert held["states"] == 2 * weights * FP32 // ranks + 4 * tensors
assert sharded["inside"] == sharded["weights"] + DIM * FP32 // 2
print(f"{weights:,} weights in {tensors} tensors: {16 * weights:,} B on one process, {8 * weights:,} B on each of two")

# %% [markdown]
# Activations do not shrink with more ranks: each rank has rows of its own. `forge plan` rehearses the step without
# memory, and counts them; recomputation keeps the input of each layer, and computes the rest again.

# %%
for options in ("", "-p ac -s ac.mode=full"):
    memory = forge(f"plan learn.toml --world 2 -p fsdp2 {options}")["memory"]
    assert (memory["parameters"], memory["optimizer"]) == (sharded["weights"], sharded["states"])
    print(
        f"{options or 'all kept':24}{memory['activations']:10,} B of activations, {memory['logits']:,} B of them logits"
    )
assert memory["logits"] % (2 * SEQUENCE * VOCABULARY * FP32) == 0

# %% [markdown]
# Recomputation halves what the layers keep. It does not touch the logits: for each token they have as many numbers as
# the vocabulary has entries, and more than one copy of them lives at once.
#
# ## Break it
#
# This plugin tells FSDP2 to keep layers whole after their forward pass, which somebody does for a faster backward pass.
# No number changes, so `forge verify` has nothing to say. The memory does, and so does the trace.

# %%
Path("broken.py").write_text('''
from forge_train import Plugin, hookimpl


class Broken(Plugin):
    """Keeps layers whole between their forward and their backward pass."""

    @hookimpl
    def on_start(self, job, model):
        if job.dist.world > 1:
            for layer in model.parts[0].layers.values():
                layer.set_reshard_after_forward(False)
''')
kept = weigh("kept", "--nproc 2 -p fsdp2 -p ./broken.py")
assert kept["inside"] == sharded["inside"] + LAYERS * layer * FP32 // 2
print(f"inside: {sharded['inside']:,} B healthy, {kept['inside']:,} B broken")
for name, options in (("healthy", ""), ("broken", "-p ./broken.py")):
    found = forge(f"trace learn.toml --nproc 2 -p fsdp2 {options}")["collectives"]
    gathers = [one for one in found if one["rank"] == 0 and one["kind"] == "all_gather"]
    print(f"{name:8} {sum(one['count'] for one in gathers)} all-gathers, {sum(one['bytes'] for one in gathers):,} B")

# %% [markdown]
# Two gathers less, and the whole layers in memory until the backward pass has used them: memory is bought with
# traffic, and traffic with memory. Which one is short on your cluster is the question of [`forge plan
# --search`](../how-to/choose-a-layout.md).
#
# ## Try
#
# - One state for each weight. How large is the optimizer then? `forge plan learn.toml --world 2 -p fsdp2 -p lion`
# - Half of the activations, for twice as many passes: `forge plan learn.toml --world 2 -p fsdp2 -s train.micro_batch=1`
