"""The decoder that every family shares: pre-normalised attention and feed-forward layers, under Hugging Face's names.

    CausalLM
      model.embed_tokens.weight                       (vocab, hidden)
      model.layers.0.input_layernorm.weight           (hidden,)
                    .self_attn...                     models.attention
                    .post_attention_layernorm.weight  (hidden,)
                    .mlp...                           models.layers.SwiGLU or models.moe.MoE
      model.norm.weight                               (hidden,)
      lm_head.weight                                  (vocab, hidden); the same Parameter as embed_tokens when tied

A family is a config that says which attention and which feed-forward layer stands in layer i: models.llama, .qwen3,
.mixtral, .gpt_oss, .deepseek_v3.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from models.activations import Activations, Batch, Part, chunked_loss, decoder_layer, norm_saved
from models.attention import Mask, causal_mask
from models.documents import Sequences, check, places, rows
from models.expert_parallel import ExpertParallel, held
from models.fields import is_count, is_not_negative, is_positive
from models.flops import Scores, flops_per_token
from models.layers import Embedding, Head, RMSNorm
from models.linear import Linear
from models.moe import Experts, MoE, Router, StackedLinear
from models.rope import rope_problems, rotary_table


@dataclass(frozen=True, kw_only=True)
class CausalLMConfig:
    """The sizes and switches that every family has, under Hugging Face's names.

    Args:
        vocab_size: Tokens of the vocabulary.
        hidden_size: Elements of the residual stream.
        num_hidden_layers: Decoder layers.
        num_attention_heads: Query heads.
        max_position_embeddings: Tokens of the longest sequence that forward takes.
        rms_norm_eps: Added to the mean square in every norm.
        rope_theta: Base of the rotary wavelengths.
        rope_scaling: None, or a mapping with ``rope_type`` "default", "llama3" or "yarn" and that type's keys, which
            ``models.rope.SCALINGS`` lists.
        tie_word_embeddings: Whether the head's weight is the embedding's.
        initializer_range: Standard deviation of the initial weights.
        checkpoint: "full" keeps only each decoder layer's input for backward and computes the layer again there; "none"
            keeps everything.
        loss_chunk_size: Tokens whose logits exist at a time when forward is given labels. 1024 of a vocabulary of
            128,256 take about 1 GB (fp32 logits and log-probabilities); each chunk reads and writes the gradient of the
            head once, so fewer tokens are slower.
        weights: A Hugging Face folder that ``init_weights`` reads; None: it draws them.

    Raises:
        ValueError: With every problem in one message.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    checkpoint: Literal["none", "full"] = "none"
    loss_chunk_size: int = 1024
    weights: str | None = None

    # Integers >= 1, floats > 0, floats >= 0, and bools; a family adds its own.
    counts: ClassVar[tuple[str, ...]] = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
        "loss_chunk_size",
    )  # fmt: skip
    numbers: ClassVar[tuple[str, ...]] = ("rms_norm_eps", "rope_theta", "initializer_range")
    nonnegative: ClassVar[tuple[str, ...]] = ()
    switches: ClassVar[tuple[str, ...]] = ("tie_word_embeddings",)

    def __post_init__(self) -> None:
        if isinstance(self.rope_scaling, Mapping):  # a copy: the caller's may change later
            object.__setattr__(self, "rope_scaling", dict(self.rope_scaling))
        problems = list(self._wrong_fields())
        if not problems:  # only then can sizes be compared
            problems = list(self.mismatches())
        problems += rope_problems(self.rope_scaling)
        if problems:
            kind = type(self).__name__
            raise ValueError("\n  ".join([f"{kind} has {len(problems)} problem(s):", *problems]))

    def _wrong_fields(self) -> Iterator[str]:
        for name in self.counts:
            if not is_count(getattr(self, name)):
                yield f"{name}: expected an integer >= 1, got {getattr(self, name)!r}"
        for name in self.numbers:
            if not is_positive(getattr(self, name)):
                yield f"{name}: expected a number > 0, got {getattr(self, name)!r}"
        for name in self.nonnegative:
            if not is_not_negative(getattr(self, name)):
                yield f"{name}: expected a number >= 0, got {getattr(self, name)!r}"
        for name in self.switches:
            if not isinstance(getattr(self, name), bool):
                yield f"{name}: expected true or false, got {getattr(self, name)!r}"
        if self.checkpoint not in ("none", "full"):
            yield f"checkpoint: expected 'none' or 'full', got {self.checkpoint!r}"
        if not isinstance(self.weights, str | None):
            yield f"weights: expected None or the path of a folder, got {self.weights!r}"

    # --- what a family says ---

    def mismatches(self) -> Iterator[str]:
        """Yields what is wrong between fields that are right each by itself."""
        yield from ()

    def attention(self, layer: int) -> nn.Module:
        """Returns the attention of a layer."""
        raise NotImplementedError

    def feed_forward(self, layer: int) -> nn.Module:
        """Returns what stands behind the attention of a layer: anything from (b, s, hidden) to that, or a ``MoE``."""
        raise NotImplementedError

    def attention_held(self, layer: int, batch: Batch) -> Part:
        """Returns the bytes that ``attention(layer)`` holds."""
        raise NotImplementedError

    def feed_forward_held(self, layer: int, batch: Batch) -> Part:
        """Returns the bytes that ``feed_forward(layer)`` holds."""
        raise NotImplementedError

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that rotate."""
        raise NotImplementedError

    @property
    def has_sinks(self) -> bool:
        """Whether the attention has sinks."""
        return False

    def window(self, layer: int) -> int | None:
        """Returns how many keys a query of a layer sees, itself included; None: all."""
        return None

    def score_dims(self) -> tuple[int, int]:
        """Returns the elements of a head's query and of its value."""
        return self.rotary_dim, self.rotary_dim

    # --- what follows from it ---

    def build(self) -> CausalLM:
        """Returns the model on the current default device, its weights NaN until ``init_weights`` or a load."""
        return CausalLM(self)

    def num_parameters(self) -> int:
        """Returns how many parameters the model has; tied ones count once."""
        return sum(parameter.numel() for parameter in self._on_meta().parameters())

    def num_active_parameters(self) -> int:
        """Returns how many parameters a token meets: of a mixture of experts, those of the experts it goes to."""
        model = self._on_meta()
        idle = sum(_idle(module) for module in model.modules() if isinstance(module, MoE))
        return sum(parameter.numel() for parameter in model.parameters()) - idle

    def num_matrix_parameters(self) -> int:
        """Returns how many parameters each token is multiplied by: projections, router, its own experts, the head."""
        model = self._on_meta()
        kinds = (Linear, Router, StackedLinear)
        whole = sum(module.weight.numel() for module in model.modules() if isinstance(module, kinds))
        idle = sum(_idle(module, matrices=True) for module in model.modules() if isinstance(module, MoE))
        return whole - idle

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> float:
        """Returns the FLOPs of a token's matrix products, forward and backward, as ``models.flops`` counts them."""
        heads, (query, value) = self.num_attention_heads, self.score_dims()
        scores = [Scores(heads, query, value, self.window(layer)) for layer in range(self.num_hidden_layers)]
        return flops_per_token(
            matrix_parameters=self.num_matrix_parameters(), attention=scores, seq_len=seq_len, causal=causal
        )

    def activations(self, *, batch: int, seq_len: int, itemsize: int, fused: bool = True) -> Activations:
        """Returns the bytes of a micro-batch, as ``models.activations`` counts them.

        Args:
            batch: Sequences.
            seq_len: Tokens of each.
            itemsize: Bytes of an element of what is computed with.
            fused: Norms and sinks are in kernels, as on CUDA.
        """
        of = Batch(batch * seq_len, seq_len, itemsize, fused)
        layers = tuple(
            decoder_layer(
                of,
                hidden=self.hidden_size,
                attention=self.attention_held(index, of),
                feed_forward=self.feed_forward_held(index, of),
            )
            for index in range(self.num_hidden_layers)
        )
        loss, kept = chunked_loss(of, hidden=self.hidden_size, vocab=self.vocab_size, chunk=self.loss_chunk_size)
        # The last norm's input and output; the output lives as long as the loss is computed.
        stream = of.tokens * itemsize * self.hidden_size
        tail = stream + norm_saved(of, self.hidden_size)
        return Activations(layers, self.checkpoint == "full", tail, loss + stream, kept)

    def check_weights(self) -> None:
        """Raises unless the folder that the weights come from, if any, has them; looks at headers only.

        Raises:
            ValueError: With everything that is wrong with it.
        """
        if self.weights is not None:
            from models.inventory import find_weights  # which knows every family

            find_weights(self, Path(self.weights), undone="loaded")

    def _on_meta(self) -> CausalLM:
        with torch.device("meta"):
            return self.build()


def _idle(moe: MoE, *, matrices: bool = False) -> int:
    """Parameters of the experts that a token does not go to."""
    router, experts = moe.chooser, moe.experts
    total = router.weight.shape[0]
    owned = [p.numel() for p in experts.parameters() if p.ndim == 3 or not matrices]
    return sum(owned) // total * (total - router.k)


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward layer, each normalised before and added to the stream after."""

    def __init__(self, config: CausalLMConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = config.attention(index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = config.feed_forward(index)

    def forward(
        self,
        hidden: torch.Tensor,
        balance: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: Mask,
        sequences: Sequences,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the stream after this layer, and the balancing loss so far.

        Args:
            hidden: (b, s, hidden) floating point.
            balance: () floating point.
            cos: As ``Attention.forward``.
            sin: Likewise.
            mask: Likewise.
            sequences: Of the b s tokens, each of which experts are balanced over.
        """
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, mask)
        normalised = self.post_attention_layernorm(hidden)
        if not isinstance(self.mlp, MoE):
            return hidden + self.mlp(normalised), balance
        out, aux = self.mlp(normalised, sequences)
        return hidden + out, balance + aux


class Decoder(nn.Module):
    """Everything but the head; Hugging Face's ``model.`` prefix."""

    def __init__(self, config: CausalLMConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, input_ids: torch.Tensor, offsets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the normalised stream after the last layer, and the balancing loss of all layers.

        Args:
            input_ids: (b, s) int64; with ``offsets``, b is 1.
            offsets: (documents + 1,) integers: document i is tokens ``[offsets[i], offsets[i + 1])``. None: each row is
                one.

        Returns:
            (b, s, hidden), dtype of the embedding; () float32.
        """
        config, device = self.config, input_ids.device
        hidden = self.embed_tokens(input_ids)
        documents, positions = places(input_ids.shape[1], offsets, device)
        cos, sin = rotary_table(
            positions, config.rotary_dim, theta=config.rope_theta, scaling=config.rope_scaling, dtype=hidden.dtype
        )
        windows = [config.window(index) for index in range(len(self.layers))]
        mask_of = partial(causal_mask, len(positions), documents=documents, sinks=config.has_sinks, device=device)
        masks = {window: mask_of(window=window) for window in set(windows)}
        if documents is None or offsets is None:
            sequences = rows(input_ids.shape[0], input_ids.shape[1], device)
        else:
            sequences = Sequences(documents, len(offsets) - 1)
        balance = torch.zeros((), device=device)
        for layer, window in zip(self.layers, windows, strict=True):
            inputs = (hidden, balance, cos, sin, masks[window], sequences)
            if config.checkpoint == "full":  # nothing in a layer is random: keeping the generator's state only waits
                hidden, balance = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden, balance = layer(*inputs)
        return self.norm(hidden), balance


class CausalLM(nn.Module):
    """A causal language model; see the module's docstring for its parameters.

    Building it draws no random number and leaves the matrices NaN; ``init_weights`` or ``models.hf.load_weights`` fills
    them.
    """

    def __init__(self, config: CausalLMConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = Head(config.hidden_size, config.vocab_size, chunk_size=config.loss_chunk_size)
        self.tie_weights()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the logits, or with labels the sum of the token losses, whose logits never exist whole.

        Documents packed into one batch are a jagged tensor, ``torch.nested.nested_tensor(documents,
        layout=torch.jagged)``: none attends to another, positions begin at 0 in each, and nothing is padded.

        The balancing loss of a mixture of experts is in the gradient of the loss and not in its value, so that losses
        of different models compare.

        Args:
            input_ids: (b, s) int64, or jagged (documents, j).
            labels: Like ``input_ids``, already shifted: ``labels[:, i]`` is what should follow ``input_ids[:, i]``;
                -100 for no loss. Or None.

        Returns:
            (b, s, vocab) in the dtype of the weights, jagged if ``input_ids`` is, or 0-d float32.

        Raises:
            ValueError: If the shapes are wrong or the sequence is longer than ``max_position_embeddings``.
        """
        check(input_ids, labels, longest=self.config.max_position_embeddings)
        if not input_ids.is_nested:
            hidden, balance = self.model(input_ids)
            out = self.lm_head(hidden, labels)
            return out if labels is None else _with_gradient_of(balance, out)
        offsets = input_ids.offsets()  # type: ignore[attr-defined]  # what jagged tensors have
        hidden, balance = self.model(input_ids.values()[None], offsets)
        if labels is None:
            return torch.nested.nested_tensor_from_jagged(self.lm_head(hidden[0]), offsets)
        return _with_gradient_of(balance, self.lm_head(hidden[0], labels.values()))

    def units(self) -> list[nn.Module]:
        """Returns the modules to shard one by one, in the order of forward; the rest belongs in one more unit."""
        return list(self.model.layers)

    def expert_units(self) -> list[nn.Module]:
        """Returns the stacks of experts, to shard one by one, before ``units``, where they are dealt over ranks."""
        return [module for module in self.modules() if isinstance(module, Experts)]

    def deal_experts(self, group: dist.ProcessGroup) -> None:
        """Leaves this rank its part of every stack of experts; tokens travel. Call it before sharding, on any device.

        Args:
            group: The ranks among which each stack is dealt.

        Raises:
            ValueError: If the model has no experts.
        """
        if not self._moes():
            raise ValueError(f"{type(self.config).__name__} has no experts to deal over {group.size()} ranks: use ep=1")
        for moe in self._moes().values():
            parallel = ExpertParallel(group, moe.chooser.weight.shape[0])
            parallel.keep(moe.experts)
            moe.run = parallel

    @torch.no_grad()
    def finish_step(self, *, skip: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Corrects the routers by what they chose since the last call, over all ranks; call it once per optimizer step.

        Args:
            skip: () float32 on the model's device, equal on every rank: 1.0 if the step was left out, which leaves the
                corrections bit for bit as they are. What was chosen is forgotten all the same.

        Returns:
            Per layer with experts, the tokens of the busiest expert over the mean, () float32, equal on every rank.
            Empty for a dense model.
        """
        routers = {name: moe.chooser for name, moe in self._moes().items()}
        if not routers or any(router.counted is None for router in routers.values()):
            return {}
        counted = torch.stack([router.counted for router in routers.values()])  # type: ignore[misc]
        if dist.is_initialized():
            dist.all_reduce(counted)
        for router, load in zip(routers.values(), counted, strict=True):
            router.correct(load, skip=skip)
            router.counted = None
        busiest = counted.amax(dim=1) / counted.float().mean(dim=1)
        return {f"expert_load/{name}": value for name, value in zip(routers, busiest, strict=True)}

    def _moes(self) -> dict[str, MoE]:
        return {name: module for name, module in self.named_modules() if isinstance(module, MoE)}

    def export(
        self,
        folder: str,
        *,
        tensors: Iterable[tuple[str, torch.Tensor]] | None = None,
        like: str | None = None,
    ) -> None:
        """Writes a new folder that transformers opens; of a sharded model, every rank calls this.

        Args:
            folder: Absent or empty.
            tensors: Whole parameters and saved buffers to write in place of the model's own, which may be on meta;
                taken one by one, and this process alone calls this.
            like: A folder to take the tokenizer and the ids of special tokens from; None: ``config.weights``, or with
                a warning nothing if that is gone.

        Raises:
            ValueError: If ``folder`` holds anything, or ``like`` has no config.json.
        """
        from models.hf import save, write  # which know every family
        from models.hf_config import CONFIG

        began = self.config.weights
        if like is None and began is not None:
            like = began if os.path.isfile(os.path.join(began, CONFIG)) else None
            if like is None and (not dist.is_initialized() or dist.get_rank() == 0):
                warnings.warn(f"{began}, where this model began, is gone: {folder} gets no tokenizer", stacklevel=2)
        if tensors is None:
            save(self, folder, like=like)
        else:
            write(folder, self.config, tensors, like=like)

    def tie_weights(self) -> None:
        """Points the head at the embedding's Parameter if they are tied; ``to_empty`` gives each of them its own."""
        if self.config.tie_word_embeddings and self.lm_head.weight is not self.model.embed_tokens.weight:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fills every parameter and buffer in place, from the folder ``config.weights`` or from the default generator.

        Drawn in the order of ``named_parameters``, whole stacks of experts also where a rank keeps a part. Matrices are
        normal with standard deviation ``initializer_range``; those that write to the residual stream with that divided
        by ``sqrt(2 num_hidden_layers)``, so that the stream's variance does not grow with depth (GPT-2, "Language
        Models are Unsupervised Multitask Learners", section 2.3). Norms are ones; biases, sinks and corrections zeros.
        """
        self.init_buffers()
        if self.config.weights is not None:
            from models.hf import load_weights  # which knows every family

            load_weights(self, self.config.weights)
            return
        std = self.config.initializer_range
        for name, parameter in self.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                _draw(parameter, std / math.sqrt(2 * self.config.num_hidden_layers))
            else:
                _draw(parameter, std)

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Ties what is tied and zeroes the buffers: all that parameters from a checkpoint leave to do."""
        self.tie_weights()
        for buffer in self.buffers():
            buffer.zero_()


def _with_gradient_of(balance: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """The loss, whose gradient is that of both and whose value is its own."""
    return loss + (balance - balance.detach()) if balance.requires_grad else loss


def _draw(parameter: torch.Tensor, std: float) -> None:
    part = held(parameter)
    if part is None:
        parameter.normal_(0.0, std)
        return
    whole = torch.empty((part.total, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    parameter.copy_(whole.normal_(0.0, std)[part.first : part.stop])
