"""Reports all defects of a detection data set: of its records, its image files, and between the two sets of a run."""
