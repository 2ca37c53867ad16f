"""Streams an answer and then asks on, reusing the cache.

python -m examples.stream_text [MODEL]     (without a path: the small model in the package)
"""

import sys

from mlx_ds4 import load, stream_generate
from mlx_ds4.generation import PromptCache

model, tokenizer = load(*sys.argv[1:2])
cache = PromptCache(model)
messages = []
for question in ("What does a sliding window do?", "And a sink?"):
    messages.append({"role": "user", "content": question})
    answer = ""
    for response in stream_generate(
        model, tokenizer, tokenizer.apply_chat_template(messages), max_tokens=12, prompt_cache=cache
    ):
        answer += response.text
        print(response.text, end="", flush=True)
    messages.append({"role": "assistant", "content": answer})
    print(f"\n[{response.prompt_tokens} prompt tokens, {response.cached_tokens} of them cached]\n")
