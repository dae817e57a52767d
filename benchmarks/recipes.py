"""What `plan` says of the ready runs in config/, each on machines on which it fits.

python -m benchmarks.recipes
"""

from config.resolve import resolve_settings
from mamba_fsdp.planning.devices import INSTANCES
from mamba_fsdp.planning.estimate import Estimate, estimate

MACHINES = {  # recipe: (nodes, instance)
    "demo": (1, "g5.xlarge"),
    "wikitext103": (1, "g5.12xlarge"),
    **{
        f"mamba{size}": (nodes, "p4d.24xlarge")
        for sizes, nodes in {
            ("-130m", "-370m", "2-130m", "2-370m"): 1,
            ("-790m", "-1.4b", "2-780m", "2-1.3b"): 4,
            ("-2.8b", "2-2.7b"): 8,
        }.items()
        for size in sizes
    },
    "mambaoutai": (16, "p4de.24xlarge"),
    "bamba-9b": (24, "p4de.24xlarge"),
    "llama2_7b": (16, "p4de.24xlarge"),
    "llama2_13b": (16, "p4de.24xlarge"),
    "llama2_34b": (32, "p4de.24xlarge"),
    "llama2_70b": (32, "p4de.24xlarge"),
}
WIKITEXT = 103_000_000  # tokens of its training split, about


def planned(name: str) -> tuple[Estimate, int]:
    """(what is expected of a recipe on its machines, its tokens)."""
    settings, _ = resolve_settings({}, name)
    nodes, instance = MACHINES[name]
    plan = estimate(settings, nodes, INSTANCES[instance])
    epochs = settings.training.num_epochs
    return plan, int(epochs * WIKITEXT) if epochs else settings.training.num_steps.tokens(
        plan.tokens_per_step
    )


def table() -> str:
    lines = [
        "| recipe | machines | GB of a device | tokens | tokens/s | days |",
        "|---|---|---|---|---|---|",
    ]
    for name, (nodes, instance) in MACHINES.items():
        plan, tokens = planned(name)
        lines.append(
            f"| {name} | {nodes} x {instance} | {plan.total_bytes / 1e9:.1f} of {plan.machine.memory} | "
            f"{tokens / 1e9:,.4g}B | {plan.tokens_per_second:,.0f} | {plan.days(tokens):.3g} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
