"""A model that is a small deterministic function of its token history, and a tokenizer of single bytes."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import mlx.core as mx

REWIND = 8
BOS, EOS = 256, 257
VOCAB = 258


class FakeLayer:
    """One hash per position; `rows` are those of every position so far."""

    def __init__(self):
        self.rows = mx.zeros((1,), mx.int32)

    @property
    def state(self):
        return [self.rows]


class FakeCache:
    """State of prefill mode "exact"; these models have no decoder layers to cut off."""

    def __init__(self, prefill_mode="exact"):
        assert prefill_mode == "exact"
        self.prefill_mode = prefill_mode
        self.layers = [FakeLayer(), FakeLayer()]
        self.offset = 0
        self.rewindable = 0

    def __iter__(self):
        return iter(self.layers)

    def trim(self, count):
        if not 0 <= count <= self.rewindable:
            raise ValueError(f"cannot take back {count}")
        self.offset -= count
        self.rewindable -= count
        for layer in self.layers:
            layer.rows = layer.rows[: self.offset + 1]
        return count

    def missing_rows(self, kept, count):
        return 0

    def copy(self):
        other = copy.copy(self)
        other.layers = [copy.copy(layer) for layer in self.layers]
        return other

    def arrays(self):
        return [layer.rows.tolist() for layer in self.layers]


class FakeModel:
    """Logits [B, L, V] from two running hashes; the layers must be equally far, or it fails.

    `between_layers` is called in the middle of every call, `fed` counts the positions processed.
    """

    def __init__(self, max_position_embeddings=1000):
        self.config = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=max_position_embeddings)
        self.layers = [0, 1]
        self.between_layers = lambda: None
        self.fed = 0

    def make_cache(self, prefill_mode="exact"):
        return FakeCache(prefill_mode)

    def __call__(self, tokens, cache=None, last_only=False, sampled=False):
        cache = self.make_cache() if cache is None else cache
        start, ids = cache.offset, mx.array(tokens).astype(mx.int32)
        for number, layer in enumerate(cache):
            if number == 1:
                self.between_layers()
            if layer.rows.size != start + 1:
                raise RuntimeError(f"layer {number} holds {layer.rows.size - 1} positions, the cache {start}")
            for n in range(tokens.shape[1]):
                new = (layer.rows[-1:] * (31 + number) + ids[0, n : n + 1] * 7 + 3) % 9973
                layer.rows = mx.concatenate([layer.rows, new])
        count = tokens.shape[1]
        cache.offset += count
        cache.rewindable = min(REWIND, cache.rewindable + count)
        self.fed += count
        mixed = cache.layers[0].rows[start + 1 :] + 2 * cache.layers[1].rows[start + 1 :]
        logits = self.logits(mixed, start)[None]
        return logits[:, -1:] if last_only else logits

    def logits(self, mixed, start):
        waves = mx.sin(mixed[:, None].astype(mx.float32) * (mx.arange(VOCAB) + 1) * 0.173)
        return 5 * mx.where(mx.arange(VOCAB) < 256, waves, -mx.inf)  # never ends by itself


class ScriptedModel(FakeModel):
    """Says `script` behind a prompt of any length, then ends."""

    def __init__(self, script: bytes, prompt_size: int, **kwargs):
        super().__init__(**kwargs)
        self.script = [*script, EOS, EOS]
        self.first = prompt_size - 1

    def logits(self, mixed, start):
        places = [min(max(start + n - self.first, 0), len(self.script) - 1) for n in range(mixed.size)]
        tokens = mx.array([self.script[place] for place in places])
        return 9.0 * (mx.arange(VOCAB) == tokens[:, None]).astype(mx.float32) + 0 * mixed[:, None]


class ByteDetokenizer:
    """Gives out text as soon as its bytes are complete."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.bytes, self.text, self._read, self._done = b"", "", 0, False

    def add_token(self, token):
        if token < 256:
            self.bytes += bytes([token])
        text = self.bytes.decode("utf-8", errors="ignore")
        if text.encode() == self.bytes:
            self.text = text

    def finalize(self):
        self.text = self.bytes.decode("utf-8", errors="replace")

    @property
    def last_segment(self):
        segment, self._read = self.text[self._read :], len(self.text)
        return segment


class ByteTokenizer:
    bos_token_id = BOS
    eos_token_ids = frozenset({EOS})

    def encode(self, text, *, add_special_tokens=False, allow_special=True):
        return ([BOS] if add_special_tokens else []) + list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    @property
    def detokenizer(self):
        return ByteDetokenizer()
