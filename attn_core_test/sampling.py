"""How much of a sweep runs: of many cases that are alike, and take seconds each.

By default half of it, one half on Python 3.11, 3.13, ..., the other on 3.12, 3.14, ..., so that two
versions show all of it. With ATTN_CORE_EVERY=1 in the environment all of everything: hours.
"""

import hashlib
import os
import sys
from typing import Iterable

EVERY = os.environ.get("ATTN_CORE_EVERY") == "1"


def half(cases: Iterable[tuple]) -> list[tuple]:
  """Of cases (name, ...), in their order, those for this version of Python."""
  # By a hash, since every second case may well be of one kind.
  number = lambda name: hashlib.sha256(name.encode()).digest()[0]
  mine = lambda name: (number(name) + sys.version_info.minor) % 2 == 0
  return [case for case in cases if EVERY or mine(case[0])]
