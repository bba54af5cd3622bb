"""What a micro-batch leaves in memory for backward, layer by layer, in closed form.

Selective counting after arXiv 2205.05198, section 4, with what differs here: attention never stores its scores (flash),
there is no dropout, heads share keys and values, the feed-forward layer is gated, and the loss never holds its logits
whole. Per token of a layer, in elements::

    stream in                       hidden          kept in any case
    input norm's output             hidden          for q, k, v
    q, k, v; attention's output     2 q + 2 kv      rotated; its log-sum-exp is one float32 per head
    stream between the two halves   hidden
    second norm's output            hidden          for gate and up
    gate, silu(gate), up, product   4 ffn

Norms on CUDA are one kernel that keeps one float32 per row; elsewhere they are composed of operators, which also keep a
normalised float32 copy, and one of the input if that is narrower.
"""

from __future__ import annotations

from typing import NamedTuple


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


def norm_saved(tokens: int, hidden: int, itemsize: int, *, fused: bool) -> int:
    """Returns the bytes that a root-mean-square norm saves beyond its input and its output.

    Args:
        tokens: Rows.
        hidden: Elements of a row.
        itemsize: Bytes of an element.
        fused: One kernel, as on CUDA.
    """
    copies = 0 if fused else 4 * hidden if itemsize == 4 else 8 * hidden
    return tokens * (4 + copies)


def dense_layer(
    tokens: int,
    *,
    hidden: int,
    query: int,
    key_value: int,
    heads: int,
    ffn: int,
    itemsize: int,
    fused: bool,
) -> LayerActivations:
    """Returns what a layer of attention and a gated feed-forward holds.

    Args:
        tokens: Of the micro-batch.
        hidden: Elements of the residual stream.
        query: Elements of all query heads of a token.
        key_value: Elements of all key heads of a token; values are as many.
        heads: Query heads.
        ffn: Elements between the projections of the feed-forward layer.
        itemsize: Bytes of an element of what is computed with.
        fused: Norms are one kernel, as on CUDA.
    """
    row = 3 * hidden + 2 * query + 2 * key_value + 4 * ffn
    saved = tokens * (itemsize * row + 4 * heads) + 2 * norm_saved(tokens, hidden, itemsize, fused=fused)
    # The gradients of the stream, of silu(gate) and of up; the product, which is free by then, is among the saved.
    return LayerActivations(tokens * itemsize * hidden, saved, tokens * itemsize * (hidden + 2 * ffn))


def chunked_loss(tokens: int, *, hidden: int, vocab: int, chunk: int, itemsize: int) -> tuple[int, int]:
    """Returns the most bytes that ``linear_cross_entropy`` holds at a time, and those that stay until backward.

    Of a chunk the logits and their log-probabilities exist at once, in float32. The gradients of its input and of the
    head are made while it runs, the head's from the first chunk on.

    Args:
        tokens: Of the micro-batch.
        hidden: Elements of the head's input.
        vocab: Rows of the head.
        chunk: Tokens whose logits exist at a time.
        itemsize: Bytes of an element of what is computed with.
    """
    logits = min(chunk, tokens) * vocab
    head, inputs = vocab * hidden * itemsize, tokens * hidden * itemsize
    first = max(8 * logits, itemsize * logits + head)
    work = first if tokens <= chunk else 8 * logits + head
    return work + inputs, inputs + head
