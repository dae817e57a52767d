"""What `plan` expects beside training rates that others have published.

    python -m benchmarks.published

One efficiency for each kind of work (mamba_fsdp/planning/roofline.py) serves all rows. Published is in tokens/s of a
device; state-spaces/mamba #904 tells TFLOP/s, which are taken as this project counts them. What a source leaves open
is chosen as is usual there: its machines as the nearest of mamba_fsdp/planning/devices.py, Llama-3 8B with 8,192 tokens of which
half the blocks recompute. fms-fsdp reduces gradients in bf16, half of our bytes: where only they cross the network it
is taken as twice as fast. torch.compile is not in the formulas; fms-fsdp's rates of 2025 have it, those of 2024 do not.
"""

from dataclasses import replace
from typing import NamedTuple

from config.model_config import ModelConfig
from config.presets import preset, usual_length
from config.train_config import TrainConfig
from mamba_fsdp.model.spec import flops_per_token
from mamba_fsdp.planning.devices import INSTANCES, PEAK_TFLOPS, Instance
from mamba_fsdp.planning.estimate import Estimate, estimate

GB200 = Instance("GB200", 1, 185.0, 8000, 900, 400)
MACHINES = {**INSTANCES, "GB200": GB200}


class Published(NamedTuple):
    source: str
    model: str
    machine: str
    devices: int
    batch: int
    rate: float  # of a device, a second
    strategy: str = "fsdp"
    recompute: str = ""
    length: int = 0
    unit: str = "tokens"


PUBLISHED = [
    *(
        Published(
            "mamba #904", "mamba2-1.3b", machine, 1, 4, rate, "none", length=4096, unit="TFLOP"
        )
        for machine, rate in (("p4de.24xlarge", 102.5), ("p5en.48xlarge", 239.2), ("GB200", 360.4))
    ),
    Published("Bamba-9B", "mamba_9.8b", "p4de.24xlarge", 192, 2, 2000),
    *(
        Published(f"fms-fsdp {year}", model, machine, 128, batch, rate, strategy, recompute)
        for year, machine, rates in (
            ("2024", "p4de.24xlarge", (3760, 1700, 772, 380)),
            ("2025", "p4de.24xlarge", (4550, 2150, 820, 410)),
            ("2025", "p5.48xlarge", (9600, 4850, 1830, 890)),
        )
        for rate, (model, strategy, recompute, batch) in zip(
            rates,
            (
                ("llama2_7b", "hsdp", "", 2),
                ("llama2_13b", "hsdp", "", 1),
                ("llama2_34b", "fsdp", "1", 8),
                ("llama2_70b", "fsdp", "1", 6),
            ),
        )
    ),
    Published("Llama-3 8B", "llama3_8b", "p5.48xlarge", 32, 1, 6785, recompute="1/2", length=8192),
]


def expected(row: Published) -> Estimate:
    settings = TrainConfig()
    settings.model = ModelConfig(**preset(row.model))
    settings.data.seq_length, settings.training.batch_size = (
        row.length or usual_length(row.model),
        row.batch,
    )
    settings.parallel.sharding_strategy = row.strategy
    if row.recompute:
        (
            settings.parallel.fsdp_activation_checkpointing,
            settings.parallel.selective_checkpointing,
        ) = True, row.recompute
    machine = MACHINES[row.machine]
    if (
        row.source.startswith("fms-fsdp") and row.strategy == "hsdp"
    ):  # only gradients cross it there
        machine = replace(machine, network=2 * machine.network)
    nodes = max(1, row.devices // machine.devices)
    return estimate(settings, nodes, replace(machine, devices=min(machine.devices, row.devices)))


def rates(row: Published) -> tuple[float, float]:
    """(published, expected), tokens/s of a device."""
    plan, published = expected(row), row.rate
    if row.unit == "TFLOP":
        published = (
            row.rate * 1e12 / flops_per_token(plan.settings.model, plan.settings.data.seq_length)
        )
    return published, plan.tokens_per_second / row.devices


def table() -> str:
    lines = [
        "| source | model | devices | published | expected | difference | share of peak |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in PUBLISHED:
        published, found = rates(row)
        plan, device = expected(row), MACHINES[row.machine].device
        share = (
            found
            * flops_per_token(plan.settings.model, plan.settings.data.seq_length)
            / PEAK_TFLOPS[device]
            / 1e12
        )
        lines.append(
            f"| {row.source} | {row.model} | {row.devices} x {device} | {published:,.0f} | {found:,.0f} | "
            f"{found / published - 1:+.0%} | {share:.0%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
