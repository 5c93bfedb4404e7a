"""The commands of `rtdetr`: the arguments and the work of each. torch is imported only by the work."""
