# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Fields of AttnConfig that are not set: the library chooses, not their documented defaults."""

import copy
import json
import pathlib
import pickle
import tempfile

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (AttnConfig, OperationMetadata, add_basic_configurations,
                       attach_custom_arguments, attention, attention_arguments, explain, extras_of,
                       from_dict, from_pretrained, read_basics_from_config, save_pretrained,
                       to_dict, to_diff_dict)
from attn_core.config.config import AUTOMATIC
from attn_core.config.validate import validated

DEFAULTS = {"attn_mechanism": "vanilla", "blocksize_k": 128, "blocksize_q": 128,
            "attn_dtype": jnp.dtype("bfloat16")}
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
         "num_hidden_layers": 2}

# Every way to set one field.
WAYS = {
    "constructor": lambda name, value: AttnConfig(**{name: value}),
    "replace": lambda name, value: AttnConfig()._replace(**{name: value}),
    "merge": lambda name, value: add_basic_configurations(AttnConfig(), **{name: value}),
    "attach": lambda name, value: attach_custom_arguments(AttnConfig(), **{name: value}),
    "dictionary": lambda name, value: from_dict(
        {"attn_core_format": 1, name: getattr(value, "name", value)}),
}


def outcome(config):
  """Returns what a configuration makes of the fields: mechanism, blocks and dtypes."""
  metadata = OperationMetadata.from_config(config)
  arguments = attention_arguments(config)
  return (arguments["mechanism"], metadata.blocksize_k, metadata.blocksize_q,
          metadata.runtime_dtype.name, arguments["compute_dtype"])


AUTO = ("auto", None, None, "float32", None)  # float32: as wide as the arrays


class UnsetTest(parameterized.TestCase):

  def test_documented_defaults_are_readable_and_not_used(self):
    config = AttnConfig()
    self.assertEqual({name: getattr(config, name) for name in AUTOMATIC}, DEFAULTS)
    self.assertEqual(config.unset, AUTOMATIC)
    self.assertEqual(outcome(config), AUTO)
    self.assertEqual(attention_arguments(config, mode="__autoregressive__")["mechanism"], "auto")

  @parameterized.product(way=tuple(WAYS), name=AUTOMATIC)
  def test_a_field_set_to_its_default_is_set(self, way, name):
    config = WAYS[way](name, DEFAULTS[name])
    self.assertEqual(config.unset, tuple(other for other in AUTOMATIC if other != name))
    expected = {"attn_mechanism": ("vanilla", *AUTO[1:]), "blocksize_k": ("auto", 128, *AUTO[2:]),
                "blocksize_q": ("auto", None, 128, *AUTO[3:]),
                "attn_dtype": (*AUTO[:3], "bfloat16", jnp.bfloat16)}
    self.assertEqual(outcome(config), expected[name])
    self.assertNotEqual(config, AttnConfig())  # else a program compiled for one would run the other
    self.assertEqual(config, AttnConfig(**{name: DEFAULTS[name]}))
    self.assertEqual(hash(config), hash(AttnConfig(**{name: DEFAULTS[name]})))

  def test_all_positions(self):
    config = AttnConfig(blocksize_q=128)
    self.assertEqual(AttnConfig(*config), config)
    self.assertEqual(AttnConfig(*AttnConfig()[:-1]).unset, ())

  def test_a_program_is_compiled_for_each(self):
    seen = []
    run = jax.jit(lambda config, x: seen.append(outcome(config)) or x)
    for config in (AttnConfig(), AttnConfig(attn_mechanism="vanilla"), AttnConfig()):
      run(config, 1)
    self.assertEqual(seen, [AUTO, ("vanilla", *AUTO[1:])])

  def test_other_changes_set_nothing(self):
    config = validated(AttnConfig(head_dim=8, blocksize_q=128))
    rest = ("attn_mechanism", "blocksize_k", "attn_dtype")
    for changed in (config._replace(causal=False), add_basic_configurations(config, bits=4),
                    attach_custom_arguments(config, color="red"), validated(config),
                    read_basics_from_config(AttnConfig(attn_mechanism="ring"), config)):
      self.assertEqual(changed.unset, rest)
    self.assertEqual(config._replace(unset=AUTOMATIC), validated(AttnConfig(head_dim=8)))

  def test_round_trips(self):
    for config in (AttnConfig(), AttnConfig(attn_mechanism="vanilla"), AttnConfig(blocksize_q=None),
                   AttnConfig(attn_dtype=jnp.bfloat16), AttnConfig(**DEFAULTS)):
      config = validated(config)
      for write in (to_dict, to_diff_dict):
        back = from_dict(json.loads(json.dumps(write(config))))
        self.assertEqual((back, back.unset), (config, config.unset))
      for same in (pickle.loads(pickle.dumps(config)), copy.copy(config), copy.deepcopy(config)):
        self.assertEqual((same, same.unset, type(same)), (config, config.unset, AttnConfig))
      metadata = OperationMetadata.from_config(config)
      self.assertEqual(OperationMetadata.from_json(metadata.to_json()), metadata)
    self.assertEqual(to_diff_dict(AttnConfig()), {"attn_core_format": 1})
    self.assertEqual(to_diff_dict(AttnConfig(blocksize_q=128)),
                     {"attn_core_format": 1, "blocksize_q": 128})

  def test_a_file_of_an_older_version_keeps_its_meaning(self):
    """Older files have every field and no `unset`: their values were used."""
    older = {name: value for name, value in to_dict(AttnConfig()).items() if name != "unset"}
    self.assertEqual(from_dict(older).unset, ())
    self.assertEqual(outcome(from_dict(older)), ("vanilla", 128, 128, "bfloat16", jnp.bfloat16))

  @parameterized.parameters(
      ({"unset": ("head_dim",)}, r"unset: got \('head_dim',\); expected a tuple of names among"),
      ({"unset": "attn_dtype"}, "unset: got 'attn_dtype'; expected a tuple of names among"),
      ({"unset": ("attn_mechanism",), "attn_mechanism": "ring"},
       r"unset: got \('attn_mechanism',\) with attn_mechanism='ring'; expected names of fields "
       "that have their default"))
  def test_bad_values(self, given, message):
    with self.assertRaisesRegex(ValueError, message):
      validated(AttnConfig(**given))


class FilesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)

  def read(self, given=(), **data):
    (self.folder / "config.json").write_text(json.dumps({**LLAMA, **data}))
    return from_pretrained(self.folder, **dict(given))

  def test_a_model_of_a_hub_runs_the_best_linear_mechanism(self):
    config = self.read()
    self.assertEqual((config.unset, outcome(config)), (AUTOMATIC, AUTO))
    x = jax.ShapeDtypeStruct((1, 2048, 4, 16), jnp.float32)
    text = str(explain(x, x, x, **attention_arguments(config)))
    self.assertRegex(text, "blockwise")
    self.assertNotRegex(text.splitlines()[0], "vanilla")
    x = np.random.default_rng(0).normal(size=(1, 64, 4, 16)).astype(np.float32)
    output = attention(x, x, x, metadata=OperationMetadata.from_config(config),
                       **attention_arguments(config)).attention_outputs
    wide = attention(x, x, x, mechanism="vanilla").attention_outputs
    self.assertLess(jnp.abs(output - wide).max(), 1e-5)  # in bfloat16 it is 1e-2

  @parameterized.parameters(
      ({"torch_dtype": "bfloat16"}, "bfloat16"), ({"dtype": "float16"}, "float16"),
      ({"torch_dtype": "float32"}, "float32"), ({"dtype": "float16", "torch_dtype": "bfloat16"},
                                                "float16"))
  def test_a_model_has_a_dtype(self, data, name):
    config = self.read(**data)
    self.assertEqual((config.attn_dtype, config.unset), (jnp.dtype(name), AUTOMATIC[:-1]))
    narrow = None if name == "float32" else jnp.dtype(name)
    self.assertEqual(outcome(config), (*AUTO[:3], name, narrow))
    x = np.random.default_rng(0).normal(size=(1, 16, 4, 16)).astype(np.float32)
    output = attention(x, x, x, **attention_arguments(config)).attention_outputs
    expected = attention(x, x, x, causal=True, compute_dtype=narrow).attention_outputs
    self.assertTrue((output == expected).all())
    self.assertEqual(list(extras_of(config)), ["torch_dtype"] if len(data) == 2 else [])

  def test_dtype_of_a_part_for_text(self):
    text = {**LLAMA, "model_type": "gemma3_text", "dtype": "float16"}
    data = {"model_type": "gemma3", "torch_dtype": "bfloat16"}
    self.assertEqual(from_dict({**data, "text_config": text}).attn_dtype, jnp.float16)
    text["torch_dtype"] = text.pop("dtype")
    self.assertEqual(from_dict({**data, "dtype": "float32", "text_config": text}).attn_dtype,
                     jnp.float16)
    del text["torch_dtype"]
    self.assertEqual(from_dict({**data, "text_config": text}).attn_dtype, jnp.bfloat16)

  @parameterized.parameters("auto", None)
  def test_no_dtype(self, value):
    self.assertEqual(self.read(torch_dtype=value).unset, AUTOMATIC)

  @parameterized.parameters("int8", "float8_e4m3fn", "brain", 16)
  def test_bad_dtypes(self, value):
    with self.assertRaisesRegex(ValueError, f"dtype: got {value!r}; expected .*'bfloat16'"):
      self.read(torch_dtype=value)

  def test_given_values_win(self):
    config = self.read({"attn_dtype": "float32", "attn_mechanism": "vanilla"}, dtype="bfloat16")
    self.assertEqual(outcome(config), ("vanilla", None, None, "float32", None))
    save_pretrained(config, self.folder)
    self.assertEqual(from_pretrained(self.folder), config)


if __name__ == "__main__":
  absltest.main()
