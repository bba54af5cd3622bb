"""What a micro-batch leaves in memory for backward, layer by layer, in closed form.

Selective counting after arXiv 2205.05198, section 4, with what differs here: attention never stores its scores (flash),
there is no dropout, heads share keys and values, the feed-forward layer is gated, and the loss never holds its logits
whole. Per token of a layer, in elements::

    stream in                       hidden          kept in any case
    input norm's output             hidden          for q, k, v
    attention                       see below
    stream between the two halves   hidden
    second norm's output            hidden          for gate and up, or the router
    feed-forward                    see below

    grouped queries                 2 q + 2 kv      q, k rotated, v, the output; its log-sum-exp, a float32 per head
      their norms                   + q + kv        what is normalised (Qwen3)
      sinks                         + q             the output before the sink takes its part (GPT-OSS)
    latent attention                2 r_q + 2 r_kv + rope             in and out of the norms of both latents
                                    + heads (2 (nope + rope) + nope + 2 v)    q, k; k without position beside v; output
    gated                           4 ffn           gate, silu(gate), up, product
    experts, k of a token           k (2 hidden + 4 ffn)              sorted tokens, an expert's middle, its output
      clamped (GPT-OSS)             k (2 hidden + 7 ffn)              gate, up before; gate, sigmoid, both, up after
      router                        experts float32, and the tokens in float32 where they are narrower
        its balancing loss          + experts float32

Norms on CUDA are one kernel that keeps one float32 per row; elsewhere they are composed of operators, which also keep a
normalised float32 copy, and one of the input instead of it if that is narrower. Likewise sinks: elsewhere than on CUDA
the softmax is written out, over keys and values repeated for every query head.
"""

from __future__ import annotations

from typing import NamedTuple

INDEX = 8  # bytes of an int64


class LayerActivations(NamedTuple):
    """Bytes that one layer's forward and backward hold on one rank.

    Args:
        stream: Its input, the only thing that is kept when the layer is computed again in backward.
        saved: What else forward saves for backward.
        work: Most that backward holds at a time beyond what was saved: gradients of what lies between operators.
    """

    stream: int
    saved: int
    work: int


class Activations(NamedTuple):
    """Bytes of one micro-batch on one rank.

    Args:
        layers: Of the modules that ``units()`` returns, in the order of forward.
        recomputed: Whether layers keep only their input and are computed again in backward.
        tail: What is saved after the last layer.
        loss: Most that the loss holds at a time while it is computed: logits, their softmax, gradients.
        loss_kept: What of it stays until backward begins: gradients of the head and of its input.
    """

    layers: tuple[LayerActivations, ...]
    recomputed: bool
    tail: int
    loss: int
    loss_kept: int


class Batch(NamedTuple):
    """What is counted.

    Args:
        tokens: Of the micro-batch.
        seq_len: Of a sequence.
        itemsize: Bytes of an element of what is computed with.
        fused: Norms and sinks are in kernels, as on CUDA.
    """

    tokens: int
    seq_len: int
    itemsize: int
    fused: bool = True


class Part(NamedTuple):
    """Bytes of one half of a layer: what it saves beyond its input, and most that its backward holds besides."""

    saved: int
    work: int


def norm_saved(batch: Batch, size: int, *, rows: int = 1) -> int:
    """Returns the bytes that root-mean-square norms save beyond their input and their output.

    Args:
        batch: Of the layer.
        size: Elements of a row.
        rows: Of a token.
    """
    copies = 0 if batch.fused else 4 * size if batch.itemsize == 4 else 6 * size
    return batch.tokens * rows * (4 + copies)


def grouped_queries(
    batch: Batch, *, heads: int, kv_heads: int, head_dim: int, qk_norm: bool = False, sinks: bool = False
) -> Part:
    """Returns what grouped-query attention holds.

    Args:
        batch: Of the layer.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Elements of a head.
        qk_norm: Queries and keys are normalised per head.
        sinks: The softmax has a sink per head.
    """
    query, key_value = heads * head_dim, kv_heads * head_dim
    row, statistics = 2 * query + 2 * key_value, 4 * heads
    norms = norm_saved(batch, head_dim, rows=heads + kv_heads) if qk_norm else 0
    if qk_norm:
        row += query + key_value
    if sinks and not batch.fused:
        return _sinks_written_out(batch, query=query, heads=heads)
    if sinks:
        row, statistics = row + query, statistics + (4 + batch.itemsize) * heads
    work = batch.tokens * batch.itemsize * (2 * query + 2 * key_value)  # gradients of the output, q, k and v
    return Part(batch.tokens * (batch.itemsize * row + statistics) + norms, work)


def _sinks_written_out(batch: Batch, *, query: int, heads: int) -> Part:
    """q, repeated k and v, the output; the weights with a column for the sink, and in backward three like them."""
    weights = 4 * batch.tokens * heads * (batch.seq_len + 1)
    rounded = 0 if batch.itemsize == 4 else batch.itemsize * batch.tokens * heads * batch.seq_len
    return Part(batch.tokens * batch.itemsize * 4 * query + weights + rounded, 3 * weights)


def latent_attention(
    batch: Batch, *, heads: int, q_lora: int | None, kv_lora: int, nope: int, rope: int, value: int
) -> Part:
    """Returns what multi-head latent attention holds (arXiv 2405.04434, section 2.1).

    Args:
        batch: Of the layer.
        heads: Heads.
        q_lora: Elements of the query's latent; None: there is none.
        kv_lora: Elements of the latent of key and value.
        nope: Elements of a head of query and key that do not rotate.
        rope: Those that do.
        value: Elements of a head of the value.
    """
    latents = 2 * (q_lora or 0) + 2 * kv_lora + rope
    row = latents + heads * (2 * (nope + rope) + (nope + value) + value)
    norms = norm_saved(batch, kv_lora) + (norm_saved(batch, q_lora) if q_lora else 0)
    work = batch.tokens * batch.itemsize * heads * (3 * (nope + rope) + 3 * value)
    return Part(batch.tokens * (batch.itemsize * row + 4 * heads) + norms, work)


def gated(batch: Batch, *, ffn: int) -> Part:
    """Returns what a gated feed-forward layer holds.

    Args:
        batch: Of the layer.
        ffn: Elements between its projections.
    """
    # The gradients of silu(gate) and of up; the product, which is free by then, is among the saved.
    each = batch.tokens * batch.itemsize * ffn
    return Part(4 * each, 2 * each)


def experts(
    batch: Batch,
    *,
    hidden: int,
    ffn: int,
    k: int,
    num_experts: int,
    shared: int = 0,
    clamped: bool = False,
    balanced: bool = False,
) -> Part:
    """Returns what a mixture of experts holds when all its experts are on this rank, however the tokens are dealt.

    Args:
        batch: Of the layer.
        hidden: Elements of the residual stream.
        ffn: Elements between an expert's projections.
        k: Experts of a token.
        num_experts: Of the layer.
        shared: Elements between the projections of the expert that every token goes through; 0: there is none.
        clamped: The activation is GPT-OSS's, and the projections have biases.
        balanced: There is a balancing loss, which keeps the share of each expert in a token's sequence.
    """
    rows = batch.tokens * k
    middle = (7 if clamped else 4) * ffn
    # Of a row: where it came from, its expert, where it went, and for the biases its expert again, three times.
    indices = INDEX * (6 if clamped else 3)
    scores = batch.tokens * 4 * ((2 if balanced else 1) * num_experts + 2 * k)
    wide = 0 if batch.itemsize == 4 else batch.tokens * 4 * hidden
    both = gated(batch, ffn=shared)
    saved = rows * (batch.itemsize * (2 * hidden + middle) + indices) + scores + wide + both.saved
    # Gradients of the experts' outputs, twice while they are sorted back; then of what lies between the projections.
    work = rows * batch.itemsize * max(2 * hidden, hidden + 2 * ffn)
    return Part(saved, max(work, both.work))


def decoder_layer(batch: Batch, *, hidden: int, attention: Part, feed_forward: Part) -> LayerActivations:
    """Returns what a pre-normalised layer holds.

    Args:
        batch: Of the layer.
        hidden: Elements of the residual stream.
        attention: Its first half.
        feed_forward: Its second.
    """
    stream = batch.tokens * batch.itemsize * hidden
    saved = 3 * stream + 2 * norm_saved(batch, hidden) + attention.saved + feed_forward.saved
    # The stream's gradient, and those inside a half; when attention goes backward, the second half is free already.
    return LayerActivations(stream, saved, stream + max(feed_forward.work, attention.work - feed_forward.saved))


def chunked_loss(batch: Batch, *, hidden: int, vocab: int, chunk: int) -> tuple[int, int]:
    """Returns the most bytes that ``linear_cross_entropy`` holds at a time, and those that stay until backward.

    Of a chunk the logits and their log-probabilities exist at once, in float32. The gradients of its input and of the
    head are made while it runs, the head's from the first chunk on.

    Args:
        batch: Of the model.
        hidden: Elements of the head's input.
        vocab: Rows of the head.
        chunk: Tokens whose logits exist at a time.
    """
    tokens, itemsize = batch.tokens, batch.itemsize
    logits = min(chunk, tokens) * vocab
    head, inputs = vocab * hidden * itemsize, tokens * hidden * itemsize
    first = max(8 * logits, itemsize * logits + head)
    work = first if tokens <= chunk else 8 * logits + head
    return work + inputs, inputs + head
