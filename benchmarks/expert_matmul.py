"""Routed experts on a GPU: correctness first, then one row, six rows and prefill against MLX's gather products.

    python benchmarks/expert_matmul.py

Real sizes: 384 experts of 2304 x 5120, top 6, the Q2 recipe (IQ2_XXS gate and up, Q2_K down), and MXFP4. The peer is
MLX's `gather_qmm` with mxfp4 weights for decode and verification, and dequantize + `gather_mm` in bfloat16 for prefill.
"""

from __future__ import annotations

import argparse
import json

import mlx.core as mx
from quant_matmul import copy_rate, device, nbytes, rows_of, seconds

from mlx_ds4.custom_kernels._random_planes import device_planes
from mlx_ds4.custom_kernels.expert_matmul import expert_down, expert_swiglu, plan_pairs
from mlx_ds4.custom_kernels.shared_expert import clamped_swiglu_ref
from mlx_ds4.formats.planes import dequantize

LIMIT = 10.0


def layer(x, gate, up, down, chosen, weights):
    plan = plan_pairs(chosen, down[1]["codes"].shape[0])
    a = expert_swiglu(x, gate, up, chosen, weights, limit=LIMIT, plan=plan)
    return a, expert_down(a, down, chosen, plan=plan)


def reference(x, gate, up, down, chosen, weights):
    """Every expert's matrices at once, in float32: for small sizes."""
    w1, w3, w2 = (dequantize(format, planes) for format, planes in (gate, up, down))
    rows = x.astype(mx.float32)[:, None, :, None]
    g, u = ((w[chosen] @ rows)[..., 0].astype(mx.bfloat16) for w in (w1, w3))
    a = clamped_swiglu_ref(g, u, LIMIT, weights[..., None])
    y = (w2[chosen] @ a.astype(mx.float32)[..., None])[..., 0].astype(mx.bfloat16)
    return a, y.astype(mx.float32).sum(axis=1)


def routed(rows, experts, slots, seed):
    scores = mx.random.normal((rows, experts), key=mx.random.key(seed))
    chosen = mx.sort(mx.argpartition(-scores, slots - 1, axis=-1)[:, :slots], axis=-1).astype(mx.int32)
    weights = mx.random.uniform(0.1, 0.5, (rows, slots), key=mx.random.key(seed + 1))
    mx.eval(chosen, weights)
    return chosen, weights


def relative(got, want):
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    return (mx.linalg.norm(got - want, stream=mx.cpu) / mx.linalg.norm(want, stream=mx.cpu)).item()


def check(gu: str, dn: str) -> None:
    E, F, C, slots = 8, 256, 512, 6
    gate, up = ((gu, device_planes(s, gu, E, F, C)) for s in (1, 2))
    down = (dn, device_planes(3, dn, E, C, F))
    for rows in (1, 6, 40, 100):
        x = mx.random.normal((rows, C), key=mx.random.key(9)).astype(mx.bfloat16) * 4
        chosen, weights = routed(rows, E, slots, rows)
        got = layer(x, gate, up, down, chosen, weights)
        with mx.stream(mx.cpu):
            want = reference(x, gate, up, down, chosen, weights)
        errors = [relative(g, w) for g, w in zip(got, want, strict=True)]
        assert max(errors) < 6e-3, (gu, dn, rows, errors)
        one = layer(x[:1], gate, up, down, chosen[:1], weights[:1])
        assert all(mx.array_equal(o[0], g[0]).item() for o, g in zip(one, got, strict=True)), (
            gu,
            rows,
            "a row depends on its neighbours",
        )
    print(json.dumps({"check": f"{gu}/{dn}", "ok": True, "errors": [round(e, 6) for e in errors]}), flush=True)


def time_recipe(gu: str, dn: str, copy: float, peers: dict) -> None:
    E, F, C, slots = 384, 2304, 5120, 6
    gate, up = ((gu, device_planes(s, gu, E, F, C)) for s in (1, 2))
    down = (dn, device_planes(3, dn, E, C, F))
    expert_bytes = sum(nbytes(p) for _, p in (gate, up, down)) / E
    for rows in (1, 6, 2048):
        few = rows < 100
        launches = 96 if few else 3
        xs = [(x, *routed(rows, E, slots, 10 * i)) for i, x in enumerate(rows_of(rows, C, launches))]
        weights = [(gate[1], up[1], down[1])]

        def whole(x, w):
            return layer(x[0], (gu, w[0]), (gu, w[1]), (dn, w[2]), *x[1:])[1]

        t = seconds(whole, xs, weights)
        parts = {}
        if few:
            parts["gate_up_us"] = seconds(
                lambda x, w: expert_swiglu(x[0], (gu, w[0]), (gu, w[1]), *x[1:], limit=LIMIT), xs, weights
            )
            a = [
                (mx.random.normal((rows, slots, F), key=mx.random.key(i)).astype(mx.bfloat16), x[1])
                for i, x in enumerate(xs)
            ]
            parts["down_us"] = seconds(lambda a, w: expert_down(a[0], (dn, w[2]), a[1]), a, weights)
        routes = [x[1:] for x in xs]
        read = expert_bytes * sum(len(set(r[0].reshape(-1).tolist())) for r in routes) / len(routes)
        record = {
            "op": "experts",
            "recipe": f"{gu}/{dn}",
            "rows": rows,
            "us": round(t * 1e6, 1),
            "copy_share": round(read / t / copy, 3),
        }
        record |= {k: round(v * 1e6, 1) for k, v in parts.items()}
        record |= {"mlx_us": round(peers[rows] * 1e6, 1), "speedup": round(peers[rows] / t, 2)}
        print(json.dumps(record), flush=True)


def peer_times() -> dict[int, float]:
    """MLX: gather_qmm on mxfp4 for few rows; dequantize + gather_mm in bfloat16 for many; plain SwiGLU."""
    E, F, C, slots = 384, 2304, 5120, 6
    mode = {"group_size": 32, "bits": 4, "mode": "mxfp4"}

    def stacked(shape):
        codes = mx.random.randint(0, 2**31, (E, shape[0], shape[1] // 8), dtype=mx.int32).astype(mx.uint32)
        scales = mx.random.randint(118, 123, (E, shape[0], shape[1] // 32), dtype=mx.int32).astype(mx.uint8)
        mx.eval(codes, scales)
        return codes, scales

    w1, w3, w2 = stacked((F, C)), stacked((F, C)), stacked((C, F))

    def act(g, u, weights):
        g = mx.minimum(g, LIMIT)
        return g * mx.sigmoid(g) * mx.clip(u, -LIMIT, LIMIT) * weights

    def few(w, x, chosen, weights):
        rows = x[:, None, None]
        index = chosen
        g = mx.gather_qmm(rows, *w[0], rhs_indices=index, transpose=True, **mode)
        u = mx.gather_qmm(rows, *w[1], rhs_indices=index, transpose=True, **mode)
        a = act(g, u, weights[..., None, None]).astype(mx.bfloat16)
        return mx.gather_qmm(a, *w[2], rhs_indices=index, transpose=True, **mode).sum(axis=1)

    def many(w, x, chosen, weights):
        def full(w):
            return mx.dequantize(*w, **mode).astype(mx.bfloat16).swapaxes(1, 2)

        order = mx.argsort(chosen.reshape(-1))
        index, rows = chosen.reshape(-1)[order], x[order // slots][:, None]
        g = mx.gather_mm(rows, full(w[0]), rhs_indices=index, sorted_indices=True)
        u = mx.gather_mm(rows, full(w[1]), rhs_indices=index, sorted_indices=True)
        a = act(g, u, weights.reshape(-1)[order][:, None, None]).astype(mx.bfloat16)
        y = mx.gather_mm(a, full(w[2]), rhs_indices=index, sorted_indices=True)
        back = mx.argsort(order)
        return y[back].reshape(x.shape[0], slots, -1).sum(axis=1)

    times = {}
    for rows in (1, 6, 2048):
        xs = [(x, *routed(rows, E, slots, 10 * i)) for i, x in enumerate(rows_of(rows, C, 96 if rows < 100 else 1))]
        run = few if rows < 100 else many
        try:
            times[rows] = seconds(lambda x, w, run=run: run(w, *x), xs, [(w1, w3, w2)])
        except Exception as error:  # the peer's failure is a result, too
            print(json.dumps({"peer": rows, "failed": str(error)[:200]}), flush=True)
            times[rows] = float("nan")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    copy = copy_rate()
    print(json.dumps({**device(), "copy_GBps": round(copy / 1e9)}), flush=True)
    recipes = [("IQ2_XXS", "Q2_K"), ("MXFP4", "MXFP4")]
    for recipe in recipes:
        check(*recipe)
    peers = peer_times()
    for recipe in recipes:
        time_recipe(*recipe, copy, peers)


if __name__ == "__main__":
    main()
