# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Two processes of four virtual devices each, joined by `jax.distributed` on loopback."""

import pathlib
import socket
import subprocess
import sys

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

SIZES = dict(B=8, T=16, H=4, K=2, D=8)


def arrays():
  rng = np.random.default_rng(0)
  heads = {"query": SIZES["H"], "key": SIZES["K"], "value": SIZES["K"]}
  return {name: rng.normal(size=(SIZES["B"], SIZES["T"], n, SIZES["D"])).astype(np.float32)
          for name, n in heads.items()}


def step(metadata, mechanism="auto"):
  """Returns output and gradients of a call with dropout, a window and segments per row."""
  from attn_core import MaskInfo, attention
  ids = np.sort(np.random.default_rng(1).integers(-1, 3, (SIZES["B"], SIZES["T"])), -1)
  def loss(arrays):
    out = attention(**arrays, mechanism=mechanism, metadata=metadata, sliding_window=(5, 0),
                    dropout_prob=0.3, dropout_rng=np.array([3, 4], np.uint32), deterministic=False,
                    mask_info=MaskInfo.from_segments(ids)).attention_outputs
    return (jnp.sin(out)**2).sum(), out
  return jax.jit(jax.grad(loss, has_aux=True))


def child(port: str, process: int) -> None:
  """Runs one of the two processes; prints OK if its shards equal the one-device run."""
  jax.config.update("jax_num_cpu_devices", 4)
  jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
  from attn_core import OperationMetadata, create_mesh
  assert len(jax.devices()) == 8 and len(jax.local_devices()) == 4
  with jax.default_device(jax.local_devices()[0]):
    want = jax.tree.map(np.asarray, step(OperationMetadata(mesh=None))(arrays()))
  for dims, mechanism in (((2, 1, 1, 4, 1), "auto"), ((1, 4, 1, 2, 1), "auto"),
                          ((4, 2, 1, 1, 1), "auto"), ((1, 1, 1, 2, 4), "ring")):
    mesh = create_mesh(dims)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("fsdp", "dp")))
    spread = {name: jax.make_array_from_callback(x.shape, sharding, lambda i, x=x: x[i])
              for name, x in arrays().items()}
    got = step(OperationMetadata(mesh=mesh), mechanism)(spread)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      for shard in x.addressable_shards:
        np.testing.assert_allclose(shard.data, y[shard.index], rtol=1e-5, atol=1e-5)
  print("OK", process, flush=True)


class DistributedTest(absltest.TestCase):

  def test_two_processes_give_the_results_of_one(self):
    with socket.socket() as s:
      s.bind(("127.0.0.1", 0))
      port = s.getsockname()[1]
    root = pathlib.Path(__file__).absolute().parent.parent
    code = (f"import sys; sys.path.insert(0, {str(root)!r}); "
            "from attn_core_test import distributed_test as t; "
            "t.child(sys.argv[1], int(sys.argv[2]))")
    processes = [subprocess.Popen([sys.executable, "-c", code, str(port), str(i)],
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                 for i in range(2)]
    try:
      for i, process in enumerate(processes):
        out, _ = process.communicate(timeout=300)
        self.assertEqual(process.returncode, 0, out)
        self.assertIn(f"OK {i}", out)
    finally:
      for process in processes:
        process.kill()


if __name__ == "__main__":
  absltest.main()
