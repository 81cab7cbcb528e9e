#!/bin/bash
# Put Neuron's driver, collectives, runtime and tools into an image, or refuse one that cannot train.
#
# `pcluster build-image` runs it as root (Build/Components in neuron-image.yaml), after
# ParallelCluster's own installation. It can be run again. The steps are those of AWS's manual
# installation on Ubuntu 24.04 (awsdocs-neuron.readthedocs-hosted.com, setup/pytorch/manual), with
# versions: apt takes the newest otherwise, and a runtime newer than the framework fails in training.
#
# TRNSLURM_ROOT, for tests, is put before every path that is read or written.

set -Eeuo pipefail

sdk=2.29.1  # as neuron_sdk in the cluster profile

case $sdk in
    2.29.1) dkms=2.27.4.0 collectives=2.31.24.0 runtime=2.31.24.0 tools=2.29.22.0 ;;
    2.31.1) dkms=2.29.0.0 collectives=2.33.10.0 runtime=2.33.10.0 tools=2.31.15.0 ;;
    2.33.0) dkms=2.31.7.0 collectives=2.35.43.0 runtime=2.35.30.0 tools=2.33.38.0 ;;  # trn2, trn3
    # Of a later release: a line as above, from its release notes.
    *) printf 'error: sdk=%s: add a line with its versions to this script\n' "$sdk" >&2; exit 1 ;;
esac

root=${TRNSLURM_ROOT:-}
kernel=$(uname -r)
export DEBIAN_FRONTEND=noninteractive

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# First what cannot be helped: without this module no node mounts /fsx.
if ! modinfo --set-version "$kernel" lustre >/dev/null 2>&1; then
    if apt-cache policy "lustre-client-modules-$kernel" | grep -q 'Candidate: [^(]'; then
        apt-get install --yes "lustre-client-modules-$kernel"
    else
        fail "there is no Lustre client for kernel $kernel: take a ParentImage with another kernel," \
            "such as ParallelCluster's own"
    fi
fi

# shellcheck source=/dev/null
. "$root/etc/os-release"
mkdir -p "$root/etc/apt/keyrings"
repository=https://apt.repos.neuron.amazonaws.com
key=$root/etc/apt/keyrings/neuron.asc
curl --fail --silent --show-error --location --retry 3 --output "$key" \
    "$repository/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB"
printf 'deb [signed-by=/etc/apt/keyrings/neuron.asc] %s %s main\n' \
    "$repository" "$VERSION_CODENAME" >"$root/etc/apt/sources.list.d/neuron.list"

apt-get update
apt-get install --yes "linux-headers-$kernel"
apt-get install --yes --allow-downgrades --allow-change-held-packages \
    "aws-neuronx-dkms=$dkms*" \
    "aws-neuronx-collectives=$collectives*" \
    "aws-neuronx-runtime-lib=$runtime*" \
    "aws-neuronx-tools=$tools*"
modinfo --set-version "$kernel" neuron >/dev/null ||
    fail "aws-neuronx-dkms $dkms was not built for kernel $kernel: see /var/lib/dkms"
# An upgrade would bring a kernel without these drivers, or a runtime that fits no framework.
apt-mark hold linux-aws linux-image-aws linux-headers-aws linux-modules-extra-aws \
    aws-neuronx-dkms aws-neuronx-collectives aws-neuronx-runtime-lib aws-neuronx-tools
