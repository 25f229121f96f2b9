"""Command lines of Megatron-LM and MindSpeed become settings of a run.

`shell` reads text as a shell would, `launch` finds the training command in it, `flags` is the table of what
is known, `arguments` reads the command's flags by it, `model`, `layout` and `training` say what they mean
here, and `megatron` puts all together. Touches the settings tree; reads and writes no file.
"""
