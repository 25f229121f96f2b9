"""Training commands of Megatron-LM and MindSpeed become settings of a run.

`command` takes the flags from a command or from the table that Megatron prints, `flags` is
the table of what is known, `arguments` reads the flags by it, `model`, `experts`, `layout` and `training`
say what they mean here (`arguments.Tally`), and `megatron` puts all together.
"""
