# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole attention layers of DeepSeek-V3 of transformers, by latent rows: prefill and decode.

Needs torch and transformers (`pip install '.[parity]'`); skipped without them.
"""

import importlib
import json

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (PagesMetadata, attention_arguments, from_dict, latent_options, layer_rope,
                       multi_latent_attention, multi_latent_ragged_page_attention, rotary)
from attn_core.caches import latent, latent_pages
from attn_core_test import config_models_cases, optional_deps

LENGTH, B = 23, 2


def normalized(x, norm):
  """Returns the RMS norm of transformers with its weight."""
  scale = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + norm.variance_epsilon)
  return x * scale * jnp.asarray(norm.weight.detach().numpy())


def dense(x, layer):
  return x @ jnp.asarray(layer.weight.detach().numpy()).T


class DeepseekV3Test(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.torch, self.transformers = optional_deps.torch_and_transformers(self)
    _, _, sizes = config_models_cases.MODELS["deepseek_v3"]
    theirs = self.transformers.DeepseekV3Config(**sizes, attn_implementation="eager")
    self.module = importlib.import_module(
        type(theirs).__module__.replace("configuration", "modeling"))
    self.torch.manual_seed(0)
    model = self.module.DeepseekV3Model(theirs).eval()
    with self.torch.no_grad():
      for parameter in model.parameters():
        if parameter.ndim > 1:
          parameter.normal_(std=0.2)
        else:
          parameter.uniform_(0.5, 1.5)  # weights of norms
    self.model, self.layer = model, model.layers[1].self_attn
    self.config = from_dict(json.loads(json.dumps(theirs.to_dict())))
    rng = np.random.default_rng(0)
    self.hidden = rng.normal(size=(B, LENGTH, theirs.hidden_size)).astype(np.float32)

  def theirs(self):
    """Returns the layer's output for all tokens."""
    hidden = self.torch.tensor(self.hidden)
    positions = self.torch.arange(LENGTH)[None]
    mask = self.torch.full((LENGTH, LENGTH), -1e30).triu(1)[None, None]
    with self.torch.no_grad():
      tables = self.model.rotary_emb(hidden, positions)
      return self.layer(hidden, tables, mask)[0].numpy()

  def inputs(self, begin, end):
    """Returns queries of heads and latent rows of some tokens."""
    layer, config = self.layer, self.config
    options = latent_options(config)
    hidden = jnp.asarray(self.hidden[:, begin:end])
    query = dense(normalized(dense(hidden, layer.q_a_proj), layer.q_a_layernorm), layer.q_b_proj)
    query = query.reshape(B, end - begin, config.num_attention_heads, config.head_dim)
    rows = dense(hidden, layer.kv_a_proj_with_mqa)
    latents = normalized(rows[..., :options.latent_width], layer.kv_a_layernorm)
    turned, rope = rotary(query[..., options.nope_width:], rows[:, :, None, options.latent_width:],
                          jnp.arange(begin, end)[None], layer_rope(config, 1))
    return (jnp.concatenate([query[..., :options.nope_width], turned], -1),
            jnp.concatenate([latents, rope[:, :, 0]], -1))

  def mine(self, absorbed, begin, end, cache=None):
    """Returns the layer's output for some tokens, and the cache."""
    query, rows = self.inputs(begin, end)
    return self.attended(absorbed, query, lambda query, **arguments: multi_latent_attention(
        query, rows, cache_view=cache, **arguments))

  def attended(self, absorbed, query, attend):
    """Returns the layer's output by a function of queries [..., T, H, width], and the cache."""
    options = latent_options(self.config, self.layer.kv_b_proj.weight.detach().numpy().T)
    arguments = {name: value for name, value in attention_arguments(self.config, 1).items()
                 if name in ("causal", "softmax_scale", "dropout_prob")}
    key_up, value_up = options.key_up, options.value_up
    if absorbed:
      nope = options.nope_width
      query = jnp.concatenate([jnp.einsum("...hd,lhd->...hl", query[..., :nope], key_up),
                               query[..., nope:]], -1)
      options = options._replace(key_up=None, value_up=None)
    output = attend(query, latent_options=options, **arguments)
    out = output.attention_outputs
    if absorbed:
      out = jnp.einsum("...hl,lhe->...he", out, value_up)
    return dense(out.reshape(*out.shape[:-2], -1), self.layer.o_proj), output.cache_view

  @parameterized.parameters(True, False)
  def test_prefill(self, absorbed):
    np.testing.assert_allclose(self.mine(absorbed, 0, LENGTH)[0], self.theirs(), atol=1e-5)

  @parameterized.parameters(True, False)
  def test_decode(self, absorbed):
    options = latent_options(self.config)
    cache = latent.init(B, LENGTH, (options.latent_width, options.rope_width), dtype="float32")
    found = []
    for begin, end in ((0, 15), (15, 16), (16, 17), (17, 20), (20, LENGTH)):
      out, cache = self.mine(absorbed, begin, end, cache)
      found.append(out)
    np.testing.assert_allclose(jnp.concatenate(found, 1), self.theirs(), atol=1e-5)
    self.assertEqual(cache.latents.shape[-1], 16 + 8)

  @parameterized.parameters(True, False)
  def test_chunks_and_decode_through_pages(self, absorbed):
    """Prefills one request in chunks while the other decodes, and then the other way around."""
    options = latent_options(self.config)
    cache = latent_pages.init(16, 4, (options.latent_width, options.rope_width), dtype="float32")
    tables = np.random.default_rng(1).permutation(16)[:12].reshape(B, 6).astype(np.int32)
    query, rows = self.inputs(0, LENGTH)
    found, ends = [[], []], [(0, 0), (9, 20), (17, 21), (18, 22), (19, LENGTH), (LENGTH, LENGTH)]
    for begin, end in zip(ends, ends[1:]):
      new = lambda x: jnp.concatenate([x[row, begin[row]:end[row]] for row in range(B)])
      counts = np.subtract(end, begin)
      requests = PagesMetadata(tables, np.int32(end), np.int32([0, counts[0], sum(counts)]))
      out, cache = self.attended(absorbed, new(query), lambda query, **arguments: (
          multi_latent_ragged_page_attention(query, new(rows), cache, requests, **arguments)))
      for row, part in enumerate(jnp.split(out, [counts[0]])):
        found[row].append(part)
    np.testing.assert_allclose(jnp.stack([jnp.concatenate(x) for x in found]), self.theirs(),
                               atol=1e-5)


if __name__ == "__main__":
  absltest.main()
