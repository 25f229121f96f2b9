"""Training commands of Megatron-LM and MindSpeed become settings of a run (`convert.megatron`)."""
