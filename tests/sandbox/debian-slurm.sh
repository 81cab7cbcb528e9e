#!/usr/bin/env bash
# A newer Slurm for the tests: that of Debian 13 (24.11) below a prefix, on Debian 12.
#
#   tests/sandbox/debian-slurm.sh PREFIX [SUITE]
#
# Its packages come from this machine's own Debian mirror and are unpacked, not installed, with the
# C library that they were built for; patchelf has the programs find it. It takes ten seconds.
set -euo pipefail
prefix=${1:?a directory that is not there yet}
suite=${2:-trixie}
lib=usr/lib/x86_64-linux-gnu
programs='sacct sacctmgr salloc sattach sbatch sbcast scancel scontrol sdiag sinfo sprio squeue sreport
  srun sshare sstat strigger slurmctld slurmd slurmdbd slurmstepd'

command -v patchelf > /dev/null || { echo "error: patchelf not found: sudo apt-get install patchelf" >&2; exit 1; }
mkdir -p "${prefix%/*}"
work=$(mktemp -d -- "$prefix.XXXXXX")  # beside it: renamed once it is whole
trap 'rm -rf -- "$work"' EXIT
mkdir -p "$work"/{apt/lists/partial,apt/archives/partial,debs,made/root,made/bin,made/sbin}

mirror=$(apt-get indextargets --format "\$(REPO_URI)" 'Created-By: Packages' | head -n 1)
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keyring] $mirror $suite main" > "$work/apt/sources.list"
: > "$work/apt/status"  # as if nothing were installed
apt() {
  apt-get -qq -o "Dir::Etc::sourcelist=$work/apt/sources.list" -o Dir::Etc::sourceparts=- \
    -o "Dir::State::lists=$work/apt/lists" -o "Dir::State::status=$work/apt/status" \
    -o "Dir::Cache=$work/apt" -o APT::Sandbox::User=root "$@"
}
apt update
# What apt would install, and of that Slurm itself and libraries.
mapfile -t packages < <(
  apt --simulate --no-install-recommends install slurmctld slurmd slurm-client slurmdbd \
    slurm-wlm-basic-plugins slurm-wlm-mysql-plugin |
    awk '$1 == "Inst" && $2 ~ /^(lib|slurm|zlib)/ { print $2 }'
)
(cd "$work/debs" && apt download "${packages[@]}" > /dev/null)
for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$work/made/root"; done

loader=$(find "$work/made/root" -name ld-linux-x86-64.so.2 | head -n 1)
for name in $programs; do
  for file in "$work"/made/root/usr/{bin,sbin}/"$name"{,-wlm}; do
    if [ ! -f "$file" ] || [ -L "$file" ]; then continue; fi
    to=$work/made/$(basename "${file%/*}")/$name
    cp -- "$file" "$to"
    patchelf --set-interpreter "$prefix${loader#"$work/made"}" --force-rpath --set-rpath \
      "$prefix/root/$lib/slurm-wlm:$prefix/root/$lib:$prefix/root/${lib#usr/}" "$to"
  done
done
mv -T -- "$work/made" "$prefix"
"$prefix/sbin/slurmctld" -V
