"""Describes devices and the cloud machines that hold them, from published data: vendors' data sheets and AWS's pages.

A100, H100, H200, L4 and L40S: NVIDIA's data sheets of the cards; a figure "with sparsity" is halved. B200 and B300: the
data sheet of HGX; GB200 and GB300: the data sheets of the superchips, which run faster. A10G: AWS's page of G5. GeForce
and RTX: NVIDIA's architecture white papers, for products of bf16 summed in fp32. Networks: AWS's specifications of
accelerated instances.
"""

from dataclasses import dataclass

# Dense bf16 matrix peak of one device with fp32 sums, in TFLOP/s, by the words of the device's name.
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
OTHER_SIZES = {"MIG", "Laptop", "Ti", "D"}  # words that name a part of a device or another device


@dataclass(frozen=True)
class Instance:
    """A kind of machine. The memory is the amount that the driver shows; the rates of links are for one direction."""

    device: str
    devices: int
    memory: float  # GB of a device
    bandwidth: float = 0.0  # GB/s of a device's memory; 0: unknown
    nvlink: float = (
        32  # GB/s from a device to the others of its machine; PCIe 4.0 x16 if it has no NVLink
    )
    network: float = 10  # Gbit/s from the machine to others, by EFA if it has EFA
    peak: float = 0.0  # TFLOP/s of a device in bf16; 0: as PEAK_TFLOPS has it for `device`

    def tflops(self) -> float:
        """Returns the peak of a device in TFLOP/s, or 0 if the peak or the memory's bandwidth is unknown: a time needs
        both."""
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
    """Returns the peak FLOP/s of a device named as in `nvidia-smi`, or None for an unknown device or a part of one."""
    words = set(device_name.replace("-", " ").split())
    fits = [name for name in PEAK_TFLOPS if words.issuperset(name.split())]
    if not fits or words & OTHER_SIZES:
        return None
    return PEAK_TFLOPS[max(fits, key=len)] * 1e12
