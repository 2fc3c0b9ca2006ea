"""A program that holds GPU memory and computes, with the driver library alone and no toolkit.

Files that appear in a directory are its orders: ``grow`` (hold twice the memory), ``rest`` (hold the memory and stop
computing), ``fault`` (write to an invalid address), ``end``. It prints a line for each order.
"""

import argparse
import ctypes
import sys
import time
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from pathlib import Path

MIB = 1 << 20
MULTIPROCESSORS = 16  # `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`
BLOCKING_SYNC = 0x4  # `CU_CTX_SCHED_BLOCKING_SYNC`: sleep while waiting for the GPU
THREADS = 256
LAUNCH_NS = 20_000_000  # duration of one kernel
INVALID_ADDRESS = 0x10

_MULTIPLY = "\n".join("    fma.rn.f32 %f1, %f1, %f2, %f3;" for _ in range(64))
PTX = f"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry compute(.param .u64 nanoseconds, .param .u64 result)
{{
    .reg .pred %p<3>;
    .reg .f32 %f<5>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [nanoseconds];
    ld.param.u64 %rd5, [result];
    mov.f32 %f1, 0f3F800000;
    mov.f32 %f2, 0f3F7FFFFE;
    mov.f32 %f3, 0f33000000;
    mov.f32 %f4, 0fBF800000;
    mov.u64 %rd2, %globaltimer;
AGAIN:
{_MULTIPLY}
    mov.u64 %rd3, %globaltimer;
    sub.u64 %rd4, %rd3, %rd2;
    setp.lt.u64 %p1, %rd4, %rd1;
    @%p1 bra AGAIN;
    setp.eq.f32 %p2, %f1, %f4;
    @%p2 st.global.f32 [%rd5], %f1;
    ret;
}}

.visible .entry stray(.param .u64 address)
{{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [address];
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}}
"""  # `compute` multiplies for this time and never writes; `stray` writes to an address

PROTOTYPES: dict[str, tuple[type, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuCtxCreate_v2": (POINTER(c_void_p), c_uint, c_int),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemsetD8_v2": (c_uint64, c_ubyte, c_size_t),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, POINTER(c_void_p), POINTER(c_void_p)),
    "cuCtxSynchronize": (),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}  # from `cuda.h`: handles are pointers, device pointers 64 bits, devices and results `int`


class CudaError(Exception):
    """A failed call, with the error name of the driver."""


class Cuda:
    """The first visible GPU."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._functions: dict[str, Callable[..., int]] = {}
        for name, types in PROTOTYPES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, c_int
            self._functions[name] = function
        self.call("cuInit", 0)
        device, number = c_int(), c_int()
        self.call("cuDeviceGet", byref(device), 0)
        self.call("cuDeviceGetAttribute", byref(number), MULTIPROCESSORS, device)
        self.multiprocessors = number.value
        self._context, self._module = c_void_p(), c_void_p()
        self.call("cuCtxCreate_v2", byref(self._context), BLOCKING_SYNC, device)
        self.call("cuModuleLoadData", byref(self._module), PTX.encode("ascii"))

    def call(self, name: str, *arguments: object) -> None:
        """Call a function; raises CudaError."""
        code = self._functions[name](*arguments)
        if code:
            error_name = c_char_p()
            self._functions["cuGetErrorName"](code, byref(error_name))
            raise CudaError(f"{name}: {(error_name.value or b'unknown error').decode('ascii')} ({code})")

    def hold(self, size: int) -> int:
        """Allocate and fill this many bytes; returns the address."""
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), size)
        self.call("cuMemsetD8_v2", address, 1, size)
        self.call("cuCtxSynchronize")
        return address.value

    def run(self, kernel: str, blocks: int, *arguments: int) -> None:
        """Run a kernel with 64-bit parameters and wait for its end."""
        function = c_void_p()
        self.call("cuModuleGetFunction", byref(function), self._module, kernel.encode("ascii"))
        values = [c_uint64(argument) for argument in arguments]
        pointers = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self.call("cuLaunchKernel", function, blocks, 1, 1, THREADS, 1, 1, 0, None, pointers, None)
        self.call("cuCtxSynchronize")


def say(text: str) -> None:
    """Print a line immediately."""
    print(text, flush=True)


def main() -> None:
    """Hold memory and compute until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-mib", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--blocks", type=int, help="of a kernel; the default fills all multiprocessors")
    parser.add_argument("--rest", action="store_true", help="hold the memory and do not compute")
    parser.add_argument(
        "--orders", type=Path, default=Path("/nonexistent"), help="directory in which order files appear"
    )
    options = parser.parse_args()
    cuda = Cuda()
    size = options.memory_mib * MIB
    result = cuda.hold(size)
    blocks = options.blocks or 4 * cuda.multiprocessors
    resting, grown = options.rest, False
    say(f"holds {options.memory_mib} MiB, {cuda.multiprocessors} multiprocessors, {blocks} blocks")
    end = time.monotonic() + options.seconds
    while time.monotonic() < end and not (options.orders / "end").exists():
        if not grown and (options.orders / "grow").exists():
            grown = True
            cuda.hold(size)
            say(f"holds {2 * options.memory_mib} MiB")
        if not resting and (options.orders / "rest").exists():
            resting = True
            say("rests")
        if (options.orders / "fault").exists():
            say("writes to an invalid address")
            cuda.run("stray", 1, INVALID_ADDRESS)
        if resting:
            time.sleep(0.05)
        else:
            cuda.run("compute", blocks, LAUNCH_NS, result)
    say("done")


if __name__ == "__main__":
    try:
        main()
    except CudaError as error:
        print(f"RuntimeError: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
