#!/usr/bin/env bash
# Unpacks packages of another Debian suite, and what they depend on, without installing them.
#
#   tests/debian-packages.sh DIRECTORY SUITE PATTERN PACKAGE...
#
# The packages come from this machine's own Debian mirror. Of those that apt would install, only the
# packages whose names match PATTERN are unpacked. The C library is among them.
set -euo pipefail
target=$1 suite=$2 pattern=$3
shift 3
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
mkdir -p "$target" "$work"/{lists/partial,archives/partial,debs}

mirror=$(apt-get indextargets --format "\$(REPO_URI)" 'Created-By: Packages' | head -n 1)
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keyring] $mirror $suite main" > "$work/sources.list"
: > "$work/status"  # as if nothing were installed
apt() {
  apt-get -qq -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=- \
    -o "Dir::State::lists=$work/lists" -o "Dir::State::status=$work/status" \
    -o "Dir::Cache=$work" -o APT::Sandbox::User=root "$@"
}
apt update
mapfile -t packages < <(
  apt --simulate --no-install-recommends install "$@" |
    awk -v pattern="$pattern" '$1 == "Inst" && $2 ~ pattern { print $2 }'
)
(cd "$work/debs" && apt download "${packages[@]}" > /dev/null)
for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$target"; done
