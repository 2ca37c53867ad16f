"""Writes `msl/generated_overloads.h`: Metal's arithmetic functions as explicit overload sets.

Overloads rather than templates, because overload resolution is part of what is checked: `min(uint, 1)` is
ambiguous in Metal, and must be here. Half and bfloat functions compute in float and round once.
"""

from __future__ import annotations

_words = str.split
_FLOATS = ("half", "float", "bfloat")
_BITS = {"char": 8, "short": 16, "int": 32, "long": 64}
_INTEGERS = tuple(u + t for t in _BITS for u in ("", "u"))

# Functions of one and two floats that are clang builtins of the same name with an `f` behind.
_UNARY = _words(
    "acos acosh asin asinh atan atanh ceil cos cosh exp exp2 fabs floor log log2 log10 rint round sin sinh "
    "sqrt tan tanh trunc"
)
_BINARY = _words("atan2 pow fmod fmin fmax copysign fdim")


def _mask(kind: str) -> str:
    """The element type of what comparing two vectors of `kind` gives."""
    widths = {"half": "short", "bfloat": "short", "float": "int"}
    return widths.get(kind) or kind.removeprefix("u")


class _Writer:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def function(self, result: str, name: str, parameters: str, expression: str) -> None:
        self.lines.append(f"inline {result} {name}({parameters}) {{ return {expression}; }}")

    def lift(self, kinds: tuple[str, ...], name: str, arity: int) -> None:
        """Vector overloads of a scalar function, element by element."""
        names = "xyz"[:arity]
        for kind in kinds:
            for n in (2, 3, 4):
                v = f"{kind}{n}"
                parameters = ", ".join(f"{v} {p}" for p in names)
                elements = ", ".join(f"{p}[i]" for p in names)
                self.lines.append(
                    f"inline {v} {name}({parameters}) {{ {v} r; "
                    f"for (int i = 0; i < {n}; i++) r[i] = {name}({elements}); return r; }}"
                )

    def float_functions(self) -> None:
        for t in _FLOATS:
            one, two = f"{t} x", f"{t} x, {t} y"
            for name in _UNARY:
                self.function(t, name, one, f"({t})__builtin_{name}f((float)x)")
            for name in _BINARY:
                self.function(t, name, two, f"({t})__builtin_{name}f((float)x, (float)y)")
            self.function(t, "exp10", one, f"({t})__builtin_powf(10.0f, (float)x)")
            self.function(t, "rsqrt", one, f"({t})(1.0f / __builtin_sqrtf((float)x))")
            self.function(t, "fract", one, f"({t})((float)x - __builtin_floorf((float)x))")
            self.function(t, "sign", one, f"({t})((float)x > 0.0f ? 1.0f : (float)x < 0.0f ? -1.0f : 0.0f)")
            self.function(t, "saturate", one, f"({t})__builtin_fminf(__builtin_fmaxf((float)x, 0.0f), 1.0f)")
            self.function(t, "abs", one, f"({t})__builtin_fabsf((float)x)")
            self.function(t, "powr", two, f"({t})__builtin_powf((float)x, (float)y)")
            self.function(t, "divide", two, "x / y")
            self.function(t, "min", two, f"({t})__builtin_fminf((float)x, (float)y)")
            self.function(t, "max", two, f"({t})__builtin_fmaxf((float)x, (float)y)")
            self.function(t, "step", two, f"y < x ? ({t})0 : ({t})1")
            self.function(t, "fma", f"{two}, {t} z", f"({t})__builtin_fmaf((float)x, (float)y, (float)z)")
            self.function(t, "mix", f"{two}, {t} a", "x + (y - x) * a")
            self.function(t, "ldexp", f"{t} x, int k", f"({t})__builtin_ldexpf((float)x, k)")
            self.function(t, "frexp", f"{t} x, thread int& e", f"({t})__builtin_frexpf((float)x, &e)")
            self.function(t, "sincos", f"{t} x, thread {t}& c", "(c = cos(x), sin(x))")
            for name in ("isnan", "isinf", "isfinite", "isnormal", "signbit"):
                self.function("bool", name, one, f"__builtin_{name}((float)x)")
        for name in [*_UNARY, "exp10", "rsqrt", "fract", "sign", "abs", "saturate"]:
            self.lift(_FLOATS, name, 1)
        for name in [*_BINARY, "powr", "divide"]:
            self.lift(_FLOATS, name, 2)
        self.lift(_FLOATS, "fma", 3)

    def integer_functions(self) -> None:
        for t in _INTEGERS:
            signed = not t.startswith("u")
            bits = _BITS[t.removeprefix("u")]
            u = "u" + t if signed else t
            one, two = f"{t} x", f"{t} x, {t} y"
            wide = f"(ulong)({u})x"
            self.function(t, "min", two, "x < y ? x : y")
            self.function(t, "max", two, "x < y ? y : x")
            self.function(t, "abs", one, f"x < 0 ? ({t})-x : x" if signed else "x")
            self.function(u, "absdiff", two, f"x < y ? ({u})(({u})y - ({u})x) : ({u})(({u})x - ({u})y)")
            self.function(t, "popcount", one, f"({t})__builtin_popcountll({wide})")
            self.function(t, "clz", one, f"({t})(x == 0 ? {bits} : __builtin_clzll({wide}) - {64 - bits})")
            self.function(t, "ctz", one, f"({t})(x == 0 ? {bits} : __builtin_ctzll({wide}))")
            self.function(t, "reverse_bits", one, f"({t})__builtin_bitreverse{bits}(({u})x)")
            left, right = f"((uint)k & {bits - 1}u)", f"(({bits}u - (uint)k) & {bits - 1}u)"
            self.function(t, "rotate", f"{t} x, {t} k", f"({t})(({u})x << {left} | ({u})x >> {right})")
            field = f"({t})(({u})x << ({bits} - o - n))"
            self.function(
                t, "extract_bits", f"{t} x, uint o, uint n", f"n == 0 ? ({t})0 : ({t})({field} >> ({bits} - n))"
            )
            mask = f"({u})((n >= {bits} ? ({u})~({u})0 : ({u})((({u})1 << n) - 1)) << o)"
            self.function(
                t,
                "insert_bits",
                f"{t} b, {t} x, uint o, uint n",
                f"({t})((({u})b & ~{mask}) | ((({u})x << o) & {mask}))",
            )
            if bits < 64:
                double_width = ("" if signed else "u") + {8: "short", 16: "int", 32: "long"}[bits]
                self.function(t, "mulhi", two, f"({t})((({double_width})x * ({double_width})y) >> {bits})")
        for name in ("popcount", "clz", "ctz", "reverse_bits", "abs"):
            self.lift(_INTEGERS, name, 1)

    def common_functions(self) -> None:
        every = _FLOATS + _INTEGERS
        for name in ("min", "max"):
            self.lift(every, name, 2)
        for t in every:
            three = f"{t} x, {t} y, {t} z"
            self.function(t, "clamp", three, "min(max(x, y), z)")
            self.function(t, "min3", three, "min(x, min(y, z))")
            self.function(t, "max3", three, "max(x, max(y, z))")
            self.function(t, "median3", three, "max(min(x, y), min(max(x, y), z))")
            self.function(t, "select", f"{t} a, {t} b, bool c", "c ? b : a")
            for n in (2, 3, 4):
                v = f"{t}{n}"
                self.function(v, "min", f"{v} x, {t} y", f"min(x, ({v})(y))")
                self.function(v, "max", f"{v} x, {t} y", f"max(x, ({v})(y))")
                self.function(v, "clamp", f"{v} x, {v} y, {v} z", "min(max(x, y), z)")
                self.function(v, "clamp", f"{v} x, {t} y, {t} z", f"min(max(x, ({v})(y)), ({v})(z))")
                self.lines.append(
                    f"inline {v} select({v} a, {v} b, {_mask(t)}{n} c) {{ {v} r; "
                    f"for (int i = 0; i < {n}; i++) r[i] = c[i] ? b[i] : a[i]; return r; }}"
                )

    def geometric_functions(self) -> None:
        for t in _FLOATS:
            self.function(
                t,
                "smoothstep",
                f"{t} a, {t} b, {t} x",
                "saturate((x - a) / (b - a)) * saturate((x - a) / (b - a)) * "
                f"(({t})3 - ({t})2 * saturate((x - a) / (b - a)))",
            )
            for n in (2, 3, 4):
                v = f"{t}{n}"
                products = " + ".join(f"x[{i}] * y[{i}]" for i in range(n))
                self.function(t, "dot", f"{v} x, {v} y", f"({t})({products})")
                self.function(t, "length_squared", f"{v} x", "dot(x, x)")
                self.function(t, "length", f"{v} x", "sqrt(dot(x, x))")
                self.function(v, "normalize", f"{v} x", "x * rsqrt(dot(x, x))")


def overloads() -> str:
    """The text of the header, to be included inside namespace metal."""
    w = _Writer()
    w.float_functions()
    w.integer_functions()
    w.common_functions()
    w.geometric_functions()
    # Both spellings compute what the plain name does: the emulator has one accuracy, that of libm.
    w.lines += ["namespace precise { using namespace metal; }", "namespace fast { using namespace metal; }"]
    return "\n".join(w.lines) + "\n"
