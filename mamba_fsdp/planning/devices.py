"""Contains published figures of GPUs and of cloud machines.

A100, H100, H200, L4 and L40S: NVIDIA's data sheets of the cards; figures "with sparsity" are halved. B200 and B300:
NVIDIA's data sheet of HGX. GB200 and GB300: NVIDIA's data sheets of the superchips, where the GPUs run faster. A10G:
AWS's page about G5 instances. GeForce and RTX: NVIDIA's architecture white papers, for bf16 products that are summed in
fp32. Networks: AWS's specifications of accelerated instances.
"""

from dataclasses import dataclass

# Peak TFLOP/s of one device for dense bf16 matrix products with fp32 sums. The keys are words of device names.
PEAK_TFLOPS = {
    "A100": 312,
    "A10G": 70,
    "A10": 125,
    "L4": 121,
    "L40": 181,
    "L40S": 362,
    "H100": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H200": 989,
    "H200 NVL": 835,
    "GH200": 989,
    "B200": 2250,
    "GB200": 2500,
    "B300": 2250,
    "GB300": 2500,
    "RTX A6000": 155,
    "RTX 6000 Ada": 364,
    "RTX PRO 6000": 504,
    "RTX PRO 6000 Max Q": 439,
    "RTX 3090": 71,
    "RTX 4090": 165,
    "RTX 5090": 209,
}
# A device name with one of these words is a slice of a device, or a different model.
VARIANT_WORDS = {"MIG", "Laptop", "Ti", "D"}


@dataclass(frozen=True)
class Instance:
    """A kind of machine. `memory` is the amount that the driver reports. The rates of links are for one direction."""

    device: str
    devices: int
    memory: float  # GB per device
    bandwidth: float = 0.0  # GB/s of the memory of a device; 0: unknown
    # GB/s from a device to the other devices of its machine; the default is PCIe 4.0 x16, without NVLink.
    nvlink: float = 32
    network: float = 10  # Gbit/s from the machine to other machines; with EFA if available
    peak: float = 0.0  # bf16 TFLOP/s of a device; 0: the entry of PEAK_TFLOPS for `device`

    def tflops(self) -> float:
        """Returns the peak of a device in TFLOP/s. Returns 0 if the peak or the memory bandwidth is unknown, because a
        time can't be estimated without both."""
        if not self.bandwidth:
            return 0.0
        return self.peak or PEAK_TFLOPS.get(self.device, 0.0)


INSTANCES = {
    "p4d.24xlarge": Instance("A100", 8, 42.3, 1555, 300, 400),
    "p4de.24xlarge": Instance("A100", 8, 85.0, 2039, 300, 400),
    "p5.4xlarge": Instance("H100", 1, 85.0, 3350, 450, 100),
    "p5.48xlarge": Instance("H100", 8, 85.0, 3350, 450, 3200),
    "p5e.48xlarge": Instance("H200", 8, 150.1, 4800, 450, 3200),
    "p5en.48xlarge": Instance("H200", 8, 150.1, 4800, 450, 3200),
    "p6-b200.48xlarge": Instance("B200", 8, 191.5, 8000, 900, 3200),
    "p6-b300.48xlarge": Instance("B300", 8, 287.0, 8000, 900, 6400),
}


def device_peak(device_name: str) -> float | None:
    """Returns the peak FLOP/s of a device, or None for an unknown device and for a slice of a device.

    device_name: as printed by nvidia-smi."""
    words = set(device_name.replace("-", " ").split())
    fits = [name for name in PEAK_TFLOPS if words.issuperset(name.split())]
    if not fits or words & VARIANT_WORDS:
        return None
    return PEAK_TFLOPS[max(fits, key=len)] * 1e12
