"""From the text that MLX generates to C++ that clang compiles: few changes, all of them here.

* threadgroup variables get MSL_THREADGROUP_VARIABLE in front (static storage, a section of its own);
* array parameters with an address space become pointers, as C++ has no qualified arrays there;
* the explicit instantiation at the end gives way to a trampoline that calls the kernel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ._errors import EmulatorError
from ._export import KernelSpec
from ._lint import TOKEN, lint

FILE = "kernel.metal"  # the name of the text in clang's messages and in debug information
MAX_BUFFERS = 31

# Metal's attributes, by the field of msl_context that holds them.
_VECTOR_ATTRIBUTES = {
    "thread_position_in_grid": "position_in_grid",
    "thread_position_in_threadgroup": "position_in_group",
    "threadgroup_position_in_grid": "group_position",
    "threads_per_threadgroup": "group_size",
    "dispatch_threads_per_threadgroup": "nominal_group",
    "threadgroups_per_grid": "group_count",
    "threads_per_grid": "grid_size",
    "grid_size": "grid_size",
}
_SCALAR_ATTRIBUTES = {
    "thread_index_in_threadgroup": "msl_current->index_in_group",
    "thread_index_in_simdgroup": "msl_current->lane",
    "simdgroup_index_in_threadgroup": "msl_current->simdgroup",
    "simdgroups_per_threadgroup": "msl_current->simdgroups",
    "dispatch_simdgroups_per_threadgroup": "msl_current->nominal_simdgroups",
    "thread_index_in_quadgroup": "(msl_current->lane & 3u)",
    "quadgroup_index_in_threadgroup": "(msl_current->index_in_group / 4u)",
    "threads_per_simdgroup": "32u",
    "thread_execution_width": "32u",
}


@dataclass(frozen=True)
class Argument:
    """One buffer of a kernel, in the order of Metal's buffer indices.

    `role` is "input", "output", "shape", "strides" or "ndim"; `of` is the index of the input or output.
    """

    name: str
    role: str
    of: int


@dataclass(frozen=True)
class Prepared:
    """`cpp` is the C++ text; `lines` are those of MLX's text, of which the header comes first and the body stands at
    `body_lines`."""

    cpp: str
    arguments: tuple[Argument, ...]
    lines: tuple[str, ...]
    header_lines: range
    body_lines: range

    def place(self, number: int) -> tuple[str, str]:
        """("source line 7", its text) for a line of MLX's text; ("", "") for one that is not the author's."""
        for part, lines in (("source", self.body_lines), ("header", self.header_lines)):
            if number in lines:
                return f"{part} line {number - lines.start + 1}", self.lines[number - 1].strip()
        return "", ""

    def find(self, pattern: str) -> tuple[str, str]:
        """The place of the first line of the header or body that holds a match."""
        for number in (*self.header_lines, *self.body_lines):
            if re.search(pattern, self.lines[number - 1]):
                return self.place(number)
        return "", ""


def mark_threadgroup_variables(text: str) -> str:
    """Put MSL_THREADGROUP_VARIABLE before declarations of threadgroup variables (not of pointers to them)."""
    tokens = TOKEN.findall(text)
    out: list[str] = []
    previous = "{"
    for i, t in enumerate(tokens):
        if t == "threadgroup" and previous in ("{", "}", ";") and _is_variable(tokens[i + 1 :]):
            out.append("MSL_THREADGROUP_VARIABLE ")
        out.append(t)
        if not t.isspace() and not t.startswith(("//", "/*")):
            previous = t
    return "".join(out)


def _is_variable(tokens: list[str]) -> bool:
    """Whether a declaration that goes on with these tokens declares variables; pointers come before any of [;=,."""
    angles = 0
    for t in tokens:
        angles += (t == "<") - (t == ">")
        if angles == 0 and t in ("*", "&", "("):
            return False
        if angles == 0 and t in ("[", ";", "=", ","):
            return True
    return False


def arrays_to_pointers(text: str) -> str:
    """Write parameters such as `constant const int64_t strides[2]` as pointers."""
    parameter = r"\b((?:device|threadgroup|constant)\b[\w\s:<>]*?)\b(\w+)\s*\[[^\]\[]*\](?=\s*[,)])"
    return re.sub(parameter, r"\1* \2", text)


def _arguments(spec: KernelSpec, names: list[str]) -> tuple[Argument, ...]:
    inputs, outputs = list(spec.input_names), list(spec.output_names)

    def argument(name: str) -> Argument:
        if name in inputs:
            return Argument(name, "input", inputs.index(name))
        if name in outputs:
            return Argument(name, "output", outputs.index(name))
        base, role = name.rsplit("_", 1)
        return Argument(name, role, inputs.index(base))

    return tuple(argument(name) for name in names)


def _trampoline(spec: KernelSpec, signature: str) -> tuple[list[str], tuple[Argument, ...]]:
    """The expressions to call the kernel with, and its buffers in the order of their indices."""
    expressions: list[str] = []
    buffers: dict[int, str] = {}
    for parameter in signature.split(",\n"):
        match = re.fullmatch(r"(.*?)([*&]?) (\w+) \[\[(\w+)(?:\((\d+)\))?\]\]", " ".join(parameter.split()))
        if match is None:
            raise EmulatorError(spec.name, "toolchain", f"MLX wrote the unknown parameter {parameter.strip()!r}")
        kind, by, name, attribute, number = match.groups()
        if attribute == "buffer":
            buffers[int(number)] = name
            pointer = f"({kind}*)(unsigned long)buffers[{number}]"
            expressions.append(f"({pointer})" if by == "*" else f"(*{pointer})")
        elif attribute in _VECTOR_ATTRIBUTES:
            field = f"msl_current->{_VECTOR_ATTRIBUTES[attribute]}"
            expressions.append(f"uint3({field}[0], {field}[1], {field}[2])")
        elif attribute in _SCALAR_ATTRIBUTES:
            expressions.append(_SCALAR_ATTRIBUTES[attribute])
        else:
            raise EmulatorError(spec.name, "refused", f"the attribute {attribute} is not modelled")
    if len(buffers) > MAX_BUFFERS:
        raise EmulatorError(spec.name, "limit", f"{len(buffers)} buffers (shapes and strides count), Metal has 31")
    return expressions, _arguments(spec, [buffers[i] for i in sorted(buffers)])


def prepare(spec: KernelSpec, function: str, text: str) -> Prepared:
    """Check MLX's text by `lint` and turn it into C++.

    Raises EmulatorError: "refused" for a finding of `lint` and for attributes that are not modelled, "limit" for more
    buffers than Metal has.
    """
    lines = tuple(text.splitlines())
    instantiation = re.search(
        r"\ntemplate \[\[host_name\([^\n]*\)\]\] \[\[kernel\]\] decltype\([^\n]*\) ([^\n]*);\s*$", text
    )
    callee = function
    if instantiation:
        callee = instantiation.group(1)
        text = text[: instantiation.start()] + "\n"
    start = text.index(f"[[kernel]] void {function}(")
    body_start = text.index(") {\n", start) + len(") {\n")
    body_end = text.rindex("}")
    signature = text[text.index("(", start) + 1 : text.index(") {\n", start)]
    header_end = max(text.rfind("template <", 0, start), 0) if instantiation else start
    header_lines = text[:header_end].splitlines()
    first = text.count("\n", 0, body_start) + 1
    prepared = Prepared(
        cpp="",
        arguments=(),
        # MLX may go on in the header's last line.
        lines=(*header_lines, *lines[len(header_lines) :]),
        header_lines=range(1, len(header_lines) + 1),
        body_lines=range(first, first + text.count("\n", body_start, body_end) + 1),
    )
    in_header, in_body = lint(text[:header_end], text[body_start:body_end])
    for findings, of in ((in_header, prepared.header_lines), (in_body, prepared.body_lines)):
        if findings:
            place, line = prepared.place(of.start + findings[0].line - 1)
            raise EmulatorError(spec.name, "refused", "; ".join(f.message for f in findings), place, line)
    expressions, arguments = _trampoline(spec, signature)
    cpp = (
        f'#line 1 "{FILE}"\n{arrays_to_pointers(mark_threadgroup_variables(text))}\n'
        '#line 1 "trampoline"\n'
        '#pragma GCC visibility push(default)\nextern "C" __attribute__((no_sanitize("thread", "undefined")))\n'
        f"void emulator_entry(void** buffers) {{ {callee}({', '.join(expressions)}); }}\n"
        'extern "C" __attribute__((weak)) char __start_msl_threadgroup[], __stop_msl_threadgroup[];\n'
        'extern "C" char* emulator_group_start() { return __start_msl_threadgroup; }\n'
        'extern "C" char* emulator_group_stop() { return __stop_msl_threadgroup; }\n'
    )
    return replace(prepared, cpp=cpp, arguments=arguments)
