"""The training run: the model, then its drafter on the frozen model, each with a schedule that ends with its time.

Learning rate, the change from dense to selected attention and the one to long sequences follow the share of the time
that has passed, so a run of any length, on any machine, ends with a learning rate near zero. Operations are not
compiled: a fused kernel costs a second or more to build on CUDA, and a step has over a hundred different ones.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np

from . import draft, parameters
from .batches import Data
from .forward import Named, Pass, forward
from .learner import Learner

MODEL_SHARE = 0.74  # of the time; the rest trains the drafter
_DENSE, _LONG = 0.10, 0.85  # shares of the model's time
_LONGER, _FEWER = 4, 8  # long sequences, and a batch of them
_WARM, _LAST_RATE = 0.02, 0.02
_WARM_STEPS = 60  # at least: on a GPU the first step builds kernels for half a minute
_BLOCKS = 48  # the drafter's blocks in a sequence
_LOG_EVERY, _HELD_EVERY, _HELD_BATCHES = 10, 250, 4
_SAVE_SECONDS = 60.0
_FILE_BYTES = 14_000_000


@dataclasses.dataclass(frozen=True)
class Options:
    """A run: `steps` ends each part by its number of steps instead of by time (its share of them)."""

    minutes: float = 8.0
    batch: int = 32
    length: int = 512
    learning_rate: float = 2e-3
    steps: int | None = None
    seed: int = 0
    checkpoint: Path | None = None
    resume: bool = False
    model: Path | None = None  # the folder of a finished run: only a drafter is trained, on that run's model


def train(data: Path, out: Path, options: Options) -> None:
    """Trains from a prepared folder; writes `model-*.safetensors`, `drafter-*.safetensors` and `log.jsonl` to `out`."""
    _Run(Data(data), out, options).run()


def rate_at(share: float, highest: float) -> float:
    """The learning rate when `share` of the time has passed: linear up, then half a cosine down to 2 %."""
    if share < _WARM:
        return highest * max(share / _WARM, 0.01)
    down = (1 + math.cos(math.pi * min(1.0, (share - _WARM) / (1 - _WARM)))) / 2
    return highest * (_LAST_RATE + (1 - _LAST_RATE) * down)


class _Run:
    def __init__(self, data: Data, out: Path, options: Options):
        self.data, self.out, self.options, self.config = data, out, options, data.config
        out.mkdir(parents=True, exist_ok=True)
        self.learners = {
            "model": Learner(parameters.backbone(self.config), options.seed),
            "draft": Learner(parameters.drafter(self.config), options.seed + 1),
        }
        self.before = dict.fromkeys(self.learners, 0.0)  # seconds of earlier runs
        if options.resume:
            self._restore()
        self.log = (out / "log.jsonl").open("a")
        self.saved = time.perf_counter()

    def run(self) -> None:
        """The whole run; an interruption saves a checkpoint first."""
        try:
            self._run()
        except KeyboardInterrupt:
            self._save()
            raise

    def _run(self) -> None:
        self._note(event="start", device=str(mx.default_device()), parameters={
            name: learner.layout.size for name, learner in self.learners.items()
        }, options={k: str(v) for k, v in dataclasses.asdict(self.options).items()})  # fmt: skip
        if self.options.model is None:
            self._part("model", MODEL_SHARE, self._model_step)
            named, rest = self.learners["model"].named(), 1 - MODEL_SHARE
        else:
            named, rest = read_weights(self.options.model, "model"), 1.0
        mx.eval(named)
        write_weights(self.out, "model", named)
        self._part("draft", rest, functools.partial(self._draft_step, named))
        write_weights(self.out, "drafter", self.learners["draft"].named())
        self._save()
        self._note(event="end")

    # ---- the loop of one part ------------------------------------------------------------------------

    def _part(self, name: str, part: float, step) -> None:
        """Calls `step(share)` until the part's time is over; a step is awaited while the next one is prepared."""
        learner, options = self.learners[name], self.options
        seconds = options.minutes * 60 * part
        steps = None if options.steps is None else max(1, round(options.steps * part))
        start, waiting = time.perf_counter() - self.before[name], []
        bar = _bar(name, learner.step, steps)
        while True:
            elapsed = time.perf_counter() - start
            share = elapsed / seconds if steps is None else learner.step / steps
            if share >= 1:
                break
            numbers = step(share)
            mx.async_eval(numbers, learner.arrays())
            waiting.append((learner.step, share, numbers))
            if len(waiting) > 1:
                self._report(name, start, bar, *waiting.pop(0))
            self.before[name] = time.perf_counter() - start
            if options.checkpoint and time.perf_counter() - self.saved > _SAVE_SECONDS:
                self._save()
        for item in waiting:
            self._report(name, start, bar, *item)
        if bar is not None:
            bar.close()
        if name == "model":
            self._note(part=name, step=learner.step, held=self._held(16))

    def _report(self, name: str, start: float, bar, step: int, share: float, numbers: dict[str, mx.array]) -> None:
        mx.eval(numbers)
        if bar is not None:
            bar.update(step - bar.n)
        if step % _LOG_EVERY and step > 3:
            return
        values = {key: round(value.item(), 5) for key, value in numbers.items()}
        if not math.isfinite(values["loss"]):
            raise ValueError(f"the loss is {values['loss']} at step {step}: choose a smaller --learning-rate")
        seconds = time.perf_counter() - start
        memory = round(mx.get_peak_memory() / 2**30, 1)
        held = {"held": self._held(_HELD_BATCHES)} if name == "model" and step % _HELD_EVERY == 0 else {}
        self._note(
            part=name, step=step, seconds=round(seconds, 2), share=round(share, 4), memory_gib=memory, **values, **held
        )

    def _model_step(self, share: float) -> dict[str, mx.array]:
        learner, options, config = self.learners["model"], self.options, self.config
        long = share > _LONG
        length = options.length * (_LONGER if long else 1)
        batch = max(1, options.batch // _FEWER) if long else options.batch
        ids, targets = self.data.batch(options.seed, learner.step, batch, length)
        tokens, targets, rows = mx.array(ids), mx.array(targets), self.data.rows(ids)

        def loss(flat: Named):
            state = Pass(config, length, dense=share < _DENSE)
            logits = forward(learner.layout.named(flat), learner.biases, config, tokens, rows, state)
            language = _cross_entropy(logits, targets)
            index = sum(state.index_losses) / len(state.index_losses)
            # Keeps logits and with them the head's scale where bfloat16 is fine.
            spread = mx.square(mx.logsumexp(logits, axis=-1)).mean()
            return language + index + 1e-4 * spread, (language, index, state.loads)

        (_, (language, index, loads)), gradients = mx.value_and_grad(loss)(learner.flat)
        norm = learner.update(gradients, loads, self._rate(learner, share))
        unevenness = mx.stack([load.max() / load.mean() for load in loads]).max()
        return {"loss": language, "index": index, "norm": norm, "load": unevenness}

    def _draft_step(self, frozen: Named, share: float) -> dict[str, mx.array]:
        learner, options, config = self.learners["draft"], self.options, self.config
        ids, _ = self.data.batch(options.seed + 7, learner.step, options.batch, options.length)
        tokens, rows = mx.array(ids), self.data.rows(ids)
        state = Pass(config, options.length)
        target = forward(frozen, frozen, config, tokens, rows, state)
        taps = mx.concatenate(state.taps, axis=-1)
        rng = np.random.default_rng([options.seed + 8, learner.step])
        last = options.length - config.dspark_block_size
        starts = np.sort(rng.choice(np.arange(1, last), min(_BLOCKS, last - 1), replace=False))

        def loss(flat: Named):
            state = Pass(config, options.length)
            total, parts = draft.loss(
                learner.layout.named(flat), learner.biases, config, frozen, taps, target, tokens, starts, state
            )
            return total, (parts, state.loads)

        (total, (parts, loads)), gradients = mx.value_and_grad(loss)(learner.flat)
        norm = learner.update(gradients, loads, self._rate(learner, share))
        return {"loss": total, **parts, "norm": norm}

    def _rate(self, learner: Learner, share: float) -> float:
        warm = min(1.0, (learner.step + 1) / _WARM_STEPS) if self.options.steps is None else 1.0
        return warm * rate_at(share, self.options.learning_rate)

    def _held(self, batches: int) -> float:
        """Loss per token on text that is not trained on."""
        learner = self.learners["model"]
        named = learner.named()
        losses = []
        for ids, targets in self.data.held_batches(self.options.batch, self.options.length, batches):
            state = Pass(self.config, ids.shape[1])
            logits = forward(named, named, self.config, mx.array(ids), self.data.rows(ids), state)
            losses.append(_cross_entropy(logits, mx.array(targets)).item())
        return round(float(np.mean(losses)), 5) if losses else float("nan")

    # ---- files ---------------------------------------------------------------------------------------

    def _note(self, **record) -> None:
        self.log.write(json.dumps(record) + "\n")
        self.log.flush()
        print(json.dumps(record), flush=True)

    def _save(self) -> None:
        if self.options.checkpoint is None:
            return
        arrays = {f"{n}/{k}": v for n, learner in self.learners.items() for k, v in learner.save().items()}
        arrays |= {f"seconds/{n}": mx.array(s) for n, s in self.before.items()}
        _write(self.options.checkpoint, arrays)
        self.saved = time.perf_counter()

    def _restore(self) -> None:
        path = self.options.checkpoint
        if path is None or not path.is_file():
            raise ValueError(f"--resume needs the file of --checkpoint, found {path}: leave --resume out")
        arrays = mx.load(str(path))
        for name, learner in self.learners.items():
            prefix = f"{name}/"
            learner.restore({k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)})
            self.before[name] = arrays[f"seconds/{name}"].item()


def _bar(name: str, done: int, steps: int | None):
    """A progress bar where someone looks at it; a machine that only trains needs no tqdm."""
    if not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    return tqdm(desc=name, unit="step", initial=done, total=steps)


def _cross_entropy(logits: mx.array, targets: mx.array) -> mx.array:
    chosen = mx.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return (mx.logsumexp(logits, axis=-1) - chosen).mean()


def write_weights(folder: Path, stem: str, named: dict[str, mx.array]) -> None:
    """Writes weights as STEM-1.safetensors, STEM-2..: bfloat16 where that holds every value exactly, else float32."""
    files, room = [{}], _FILE_BYTES
    for name, value in named.items():
        half = value.astype(mx.bfloat16)
        stored = half if mx.array_equal(half.astype(mx.float32), value).item() else value
        if stored.nbytes > room and files[-1]:
            files.append({})
            room = _FILE_BYTES
        files[-1][name] = stored
        room -= stored.nbytes
    for number, arrays in enumerate(files, 1):
        _write(folder / f"{stem}-{number}.safetensors", arrays)


def read_weights(folder: Path, stem: str) -> dict[str, mx.array]:
    """What `write_weights` wrote, as float32; ValueError when there is nothing."""
    files = sorted(folder.glob(f"{stem}-*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: holds no {stem}-1.safetensors: name the folder that `train` wrote")
    return {name: value.astype(mx.float32) for file in files for name, value in mx.load(str(file)).items()}


def _write(path: Path, arrays: dict[str, mx.array]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part.safetensors")  # MLX adds the suffix where it lacks
    mx.save_safetensors(str(part), arrays)
    os.replace(part, path)
