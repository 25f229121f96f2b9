"""Resharding: a tensor goes from one layout to another, within a mesh or between meshes.

    arguments    what a reshard is asked to do, checked; layouts in short: 2x4:S0RR
    tasks        what must move, what each mode sends for it, and when that runs on the hosts' links
    order        who sends, and in which order
    plan         all of these together, and the time that no plan can be under
    execute      a plan carried out by ranks, in messages
    agree        all ranks make the same reshards
    move         `reshard` and `reshard_all`

Only the last three need a process group.
"""
