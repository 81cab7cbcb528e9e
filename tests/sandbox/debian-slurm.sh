#!/usr/bin/env bash
# A newer Slurm for the tests: that of Debian 13 (24.11) below a prefix, on Debian 12.
#
#   tests/sandbox/debian-slurm.sh PREFIX [SUITE]
#
# Slurm is unpacked, not installed, with the C library that it was built for; patchelf has the
# programs find that library. It takes ten seconds.
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
mkdir -p "$work"/made/{bin,sbin}
"$(dirname "$0")/../debian-packages.sh" "$work/made/root" "$suite" '^(lib|slurm|zlib)' \
  slurmctld slurmd slurm-client slurmdbd slurm-wlm-basic-plugins slurm-wlm-mysql-plugin

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
