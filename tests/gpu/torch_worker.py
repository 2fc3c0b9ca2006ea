"""A PyTorch program: multiplies matrices on the GPU and holds memory there, or asks for more memory than there is."""

import argparse
import time

import torch  # type: ignore[import-not-found,unused-ignore]  # only where the tests of real hardware run

MIB = 1 << 20
SIDE = 4096


def main() -> None:
    """Work until the time is over, or until memory is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-mib", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--exhaust", action="store_true", help="take more and more memory")
    options = parser.parse_args()
    held = [torch.ones(options.memory_mib * MIB, dtype=torch.uint8, device="cuda")]
    print(f"holds {options.memory_mib} MiB", flush=True)
    if options.exhaust:
        part = torch.cuda.get_device_properties(0).total_memory // 4
        while True:
            held.append(torch.empty(part, dtype=torch.uint8, device="cuda"))
    one = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        for _ in range(50):
            torch.mm(one, one)
        torch.cuda.synchronize()
    print("done", flush=True)


if __name__ == "__main__":
    main()
