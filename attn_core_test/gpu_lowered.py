# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of programs that are lowered for CUDA, as MLIR modules, and how to read these.

No GPU, driver or CUDA compiler is needed. What XLA receives for a kernel is a module of Mosaic GPU:
`kernels` returns it. Constants are not folded: `number` computes extents, strides and offsets.
"""

import collections
import functools
import math
import operator
import re
from typing import Any, Callable

import jax
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir, passmanager

# Kinds of operations, by their names in the versions of jax or by their assembly. The first counts.
KINDS = {
    "load": r"cp\.async\.bulk\.tensor\.(?:\dd\.)?shared",
    "store": r"cp\.(?:reduce\.)?async\.bulk\.tensor\.(?:\dd\.)?global",
    "simple": r"cp\.async\.bulk\.(?:shared|global)",
    "registers": r"setmaxnreg|setmaxregister",
    "product": r"wgmma\.mma_async", "commit": r"wgmma\.commit", "wait": r"wgmma\.wait",
    "init": r"mbarrier\.init", "expect": r"mbarrier\.arrive\.expect_tx",
    "arrive": r"mbarrier\.arrive", "phase": r"mbarrier\.(?:try|test)_wait",
    "named": r"\bbar\.sync|\bbarrier\.sync", "whole": r"^gpu\.barrier|nvvm\.barrier"}
_KINDS = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in KINDS.items()))
ENCODER = "mosaic_gpu_init_tma_desc"  # the host encodes a tensor map
DYNAMIC = -2**63  # in attributes, in place of a number that is computed
# Operations that return an operand as it is; a shuffle does if all lanes hold the same number.
_SAME = ("arith.index_cast", "arith.index_castui", "arith.extui", "arith.extsi", "arith.trunci",
         "nvvm.shfl.sync")
_COMPUTED = {"arith.addi": operator.add, "arith.subi": operator.sub, "arith.muli": operator.mul,
             "arith.divui": operator.floordiv, "arith.remui": operator.mod,
             "arith.shrui": operator.rshift, "arith.andi": operator.and_}
# What divides both operands divides the result.
_MIXED = ("arith.addi", "arith.subi", "arith.remsi", "arith.remui", "arith.minsi", "arith.maxsi",
          "arith.minui", "arith.maxui")
# In the order of MLIR: the signed ones, and again for numbers without a sign.
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge", "lt", "le", "gt", "ge")


def kernels(run: Callable[..., Any], arguments: tuple) -> list[ir.Module]:
  """Returns the GPU kernels of a program, lowered for CUDA.

  Args:
    run: a function, jitted or not.
    arguments: of the function, arrays or only their shapes.
  """
  jitted = run if hasattr(run, "trace") else jax.jit(run)
  lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
  found = []
  for operation in operations(lowered.compiler_ir()):
    target = operation.attributes
    if "call_target_name" in target and "mosaic_gpu" in str(target["call_target_name"]):
      config = ir.DictAttr(target["mhlo.backend_config"])
      found.append(parsed(ir.StringAttr(config["module"]).value_bytes))
  return found


def parsed(module: str | bytes) -> ir.Module:
  """Reads a kernel's module, as text or as bytecode for XLA."""
  context = mlir.make_ir_context()
  context.allow_unregistered_dialects = True
  found = ir.Module.parse(module, context=context)
  read = "mosaic_gpu-serde{serialize=false}," if isinstance(module, bytes) else ""
  passmanager.PassManager.parse(f"builtin.module({read}cse)", context).run(found.operation)
  return found


def name_of(module: ir.Module) -> str:
  return ir.StringAttr(module.operation.attributes["sym_name"]).value


def operations(module: Any) -> list[ir.Operation]:
  """Returns all operations inside a module or an operation, in the order of the text."""
  found: list[ir.Operation] = []
  def collect(operation):
    for region in operation.regions:
      for block in region:
        for view in block:
          inner = view.operation
          found.append(inner)
          collect(inner)
  collect(module.operation)
  return found


def line_of(operation: ir.Operation) -> str:
  """Returns an operation without what is inside it, as a line of text."""
  if operation.name == "llvm.inline_asm":
    return text_of(operation)
  return operation.get_asm(use_local_scope=True)


def text_of(operation: ir.Operation) -> str:
  """Returns the text of inline assembly; for other operations their name."""
  if operation.name != "llvm.inline_asm":
    return operation.name
  return ir.StringAttr(operation.attributes["asm_string"]).value.strip()


def kind_of(operation: ir.Operation) -> str | None:
  """Returns which of KINDS an operation is; None: another.

  Also "encode", a call of ENCODER, and "exchange": warps store to shared memory as it was
  allocated, as they do to reduce what is distributed over them.
  """
  if operation.name == "func.call":
    return "encode" if ENCODER in str(operation.attributes["callee"]) else None
  if operation.name == "vector.store":
    view = maker(operation.operands[1])
    return "exchange" if view is not None and view.name == "memref.view" else None
  if not operation.name.startswith(("nvvm.", "llvm.inline_asm", "gpu.barrier")):
    return None
  found = _KINDS.search(text_of(operation))
  return None if found is None else found.lastgroup


def of_kind(module: ir.Module, *kinds: str) -> list[ir.Operation]:
  """Returns the operations of a module that are of these KINDS."""
  return [x for kind in kinds for x in _by_kind(module).get(kind, [])]


@functools.lru_cache(maxsize=4)
def _by_kind(module: ir.Module) -> dict[str, list[ir.Operation]]:
  found = collections.defaultdict(list)
  for operation in operations(module):
    found[kind_of(operation)].append(operation)
  return found


def pointers(operation: ir.Operation) -> tuple[list[ir.Value], list[ir.Value]]:
  """Returns the operands that are addresses of shared memory, and of global memory."""
  of = lambda kind: [x for x in operation.operands if str(x.type) == kind]
  return of("!llvm.ptr<3>"), of("!llvm.ptr")


def maker(value: ir.Value) -> ir.Operation | None:
  """Returns the operation that computes a value; None for arguments of blocks."""
  return None if isinstance(value.owner, ir.Block) else value.owner.operation


def number(value: ir.Value, warpgroup: int | None = None, threads: int = 128) -> int | None:
  """Returns the number that a value has; None if it is not known.

  Args:
    value: of an integer or index type.
    warpgroup: the one whose first thread computes it; None: any.
    threads: of the thread block.
  """
  made = maker(value)
  if made is None:
    return None
  if made.name == "arith.constant":
    return ir.IntegerAttr(made.attributes["value"]).value
  if made.name == "gpu.thread_id":
    if "x" not in str(made.attributes["dimension"]).split()[-1]:
      return 0
    return None if warpgroup is None else 128 * warpgroup
  if made.name == "gpu.block_dim":
    return threads if "x" in str(made.attributes["dimension"]).split()[-1] else 1
  if made.name == "memref.extract_strided_metadata":
    return _metadata(made, list(made.results).index(value))
  of = lambda index: number(made.operands[index], warpgroup, threads)
  if made.name in _SAME:
    return of(1 if made.name == "nvvm.shfl.sync" else 0)
  if made.name in _COMPUTED or made.name == "arith.cmpi":
    left, right = of(0), of(1)
    if made.name in ("arith.andi", "arith.muli") and 0 in (left, right):
      return 0
    if left is None or right is None:
      return None
    if made.name == "arith.cmpi":
      kind = ir.IntegerAttr(made.attributes["predicate"]).value
      return int(getattr(operator, _COMPARED[kind])(left, right))
    return _COMPUTED[made.name](left, right)
  return None


def _metadata(made: ir.Operation, result: int) -> int | None:
  """Returns a number among (memory, offset, sizes, strides) of an array; None: not known."""
  kind = ir.MemRefType(made.operands[0].type)
  strides, offset = kind.get_strides_and_offset()
  found = [None, offset, *kind.shape, *strides][result]
  return None if found == DYNAMIC else found


def divisor(value: ir.Value) -> int:
  """Returns a number that always divides a value; 0 if the value is 0."""
  made, known = maker(value), number(value)
  if known is not None:
    return abs(known)
  if made is None:
    loop = value.owner.owner
    if loop.operation.name == "scf.for" and value == value.owner.arguments[0]:
      return math.gcd(divisor(loop.operands[0]), divisor(loop.operands[2]))
    return 1
  of = lambda index: divisor(made.operands[index])
  if made.name in _SAME:
    return of(1 if made.name == "nvvm.shfl.sync" else 0)
  if made.name == "arith.muli":
    return of(0) * of(1)
  if made.name in _MIXED:
    return math.gcd(of(0), of(1))
  if made.name == "arith.select":
    return math.gcd(of(1), of(2))
  if made.name == "arith.shli":
    return of(0) << (number(made.operands[1]) or 0)
  return 1


def array_of(pointer: ir.Value) -> ir.Value:
  """Returns the array (of type memref) whose first element a pointer is made to point to.

  Raises:
    ValueError: there is none.
  """
  value = pointer
  while not str(value.type).startswith("memref<"):
    made = maker(value)
    if made is None or not made.operands:
      raise ValueError(f"a pointer to no array: {str(pointer)[:200]}")
    value = made.operands[0]
  return value


def element_bytes(array: ir.Value) -> int:
  """Returns the bytes of an element, whose type is called bf16, i8, f8E4M3FN or the like."""
  bits, = re.findall(r"^[a-z]+(\d+)", str(ir.MemRefType(array.type).element_type))
  return max(1, int(bits) // 8)


def offsets(operation: ir.Operation) -> list[int | ir.Value]:
  """Returns where a view of an array begins: of each dimension a number or a computed one."""
  dynamic = iter(list(operation.operands)[1:])
  return [next(dynamic) if x == DYNAMIC else x
          for x in ir.DenseI64ArrayAttr(operation.attributes["static_offsets"])]
