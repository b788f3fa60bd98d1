"""The configurations that are explored whole. Names say who takes part and what is special."""

from __future__ import annotations

from .model import Scenario, TaskSpec

TASK, FAILS = TaskSpec(), TaskSpec(fails=True)
HELD = TaskSpec(held=True)
ONE_EACH = (((0,),), ((1,),))

SMALL = {
    # The park race in full: one producer, launched and not yet launched, waiting and leaving.
    "one task": Scenario((TASK,), (((0,),),)),
    "one task, nothing launched": Scenario((TASK,), (((0,),),), launched=False),
    "one task, unwatched": Scenario((FAILS,), (((0,),),), waits=False),
    "one task, one worker": Scenario((FAILS,), (((0,),),), workers=1),
    "a batch of two": Scenario((TASK, TASK), (((0, 1),),), waits=False),
    # Two producers race for positions and for the relaunch.
    "two producers, one worker": Scenario((TASK, TASK), ONE_EACH, workers=1, waits=False, late_start=False),
    "two producers, no idling": Scenario((TASK, TASK), ONE_EACH, waits=False, idle=False),
    "two producers, more tasks than slots": Scenario(
        (TASK,) * 3, (((0,),), ((1,), (2,))), workers=1, waits=False, idle=False
    ),
    # The host's half of the ring, two servers in the place of launches: full, retire, failures, a lap later.
    "ring: two and two": Scenario((TASK,) * 4, (((0,), (1,)), ((2,), (3,))), served=True, waits=False),
    "ring: one and three": Scenario((TASK,) * 4, (((0,),), ((1,), (2,), (3,))), served=True, waits=False),
    "ring: failures": Scenario((FAILS, TASK, FAILS), (((0, 1),), ((2,),)), served=True),
    "ring: failures a lap later": Scenario((FAILS, TASK, FAILS, TASK), (((0, 1), (2, 3)),), served=True),
    "ring: positions wrap": Scenario(
        (TASK,) * 4, (((0,),), ((1,), (2,), (3,))), served=True, waits=False, start=(1 << 64) - 2
    ),
    # What a task may ask for.
    "after": Scenario((TASK, TaskSpec(after=(0,))), (((0,), (1,)),), waits=False, idle=False),
    "tiles": Scenario((TaskSpec(tiles=2),), (((0,),),)),
    # Other reasons to park.
    "lease": Scenario((TASK,), (((0,),),), idle=False, lease=True),
    "lease, unwatched, a keeper": Scenario(
        (TASK,), (((0,),),), workers=1, waits=False, idle=False, lease=True, keeper=True
    ),
    "a spare launch": Scenario((TASK,), (((0,),),), workers=1, waits=False, spare=True),
    "a spare launch, lease": Scenario((TASK,), (((0,),),), workers=1, idle=False, lease=True, spare=True),
    "park request": Scenario((TASK, TASK), (((0, 1),),), workers=1, idle=False, park_request=True),
    # A stream opens the first task at any moment, and does not look whether anybody serves.
    "withheld": Scenario((HELD,), (((0,),),), workers=1, waits=False, stream=True),
    "withheld, nothing launched": Scenario(
        (HELD,), (((0,),),), workers=1, waits=False, stream=True, launched=False
    ),
    "withheld, waiting instead of a watch": Scenario(
        (HELD,), (((0,),),), workers=1, stream=True, watch=False
    ),
    "withheld, lease": Scenario(
        (HELD,), (((0,),),), workers=1, waits=False, stream=True, idle=False, lease=True
    ),
    # Stores that others see late.
    "stores late: withheld": Scenario(
        (HELD,), (((0,),),), workers=1, waits=False, stream=True, store_buffers=True
    ),
    "stores late: one task": Scenario((TASK,), (((0,),),), workers=1, waits=False, store_buffers=True),
    "stores late: one task, two workers": Scenario((TASK,), (((0,),),), waits=False, store_buffers=True),
}

LARGE = {
    "two one after the other": Scenario((TASK, TASK), (((0,), (1,)),), waits=False, late_start=False),
    "two producers, two workers": Scenario((TASK, TASK), ONE_EACH, waits=False),
    "ring: failures, two and two": Scenario(
        (FAILS, TASK, TASK, FAILS), (((0,), (1,)), ((2,), (3,))), served=True
    ),
    "more tasks than slots, idling": Scenario((TASK,) * 3, (((0, 1, 2),),), workers=1),
    "park request, two workers": Scenario((TASK, TASK), (((0, 1),),), idle=False, park_request=True),
    "withheld, and one behind": Scenario(
        (HELD, TASK), (((0,), (1,)),), workers=1, waits=False, stream=True, late_start=False, launched=False
    ),
    "stores late: two producers": Scenario(
        (TASK, TASK), ONE_EACH, workers=1, waits=False, store_buffers=True, late_start=False
    ),
    "stores late: two in turn": Scenario(
        (TASK, TASK), (((0,), (1,)),), workers=1, store_buffers=True, late_start=False
    ),
}
