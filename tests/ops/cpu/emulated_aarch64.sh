#!/bin/sh
# The compiled step on an emulated ARM processor: tokens there against plain PyTorch there, for every kind of weights.
#
#   sudo tests/ops/cpu/emulated_aarch64.sh [FOLDER]
#
# Run by hand, as root, on Debian or Ubuntu; it takes 3 GB in FOLDER (default: /var/tmp/minillm-aarch64) and, because
# everything is emulated, an hour or more. The folder is kept, so that a second run starts at once.
# CPU names the processor for qemu: neoverse-n1 has dot products (sdot), cortex-a72 has none, and both must be right.
set -eu

FOLDER=${1:-/var/tmp/minillm-aarch64}
CPU=${CPU:-neoverse-n1}
HERE=$(cd "$(dirname "$0")/../../.." && pwd)

command -v qemu-aarch64-static >/dev/null && command -v debootstrap >/dev/null ||
    apt-get install --yes qemu-user-static binfmt-support debootstrap

if [ ! -x "$FOLDER/usr/bin/python3" ]; then
    debootstrap --arch=arm64 --include=python3,python3-venv,libgomp1,ca-certificates bookworm "$FOLDER"
fi

mkdir -p "$FOLDER/minillm"
tar -C "$HERE" -cf - minillm lessons tests pyproject.toml README.md LICENSE constraints.txt | tar -C "$FOLDER/minillm" -xf -
cp /etc/resolv.conf "$FOLDER/etc/resolv.conf"

QEMU_CPU=$CPU chroot "$FOLDER" sh -eux <<'INSIDE'
cd /minillm
[ -x /venv/bin/python ] || python3 -m venv /venv
/venv/bin/pip install --quiet -c constraints.txt -e . pytest pytest-timeout hypothesis
export OMP_NUM_THREADS=1
/venv/bin/python -c 'from minillm.ops.cpu.processor import processor; print(processor())'
/venv/bin/python -m pytest -q --timeout 0 tests/ops/cpu tests/runtime/test_cpu_executor.py
INSIDE
