#!/bin/bash
# Prepare one ParallelCluster node for trnslurm, and refuse a node that cannot train.
#
#   node-setup.sh [head|cpu]
#
# It checks the devices that the node's instance type has; of `head` and `cpu`, none.
# ParallelCluster runs it as root (CustomActions/OnNodeConfigured), once per node, after the node is
# configured and before slurmd starts. Its output is in /var/log/cloud-init-output.log. If it fails,
# the node is replaced, so a broken node never joins the queue. It can be run again at any time; a
# second run changes nothing. It installs nothing: drivers belong in the image.
#
# TRNSLURM_ROOT, for tests, is put before every path that is read or written.

set -Eeuo pipefail
umask 022

# Instance type, Neuron devices, GPUs, EFA interfaces: those of trnslurm/config/catalog.py, as a test
# compares. Those of EC2: aws ec2 describe-instance-types, NeuronInfo, GpuInfo, NetworkInfo.EfaInfo.
types='
trn1.2xlarge 1 0 0
trn1.32xlarge 16 0 8
trn1n.32xlarge 16 0 16
trn2.3xlarge 1 0 1
trn2.48xlarge 16 0 16
trn2u.48xlarge 16 0 16
p4d.24xlarge 0 8 4
p4de.24xlarge 0 8 4
p5.4xlarge 0 1 1
p5.48xlarge 0 8 32
p5e.48xlarge 0 8 32
p5en.48xlarge 0 8 16
p6-b200.48xlarge 0 8 8
p6-b300.48xlarge 0 8 16
p6e-gb200.36xlarge 0 4 4
g6e.xlarge 0 1 0
g6e.2xlarge 0 1 0
g6e.4xlarge 0 1 0
g6e.8xlarge 0 1 1
g6e.12xlarge 0 4 1
g6e.16xlarge 0 1 1
g6e.24xlarge 0 4 2
g6e.48xlarge 0 8 4
g5.xlarge 0 1 0
g5.2xlarge 0 1 0
g5.4xlarge 0 1 0
g5.8xlarge 0 1 1
g5.12xlarge 0 4 1
g5.16xlarge 0 1 1
g5.24xlarge 0 4 1
g5.48xlarge 0 8 1
g6.xlarge 0 1 0
g6.2xlarge 0 1 0
g6.4xlarge 0 1 0
g6.8xlarge 0 1 1
g6.12xlarge 0 4 1
g6.16xlarge 0 1 1
g6.24xlarge 0 4 1
g6.48xlarge 0 8 1
g7e.2xlarge 0 1 0
g7e.4xlarge 0 1 0
g7e.8xlarge 0 1 1
g7e.12xlarge 0 2 1
g7e.24xlarge 0 4 2
g7e.48xlarge 0 8 4
g7.2xlarge 0 1 0
g7.4xlarge 0 1 0
g7.8xlarge 0 1 1
g7.12xlarge 0 2 1
g7.24xlarge 0 4 1
g7.48xlarge 0 8 2
'

root=${TRNSLURM_ROOT:-}
# Where the Neuron and EFA packages put their programs; not on the PATH of a booting node.
PATH="$PATH:$root/opt/aws/neuron/bin:$root/opt/amazon/efa/bin"
problems=0

log() { printf '%s node-setup: %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$*"; }

# ParallelCluster quotes only stderr when a node fails, so the reason must be there.
problem() {
    log "error: $*" >&2
    problems=$((problems + 1))
}

trap 'log "error: line $LINENO: $BASH_COMMAND failed" >&2' ERR

# Write stdin to a file, in place (owner, mode and links stay), only if that changes it.
update_file() {
    local path=$1 content
    content=$(cat)
    if [[ -f $path && $(<"$path") == "$content" ]]; then
        log "$path: unchanged"
        return
    fi
    mkdir -p "${path%/*}"
    printf '%s\n' "$content" >"$path"
    log "$path: written"
}

start_imds() {
    token=$(curl --silent --fail --max-time 5 --retry 3 --request PUT \
        --header 'X-aws-ec2-metadata-token-ttl-seconds: 60' http://169.254.169.254/latest/api/token)
}

imds() {
    curl --silent --fail --max-time 5 --retry 3 --header "X-aws-ec2-metadata-token: $token" \
        "http://169.254.169.254/latest/meta-data/$1"
}

# The address of the first network card's first interface: what EC2 and Slurm (NodeAddr) call the
# node's address. The metadata's own order of interfaces is arbitrary on types with several cards.
primary_address() {
    local macs mac device card
    macs=$(imds network/interfaces/macs/)
    for mac in $macs; do
        mac=network/interfaces/macs/${mac%/}
        device=$(imds "$mac/device-number")
        # Types with one card do not have this entry.
        card=$(imds "$mac/network-card") || card=0
        if [[ $device == 0 && $card == 0 ]]; then
            imds "$mac/local-ipv4s" | head -n 1
            return
        fi
    done
    return 1
}

# trn1.32xlarge has 8 network cards. Before ParallelCluster 3.15 each one had an address, and
# /etc/hosts has been seen to map the node's own name to the wrong one
# (https://github.com/aws-neuron/aws-neuron-parallelcluster-samples). Remove the name from
# lines with another address, and keep one line with the right one. Names are compared as whole
# words: compute-dy-trn1-1 is also the beginning of compute-dy-trn1-10.
fix_hosts() {
    local name address fixed fqdn
    name=$(hostname)
    name=${name%%.*}
    address=$(primary_address) || {
        problem "no primary IPv4 address from the instance metadata service (169.254.169.254)"
        return
    }
    # Into a variable first: should awk fail, the file stays as it is.
    fixed=$(awk -v name="$name" -v address="$address" '
        function own(word) { return word == name || index(word, name ".") == 1 }
        /^[[:space:]]*(#|$)/ { line[++count] = $0; next }
        {
            mine = ""; others = ""
            for (i = 2; i <= NF && $i !~ /^#/; i++)
                if (own($i)) mine = mine " " $i; else others = others " " $i
            if (mine == "") { line[++count] = $0; next }
            if ($1 == address) { line[++count] = $0; right = 1; next }
            if (others != "") line[++count] = $1 others
            if (moved == "") moved = address mine
        }
        END {
            for (i = 1; i <= count; i++) print line[i]
            if (!right) print (moved == "" ? address " " name : moved)
        }' "$root/etc/hosts")
    update_file "$root/etc/hosts" <<<"$fixed"
    log "own name: $name at $address"

    fqdn=$(hostname --fqdn 2>/dev/null) || fqdn=$name
    # trnslurm passes addresses; other programs fail with `Invalid NCCL_COMM_ID` on long names.
    if ((${#fqdn} > 63)); then
        log "warning: the full name $fqdn has ${#fqdn} characters, Neuron takes 63:" \
            "use a shorter cluster name"
    fi
}

# For ssh sessions: jobs have slurmd's limits, and ParallelCluster's slurmd.service has the same
# values. Open files: one socket per pair of ranks. Locked memory: EFA pins its buffers.
set_limits() {
    update_file "$root/etc/security/limits.d/99-trnslurm.conf" <<'EOF'
# Written by trnslurm's node-setup.sh
* - nofile 131072
* - memlock unlimited
EOF
}

# trnslurm takes its rendezvous ports from 20000-29999, so the kernel must not hand them out for
# outgoing connections. Ports that others reserved stay reserved.
set_kernel_parameters() {
    local file=$root/etc/sysctl.d/99-trnslurm.conf ports
    ports=$(sysctl --values net.ipv4.ip_local_reserved_ports)
    ports=$(printf '%s\n' "${ports//,/$'\n'}" 20000-29999 | sed /^$/d | sort -n | uniq | paste -sd,)
    update_file "$file" <<EOF
# Written by trnslurm's node-setup.sh
# 32 or 64 workers with their compilers and data loaders start very many threads.
kernel.threads-max = 10000000
net.ipv4.ip_local_reserved_ports = $ports
EOF
    sysctl --quiet --load "$file"
}

check_neuron() {
    local expected=$1 devices libraries
    shopt -s nullglob
    devices=("$root"/dev/neuron[0-9]*)
    libraries=("$root"/opt/aws/neuron/lib/libnccom.so*)
    shopt -u nullglob
    log "Neuron devices: ${#devices[@]}"
    if ((${#devices[@]} != expected)); then
        problem "found ${#devices[@]} Neuron devices (/dev/neuron*), expected $expected: is" \
            "aws-neuronx-dkms in the image and built for kernel $(uname -r)?"
    fi
    if ((${#libraries[@]} == 0)); then
        problem "no /opt/aws/neuron/lib/libnccom.so: aws-neuronx-collectives is not in the image"
    fi
    if ! command -v neuron-ls >/dev/null; then
        problem "no neuron-ls: aws-neuronx-tools is not in the image"
    fi
}

check_gpus() {
    local expected=$1 gpus
    gpus=$(nvidia-smi --list-gpus | grep -c '^GPU ') || true
    log "GPUs: $gpus"
    if ((gpus != expected)); then
        problem "nvidia-smi lists $gpus GPUs, expected $expected: is NVIDIA's driver in the image" \
            "and loaded (modinfo nvidia), and what does dmesg say of Xid?"
    fi
}

count_efa() {
    local interface interfaces=0
    shopt -s nullglob
    for interface in "$root"/sys/class/infiniband/*; do
        # p6-b200 also has two controllers of NVLink there, of mlx5_core.
        case $(readlink "$interface/device/driver") in
        */efa | '') interfaces=$((interfaces + 1)) ;;
        esac
    done
    shopt -u nullglob
    echo "$interfaces"
}

check_efa() {
    local expected=$1 interfaces late
    interfaces=$(count_efa)
    # Those of p5en may come some seconds late (awslabs/awsome-distributed-ai,
    # 4.validation_and_observability/2.gpu-cluster-healthcheck/checks/2-efa-enumeration.sh).
    for ((late = 0; late < 15 && interfaces < expected; late++)); do
        sleep 1
        interfaces=$(count_efa)
    done
    log "EFA interfaces: $interfaces"
    if ((interfaces < expected)); then
        problem "found $interfaces EFA interfaces, expected $expected: set Efa/Enabled" \
            "to true on the compute resource, and use an image with the EFA driver (modinfo efa)"
    fi
    if ! command -v fi_info >/dev/null; then
        problem "no fi_info: libfabric (the EFA installer) is not in the image"
    elif ! fi_info --provider efa >/dev/null; then
        problem "libfabric finds no efa provider: run 'fi_info --provider efa' on the node"
    fi
}

# Ask the node for its type, not the cluster file: then the two cannot differ.
check_devices() {
    local type name neuron gpus efa
    type=$(imds instance-type) || {
        problem "no instance type from the instance metadata service (169.254.169.254)"
        return
    }
    while read -r name neuron gpus efa; do
        if [[ $name == "$type" ]]; then
            log "instance type $type"
            if ((neuron > 0)); then check_neuron "$neuron"; fi
            if ((gpus > 0)); then check_gpus "$gpus"; fi
            if ((efa > 0)); then check_efa "$efa"; fi
            return
        fi
    done <<<"$types"
    log "instance type $type: not in the table of this script, so no devices are checked"
}

main() {
    local token=
    log "role ${1:-of the instance type}"
    start_imds || true  # what needs it says so
    fix_hosts
    set_limits
    set_kernel_parameters
    case ${1:-} in
    head | cpu) ;;
    *) check_devices ;;
    esac
    if ((problems > 0)); then
        log "error: $problems problem(s), named above; this node is not usable" >&2
        exit 1
    fi
    log "done"
}

main "$@"
