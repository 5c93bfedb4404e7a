"""What each command of `rtdetr` does: its arguments, and the work. torch is imported by the work alone."""
