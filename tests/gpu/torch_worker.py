"""A PyTorch program that multiplies matrices and holds GPU memory, or exhausts the memory."""

import argparse
import time

import torch  # type: ignore[import-not-found,unused-ignore]  # only where the tests of real hardware run

MIB = 1 << 20
SIDE = 4096


def main() -> None:
    """Work until the time is over or the memory is exhausted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-mib", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--exhaust", action="store_true", help="allocate memory until none is left")
    options = parser.parse_args()
    held = [torch.ones(options.memory_mib * MIB, dtype=torch.uint8, device="cuda")]
    print(f"holds {options.memory_mib} MiB", flush=True)
    if options.exhaust:
        chunk_bytes = torch.cuda.get_device_properties(0).total_memory // 4
        while True:
            held.append(torch.empty(chunk_bytes, dtype=torch.uint8, device="cuda"))
    matrix = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        for _ in range(50):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize()
    print("done", flush=True)


if __name__ == "__main__":
    main()
