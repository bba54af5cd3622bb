"""Llama: a dense decoder of pre-normalised attention and SwiGLU layers, under Hugging Face's names.

Its parameters:

    Llama
      model.embed_tokens.weight                       (vocab, hidden)
      model.layers.0.input_layernorm.weight           (hidden,)
                    .self_attn.{q,k,v,o}_proj.weight  (out, in)
                    .post_attention_layernorm.weight  (hidden,)
                    .mlp.{gate,up,down}_proj.weight   (out, in)
      model.norm.weight                               (hidden,)
      lm_head.weight                                  (vocab, hidden); the same Parameter as embed_tokens when tied
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from models.activations import Activations, chunked_loss, dense_layer, norm_saved
from models.attention import Attention, is_positive, rope_problems, rotary_table
from models.flops import flops_per_token
from models.layers import Embedding, Head, RMSNorm, SwiGLU

_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "loss_chunk_size",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The sizes and switches of a Llama, under Hugging Face's names and with its defaults (those of Llama-2-7B).

    Args:
        vocab_size: Tokens of the vocabulary.
        hidden_size: Elements of the residual stream; a multiple of ``num_attention_heads``.
        intermediate_size: Elements between the projections of the feed-forward layer.
        num_hidden_layers: Decoder layers.
        num_attention_heads: Query heads; a multiple of ``num_key_value_heads``.
        num_key_value_heads: Key and value heads; None: as many as query heads.
        head_dim: Elements of a head, even; None: ``hidden_size / num_attention_heads``.
        max_position_embeddings: Tokens of the longest sequence that forward takes.
        rms_norm_eps: Added to the mean square in every norm.
        rope_theta: Base of the rotary wavelengths.
        rope_scaling: None, ``{"rope_type": "default"}``, or ``{"rope_type": "llama3", "factor": ..., "low_freq_factor":
            ..., "high_freq_factor": ..., "original_max_position_embeddings": ...}``.
        tie_word_embeddings: Whether the head's weight is the embedding's.
        initializer_range: Standard deviation of the initial weights.
        checkpoint: "full" keeps only each decoder layer's input for backward and computes the layer again there; "none"
            keeps everything.
        loss_chunk_size: Tokens whose logits exist at a time when forward is given labels. 1024 of a vocabulary of
            128,256 take about 1 GB (fp32 logits and log-probabilities); each chunk reads and writes the gradient of the
            head once, so fewer tokens are slower.

    Raises:
        ValueError: With every problem in one message.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = None  # type: ignore[assignment]  # None only until __post_init__
    head_dim: int = None  # type: ignore[assignment]  # None only until __post_init__
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    checkpoint: Literal["none", "full"] = "none"
    loss_chunk_size: int = 1024

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None and _is_count(self.hidden_size) and _is_count(self.num_attention_heads):
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if isinstance(self.rope_scaling, Mapping):  # a copy: the caller's may change later
            object.__setattr__(self, "rope_scaling", dict(self.rope_scaling))
        problems = [*self._wrong_counts(), *self._wrong_numbers(), *rope_problems(self.rope_scaling)]
        if problems:
            raise ValueError("\n  ".join([f"LlamaConfig has {len(problems)} problem(s):", *problems]))

    def _wrong_counts(self) -> Iterator[str]:
        # A head_dim of None is left only beside a wrong hidden_size or num_attention_heads, which is then the problem
        # to name.
        values = {name: getattr(self, name) for name in _COUNTS if name != "head_dim" or self.head_dim is not None}
        bad = {name: value for name, value in values.items() if not _is_count(value)}
        yield from (f"{name}: expected an integer >= 1, got {value!r}" for name, value in bad.items())
        if bad:
            return
        heads = self.num_attention_heads
        if self.hidden_size % heads:
            yield f"hidden_size: expected a multiple of num_attention_heads = {heads}, got {self.hidden_size}"
        if heads % self.num_key_value_heads:
            got = self.num_key_value_heads
            yield f"num_key_value_heads: expected a divisor of num_attention_heads = {heads}, got {got}"
        if self.head_dim % 2:
            yield f"head_dim: expected an even number, whose halves are rotated against each other, got {self.head_dim}"

    def _wrong_numbers(self) -> Iterator[str]:
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            if not is_positive(getattr(self, name)):
                yield f"{name}: expected a number > 0, got {getattr(self, name)!r}"
        if not isinstance(self.tie_word_embeddings, bool):
            yield f"tie_word_embeddings: expected true or false, got {self.tie_word_embeddings!r}"
        if self.checkpoint not in ("none", "full"):
            yield f"checkpoint: expected 'none' or 'full', got {self.checkpoint!r}"

    def build(self) -> Llama:
        """Returns the model on the current default device, its weights NaN until ``init_weights`` or a load."""
        return Llama(self)

    def num_parameters(self) -> int:
        """Returns how many parameters the model has, without building it; tied ones count once."""
        norms = (2 * self.num_hidden_layers + 1) * self.hidden_size
        look_up = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return self.num_matrix_parameters() + norms + look_up

    def num_matrix_parameters(self) -> int:
        """Returns how many parameters each token is multiplied by: the projections and the head."""
        query, key = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        layer = self.hidden_size * (2 * query + 2 * key + 3 * self.intermediate_size)
        return self.num_hidden_layers * layer + self.vocab_size * self.hidden_size

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> float:
        """Returns the FLOPs of a token's matrix products, forward and backward, as ``models.flops`` counts them."""
        return flops_per_token(
            matrix_parameters=self.num_matrix_parameters(),
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            seq_len=seq_len,
            causal=causal,
        )

    def activations(self, *, batch: int, seq_len: int, itemsize: int, fused: bool = True) -> Activations:
        """Returns the bytes of a micro-batch, as ``models.activations`` counts them.

        Args:
            batch: Sequences.
            seq_len: Tokens of each.
            itemsize: Bytes of an element of what is computed with.
            fused: Norms are one kernel, as on CUDA.
        """
        tokens, hidden = batch * seq_len, self.hidden_size
        layer = dense_layer(
            tokens,
            hidden=hidden,
            query=self.num_attention_heads * self.head_dim,
            key_value=self.num_key_value_heads * self.head_dim,
            heads=self.num_attention_heads,
            ffn=self.intermediate_size,
            itemsize=itemsize,
            fused=fused,
        )
        loss, kept = chunked_loss(
            tokens, hidden=hidden, vocab=self.vocab_size, chunk=self.loss_chunk_size, itemsize=itemsize
        )
        # The last norm's input and output; the output lives as long as the loss is computed.
        tail = tokens * hidden * itemsize + norm_saved(tokens, hidden, itemsize, fused=fused)
        loss += tokens * hidden * itemsize
        return Activations((layer,) * self.num_hidden_layers, self.checkpoint == "full", tail, loss, kept)


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward layer, each normalised before and added to the stream after."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(
            config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Returns the stream after this layer; (b, s, hidden), dtype of ``hidden``."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Decoder(nn.Module):
    """Everything but the head; Hugging Face's ``model.`` prefix."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns the normalised stream after the last layer; (b, s, hidden), dtype of the embedding."""
        config = self.config
        hidden = self.embed_tokens(input_ids)
        cos, sin = rotary_table(
            input_ids.shape[1],
            config.head_dim,
            theta=config.rope_theta,
            scaling=config.rope_scaling,
            dtype=hidden.dtype,
            device=hidden.device,
        )
        for layer in self.layers:
            if config.checkpoint == "full":  # nothing in a layer is random: keeping the generator's state only waits
                hidden = checkpoint(layer, hidden, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = layer(hidden, cos, sin)
        out: torch.Tensor = self.norm(hidden)
        return out


class Llama(nn.Module):
    """A causal language model; see the module's docstring for its parameters.

    Building it draws no random number and leaves the matrices NaN; ``init_weights`` or ``models.hf.load_weights`` fills
    them.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = Head(config.hidden_size, config.vocab_size, chunk_size=config.loss_chunk_size)
        self.tie_weights()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the logits, or with labels the sum of the token losses, whose logits never exist whole.

        Args:
            input_ids: (b, s) int64.
            labels: (b, s) int64, already shifted: ``labels[:, i]`` is what should follow ``input_ids[:, i]``; -100 for
                no loss. Or None.

        Returns:
            (b, s, vocab) in the dtype of the weights, or 0-d float32.

        Raises:
            ValueError: If the shapes are wrong or the sequence is longer than ``max_position_embeddings``.
        """
        _check(input_ids, labels, longest=self.config.max_position_embeddings)
        out: torch.Tensor = self.lm_head(self.model(input_ids), labels)
        return out

    def units(self) -> list[nn.Module]:
        """Returns the modules to shard one by one, in the order of forward; the rest belongs in one more unit."""
        return list(self.model.layers)

    def tie_weights(self) -> None:
        """Points the head at the embedding's Parameter if they are tied; ``to_empty`` gives each of them its own."""
        if self.config.tie_word_embeddings and self.lm_head.weight is not self.model.embed_tokens.weight:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fills every parameter in place, drawing from the default generator in the order of ``named_parameters``.

        Matrices are normal with standard deviation ``initializer_range``; those that write to the residual stream with
        that divided by ``sqrt(2 num_hidden_layers)``, so that the stream's variance does not grow with depth (GPT-2,
        "Language Models are Unsupervised Multitask Learners", section 2.3). Norms are ones. There are no buffers to
        fill.
        """
        self.tie_weights()
        std = self.config.initializer_range
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.normal_(0.0, std / math.sqrt(2 * self.config.num_hidden_layers))
            else:
                parameter.normal_(0.0, std)


def _check(input_ids: torch.Tensor, labels: torch.Tensor | None, *, longest: int) -> None:
    """Raises ValueError unless the shapes fit; looks at shapes only, so the device is not waited for."""
    problems = []
    if input_ids.ndim != 2 or not input_ids.numel():
        problems.append(f"input_ids: expected (batch, sequence) with at least one token, got {tuple(input_ids.shape)}")
    elif input_ids.shape[1] > longest:
        got = input_ids.shape[1]
        problems.append(f"input_ids: expected at most max_position_embeddings = {longest} tokens, got {got}")
    if labels is not None and labels.shape != input_ids.shape:
        problems.append(f"labels: expected the shape of input_ids, {tuple(input_ids.shape)}, got {tuple(labels.shape)}")
    if problems:
        raise ValueError("; ".join(problems))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
