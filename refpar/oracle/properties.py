"""Properties of the sharded run: plain functions property(world, situation) that raise one sentence where they do not hold.

pytest draws their situations, `verify` walks a list of them, and a fault is killed by one of them.
"""
from __future__ import annotations

from refpar.oracle.judge import judge
from refpar.oracle.situation import Situation


def sharded_equals_single(world, situation: Situation):
    """The master property: shard, run, unshard equals run.  Loss, input gradients, every parameter's gradient (raw, before
    clipping), the gradient's norm, weights and optimizer state after each step; replicas bitwise alike; nothing held or sent
    beyond what the placements and formulas say."""
    complaint = judge(world, situation).complaint
    if complaint:
        raise AssertionError(f"{complaint} ({situation.command()})")
