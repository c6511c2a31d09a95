# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains on one long document, whose bytes are one sequence sharded over all devices.

    python3 examples/long_context.py
    python3 examples/long_context.py --layout=striped --variant=all_gather --length=65536

One device cannot hold the activations of a very long sequence, so its tokens are divided over
devices, and the attention exchanges keys and values between them. With a causal mask the order of
the tokens matters: if each device holds a contiguous piece, the last one computes nearly twice the
mean, and the others wait for it. Two other orders balance the work.

The document is the source of attn_core itself, file after file. The program compiles every layout
of the sequence to print its memory per device and its balance of work, then trains with --layout.
The whole model runs in that layout: bytes, positions and labels are permuted once, and the loss, a
mean over all bytes, does not depend on their order. Without accelerators the devices are virtual
CPU devices. The program exits with status 1 unless the loss falls. T counts tokens, which are
bytes.
"""

import functools
import logging
import math
import pathlib
import sys
import time

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np

import attn_core
from attn_core import (OperationMetadata, RingConfig, Shapes, create_mesh, masks,
                       plan_context_parallel, ring_attention, to_layout)
from attn_core.sharding.token_order import TOKEN_ORDERS
import train_and_generate as model

FLAGS = flags.FLAGS
VARIANTS = ("ring", "all_gather", "ulysses")
CONFIG = model.Config(layers=1, width=32, heads=2, key_heads=1, head_dim=16, hidden=96, pattern="F")


def define_flags() -> None:
  """Defines the flags."""
  flags.DEFINE_integer("length", 32768, "bytes of the document")
  flags.DEFINE_integer("sp", 8, "devices that shard them")
  flags.DEFINE_enum("layout", "zigzag", TOKEN_ORDERS, "layout to train with")
  flags.DEFINE_enum("variant", "ring", VARIANTS, "communication of keys and values")
  flags.DEFINE_integer("heads", CONFIG.heads, "query heads")
  flags.DEFINE_integer("steps", 6, "training steps")
  flags.DEFINE_float("rate", 2e-2, "the learning rate")


def document(length: int) -> np.ndarray:
  """Returns the first bytes of the library's source: uint8 [length]."""
  folder = pathlib.Path(attn_core.__file__).parent
  text = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py")))
  if len(text) < length:
    sys.exit(f"--length={length - 1}: the source of attn_core has {len(text)} bytes only")
  return np.frombuffer(text[:length], np.uint8)


def loss(params, batch, config, attend):
  """Computes the mean cross entropy of the labels (bits).

  Args:
    params: as `model.init` makes them.
    batch: tokens, labels and positions, int32 [1, T] each, in any order.
    config: the model; all layers attend to everything before.
    attend: (query, key, value) -> [1, T, heads, D], for tokens in that order.
  """
  tokens, labels, positions = batch
  def one(x, weights):
    return model.layer(weights, x, positions, attend), None
  stacked = {name: params[name] for name, shape in model.shapes(config).items()
             if shape[0] == config.layers}
  x, _ = jax.lax.scan(jax.checkpoint(one, policy=model.SAVED), params["embedding"][tokens], stacked)
  logits = model.norm(x, params["final_norm"]) @ params["logits"]
  of_labels = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
  return (jax.nn.logsumexp(logits, -1) - of_labels).mean() / math.log(2)


def step(state, batch, *, config, attend):
  """Returns (the next state, the loss before it)."""
  value, gradients = jax.value_and_grad(loss)(state.params, batch, config, attend)
  return model.adamw(state, gradients, FLAGS.rate), value


def prepared(text: np.ndarray, layout: str, mesh):
  """Returns tokens, labels and positions in a layout, sharded over the devices."""
  text = text.astype(np.int32)[None]
  batch = text[:, :-1], text[:, 1:], np.arange(text.shape[1] - 1, dtype=np.int32)[None]
  return jax.device_put(to_layout(batch, layout, FLAGS.sp), NamedSharding(mesh, P(None, "sp")))


def compiled(state, batch, layout: str, mesh, config):
  """Compiles the step of a layout, and prints its memory and its balance."""
  print(f"compiling {layout}", flush=True)
  metadata = OperationMetadata(mesh=mesh, ring=RingConfig(FLAGS.variant, layout))
  attend = lambda *x: ring_attention(*x, metadata=metadata).attention_outputs
  whole = NamedSharding(mesh, P())
  found = jax.jit(functools.partial(step, config=config, attend=attend),
                  out_shardings=whole).lower(state, batch).compile()
  memory = found.memory_analysis()
  shapes = Shapes(1, FLAGS.length, FLAGS.length, config.heads, config.key_heads, config.head_dim,
                  config.head_dim, "float32")
  way, = [p for p in plan_context_parallel(shapes, masks.causal(), mesh, "cpu").predictions
          if (p.variant, p.layout) == (FLAGS.variant, layout)]
  print(f"{layout:10}  a device holds {memory.argument_size_in_bytes / 2**20:.2f} MB and "
        f"{memory.temp_size_in_bytes / 2**20:.1f} MB of temporaries; the busiest one visits "
        f"{way.imbalance:.2f} times the mean", flush=True)
  return found


def main(argv) -> None:
  del argv
  if FLAGS.sp < 2:
    sys.exit(f"--sp={FLAGS.sp}: expected at least 2 devices to shard the document over")
  begun = time.monotonic()
  jax.config.update("jax_num_cpu_devices", FLAGS.sp)
  mesh = create_mesh((1, 1, 1, 1, FLAGS.sp))
  text, config = document(FLAGS.length + 1), CONFIG._replace(heads=FLAGS.heads)
  print(f"{FLAGS.length:,} bytes over {FLAGS.sp} devices by {FLAGS.variant}, entropy of single "
        f"bytes {model.entropy(text):.3f} bits", flush=True)
  params = model.init(jax.random.key(0), config)
  state = jax.device_put(model.start(params), NamedSharding(mesh, P()))
  steps = {layout: compiled(state, prepared(text, layout, mesh), layout, mesh, config)
           for layout in TOKEN_ORDERS}
  batch, losses = prepared(text, FLAGS.layout, mesh), []
  for n in range(FLAGS.steps):
    state, value = steps[FLAGS.layout](state, batch)
    losses.append(float(value))
    print(f"{FLAGS.layout}, step {n + 1}: {losses[-1]:.3f} bits per byte", flush=True)
  print(f"{time.monotonic() - begun:.0f} s")
  if len(losses) > 1 and not losses[-1] < losses[0]:
    sys.exit(f"FAILED: the loss went from {losses[0]:.3f} to {losses[-1]:.3f} bits per byte")


if __name__ == "__main__":
  # absl shows logs of level INFO, where jax names every platform that this machine lacks.
  logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
  define_flags()
  app.run(main)
