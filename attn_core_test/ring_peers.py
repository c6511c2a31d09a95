# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps per second of rings over 8 virtual CPU devices: this library and ejkernel.

    python3 -m attn_core_test.ring_peers
    python3 -m attn_core_test.ring_peers --tokens=16384 --heads=8

A step is the value and the gradient of causal attention. All contenders take turns in one run, and
the results of each are compared with `flash_attn2` on one device, which the tests compare with the
oracle. Exits with status 1 if a result of this library is wrong.

Letters: T tokens, H heads, D width.
"""

import functools
import sys
import time

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import OperationMetadata, RingConfig, attention, create_mesh, from_layout, to_layout
from attn_core.sharding import token_order

FLAGS = flags.FLAGS
DEVICES = 8
# relative to the largest number: far above rounding, far below the error of an ignored mask
WRONG = 1e-3


def define_flags() -> None:
  """Defines the flags; only called if this file is the program."""
  flags.DEFINE_integer("tokens", 8192, "T")
  flags.DEFINE_integer("heads", 4, "H, of queries and of keys")
  flags.DEFINE_integer("width", 64, "D")
  flags.DEFINE_integer("rounds", 5, "steps of each contender, in turns; the fastest counts")


def ours(layout: str, mesh):
  """Returns (query, key, value) -> output, all in the order of `layout`."""
  metadata = OperationMetadata(mesh=mesh, ring=RingConfig("ring", layout))
  return lambda *x: attention(*x, mechanism="ring", metadata=metadata).attention_outputs


def ejkernel(mesh):
  """Returns the same by ejkernel's ring for XLA, which takes the natural order only."""
  from ejkernel.kernels._xla.ring_attention import ring_attention
  spec = P(None, "sp")
  return jax.shard_map(functools.partial(ring_attention, causal=True, axis_name="sp"), mesh=mesh,
                       in_specs=(spec,) * 3, out_specs=spec, check_vma=False)


def step(attend, weights, arrays):
  """Returns (output, gradients of a weighted sum of it)."""
  out, pull = jax.vjp(attend, *arrays)
  return out, pull(weights)


def contenders(mesh):
  """Returns name -> (attend, layout)."""
  found = {f"ring {layout}": (ours(layout, mesh), layout) for layout in token_order.TOKEN_ORDERS}
  try:
    found["ejkernel ring"] = ejkernel(mesh), "contiguous"
  except ImportError as error:
    print(f"ejkernel ring: absent, {error}")
  return found


def errors(got, want, layout: str):
  """Returns errors of the output and of the worst gradient, relative to their largest numbers."""
  got = from_layout(got, layout, DEVICES)
  each = [float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max())
          for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]
  return each[0], max(each[1:])


def main(argv) -> None:
  del argv
  jax.config.update("jax_num_cpu_devices", DEVICES)
  mesh = create_mesh((1, 1, 1, 1, DEVICES))
  shape = 1, FLAGS.tokens, FLAGS.heads, FLAGS.width
  weights, *arrays = (jnp.asarray(np.random.default_rng(n).standard_normal(shape), jnp.float32)
                      for n in range(4))
  alone = lambda *x: attention(*x, mechanism="flash_attn2").attention_outputs
  want = jax.tree.map(np.asarray, jax.jit(functools.partial(step, alone))(weights, arrays))
  runs, failed = {}, []
  print(f"jax {jax.__version__}, {DEVICES} virtual devices, causal, float32, T = {FLAGS.tokens:,}, "
        f"H = {FLAGS.heads}, D = {FLAGS.width}; value and gradient")
  for name, (attend, layout) in contenders(mesh).items():
    placed = jax.device_put(to_layout((weights, arrays), layout, DEVICES),
                            NamedSharding(mesh, P(None, "sp")))
    run = jax.jit(functools.partial(step, attend)).lower(*placed).compile()
    found = errors(run(*placed), want, layout)
    verdict = "right" if max(found) < WRONG else "WRONG"
    print(f"{name:16}  error of the output {found[0]:.1e}, of gradients {found[1]:.1e}: {verdict}",
          flush=True)
    if verdict == "WRONG" and not name.startswith("ejkernel"):
      failed.append(name)
    runs[name] = functools.partial(run, *placed)
  seconds = {name: [] for name in runs}
  for _ in range(FLAGS.rounds):
    for name, run in runs.items():
      begun = time.perf_counter()
      jax.block_until_ready(run())
      seconds[name].append(time.perf_counter() - begun)
  fastest = {name: min(each) for name, each in seconds.items()}
  for name, each in fastest.items():
    print(f"{name:16}  {1 / each:7.3f} steps a second; zigzag is "
          f"{each / fastest['ring zigzag']:.2f} times as fast")
  if failed:
    sys.exit(f"FAILED: {', '.join(failed)}")


if __name__ == "__main__":
  define_flags()
  app.run(main)
