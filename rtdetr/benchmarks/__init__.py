"""`rtdetr benchmark`: what is measured, a file for each. Only the command line imports from here."""
