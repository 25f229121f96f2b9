"""Resharding: a tensor goes from one layout to another, within a mesh or between meshes.

    tasks        what must move: each distinct box, who holds it, who needs it
    modes        how a box goes to several ranks: point to point, or a chain
    order        who sends, and in which order
    rounds       an order in which as many hosts as can send and receive at once
    timeline     when each transfer runs on the hosts' links
    bound        the time that no plan can be under
    plan         all of these together: `plan_reshard`, `plan_reshards`
    forwarding   tensors that several meshes need at one time: `plan_together`
    notation     layouts in short: 2x4:S0RR

None of these needs a device or a process group.
"""
