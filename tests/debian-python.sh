#!/usr/bin/env bash
# A newer Python for `make test-installs`: PREFIX/usr/bin/python3.14, of Debian's next release.
#
#   tests/debian-python.sh PREFIX
#
# Python is unpacked, not installed, with its C library; patchelf has the program find the libraries.
set -euo pipefail
prefix=${1:?a directory that is not there yet}
lib=usr/lib/x86_64-linux-gnu

command -v patchelf > /dev/null || { echo "error: patchelf not found: sudo apt-get install patchelf" >&2; exit 1; }
mkdir -p "${prefix%/*}"
work=$(mktemp -d -- "$prefix.XXXXXX")  # beside it: renamed once it is whole
trap 'rm -rf -- "$work"' EXIT
"$(dirname "$0")/debian-packages.sh" "$work" forky '^(lib|zlib|python3.14)' python3.14
loader=$(find "$work" -name ld-linux-x86-64.so.2 | head -n 1)
patchelf --set-interpreter "$prefix${loader#"$work"}" --force-rpath --set-rpath "$prefix/$lib" "$work/usr/bin/python3.14"
mv -T -- "$work" "$prefix"
"$prefix/usr/bin/python3.14" -c 'import ctypes, hashlib, sqlite3, ssl, zlib'
