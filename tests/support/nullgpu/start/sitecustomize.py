"""Every Python process on the null device imports this module first."""

from tests.support.nullgpu import collectives, numbers

numbers.replace()
collectives.stand_for_nccl()
