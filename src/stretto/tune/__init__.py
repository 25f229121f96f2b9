"""Choosing how a training step is laid out on a cluster, by plans of what is most promising.

1. `tune.choices`: every layout that the settings' own checks allow, with the others' messages.
2. `tune.block`: what a microbatch takes, captured and priced once for all layouts that compute the same.
3. `tune.estimate`: a bound of every layout in closed form, and an estimate of every candidate.
4. `tune.search`: the best by estimate become short steps, and the best of these plans.
5. `tune.work`: what of this is done in processes of their own.
"""
