#!/bin/bash
# Prepares a checkout for Debian's own Bazel (package bazel-bootstrap, 4.2.3), so that
# `bazel test //...` needs nothing from the network but that package.
#
# Usage: .ci/bazel_offline.sh STUBS
#
# Bazel 4 still has its Python rules built in. The repositories that WORKSPACE, and Bazel itself,
# would download are replaced by stubs under the folder STUBS, which hand the built-in rules on
# under the names that newer releases use. user.bazelrc, which .bazelrc reads, points Bazel at them.
# Installs the package when there is no bazel yet, which needs root.
set -euo pipefail
root=$(dirname "$(dirname "$(realpath "$0")")")
stubs=$(realpath -m "$1")

if ! command -v bazel > /dev/null; then
  apt-get -qq update
  apt-get -qq install -y --no-install-recommends bazel-bootstrap > /dev/null
fi

# stub REPOSITORY FILE: a repository whose one file holds standard input.
stub() {
  mkdir -p "$stubs/$1/$(dirname "$2")"
  echo "workspace(name = \"$1\")" > "$stubs/$1/WORKSPACE"
  touch "$stubs/$1/BUILD" "$stubs/$1/$(dirname "$2")/BUILD"
  cat > "$stubs/$1/$2"
}

# builtin RULE...: assigns every built-in rule to its own name.
builtin() {
  local rule
  for rule in "$@"; do
    echo "$rule = native.$rule"
  done
}

builtin py_binary py_library py_runtime py_test | stub rules_python python/defs.bzl
printf 'def py_repositories():\n    pass\n' > "$stubs/rules_python/python/repositories.bzl"
builtin java_binary java_import java_library java_runtime java_toolchain |
  stub rules_java java/defs.bzl
builtin cc_binary cc_import cc_library cc_proto_library cc_test cc_toolchain cc_toolchain_suite \
  objc_library | stub rules_cc cc/defs.bzl
echo 'toolchain_type(name = "toolchain_type", visibility = ["//visibility:public"])' \
  > "$stubs/rules_cc/cc/BUILD"
echo 'filegroup(name = "coverage_report_generator", visibility = ["//visibility:public"])' |
  stub remote_coverage_tools BUILD

for repository in rules_python rules_java rules_cc remote_coverage_tools; do
  echo "build --override_repository=$repository=$stubs/$repository"
done > "$root/user.bazelrc"
