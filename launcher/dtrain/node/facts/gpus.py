"""Facts about GPUs, from their drivers."""

from __future__ import annotations

import contextlib
import json
import os
import re

from dtrain.node.facts.probing import MAX_ERROR
from dtrain.node.facts.programs import plain, run
from dtrain.node.files import find_program, listed, number, text_of, user_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from dtrain.node.facts.files import Json
    from dtrain.node.facts.orders import GatherOrder

TOOL_LIMIT = 30.0
"""Seconds for a vendor's tool."""


def gpus(_request: GatherOrder) -> Json:
    found: Json = {"pci": pci_gpus()}
    for name, look in (("nvidia-smi", nvidia), ("rocm-smi", rocm)):
        if tool := find_program(name):
            return {**found, "tool": name, **look(tool)}
    return found


def failed(status: int | None, *said: str) -> Json:
    """The fact about a tool that ended with ``status``, or has not answered. ``said``: what it
    printed, first where it explains errors."""
    if status is None:
        return {"error": "no answer in %g s" % TOOL_LIMIT}
    words = next(filter(None, map(str.strip, said)), "status %d" % status)
    return {"error": words.splitlines()[0][:MAX_ERROR]}


def pci_gpus() -> Json:
    """The number of display and accelerator devices on the bus by vendor, with or without a
    driver."""
    vendors = {"0x10de": "NVIDIA", "0x1002": "AMD"}
    found: Json = {}
    base = "/sys/bus/pci/devices"
    for device in listed(base):
        vendor = vendors.get(text_of("%s/%s/vendor" % (base, device)) or "")
        kind = text_of("%s/%s/class" % (base, device)) or ""
        if vendor and kind.startswith(("0x0300", "0x0302", "0x0380", "0x1200")):
            found[vendor] = found.get(vendor, 0) + 1
    return found


def nvidia(tool: str) -> Json:
    """The output of `nvidia-smi -q -x`. XML is the same in every locale."""
    status, out, err = run([tool, "-q", "-x"], TOOL_LIMIT, environment=plain())
    if status != 0:
        return failed(status, out, err)
    from xml.etree import ElementTree

    root = ElementTree.fromstring(out)
    return {
        "driver": root.findtext("driver_version"),
        "cuda": root.findtext("cuda_version"),
        "gpus": [nvidia_gpu(index, node) for index, node in enumerate(root.iter("gpu"))],
        "xids": xids(),
    }


def nvidia_gpu(index: int, node: Any) -> Json:
    def text(*paths: str) -> str | None:
        found = (node.findtext(path) for path in paths)
        return next((one for one in found if one and one != "N/A"), None)

    def size(path: str) -> int | None:
        found = number(text(path))
        return None if found is None else found << 20

    reasons = node.find("clocks_event_reasons")
    if reasons is None:
        reasons = node.find("clocks_throttle_reasons")
    ecc = node.find("ecc_errors/volatile")
    uncorrected = [
        number(one.text)
        for one in (ecc.iter() if ecc is not None else ())
        if re.fullmatch(r"(sram|dram)_uncorrectable(_parity|_secded)?", one.tag)
        or (one.tag == "total" and one is ecc.find("double_bit/total"))
    ]
    return {
        "index": index,
        "name": text("product_name"),
        "uuid": text("uuid"),
        "bus": node.get("id"),
        "memory": size("fb_memory_usage/total"),
        "used": size("fb_memory_usage/used"),
        "mig": text("mig_mode/current_mig"),
        "compute_mode": text("compute_mode"),
        "temperature": number(text("temperature/gpu_temp")),
        "uncorrected": sum(value or 0 for value in uncorrected) if uncorrected else None,
        "remap_pending": text(
            "remapped_rows/remapped_row_pending", "retired_pages/pending_retirement"
        ),
        "remap_failed": text("remapped_rows/remapped_row_failure"),
        "slowed": [
            re.sub(r"^clocks_(event|throttle)_reason_", "", one.tag)
            for one in (reasons if reasons is not None else ())
            if (one.text or "").strip() == "Active"
        ],
        "link_width": number(text("pci/pci_gpu_link_info/link_widths/current_link_width")),
        "processes": [nvidia_process(one) for one in node.iter("process_info")],
    }


def nvidia_process(node: Any) -> Json:
    pid = number(node.findtext("pid")) or 0
    used = number(node.findtext("used_memory"))
    user = ""
    with contextlib.suppress(OSError):
        user = user_name(os.stat("/proc/%d" % pid).st_uid)
    return {
        "pid": pid,
        "name": node.findtext("process_name") or "",
        "user": user,
        "used": None if used is None else used << 20,
    }


def xids() -> Json:
    """The number of each Xid error since the boot, if this user may read the kernel's log."""
    for argv in (["journalctl", "-k", "-b", "-q", "-o", "cat", "--no-pager"], ["dmesg"]):
        tool = find_program(argv[0])
        if tool is None:
            continue
        with contextlib.suppress(OSError):
            status, out, _ = run([tool, *argv[1:]], 5.0, environment=plain())
            if status == 0 and out:
                found: dict[str, int] = {}
                for place, code in re.findall(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", out):
                    key = "%s %s" % (place, code)
                    found[key] = found.get(key, 0) + 1
                return found
    return {"error": "cannot read the kernel's log"}


def rocm(tool: str) -> Json:
    asked = ["--showproductname", "--showmeminfo", "vram", "--showuniqueid", "--showdriverversion"]
    status, out, err = run([tool, *asked, "--json"], TOOL_LIMIT, environment=plain())
    start = out.find("{")
    if status != 0 or start < 0:
        return failed(status, err, out)
    table = json.loads(out[start:])

    def value(card: Json, *keys: str) -> str | None:
        lower = {key.lower(): str(text) for key, text in card.items()}
        return next((lower[key] for key in keys if key in lower), None)

    cards = [key for key in table if re.fullmatch(r"card\d+", key)]
    cards.sort(key=lambda key: number(key) or 0)
    return {
        "driver": (table.get("system") or {}).get("Driver version"),
        "gpus": [
            {
                "index": index,
                "name": value(table[card], "card series", "card model", "card sku"),
                "uuid": value(table[card], "unique id"),
                "memory": number(value(table[card], "vram total memory (b)")),
                "used": number(value(table[card], "vram total used memory (b)")),
                "processes": [],
                "slowed": [],
            }
            for index, card in enumerate(cards)
        ],
    }
