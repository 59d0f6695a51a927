"""The list of the corpus: programs in the form of real ones, and the expected result of each. It only grows.

A row stands here before it is run for the first time. Its program is in the `PROGRAMS` of another module of this
package, under the same name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One program of the corpus."""

    name: str
    kind: str
    about: str
    """Description of the program, in a line."""
    words: str = ""
    """A part of the message it is refused with, `|` between alternatives; empty: it is equal at every size, and equal
    to plain torch."""
    may_be_equal: bool = False
    """True if being equal is as good as being refused with `words`."""
    separate: bool = False
    """True if its workers are started as separately as Ray's: each with another hash seed and a separate import."""
    tenth: bool = False
    """True if it is tried each time, and not before a release alone."""

    @property
    def is_refused(self) -> bool:
        """True if it is to be refused."""
        return bool(self.words) and not self.may_be_equal


MODELS = ("decoder", "experts", "encoder", "encoder-decoder", "vision", "audio", "several", "torch", "backbone")
KINDS = (
    *MODELS,
    "optimizer",
    "idiom",
    "optimizer case",
    "model case",
    "randomness",
    "build",
    "loss",
    "data",
    "resumed",
)


def equal(name: str, about: str, *, separate: bool = False, tenth: bool = False) -> Row:
    """A row of a program whose bits do not depend on the workers, and are plain torch's to a tolerance."""
    return Row(name=name, kind="", about=about, separate=separate, tenth=tenth)


def refused(name: str, words: str, about: str, *, separate: bool = False, tenth: bool = False) -> Row:
    """A row of a program that is refused in these words, before it has trained wrong."""
    return Row(name=name, kind="", about=about, words=words, separate=separate, tenth=tenth)


def either(name: str, words: str, about: str) -> Row:
    """A row of a program that is equal, or is refused in these words."""
    return Row(name=name, kind="", about=about, words=words, may_be_equal=True)


_LISTED: dict[str, tuple[Row, ...]] = {
    # -- models, one of each family of architectures, from custom configurations --
    "decoder": (
        equal("llama", "RoPE, RMSNorm, grouped queries, tied head, dropout of attention", tenth=True),
        equal("gpt2", "learned positions, Conv1D, tied head, dropout"),
        equal("qwen3", "norms of queries and keys", separate=True),
        equal("gemma2", "soft caps, sliding windows, four norms a block"),
        equal("phi3", "fused projections"),
        equal("bloom", "ALiBi, a norm after the embedding"),
        equal("falcon", "one key for all heads, parallel attention"),
        equal("opt", "positions with an offset, a frozen padding row"),
        equal("gpt_neox", "parallel residuals, partial RoPE"),
        equal("mamba", "a selective scan, no attention"),
        equal("rwkv", "a recurrence in place of attention"),
        equal("gpt", "the realistic one: two groups, clipping, a schedule, masked tokens, metrics, an evaluation"),
    ),
    "experts": (
        equal("mixtral", "two of four experts, the router's loss as a metric", tenth=True),
        equal("qwen3_moe", "normed shares of four experts", separate=True),
        equal("switch", "an encoder-decoder of experts, with jitter"),
        equal("deepseek_v3", "latent attention, shared experts, a bias of the router as a buffer"),
        equal("gpt_oss", "sinks in attention, experts with biases"),
    ),
    "encoder": (
        equal("bert", "masked words, the masks drawn in the loss", tenth=True),
        equal("deberta_v2", "disentangled attention"),
        equal("electra", "replaced words, a factored embedding"),
        refused("albert", "several times", "one block that is used twice, as a unit by default"),
        equal("albert_whole", "the same with `wrap` returning no unit"),
        equal("modernbert", "local and global attention, no biases", separate=True),
    ),
    "encoder-decoder": (
        equal("t5", "relative positions, tied embeddings of both halves", tenth=True),
        equal("bart", "learned positions, dropout, no layerdrop"),
        refused("bart_layerdrop", "took no part|which units take part", "blocks that are left out by chance, as units"),
        equal("whisper", "SpecAugment drawn from NumPy, frozen sinusoids"),
        equal("marian", "frozen sinusoids that the constructor computes"),
    ),
    "vision": (
        equal("vit", "patches and a class token"),
        equal("swin", "stages of blocks, shifted windows, stochastic depth", tenth=True),
        equal("convnext", "stages of convolutions, layer scales, stochastic depth"),
        refused("resnet", "running statistics", "batch norm with running statistics"),
        equal("dinov2", "layer scales, a mask token nobody uses"),
        equal("segformer", "nested stages, overlapping patches"),
        equal("detr", "a frozen batch norm's backbone, object queries"),
    ),
    "audio": (
        equal("wav2vec2", "CTC, SpecAugment drawn from NumPy, weight norm", tenth=True),
        equal("hubert", "the same family with another head", separate=True),
    ),
    "several": (
        equal("clip", "two towers and a scalar parameter, logit_scale", tenth=True),
        equal("siglip", "two towers, a head that attends"),
        equal("blip_2", "queries between a picture and a decoder"),
    ),
    "torch": (
        equal("torch_transformer", "nn.Transformer, both halves"),
        equal("torch_encoder", "nn.TransformerEncoder, whose fast path serves the evaluation"),
        equal("lstm", "two layers with dropout between them", separate=True),
        equal("unet", "stages of stages of convolutions and skips", tenth=True),
        equal("diffusion", "noise and time steps drawn in the loss, a table of sinusoids"),
        equal("vae", "a sample drawn in forward, two heads", separate=True),
    ),
    "backbone": (
        equal("backbone_frozen", "a pretrained backbone without gradients, in eval, and a new head", tenth=True),
        equal("backbone_thawed", "a pretrained backbone in train mode and a new head"),
        equal("backbone_lora", "low-rank adapters with dropout beside frozen weights", separate=True),
        equal("backbone_pretrained", "transformers' from_pretrained with a new head"),
        equal("backbone_batch_norm", "frozen batch norm with statistics, in eval, and a new head"),
    ),
    # -- all of torch's optimizers --
    "optimizer": (
        equal("adadelta", "torch.optim.Adadelta"),
        refused("adafactor", "Adafactor", "torch.optim.Adafactor: rows and columns cannot be cut"),
        equal("adagrad", "torch.optim.Adagrad"),
        equal("adam", "torch.optim.Adam with amsgrad", tenth=True),
        equal("adamw", "torch.optim.AdamW, a rate that is a tensor", separate=True),
        refused("adamw_fused", "foreach=True", "torch.optim.AdamW, fused: it rounds by its cut"),
        equal("adamax", "torch.optim.Adamax, maximize"),
        equal("asgd", "torch.optim.ASGD"),
        refused("lbfgs", "closure", "torch.optim.LBFGS: it wants a closure"),
        refused(
            "muon",
            "Muon|bits on a shard",
            "torch.optim.Muon of the matrices, AdamW of the rest: it sees whole matrices",
        ),
        equal("nadam", "torch.optim.NAdam"),
        equal("radam", "torch.optim.RAdam"),
        equal("rmsprop", "torch.optim.RMSprop, centered, with momentum"),
        equal("rprop", "torch.optim.Rprop"),
        equal("sgd", "torch.optim.SGD with Nesterov's momentum and weight decay", separate=True),
        refused("sparse_adam", "SparseAdam", "torch.optim.SparseAdam: it wants sparse gradients"),
    ),
    # -- idioms --
    "idiom": (
        equal("idiom_tied_head", "head.weight = embedding.weight"),
        equal("idiom_data_assigned", "weight.data = tensor in the constructor", tenth=True),
        equal("idiom_item_in_constructor", "rates of stochastic depth: [x.item() for x in torch.linspace(...)]"),
        equal("idiom_zero_init", "a constructor that zeroes each block's last layer"),
        equal("idiom_apply", "model.apply(self._init_weights) at the constructor's end"),
        equal("idiom_resized_embeddings", "transformers' resize_token_embeddings in build_model"),
        equal("idiom_weight_norm", "parametrizations.weight_norm"),
        equal("idiom_orthogonal", "parametrizations.orthogonal, which looks at values"),
        either("idiom_lazy_linear", "LazyLinear|lazy", "nn.LazyLinear, made with the first forward"),
        equal("idiom_accumulated_metrics", "metrics as sums and weights, a weight of zero among them"),
        equal("idiom_mixup", "mixed samples, the share drawn from NumPy's beta", separate=True),
        equal("idiom_autocast", "torch.autocast in the loss"),
        equal("idiom_checkpoint", "torch.utils.checkpoint in the model, with dropout"),
        equal("idiom_label_smoothing", "label smoothing, an ignored label, class weights in a buffer"),
        equal("idiom_layerwise_rates", "a group for each block, its rate falling with the depth", separate=True),
        equal("idiom_rope_cache", "cosines and sines as non-persistent buffers"),
        equal("idiom_parameter_list", "ParameterList and ParameterDict", separate=True),
        equal("idiom_checkpoint_reentrant", "the same of the reentrant kind, without units"),
        either("idiom_asserts", "no values|init_weights", "a constructor that asserts on the weights it has drawn"),
        equal("idiom_dora", "adapters of a weight's direction and size"),
        equal("idiom_tensor_parallel", "a task with `parallelize`, at a degree of 1"),
    ),
    # -- programs that were reported, each with the right result --
    "optimizer case": (
        refused("hook_clips", "max_grad_norm", "a step pre hook that clips by the norm"),
        refused("hook_counts", "keeps hidden state", "a step hook with a counter that scales gradients"),
        refused("patched_step", "changed gradients|bits on a shard", "optimizer.step = f, which clips"),
        equal("combined", "AdamW and SGD in one class", separate=True),
        equal("combined_getstate", "the same with a __getstate__ that returns __dict__"),
        equal("lookahead", "slow weights beside an inner SGD", separate=True),
        equal("gradient_hook", "weight.register_hook that masks rows", tenth=True),
        refused("post_accumulate_hook", "post-accumulate|post_accumulate", "register_post_accumulate_grad_hook"),
        refused("state_by_shard", "of a shard than of the whole", "state that is the size of a gradient"),
        refused("scheduler_in_hook", "lr_scale", "a torch scheduler that a step hook drives"),
        refused("clip_in_step", "bits on a shard", "a step that clips by the norm"),
        refused("noise_in_step", "bits on a shard|hidden state|draws", "a step that draws noise"),
        equal("lion", "Lion by hand"),
        equal("ema_in_state", "an average in optimizer.state, moved by a post hook"),
        equal("ema_twin", "a frozen twin that a step hook moves"),
        equal("no_weight_decay", "p._no_weight_decay, as state space models have it"),
        equal("empty_group", "an empty parameter group"),
        equal("bitfit", "biases alone are trained"),
        equal("unit_frozen", "a whole unit is frozen"),
        equal("pooler_unused", "a pooler that nobody calls, with weight decay"),
        equal("thawed_in_build_optimizer", "requires_grad changed in build_optimizer"),
        refused("rate_nan", "lr_scale", "a rate that is nan in the second step"),
        refused("rate_none", "lr_scale", "a rate that is None"),
        equal("rate_numpy", "a rate that is NumPy's"),
    ),
    "model case": (
        equal("conditional", "parameters that every second, third or no microbatch uses", separate=True),
        equal("lora_tied_frozen", "LoRA with a tied and frozen embedding"),
        equal("half_frozen", "every second parameter is frozen"),
        equal("odd_shapes", "parameters of the shapes [1], [1, 8], [2, 3, 8], [8, 97]"),
        equal("scalar", "a scalar parameter, with weight decay", separate=True),
        equal("float64", "a model in float64"),
        equal("bfloat16", "a model in bfloat16"),
        equal("padding_idx", "an embedding with a padding row"),
        equal("conv_group_norm", "convolutions with GroupNorm"),
        equal("batch_norm_without_statistics", "track_running_stats=False"),
        equal("r_drop", "two forwards in one loss, without units"),
        equal("universal", "one block used three times, without units"),
        equal("layerdrop_whole", "blocks that are left out by chance, without units"),
        equal("head_in_loss", "a tied head applied in chunks by forward"),
        equal("teacher", "a frozen teacher in eval, and a student"),
        equal("experts_by_data", "a ModuleList of experts that the data chooses, in each block", tenth=True),
        equal("l2_whole", "L2 over the parameters in the loss, without units"),
        equal("nested_lists", "stages of blocks, as ModuleLists of ModuleLists"),
        equal("grad_added_by_backward", "an autograd function that adds to weight.grad"),
        equal("quantized_beside_lora", "frozen int8 weights beside LoRA"),
        equal("packed", "documents packed into one sequence, told by position_ids"),
        equal("module_hooks", "forward and full backward hooks of modules"),
        equal("outputs_nested", "units that return tuples and dicts"),
        equal("outputs_dataclass", "units that return dataclasses"),
        equal("outputs_cached", "a tensor inside a block that is kept for another one"),
        refused("outputs_object", "returned|returns|own class", "units that return an object of their own class"),
        refused("output_view_changed", "in place|view", "a unit's output that is a view and is changed in place"),
        equal("eval_backbone", "a frozen backbone with dropout that was put in eval"),
        equal("eval_trainable", "a trainable part that was left in eval is trained in train mode"),
        equal("evaluated", "an evaluation whose last microbatch is smaller"),
        equal("generates", "decoding by forwards in evaluate"),
        refused("max_norm", "max_norm|changed", "Embedding(max_norm)"),
        refused("instance_norm", "running statistics|changed during forward", "InstanceNorm with running statistics"),
        refused("spectral_norm", "buffer", "spectral_norm, whose vectors a forward changes"),
        refused("complex", "complex|dtype", "complex parameters"),
        refused("sparse_embedding", "sparse=True", "Embedding(sparse=True)"),
        equal("channels_last", "a model in channels_last"),
        equal("compiled_lengths", "compile=True with samples of several lengths"),
    ),
    "randomness": (
        equal("data_seeds_by_index", "torch.manual_seed(index) in __getitem__, with dropout", tenth=True),
        refused("data_draws_sometimes", "global generator", "NumPy's generator for every second sample", tenth=True),
        refused("data_own_generator", "second time", "an unseeded generator of the dataset's own"),
        equal("draws_in_loss", "NumPy and random in the loss", separate=True),
        refused("counter_in_module", "reproducible|twice|again", "a counter in a module that forward moves"),
        refused("counter_in_task", "reproducible|twice|again", "a counter in the task that loss moves"),
        refused("queue", "reproducible|twice|again|queue", "momentum contrast's queue as an attribute"),
        equal("batch_in_place", "a loss that changes its batch"),
        equal("gradients_of_all_sizes", "gradients of 1e28 and 1e-28 in one step"),
        equal("subnormal", "losses of 1e-42"),
        either("float64_overflow", "overflow|squares", "finite float64 gradients whose squares are not"),
    ),
    "build": (
        equal("table_attribute", "a random table as a plain attribute", tenth=True),
        equal("table_buffer", "the same as a non-persistent buffer", separate=True),
        equal("permutation", "torch.randperm in the constructor, used in forward", separate=True),
        equal("table_numpy", "a table drawn from NumPy's generator"),
        equal("table_random", "an order drawn from random.shuffle"),
        equal("table_own_generator", "a table from a generator of its own with a seed"),
        equal("table_persistent", "a random table as a persistent buffer"),
        refused("set_ordered", "sorted(", "modules in the order of a set", separate=True, tenth=True),
        refused("weight_copied", "start", "a copy of a weight as a plain attribute"),
        refused("weight_in_list", "anchors", "copies of weights in a list"),
        refused("weight_in_closure", "without values|has no values", "a copy of a weight that a hook has closed over"),
        equal("default_dtype_left", "set_default_dtype(bfloat16) left behind"),
        equal("grad_mode_left", "set_grad_enabled(False) left behind"),
        equal("threads_left", "set_num_threads(2) left behind"),
        equal("init_weights", "init_weights, each module its own"),
        either("init_zeroes_child", "child", "init_weights of a block that zeroes its last layer"),
        either("init_resets_attention", "child", "init_weights that calls MultiheadAttention's own reset"),
        refused("init_without_reset", "init_weights", "init_weights that calls what a module does not have"),
    ),
    "loss": (
        equal("weightless", "microbatches without a label: a weight of 0", separate=True),
        either("weightless_without_graph", "weight|graph", "Loss(torch.zeros(()), 0) for those"),
        refused("early_return", "took no part|no gradient|forward", "a loss that returns before its forward"),
        equal("head_in_loss_as_unit", "a head that is a unit and is called in the loss"),
        refused("mean_over_nothing", "mean over", "the mean over no label"),
        equal("half_precision_loss", "a loss of reduction='sum' from bfloat16 logits"),
        equal("times_as_floats", "bfloat16 with time steps, cast_inputs='units'"),
        refused("submodule_in_loss", "model(", "a submodule called in the loss", tenth=True),
        refused("method_in_loss", "model(", "a method other than forward called in the loss"),
        refused("l2_in_loss", "weight_decay", "L2 over model.parameters() in the loss"),
        refused("gradient_penalty", "create_graph", "a penalty of the gradient, with create_graph"),
        refused("two_backwards", "backward", "a backward in the loss, before the engine's own"),
        equal("adversarial", "the gradient of the input first, then a forward on what it moved"),
        refused("frozen_in_loss", "requires_grad|gradient", "requires_grad changed in the loss, by the data"),
        refused("no_loss", "Loss", "a loss that returns None"),
    ),
    "data": (
        refused("none_samples", "is None", "a sample that is None", tenth=True),
        refused("stream", "__len__|__getitem__|len()", "a stream, which has no length"),
        refused("dict_of_splits", "not a dataset", "a dict of splits as data"),
        refused("ragged", "pad them", "samples of two lengths in one microbatch"),
        equal("lengths", "samples of several lengths, one to a microbatch"),
        equal("nested_samples", "samples that are dicts of tuples of arrays and numbers"),
    ),
    "resumed": (
        equal("goes_on_thawed", "a layer that was frozen is trained from the third step on"),
        either("goes_on_frozen", "frozen|requires_grad", "a layer that was trained is frozen from the third step on"),
        refused("goes_on_in_float64", "float32", "another dtype from the third step on"),
        either("goes_on_with_sgd", "exp_avg|AdamW|optimizer", "AdamW, and SGD with momentum from the third step on"),
        equal("goes_on_with_groups", "the groups in another order, another rate"),
        equal("goes_on_uncompiled", "torch.compile by the user's hand, then without"),
        equal("goes_on_with_tables", "a drawn table is the checkpoint's", tenth=True),
    ),
}


ROWS: dict[str, Row] = {row.name: replace(row, kind=kind) for kind, rows in _LISTED.items() for row in rows}
"""Rows by name, in the order of the list."""
