"""Choosing how to spread a training step over a cluster, by plans of what is most promising.

    1. `tune.choices`: every layout that the settings' own checks allow, with the others' messages.
    2. `tune.block`: what a microbatch takes, captured and priced once for all layouts that compute alike.
    3. `tune.estimate`: a bound of every layout in closed form, and an estimate of every candidate.
    4. `tune.funnel`: short steps of the most promising candidates are simulated and the best of them planned,
       until no other can win by its bound, is likely to by its estimate, or the time is over; then the best
       are planned in full (`tune.finals`).
    5. `tune.workers`: captures and plans are made in processes of their own (`tune.work`).

The global batch is kept, so that candidates compare by the step alone.
"""
