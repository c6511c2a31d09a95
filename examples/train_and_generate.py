# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a small byte-level language model on real text, on a mesh, then generates from it.

    python3 examples/train_and_generate.py
    python3 examples/train_and_generate.py --mechanism=blocksparse --layers=6 --pattern=LLF
    python3 examples/train_and_generate.py --data=FOLDER --steps=1000 --save=model.npz
    python3 examples/train_and_generate.py --load=model.npz --steps=0 --prompt='def main'

It shows a whole training program around `attention`: a mesh, parameters and batches sharded over
it, recomputation in the backward pass, and a model that mixes two kinds of layers. Change
--mechanism, and nothing else in the program changes.

The text is Python's own standard library unless --data names a folder. A layer attends within a
sliding window (L in --pattern) or to everything before (F). Batch rows are sharded over dp and
fsdp, heads and hidden units over tp; without accelerators the mesh consists of virtual CPU devices.
The program exits with status 1 unless the loss on held-out files falls clearly below the entropy of
single bytes, the loss of a model that knows only how frequent each byte is.

The model is a dict of arrays and the functions from `init` to `forward`; other programs can import
them, and `load` reads what --save wrote. T counts tokens, which are bytes.
"""

import functools
import json
import logging
import math
import pathlib
import sys
import sysconfig
import time
from typing import NamedTuple

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import AttentionMechanism, OperationMetadata, attention, create_mesh, explain

FLAGS = flags.FLAGS
VOCABULARY = 256

# Recomputing everything except the attention in the backward pass is faster than storing it.
SAVED = jax.checkpoint_policies.save_only_these_names("attn_output", "attn_lse")
ROWS = ("fsdp", "dp")  # mesh axes of the batch


class Config(NamedTuple):
  """Sizes of a model; saved with its parameters."""

  layers: int = 4  # a multiple of the pattern's length
  width: int = 128  # of the residual stream
  heads: int = 4  # H
  key_heads: int = 2  # K, divides H
  head_dim: int = 32  # D
  hidden: int = 384  # units of the MLP
  pattern: str = "LF"  # L: sliding window, F: full; repeated over the layers
  window: int = 64  # tokens that a query of an L layer sees, itself included


# --- The model. ----------------------------------------------------------------------------------


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
  """Returns the shape of every parameter; those of the layers are stacked, [layers, ...]."""
  c, n = config, config.layers
  return {
      "embedding": (VOCABULARY, c.width),
      "attention_norm": (n, c.width),
      "query": (n, c.width, c.heads, c.head_dim),
      "key": (n, c.width, c.key_heads, c.head_dim),
      "value": (n, c.width, c.key_heads, c.head_dim),
      "out": (n, c.heads, c.head_dim, c.width),
      "mlp_norm": (n, c.width),
      "gate": (n, c.width, c.hidden),
      "up": (n, c.width, c.hidden),
      "down": (n, c.hidden, c.width),
      "final_norm": (c.width,),
      "logits": (c.width, VOCABULARY),
  }


# The mesh axes that shard each parameter; parameters not listed here are replicated.
SPECS = {
    "query": P(None, "fsdp", "tp"),
    "key": P(None, "fsdp", "tp"),
    "value": P(None, "fsdp", "tp"),
    "out": P(None, "tp", None, "fsdp"),
    "gate": P(None, "fsdp", "tp"),
    "up": P(None, "fsdp", "tp"),
    "down": P(None, "tp", "fsdp"),
    "logits": P("fsdp", "tp"),
}


def init(key, config: Config) -> dict[str, jax.Array]:
  """Makes random parameters: matrices keep the variance, those that end a branch reduce it."""
  params = {}
  for name, shape in shapes(config).items():
    key, mine = jax.random.split(key)
    if name.endswith("norm"):
      params[name] = jnp.ones(shape)
      continue
    fan_in = {"embedding": 1, "out": shape[1] * shape[-2]}.get(name, shape[-2])
    fan_in = config.width if name in ("query", "key", "value") else fan_in
    branch = 2 * config.layers if name in ("out", "down") else 1
    params[name] = jax.random.normal(mine, shape) * (fan_in * branch) ** -0.5
  return params


def norm(x, scale):
  """Normalizes the last axis: x / sqrt(mean(x**2)) * scale."""
  return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def rotate(x, positions):
  """Applies a rotary embedding whose pairs are (i, D / 2 + i).

  Su et al., RoFormer, https://arxiv.org/abs/2104.09864.

  Args:
    x: float [B, T, heads, D].
    positions: int [T] or [B, T], tokens.
  """
  half = x.shape[-1] // 2
  angle = positions[..., None] * 10000.0 ** (-jnp.arange(half) / half)
  cos, sin = (f(angle)[..., None, :] for f in (jnp.cos, jnp.sin))
  a, b = x[..., :half], x[..., half:]
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def layer(weights, x, positions, attend):
  """Computes one layer.

  Args:
    weights: the parameters of the layer by name.
    x: float [B, T, width].
    positions: int [T] or [B, T], tokens.
    attend: (query [B, T, H, D], key [B, T, K, D], value [B, T, K, D]) -> [B, T, H, D].

  Returns:
    float [B, T, width].
  """
  h = norm(x, weights["attention_norm"])
  query, key, value = (jnp.einsum("btm,mhd->bthd", h, weights[name])
                       for name in ("query", "key", "value"))
  seen = attend(rotate(query, positions), rotate(key, positions), value)
  x = x + jnp.einsum("bthd,hdm->btm", seen, weights["out"])
  h = norm(x, weights["mlp_norm"]).reshape(-1, x.shape[-1])  # XLA:CPU is fastest on matrices
  h = jax.nn.silu(h @ weights["gate"]) * (h @ weights["up"])
  return x + (h @ weights["down"]).reshape(x.shape)


def layer_weights(params, config: Config, index: int) -> dict[str, jax.Array]:
  """Returns the parameters of one layer by its number."""
  return {name: params[name][index] for name, shape in shapes(config).items()
          if shape[0] == config.layers}


def window_of(config: Config, index: int) -> tuple[int, int] | None:
  """Returns the sliding window of a layer by its number; None: it attends to everything before."""
  kind = config.pattern[index % len(config.pattern)]
  return (config.window - 1, 0) if kind == "L" else None


def forward(params, tokens, config: Config, attend):
  """Computes the logits of the next byte.

  Args:
    params: as `init` makes them.
    tokens: int [B, T].
    config: the model.
    attend: as `attention`, for query, key, value and sliding_window; returns [B, T, H, D].

  Returns:
    float [B, T, VOCABULARY].
  """
  period = len(config.pattern)
  positions = jnp.arange(tokens.shape[1])

  def period_of_layers(x, weights):
    """Computes the layers of one period of the pattern."""
    for i in range(period):
      mine = {name: w[i] for name, w in weights.items()}
      x = layer(mine, x, positions,
                functools.partial(attend, sliding_window=window_of(config, i)))
    return x, None

  stacked = {name: params[name].reshape(-1, period, *shape[1:])
             for name, shape in shapes(config).items() if shape[0] == config.layers}
  x, _ = jax.lax.scan(jax.checkpoint(period_of_layers, policy=SAVED),
                      params["embedding"][tokens], stacked)
  return norm(x, params["final_norm"]) @ params["logits"]


def loss(params, tokens, config: Config, attend):
  """Computes the mean cross entropy of each byte given those before (bits) of int [B, T + 1]."""
  logits = forward(params, tokens[:, :-1], config, attend)
  return -jnp.take_along_axis(
      jax.nn.log_softmax(logits), tokens[:, 1:, None], -1).mean() / math.log(2)


def save(path, params, config: Config) -> None:
  """Writes a model to one .npz file."""
  np.savez(path, config=json.dumps(config._asdict()),
           **{name: np.asarray(x) for name, x in params.items()})


def load(path) -> tuple[dict[str, np.ndarray], Config]:
  """Reads the parameters and the configuration that `save` wrote."""
  with np.load(path) as file:
    config = Config(**json.loads(str(file["config"])))
    return {name: file[name] for name in shapes(config)}, config


# --- Training. -----------------------------------------------------------------------------------


class State(NamedTuple):
  """Parameters and state of the optimizer."""

  params: dict
  mean: dict  # running mean of the gradients
  square: dict  # running mean of their squares
  step: jax.Array  # number of steps done


def start(params) -> State:
  zeros = lambda: jax.tree.map(jnp.zeros_like, params)
  return State(params, zeros(), zeros(), jnp.int32(0))


def learning_rate(step, steps: int, peak: float):
  """Returns a linear warm-up over 1/20 of the steps, then a cosine down to 1/10 of the peak."""
  warm = max(steps // 20, 1)
  cosine = 0.55 + 0.45 * jnp.cos(jnp.pi * jnp.minimum(step / max(steps, 1), 1))
  return peak * jnp.minimum((step + 1) / warm, cosine)


def adamw(state: State, gradients, rate, decay=0.1, betas=(0.9, 0.98), largest=1.0) -> State:
  """Computes one step of AdamW, with gradients clipped to the norm `largest`.

  Loshchilov and Hutter, Decoupled Weight Decay Regularization, https://arxiv.org/abs/1711.05101.
  """
  total = jnp.sqrt(sum((g * g).sum() for g in jax.tree.leaves(gradients)))
  gradients = jax.tree.map(lambda g: g * jnp.minimum(1, largest / (total + 1e-6)), gradients)
  step = state.step + 1
  mix = lambda beta: lambda old, new: beta * old + (1 - beta) * new
  mean = jax.tree.map(mix(betas[0]), state.mean, gradients)
  square = jax.tree.map(mix(betas[1]), state.square, jax.tree.map(jnp.square, gradients))

  def updated(p, m, s):
    m, s = m / (1 - betas[0] ** step), s / (1 - betas[1] ** step)
    return p - rate * (m / (jnp.sqrt(s) + 1e-8) + decay * p)

  return State(jax.tree.map(updated, state.params, mean, square), mean, square, step)


def train_step(state: State, tokens, *, config, attend, rate):
  """Returns (the next state, the loss before it)."""
  value, gradients = jax.value_and_grad(loss)(state.params, tokens, config, attend)
  return adamw(state, gradients, rate(state.step)), value


# --- Text. ---------------------------------------------------------------------------------------


def read(folder, most: int) -> tuple[np.ndarray, np.ndarray]:
  """Reads the texts of a folder as bytes: (for training, held out: every 20th file).

  Args:
    folder: its files *.py, also in subfolders, or if there are none *.txt and *.md.
    most: largest number of bytes to read.
  """
  folder = pathlib.Path(folder)
  skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
  paths = [path for path in sorted(folder.rglob("*"))
           if not skipped & set(path.relative_to(folder).parts)]
  paths = ([path for path in paths if path.suffix == ".py"]
           or [path for path in paths if path.suffix in (".txt", ".md")])
  parts, total = ([], []), 0
  for n, path in enumerate(paths):
    text = path.read_bytes()[:most - total]
    parts[n % 20 == 10].append(np.frombuffer(text, np.uint8))
    total += len(text)
  train, held_out = (np.concatenate(part or [np.zeros(0, np.uint8)]) for part in parts)
  if len(held_out) == 0:  # few files: hold out the end of the text
    train, held_out = np.split(train, [len(train) * 19 // 20])
  return train, held_out


def entropy(text: np.ndarray) -> float:
  """Computes the entropy of single bytes (bits)."""
  share = np.bincount(text, minlength=VOCABULARY) / len(text)
  return float(-(share * np.log2(np.where(share, share, 1))).sum())


def batch(rng, text: np.ndarray, rows: int, length: int) -> np.ndarray:
  """Returns random pieces of the text: int32 [rows, length + 1]."""
  firsts = rng.integers(0, len(text) - length, (rows, 1))
  return text[firsts + np.arange(length + 1)].astype(np.int32)


# --- Generating. ---------------------------------------------------------------------------------


def generate(params, prompt, key, *, config, attend, amount, context, temperature):
  """Continues a text without a cache: computes the whole context again for every byte.

  Args:
    params: as `init` makes them.
    prompt: int32 [B, T].
    key: a `jax.random` key.
    config: the model.
    attend: as for `forward`.
    amount: number of bytes to add.
    context: number of bytes that the model sees.
    temperature: divisor of the logits.

  Returns:
    int32 [B, T + amount].
  """
  length = prompt.shape[1]
  text = jnp.pad(prompt, ((0, 0), (0, max(amount, context))))

  def add(n, text):
    """Writes byte n; the bytes after it are padding, which causal layers do not see."""
    first = jnp.maximum(n - context, 0)
    seen = jax.lax.dynamic_slice_in_dim(text, first, context, 1)
    logits = forward(params, seen, config, attend)
    last = jax.lax.dynamic_index_in_dim(logits, n - 1 - first, 1, keepdims=False)
    byte = jax.random.categorical(jax.random.fold_in(key, n), last / temperature)
    return jax.lax.dynamic_update_slice_in_dim(text, byte[:, None].astype(text.dtype), n, 1)

  return jax.lax.fori_loop(length, length + amount, add, text)[:, :length + amount]


# --- The program. --------------------------------------------------------------------------------


def define_flags() -> None:
  """Defines the flags; called only by this program, since importers define other flags."""
  flags.DEFINE_string("data", None, "folder of texts; default: Python's standard library")
  flags.DEFINE_integer("max_bytes", 32_000_000, "largest number of bytes of text to read")
  flags.DEFINE_enum("mechanism", "auto", [m.value for m in AttentionMechanism],
                    "the attention mechanism")
  flags.DEFINE_integer("dp", 4, "devices that shard batch rows")
  flags.DEFINE_integer("fsdp", 1, "devices that shard batch rows and parameters")
  flags.DEFINE_integer("tp", 2, "devices that shard heads and hidden units")
  flags.DEFINE_integer("sp", 1, "devices that shard the sequence; needs mechanism=ring")
  for name, value in Config()._asdict().items():
    define = flags.DEFINE_string if isinstance(value, str) else flags.DEFINE_integer
    define(name, value, "size of the model, see Config")
  flags.DEFINE_integer("batch", 8, "rows of a batch")
  flags.DEFINE_integer("length", 256, "bytes of a row")
  flags.DEFINE_integer("steps", 120, "training steps")
  flags.DEFINE_float("rate", 4e-3, "largest learning rate")
  flags.DEFINE_integer("seed", 0, "seed of parameters, batches and samples")
  flags.DEFINE_integer("report_every", 25, "steps between reports")
  flags.DEFINE_string("save", None, ".npz file to write the model to")
  flags.DEFINE_string("load", None, "file written by --save to start from")
  flags.DEFINE_string("prompt", "import os\n\n\ndef ", "text to continue")
  flags.DEFINE_integer("generate", 200, "bytes to generate")
  flags.DEFINE_float("temperature", 0.7, "temperature of the samples")
  flags.DEFINE_boolean("verify", True, "whether to fail unless the loss falls below the entropy")


def configuration() -> Config:
  """Returns the sizes that the flags describe, or those of the model to load."""
  if FLAGS.load:
    return load(FLAGS.load)[1]
  config = Config(*(FLAGS[name].value for name in Config._fields))
  if not config.pattern or set(config.pattern) - set("LF") or config.layers % len(config.pattern):
    sys.exit(f"--pattern={config.pattern} --layers={config.layers}: expected letters L "
             "and F, and a number of layers that the pattern's length divides")
  return config


def attender(metadata: OperationMetadata):
  """Returns the attention chosen by the flags, as `forward` calls it."""
  def attend(query, key, value, sliding_window):
    return attention(query, key, value, mechanism=FLAGS.mechanism, metadata=metadata,
                     sliding_window=sliding_window).attention_outputs
  return attend


def print_explanation(config: Config, metadata: OperationMetadata) -> None:
  """Prints which mechanism runs, and which mesh axes shard nothing."""
  query, key = (jax.ShapeDtypeStruct((FLAGS.batch, FLAGS.length, heads, config.head_dim),
                                     jnp.float32) for heads in (config.heads, config.key_heads))
  answer = explain(query, key, key, mechanism=FLAGS.mechanism, metadata=metadata,
                   sliding_window=(config.window - 1, 0))
  if answer.chosen is None:
    sys.exit(f"--mechanism={FLAGS.mechanism} cannot run this:\n{answer}")
  print(f"attention by {answer.chosen} on platform {answer.platform}, layers "
        f"{config.pattern * (config.layers // len(config.pattern))}, window {config.window}")
  for drop in answer.replicated:
    print(f"  axis {drop.axis} does not shard {drop.tensor}: {drop.reason}")


def place(mesh, config: Config) -> tuple[State, NamedSharding]:
  """Returns the shardings of a State and of a batch."""
  def fit(name, shape):
    """Returns the sharding of a parameter, without the axes that do not divide its dimensions."""
    axes = zip(shape, SPECS.get(name, P()))
    return NamedSharding(mesh, P(*(a if a and n % mesh.shape[a] == 0 else None for n, a in axes)))

  params = {name: fit(name, shape) for name, shape in shapes(config).items()}
  return State(params, params, params, NamedSharding(mesh, P())), NamedSharding(mesh, P(ROWS))


def train(state: State, text, placement, config: Config, attend) -> State:
  """Runs the training steps and prints reports; placement: the result of `place`."""
  rate = functools.partial(learning_rate, steps=FLAGS.steps, peak=FLAGS.rate)
  rng = np.random.default_rng(FLAGS.seed)
  next_tokens = lambda: jax.device_put(batch(rng, text, FLAGS.batch, FLAGS.length), placement[1])
  print("compiling a training step", flush=True)
  begun = time.monotonic()
  step = jax.jit(functools.partial(train_step, config=config, attend=attend, rate=rate),
                 out_shardings=(placement[0], placement[0].step), donate_argnums=0)
  step = step.lower(state, next_tokens()).compile()
  print(f"compiled in {time.monotonic() - begun:.1f} s", flush=True)
  losses, begun = [], time.monotonic()
  for n in range(1, FLAGS.steps + 1):
    state, value = step(state, next_tokens())
    losses.append(float(value))  # waits, so that only one step is in flight
    if n == 1 or n % FLAGS.report_every == 0 or n == FLAGS.steps:
      speed = len(losses) * FLAGS.batch * FLAGS.length / (time.monotonic() - begun)
      print(f"step {n}: {np.mean(losses):.3f} bits per byte, {speed:,.0f} tokens/s", flush=True)
      losses, begun = [], time.monotonic()
  return state


def main(argv) -> None:
  del argv
  begun = time.monotonic()
  jax.config.update("jax_num_cpu_devices", FLAGS.dp * FLAGS.fsdp * FLAGS.tp * FLAGS.sp)
  mesh = create_mesh((FLAGS.dp, FLAGS.fsdp, 1, FLAGS.tp, FLAGS.sp))
  metadata = OperationMetadata(mesh=mesh)
  config, attend = configuration(), attender(metadata)
  placement = place(mesh, config)
  print(f"{mesh.size} devices: " + ", ".join(f"{k}={n}" for k, n in mesh.shape.items() if n > 1))
  print_explanation(config, metadata)

  print("reading text", flush=True)
  train_text, held_out = read(FLAGS.data or sysconfig.get_paths()["stdlib"], FLAGS.max_bytes)
  if len(held_out) <= FLAGS.length:
    sys.exit(f"--data: {len(train_text) + len(held_out)} bytes of text are too few")
  unigram = entropy(train_text)
  if FLAGS.load:
    params = jax.device_put(load(FLAGS.load)[0], placement[0].params)
  else:
    params = jax.jit(init, static_argnums=1, out_shardings=placement[0].params)(
        jax.random.key(FLAGS.seed), config)
  print(f"{sum(x.size for x in params.values()):,} parameters, {len(train_text):,} bytes to train "
        f"on, entropy of single bytes {unigram:.3f} bits", flush=True)
  if FLAGS.steps:
    state = jax.device_put(start(params), placement[0])
    params = train(state, train_text, placement, config, attend).params

  print("measuring the loss on held-out text", flush=True)
  tokens = batch(np.random.default_rng(1), held_out, 2 * FLAGS.batch, FLAGS.length)
  measure = jax.jit(functools.partial(loss, config=config, attend=attend))
  reached = float(measure(params, jax.device_put(tokens, placement[1])))
  print(f"held-out loss {reached:.3f} bits per byte, entropy of single bytes {unigram:.3f} bits")
  if FLAGS.save:
    save(FLAGS.save, params, config)
    print(f"model written to {FLAGS.save}")
  if FLAGS.generate:
    print_sample(params, config, attend)
  print(f"{time.monotonic() - begun:.0f} s")
  if FLAGS.verify and not reached < 0.8 * unigram:
    sys.exit(f"FAILED: the loss, {reached:.3f} bits per byte, is not clearly below the entropy of "
             f"single bytes, {unigram:.3f} (expected less than 0.8 times that)")


def print_sample(params, config: Config, attend) -> None:
  """Prints a continuation of the prompt."""
  print(f"generating {FLAGS.generate} bytes", flush=True)
  begun = time.monotonic()
  prompt = np.frombuffer(FLAGS.prompt.encode(), np.uint8).astype(np.int32)[None]
  sample = jax.jit(functools.partial(
      generate, config=config, attend=attend, amount=FLAGS.generate,
      context=min(FLAGS.length, prompt.shape[1] + FLAGS.generate), temperature=FLAGS.temperature))
  text = bytes(np.asarray(sample(params, prompt, jax.random.key(FLAGS.seed)))[0].astype(np.uint8))
  print(f"{FLAGS.generate} bytes generated in {time.monotonic() - begun:.1f} s:\n---")
  print(text.decode(errors="replace"), "---", sep="\n")


if __name__ == "__main__":
  # absl shows logs of level INFO, where jax names every platform that this machine lacks.
  logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
  define_flags()
  app.run(main)
