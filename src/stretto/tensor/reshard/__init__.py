"""Resharding: a tensor goes from one layout to another, within a mesh or between meshes.

    arguments    what a reshard is asked to do, checked; layouts in short: 2x4:S0RR
    tasks        what must move: each distinct box, who has it, who needs it; what each mode sends for it
    timeline     when each transfer runs on the hosts' links
    order        who sends, and in which order
    plan         all of these together, and the time that no plan can be under:
                 `plan_reshard`, `plan_reshards`, `plan_together`
    execute      a plan carried out by ranks
    lines        messages between ranks
    agree        all ranks make the same reshards
    move         `reshard` and `reshard_all`

Only the last four need a process group.
"""
