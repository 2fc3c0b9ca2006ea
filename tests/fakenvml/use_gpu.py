"""A worker that pretends to use the GPUs of CUDA_VISIBLE_DEVICES: the fake driver library lists it on them."""

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pynvml as nvml


def visible_uuids() -> list[str]:
    """UUIDs of GPUs, in the order of the driver, and of MIG instances."""
    found: list[str] = []
    for number in range(nvml.nvmlDeviceGetCount()):
        gpu = nvml.nvmlDeviceGetHandleByIndex(number)
        found.append(nvml.nvmlDeviceGetUUID(gpu))
    return found + [uuid for number in range(len(found)) for uuid in instances_of(number)]


def instances_of(number: int) -> list[str]:
    """UUIDs of the MIG instances of one GPU."""
    gpu = nvml.nvmlDeviceGetHandleByIndex(number)
    try:
        slots = nvml.nvmlDeviceGetMaxMigDeviceCount(gpu) if nvml.nvmlDeviceGetMigMode(gpu)[0] else 0
    except nvml.NVMLError:
        return []
    found = []
    for slot in range(slots):
        try:
            found.append(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, slot)))
        except nvml.NVMLError_NotFound:
            continue
    return found


def selected_gpus(uuids: Sequence[str], wanted: str | None) -> list[str]:
    """GPUs that CUDA would select for CUDA_VISIBLE_DEVICES. An invalid entry ends the list."""
    gpus = [uuid for uuid in uuids if uuid.startswith("GPU-")]
    if wanted is None:
        return gpus
    found: list[str] = []
    for entry in filter(None, wanted.split(",")):
        if entry.isdecimal():
            match = gpus[int(entry) : int(entry) + 1]
        else:
            match = [uuid for uuid in uuids if uuid.startswith(entry)]
        if len(match) != 1:
            break
        found += match
    return found


def write_usage(path: Path, uuids: Sequence[str], memory: int, percent: int) -> None:
    """Write the GPU usage of this process atomically."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text("".join(f"{uuid} {memory} {percent}\n" for uuid in uuids))
    temporary.rename(path)


def main() -> None:
    """Use the GPUs until all items are done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0, help="for all items together")
    parser.add_argument("--memory", type=int, default=1 << 30, help="bytes on each GPU")
    parser.add_argument("--grow", type=int, default=0, help="bytes more with each item")
    parser.add_argument("--percent", type=int, default=90, help="of the GPU's time")
    parser.add_argument("--silent-after", type=int, help="number of items after which it continues without output")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    nvml.nvmlInit()
    uuids = selected_gpus(visible_uuids(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    nvml.nvmlShutdown()
    path = Path(os.environ["FAKENVML_PROCESSES"].replace("%h", socket.gethostname()), str(os.getpid()))
    try:
        for done in range(1, options.items + 1):
            write_usage(path, uuids, options.memory + options.grow * (done - 1), options.percent)
            time.sleep(options.seconds / options.items)
            if options.silent_after is None or done <= options.silent_after:
                print(f"Processed {done}/{options.items} items", flush=True)
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
