"""Scenarios of typical GPUs, with realistic numbers."""

from .scenario import ALL_LINKS, FakeGpu, FakeMig, Rate, Scenario

MIB = 1 << 20

OLD_DRIVER_LACKS = (
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetGraphicsRunningProcesses_v2",
    "nvmlDeviceGetMPSComputeRunningProcesses_v2",
    "nvmlGpmMetricsGet",
    "nvmlGpmMigSampleGet",
    "nvmlGpmQueryDeviceSupport",
    "nvmlGpmSampleAlloc",
    "nvmlGpmSampleFree",
    "nvmlGpmSampleGet",
)  # functions newer than driver 450


def uuid_of(number: int, kind: str = "GPU") -> str:
    """A UUID that differs from the others in its first characters."""
    return f"{kind}-{0xA0B1C200 + number:08x}-1111-2222-3333-{number:012x}"


def h200(count: int = 8) -> Scenario:
    """A node of H200 GPUs, busy with training. Its driver reports everything."""
    return Scenario(gpus=[_hopper(i, "NVIDIA H200", 143771 * MIB, 700_000) for i in range(count)])


def mig() -> Scenario:
    """An H100 with three MIG instances and a free slot between them, and an H100 without MIG."""
    divided = _hopper(0, "NVIDIA H100 80GB HBM3", 81559 * MIB, 700_000)
    divided.mig_mode = 1
    # With MIG the driver does not report these for the whole GPU.
    divided.utilization = divided.memory_utilization = None
    divided.rows_corrected = divided.rows_uncorrected = divided.rows_pending = divided.rows_failure = None
    divided.memory_used = 37 * MIB
    divided.migs = [_instance(0, 1, 3, 40448 * MIB), _instance(1, 5, 2, 19968 * MIB), _instance(3, 13, 1, 9984 * MIB)]
    return Scenario(gpus=[divided, _hopper(1, "NVIDIA H100 80GB HBM3", 81559 * MIB, 700_000)])


def old(count: int = 1) -> Scenario:
    """Tesla V100 with driver 450: no GPM, few fields, retired pages, throttle reasons without counters."""
    gpus = [
        FakeGpu(
            uuid=uuid_of(i),
            name="Tesla V100-SXM2-16GB",
            pci_bus_id=f"00000000:{0x1A + i:02X}:00.0",
            pci_device_id=0x1DB110DE,
            memory_total=16160 * MIB,
            memory_used=12000 * MIB,
            utilization=88,
            memory_utilization=41,
            temperature_c=58,
            clock_graphics_mhz=1380,
            clock_sm_mhz=1380,
            clock_memory_mhz=877,
            clock_video_mhz=1237,
            compute_capability=70,
            power_mw=241_000,
            power_limit_mw=300_000,
            energy_mj=Rate(5_000_000_000, 241_000),
            event_reasons=0,
            ecc_corrected=0,
            ecc_uncorrected=0,
            pages_single_bit=2,
            pages_double_bit=0,
            pages_pending=0,
            pcie_replays=0,
            pcie_generation=3,
            pcie_generation_max=3,
            pcie_width=16,
            pcie_width_max=16,
            pcie_tx_kib_s=100_000,
            pcie_rx_kib_s=900_000,
            persistence=0,
            event_types=0x1B,
            fields={82: 51, 83: Rate(5_000_000_000, 241_000)},
        )
        for i in range(count)
    ]
    return Scenario(gpus=gpus, driver="450.80.02", cuda=(11, 0), field_max=150, without=OLD_DRIVER_LACKS)


def _hopper(number: int, name: str, memory: int, limit_mw: int) -> FakeGpu:
    power = limit_mw * 9 // 10
    energy = Rate(80_000_000_000 + number, power)
    nvlink_kib = Rate(900_000_000_000, 210_000_000)
    return FakeGpu(
        uuid=uuid_of(number),
        name=name,
        pci_bus_id=f"00000000:{0x18 + 0x11 * number:02X}:00.0",
        pci_device_id=0x233510DE,
        memory_total=memory,
        memory_used=memory * 3 // 4,
        memory_reserved=536 * MIB,
        utilization=97,
        memory_utilization=55,
        temperature_c=61,
        clock_graphics_mhz=1830,
        clock_sm_mhz=1830,
        clock_memory_mhz=3201,
        clock_video_mhz=1545,
        compute_capability=90,
        power_mw=power,
        power_limit_mw=limit_mw,
        energy_mj=energy,
        event_reasons=0,
        ecc_corrected=0,
        ecc_uncorrected=0,
        rows_corrected=0,
        rows_uncorrected=0,
        rows_pending=0,
        rows_failure=0,
        pcie_replays=0,
        pcie_generation=5,
        pcie_generation_max=5,
        pcie_width=16,
        pcie_width_max=16,
        pcie_tx_kib_s=1_200_000,
        pcie_rx_kib_s=2_400_000,
        persistence=1,
        mig_mode=0,
        mig_max=7,
        event_types=0x1D1B,
        fields={
            74: Rate(12_000_000_000, 20_000_000),  # limited by the power cap for 2 % of the time
            75: 0,
            76: 0,
            82: 68,
            83: energy,
            91: 18,
            94: 0,
            (138, ALL_LINKS): nvlink_kib,
            (139, ALL_LINKS): nvlink_kib,
            (140, ALL_LINKS): nvlink_kib,
            (141, ALL_LINKS): nvlink_kib,
            142: 0,
            143: 0,
            144: 0,
            145: 0,
            160: 0,
            161: 0,
            162: 0,
            163: 0,
            173: 0,
            185: power,
            186: power + 21_000,
            187: 200_000,
            188: limit_mw,
            189: limit_mw,
            190: limit_mw,
            192: limit_mw,
            197: Rate(7_000_000_000, 1_228_800_000),
            198: Rate(9_000_000_000, 2_457_600_000),
            230: 0,
            269: 0,
            270: 0,
            271: 0,
        },
        gpm={
            1: 96.5,
            2: 88.25,
            3: 41.0,
            5: 52.5,
            7: 52.5,
            10: 47.75,
            11: 0.0,
            12: 9.5,
            13: 3.0,
            20: 1_200.0,
            21: 2_400.0,
            60: 205_000.0,
            61: 205_000.0,
        },
    )


def _instance(slot: int, gpu_instance: int, slices: int, memory: int) -> FakeMig:
    return FakeMig(
        slot=slot,
        uuid=uuid_of(0x10 + slot, "MIG"),
        name=f"NVIDIA H100 80GB HBM3 MIG {slices}g.{memory // (9984 * MIB) * 10}gb",
        memory_total=memory,
        memory_used=memory // 4,
        memory_reserved=0,
        gpu_instance=gpu_instance,
        compute_instance=0,
        gpm={1: 90.0, 2: 70.0 + slot, 3: 30.0, 5: 20.0, 10: 25.0},
    )
