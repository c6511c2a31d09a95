# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs TPU kernels on the CPU: with a race detector, and with the bytes of transfers counted."""

import contextlib
import dataclasses
import functools
import io
import logging
from typing import Any, Iterator, NamedTuple
from unittest import mock

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call, thread_map
from jax.experimental import io_callback
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from attn_core_test import numpy_programs

interpret_by_xla = interpret_pallas_call.interpret_pallas_call


def random_order(grid: tuple, parameters: Any, seed: int | None) -> tuple[jax.Array, ...]:
  """Returns coordinates along each parallel axis of a grid in a random order, none along others."""
  random = np.random.default_rng(seed or 0)
  parallel = interpret_pallas_call._get_parallel_dim_semantics(parameters, len(grid))
  return tuple(jnp.asarray(random.permutation(size) if each else (), jnp.int32)
               for size, each in zip(grid, parallel))


def interpret_by_numpy(*arguments: Any, **parameters: Any) -> list[jax.Array]:
  """Interprets a kernel as JAX does, by one callback that needs no compiler.

  Callbacks of kernels are in order, as the barriers of JAX's interpreter see to.
  """
  with mock.patch.object(interpret_pallas_call, "_get_randomized_grid_coordinates", random_order):
    traced = jax.make_jaxpr(functools.partial(interpret_by_xla, **parameters))(*arguments)
  jaxpr = getattr(traced, "jaxpr", traced)
  places = [equation for equation in jaxpr.eqns if equation.primitive.name == "axis_index"]
  # Which device this is only the program around the callback knows.
  jaxpr = jaxpr.replace(
      eqns=[equation for equation in jaxpr.eqns if equation not in places],
      invars=[*jaxpr.invars, *(equation.outvars[0] for equation in places)])
  program = numpy_programs.Program(jaxpr, traced.consts)

  def run(*values: Any) -> list:
    with np.errstate(all="ignore"):
      return program(*map(np.asarray, values))

  avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.outvars]
  return io_callback(run, avals, *arguments, *(
      equation.primitive.bind(**equation.params) for equation in places), ordered=True)


@contextlib.contextmanager
def by_numpy() -> Iterator[None]:
  """Runs interpreted TPU kernels without a compiler."""
  with (mock.patch.object(interpret_pallas_call, "interpret_pallas_call", interpret_by_numpy),
        mock.patch.object(thread_map, "_run_jaxpr", numpy_programs.run_thread)):
    yield


@contextlib.contextmanager
def interpreted(transfers: str = "on_wait") -> Iterator[None]:
  """Runs TPU kernels on the CPU; fails on a detected race."""
  printed = io.StringIO()
  parameters = pltpu.InterpretParams(
      detect_races=True, uninitialized_memory="nan", dma_execution_mode=transfers)
  with (contextlib.redirect_stdout(printed), pltpu.force_tpu_interpret_mode(parameters),
        by_numpy()):
    yield
  assert "RACE" not in printed.getvalue(), printed.getvalue()


@contextlib.contextmanager
def watched(transfers: str = "on_wait", **more: Any) -> Iterator[io.StringIO]:
  """Runs TPU kernels on the CPU; yields the text file that reports races.

  Args:
    transfers: when copies happen.
    **more: other fields of `pltpu.InterpretParams`.
  """
  printed = io.StringIO()
  fields = {field.name for field in dataclasses.fields(pltpu.InterpretParams)}
  # An exception would leave other devices or cores waiting; older versions raise none.
  more = {"on_race": "warn", **more} if "on_race" in fields else more
  parameters = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan",
                                     dma_execution_mode=transfers, **more)
  handler = logging.StreamHandler(printed)
  logging.getLogger().addHandler(handler)
  try:
    with (contextlib.redirect_stdout(printed), pltpu.force_tpu_interpret_mode(parameters),
          by_numpy()):
      yield printed
  finally:
    logging.getLogger().removeHandler(handler)


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
  """Interprets TPU kernels; yields a list to which every starting transfer adds its bytes."""
  moved, make = [], pltpu.make_async_copy
  class Copy(NamedTuple):
    copy: Any
    size: int

    def start(self):
      jax.debug.callback(lambda: moved.append(self.size))
      self.copy.start()

    def wait(self):
      self.copy.wait()

  def counting(source, target, arrived):
    size = int(np.prod(target.shape)) * jnp.dtype(target.dtype).itemsize
    return Copy(make(source, target, arrived), size)

  with mock.patch.object(pltpu, "make_async_copy", counting), interpreted():
    yield moved
    jax.effects_barrier()
