"""The command: flags, files, output forms, exit codes. Most run `main` here; a few start a process."""

import io
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from mlx_ds4 import generate
from mlx_ds4.api import GenerationResponse, load
from tests.golden_tools import GOLDEN, manifest

MODEL = str(GOLDEN / "nano_k" / "model")
A = manifest("nano_k")["sequences"]["A"]
ROOT = Path(__file__).parent.parent


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs `main` on the golden model, which is loaded once: (exit code, stdout, stderr)."""

    def run(*argv, stdin=None):
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(stdin)))
        code = generate.main(list(argv))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def loaded():
    return load(MODEL)


@pytest.fixture
def quick(command, monkeypatch, loaded):
    """`command` without the load."""
    monkeypatch.setattr(generate, "load", lambda path, progress: loaded)
    return command


@pytest.fixture
def asked(quick, monkeypatch):
    """Runs the command up to generation and returns the prompt's ids."""
    prompts = []

    def no_tokens(model, tokenizer, ids, max_tokens, **kwargs):
        prompts.append(ids)
        return iter([GenerationResponse("", None, None, False, len(ids), 0.0, 0, 0.0, 0.0, "length")])

    monkeypatch.setattr(generate, "stream_generate", no_tokens)

    def run(*argv, **kwargs):
        assert quick(*argv, "--verbose", "f", **kwargs) == (0, "\n", "")
        return prompts.pop()

    return run


def ids(count):
    return ",".join(map(str, A[:count]))


def test_tokens_in_tokens_out(command):
    code, out, err = command("--model", MODEL, "--prompt-tokens", ids(20), "-m", "5", "--output", "tokens")
    assert (code, out) == (0, " ".join(map(str, A[20:25])) + "\n")
    lines = err.splitlines()
    assert [line.split(":")[0] for line in lines[-4:]] == ["Prompt", "Generation", "Peak memory", "Cached"]
    assert lines[-4].split("Prompt: ")[-1].startswith("20 tokens, ")
    assert "temp 0.0" in err and "Loading" in err


def test_a_cuda_user_knows_why_nothing_happens_at_first(quick, monkeypatch):
    assert "compiles" not in quick("--prompt-tokens", ids(9), "-m", "1")[2]
    monkeypatch.setattr(generate, "backend", lambda: "cuda")
    assert "compiles the kernels" in quick("--prompt-tokens", ids(9), "-m", "1")[2]


def test_prefill_mode(quick, monkeypatch):
    asked, run = [], generate.stream_generate

    def noted(*arguments, **settings):
        asked.append(settings["prefill_mode"])
        return run(*arguments, **settings)

    monkeypatch.setattr(generate, "stream_generate", noted)
    given = ["--prompt-tokens", ids(20), "-m", "2", "--output", "tokens", "--verbose", "f"]
    for flags in ([], ["--prefill-mode", "exact"], ["--prefill-mode", "replay"]):
        code, out, _ = quick(*given, *flags)
        assert code == 0 and len(out.split()) == 2
    assert asked == ["exact", "exact", "replay"]


def test_json(quick, tmp_path):
    file = tmp_path / "ids.txt"
    file.write_text(" ".join(map(str, A[:20])) + "\n")
    code, out, err = quick("--prompt-tokens", f"@{file}", "-n", "4", "--output", "json", "--verbose", "false")
    answer = json.loads(out)
    assert code == 0 and err == ""
    assert answer["tokens"] == A[20:24] and answer["finish_reason"] == "length"
    assert (answer["prompt_tokens"], answer["generation_tokens"], answer["cached_tokens"]) == (20, 4, 0)
    assert set(answer) == {
        "text", "tokens", "finish_reason", "prompt_tokens", "cached_tokens", "generation_tokens", "prompt_tps",
        "generation_tps", "peak_memory",
    }  # fmt: skip


def test_text_as_mlx_lm_prints_it(quick, loaded):
    code, out, _ = quick("--prompt-tokens", ids(20), "--max-tokens", "4")
    text = loaded[1].decode(A[20:24])
    assert code == 0
    assert out.startswith("=" * 10 + "\n" + text + "\n" + "=" * 10 + "\nPrompt: 20 tokens, ")
    assert quick("--prompt-tokens", ids(20), "--tokens", "4", "--verbose", "F")[:2] == (0, text + "\n")


def test_max_tokens_zero(quick):
    code, out, _ = quick("--prompt-tokens", ids(9), "-m", "0", "--output", "json", "--verbose", "0")
    answer = json.loads(out)
    assert (code, answer["tokens"], answer["text"], answer["finish_reason"]) == (0, [], "", "length")


def test_stop_string(quick, loaded):
    text = loaded[1].decode(A[20:24])
    stop = text[len(text) // 2 :]
    code, out, _ = quick("--prompt-tokens", ids(20), "-m", "9", "--stop", stop, "--stop", "never", "--verbose", "f")
    assert (code, out) == (0, text[: text.index(stop)] + "\n")


def test_sampling_flags(quick, monkeypatch):
    prompt = ["--prompt-tokens", ids(3), "-m", "4", "--output", "tokens", "--verbose", "f"]
    outs = [quick(*prompt, "--temp", "50", "--seed", seed)[1] for seed in "112"]
    assert outs[0] == outs[1] != outs[2]
    used = []
    real = generate.make_sampler
    monkeypatch.setattr(generate, "make_sampler", lambda *args, **kwargs: used.append((args, kwargs)) or real())
    flags = ["--temp", "1.5", "--top-p", "0.9", "--min-p", "0.01", "--top-k", "50", "--seed", "7"]
    assert quick(*prompt, *flags)[1].split() == list(map(str, A[3:7]))
    assert used == [((1.5, 0.9, 0.01), {"top_k": 50, "seed": 7})]


@pytest.mark.parametrize(
    ("flags", "template"),
    [
        ([], {}),
        (["--nothink"], {}),
        (["--think"], {"thinking_mode": "thinking"}),
        (["--think", "--think-level", "30"], {"thinking_mode": "thinking", "reasoning_effort": 30}),
        (["--think-level", "100"], {"thinking_mode": "thinking", "reasoning_effort": 100}),
    ],
    ids=str,
)
def test_chat_form(asked, loaded, flags, template):
    prompt = "Is <｜User｜> a role\\n?"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]
    assert asked("-p", prompt, *flags, "-sys", "Be brief.") == loaded[1].apply_chat_template(messages, **template)


def test_where_the_prompt_comes_from(asked, loaded, tmp_path):
    text = "Ein Satz, zwei\nZeilen. 漢\n"
    file = tmp_path / "prompt.txt"
    file.write_bytes(text.encode())
    want, default = [loaded[1].apply_chat_template([{"role": "user", "content": t}]) for t in (text, "hello")]
    assert asked("--prompt-file", str(file)) == want
    assert asked("--prompt", "-", stdin=text.encode()) == want
    assert asked("--prompt", text) == want
    assert asked() == default


def test_raw_prompt(asked, command, loaded, monkeypatch):
    tokenizer = loaded[1]
    raw = tokenizer.encode("<｜User｜>hi", add_special_tokens=True)
    assert raw[:2] == [tokenizer.bos_token_id, tokenizer.token_id("<｜User｜>")]
    assert asked("--ignore-chat-template", "-p", "<｜User｜>hi") == raw
    monkeypatch.setattr(tokenizer, "token_id", lambda text: None)  # a vocabulary without roles
    assert asked("-p", "<｜User｜>hi") == raw
    code, _, err = command("-p", "hi", "--think")
    assert code == 2 and "need the chat form" in err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--max-kv-size", "5"], "--max-kv-size"),
        (["--temperature", "1"], "--temperature"),
        (["--ver", "true"], "--ver"),
        (["stray"], "stray"),
        (["-m", "-2"], "-2"),
        (["-m", "many"], "many"),
        (["--prefill-step-size", "0"], "--prefill-step-size"),
        (["--prefill-mode", "fast"], "--prefill-mode"),
        (["--think-level", "101"], "1 to 100"),
        (["--think-level", "0"], "1 to 100"),
        (["--nothink", "--think-level", "5"], "--nothink"),
        (["--verbose", "maybe"], "maybe"),
        (["--output", "yaml"], "yaml"),
        (["--temp", "-1"], "temp is -1.0"),
        (["--temp", "nan"], "temp is nan"),
        (["--top-p", "2"], "top_p is 2.0"),
        (["--top-k", "-1"], "top_k is -1"),
        (["--seed", "-1"], "seed is -1"),
        (["--stop", ""], "stop is"),
        (["-p", "a", "--prompt-file", "b"], "--prompt-file"),
        (["--prompt-file", "no/such/file"], "no/such/file"),
        (["--prompt-file", str(GOLDEN)], str(GOLDEN)),
        (["--prompt-tokens", "1,x,3"], "'x'"),
        (["--prompt-tokens", ""], "''"),
        (["--prompt-tokens", "-1"], "-1"),
        (["--prompt-tokens", "@no/such/file"], "no/such/file"),
        (["--model", "no/such/model.gguf"], "no/such/model.gguf"),
        (["--model", str(GOLDEN / "chat")], str(GOLDEN / "chat")),
        (["--model", str(GOLDEN / "README.md")], "README.md"),
        (["--inspect", "no/such/model.gguf"], "no/such/model.gguf"),
        (["--inspect", str(GOLDEN / "README.md")], "README.md"),
    ],
    ids=str,
)
def test_refusals_are_one_line_and_exit_code_2(command, argv, named):
    code, out, err = command(*argv, "--verbose", "false") if argv[0] != "--verbose" else command(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("mlx_ds4.generate: ") and named in err and err.count("\n") == 1


def test_prompts_that_are_not_text(quick):
    code, _, err = quick("-p", "-", stdin=b"ok \xff")
    assert code == 2 and "standard input is not UTF-8 at byte 3" in err
    code, _, err = quick("-p", "half \udc80")
    assert code == 2 and err.count("\n") == 1
    code, _, err = quick("--prompt-tokens", "5 99999")
    assert code == 2 and "token id 99999" in err


def test_a_failure_while_generating_is_exit_code_1(quick, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("the device is gone")
        yield

    monkeypatch.setattr(generate, "stream_generate", broken)
    code, _, err = quick("-m", "3")
    assert code == 1 and "the device is gone" in err


def test_ctrl_c_gives_out_held_back_text(quick, monkeypatch):
    """The text so far may begin a stop string; interrupted, it is printed nevertheless."""
    real = generate.stream_generate

    def interrupted(*args, **kwargs):
        for count, response in enumerate(real(*args, **kwargs), 1):
            yield response
            if count == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(generate, "stream_generate", interrupted)
    plain = quick("--prompt-tokens", ids(20), "-m", "9", "--verbose", "f")
    assert plain[0] == 130 and plain[2] == "mlx_ds4.generate: interrupted after 2 tokens.\n"
    text = plain[1].removesuffix("\n")
    assert quick("--prompt-tokens", ids(20), "-m", "9", "--verbose", "f", "--stop", text + "!") == plain
    code, out, _ = quick("--prompt-tokens", ids(20), "-m", "9", "--verbose", "f", "--output", "json")
    assert code == 130
    assert json.loads(out)["tokens"] == A[20:22] and json.loads(out)["finish_reason"] == "interrupted"


def test_inspect_folder(command):
    code, out, err = command("--inspect", MODEL)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    (embed,) = [line.split() for line in lines if line.startswith("embed.weight ")]
    assert embed[1:5] == ["[288,", "256]", "BF16", f"{288 * 256 * 2:,}"]
    assert any(line.split() == ["text_config.hidden_size", "256"] for line in lines)
    _head, table, totals = out.rsplit("\n\n", 2)
    assert table.count("\n") == int(totals.split()[-2].replace(",", "")) > 100
    sizes = [int(line.split()[-1].replace(",", "")) for line in totals.splitlines()[1:]]
    assert sum(sizes[:-1]) == sizes[-1] == sum(int(row.split()[-3].replace(",", "")) for row in table.splitlines()[1:])


def test_inspect_gguf(command, tmp_path):
    gguf = pytest.importorskip("gguf")
    import numpy as np

    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "anything")
    writer.add_string("note", "two\nlines \x1b[31m" + "x" * 200)
    writer.add_array("words", [f"w{n}" for n in range(1000)])
    writer.add_array("pair", [1, 2])
    writer.add_float32("scale", 0.5)
    writer.add_tensor("a.weight", np.zeros((3, 8), np.float32))
    writer.add_tensor("b.weight", np.zeros((4, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    code, out, _ = command("--inspect", str(path))
    rows = [line.split(None, 2) for line in out.splitlines()]
    assert code == 0 and "\x1b" not in out
    assert ["words", "[string]", "['w0', 'w1', 'w2', 'w3', 'w4', 'w5', ...] (1,000 values)"] in rows
    assert ["scale", "f32", "0.5"] in rows and [row[2] for row in rows if row[:1] == ["pair"]] == ["[1, 2]"]
    assert next(row[2] for row in rows if row[:1] == ["note"]).startswith("'two\\nlines \\x1b[31mxxx")
    table = {row[0]: out.splitlines()[n].split() for n, row in enumerate(rows) if row and row[0].endswith(".weight")}
    start = int(out.split("from byte ")[1].splitlines()[0].replace(",", ""))
    assert table["a.weight"] == ["a.weight", "[3,", "8]", "F32", "96", f"{start:,}"]
    assert table["b.weight"] == ["b.weight", "[4,", "32]", "Q8_0", "136", f"{start + 96:,}"]
    assert out.splitlines()[-1].split() == ["all", "2", "232"]


def spawn(*argv, **kwargs):
    return subprocess.Popen(
        [sys.executable, "-m", "mlx_ds4.generate", *argv],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **kwargs,
    )


def test_the_command_with_the_shipped_model():
    process = spawn("--prompt", "Hi", "-m", "3", env={**os.environ, "PYTHONWARNINGS": "error::RuntimeWarning"})
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    lines = out.decode().splitlines()
    assert lines[0] == "=" * 10 and "Generation: 3 tokens, " in out.decode() and b"Traceback" not in err


def test_a_real_ctrl_c_ends_the_command():
    process = spawn("--model", MODEL, "--prompt-tokens", ids(20), "-m", "1000", "--output", "tokens", "--temp", "1")
    assert process.stdout.read(1)  # generating
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.decode().splitlines()[-1].endswith(" tokens.") and b"interrupted after" in err
    assert b"Traceback" not in err and out.endswith(b"\n")


def test_a_closed_pipe_ends_the_command_quietly():
    process = spawn("--inspect", MODEL)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 1 and err == b""


# Arguments of the examples that need some, or that would take long without.
EXAMPLES = {
    "ablations": ["--tokens", "64", "--sequence-length", "64", "--prompts", "1", "--continue", "8"],
    "evaluate": ["--tokens", "64", "--distance", "16"],
    "train_small": ["prepare", "--data", "DIR", "--limit", "6", "--vocab-size", "400"],
}


def example(name: str):
    return pytest.param(name, marks=[pytest.mark.slow] if name in ("ablations", "evaluate") else [])


@pytest.mark.parametrize("name", [example(path.stem) for path in sorted((ROOT / "examples").glob("*.py"))])
def test_examples_run(name, tmp_path):
    arguments = [str(tmp_path) if a == "DIR" else a for a in EXAMPLES.get(name, [])]
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{name}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert len(done.stdout.splitlines()) > 3
