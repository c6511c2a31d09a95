#!/bin/bash
# Builds, tests and runs a second workspace that depends on this checkout by its path: the files that
# docs/bazel.md shows after lines <!-- file: NAME -->.
#
# Usage: .ci/bazel_user_workspace.sh FOLDER
#
# Needs a bazel, and a python3 with jax and without attn_core. Writes only below FOLDER, which must
# not be inside the checkout. Where .ci/bazel_offline.sh has prepared the checkout, its stub
# repositories replace what would be downloaded.
set -euo pipefail
root=$(dirname "$(dirname "$(realpath "$0")")")
folder=$(realpath -m "$1")
workspace=$folder/workspace
mkdir -p "$workspace"

if (cd / && python3 -c 'import attn_core' 2> /dev/null); then
  echo "python3 has attn_core installed, so the test could not tell whether Bazel provides it" >&2
  exit 1
fi

# file NAME: writes the block that docs/bazel.md shows for a file.
file() {
  awk -v marker="<!-- file: $1 -->" '
    $0 == marker { wanted = 1; next }
    wanted && /^```/ { if (open) exit; open = 1; next }
    open' "$root/docs/bazel.md" | sed "s|/path/to/attn_core|$root|" > "$workspace/$1"
  [ -s "$workspace/$1" ] || { echo "docs/bazel.md shows no file $1" >&2; exit 1; }
}

for name in MODULE.bazel WORKSPACE BUILD attend.py; do
  file "$name"
done
# What docs/bazel.md says that the program prints is checked here.
cat >> "$workspace/attend.py" << 'END'
import attn_core
assert output.shape == (2, 16, 4, 8) and jnp.allclose(output, want, atol=1e-5)
assert "runfiles" in attn_core.__file__, attn_core.__file__
END
printf 'test --test_output=errors\ntry-import %s/user.bazelrc\n' "$root" > "$workspace/.bazelrc"

cd "$workspace"
bazel=(bazel --output_user_root="$folder/output")
trap '"${bazel[@]}" shutdown' EXIT
"${bazel[@]}" build //...
"${bazel[@]}" test //...
JAX_PLATFORMS=cpu "${bazel[@]}" run //:attend | tee "$folder/printed"
grep -qx '(2, 16, 4, 8) True' "$folder/printed"
