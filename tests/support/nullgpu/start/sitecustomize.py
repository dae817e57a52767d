"""Each process of Python on the null device imports this first."""

from tests.support.nullgpu import collectives, numbers

numbers.replace()
collectives.stand_for_nccl()
