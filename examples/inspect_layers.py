"""Lists the layers and looks at the residual streams after each of them.

python -m examples.inspect_layers [MODEL]     (without a path: the small model in the package)
"""

import sys

import mlx.core as mx

from mlx_ds4 import load

model, tokenizer = load(*sys.argv[1:2])
config = model.config
tokens = mx.array([tokenizer.encode("The quick brown fox", add_special_tokens=True)])
trace = model.trace(tokens)  # every intermediate array of one pass, by name

print(f"{len(model.layers)} layers, {config.hidden_size} channels in {config.hc_mult} streams")
for index in range(len(model.layers)):
    h = trace[f"L{index}.h_out"].astype(mx.float32)  # [1, L, streams, channels]
    norms = mx.sqrt(mx.square(h[0, -1]).mean(axis=-1)).tolist()
    print(f"layer {index:2}  ratio {config.ratio(index)}  rms of the last token's streams: ", end="")
    print("  ".join(f"{norm:8.4f}" for norm in norms))

best = mx.argsort(-trace["logits"][0, -1])[:5].tolist()
print("likeliest next tokens:", [tokenizer.decode([token]) for token in best])
