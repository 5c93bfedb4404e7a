"""Everything that is wrong with a detection set, in one go: its records, its files, and the two sets of a run."""
