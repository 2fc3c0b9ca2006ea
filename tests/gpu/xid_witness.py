"""Prints each Xid that the driver reports for one GPU, as a check that is independent of the sidecar."""

import sys

import pynvml as nvml


def main() -> None:
    """Print events until the process is ended."""
    nvml.nvmlInit()
    events = nvml.nvmlEventSetCreate()
    handle = nvml.nvmlDeviceGetHandleByUUID(sys.argv[1])
    try:
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
    except nvml.NVMLError as error:
        print("waits", flush=True)
        sys.exit(f"in vain: {error}")
    print("waits", flush=True)
    while True:
        try:
            print(nvml.nvmlEventSetWait_v2(events, 1000).eventData, flush=True)
        except nvml.NVMLError_Timeout:
            continue


if __name__ == "__main__":
    main()
