"""How much memory a prefill chunk takes, from the config, and how long a chunk may be: plain numbers, no mlx."""

from __future__ import annotations

from mlx_ds4.config import ModelConfig

# Tokens of a chunk: where memory allows, at least, and where the device does not tell its memory (a CPU, on which a
# longer chunk saves nothing and only delays progress and Ctrl+C).
DEFAULT_CHUNK, SMALLEST_CHUNK, UNTOLD_CHUNK = 8192, 256, 2048
# Index scores that exist at a time: `Indexer` takes rows in tiles, so memory does not grow with rows x context.
TILE_SCORES = 1 << 24
# Bytes for each of them: plain operations sort several copies with their indices. Measured on a CPU: 33 to 60.
_SCORE_BYTES = 64


def row_bytes(config: ModelConfig) -> tuple[int, int]:
    """Bytes that one row of a long step holds throughout a layer, and those it adds for a while. Layers are evaluated
    one by one, so one layer counts.

    Counted for plain operations, which widen to float32 and were measured on a CPU; kernels hold less. Three times
    the streams, coefficients and lists, and the largest of: queries and the heads' results with float32 copies,
    the streams' mix before its sum, the streams and keys of Engram, the chosen experts' results in two orders.
    """
    c = config
    streams = c.hc_mult * c.hidden_size
    always = 6 * streams + 128 * (c.hc_mult * (c.hc_mult + 2) + 1)
    always += 8 * (c.index_topk + c.sliding_window + c.candidate_topk_blocks)
    attention = 16 * (c.num_attention_heads * c.head_dim + c.index_n_heads * c.index_head_dim)
    mix = 8 * c.hc_mult * streams + 8 * streams
    engram = 48 * streams if c.engram_layer_ids else 0
    experts = 4 * c.num_experts_per_tok * (c.hidden_size + c.moe_intermediate_size) + 12 * c.hidden_size
    return always, max(attention, mix, engram, experts)


def chunk_bytes(config: ModelConfig, rows: int, context: int) -> int:
    """Bytes that a chunk of `rows` tokens needs beyond weights and cache, when it ends at position `context`.

    An upper bound for plain operations, without the one weight that they hold dequantized.
    """
    c, scores = config, 0
    always, more = row_bytes(c)
    if any(c.compress_ratios):
        # A row of scores is as wide as the cache's arrays: up to twice its entries.
        scores = min(TILE_SCORES, rows * 2 * (context + 512))
    listed = -(-(c.sliding_window + c.index_topk) // 64) * 64
    gathered = 8 * min(rows, 64) * listed * c.head_dim  # of a tile of queries, and widened
    return rows * always + max(rows * more, _SCORE_BYTES * scores) + gathered


def chunk_size(config: ModelConfig, tokens: int, context: int, free: int | None) -> int:
    """Tokens of a chunk for a prompt of `tokens` that ends at position `context`, on a device with `free` bytes left.

    8,192, or half of that and so on down to 256, so that a chunk takes at most half of what is free; the rest is left
    to the growing cache. 2,048 where `free` is None: the device does not say.
    """
    if free is None:
        return UNTOLD_CHUNK
    rows = DEFAULT_CHUNK
    while rows > SMALLEST_CHUNK and chunk_bytes(config, min(rows, tokens), context) > free // 2:
        rows //= 2
    return rows
