"""A conversion may be cut short anywhere: the folder is refused, and goes on to the same bytes."""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from mlx_ds4.checkpoint import CheckpointError, gguf_shape, model_weights
from mlx_ds4.convert import engram_files, mlx_folder, mlx_writer, synthetic
from mlx_ds4.convert.cli import main
from mlx_ds4.convert.gguf_metadata import metadata_records
from mlx_ds4.convert.gguf_writer import GGUFTensor, write_gguf
from mlx_ds4.convert.mlx_folder import Options, convert_to_folder, plan_folder
from mlx_ds4.convert.official_config import official_config
from mlx_ds4.convert.recipe import RECIPES, tensor_bytes
from mlx_ds4.convert.synthetic import tiny_config
from mlx_ds4.convert.synthetic_tokenizer import synthetic_tokenizer
from mlx_ds4.engram_map import engram_token_map
from mlx_ds4.formats.gguf import GGUFFile
from mlx_ds4.loader import load_model
from mlx_ds4.model.engram import engram_constants
from mlx_ds4.sources import open_source
from tests.checkpoint.folders import patch_byte
from tests.golden_tools import GOLDEN, TINY

ROOT = Path(__file__).parents[2]
NANO_K = GOLDEN / "nano_k" / "model"
OPTIONS = Options("packed", "copy", 2_000_000)
SHARDS = Options(shard_bytes=400_000)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def killed_at(event: int, path: Path, folder: Path, *, resume: bool) -> tuple[int, int]:
    """Converts in a child that is killed at its n-th change of the disk; (exit code, changes of a whole run)."""
    processes = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    receiver, sender = processes.Pipe(duplex=False)
    child = processes.Process(target=_convert_and_count, args=(event, path, folder, resume, sender))
    child.start()
    sender.close()
    child.join(60)
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode, receiver.recv() if child.exitcode == 0 else 0


def _convert_and_count(event: int, path: Path, folder: Path, resume: bool, sender) -> None:
    seen = 0

    def counted(name: str):
        # A killed process loses nothing that it wrote, so forcing it to the disk would only take time.
        real = getattr(os, name) if name != "fsync" else lambda descriptor: None

        def call(*args, **kwargs):
            nonlocal seen
            seen += 1
            if seen == event:
                if name == "pwrite":  # half of it reached the disk
                    real(args[0], args[1][: len(args[1]) // 2], args[2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, name, call)

    for name in ("pwrite", "replace", "unlink", "fsync"):
        counted(name)
    convert_to_folder(path, folder, OPTIONS, resume=resume)
    sender.send(seen)


def test_killed_at_ten_points_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    path, whole = TINY, tmp_path / "whole"
    stopped, events = killed_at(-1, path, whole, resume=False)
    assert stopped == 0 and events > 100
    want = contents(whole)
    rng = random.Random(8)
    for event in (*(rng.randrange(4, events - 1) for _ in range(9)), events - 1):
        folder = tmp_path / f"killed-{event}"
        assert killed_at(event, path, folder, resume=False)[0] == -signal.SIGKILL
        names = set(os.listdir(folder)) - {name for name in os.listdir(folder) if ".partial-" in name}
        assert "conversion.json" in names
        for name in names - {"conversion.json"}:  # what has its name is complete
            assert (folder / name).read_bytes() == want[name], name
        with pytest.raises(CheckpointError, match=r"not finished: run the same command again with --resume"):
            load_model(folder)
        # Now and then killed again on the way, if the rest is not done before.
        if event % 3 or killed_at(event // 3, path, folder, resume=True)[0]:
            convert_to_folder(path, folder, OPTIONS, resume=True)
        assert contents(folder) == want, event
        shutil.rmtree(folder)


@pytest.mark.parametrize("event", [1, 2])
def test_killed_before_the_journal(tmp_path, event):
    """Nothing has a name yet: the same command, without --resume, begins."""
    folder = tmp_path / "out"
    assert killed_at(event, NANO_K, folder, resume=False)[0] == -signal.SIGKILL
    assert [name for name in os.listdir(folder) if ".partial-" not in name] == []
    with pytest.raises(ValueError, match=r"has no config.json"):
        load_model(folder)
    convert_to_folder(NANO_K, folder, OPTIONS)
    assert not [name for name in os.listdir(folder) if ".partial-" in name]
    load_model(folder)


def test_killed_while_overwriting(tmp_path, monkeypatch):
    """Files of the conversion before, its clones above all, are not taken for those of the new one."""
    monkeypatch.setattr(engram_files, "clone_file", shutil.copyfile)  # stands for a file system that shares blocks
    path, folder = Path(shutil.copy(TINY, tmp_path / "tiny.gguf")), tmp_path / "out"
    convert_to_folder(path, folder, Options("packed", "clone"))
    with open(path, "r+b") as file:  # another row of a table, which no header tells
        file.seek(-834 * 66 - 32, os.SEEK_END)
        file.write(bytes(32))
    os.utime(path)
    want = tmp_path / "want"
    convert_to_folder(path, want, Options(engram="clone"))

    def killed(folder, patterns):
        if patterns == mlx_folder._OURS:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(mlx_folder, "_remove", killed)
        convert_to_folder(path, folder, Options(engram="clone"), overwrite=True)
    with pytest.raises(CheckpointError, match="not finished"):
        load_model(folder)
    convert_to_folder(path, folder, Options(engram="clone"), resume=True)
    assert contents(folder) == contents(want)


def half(folder: Path, path: Path = NANO_K, **options) -> None:
    """Interrupts a conversion after its first file."""

    def stop(folder, out, report, real=mlx_writer.write_file):
        if out.name.startswith("model-00002"):
            raise KeyboardInterrupt
        return real(folder, out, report)

    mlx_folder.write_file, real = stop, mlx_folder.write_file
    try:
        with pytest.raises(KeyboardInterrupt):
            convert_to_folder(path, folder, SHARDS, **options)
    finally:
        mlx_folder.write_file = real


def test_resume_does_not_write_again_what_is_complete(tmp_path, monkeypatch):
    half(tmp_path / "out")
    (first,) = (tmp_path / "out").glob("model-00001-*")
    before, done = first.stat(), []
    monkeypatch.setattr(
        mlx_folder, "write_file", lambda *args: done.append(args[1].name) or mlx_writer.write_file(*args)
    )
    calls = []
    convert_to_folder(NANO_K, tmp_path / "out", SHARDS, resume=True, progress=lambda *c: calls.append(c))
    assert (first.stat().st_ino, first.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert len(done) >= 3 and first.name not in done
    total = plan_folder(NANO_K, SHARDS).nbytes
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)
    assert calls[0][0] > before.st_size and calls[-1][:2] == (total, total)
    load_model(tmp_path / "out")


def test_resume_refuses_what_does_not_fit(tmp_path):
    source = Path(shutil.copytree(NANO_K, tmp_path / "source"))
    options = SHARDS
    half(tmp_path / "out", source)
    with pytest.raises(ValueError, match="holds an unfinished conversion: use --resume"):
        convert_to_folder(source, tmp_path / "out", options)
    with pytest.raises(ValueError, match="other options"):
        convert_to_folder(source, tmp_path / "out", Options("packed", shard_bytes=400_000), resume=True)
    with pytest.raises(ValueError, match="was begun from another source"):
        convert_to_folder(NANO_K, tmp_path / "out", options, resume=True)
    (first,) = (tmp_path / "out").glob("model-00001-*")
    data = first.read_bytes()
    first.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"model-00001.*was complete and is not any more"):
        convert_to_folder(source, tmp_path / "out", options, resume=True)
    first.write_bytes(data[:-1] + b"\x99")
    with pytest.raises(ValueError, match=r"model-00001.*does not have its checksum any more"):
        convert_to_folder(source, tmp_path / "out", options, resume=True)
    first.write_bytes(data)
    os.utime(source / "model-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match="or it has changed: start again with --overwrite"):
        convert_to_folder(source, tmp_path / "out", options, resume=True)
    shutil.copytree(tmp_path / "out", tmp_path / "damaged")
    (tmp_path / "damaged" / "conversion.json").write_text("[]")
    with pytest.raises(ValueError, match=r"conversion.json: is damaged"):
        convert_to_folder(source, tmp_path / "damaged", options, resume=True)
    with pytest.raises(ValueError, match="holds other files, which are never removed"):
        convert_to_folder(source, tmp_path / "damaged", options, overwrite=True)
    convert_to_folder(source, tmp_path / "out", options, overwrite=True)
    load_model(tmp_path / "out")


def test_a_source_that_changes_on_the_way_is_refused(tmp_path):
    source = Path(shutil.copytree(NANO_K, tmp_path / "source"))
    shard = source / "model-00001-of-00002.safetensors"
    with pytest.raises(ValueError, match=r"model-00001-of-00002.safetensors: changed since the conversion began"):
        convert_to_folder(source, tmp_path / "out", progress=lambda *_: os.utime(shard, (1, time.time())))
    assert not (tmp_path / "out" / "config.json").exists()


# ---- refusals of the command ---------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


def command(capsys, *args) -> tuple[int, str]:
    """Exit code and the error line, which must be one."""
    code = main([str(arg) for arg in args])
    error = capsys.readouterr().err
    assert error.count("\n") <= 1
    return code, error


def test_full_disk_before_the_first_byte(tmp_path, capsys, monkeypatch):
    needed = plan_folder(NANO_K, Options()).nbytes
    monkeypatch.setattr(mlx_folder.shutil, "disk_usage", lambda path: Usage(0, 0, needed))
    code, error = command(capsys, "--hf-path", NANO_K, "--mlx-path", tmp_path / "out")
    assert code == 2 and f"but {needed} are free: make room" in error and os.listdir(tmp_path) == []


def test_full_disk_on_the_way(tmp_path, capsys, monkeypatch):
    def full(descriptor, data, offset, real=os.pwrite):
        if offset > 200_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        code, error = command(capsys, "--hf-path", NANO_K, "--mlx-path", tmp_path / "out")
    assert (code, error) == (
        2,
        f"mlx_ds4.convert: {tmp_path / 'out'}: No space left on device: make room; --resume goes on\n",
    )
    assert os.listdir(tmp_path / "out") == ["conversion.json"]
    assert command(capsys, "--hf-path", NANO_K, "--mlx-path", tmp_path / "out", "--resume")[0] == 0
    load_model(tmp_path / "out")


def limited(size: int, *args) -> tuple[int, str]:
    """Runs the command where no file may grow beyond `size` bytes; exit code and error."""
    code = f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
    code += "from mlx_ds4.convert.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def test_writes_that_the_system_refuses(tmp_path):
    pytest.importorskip("resource")
    code, error = limited(300_000, "--hf-path", NANO_K, "--mlx-path", tmp_path / "out")
    assert code == 2 and error.endswith("/out: File too large: make room; --resume goes on\n")
    assert os.listdir(tmp_path / "out") == ["conversion.json"]
    args = ("--hf-path", NANO_K, "--mlx-path", tmp_path / "x.gguf", "--to", "gguf", "--recipe", "q4")
    for options in ((), ("--overwrite",)):
        code, error = limited(300_000, *args, *options)
        assert (code, error) == (2, f"mlx_ds4.convert: {tmp_path / 'x.gguf'}: File too large: make room\n")
        assert not options or (tmp_path / "x.gguf").read_bytes() == b"before"
        assert [name for name in os.listdir(tmp_path) if name != "out"] == ["x.gguf"] * len(options)
        (tmp_path / "x.gguf").write_bytes(b"before")


def test_interrupt(tmp_path, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", interrupt)
        code, error = command(capsys, "--hf-path", NANO_K, "--mlx-path", tmp_path / "out")
    assert code == 130 and error == "mlx_ds4.convert: interrupted; --resume goes on\n"
    assert command(capsys, "--hf-path", NANO_K, "--mlx-path", tmp_path / "out", "--resume")[0] == 0


def test_existing_folders(tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "manifest.json").write_text("{}")
    for more in ((), ("--overwrite",), ("--resume",)):
        code, error = command(capsys, "--hf-path", NANO_K, "--mlx-path", out, *more)
        assert code == 2 and "holds other files, which are never removed" in error
    assert sorted(os.listdir(out)) == ["manifest.json", "notes.txt"]
    (out / "manifest.json").unlink()
    (out / "notes.txt").unlink()
    assert command(capsys, "--hf-path", NANO_K, "--mlx-path", out)[0] == 0
    (out / "notes.txt").write_text("mine")
    code, error = command(capsys, "--gguf", TINY, "--mlx-path", out)
    assert code == 2 and "is a finished conversion: use --overwrite" in error
    assert command(capsys, "--gguf", TINY, "--mlx-path", out, "--overwrite", "--experts", "packed")[0] == 0
    assert open_source(out).config == open_source(TINY).config and (out / "notes.txt").read_text() == "mine"
    code, error = command(capsys, "--hf-path", NANO_K, "--mlx-path", NANO_K, "--overwrite")
    assert code == 2 and "is the source's own folder" in error
    (tmp_path / "link").symlink_to(NANO_K)
    code, error = command(capsys, "--hf-path", NANO_K, "--mlx-path", tmp_path / "link", "--overwrite")
    assert code == 2 and "is the source's own folder" in error
    code, error = command(capsys, "--hf-path", out, "--mlx-path", tmp_path / "again")
    assert code == 2 and "is a converted folder already" in error


@pytest.mark.parametrize(
    ("name", "value"), [("layers.1.ffn.experts.2.w3.scale", 255), ("layers.0.attn.wkv.weight", 127)]
)
def test_values_that_are_not_finite(tmp_path, capsys, name, value):
    source = Path(shutil.copytree(NANO_K, tmp_path / "source"))
    patch_byte(source, name, value)
    code, error = command(capsys, "--hf-path", source, "--mlx-path", tmp_path / "out")
    assert code == 2 and f"tensor {name} holds a value or scale that is NaN" in error
    assert os.listdir(tmp_path / "out") == ["conversion.json"]


def test_sources_that_are_not_right(tmp_path, capsys):
    source = Path(shutil.copytree(NANO_K, tmp_path / "source"))
    (source / "model-00002-of-00002.safetensors").unlink()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(TINY.read_bytes()[:-5_000_000])
    v4 = tmp_path / "v4"
    v4.mkdir()
    (v4 / "config.json").write_text('{"model_type": "deepseek_v4"}')
    for flag, path, message in (
        ("--hf-path", source, "1 of 2 shards are missing"),
        ("--gguf", cut, "are missing: resume the download"),
        ("--hf-path", v4, "a DeepSeek V4 model of another architecture"),
        ("--hf-path", tmp_path / "no", "is no folder"),
        ("--gguf", tmp_path / "no", "there is no file"),
        ("--gguf", v4, "is a folder; name it with --hf-path"),
    ):
        code, error = command(capsys, flag, path, "--mlx-path", tmp_path / "out")
        assert code == 2 and message in error, error
        assert not (tmp_path / "out").exists()


def test_a_damaged_scale_of_a_gguf(tmp_path, capsys):
    path = Path(shutil.copy(TINY, tmp_path / "tiny.gguf"))
    info = GGUFFile(path).tensors["blk.3.ffn_down_exps.weight"]  # Q2_K: the factors lie behind scales and codes
    with open(path, "r+b") as file:
        file.seek(info.offset + 5 * 84 + 80)
        file.write(b"\x00\x7c")
    code, error = command(capsys, "--gguf", path, "--mlx-path", tmp_path / "out")
    assert code == 2 and "blk.3.ffn_down_exps.weight (Q2_K) holds a scale or value that is NaN or infinite" in error
    assert os.listdir(tmp_path / "out") == ["conversion.json"]


@pytest.mark.parametrize("architecture", ["llama", "deepseek4", "deepseek41-dspark"])
def test_a_gguf_of_another_architecture(tmp_path, capsys, architecture):
    tensor = GGUFTensor("token_embd.weight", (4,), "F32", lambda: [np.zeros(4, "<f4").view(np.uint8)])
    records = [("general.architecture", "string", architecture), ("general.alignment", "u32", 32)]
    write_gguf(tmp_path / "x.gguf", records, [tensor], alignment=32)
    code, error = command(capsys, "--gguf", tmp_path / "x.gguf", "--mlx-path", tmp_path / "out")
    assert code == 2 and f"'{architecture}'" in error and os.listdir(tmp_path) == ["x.gguf"]


# ---- size ----------------------------------------------------------------------------------------------


def large_gguf(path: Path, size: int) -> Path:
    """A GGUF in the Q4 recipe of about `size` bytes, nearly all of them experts. Its weights mean nothing."""
    config = dataclasses.replace(
        tiny_config(), hidden_size=1024, moe_intermediate_size=1024, n_routed_experts=max(2, size // 10_700_000)
    )
    tokenizer = synthetic_tokenizer(config.vocab_size)
    config = synthetic._with_engram(config, tokenizer)
    records = metadata_records(
        official_config(config), tokenizer.gguf_metadata(), engram_token_map(tokenizer), engram_constants(config),
        recipe=RECIPES["q4"], alignment=16384, calibration="none",
    )  # fmt: skip
    noise = np.random.default_rng(0).integers(0, 120, 8 << 20, np.uint8)  # no byte makes a scale that is not finite

    def tensor(weight) -> GGUFTensor:
        kind, shape = RECIPES["q4"].type_of(weight), gguf_shape(weight)
        size = tensor_bytes(kind, shape)
        return GGUFTensor(
            weight.gguf, shape, kind,
            lambda: (noise[: min(len(noise), size - start)] for start in range(0, size, len(noise))),
        )  # fmt: skip

    write_gguf(path, records, [tensor(weight) for weight in model_weights(config)], alignment=16384)
    return path


def converted_in_a_child(path: Path, folder: Path) -> tuple[float, int]:
    """Seconds and peak bytes of memory of the command."""
    args = [sys.executable, "-m", "mlx_ds4.convert", "--gguf", str(path), "--mlx-path", str(folder)]
    start = time.perf_counter()
    child = os.posix_spawn(sys.executable, args, {**os.environ, "PYTHONPATH": str(ROOT)})
    _, status, usage = os.wait4(child, 0)
    assert status == 0
    return time.perf_counter() - start, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.slow  # 300 MB
def test_memory_does_not_grow_with_the_file(tmp_path):
    path = large_gguf(tmp_path / "large.gguf", 300_000_000)
    largest = max(tensor.nbytes for tensor in GGUFFile(path).tensors.values())
    small = converted_in_a_child(TINY, tmp_path / "small")[1]
    _, peak = converted_in_a_child(path, tmp_path / "out")
    assert path.stat().st_size > 290_000_000 and peak - small < 200 << 20, (peak, small, largest)


@pytest.mark.slow
def test_the_interrupt_key(tmp_path):
    """A real signal while several threads write: the partial file goes, and --resume gives the whole folder."""
    path, out = large_gguf(tmp_path / "large.gguf", 300_000_000), tmp_path / "out"
    args = [sys.executable, "-m", "mlx_ds4.convert", "--gguf", str(path), "--mlx-path", str(out)]
    child = subprocess.Popen(args, stderr=subprocess.PIPE, text=True)
    while child.poll() is None and not list(out.glob(".model-*.partial-*")):
        time.sleep(0.001)
    child.send_signal(signal.SIGINT)
    error = child.communicate(timeout=60)[1]
    assert (child.returncode, error) == (130, "mlx_ds4.convert: interrupted; --resume goes on\n")
    assert os.listdir(out) == ["conversion.json"]
    assert main([*args[3:], "--resume"]) == 0 and main([*args[3:], "--verify"]) == 0


@pytest.mark.slow
def test_three_gigabytes_at_the_rate_of_a_copy(tmp_path):
    path = large_gguf(tmp_path / "large.gguf", 3_000_000_000)
    size = path.stat().st_size
    copying, converting, peaks = [], [], []
    for attempt in range(3):
        start = time.perf_counter()
        with open(path, "rb") as old, open(tmp_path / "copy", "wb") as new:
            shutil.copyfileobj(old, new, 16 << 20)
            os.fsync(new.fileno())
        copying.append(time.perf_counter() - start)
        (tmp_path / "copy").unlink()
        seconds, peak = converted_in_a_child(path, tmp_path / f"out-{attempt}")
        converting.append(seconds)
        peaks.append(peak)
        shutil.rmtree(tmp_path / f"out-{attempt}")
    rates = [size / min(times) / 1e6 for times in (converting, copying)]
    print(f"{size / 1e9:.2f} GB: {rates[0]:.0f} MB/s, a copy {rates[1]:.0f} MB/s; peak {max(peaks) >> 20} MiB")
    assert max(peaks) < 512 << 20
    assert rates[0] > 0.5 * rates[1]
