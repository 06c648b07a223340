"""What is made of the kernel's log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtrain.failures import kernel
from dtrain.failures.kernel import KernelMessage, concerning, understand

CATALOGUE: dict[str, Any] = yaml.safe_load(
    Path(kernel.__file__).with_name("kernel.yaml").read_text()
)
NOW = 1_700_000_000.0
ADDRESSES = ["0000:17:00.0", "0000:3b:00.0", "0000:65:00.0", "0000:b1:00.0"]
OFF_THE_BUS = (
    "NVRM: Xid (PCI:0000:b1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
)
PAGE_FAULT = (
    "NVRM: Xid (PCI:0000:17:00): 31, pid=4242, name=python, Ch 00000008, intr 00000000. MMU Fault:"
    " ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f2c_8a000000. Fault is of type FAULT_PDE"
    " ACCESS_TYPE_VIRT_READ"
)
KILLED = (
    "Out of memory: Killed process 4242 (python) total-vm:92484556kB, anon-rss:61143224kB,"
    " file-rss:0kB, shmem-rss:452kB, UID:1011 pgtables:588kB oom_score_adj:0"
)
DISK = "blk_update_request: I/O error, dev nvme0n1, sector 2048 op 0x0:(READ) flags 0x80700"
SAMPLES = {
    "out-of-memory-killer": [
        KILLED,
        "Out of memory: Kill process 4242 (python) score 912 or sacrifice child",
    ],
    "cgroup-out-of-memory-killer": [
        "Memory cgroup out of memory: Killed process 4242 (python) total-vm:1056kB, anon-rss:1kB",
    ],
    "file-system-error": [
        "EXT4-fs error (device nvme1n1p1): ext4_find_entry:1455: inode #2: comm python: reading"
    ],
    "file-system-shut-down": [
        "XFS (dm-3): Corruption of in-memory data detected.  Shutting down filesystem",
        "XFS (sdb1): log I/O error -5, shutting down",
    ],
    "disk-error": [
        DISK,
        "I/O error, dev sda, sector 7814037160 op 0x1:(WRITE) flags 0x0 phys_seg 1 prio class 2",
        "Buffer I/O error on dev dm-0, logical block 1, lost async page write",
        "Buffer I/O error on device sdc1, logical block 512",
    ],
}


def one(line: str, *gpus: int) -> KernelMessage:
    (message,) = understand([(NOW, line)], ADDRESSES, gpus)
    return message


def test_every_kind_has_a_sample() -> None:
    assert [entry["id"] for entry in CATALOGUE["messages"]] == list(SAMPLES)


@pytest.mark.parametrize(
    ("kind", "line"), [(kind, line) for kind, lines in SAMPLES.items() for line in lines]
)
def test_a_sample_is_understood(kind: str, line: str) -> None:
    message = one(line)
    assert message.id == kind
    assert "{" not in message.what
    assert message.pid == (4242 if message.out_of_memory else None)


@pytest.mark.parametrize("code", CATALOGUE["xids"])
def test_every_xid_makes_a_sentence(code: int) -> None:
    message = one(f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=7, name=python, x", 1)
    assert message.what == f"GPU 1 {CATALOGUE['xids'][code]['what']} (Xid {code})"
    assert message.remedy
    assert message.host is not message.weak  # the host's fault, or the script's


@pytest.mark.parametrize(
    "line",
    [
        "usb 1-2: new high-speed USB device number 4 using xhci_hcd",
        "NVRM: Xid (PCI:0000:17:00): 45, pid=4242, name=python, Ch 00000008",
        "NVRM: Xid (PCI:0000:17:00): 63, pid=7, Row Remapper: New row marked for remapping",
        "",
    ],
)
def test_what_is_no_trouble(line: str) -> None:
    assert understand([(NOW, line)], ADDRESSES, [0, 1, 2, 3]) == []


def test_a_gpu_is_named_by_its_number() -> None:
    message = one(OFF_THE_BUS, 0, 1, 2, 3)
    assert message.what == "GPU 3 fell off the bus (Xid 79)"
    assert (message.gpu, message.pid, message.host) == (3, None, True)


@pytest.mark.parametrize("place", ["PCI:0000:b1:00", "0000:b1:00", "PCI:B1:00"])
def test_drivers_write_addresses_in_several_ways(place: str) -> None:
    (message,) = understand([(NOW, f"NVRM: Xid ({place}): 79, GPU has fallen")], ADDRESSES, [3])
    assert message.gpu == 3


def test_a_gpu_without_a_number_is_named_by_its_address() -> None:
    (message,) = understand([(NOW, OFF_THE_BUS)], [], [0])
    assert message.what == "the GPU at 0000:b1:00 fell off the bus (Xid 79)"


def test_other_gpus_than_the_jobs_are_no_concern() -> None:
    assert understand([(NOW, OFF_THE_BUS)], ADDRESSES, [0, 1, 2]) == []
    assert understand([(NOW, OFF_THE_BUS)], [], []) == []


def test_a_process_is_concerned_by_its_own_end_and_by_the_hosts_faults() -> None:
    killed, fault, broken = one(KILLED), one(PAGE_FAULT, 0), one(OFF_THE_BUS, 3)
    everything = [fault, killed, broken]
    assert concerning(everything, 4242, "", NOW) == killed
    assert concerning([fault], 4242, "", NOW) == fault
    assert concerning([fault, killed], 4243, "", NOW) is None
    assert concerning(everything, 4243, "", NOW) == broken
    assert concerning([killed], None, "", NOW) is None


def test_a_hosts_fault_of_long_ago_is_not_to_blame() -> None:
    broken, fault = one(OFF_THE_BUS, 3), one(PAGE_FAULT, 0)
    said = "ValueError: bad batch"
    assert concerning([broken], 7, said, NOW + 50) == broken
    assert concerning([broken], 7, said, NOW - 5) == broken
    assert concerning([broken], 7, said, NOW + 3600) == replace(broken, host=False, weak=True)
    assert concerning([fault], 4242, said, NOW + 3600) == fault
    named = one(OFF_THE_BUS.replace("'<unknown>'", "7"), 3)
    assert concerning([named], 7, said, NOW + 3600) == named


def test_a_disk_concerns_who_could_not_use_it() -> None:
    disk = one(DISK)
    assert disk.what == "the disk nvme0n1 failed to read or write"
    assert concerning([disk], 1, "OSError: [Errno 5] Input/output error: 'data.bin'", NOW) == disk
    assert concerning([disk], 1, "ValueError: bad batch", NOW) is None
