"""Generates with a sampler of one's own: the second likeliest token whenever it is close to the best.

python -m examples.own_sampler [MODEL]     (without a path: the small model in the package)
"""

import sys

import mlx.core as mx

from mlx_ds4 import generate_step, load


def nearly_greedy(logprobs: mx.array) -> mx.array:
    """[1, vocab] -> [1]: any function of the log-probabilities will do."""
    first, second = mx.argsort(-logprobs, axis=-1)[0, :2]
    close = logprobs[0, first] - logprobs[0, second] < 0.5
    return mx.where(close, second, first)[None]


model, tokenizer = load(*sys.argv[1:2])
prompt = mx.array(tokenizer.encode("Once upon a time", add_special_tokens=True))
for token, logprobs in generate_step(prompt, model, max_tokens=10, sampler=nearly_greedy):
    rank = (logprobs > logprobs[token]).sum().item()
    print(f"{token:6}  {tokenizer.decode([token])!r:24} rank {rank}  p {mx.exp(logprobs[token]).item():.3f}")
    if token in tokenizer.eos_token_ids:
        break
