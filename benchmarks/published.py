"""Compares the predictions of `plan` with training rates that other projects have published.

    python -m benchmarks.published

For each kind of work, all rows use the same efficiency (mamba_fsdp/planning/roofline.py). Published rates are in tokens/s per
device. state-spaces/mamba #904 reports TFLOP/s instead; these rates are converted with the FLOPs that this project counts.

Details that a source does not mention are assumed: the machine is the most similar one in mamba_fsdp/planning/devices.py, and
Llama-3 8B has 8,192 tokens per sequence and recomputes half of its blocks. fms-fsdp reduces gradients in bf16, which are half
of the bytes of this project. If only gradients are sent over the network (hsdp), the network is therefore taken as twice
as fast. The formulas do not include torch.compile. fms-fsdp used it for the rates of 2025, but not for the rates of 2024.
"""

from dataclasses import replace
from typing import NamedTuple

from benchmarks.measure import command_line, table
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.presets import preset
from mamba_fsdp.planning.devices import INSTANCES, PEAK_TFLOPS, Instance
from mamba_fsdp.planning.estimate import Estimate, estimate
from mamba_fsdp.settings.recipes import recipe
from mamba_fsdp.settings.train_config import TrainConfig

A100 = INSTANCES["p4de.24xlarge"]
H100 = INSTANCES["p5.48xlarge"]
H200 = INSTANCES["p5en.48xlarge"]
GB200 = Instance("GB200", 1, 185.0, 8000, 900, 400)


class Published(NamedTuple):
    source: str
    model: str
    machine: Instance
    devices: int
    batch: int
    rate: float  # in `unit` per second and device
    strategy: str = "fsdp"
    recompute: str = ""
    length: int = 0
    unit: str = "tokens"


SMALL = ("llama2_7b", "hsdp", "", 2)
MEDIUM = ("llama2_13b", "hsdp", "", 1)
LARGE = ("llama2_34b", "fsdp", "1", 8)
LARGEST = ("llama2_70b", "fsdp", "1", 6)


def fms(year: str, machine: Instance, rates: tuple[float, ...]) -> list[Published]:
    """Returns the rows of the four models of fms-fsdp on 128 devices. rates: the rate of each model."""
    rows = []
    for rate, (model, strategy, recompute, batch) in zip(rates, (SMALL, MEDIUM, LARGE, LARGEST)):
        network = machine.network * (2 if strategy == "hsdp" else 1)
        nodes = replace(machine, network=network)
        rows.append(
            Published(f"fms-fsdp {year}", model, nodes, 128, batch, rate, strategy, recompute)
        )
    return rows


PUBLISHED = [
    Published("mamba #904", "mamba2-1.3b", A100, 1, 4, 102.5, "none", "", 4096, "TFLOP"),
    Published("mamba #904", "mamba2-1.3b", H200, 1, 4, 239.2, "none", "", 4096, "TFLOP"),
    Published("mamba #904", "mamba2-1.3b", GB200, 1, 4, 360.4, "none", "", 4096, "TFLOP"),
    Published("Bamba-9B", "mamba_9.8b", A100, 192, 2, 2000),
    *fms("2024", A100, (3760, 1700, 772, 380)),
    *fms("2025", A100, (4550, 2150, 820, 410)),
    *fms("2025", H100, (9600, 4850, 1830, 890)),
    Published("Llama-3 8B", "llama3_8b", H100, 32, 1, 6785, recompute="1/2", length=8192),
]


def expected(row: Published) -> Estimate:
    settings = TrainConfig(ModelConfig(**preset(row.model)))
    settings = settings.with_values(
        seq_length=row.length or recipe(row.model)["seq_length"],
        batch_size=row.batch,
        sharding_strategy=row.strategy,
    )
    if row.recompute:
        settings = settings.with_values(
            fsdp_activation_checkpointing=True, selective_checkpointing=row.recompute
        )
    machine = replace(row.machine, devices=min(row.machine.devices, row.devices))
    return estimate(settings, row.devices // machine.devices, machine)


def rates(row: Published) -> tuple[float, float]:
    """Returns (published, predicted) tokens/s per device."""
    found = expected(row)
    rate = found.tokens_per_second / row.devices
    if row.unit == "TFLOP":
        tflops = found.share_of_peak * PEAK_TFLOPS[row.machine.device]
        return row.rate / tflops * rate, rate
    return row.rate, rate


def compared() -> str:
    """Returns the table in benchmarks/RESULTS.md."""
    rows = []
    for row in PUBLISHED:
        published, rate = rates(row)
        cells = {"source": row.source, "model": row.model}
        cells["devices"] = f"{row.devices} x {row.machine.device}"
        cells |= {"published": f"{published:,.0f}", "expected": f"{rate:,.0f}"}
        cells["difference"] = f"{rate / published - 1:+.0%}"
        rows.append(cells | {"share of peak": f"{expected(row).share_of_peak:.0%}"})
    return table(rows)


if __name__ == "__main__":
    command_line(__doc__).parse_args()  # the only option is --help
    print(compared())
