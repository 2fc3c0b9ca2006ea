"""Condition of a GPU through NVML: counters of faults and links, once a minute."""

from collections.abc import Iterable

from exporter.gpus.nvidia.calls import NvmlDevice, NvmlFieldReader
from exporter.gpus.records import GpuCondition, RecoveryAction

CORRECTED, UNCORRECTED = 0, 1
VOLATILE = 0
ALL_LINKS = 0xFFFFFFFF
MOST_LINKS = 18  # links tried one by one if their number is unknown

RECOVERY = "recovery"
FIELDS = {RECOVERY: (230, 0)}
RECOVERY_ACTIONS: dict[int, RecoveryAction] = {
    0: "none",
    1: "reset",
    2: "reboot",
    3: "drain_p2p",
    4: "drain_and_reset",
    6: "reset",
    7: "reboot",
}  # `nvmlDeviceGpuRecoveryAction_t`: 6 resets the bus, 7 the system; 5 concerns a domain of several nodes
SINGLE_BIT, DOUBLE_BIT = 0, 1  # cause of a retired page: repeated single-bit errors, or one double-bit error
LINK_COUNT = {"links": (91, 0)}
# Fields for received and sent data, and unit: KiB before the fifth generation, then bytes.
LINK_BYTES = ((139, 138, 1024), (204, 202, 1))
LINK_TOTALS = (38, 45, 52, 59)  # checksum, replay and recovery errors of all links, before the fourth generation
# Error fields by link, then those of the fifth generation. Fields may overlap; only a rising sum matters.
LINK_ERRORS = ((163, 161, 162), (206, 207, 208, 211, 214))


class GpuConditionReader:
    """Condition of one GPU."""

    def __init__(self, device: NvmlDevice) -> None:
        self._device = device
        self._fields = NvmlFieldReader(device, FIELDS)
        self._links = _NvlinkReader(device)

    def read(self) -> GpuCondition:
        """Read all supported values."""
        number, long = self._device.number, self._device.long
        corrected, uncorrected, pending, failure = self._device.value("nvmlDeviceGetRemappedRows") or (None,) * 4
        # Ampere and later remap rows; earlier GPUs retire pages.
        retires = "nvmlDeviceGetRemappedRows" in self._device.unsupported_calls
        fan = number("nvmlDeviceGetFanSpeed")
        received, sent = self._links.traffic()
        return GpuCondition(
            ecc_corrected=long("nvmlDeviceGetTotalEccErrors", CORRECTED, VOLATILE),
            ecc_uncorrected=long("nvmlDeviceGetTotalEccErrors", UNCORRECTED, VOLATILE),
            rows_remapped_corrected=corrected,
            rows_remapped_uncorrected=uncorrected,
            row_remap_pending=_flag(pending),
            row_remap_failure=_flag(failure),
            pages_retired_corrected=self._retired_pages(SINGLE_BIT) if retires else None,
            pages_retired_uncorrected=self._retired_pages(DOUBLE_BIT) if retires else None,
            pages_pending=_flag(number("nvmlDeviceGetRetiredPagesPendingStatus")) if retires else None,
            recovery_action=RECOVERY_ACTIONS.get(int(self._fields.read().get(RECOVERY, -1))),
            pcie_replays=number("nvmlDeviceGetPcieReplayCounter"),
            pcie_generation=number("nvmlDeviceGetCurrPcieLinkGeneration"),
            pcie_generation_max=number("nvmlDeviceGetMaxPcieLinkGeneration"),
            pcie_width=number("nvmlDeviceGetCurrPcieLinkWidth"),
            pcie_width_max=number("nvmlDeviceGetMaxPcieLinkWidth"),
            nvlink_rx_bytes=received,
            nvlink_tx_bytes=sent,
            nvlink_errors=self._links.errors(),
            fan_ratio=None if fan is None else fan / 100,
        )

    def _retired_pages(self, cause: int) -> int | None:
        pages = self._device.value("nvmlDeviceGetRetiredPages", cause)
        return None if pages is None else len(pages)


class _NvlinkReader:
    """NVLink counters of one GPU. The first reading finds the fields that its generation supports."""

    def __init__(self, device: NvmlDevice) -> None:
        self._device = device
        self._links: int | None = None
        self._traffic: tuple[NvmlFieldReader, int] | None = None
        self._errors: NvmlFieldReader | None = None

    def traffic(self) -> tuple[int | None, int | None]:
        """Bytes received and sent since the driver was loaded."""
        if self._links is None:
            self._find_fields()
        if self._traffic is None:
            return None, None
        fields, unit = self._traffic
        values = fields.read()
        if len(values) < len(fields.readable_fields()):
            return None, None  # a sum without some links would look like a reset counter
        received, sent = (sum(value for name, value in values.items() if name.startswith(way)) for way in ("rx", "tx"))
        return int(received) * unit, int(sent) * unit

    def errors(self) -> int | None:
        """Errors of all links."""
        if self._errors is None:
            return None
        values = self._errors.read()
        return int(sum(values.values())) if len(values) == len(self._errors.readable_fields()) else None

    def _find_fields(self) -> None:
        count = NvmlFieldReader(self._device, LINK_COUNT, report_unsupported=False)
        link_count = count.read().get("links")
        links = MOST_LINKS if link_count is None else int(link_count)
        each = range(links)
        traffic: tuple[NvmlFieldReader, int] | None = None
        errors: NvmlFieldReader | None = None
        if links:
            for scope in ((ALL_LINKS,), each):
                for received, sent, unit in LINK_BYTES:
                    if traffic is None and (fields := self._fields(scope, rx=received, tx=sent)):
                        traffic = fields, unit
            errors = self._fields((0,), **{f"e{number}": number for number in LINK_TOTALS})
            for numbers in LINK_ERRORS:
                for scope in ((ALL_LINKS,), each):
                    if errors is None:
                        errors = self._fields(scope, **{f"e{number}": number for number in numbers})
        # Set together: if the GPU fails before, the search runs again.
        self._links, self._traffic, self._errors = links, traffic, errors

    def _fields(self, links: Iterable[int], **numbers: int) -> NvmlFieldReader | None:
        """Reader for fields of these links; None if the device supports none of them."""
        wanted = {f"{name} {link}": (number, link) for name, number in numbers.items() for link in links}
        fields = NvmlFieldReader(self._device, wanted, report_unsupported=False)
        return fields if fields.readable_fields() else None


def _flag(value: float | None) -> bool | None:
    return None if value is None else bool(value)
