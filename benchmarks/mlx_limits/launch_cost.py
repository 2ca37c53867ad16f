"""Limit: on CUDA, a launch's host time grows with the kernel's inputs, outputs and text, with views, and with commits.

`python benchmarks/mlx_limits/launch_cost.py [--toy]` prints CPU us a launch in compiled chains: "call" copies a graph,
"eval" hands it over. MLX's limit of "MB" counts elements: 1.4e9 of them commit at each launch. `--toy`: a try on a CPU.
"""

import sys
import time

import mlx.core as mx

TOY = "--toy" in sys.argv
LAUNCHES, REPEATS, MANY = (5, 2, 16) if TOY else (200, 15, 11 << 27)
VARIANTS = {"plain": {}, "two_views": {"views": True}, "text_64_kb": {"kilobytes": 64}, "template_10": {"template": 10},
    "inputs_12": {"inputs": 12}, "outputs_5": {"outputs": 5}, "inputs_12_outputs_5": {"inputs": 12, "outputs": 5},
    "commits": {"inputs": 2, "elements": MANY}}  # fmt: skip
if not TOY and not mx.cuda.is_available():
    sys.exit("launch_cost needs a CUDA device: it times launches of CUDA kernels.")


def measure(name, inputs=1, outputs=1, kilobytes=0, template=0, views=False, elements=16):
    x, extras, times = mx.zeros((1, 1024)), [mx.zeros(elements, mx.int8) for _ in range(inputs - 1)], []
    mx.eval(x, extras)
    run = (lambda inputs, **call: [mx.cumsum(inputs[0], axis=-1)]) if TOY else mx.fast.cuda_kernel(
        name=f"limit_{name}", input_names=[f"in{i}" for i in range(inputs)],
        output_names=[f"o{i}" for i in range(outputs)], header=("// " + "." * 60 + "\n") * (16 * kilobytes),
        source="unsigned int i = blockIdx.x * blockDim.x + threadIdx.x; o0[i] = in0[i] + 1.0f;")  # fmt: skip
    call = {"template": [(f"N{i}", i) for i in range(template)], "output_shapes": [(1, 1024)] * outputs}
    call |= {"output_dtypes": [mx.float32] * outputs, "grid": (1024, 1, 1), "threadgroup": (256, 1, 1)}

    @mx.compile
    def chain(x, extras):
        for _ in range(LAUNCHES):
            x = run(inputs=[x.reshape(1, 1, 1024).reshape(1024) if views else x, *extras], **call)[0]
        return x

    for _ in range(REPEATS + 1):
        mx.synchronize()
        start, y, called = time.thread_time(), chain(x, extras), time.thread_time()
        mx.async_eval(y)
        times.append((called - start, time.thread_time() - called))
    call_us, eval_us = (sorted(part)[REPEATS // 2] / LAUNCHES * 1e6 for part in zip(*times[1:], strict=True))
    print(f'{{"variant": "{name}", "call_us": {call_us:.2f}, "eval_us": {eval_us:.2f}}}', flush=True)


for name, parts in VARIANTS.items():
    measure(name, **parts)
